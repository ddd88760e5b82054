"""Generates and scores the problems of a dataset of reasoning-gym.

`python -P gym_worker.py DATASET OPTIONS SEED SIZE ...` generates problems, and `worker.py` runs this script to score
answers. The processes do not import this package. They are separate, because some datasets draw from the global random
generators, depend on the hash seed of the process, print, or evaluate answers as Python.
"""

import base64
import difflib
import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset  # pyright: ignore[reportMissingImports]


def open_grader(name: str, options: str) -> Callable[[str, str], float]:
    """Returns a function `(entry, answer) -> score in [0, 1]`, which raises exceptions for some incorrect answers."""
    score = create_dataset(name, **json.loads(options)).score_answer
    return lambda entry, answer: min(1.0, max(0.0, float(score(answer, pickle.loads(base64.b64decode(entry))))))


def generate(dataset: Any, index: int) -> list[str]:
    """Returns question, answer and encoded entry of a problem. The answer is empty if the package does not know one.

    Raises:
      Exception: If the package cannot generate the problem, or rejects its own answer.
    """
    random.seed(dataset.seed + index)  # some datasets do not seed the global generator themselves
    entry = dataset[index]
    question, answer = entry["question"], entry["answer"]
    if answer is not None and dataset.score_answer(answer, entry) < 1:
        raise ValueError(f"the answer {answer!r} to {question!r} is rejected")
    return [question, answer or "", base64.b64encode(pickle.dumps(entry)).decode()]


def main() -> None:
    """Writes a JSON line per problem of each pair SEED SIZE: the problem, or the error for an unusable problem."""
    name, options, *parts = sys.argv[1:]
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 3, 0)
        sys.exit(f"reasoning-gym has no dataset {name!r}; similar names are {', '.join(near)}")
    output = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # some datasets print
    for seed, size in zip(map(int, parts[::2]), map(int, parts[1::2]), strict=True):
        try:
            dataset = create_dataset(name, **json.loads(options), seed=seed, size=size)
        except Exception as error:
            sys.exit(f"{type(error).__name__}: {error}")
        for index in range(size):
            try:
                problem = generate(dataset, index)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            print(json.dumps(problem), file=output)


if __name__ == "__main__":
    main()
