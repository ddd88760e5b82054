"""Writes fake evaluation folders with the files of `python -m poly_epo_jax.evaluate`."""

import json
from pathlib import Path
from typing import Any

import numpy as np

HOSTILE = (
    "</pre></script><script>alert('x')</script><img src=x onerror=alert(1)> \x00\x1b[31m \u202e \ud800 $title ${x}"
)


def write_fake_evaluation(
    folder: Path,
    accuracy: dict[str, float],
    benchmarks: tuple[str, ...] = ("aime26", "minerva"),
    num_problems: int = 6,
    num_generations: int = 8,
    num_tokens: int = 40,
    clustered: bool = True,
) -> Path:
    """Writes an evaluation of models with the given accuracies. Problem 0 is never solved, and problem 1 always."""
    for benchmark in benchmarks:
        for seed, (model, chance) in enumerate(accuracy.items()):
            path = folder / benchmark / model
            path.mkdir(parents=True)
            rng = np.random.default_rng(seed)
            correct = rng.random((num_problems, num_generations)) < chance
            correct[0], correct[1:2], correct[2:3, ::2] = False, True, True
            correct[2:3, 1::2] = False
            rows = [
                _row(problem, generation, bool(correct[problem, generation]), rng, num_tokens, clustered)
                for generation in range(num_generations)  # the rows of a problem are not adjacent
                for problem in range(num_problems)
            ]
            with (path / "generations.jsonl").open("w") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
            results = _results(benchmark, model, correct, num_tokens, clustered, 1 + seed)
            (path / "results.json").write_text(json.dumps(results))
    return folder


def _row(
    problem: int, generation: int, correct: bool, rng: np.random.Generator, num_tokens: int, clustered: bool
) -> dict[str, Any]:
    shared = [7] * int(rng.integers(1, max(2, num_tokens // 4)))
    token_ids = shared + rng.integers(1000, 150_000, num_tokens - len(shared)).tolist()
    text = (
        HOSTILE
        if generation == 0
        else f"Strategy {generation % 3}: try x = {generation}.\nSo y = {generation**2}. " + "z" * num_tokens
    )
    return {
        "problem": f"problem-{problem}",
        "prompt": f"Find x & y with x < {problem}. <b>Think</b>.",
        "gold": str(problem),
        "generation": generation,
        "response": text,
        "token_ids": token_ids,
        "finish_reason": "length" if generation == 3 else "stop",
        "reward": float(correct),
        "correct": correct,
        "answer": 0 if correct else 1 + generation,
        "answer_text": str(problem) if correct else f"<i>{generation}</i>",
        "cluster": generation % 3 if clustered and generation != 5 else 100 if clustered else None,
        "rationale": f"It tries strategy {generation % 3}. {HOSTILE}" if clustered else None,
    }


def _results(
    benchmark: str, model: str, correct: np.ndarray, num_tokens: int, clustered: bool, spread: int
) -> dict[str, Any]:
    num_problems, num_generations = correct.shape
    share = correct.mean(axis=1)
    metrics = {f"pass@{k}": float(np.mean(1 - (1 - share) ** k)) for k in range(1, num_generations + 1)}
    ks = [2**power for power in range(num_generations.bit_length()) if 2**power <= num_generations]
    for k in ks:
        metrics[f"majority_accuracy@{k}"] = float(share.mean()) * (1 + 0.05 * np.log2(k))
        metrics[f"majority_vote_share@{k}"] = 1 / k ** (0.1 * spread)
        if clustered:
            metrics |= {f"correct_clusters@{k}": k**0.3 * spread, f"incorrect_clusters@{k}": k**0.4}
    metrics |= {"solved": float((share > 0).mean()), "answer_entropy": 0.3 * spread, "response_length": num_tokens}
    positions = np.arange(1, num_tokens + 1)
    return {
        "benchmark": benchmark,
        "model": model,
        "num_problems": num_problems,
        "num_generations": num_generations,
        "sampling": {"temperature": 1.0},
        "metrics": {
            name: {"mean": mean, "low": 0.9 * mean, "high": min(1.1 * mean, max(mean, 1.0))}
            for name, mean in metrics.items()
        },
        "branching": {"mean": (num_generations * (1 - np.exp(-spread * positions / num_tokens * 4))).tolist()},
        "per_problem": [
            {"problem": f"problem-{problem}", "num_correct": int(row.sum()), "num_generations": num_generations}
            for problem, row in enumerate(correct)
        ],
    }
