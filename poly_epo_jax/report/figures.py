"""Draws the figures of runs, and provides the style and layout of all figures.

`Runs` maps the label of a run to its rows of metrics.jsonl: a dict per step and a dict per evaluation. Rows can lack
metrics. None, which stands for a value that was not finite, is treated as missing. A method has the same color in all
figures of all reports.
"""

import base64
import collections
import contextlib
import fnmatch
import html
import io
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, Int
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from poly_epo_jax.metrics.logged import (
    HELD_OUT_CORRECT_CLUSTERS,
    HELD_OUT_REWARD,
    LOGGED_METRICS,
    describe,
    is_held_out,
)
from poly_epo_jax.system.json_files import replace_file

Rows = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Rows]

DPI = 150
COMPARED = (HELD_OUT_REWARD, HELD_OUT_CORRECT_CLUSTERS)
"""Held-out metrics by which figures and summaries compare runs."""

# Color-blind safe palette of Okabe and Ito. Lines with the same color differ in dashes.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Index of the color of the policies of each method, and of the policy before training.
_METHOD_COLORS = {"poly_epo": 0, "grpo": 1, "grpo_div": 2, "max_rl": 3, "dapo": 4, "base": 6}
_OTHER_COLORS = (3, 4, 5, 0, 1, 2, 6)
_DASHES = ("-", "--", ":")  # followed by dashes with one dot, two dots, ...
# Families with Chinese, Japanese and Korean characters, which DejaVu Sans lacks. Installed families are used.
_WIDE_FAMILIES = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei"),
    *("PingFang SC", "Hiragino Sans GB", "Microsoft YaHei", "SimHei", "Droid Sans Fallback", "Arial Unicode MS"),
)
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "text.parse_math": False,  # names of runs and models can contain $
    "axes.formatter.useoffset": False,  # tick labels show full values, even if the range is narrow
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": "#888888",
    "ytick.color": "#888888",
    "xtick.labelcolor": "#333333",
    "ytick.labelcolor": "#333333",
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 12,
    "pdf.fonttype": 42,  # TrueType: text remains searchable and editable, and publishers reject Type 3, the default
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.1,
}
_PIXELS_PER_INCH = 96
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # text as characters, which takes 10% of the size of outlines
    "svg.hashsalt": "poly_epo_jax",  # deterministic ids, so that equal figures produce identical bytes
    "font.family": ["DejaVu Sans", "sans-serif"],  # layout for the first, the widest of the common fonts
}
MARKED = {"linewidth": 2.2, "marker": "o", "markersize": 6, "markeredgecolor": "white", "markeredgewidth": 1.0}


@contextlib.contextmanager
def report_style(extra: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Applies the style of reports inside the `with` block, regardless of the user's matplotlibrc.

    Characters that no installed font contains are drawn as boxes in PNG and PDF files, without a warning for each.

    Args:
      extra: Further rcParams.
    """
    installed = set(font_manager.get_font_names())
    families = ["DejaVu Sans", *(family for family in _WIDE_FAMILIES if family in installed)]
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        matplotlib.rcdefaults()
        settings: dict[Any, Any] = {"font.family": families, **STYLE, **extra}
        matplotlib.rcParams.update(settings)
        yield


def save(figure: Figure, output: Path, name: str) -> None:
    """Writes a figure to `output` as NAME.png and NAME.pdf. Equal figures produce identical bytes.

    Args:
      figure: The figure. Its layout is frozen.
      output: An existing folder.
      name: File name without suffix.
    """
    with report_style():
        lay_out(figure)
        for suffix, metadata in (("png", {}), ("pdf", {"CreationDate": None})):
            figure.savefig(content := io.BytesIO(), format=suffix, metadata=metadata)
            replace_file(output / f"{name}.{suffix}", [content.getvalue()])


def lay_out(figure: Figure) -> None:
    """Computes and freezes the layout of a figure. Repeating it for each file would take longer than drawing."""
    if figure.get_layout_engine() is not None:
        figure.draw_without_rendering()
        figure.set_layout_engine(None)


def plot_training_dynamics(runs: Runs) -> Figure | None:
    """Draws a panel with all runs for each metric of `drawn_metrics` that at least one run has.

    Values of single steps are drawn faintly under a smoothed line. Returns None if no run has any of the metrics.
    """
    return _panels(runs, drawn_metrics(runs), max_columns=4, panel_size=(3.5, 2.8))


def drawn_metrics(runs: Runs = MappingProxyType({})) -> list[str]:
    """Returns the names of the metrics that are drawn over steps. Prefixes are replaced with metrics of the runs."""
    logged = sorted({metric for rows in runs.values() for row in rows for metric in row})
    drawn = [name for name, metric in LOGGED_METRICS.items() if metric.drawn]
    return [one for name in drawn for one in (fnmatch.filter(logged, name) if "*" in name else [name])]


def plot_comparison(runs: Runs) -> Figure | None:
    """Draws held-out reward and correct clusters over training steps. Returns None if no run was evaluated."""
    return _panels(runs, COMPARED, max_columns=2, panel_size=(4.5, 3.1))


def series(rows: Rows, metric: str) -> tuple[Int[np.ndarray, " T"], Float[np.ndarray, " T"]]:
    """Returns the steps at which a metric was logged, and its values.

    Args:
      rows: Rows of metrics.jsonl.
      metric: Name of the metric.

    Returns:
      Steps [T] and values [T].
    """
    points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    return np.array([step for step, _ in points], int), np.array([value for _, value in points], float)


def smooth(values: Float[np.ndarray, " T"]) -> Float[np.ndarray, " T"]:
    """Smooths T values with a centered Gaussian kernel, which does not lag. Its standard deviation is T / 40 values.

    Near the ends, the kernel is truncated and renormalized. Fewer than 14 values are returned unchanged.

    Args:
      values: Values [T].

    Returns:
      Smoothed values [T].
    """
    deviation = len(values) / 40
    reach = int(3 * deviation)
    if reach == 0:
        return values
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    return np.convolve(values, weights, "same") / np.convolve(np.ones_like(values), weights, "same")


def _panels(runs: Runs, metrics: Sequence[str], max_columns: int, panel_size: tuple[float, float]) -> Figure | None:
    present = [metric for metric in metrics if any(len(series(rows, metric)[0]) for rows in runs.values())]
    if not present:
        return None
    faint = 0.35 / len(runs) ** 0.5
    with panels(len(present), max_columns, panel_size) as (figure, drawn):
        for axes, metric in zip(drawn, present, strict=True):
            for label, style in styles(list(runs)).items():
                steps, values = series(runs[label], metric)
                if is_held_out(metric):
                    axes.plot(steps, values, **MARKED, **style)
                else:
                    axes.plot(steps, values, color=style["color"], linewidth=0.7, alpha=faint, zorder=1)
                    axes.plot(steps, smooth(values), linewidth=2.2, **style)
            axes.set_title(describe(metric).title)
            if describe(metric).unit_axis:
                unit_axis(axes, "y")
        step_axes(drawn)
        add_legend(figure, styles(list(runs)))
    return figure


@contextlib.contextmanager
def panels(
    count: int, max_columns: int, size: tuple[float, float], **shared: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Creates a figure with panels, and applies the style of reports inside the `with` block.

    Args:
      count: Number of panels.
      max_columns: Maximum number of panels in a row.
      size: Width and height of a panel, in inches.
      **shared: Further arguments of `Figure.subplots`, such as `sharey`.

    Yields:
      The figure and its panels.
    """
    rows = -(-count // max_columns)
    columns = -(-count // rows)
    with report_style():
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), dpi=DPI, layout="constrained")
        drawn = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
        for axes in drawn[count:]:
            axes.remove()
        yield figure, drawn[:count]


def unit_axis(axes: Axes, *names: str) -> None:
    """Sets the limits of axes that show fractions to 0 and 1, with a margin for markers.

    Args:
      axes: The panel.
      *names: "x", "y" or both.
    """
    for name in names:
        axes.set(**{f"{name}ticks": [0, 0.2, 0.4, 0.6, 0.8, 1], f"{name}lim": (-0.03, 1.03)})


def step_axes(panels: Sequence[Axes], label: str = "training step") -> None:
    """Labels the horizontal axes of panels, with equal ticks that end at the last step of all panels.

    Args:
      panels: The panels. All lines must have been drawn.
      label: Label of the axes.
    """
    ends = [np.max(np.asarray(line.get_xdata(), float), initial=0) for axes in panels for line in axes.lines]
    last = int(max(ends, default=0))
    is_long = last >= 10_000  # the tick labels would overlap
    ticks = MaxNLocator(nbins=4 if is_long else 5, integer=True).tick_values(0, max(last, 1))
    kept = [int(tick) for tick in ticks if 0 <= tick <= last - 0.6 * (ticks[1] - ticks[0])]
    for axes in panels:
        axes.set_xlabel(label)
        axes.set_xticks([*kept, last])
        if is_long:
            axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))


def styles(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the line style of each label. All labels have different combinations of color and dashes.

    The labels of a method, such as `poly_epo` or `polynomial-poly_epo`, have the same color in all reports. `base`, the
    policy before training, is a dashed black line.
    """
    found, used = {}, collections.Counter({_METHOD_COLORS["base"]: 1})  # black lines are never solid
    others = itertools.cycle(_OTHER_COLORS)
    for label in labels:
        method = label.rpartition("-")[2]
        color = _METHOD_COLORS[method] if method in _METHOD_COLORS else next(others)
        found[label] = {"label": label, "color": COLORS[color], "linestyle": _dashes(used[color])}
        used[color] += 1
    return found


def _dashes(number: int) -> Any:
    return _DASHES[number] if number < len(_DASHES) else (0, (6.4, 1.6) + (1.0, 1.6) * (number - len(_DASHES) + 1))


def add_legend(figure: Figure, line_styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds a legend of the line styles above all panels, and increases the height of the figure accordingly."""
    handles = [Line2D([], [], linewidth=2.2, **style) for style in line_styles.values()]
    entry_inches = 0.8 + 0.1 * max(map(len, line_styles))
    columns = min(len(line_styles), max(1, int(figure.get_figwidth() / entry_inches)))
    # The height of the rows is added, so the panels keep their size.
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.25 * -(-len(line_styles) // columns))
    figure.legend(handles=handles, loc="outside upper left", ncols=columns)


def image(figure: Figure, text: str) -> str:
    """Returns an HTML image element with the figure as embedded SVG.

    Args:
      figure: The figure. Its size in inches is the size on the page, at 96 pixels per inch.
      text: Alternative text.
    """
    file = io.BytesIO()
    with report_style(_SVG):
        lay_out(figure)
        figure.savefig(file, format="svg", metadata={"Date": None})
    width, height = (round(inches * _PIXELS_PER_INCH) for inches in figure.get_size_inches())
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<div class="wide"><img class="figure" width="{width}" height="{height}" alt="{html.escape(text)}" '
        f'src="data:image/svg+xml;base64,{data}"></div>'
    )
