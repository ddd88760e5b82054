"""Progress of long computations. test_tracking.py tests the display of a training run."""

import contextlib
import re

import pytest

from poly_epo_jax.records import progress
from poly_epo_jax.system.pending_calls import pending_call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_printed_first_every_ten_seconds_and_at_the_end(capsys, clock: list[float]):
    with progress.progress_bar("base policy", 10) as show:
        for done in range(1, 11):
            show(done)
            clock[0] += 4.0
    lines = capsys.readouterr().out.splitlines()
    # At 4 s per item: the first item, then each item at least 10 s after the previous line, and the last item.
    assert [re.match(r"base policy (\d+)/10\b", line)[1] for line in lines] == ["1", "4", "7", "10"]  # type: ignore[index]
    assert "left" in lines[1] and "\x1b" not in "".join(lines)


def test_a_terminal_shows_a_bar_and_no_lines(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.progress_bar("tiny on polynomial: problems", 40) as show:
        show(0)
        show(40)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "40/40" in out and "━" in out and "problems 0/40" not in out


def test_pending_calls_are_named_after_20_seconds_and_again_when_this_time_has_doubled(capsys, clock: list[float]):
    lines, printed = progress.WaitingLines(), {}
    with contextlib.ExitStack() as calls:
        for name in "abcd":
            calls.enter_context(pending_call(f"Own.{name}"))
        for clock[0] in map(float, range(60)):
            lines.update()
            if line := capsys.readouterr().out:
                printed[clock[0]] = line
        calls.enter_context(pending_call("Own.e"))  # a call that begins is progress
        for clock[0] in map(float, range(60, 90)):
            lines.update()
            if line := capsys.readouterr().out:
                printed[clock[0]] = line
    waiting = "Waiting for Own.a, Own.b, Own.c and"
    assert printed == {
        20: f"No progress for 20 s. {waiting} 1 more.\n",
        40: f"No progress for 40 s. {waiting} 1 more.\n",
        79: f"No progress for 20 s. {waiting} 2 more.\n",
    }
    clock[0] += 100.0
    lines.update()
    assert not capsys.readouterr().out  # nothing is pending


def test_failed_work_is_not_reported_as_complete(capsys, clock: list[float]):
    with pytest.raises(ValueError, match="broken"), progress.progress_bar("x", 2) as show:
        show(1)
        raise ValueError("broken")
    assert capsys.readouterr().out == "x 1/2\n"


def test_failures_are_printed_when_they_occur_and_at_the_end(capsys, clock: list[float]):
    shown = progress.TrainingProgress(5, 0, "run")
    judge, truncated = "judge/failed_prompts", "response/truncated"
    for step, failed, fraction in ((1, 0, 0.0), (2, 2, 0.0), (3, 3, 0.5), (4, 4, 0.0), (5, 0, 0.0)):
        clock[0] += 1.0
        shown.show(step, {"reward": 1.0, judge: failed, truncated: fraction})
    shown.close()
    first, second, third, last, summary = capsys.readouterr().out.splitlines()[1:]
    assert "failures" not in first and "truncated" not in first
    assert "step 2/5" in second and "judge failures 2" in second
    assert "step 3/5" in third and "judge failures 3" in third and "truncated responses 0.500" in third
    assert "step 5/5" in last and "judge failures 4" in last and "truncated" not in last
    assert summary == "Since step 0: truncated responses 0.100, judge failures 9."


def test_a_run_without_failures_prints_no_summary(capsys, clock: list[float]):
    shown = progress.TrainingProgress(1, 0, "run")
    shown.show(1, {"reward": 1.0, "judge/failed_prompts": 0.0})
    shown.close()
    assert "failures" not in capsys.readouterr().out
