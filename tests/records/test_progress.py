"""What long work shows if the output is not a terminal; for the screen of a run, see test_tracking.py."""

import re

import pytest

from poly_epo_jax.records import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_are_printed_at_first_every_ten_seconds_and_at_the_end(capsys, clock: list[float]):
    with progress.counted("base policy", 10) as show:
        for done in range(1, 11):
            show(done)
            clock[0] += 4.0
    lines = capsys.readouterr().out.splitlines()
    # At 4 s each: the first, then the first that is at least 10 s later, and the last.
    assert [re.match(r"base policy (\d+)/10\b", line)[1] for line in lines] == ["1", "4", "7", "10"]  # type: ignore[index]
    assert "left" in lines[1] and "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_bar_and_no_lines(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with progress.counted("tiny on polynomial: problems", 40) as show:
        show(0)
        show(40)
    out = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert "40/40" in out and "━" in out and "problems 0/40" not in out


def test_work_that_fails_is_not_said_to_be_done(capsys, clock: list[float]):
    with pytest.raises(ValueError, match="broken"), progress.counted("x", 2) as show:
        show(1)
        raise ValueError("broken")
    assert capsys.readouterr().out == "x 1/2\n"
