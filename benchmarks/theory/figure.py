"""Plots the figure of docs/explanation/theory.md, which has nine panels in the style of reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from poly_epo_jax.report.figures import report_style

BLUE, ORANGE, GREEN, PINK, YELLOW, GRAY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#444444"
Rows = Sequence[Mapping[str, Any]]
SMALL: dict[Any, Any] = {"font.size": 8, "axes.titlesize": 9, "legend.fontsize": 7, "axes.titlepad": 5} | {
    "text.parse_math": True  # labels of logarithmic axes
}


def draw(found: Mapping[str, Rows]) -> Figure:
    """Plots the results of all questions."""
    with report_style(SMALL):
        figure = Figure(figsize=(10.5, 8.4), dpi=100, layout="constrained")
        panels = figure.subplots(3, 3).flat
        _credit(next(panels), found["credit"])
        _parts(next(panels), found["kinds"])
        _set_sizes(next(panels), found["sizes"])
        _group_sizes(next(panels), found["sizes"])
        _sampled(next(panels), found["sampled sets"])
        _frontier(next(panels), found["frontier"], "given skills", found["edge"])
        _frontier(next(panels), found["frontier"], "learnt skills", [])
        _weights(next(panels), found["weights"])
        _growth(next(panels), found["clipping"])
    return figure


def _column(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows]


def _credit(axes: Axes, rows: Rows) -> None:
    x = _column(rows, "success")
    for name, color, style in zip(
        list(rows[0])[1:], (BLUE, BLUE, BLUE, ORANGE, ORANGE), ("-", "--", ":", "-", ":"), strict=True
    ):
        axes.plot(x, _column(rows, name), color=color, linestyle=style, label=name)
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set(title="Advantage of a novel incorrect response", xlabel="success rate p", ylim=(-3, 4))
    axes.legend(loc="lower left")


def _parts(axes: Axes, rows: Rows) -> None:
    kinds = list(rows[0])[2:]
    for index, (setting, hatch) in enumerate((("common succeeds more", ""), ("rare succeeds more", "///"))):
        parts = {row["method"]: [row[kind] for kind in kinds] for row in rows if row["setting"] == setting}
        at = [i + 0.4 * index - 0.2 for i in range(len(kinds))]
        for shift, part, color in (
            (-0.09, "its product, of the policy", BLUE),
            (0.09, "its covariance, of the policy", ORANGE),
        ):
            label = f"{part.split(',')[0].removeprefix('its ')}, {setting}"
            axes.bar([x + shift for x in at], parts[part], 0.17, color=color, hatch=hatch, alpha=0.9, label=label)
    axes.set_xticks(range(len(kinds)), [kind.replace(" ", "\n") for kind in kinds])
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.set(title="Components of Poly-EPO's advantage", ylim=(-1.5, 5.2))
    axes.legend()


def _set_sizes(axes: Axes, rows: Rows) -> None:
    of_eight = sorted((row for row in rows if row["N"] == 8), key=lambda row: row["n"])
    _sized(axes, of_eight, "n")
    axes.set(title="Advantage by set size, N = 8", xlabel="n")


def _group_sizes(axes: Axes, rows: Rows) -> None:
    of_four = sorted((row for row in rows if row["n"] == 4), key=lambda row: row["N"])
    _sized(axes, of_four, "N")
    axes.set(title="Advantage by group size, n = 4", xlabel="N")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")


def _sized(axes: Axes, rows: Rows, size: str) -> None:
    for kind, color in (("novel right", BLUE), ("novel wrong", ORANGE)):
        mean, spread = (_column(rows, name) for name in (kind, f"{kind}, deviation"))
        axes.errorbar(_column(rows, size), mean, spread, color=color, marker="o", markersize=4, capsize=2, label=kind)
    axes.axhline(0, color=GRAY, linewidth=0.8)
    axes.legend()


def _sampled(axes: Axes, rows: Rows) -> None:
    x = _column(rows, "K")
    axes.plot(x, _column(rows, "promised"), color=GRAY, label="factor (predicted)")
    axes.plot(x, _column(rows, "measured"), "o", color=BLUE, fillstyle="none", label="factor (measured)")
    axes.plot(x, _column(rows, "noise of the sets"), "s-", color=ORANGE, markersize=4, label="noise from sampling sets")
    axes.set(title="K of 70 sets sampled", xlabel="K", xscale="log")
    axes.set_xticks(x, [str(k) for k in x])
    axes.minorticks_off()
    axes.legend()


def _frontier(axes: Axes, rows: Rows, world: str, edge: Rows) -> None:
    rows = [row for row in rows if row["world"] == world]
    axes.plot(
        _column(edge, "reward"),
        _column(edge, "distinct"),
        color=GRAY,
        linewidth=1,
        label="Pareto frontier" if edge else None,
    )
    styles = (
        ("GRPO", "o-", ORANGE, "GRPO, GRPO+DIV (lambda varies)"),
        ("Poly-EPO", "s-", BLUE, "Poly-EPO, n = 2 to 7"),
        ("without", "D", GREEN, "without covariance, n = 4"),
        ("sum", "^", PINK, "sum over sets, n = 4"),
        ("r d", "v", YELLOW, "r d of one"),
    )
    for starts, mark, color, label in styles:
        of_method = [row for row in rows if row["method"].startswith(starts)]
        x, y = _column(of_method, "reward"), _column(of_method, "distinct")
        axes.plot(x, y, mark, color=color, markersize=4, linewidth=1, fillstyle="none", label=label)
    axes.set(title=f"After training, {world}", xlabel="reward", ylabel="distinct correct strategies in 8")
    axes.legend()


def _weights(axes: Axes, rows: Rows) -> None:
    x = _column(rows, "ratio")
    for name, color, style in zip(list(rows[0])[1:], (BLUE, BLUE, ORANGE, ORANGE), ("-", "--", "-", "--"), strict=True):
        axes.plot(x, _column(rows, name), color=color, linestyle=style, label=name)
    axes.set(title="Weight of a token's gradient", xlabel="ratio w")
    axes.legend()


def _growth(axes: Axes, rows: Rows) -> None:
    for loss, color in (("ppo_clip", BLUE), ("cispo", ORANGE), ("policy_gradient", GREEN)):
        of_loss = [row for row in rows if row["loss"] == loss]
        for kind, style in (("rare", "o-"), ("commonest", "s--")):
            x, y = _column(of_loss, "updates"), _column(of_loss, f"{kind}, times")
            axes.plot(x, y, style, color=color, markersize=4, fillstyle="none", label=f"{loss}, {kind}")
    axes.set(title="Probability of a strategy relative to the start", xlabel="updates on one batch", yscale="log")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([0.1, 0.2, 0.5, 1, 2], ["0.1", "0.2", "0.5", "1", "2"])
    axes.minorticks_off()
    axes.legend()
