"""Draws docs/images/correlated.png and prints its numbers: training with correlated and independent generations.

python docs/images/draw_correlated.py

Requires the runs of `python -m poly_epo_jax.study studies/correlated.py`. Final policies are compared by independent
generations. Seeds and problems are paired.
"""

import itertools
from pathlib import Path

import numpy as np
from jaxtyping import Float

from poly_epo_jax.metrics.intervals import difference_interval, mean_interval
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.records.run_folder import GENERATIONS, METRICS, read_rows
from poly_epo_jax.report.figures import panels
from poly_epo_jax.system.json_files import read_object

STUDY = Path("runs/study-correlated")
SEEDS = range(5)
METHODS = {"grpo": ("GRPO", "#D55E00"), "poly_epo": ("Poly-EPO", "#0072B2")}
NUM_GENERATIONS = 256
KS = [2**power for power in range(9)]


def final(task: str, method: str) -> Float[np.ndarray, "seeds problems ks"]:
    """Returns pass@k of the final policies for each seed and problem at `KS`."""
    curves = []
    for seed in SEEDS:
        label = f"{task}-{method}-lr0.00015-seed{seed}"
        path = STUDY / "evaluation" / task / label / "results.json"
        rows = sorted(read_object(path, "rerun the study")["per_problem"], key=lambda row: row["problem"])
        correct = np.array([row["num_correct"] for row in rows])
        curves.append(np.stack([pass_at_k(NUM_GENERATIONS, correct, k) for k in KS], axis=1))
    return np.stack(curves)


def training(task: str, method: str) -> dict[str, Float[np.ndarray, " seeds"]]:
    """Returns exploratory values of each seed: means over all steps."""
    values: dict[str, list[float]] = {"distinct strategies of 8": [], "squared gradient norm": []}
    for seed in SEEDS:
        rows = read_rows(STUDY / task / f"{method}-lr0.00015-seed{seed}" / METRICS)
        steps = [row for row in rows if "clusters/correct" in row]
        distinct = [row["clusters/correct"] + row["clusters/incorrect"] for row in steps]
        values["distinct strategies of 8"].append(float(np.mean(distinct)))
        values["squared gradient norm"].append(float(np.mean([row["policy/gradient_norm"] ** 2 for row in steps])))
    return {name: np.array(of_seeds) for name, of_seeds in values.items()}


def print_first_groups(task: str, method: str) -> None:
    """Prints the mean numbers of distinct responses and strategies in the logged groups of the first 50 steps."""
    counts = []
    for seed in SEEDS:
        rows = read_rows(STUDY / task / f"{method}-lr0.00015-seed{seed}" / GENERATIONS)
        first = sorted(
            (row["step"], row["problem"], row["response"], row["cluster"]) for row in rows if row["step"] <= 50
        )
        for _, group in itertools.groupby(first, key=lambda row: row[:2]):
            counts.append([len(set(values)) for values in list(zip(*group, strict=True))[2:]])
    print(
        " {}: {:.2f} distinct responses, {:.2f} distinct strategies at first".format(method, *np.mean(counts, axis=0))
    )


def print_difference(name: str, values: Float[np.ndarray, "seeds problems"]) -> None:
    """Prints the mean of paired differences with its intervals over seeds and over problems."""
    low, high = difference_interval(values.mean(axis=0))
    over_seeds = "{:+.3f}, seeds [{:+.3f}, {:+.3f}]".format(*mean_interval(values.mean(axis=1)))
    print(f"  {name}: {over_seeds}, problems [{low:+.3f}, {high:+.3f}]")


def print_task(task: str) -> None:
    """Prints the results of a task."""
    print(task)
    for size in ("", "_half"):
        curves = {name: final(task, name + size) for base in METHODS for name in (base, f"{base}_correlated")}
        for name, values in curves.items():
            texts = [
                "pass@{} {:.3f} [{:.3f}, {:.3f}]".format(k, *mean_interval(values[:, :, KS.index(k)].mean(axis=1)))
                for k in (1, 64, 256)
            ]
            texts += [
                "{} {:.3g} [{:.3g}, {:.3g}]".format(measure, *mean_interval(of_seeds))
                for measure, of_seeds in training(task, name + size).items()
            ]
            print(f" {name}{size}: {', '.join(texts)}")
        for k in (1, 64, 256):
            column = KS.index(k)
            for base in METHODS:
                difference = curves[f"{base}_correlated"] - curves[base]
                print_difference(f"k = {k}: {base}_correlated{size} - {base}{size}", difference[:, :, column])
            gain = curves["poly_epo_correlated"] - curves["grpo_correlated"]
            print_difference(f"k = {k}: poly_epo_correlated{size} - grpo_correlated{size}", gain[:, :, column])
    for base in METHODS:
        for name in (f"{base}_half", f"{base}_correlated_half"):
            difference = final(task, name) - final(task, base)
            for k in (1, 64):
                print_difference(f"k = {k}: {name} - {base}", difference[:, :, KS.index(k)])
        for name in (base, f"{base}_correlated"):
            print_first_groups(task, name)


def draw(task: str) -> None:
    """Draws pass@k, and the paired differences of correlated and independent generations."""
    with panels(2, 2, (4.3, 3.1)) as (figure, (left, right)):
        for base, (label, color) in METHODS.items():
            independent, correlated = final(task, base), final(task, f"{base}_correlated")
            for values, style, kind in ((independent, "--", "independent"), (correlated, "-", "correlated")):
                left.plot(KS, values.mean(axis=(0, 1)), style, color=color, linewidth=2, label=f"{label}, {kind}")
            differences = {"-": correlated - independent}
            differences[":"] = final(task, f"{base}_correlated_half") - final(task, f"{base}_half")
            for style, values in differences.items():
                of_problems = values.mean(axis=0)
                name = f"{label}, half of the prompts" if style == ":" else label
                right.plot(KS, of_problems.mean(axis=0), style, color=color, linewidth=2, label=name)
                if style == "-":
                    right.fill_between(KS, *difference_interval(of_problems), color=color, alpha=0.15, linewidth=0)
        right.axhline(0, color="gray", linewidth=1)
        left.set(title="Solved with k attempts (pass@k)", ylim=(0, 1))
        right.set(title="Correlated minus independent")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(KS[::2], [str(k) for k in KS[::2]])
            axes.minorticks_off()
            axes.set_xlabel("k")
            axes.legend(frameon=False, fontsize=8, loc="upper left" if axes is left else "lower left")
        figure.savefig(Path(__file__).with_name("correlated.png"), facecolor="white")


if __name__ == "__main__":
    for each in ("countdown", "polynomial"):
        print_task(each)
    draw("countdown")
