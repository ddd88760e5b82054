"""Draws docs/images/judge_bias.png and prints its numbers: a judge that a surface form deceives, and its audits.

python docs/images/draw_judge_bias.py

Requires the runs of `python -m poly_epo_jax.study studies/judge_bias.py`. Diversity is measured by the answers without
the letters around them. The exact auditor is computed from the logged responses.
"""

import itertools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.metrics.intervals import mean_interval
from poly_epo_jax.metrics.judge_audit import summarize
from poly_epo_jax.records.recorded_groups import read_generations
from poly_epo_jax.records.run_folder import AUDIT, AUDITED, GENERATION, GENERATIONS, LOGGED_GENERATION
from poly_epo_jax.report.figures import panels
from poly_epo_jax.system.json_files import read_rows

STUDY = Path("runs/study-judge_bias")
SEEDS = range(5)
ARMS = {
    "unbiased": ("unbiased judge", "#0072B2"),
    "biased": ("biased judge", "#D55E00"),
    "verified": ("verified", "#CC79A7"),
}
LIMIT, REMAINING = 1.5, 0.8


def answer(response: str) -> str:
    """Returns a response without its letters."""
    return response.strip("abcdefghijklmnop")


def final(arm: str, seed: int) -> tuple[float, float]:
    """Returns the reward of a run on held-out problems, and the expected distinct correct answers of 8."""
    label = f"polynomial-{arm}-lr0.001-seed{seed}"
    rows = read_rows(STUDY / "evaluation" / "framed_polynomial" / label / GENERATIONS, GENERATION)
    problems = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["problem"])]
    answers, correct = (np.array([[row[key] for row in group] for group in problems]) for key in ("answer", "correct"))
    return float(correct.mean()), float(distinct_clusters(answers, correct, 8).mean())


def over_training(arm: str, seed: int) -> Mapping[int, Mapping[str, float]]:
    """Returns the measured values of each logged step: diversity, fractions of rare letters, and inflations."""
    folder = STUDY / "polynomial" / f"{arm}-lr0.001-seed{seed}"
    logged, audits = read_rows(folder / GENERATIONS, LOGGED_GENERATION), [*read_rows(folder / AUDIT, AUDITED)]
    found = {}
    for step, rows in itertools.groupby(logged, key=lambda row: row["step"]):
        groups = read_generations(rows)
        distinct = [
            len({answer(text) for text, is_correct in zip(group.responses, group.correct, strict=True) if is_correct})
            for group in groups
        ]
        texts = [text for group in groups for text in group.responses if text]
        exact = {group.name: np.unique([*map(answer, group.responses)], return_inverse=True)[1] for group in groups}
        audited = [row for row in audits if row["step"] == step]
        by_exact = [row | {"auditor": exact[row["group"]].tolist()} for row in audited]
        values = {"diversity": float(np.mean(distinct))}
        values |= {
            name: np.mean([text[place] != "a" for text in texts]) for name, place in (("first", 0), ("last", -1))
        }
        for name, of_auditor in (("second", audited), ("exact", by_exact)):
            inflation = summarize(of_auditor, 4)["inflation"]
            values |= {name: inflation["mean"], f"{name}_low": inflation["low"]}
        found[step] = values
    return found


def first_step(curve: Mapping[int, Mapping[str, float]], name: str, limit: float, above: bool) -> int | None:
    """Returns the first logged step at which a value is above, or below, a limit."""
    steps = (step for step, values in curve.items() if (values[name] > limit if above else values[name] < limit))
    return next(steps, None)


if __name__ == "__main__":
    curves = {arm: [over_training(arm, seed) for seed in SEEDS] for arm in ARMS}
    ends = {arm: np.array([final(arm, seed) for seed in SEEDS]) for arm in ARMS}
    for arm, values in ends.items():
        texts = ["{:.3f} [{:.3f}, {:.3f}]".format(*mean_interval(values[:, column])) for column in (0, 1)]
        print(f"{arm}: reward {texts[0]}, distinct correct answers of 8 {texts[1]}")
        if arm != "unbiased":
            difference = mean_interval(values[:, 1] - ends["unbiased"][:, 1])
            print("  difference from unbiased: {:.3f} [{:.3f}, {:.3f}]".format(*difference))
    for seed, curve in zip(SEEDS, curves["biased"], strict=True):
        lost = first_step(curve, "diversity", REMAINING * next(iter(curve.values()))["diversity"], above=False)
        found = {name: first_step(curve, f"{name}_low", LIMIT, above=True) for name in ("second", "exact")}
        print(f"seed {seed}: a fifth is lost at step {lost}; inflation above {LIMIT}: {found}")
    for name in ("diversity", "first", "last", "second", "exact"):
        last = mean_interval(np.array([list(curve.values())[-1][name] for curve in curves["biased"]]))
        print("biased arm, last step, {}: {:.3f} [{:.3f}, {:.3f}]".format(name, *last))

    def draw(axes, arm: str, name: str, label: str, color: str, style: str = "-") -> None:
        """Draws the mean of a value over seeds, and their range."""
        steps = list(curves[arm][0])
        values = np.array([[curve[step][name] for step in steps] for curve in curves[arm]])
        axes.plot(steps, values.mean(axis=0), color=color, linestyle=style, linewidth=2, label=label)
        axes.fill_between(steps, values.min(axis=0), values.max(axis=0), color=color, alpha=0.15, linewidth=0)

    with panels(3, 3, (4.0, 3.1)) as (figure, (diversity, letters, inflation)):
        for arm, (label, color) in ARMS.items():
            draw(diversity, arm, "diversity", label, color)
        for name, style in (("first", "-"), ("last", "--")):
            draw(letters, "biased", name, f"{name} letter", ARMS["biased"][1], style)
        draw(inflation, "biased", "second", "auditor: last letter", ARMS["verified"][1])
        draw(inflation, "biased", "exact", "auditor: exact", ARMS["unbiased"][1])
        inflation.axhline(LIMIT, color="gray", linewidth=1)
        diversity.set(title="Distinct correct answers of 8", ylim=(0, 8))
        letters.set(title="Rare letters of the biased arm", ylim=(-0.03, 1.03))
        inflation.set(title="Inflation of the biased judge", ylim=(0.8, 3.2))
        for axes in (diversity, letters, inflation):
            axes.set_xlabel("training step")
            axes.legend(frameon=False, fontsize=8, loc="upper left" if axes is inflation else "lower right")
        figure.savefig(Path(__file__).with_name("judge_bias.png"), facecolor="white")
