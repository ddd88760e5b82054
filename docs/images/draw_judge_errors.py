"""Draws docs/images/judge_errors.png and prints its numbers: diversity and reward against the error rate of the judge.

python docs/images/draw_judge_errors.py

Requires the runs of `python -m poly_epo_jax.study studies/judge_errors.py`. The clusters of the evaluations contain the
errors of the judge, so diversity is measured by answers: a strategy on polynomials is an x, which is the answer.
"""

import itertools
from pathlib import Path

import numpy as np
from jaxtyping import Float

from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.metrics.intervals import mean_interval
from poly_epo_jax.records.run_folder import GENERATION, GENERATIONS
from poly_epo_jax.report.figures import panels
from poly_epo_jax.system.json_files import read_rows

STUDY = Path("runs/study-judge_errors/evaluation/polynomial")
SEEDS = [seed for seed in range(5) if (STUDY / f"polynomial-grpo-lr0.0005-seed{seed}" / GENERATIONS).exists()]
"""Seeds whose runs are finished. GRPO is the last run of a seed."""
RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
COLORS = {"Poly-EPO": "#0072B2", "GRPO": "#D55E00"}


def measured(label: str) -> tuple[float, float]:
    """Returns the mean reward of a run, and its expected number of distinct correct answers among 8 generations."""
    rows = read_rows(STUDY / label / GENERATIONS, GENERATION)
    problems = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row["problem"])]
    answers = np.array([[row["answer"] for row in group] for group in problems])
    correct = np.array([[row["correct"] for row in group] for group in problems])
    return float(correct.mean()), float(distinct_clusters(answers, correct, 8).mean())


def by_seed(method: str) -> Float[np.ndarray, "seeds 2"]:
    """Returns reward and diversity of each seed."""
    return np.array([measured(f"polynomial-{method}-lr0.0005-seed{seed}") for seed in SEEDS])


if __name__ == "__main__":
    errors = np.stack([by_seed(f"errors_{rate:g}") for rate in RATES])  # [rates, seeds, 2]
    grpo = by_seed("grpo")
    rows = {f"Poly-EPO, error rate {rate}": values for rate, values in zip(RATES, errors, strict=True)}
    print(f"{len(SEEDS)} seeds")
    for name, values in (rows | {"GRPO": grpo}).items():
        texts = ["{:.3f} [{:.3f}, {:.3f}]".format(*mean_interval(values[:, column])) for column in (0, 1)]
        print(f"{name}: reward {texts[0]}, distinct correct answers of 8 {texts[1]}")
    with panels(2, 2, (4.3, 3.1)) as (figure, axes):
        titles = ("Distinct correct answers of 8", "Reward")
        for panel, column, title in zip(axes, (1, 0), titles, strict=True):
            values = errors[:, :, column]
            panel.plot(RATES, values.mean(axis=1), color=COLORS["Poly-EPO"], linewidth=2.2, marker="o", markersize=4)
            panel.fill_between(
                RATES, values.min(axis=1), values.max(axis=1), color=COLORS["Poly-EPO"], alpha=0.2, linewidth=0
            )
            panel.axhline(grpo[:, column].mean(), color=COLORS["GRPO"], linewidth=2)
            panel.axhspan(grpo[:, column].min(), grpo[:, column].max(), color=COLORS["GRPO"], alpha=0.2, linewidth=0)
            panel.set(title=title, xlabel="error rate of the judge", ylim=(0.85, 1.02) if column == 0 else (0, 8.2))
            places = {"Poly-EPO": values[0].mean(), "GRPO": grpo[:, column].mean()}
            for (name, place), offset in zip(
                places.items(), (-0.02, 0.007) if column == 0 else (-0.8, 0.3), strict=True
            ):
                panel.text(0.02, place + offset, name, color=COLORS[name], weight="bold")
        figure.savefig(Path(__file__).with_name("judge_errors.png"), facecolor="white")
