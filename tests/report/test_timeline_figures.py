"""Tests of timeline figures: selected steps, bars and the summary sentence."""

import matplotlib.colors
import numpy as np
import pytest

from poly_epo_jax.records.timeline import Span, Window
from poly_epo_jax.report import figures
from poly_epo_jax.report.timeline_figures import excerpts, plot_timeline, sentence


def window(step: int, seconds: float) -> Window:
    """Returns a step in which generation of the next batch overlaps with the update, scaled to `seconds`."""
    unit = seconds / 10
    spans = [("generate", 0.0, 2.0, step), ("judge", 2.0, 4.0, step), ("update", 4.0, 8.0, step)]
    spans += [("generate", 4.0, 10.0, step + 1)]
    return Window(0.0, seconds, [Span(stage, start * unit, end * unit, of) for stage, start, end, of in spans])


def windows(*seconds: float) -> dict[int, Window]:
    return {step: window(step, length) for step, length in enumerate(seconds, start=1)}


@pytest.mark.parametrize(
    ("seconds", "chosen", "several"),
    [
        ([9.0], 1, []),
        ([9.0, 3.0], 2, [1, 2]),
        ([90.0, 10.0, 10.0, 11.0, 10.0, 10.0, 30.0, 10.5, 40.0], 8, [6, 7, 8, 9]),
        ([10.0, 10.5, 30.0, 40.0, 1.0, 1.0, 50.0], 2, [1, 2, 3, 4]),
    ],
)
def test_excerpts_are_the_newest_median_step_and_its_neighbors(seconds, chosen, several):
    found = [list(one.starts) for one in excerpts(windows(*seconds))]
    assert found == [[chosen]] + [several] * bool(several)
    assert excerpts({}) == []


def test_spans_across_steps_are_merged_and_exclusive_parts_marked():
    (_, several) = excerpts(windows(10.0, 10.0))
    assert several.starts == {1: 0.0, 2: 10.0} and several.seconds == 20.0
    assert several.stages == ["generate", "judge", "update"]
    generated = [span for span in several.spans if span.stage == "generate"]
    assert generated == [
        Span("generate", 0.0, 2.0, 1),
        Span("generate", 4.0, 12.0, 2),
        Span("generate", 14.0, 20.0, 3),
    ]
    assert [several.is_odd(span) for span in generated] == [False, True, False]
    figure = plot_timeline({"a": windows(10.0, 10.0)})
    assert figure is not None
    drawn = [path.get_extents() for bars in figure.axes[1].collections for path in bars.get_paths()]
    in_first_row = [(box.x0, box.x1) for box in drawn if box.y1 < 0.5]
    alone = [(0.0, 2.0), (8.0, 12.0), (18.0, 20.0)]
    spans = [(span.start, span.end) for span in generated]
    assert in_first_row == [bar for pair in zip(spans, alone, strict=True) for bar in pair]


def test_summary_sentence_contains_medians():
    summary = sentence(windows(10.0, 10.0, 20.0))
    assert summary == (
        "A step takes 10 s (median of 3). Generation alone takes 40% of it, judging 20%; two or more stages overlap "
        "for 40% of it. Including overlap: generation 80%, update 40%, judging 20%."
    )
    one_by_one = Window(
        0.0, 2.0, [Span("update", 0.0, 1.5, 1), Span("pause", 1.5, 1.9, 1), Span("sync", 1.9, 1.901, 1)]
    )
    assert sentence({1: one_by_one}) == (
        "A step takes 2 s (median of 1). Update alone takes 75% of it, pause 20%; no stages overlap."
    )
    assert sentence({1: Window(0.0, 2.0, [])}) == "A step takes 2 s (median of 1). No stages overlap."


def test_figure_has_a_row_per_run_in_its_color():
    figure = plot_timeline({"a": windows(10.0, 10.0), "older": {}, "b": windows(10.0)})
    assert figure is not None
    assert [axes.get_title("left") for axes in figure.axes] == [
        *("a: step 2 (median length)", "a: steps 1 to 2", "b: step 1 (median length)")
    ]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == ["generate", "judge", "update"]
    colors = np.array([bars.get_facecolor() for bars in figure.axes[2].collections if len(bars.get_paths())])[:, 0, :3]
    expected = matplotlib.colors.to_rgb(figures.styles(["a", "older", "b"])["b"]["color"])
    assert np.isclose(colors, expected).all(axis=1).any()
    assert plot_timeline({"older": {}}) is None and plot_timeline({}) is None
    single = plot_timeline({"a": windows(10.0)})
    assert single is not None and single.axes[0].get_title("left") == "Step 1 (median length)"
