"""One sampling pass over a benchmark, kept on disk as it arrives, and every number of an evaluation from it.

A folder EVALUATION/<benchmark>/<model>/ holds

    about.json       which model, benchmark, sampling and judge the samples are from
    samples.jsonl    one row per sample: {"problem", "prompt", "gold", "sample", "response", "token_ids",
                     "finish_reason", "reward", "answer", "answer_text", "cluster", "rationale"}; equal numbers in
                     "answer" are one vote, -1 is no answer; cluster is null where there is no clustering
    results.json     every metric with its interval, see `results`; docs/evaluation.md defines them
"""

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.config import changed_keys
from poly_epo_jax.grading import grade_groups
from poly_epo_jax.metrics.answer_entropy import answer_entropy
from poly_epo_jax.metrics.bootstrap import bootstrap_interval
from poly_epo_jax.metrics.branching import mean_active_branches
from poly_epo_jax.metrics.diversity import distinct_clusters
from poly_epo_jax.metrics.majority import NO_ANSWER, majority_at_k
from poly_epo_jax.metrics.pass_at_k import pass_at_k
from poly_epo_jax.types import (
    DEGENERATE_CLUSTER,
    Clustering,
    GradedGroup,
    Judge,
    Problem,
    Rollouts,
    Sampling,
    Task,
    Voting,
)

SAMPLES, RESULTS, ABOUT = "samples.jsonl", "results.json", "about.json"
Row = dict[str, Any]


def open_folder(folder: Path, about: dict[str, Any]) -> None:
    """Makes the folder, or makes sure that what is in it is of the same model, benchmark, sampling and judge.

    Raises:
      ValueError: it is of another.
    """
    file = folder / ABOUT
    if file.exists():
        changed = changed_keys(json.loads(file.read_text()), about)
        if changed:
            raise ValueError(
                f"{folder} holds samples with another {', '.join(changed)}; choose another --output, or delete it."
            )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(about, indent=1) + "\n")


async def draw_samples(
    folder: Path,
    rollouts: Rollouts,
    task: Task,
    judge: Judge,
    problems: Sequence[Problem],
    num_samples: int,
    sampling: Sampling,
    progress: Callable[[int], None],
) -> None:
    """Completes the samples of an opened folder: what an earlier call, however it ended, has left is not drawn again.

    Args:
      progress: told how many problems are complete.

    Raises:
      ValueError: the file is damaged.
    """
    path = folder / SAMPLES
    order = {problem.id: place for place, problem in enumerate(problems)}
    complete = _drop_incomplete(path, set(order), num_samples)
    progress(len(complete))
    missing = [problem for problem in problems if problem.id not in complete]

    async def write(graded: GradedGroup) -> None:
        rows = await asyncio.to_thread(_rows, graded, task)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        complete.add(graded.group.problem.id)
        progress(len(complete))

    if missing:
        await grade_groups(rollouts.generate(missing, num_samples, sampling), missing, task, judge, write)
    _sort(path, order)


def results(folder: Path) -> dict[str, Any]:
    """The metrics of samples.jsonl, each {"mean", "low", "high"}: means over problems, and 95% bootstrap bounds.

    With m samples of each problem: pass@k for every k up to m; for k = 1, 2, 4, ... up to m majority_accuracy@k and
    majority_share@k, and where problems were clustered, correct_clusters@k and incorrect_clusters@k; solved,
    answer_entropy, response_length; and "branching", the mean number of active branches by token position.
    """
    problems: dict[str, list[Row]] = {}
    token_ids: dict[str, list[np.ndarray]] = {}
    for row in read_samples(folder / SAMPLES):
        token_ids.setdefault(row["problem"], []).append(np.array(row.pop("token_ids"), np.int32))
        kept = {key: row[key] for key in ("reward", "answer", "cluster")}
        problems.setdefault(row["problem"], []).append(kept)
    table = list(problems.values())
    rewards = np.array([[row["reward"] for row in rows] for rows in table])
    answers = np.array([[row["answer"] for row in rows] for rows in table])
    correct, num_samples = rewards == 1, rewards.shape[1]
    num_correct = correct.sum(axis=1)
    some = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]

    values = {f"pass@{k}": pass_at_k(num_samples, num_correct, k) for k in range(1, num_samples + 1)}
    for k in some:
        accuracy, share = majority_at_k(answers, correct, k)
        values |= {f"majority_accuracy@{k}": accuracy, f"majority_share@{k}": share}
    lengths = np.array([[len(ids) for ids in of_problem] for of_problem in token_ids.values()])
    values |= {"solved": correct.any(axis=1).astype(float), "answer_entropy": answer_entropy(answers)}
    values |= {"response_length": lengths.mean(axis=1)}
    metrics = _with_intervals(values)

    clustered = [place for place, rows in enumerate(table) if rows[0]["cluster"] is not None]
    if clustered:
        clusters = np.array([[row["cluster"] for row in table[place]] for place in clustered])
        reasoned, right = clusters != DEGENERATE_CLUSTER, correct[clustered]
        values = {}
        for k in some:
            values[f"correct_clusters@{k}"] = distinct_clusters(clusters, right & reasoned, k)
            values[f"incorrect_clusters@{k}"] = distinct_clusters(clusters, ~right & reasoned, k)
        metrics |= _with_intervals(values)
    return {
        "num_problems": len(table),
        "num_samples": num_samples,
        "num_clustered": len(clustered),
        "metrics": metrics,
        "branching": {"mean": mean_active_branches(list(token_ids.values())).tolist()},
        "per_problem": [
            {"problem": problem, "num_correct": int(count), "num_samples": num_samples}
            for problem, count in zip(problems, num_correct, strict=True)
        ],
    }


def read_samples(path: Path) -> Iterator[Row]:
    """The rows of a samples.jsonl, one at a time.

    Raises:
      ValueError: a line is damaged.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield json.loads(line)
            except ValueError:
                raise ValueError(f"{path}, line {number}, is not a sample: mend or delete that line.") from None


def _rows(graded: GradedGroup, task: Task) -> list[Row]:
    problem, generations = graded.group.problem, graded.group.generations
    texts = [task.answer(problem, y.text) if isinstance(task, Voting) else None for y in generations]
    ids = _answer_ids(task, problem, texts, graded.rewards)
    nothing = [None] * len(generations)
    clusters, rationales = nothing, nothing
    if isinstance(graded.clustering, Clustering):
        clusters, rationales = graded.clustering.ids.tolist(), graded.clustering.rationales or nothing
    return [
        {
            "problem": problem.id,
            "prompt": problem.prompt,
            "gold": problem.answer,
            "sample": index,
            "response": y.text,
            "token_ids": y.token_ids.tolist(),
            "finish_reason": y.finish_reason,
            "reward": float(graded.rewards[index]),
            "answer": ids[index],
            "answer_text": texts[index],
            "cluster": clusters[index],
            "rationale": rationales[index],
        }
        for index, y in enumerate(generations)
    ]


def _answer_ids(task: Task, problem: Problem, texts: Sequence[str | None], rewards: np.ndarray) -> list[int]:
    """A number for each answer, in order of first appearance; answers that the task holds equal share one."""
    ids: dict[str, int] = {}
    firsts: list[tuple[str, float]] = []
    for text, reward in zip(texts, rewards.tolist(), strict=True):
        if text is None or text in ids or not isinstance(task, Voting):
            continue
        same = (
            number
            for number, (first, its_reward) in enumerate(firsts)
            # Equality by a grader is not transitive: a right and a wrong answer are never one vote.
            if its_reward == reward and task.same_answer(problem, first, text)
        )
        ids[text] = next(same, len(firsts))
        if ids[text] == len(firsts):
            firsts.append((text, reward))
    return [NO_ANSWER if text is None else ids[text] for text in texts]


def _with_intervals(values: dict[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    table = np.stack(list(values.values()), axis=1).astype(float)
    # One problem says nothing of how problems differ.
    low, high = bootstrap_interval(table) if len(table) > 1 else (np.full(table.shape[1], np.nan),) * 2
    means = table.mean(axis=0)
    return {
        name: {"mean": float(mean), "low": _finite(bottom), "high": _finite(top)}
        for name, mean, bottom, top in zip(values, means, low, high, strict=True)
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _drop_incomplete(path: Path, wanted: set[str], num_samples: int) -> set[str]:
    """Leaves in the file what belongs to complete problems, and returns these."""
    if not path.exists():
        return set()
    lines: dict[str, list[str]] = {}
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):  # a crash can cut the last line short
                lines.setdefault(json.loads(line)["problem"], []).append(line)
    complete = {problem for problem, found in lines.items() if problem in wanted and len(found) == num_samples}
    _replace(path, (line for problem in lines if problem in complete for line in lines[problem]))
    return complete


def _sort(path: Path, order: dict[str, int]) -> None:
    """By problem and sample, so that the same samples make the same file whenever they came."""
    with path.open(encoding="utf-8") as file:
        lines = file.readlines()

    def place(line: str) -> tuple[int, int]:
        row = json.loads(line)
        return order[row["problem"]], row["sample"]

    _replace(path, sorted(lines, key=place))


def _replace(path: Path, lines: Any) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(temporary, path)
