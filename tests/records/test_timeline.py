"""Overlapping, exclusive and paused stages, and windows of steps, with a simulated clock."""

import random
from itertools import pairwise

import pytest

from poly_epo_jax.records.timeline import BusyTime, Span, StageClock, Timeline, Window, alone_intervals, merge, waiting


def test_overlapping_work_is_counted_once(now: list[float]):
    busy = BusyTime()
    first, second = busy.work(), busy.work()
    first.__enter__()
    now[0] = 102.0
    second.__enter__()
    now[0] = 103.0
    first.__exit__(None, None, None)
    now[0] = 107.0
    assert busy.intervals() == [(100, 107)]
    second.__exit__(None, None, None)
    now[0] = 110.0
    with pytest.raises(KeyError), busy.work():
        now[0] = 111.0
        raise KeyError
    assert busy.intervals() == [(100, 107), (110, 111)]
    assert busy.seconds() == 8


def test_waiting_does_not_count_as_work_of_the_stage(now: list[float]):
    stages = StageClock()
    with stages.stage("sync"):
        now[0] = 101.0
        with stages.stage("inner"), waiting():
            now[0] = 105.0
        with waiting():
            now[0] = 106.0
        now[0] = 108.0
    assert stages.seconds() == {"seconds/sync": 7, "seconds/inner": 0}
    with waiting():  # has no effect outside of stages
        now[0] = 109.0
    assert stages.busy("sync").intervals() == [(100, 105), (106, 108)]


def test_windows_are_consecutive_and_contain_stages_in_progress(now: list[float]):
    timeline = Timeline()
    now[0] = 110.0
    with timeline.clock(0).stage("sync"):
        now[0] = 111.0
    timeline.cut(0)
    ahead = timeline.clock(2).stage("generate")
    with timeline.clock(1).stage("update"):
        now[0] = 112.0
        ahead.__enter__()
        now[0] = 114.0
    now[0] = 115.0
    assert timeline.cut(1) == Window(11.0, 4.0, [Span("update", 0.0, 3.0, 1), Span("generate", 1.0, 4.0, 2)])
    with timeline.clock(1).stage("checkpoint"):
        now[0] = 117.0
    ahead.__exit__(None, None, None)
    now[0] = 118.0
    window = timeline.cut(2)
    assert window.start == 15 and window.seconds == 3
    assert sorted(window.spans) == [Span("checkpoint", 0.0, 2.0, 1), Span("generate", 0.0, 2.0, 2)]
    assert timeline.clock(2).seconds() == {"seconds/generate": 5}  # the total, although two windows contain parts of it
    assert timeline.clock(1).seconds() == {}  # deleted


def test_row_size_is_bounded_for_many_spans():
    rng = random.Random(0)
    starts = sorted(rng.uniform(0, 99) for _ in range(20_000))
    spans = [Span(stage, start, start + 1e-4, 1) for start in starts for stage in ("grade", "judge")]
    row = Window(0.0, 100.0, spans).row()
    assert 0 < len(row["spans"]) <= 2 * 200
    held = [(start, end) for stage, start, end, _ in row["spans"] if stage == "judge"]
    assert all(any(start - 1e-4 <= at <= end for start, end in held) for at in starts[::100])
    assert all(right[0] - left[1] >= 0.5 - 2e-4 for left, right in pairwise(held))


def test_spans_of_another_stage_or_step_are_not_merged():
    first, other, later = Span("a", 0.0, 1.0, 1), Span("b", 1.0, 2.0, 1), Span("a", 1.01, 2.0, 2)
    spans = [first, other, later, Span("a", 1.1, 3.0, 1), Span("a", 2.0, 2.5, 1)]
    assert merge(spans, 0.2) == [Span("a", 0.0, 3.0, 1), other, later]
    assert merge(spans, 0.05) == [first, other, later, Span("a", 1.1, 3.0, 1)]


@pytest.mark.parametrize("seed", range(20))
def test_exclusive_time_equals_a_count_at_every_moment(seed: int):
    rng = random.Random(seed)
    spans = []
    for _ in range(rng.randrange(1, 12)):
        start, end = sorted(float(rng.randrange(30)) for _ in range(2))
        spans.append(Span(rng.choice("abc"), start, end, rng.randrange(2)))
    expected = {one.stage: 0 for one in spans}
    for moment in range(30):
        in_progress = {one.stage for one in spans if one.start <= moment < one.end}
        if len(in_progress) == 1:
            expected[in_progress.pop()] += 1
    found = {stage: sum(end - start for start, end in of) for stage, of in alone_intervals(spans).items()}
    assert found == expected
    assert Window(0.0, 30.0, spans).exclusive_seconds() == {
        f"exclusive_seconds/{stage}": of for stage, of in expected.items()
    }
