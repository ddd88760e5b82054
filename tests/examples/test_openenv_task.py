"""Tests of examples/openenv_task.py with servers that use OpenEnv's own classes."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import runpy
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extending import ROOT
from fakes import PATIENCE
from reserved_ports import reserve_port
from responses import response
from tiny_training import train_tiny
from training_runs import rows_of

from poly_epo_jax.rollouts.environments import Environments
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import EnvironmentFailure, Generation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="requires openenv==0.10.0"),
]

SERVER = '''
import os
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Letters(Action):
    text: str


class Seen(Observation):
    text: str


class Game(Environment):
    """The reward is 1 if the first action begins with "a". Arguments: port, number of actions, "end" at a step."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.seed, self.actions = seed, []
        return Seen(text="pqr"[seed % 3])

    def step(self, action, timeout_s=None, **kwargs):
        self.actions.append(action.text)
        if "end" in sys.argv:
            os._exit(1)
        is_done = len(self.actions) == int(sys.argv[2])
        reward = float(is_done and self.actions[0][:1] == "a")
        return Seen(text=f"{self.seed}{action.text}", done=is_done, reward=reward)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Game, Letters, Seen, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
'''
FIELDS = {"action": "text", "observation": "text"}


@contextlib.contextmanager
def servers(folder: Path, *flags: tuple[str, ...]) -> Iterator[list[str]]:
    """Starts one server for each tuple of additional arguments. Yields their addresses."""
    (folder / "server.py").write_text(SERVER)
    ports, processes = [reserve_port() for _ in flags], []
    try:
        for port, arguments in zip(ports, flags, strict=True):
            processes.append(subprocess.Popen([sys.executable, str(folder / "server.py"), str(port), *arguments]))
        for port, process in zip(ports, processes, strict=True):
            end = time.monotonic() + PATIENCE
            while True:
                assert process.poll() is None and time.monotonic() < end
                with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                    break
                time.sleep(0.1)
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.fixture
def example() -> Any:
    yield runpy.run_path(str(ROOT / "examples" / "openenv_task.py"))
    TASKS.pop("openenv", None)


def test_sessions_are_parallel(example: Any, tmp_path: Path):
    with servers(tmp_path, ("2",)) as urls:
        task = example["OpenEnvTask"](urls, **FIELDS, num_train=4, num_held_out=1)
        assert [problem.prompt for problem in task.train_problems] == ["p", "q", "r", "p"]
        environments, barrier = Environments(task, PATIENCE), asyncio.Barrier(8)

        async def play(seed: int) -> Generation | EnvironmentFailure:
            async def take_turn(before: Generation, reply: str) -> Generation:
                await barrier.wait()  # until all sessions have taken a step
                return dataclasses.replace(before, turns=(*before.turns, reply, "x"))

            first = dataclasses.replace(response(""), turns=("ab"[seed % 2],))
            return await environments.play(task.train_problems[seed // 2], seed, first, take_turn)

        async def main() -> list[Generation | EnvironmentFailure]:
            return await asyncio.gather(*map(play, range(8)))

        for seed, played in enumerate(asyncio.run(main())):
            assert isinstance(played, Generation) and played.outcome
            assert played.turns[1] == f"{seed // 2}{'ab'[seed % 2]}"
            assert (played.outcome.reward, played.outcome.metrics["steps"]) == (float(seed % 2 == 0), 2.0)


def test_episodes_of_a_server_that_ends_are_masked(example: Any, tmp_path: Path):
    with servers(tmp_path, ("1",), ("1", "end")) as urls:
        task = example["OpenEnvTask"](urls, **FIELDS, num_train=3, num_held_out=0, chat=False)
        start = task.start
        task.start = lambda problem, seed: start(task.train_problems["pqr".index(problem.id)], seed)
        train_tiny(tmp_path / "run", task=task, changes={"rollouts.max_failed_fraction": 1.0, "eval.every": 0})
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["environment/failed_responses"] == row["environment/failed/raised"] == 8 for row in rows)
    assert all(0 < row["reward"] < 1 for row in rows)
