"""Tests environments in worker processes: equal episodes, failures of single episodes, and tasks of a --config file."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from episodes import ByHash
from fakes import PATIENCE, collect
from responses import response
from worker_tasks import WorkerTask

from poly_epo_jax.rollouts import environments
from poly_epo_jax.rollouts.episode_places import EpisodeWorker
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.startup.config_file import load_config
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Group, Sampling

KINDS = {"raises": ["raised"] * 2, "fails": ["failed"] * 2, "exits": ["lost"] * 2, "grows": ["raised"] * 2}


def open_rollouts(task: Any, num_workers: int, timeout: float = PATIENCE) -> Rollouts:
    sampler = ByHash()
    limits = {"episode_timeout_seconds": timeout, "environment_workers": num_workers}
    return Rollouts(sampler, sampler.tokenizer, task, 8, **limits)


def play(rollouts: Rollouts, task: Any, *names: str) -> dict[str, Group]:
    problems = [problem for problem in task.train_problems if problem.id in names]
    return {group.problem.id: group for group in collect(rollouts, problems, 2, Sampling(60))}


def content(group: Group) -> list[Any]:
    assert len(group.generations) == 2 and all(len(y.turns) == 5 for y in group.generations)
    return [(y.token_ids.tolist(), y.logprobs.tolist(), y.turns, y.outcome) for y in group.generations]


def test_failures_in_workers_are_those_of_single_episodes(monkeypatch: pytest.MonkeyPatch):
    """Episodes that share a worker with one that ends the process are repeated, which is not counted as a failure."""
    monkeypatch.setattr(environments, "MAX_ATTEMPTS", 1)
    task = WorkerTask()
    groups = play(open_rollouts(task, 2), task, "works", *KINDS)
    failures = {name: list(group.failures.values()) for name, group in groups.items() if group.failures}
    assert {name: [failure.kind for failure in of_group] for name, of_group in failures.items()} == KINDS
    assert content(groups["works"]) == content(play(open_rollouts(WorkerHere(), 0), WorkerHere(), "works")["works"])
    reasons = {name: of_group[0].reason for name, of_group in failures.items()}
    traceback = Path(failures["raises"][0].traceback_file).read_text()
    assert "worker_tasks.py" in traceback and "in reply" in traceback
    assert "worker_tasks.py:" in reasons["raises"] and "in turn 2" in reasons["raises"]
    assert "WorkerTask: reply to turn 2 of problem 'exits'" in reasons["exits"] and "code 7" in reasons["exits"]
    assert "MemoryError" in reasons["grows"] and "out of order" in reasons["fails"]


class WorkerHere(WorkerTask):
    """A task that runs in the process of the tests, which imports JAX."""

    def start(self, problem: Any, seed: int) -> Any:
        started = super().start(problem, seed)
        started.is_worker = False
        return started


def test_a_worker_that_hangs_is_replaced():
    task = WorkerTask()
    group = play(open_rollouts(task, 1, timeout=0.3), task, "hangs")["hangs"]
    for failure in group.failures.values():
        assert failure.kind == "late" and "rollouts.episode_timeout_seconds=0.3" in failure.reason
    assert len(group.failures) == 2


def test_isolated_episodes_have_workers_of_their_own_up_to_a_limit():
    started = open_rollouts(WorkerTask(), 2).environments
    assert started is not None
    shared, alone = [started.place() for _ in range(2)], [started.place(isolate=True) for _ in range(2)]
    assert len({*shared, *alone}) == 4
    assert started.place(isolate=True) in shared and started.place() in shared
    assert isinstance(alone[0], EpisodeWorker)
    alone[0].stop()
    assert started.place(isolate=True) not in (*shared, *alone) and started.place() in shared


def test_a_cancelled_call_ends_its_worker():
    async def main() -> None:
        task = WorkerTask()
        rollouts = open_rollouts(task, 1)
        assert rollouts.environments is not None
        place = rollouts.environments.place()
        assert (await place.call("", (0, "start", task.train_problems[-1], 0), PATIENCE)).kind == ""
        turns = [dataclasses.replace(response(""), turns=turns) for turns in (("a",), ("a", "?", "b"))]
        assert (await place.call("", (0, "reply", turns[0]), PATIENCE)).value == "1:1"
        hanging = asyncio.create_task(place.call("", (0, "reply", turns[1]), PATIENCE))
        await asyncio.sleep(0)  # The call is sent in a thread.
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        assert not place.is_alive and rollouts.environments.place() is not place

    asyncio.run(main())


CONFIG = """
from dataclasses import dataclass

from poly_epo_jax.config import default
from poly_epo_jax.tasks import TASKS
from worker_tasks import WorkerEpisode, WorkerTask


@dataclass
class OwnTask(WorkerTask):
    factor: int = 1

    def start(self, problem, seed):
        return WorkerEpisode(problem.id, self.factor * seed)


TASKS["own"] = OwnTask


def get_config(config_string=""):
    return default.get_config(config_string)
"""


def test_tasks_of_a_configuration_file_run_in_workers(tmp_path: Path):
    (tmp_path / "own.py").write_text(CONFIG)
    load_config(str(tmp_path / "own.py"))
    task = TASKS["own"](factor=0)
    try:
        group = play(open_rollouts(task, 1), task, "works")["works"]
    finally:
        del TASKS["own"]
    assert len(content(group)) == 2 and all(y.outcome and y.outcome.metrics == {"seed": 0.0} for y in group.generations)


def test_a_task_that_workers_cannot_have_is_refused():
    task = WorkerTask()
    task.client = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"rollouts\.environment_workers requires a task that can be pickled"):
        open_rollouts(task, 1)
