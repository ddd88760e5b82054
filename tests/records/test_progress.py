"""Progress of long computations. test_tracking.py tests the display of a training run."""

import re

import pytest

from poly_epo_jax.records import progress


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


def test_failed_work_is_not_reported_as_complete(capsys, clock: list[float]):
    with pytest.raises(ValueError, match="broken"), progress.progress_bar("x", 2) as show:
        show(1)
        raise ValueError("broken")
    assert capsys.readouterr().out == "x 1/2\n"
