"""Reads problems with verifiable answers from files or Hugging Face datasets, and removes unusable problems."""

import collections
import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.system.git_lfs import check_downloaded
from poly_epo_jax.system.text import SURROGATE
from poly_epo_jax.tasks.answers import reference_answer, visible
from poly_epo_jax.tasks.data_sets import read_data_set, table_rows
from poly_epo_jax.types import ComparesAnswers, Interactive, Mixed, Problem, Task

SLOT = "{problem}"
BLANK_AT_SYMBOL = re.compile(r"(?<!\w) | (?!\w)")


@dataclasses.dataclass(frozen=True)
class Dropped:
    """Numbers of problems that were removed, by reason.

    Attributes:
      no_answer: Number of rows whose answer is null, NaN, blank or one of the words "notfound",
        "nan" and "null", or does not contain the answer marker.
      unusable_answer: Number of rows whose answer is a list that does not contain exactly one value, a dict without
        `ground_truth`, a boolean, infinite, longer than `answers.MAX_ANSWER_LENGTH` characters, or of another type than
        text and numbers, such as a date. For a dataset of reasoning-gym, number of problems that the package cannot
        generate or whose own answer it does not accept.
      proofs: Number of rows whose answer is the word "proof".
      duplicates: Number of additional copies of problems with usable answers, whether or not the answers agree.
      conflicting: Number of different problems whose copies have conflicting answers.
      held_out: Number of different problems without conflicting answers that are also held-out problems.
      pass_rate: Number of problems whose pass rate is outside the configured range.
      no_pass_rate: Number of problems that the table of pass rates does not contain.
    """

    no_answer: int = 0
    unusable_answer: int = 0
    proofs: int = 0
    duplicates: int = 0
    conflicting: int = 0
    held_out: int = 0
    pass_rate: int = 0
    no_pass_rate: int = 0

    def __add__(self, other: "Dropped") -> "Dropped":
        """Adds the numbers of two parts of the data."""
        return Dropped(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


@runtime_checkable
class Cleaned(Protocol):
    """A task that removed problems from its data, by part ("train" and "held_out")."""

    dropped: dict[str, Dropped]


def read_source(source: str) -> list[dict[str, Any]]:
    """Reads the rows of a file or dataset.

    Args:
      source: A `.jsonl` file, a `.parquet` file, or a Hugging Face dataset or local dataset folder, written `name`,
        `name:split` or `name:configuration:split`. The default split is `train`.

    Returns:
      One dict per row, by column name. Values of the types float16 and float32 are rounded to the shortest decimal
      that identifies them in their type, such as 0.1 instead of 0.10000000149011612. Binary values that contain UTF-8
      are text.

    Raises:
      ValueError: If the source is malformed or empty.
      OSError: If the source is missing or unreachable.
    """
    check_source(source)
    path = Path(source)
    rows = _READERS[path.suffix](path) if path.suffix in _READERS else read_data_set(source)
    if not rows:
        raise ValueError(f"{source} contains no rows.")
    return rows


def check_source(source: str) -> None:
    """Checks that a local source exists and can be read. Datasets of the Hub are not checked.

    Args:
      source: File or dataset, see `read_source`.

    Raises:
      ValueError: If a local source has another format.
      OSError: If a local source is missing.
    """
    path = Path(source)
    is_file = path.suffix in _READERS
    place = path if is_file else Path(source.split(":")[0])
    if not place.exists() and (is_file or source.startswith(("/", "./", "../"))):
        raise FileNotFoundError(f"{source} does not exist; correct the path (relative paths start at {Path.cwd()}).")
    if is_file and not path.is_file():
        raise ValueError(f"{source} is not a regular file; write its rows to a file.")
    if path.is_file() and not is_file:
        raise ValueError(f"{source} must be a {' or '.join(_READERS)} file; convert it to one of these formats.")
    if is_file:
        check_downloaded(path)
    elif any((place / name).is_file() for name in _SAVED_TO_DISK):
        raise ValueError(
            f"{place} was written by save_to_disk; load it with datasets.load_from_disk, write a split with "
            "to_parquet, and set the path of that .parquet file."
        )


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not valid JSON: {error}.") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path} line {number} is not a JSON object; write one {{...}} per line.")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return table_rows(pyarrow.parquet.read_table(path))
    except pyarrow.ArrowException as error:
        raise ValueError(f"Failed to read {path} as Parquet: {error}") from None


_SAVED_TO_DISK = ("state.json", "dataset_dict.json")  # written by save_to_disk of a dataset, and of several splits
_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet}


def load_problems(
    source: str,
    problem_column: str = "problem",
    answer_column: str = "answer",
    id_column: str = "id",
    answer_marker: str = "",
) -> tuple[list[Problem], Dropped]:
    """Reads problems from a file or dataset.

    Args:
      source: File or dataset, see `read_source`.
      problem_column: Column that contains the problem text.
      answer_column: Column that contains the answer, in a form that `answers.reference_answer` accepts.
      id_column: Column that contains the problem id. Rows without a value in this column get the last part of the
        source's path or name and their number, counted from 1, such as `gsm8k/17`.
      answer_marker: Text before the answer in the answer column, see `answers.reference_answer`.

    Returns:
      A tuple of the problems with usable answers, whose prompts are the problem texts, and the numbers of removed rows,
      by reason.

    Raises:
      ValueError: If the source is malformed or empty, a row has no problem or no answer column, a problem is not text,
        a text is not valid Unicode, or no row has a usable answer.
      OSError: If the source is missing or unreachable.
    """
    stem, problems, reasons = source_name(source), [], collections.Counter[str]()
    for number, row in enumerate(read_source(source), start=1):
        text, identifier = row.get(problem_column), row.get(id_column)
        is_blank = text is None or (isinstance(text, str) and not text.strip())
        if is_blank or answer_column not in row:
            raise ValueError(
                f"Row {number} of {source} has no value in column {problem_column if is_blank else answer_column!r}; "
                f"its columns are {', '.join(row)}."
            )
        if not isinstance(text, str):
            raise ValueError(
                f"Column {problem_column!r} in row {number} of {source} must be text, but is a {type(text).__name__}."
            )
        answer, reason = reference_answer(row[answer_column], answer_marker)
        if reason:
            reasons[reason] += 1
            continue
        identifier = f"{stem}/{number}" if identifier is None else str(identifier)
        problem = Problem(identifier, text, answer, source=stem)
        for value in (problem.id, text, answer):
            if surrogate := SURROGATE.search(value):
                raise ValueError(
                    f"Row {number} of {source} contains the lone surrogate {surrogate[0]!a}, which is not a "
                    "character; remove it."
                )
        problems.append(problem)
    if not problems:
        raise ValueError(
            f"No row of {source} has a usable answer in column {answer_column!r} ({reasons_text(reasons)}); correct "
            "the column or the answers."
        )
    return problems, Dropped(**reasons)


def source_name(source: str) -> str:
    """Returns the last part of the path or name of a source, such as `gsm8k` for `openai/gsm8k:main:test`."""
    return Path(source if Path(source).suffix in _READERS else source.split(":")[0]).stem


def source_weights(task: Task) -> Mapping[str, float]:
    """Returns the weights of the datasets of a task, by `Problem.source`. Empty if the task is not `Mixed`.

    Raises:
      ValueError: If a dataset has no positive weight, or no training problems.
    """
    weights = task.source_weights if isinstance(task, Mixed) else {}
    sources = {problem.source for problem in task.train_problems}
    if weights and (weights.keys() != sources or not all(0 < weight < float("inf") for weight in weights.values())):
        raise ValueError(
            f"The weights {dict(weights)} of {type(task).__name__} must have one positive number for each dataset of "
            f"the training problems, {', '.join(sorted(sources))}; correct the weights, or remove a dataset whose "
            "problems are all duplicates."
        )
    return {source: float(weight) for source, weight in weights.items()}


def reasons_text(dropped: Dropped | Mapping[str, int]) -> str:
    """Formats the numbers of removed problems by reason, such as "1 unusable answer, 3 duplicates". Omits zeros."""
    counts = dataclasses.asdict(dropped) if isinstance(dropped, Dropped) else dropped
    return ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in counts.items() if count)


def clean_problems(
    problems: Sequence[Problem], same_answer: Callable[[Problem, str, str], bool], held_out: Sequence[Problem] = ()
) -> tuple[list[Problem], Dropped]:
    """Removes duplicate, conflicting and held-out problems.

    Problems are copies of each other if their prompts have the same `canonical_text`. The first copy is kept. If the
    answers of the copies are not equal, the correct answer is unknown and all copies are removed.

    Args:
      problems: Problems to clean.
      same_answer: Function `(problem, answer, other) -> bool` that compares the answers of copies, see
        `types.HasAnswers`. It is only called for answers that differ in `canonical_text` without dollar signs.
      held_out: Problems that must not appear in the result.

    Returns:
      The remaining problems in their original order, and the numbers of removed problems.

    Raises:
      ValueError: If two of the problems have the same id.
    """
    check_ids(problems)
    same: dict[str, list[Problem]] = {}
    for problem in problems:
        same.setdefault(canonical_text(problem.prompt), []).append(problem)
    agreed = {text: copies[0] for text, copies in same.items() if _agree(*copies, same_answer=same_answer)}
    tested = {canonical_text(problem.prompt) for problem in held_out}
    kept = [problem for text, problem in agreed.items() if text not in tested]
    dropped = Dropped(
        duplicates=len(problems) - len(same), conflicting=len(same) - len(agreed), held_out=len(agreed) - len(kept)
    )
    return kept, dropped


def check_problems(task: object) -> None:
    """Checks the problems of a task. They are not copied, because a task may load them when they are read.

    Raises:
      ConfigError: If a part is not a sequence of problems, or if the id, prompt or answer of a problem is not a string
        or its id is empty.
      ValueError: If two training problems or two held-out problems have the same id.
    """
    for part in ("train_problems", "held_out_problems"):
        name, problems = f"{type(task).__name__}.{part}", getattr(task, part, None)
        if not isinstance(problems, Sequence):
            raise ConfigError(
                f"{name} must be a list or another sequence of Problem, but is a {type(problems).__name__}; set it to "
                "a list, which may be empty for held-out problems."
            )
        for index, problem in enumerate(problems):
            texts = [getattr(problem, field, None) for field in ("id", "prompt", "answer")]
            if not (isinstance(problem, Problem) and all(isinstance(text, str) for text in texts) and texts[0]):
                raise ConfigError(
                    f"{name}[{index}] must be a Problem whose id, prompt and answer are strings, with an id that is "
                    f"not empty, but is {problem!r:.200}; convert them with str()."
                )
        check_ids(problems)


def check_ids(problems: Sequence[Problem]) -> None:
    """Checks that the ids of problems are unique.

    Raises:
      ValueError: If two of the problems have the same id.
    """
    for identifier, count in collections.Counter(problem.id for problem in problems).most_common(1):
        if count > 1:
            raise ValueError(f"{count} problems have the id {identifier!r}; make the ids unique.")


def usable_problems(task: Task) -> dict[str, tuple[Sequence[Problem], Dropped]]:
    """Returns the problems of a task and the numbers of removed problems, by part ("train" and "held_out").

    Duplicate, conflicting and held-out problems are removed, unless the task has removed them itself (`Cleaned`) or is
    interactive: episodes that start with the same prompt can be different problems.
    """
    parts = {"train": task.train_problems, "held_out": task.held_out_problems}
    if isinstance(task, Cleaned):
        return {name: (part, task.dropped[name]) for name, part in parts.items()}
    if isinstance(task, Interactive):
        return {name: (part, Dropped()) for name, part in parts.items()}
    same_answer = task.same_answer if isinstance(task, ComparesAnswers) else lambda *_: True
    held_out, dropped = clean_problems(parts["held_out"], same_answer)
    return {"train": clean_problems(parts["train"], same_answer, held_out), "held_out": (held_out, dropped)}


def _agree(first: Problem, *copies: Problem, same_answer: Callable[[Problem, str, str], bool]) -> bool:
    others = {canonical_text(copy.answer.replace("$", "")): copy.answer for copy in copies}
    others.pop(canonical_text(first.answer.replace("$", "")), None)
    return all(same_answer(first, first.answer, other) for other in others.values())


def canonical_text(text: str) -> str:
    """Returns a text in the form in which problems are compared: composed, and without invisible characters.

    Blanks between letters or digits are one space, because "1 1/2" is not "11/2". Other blanks are removed, because
    `x = 1` is often written `x=1`.
    """
    return BLANK_AT_SYMBOL.sub("", " ".join(visible(text).split()))


def check_template(template: str) -> None:
    """Checks a prompt template.

    Raises:
      ValueError: If the template is not empty and does not contain `{problem}` exactly once.
    """
    if template and template.count(SLOT) != 1:
        raise ValueError(f"template={template!r} must contain {SLOT} exactly once, in place of the problem.")


def prompted(problems: Sequence[Problem], template: str, message: str) -> Sequence[Problem]:
    """Inserts the text of each problem into its prompt.

    Args:
      problems: Problems whose prompts are their texts.
      template: Text with `{problem}`. The names of control tokens are encoded as plain text in the problem only.
      message: Chat message with `{problem}`, which is used if the template is empty.
    """
    start, inserted = template.find(SLOT), []
    for problem in problems:
        untrusted = (start, start + len(problem.prompt)) if template else (0, 0)
        prompt = (template or message).replace(SLOT, problem.prompt)
        inserted.append(dataclasses.replace(problem, prompt=prompt, chat=not template, untrusted=untrusted))
    return tuple(inserted)
