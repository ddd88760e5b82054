"""Selects and shortens the generations that a report shows.

Files are read row by row, because they can contain millions of tokens.

A collection is an entry of the page's browser of generations: a model on a benchmark, or a step of a run. It is a dict,
which `bound` makes JSON-serializable: {"model", "part", "file", "all_problems", "all_generations",
"problems": [{"id", "prompt", "gold", "size", "correct", "clusters": [{"id", "size", "correct"}], "generations": []}]}.
"size" and "correct" count all generations with a reward, including generations that are not shown.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from poly_epo_jax.evaluate.folder import read_generations
from poly_epo_jax.records.run_folder import GENERATIONS, LOGGED_GENERATION
from poly_epo_jax.system.json_files import Row, read_rows

Collection = dict[str, Any]
# Control characters and characters that change the text direction are shown as Python escape sequences.
_CONTROLS = [*range(32), *range(127, 160), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_VISIBLE = {code: ascii(chr(code))[1:-1] for code in _CONTROLS if chr(code) not in "\n\t"}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Limits of the shown problems, generations and texts.

    Attributes:
      problems: Maximum number of problems per collection.
      generations: Maximum number of generations per problem.
      characters: Maximum number of characters per text.
    """

    problems: int = 20
    generations: int = 16
    characters: int = 4000


DEFAULT_BOUNDS = Bounds()
_SMALLER_BOUNDS = (
    DEFAULT_BOUNDS,
    Bounds(20, 16, 2000),
    Bounds(20, 8, 1500),
    Bounds(10, 8, 1000),
    Bounds(10, 4, 500),
    Bounds(3, 2, 200),
)


def run_collections(label: str, folder: Path) -> list[Collection]:
    """Collects the generations of the last and the first logged step of a run. The page opens at the last step.

    Args:
      label: Label of the run.
      folder: The run folder.

    Returns:
      At most two collections. Empty if no generations were logged.

    Raises:
      ValueError: If a row is corrupted.
    """
    file, first, last = folder / GENERATIONS, None, None
    for step, rows in itertools.groupby(read_rows(file, LOGGED_GENERATION), key=lambda row: row["step"]):
        last = collect(label, f"step {step}", file, rows)
        first = first or last
    at_steps = [last, first] if first is not last else [last]
    return [shown for shown in at_steps if shown]


def evaluation_collection(
    model: str, benchmark: str, folder: Path, tree_problem: str | None, tree_size: int
) -> tuple[Collection | None, dict[int, tuple[np.ndarray, bool]]]:
    """Collects the generations of a model for the first problems of a benchmark.

    Args:
      model: Label of the model.
      benchmark: Label of the benchmark.
      folder: Folder of the model on the benchmark.
      tree_problem: Id of the problem of the rollout tree. None if no tree is drawn for this model.
      tree_size: Maximum number of generations in the tree.

    Returns:
      The collection, or None if there are no generations, and the token ids and correctness of the first `tree_size`
      generations of `tree_problem`, by generation index.

    Raises:
      ValueError: If a row is corrupted.
    """
    rollouts: dict[int, tuple[np.ndarray, bool]] = {}

    def rows() -> Iterator[Row]:
        for row in read_generations(folder):
            if row["problem"] == tree_problem and row["generation"] < tree_size and row["reward"] is not None:
                rollouts[row["generation"]] = np.array(row["token_ids"], np.int64), row["correct"]
            yield row

    collection = collect(model, benchmark, folder / GENERATIONS, rows())
    return collection if collection["all_generations"] else None, dict(sorted(rollouts.items()))


def collect(model: str, part: str, file: Path, rows: Iterable[Row]) -> Collection:
    """Collects the generations of the first problems of given rows.

    Args:
      model: Label of the model, run or judge.
      part: Label of the benchmark, step or input.
      file: File that contains all generations.
      rows: Rows with the columns of `GENERATION`.
    """
    problems: dict[str, Row] = {}
    names: set[str] = set()
    num_generations = 0
    for row in rows:
        if row["reward"] is None:  # the environment or the reward failed
            continue
        num_generations += 1
        # Numbered if a step contains the problem repeatedly: clusters differ by occurrence.
        name = f"{row['problem']} ({row['occurrence'] + 1})" if row.get("occurrence") else row["problem"]
        names.add(name)
        if name not in problems:
            if len(problems) == DEFAULT_BOUNDS.problems:
                continue
            texts = {"id": name, "prompt": row["prompt"], "gold": row.get("gold")}
            problems[name] = {**_excerpts(texts), "size": 0, "correct": 0, "clusters": {}, "generations": []}
        problem = problems[name]
        cluster = problem["clusters"].setdefault(row["cluster"], {"id": row["cluster"], "size": 0, "correct": 0})
        for counts in (problem, cluster):
            counts["size"] += 1
            counts["correct"] += row["correct"]
        if row["generation"] < DEFAULT_BOUNDS.generations:
            problem["generations"].append(_generation(row))
    for problem in problems.values():
        problem["clusters"] = sorted(problem["clusters"].values(), key=lambda cluster: -cluster["size"])
        problem["generations"].sort(key=lambda generation: generation["number"])
    return {
        "model": model,
        "part": part,
        "file": str(file),
        "all_problems": len(names),
        "all_generations": num_generations,
        "problems": list(problems.values()),
    }


def bound(collections: Sequence[Collection], max_bytes: int) -> tuple[list[Collection], Bounds]:
    """Shortens collections so that their JSON has at most `max_bytes` bytes.

    Args:
      collections: The collections.
      max_bytes: Maximum size of the JSON text. If the tightest bounds exceed it, no problems are shown.

    Returns:
      The JSON-serializable collections, and the bounds that were applied.
    """
    bounds = DEFAULT_BOUNDS
    for bounds in _SMALLER_BOUNDS:
        bounded, shorten = [_cut(one, bounds) for one in collections], methodcaller("within", bounds.characters)
        text = json.dumps(bounded, ensure_ascii=False, default=shorten)
        if len(text.encode(errors="replace")) <= max_bytes:
            return json.loads(text), bounds
    return [{**collection, "problems": []} for collection in collections], bounds


@dataclasses.dataclass(frozen=True)
class TextExcerpt:
    """The beginning and the end of a text, which are sufficient for all bounds.

    Attributes:
      head: Beginning of the text, or the full text if it is short.
      tail: End of the text. Empty if `head` is the full text.
      length: Length of the full text, in characters.
    """

    head: str
    tail: str
    length: int

    @classmethod
    def of(cls, text: str) -> "TextExcerpt":
        """Creates the excerpt of a text, with control characters escaped."""
        whole = len(text) <= DEFAULT_BOUNDS.characters
        ends = (text, "") if whole else (text[: DEFAULT_BOUNDS.characters], text[-DEFAULT_BOUNDS.characters :])
        return cls(ends[0].translate(_VISIBLE), ends[1].translate(_VISIBLE), len(text))

    def within(self, characters: int) -> str:
        """Returns the full text if it has at most `characters` characters, and otherwise its two ends.

        The ends have `characters` characters together. A note between them gives the number of omitted characters.
        """
        if self.length <= characters:
            return self.head
        end = characters // 3
        note = f"[… {self.length - characters:,} characters omitted …]"
        return f"{self.head[: characters - end]}\n{note}\n{(self.tail or self.head)[-end:]}"


def _generation(row: Row) -> Row:
    texts = {"response": row["response"], "rationale": row.get("rationale"), "answer": row.get("answer_text")}
    others = {name: row[name] for name in ("reward", "correct", "cluster")} | {"advantage": row.get("advantage")}
    length = {"tokens": len(row["token_ids"])} if "token_ids" in row else {}
    cut = {"cut": True} if row.get("finish_reason") == "length" else {}
    return {"number": row["generation"], **others, **length, **cut, **_excerpts(texts)}


def _excerpts(texts: Mapping[str, Any]) -> dict[str, TextExcerpt]:
    return {name: TextExcerpt.of(str(text)) for name, text in texts.items() if text is not None}


def _cut(collection: Collection, bounds: Bounds) -> Collection:
    """Returns a collection whose problems and generations are limited to the bounds."""
    problems = [
        {**problem, "generations": [one for one in problem["generations"] if one["number"] < bounds.generations]}
        for problem in collection["problems"][: bounds.problems]
    ]
    return {**collection, "problems": problems}
