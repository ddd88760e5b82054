"""A component that fails or returns nonsense in any step never leaves a checkpoint of a step without its rows.

Each run fails at step 3 of 5, is restarted with another fault, and so on. The last restart has no fault. It must write
the same bytes as an uninterrupted run.
"""

import asyncio
import functools
import gc
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ByLetter, LetterJudge, RandomLetters, unchecked
from tiny_training import tiny_config, tiny_update, train_tiny

from poly_epo_jax.metrics import evaluation
from poly_epo_jax.metrics.evaluation import EVALUATION_METRICS, EvaluationMetric
from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.records.tracking import Tracker
from poly_epo_jax.step.advantages import AdvantageFunction, make_advantages
from poly_epo_jax.step.update import PolicyUpdate
from poly_epo_jax.types import Clustering, Completion, Group, Params, Problem, Request, Sampling

pytestmark = pytest.mark.slow

CHANGES, STEP = {"train.num_steps": 5, "eval.every": 3, "checkpoint.every": 50}, 3
EXCEPTIONS = (ValueError, StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt, asyncio.CancelledError)
FEW_EXCEPTIONS = ValueError, StopIteration, asyncio.CancelledError
REWARDS = ("1", True, math.nan, [1.0])
IDS = np.arange(8)
CLUSTERINGS = (
    *(IDS, None, unchecked(Clustering, ids=IDS.tolist(), rationales=None, features={})),
    *(Clustering(IDS, ("a",)), Clustering(IDS + 93), Clustering(IDS, features={"rewards": IDS})),
)
COUNTS = (None, {"x": "1"}, {1: 1.0}, {"step": 9.0}, {"reward": 1.0})
VALUES = (None, ["a", "b"], [1.0, math.nan])
FAULTS: dict[str, Sequence[Any]] = {
    "reward": (*EXCEPTIONS, *REWARDS),
    "held-out reward": (*FEW_EXCEPTIONS, *REWARDS[:2]),
    # Exceptions of a judge are counted, and the run continues.
    "cluster": CLUSTERINGS,
    "held-out cluster": (CLUSTERINGS[0], CLUSTERINGS[2]),
    "task.metrics": (*FEW_EXCEPTIONS, *COUNTS),
    "judge.metrics": (ValueError, {"task/count": 1.0}),
    "evaluation metric": (*FEW_EXCEPTIONS, *VALUES),
    **dict.fromkeys(("advantages", "sample", "push_weights"), FEW_EXCEPTIONS),
}
"""Faults by place: exception types, and values that are returned instead of the usual value."""
AFTER_THE_STEP = ("held-out reward", "held-out cluster", "evaluation metric", "push_weights")
"""Places after the rows of the step."""


class Faulty:
    """Components of a run, of which one fails at step 3.

    Args:
      place: Key of `FAULTS`, or "sample after" for step 4. Empty for a run without fault.
      fault: An exception type to raise, or a value to return.
    """

    def __init__(self, place: str = "", fault: Any = None):
        self.place, self.fault, self.sampling_seed, self.version = place, fault, 0, 0

    def at(self, place: str, value: Any, is_due: bool) -> Any:
        if self.place != place or not is_due:
            return value
        if isinstance(self.fault, type):
            raise self.fault("a fault")
        return self.fault

    def graded(self, name: str, value: Any) -> Any:
        """Applies a fault of the step, or of the evaluation after it. The seeds of steps are their numbers."""
        value = self.at(name, value, self.sampling_seed == STEP)
        return self.at(f"held-out {name}", value, self.sampling_seed == 0 and self.version == STEP)


def components(faulty: Faulty) -> dict[str, Any]:
    class Task(ByLetter):
        def reward(self, problem, generation) -> Any:
            return faulty.graded("reward", super().reward(problem, generation))

        def metrics(self) -> Any:
            return faulty.at("task.metrics", {"task/count": 1.0}, faulty.sampling_seed == STEP)

    class Judge(LetterJudge):
        async def cluster(self, group: Group) -> Any:
            return faulty.graded("cluster", await super().cluster(group))

        def metrics(self) -> Any:
            return faulty.at("judge.metrics", {"judge/count": 1.0}, faulty.sampling_seed == STEP)

    class Sampler(RandomLetters):
        async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
            faulty.sampling_seed = sampling.seed
            faulty.at("sample", None, sampling.seed == STEP)
            faulty.at("sample after", None, sampling.seed == STEP + 1)
            async for completion in super().sample(requests, sampling):
                yield completion

        async def push_weights(self, params: Params, version: int) -> None:
            faulty.at("push_weights", None, version == STEP)
            faulty.version = version
            await super().push_weights(params, version)

    def advantages(step: int, problems: Sequence[Problem], features: Any) -> np.ndarray:
        return faulty.at("advantages", estimate(step, problems, features), step == STEP)

    update, estimate = programs()
    return {"task": Task(), "judge": Judge(), "sampler": Sampler(), "update": update, "advantages": advantages}


@functools.cache
def programs() -> tuple[PolicyUpdate, AdvantageFunction]:
    """Returns the update and the estimator, which all runs share, so that they are compiled once."""
    config = tiny_config(**CHANGES)
    return tiny_update(config), make_advantages(config.algo, seed=0)


def run(folder: Path, faulty: Faulty) -> None:
    """Starts or continues a run."""

    def metric(rewards: np.ndarray) -> Any:
        is_due = faulty.sampling_seed == 0 and faulty.version == STEP
        return faulty.at("evaluation metric", rewards.mean(axis=1), is_due)

    with pytest.MonkeyPatch.context() as patch:
        entries = {**EVALUATION_METRICS, "mine": EvaluationMetric(metric, "mine", "Mean reward.")}
        patch.setattr(evaluation, "EVALUATION_METRICS", entries)
        train_tiny(folder, **components(faulty), changes=CHANGES)


def logged_steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl") if "reward" in row]


def saved_steps(folder: Path) -> list[int]:
    return Checkpoints(folder / "checkpoints", read_only=True).steps


def assert_same_rows(folder: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "generations.jsonl"):
        assert (folder / name).read_bytes() == (other / name).read_bytes()
    assert saved_steps(folder)[-1] == saved_steps(other)[-1] == 5


@pytest.fixture(scope="module", autouse=True)
def fast_garbage_collection() -> Iterator[None]:
    """Excludes existing objects, because each restart collects garbage when it reads a checkpoint."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder, Faulty())
    assert logged_steps(folder) == [1, 2, 3, 4, 5]
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl") if "eval/mine" in row] == [0, 3, 5]
    return folder


@pytest.mark.parametrize("place", FAULTS)
def test_no_checkpoint_counts_a_step_without_its_row(tmp_path: Path, uninterrupted: Path, place: str):
    expected = (uninterrupted / "metrics.jsonl").read_bytes()
    last = STEP if place in AFTER_THE_STEP else STEP - 1
    for fault in FAULTS[place]:
        with pytest.raises(BaseException):  # noqa: B017
            run(tmp_path, Faulty(place, fault))
        assert expected.startswith((tmp_path / "metrics.jsonl").read_bytes()), fault
        assert (saved_steps(tmp_path), logged_steps(tmp_path)) == ([last], list(range(1, last + 1))), fault
    run(tmp_path, Faulty())
    assert_same_rows(tmp_path, uninterrupted)


@pytest.mark.parametrize(
    ("method", "logged", "saved"),
    [
        # The weights before a step no longer exist when its rows are written.
        (Tracker.log_generations, [1, 2], []),
        (Tracker.log, [1, 2], []),
        (Tracker.log_timing, [1, 2, 3], [3]),
        (Tracker.publish, [1, 2, 3], [3]),
        (Checkpoints.save, [1, 2, 3], []),
    ],
)
def test_a_step_is_saved_if_its_rows_are_written(
    tmp_path: Path, uninterrupted: Path, method: Callable[..., Any], logged: list[int], saved: list[int]
):
    def failing(self: Any, step: int, *arguments: Any) -> Any:
        if step == STEP:
            raise OSError("a fault")
        return method(self, step, *arguments)

    owner = Checkpoints if method is Checkpoints.save else Tracker
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="a fault"):
        patch.setattr(owner, method.__name__, failing)
        # The step is also saved when the next step fails.
        run(tmp_path, Faulty("sample after", ValueError) if owner is Checkpoints else Faulty())
    assert (logged_steps(tmp_path), saved_steps(tmp_path)) == (logged, saved)
    run(tmp_path, Faulty())
    assert_same_rows(tmp_path, uninterrupted)
