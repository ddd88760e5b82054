"""Draws docs/images/countdown.png from the study of Countdown, and prints the numbers of docs/explanation/countdown.md.

python docs/images/draw_countdown.py

Requires the runs of `python -m poly_epo_jax.study studies/countdown.py` and, in the evaluation folder of the study, the
evaluation of the policy before training with the label `base`.
"""

import collections
import json
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from poly_epo_jax.metrics.intervals import difference_interval, mean_interval
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows
from poly_epo_jax.report.figures import panels
from poly_epo_jax.system.json_files import read_object
from poly_epo_jax.tasks.countdown import CountdownTask, operator_cost

STUDY = Path("runs/study-countdown")
NUM_GENERATIONS = 256
SEEDS = range(5)
COLORS = {"Poly-EPO": "#0072B2", "GRPO": "#D55E00", "base policy": "#000000"}
KS = [2**power for power in range(9)]


def problem_rows(label: str) -> list[dict[str, Any]]:
    """Returns the number of correct generations of each problem."""
    return read_object(STUDY / "evaluation" / "countdown" / label / "results.json", "rerun the study")["per_problem"]


def solved(label: str) -> Float[np.ndarray, "problems ks"]:
    """Returns pass@k of each problem at `KS`, from the number of correct generations of each problem."""
    correct = np.array([row["num_correct"] for row in sorted(problem_rows(label), key=lambda row: row["problem"])])
    return np.stack([pass_at_k(NUM_GENERATIONS, correct, k) for k in KS], axis=1)


def run_labels(method: str) -> list[str]:
    """Returns the labels of the runs of a method."""
    return [f"countdown-{method}-lr0.00015-seed{seed}" for seed in SEEDS]


def seeds(method: str) -> Float[np.ndarray, "seeds problems ks"]:
    """Returns pass@k of each seed and problem for a method."""
    return np.stack([solved(label) for label in run_labels(method)])


def interval_text(values: Float[np.ndarray, "seeds problems"]) -> str:
    """Formats the mean of paired differences with its intervals over seeds and over problems."""
    over_seeds = mean_interval(values.mean(axis=1))
    low, high = difference_interval(values.mean(axis=0))
    return "{:+.3f}, seeds [{:+.3f}, {:+.3f}], problems [{:+.3f}, {:+.3f}]".format(*over_seeds, low, high)


def print_differences(
    base: Float[np.ndarray, "problems ks"], methods: dict[str, Float[np.ndarray, "seeds problems ks"]]
):
    """Prints paired differences in pass@k."""
    grpo, poly_epo = methods["GRPO"], methods["Poly-EPO"]
    for k in (1, 64, 256):
        column = KS.index(k)
        for name, values in {
            "GRPO - base": grpo - base,
            "Poly-EPO - base": poly_epo - base,
            "Poly-EPO - GRPO": poly_epo - grpo,
            "Poly-EPO - MaxRL": poly_epo - methods["MaxRL"],
            "Poly-EPO - passk": poly_epo - methods["passk"],
        }.items():
            print(f"k = {k}: {name}: {interval_text(values[:, :, column])}")


def print_advantage_shares(method: str) -> None:
    """Prints the share of sum |advantage| by the number of correct responses in the group, over the logged steps."""
    mass: collections.Counter[int] = collections.Counter()
    for seed in SEEDS:
        groups = collections.defaultdict(list)
        path = STUDY / "countdown" / f"{method}-lr0.00015-seed{seed}" / GENERATIONS
        for line in path.read_text().splitlines():
            row = json.loads(line)
            groups[row["step"], row["problem"]].append((row["reward"], row["advantage"]))
        for group in groups.values():
            mass[sum(reward > 0 for reward, _ in group)] += sum(abs(advantage) for _, advantage in group)
    total = sum(mass.values())
    print(f"{method}: " + "  ".join(f"{right}: {mass[right] / total:.3f}" for right in range(9)))


def print_rare_strategies(labels: dict[str, list[str]]) -> None:
    """Prints pass@256 on the held-out problems whose cheapest strategy costs 4 or more."""
    task = CountdownTask()
    rare = {p.id for p in task.held_out_problems if min(map(operator_cost, task.solutions(p))) >= 4}
    print(f"pass@256 on the {len(rare)} held-out problems whose cheapest strategy costs 4 or more:")
    for name, folders in labels.items():
        rows = [row for folder in folders for row in problem_rows(folder) if row["problem"] in rare]
        print(f"{name}: {np.mean([row['num_correct'] > 0 for row in rows]):.3f}")


def draw(base: Float[np.ndarray, "problems ks"], methods: dict[str, Float[np.ndarray, "seeds problems ks"]]) -> None:
    """Draws pass@k and the paired difference of Poly-EPO and GRPO."""
    with panels(2, 2, (4.3, 3.1)) as (figure, (left, right)):
        left.plot(KS, base.mean(axis=0), "--", color=COLORS["base policy"], linewidth=2)
        offsets = {"base policy": 0.03, "Poly-EPO": -0.02, "GRPO": -0.03}
        ends = {"base policy": base.mean(axis=0)[-1]}
        for name in ("GRPO", "Poly-EPO"):
            curves = methods[name].mean(axis=1)
            left.plot(KS, curves.mean(axis=0), color=COLORS[name], linewidth=2.2, marker="o", markersize=4)
            left.fill_between(KS, curves.min(axis=0), curves.max(axis=0), color=COLORS[name], alpha=0.2, linewidth=0)
            ends[name] = curves.mean(axis=0)[-1]
        for name, end in ends.items():
            left.text(300, end + offsets[name], name, color=COLORS[name], weight="bold", va="center")
        left.set(title="Solved with k attempts (pass@k)", xlim=(0.9, 2200), ylim=(0, 1))
        differences = (methods["Poly-EPO"] - methods["GRPO"]).mean(axis=0)
        low, high = difference_interval(differences)
        right.plot(KS, differences.mean(axis=0), color=COLORS["Poly-EPO"], linewidth=2.2, marker="o", markersize=4)
        right.fill_between(KS, low, high, color=COLORS["Poly-EPO"], alpha=0.2, linewidth=0)
        right.axhline(0, color=COLORS["GRPO"], linewidth=1)
        right.set(title="Poly-EPO minus GRPO, same problems", xlim=(0.9, 290))
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(KS[::2], [str(k) for k in KS[::2]])
            axes.minorticks_off()
            axes.set_xlabel("k")
        figure.savefig(Path(__file__).with_name("countdown.png"), facecolor="white")


if __name__ == "__main__":
    base_policy = solved("base")
    names = {"grpo": "GRPO", "poly_epo": "Poly-EPO", "max_rl": "MaxRL", "passk": "passk"}
    by_method = {title: seeds(name) for name, title in names.items()}
    print_differences(base_policy, by_method)
    others = (
        "pkpo",
        "grpo_focal",
        "poly_epo_focal",
        "poly_epo_n2",
        "poly_epo_n6",
        "grpo_div_0.1",
        "grpo_div_0.5",
        "grpo_div_1",
    )
    for method in (*names, *others):
        print_advantage_shares(method)
    print_rare_strategies({"base": ["base"]} | {method: run_labels(method) for method in (*names, *others)})
    draw(base_policy, by_method)
    frozen = Path("runs/countdown-base") / METRICS
    print("ever solved, frozen base:", [row for row in read_rows(frozen) if "train/ever_solved" in row][-1])
