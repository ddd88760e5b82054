"""Trains on the environments of OpenEnv servers whose actions and observations have a text field.

    pip install openenv==0.10.0
    python -m poly_epo_jax.main --config=examples/openenv_task.py --config.model.path=models/Qwen3-0.6B \
        --config.task.options.urls="['http://127.0.0.1:8000']"

Each episode is a session of a server, which must allow as many sessions (`max_concurrent_envs`) as there are episodes
at the same time: `train.prompts_per_batch * train.num_generations` divided by the number of servers. The episodes of a
server that does not respond are repeated, and then not trained on. `rollouts.episode_timeout_seconds` limits the time
that an episode waits for its server.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]

from poly_epo_jax.config import default
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import EpisodeFailure, Outcome, Problem


class OpenEnvEpisode:
    """A session, which begins before the first action. Its reward is the sum of the rewards of its steps.

    `problem.answer` is the seed of the environment, so that all generations of a problem have the same start.
    """

    def __init__(self, task, url, problem):
        self.task, self.problem, self.reward, self.num_steps = task, problem, 0.0, 0
        self.client, self.connection = GenericEnvClient(base_url=url), None

    async def reply(self, generation):
        """Returns the observation after an action, or None at the end. A think block is not part of the action."""
        if self.connection is None:
            await self.client.reset(seed=int(self.problem.answer))
            self.connection = self.client._ws
        action = generation.turns[-1].rpartition("</think>")[2].strip()
        result = await self.client.step({self.task.action: action})
        if self.client._ws is not self.connection:  # The client reconnects, but to another session.
            raise EpisodeFailure("the connection to the server was lost.")
        self.reward += result.reward or 0.0
        self.num_steps += 1
        return None if result.done else str(result.observation[self.task.observation])

    async def close(self):
        """Ends the session. Returns the reward, which must lie between 0 and 1, and the number of steps."""
        await self.client.close()
        return Outcome(self.reward, metrics={"steps": float(self.num_steps)})


class OpenEnvTask:
    """Problems with different seeds, whose prompts are the observations after `reset`.

    Args:
      urls: Addresses of servers of the same environment. Problems are assigned to them in turn.
      action: Name of the field of an action that contains the policy's text.
      observation: Name of the field of an observation that contains the reply.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      chat: Whether observations are chat messages.
    """

    def __init__(
        self,
        urls: Sequence[str],
        action: str = "message",
        observation: str = "message",
        num_train: int = 100,
        num_held_out: int = 20,
        chat: bool = True,
    ):
        self.urls, self.action, self.observation, self.chat = tuple(urls), action, observation, chat
        with ThreadPoolExecutor(1) as thread:  # because a notebook has a running event loop
            problems = thread.submit(asyncio.run, self.read_problems(num_train + num_held_out)).result()
        self.train_problems: Sequence[Problem] = problems[:num_train]
        self.held_out_problems: Sequence[Problem] = problems[num_train:]

    async def read_problems(self, number):
        """Returns the problems. All servers must be reachable when the run starts."""
        problems, clients = [], [GenericEnvClient(base_url=url) for url in self.urls]
        for seed in range(number):
            result = await clients[seed % len(clients)].reset(seed=seed)
            prompt = str(result.observation[self.observation])
            problems.append(Problem(f"openenv/{seed}", prompt, answer=str(seed), chat=self.chat))
        for client in clients:
            await client.close()
        return problems

    def start(self, problem, seed):
        return OpenEnvEpisode(self, self.urls[int(problem.answer) % len(self.urls)], problem)


TASKS["openenv"] = OpenEnvTask


def get_config(config_string="grpo"):
    """Returns the configuration. Poly-EPO requires a judge, such as `llm`, or a strategy in the outcome."""
    config = default.get_config(config_string)
    config.task.name = "openenv"
    config.workdir = "runs/openenv"
    return config
