"""A tiny policy that compiles quickly, with problems, training sequences, samplers, a task and a judge for it."""

import asyncio
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from poly_epo_jax.config.keys import OptimizerSection
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.rope import Rope
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.set_rl import policy_gradient_loss
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import TrainingSequence, pack
from poly_epo_jax.step.update import PolicyUpdate, TrainState
from poly_epo_jax.types import (
    Clustering,
    Completion,
    Generation,
    Group,
    HasMetrics,
    JudgeFailure,
    Metrics,
    Outcome,
    Params,
    Problem,
    Request,
    Sampling,
    Task,
)

TINY = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    mlp_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ropes=(Rope(1e4),),
    dtype="float32",
    remat="none",
)
TINY_MODEL = nnx.eval_shape(lambda: Transformer(TINY, nnx.Rngs(0)))
PROBLEMS = [Problem(id, f"{id}:", "a") for id in ("p", "q", "r")]
LETTERS = "abcd"
PATIENCE = 300.0  # Timeout in seconds of waits in tests. It is never reached in a test that passes.
TINY_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123"  # Together with <pad> and <eos>, TINY.vocab_size tokens.


def tiny_params(seed: int = 0, model: Transformer = TINY_MODEL, scale: float = 0.35) -> Params:
    """Returns random weights of a model as NumPy arrays. Norm weights are close to one.

    Args:
      seed: Seed of the random numbers.
      model: Model of the weights.
      scale: Standard deviation of the other weights.
    """
    rng = np.random.default_rng(seed)

    def draw(path: Any, param: Any) -> Any:
        noise = rng.standard_normal(param.shape).astype(np.float32)
        return param.replace(1 + 0.2 * noise if "norm" in jax.tree_util.keystr(path) else scale * noise)

    state = nnx.split(model)[1]
    return nnx.to_pure_dict(jax.tree.map_with_path(draw, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def on_mesh(params: Params, mesh: Mesh, model: Transformer = TINY_MODEL) -> Params:
    """Places weights of a model on a mesh."""
    return jax.device_put(params, param_shardings(model, mesh))


def state_at(params: Params) -> TrainState:
    """Returns a training state that contains weights only."""
    return TrainState(params, {}, None, None)


def tiny_problems(count: int, max_length: int, seed: int = 0, alphabet: str = TINY_ALPHABET) -> list[Problem]:
    """Returns problems with random prompts, whose lengths cycle from 1 to `max_length` characters."""
    rng = np.random.default_rng(seed)
    prompts = ["".join(rng.choice(list(alphabet), i % max_length + 1)) for i in range(count)]
    return [Problem(str(i), prompt, "") for i, prompt in enumerate(prompts)]


async def until(true: Callable[[], bool]) -> None:
    """Waits until `true()` is True, at most PATIENCE seconds."""
    async with asyncio.timeout(PATIENCE):
        while not true():
            await asyncio.sleep(0.001)


def collect(rollouts: Rollouts, problems: Sequence[Problem], num_generations: int, sampling: Sampling) -> list[Group]:
    """Returns all groups that the rollouts yield, in the order of the problems."""

    async def wait() -> list[Group]:
        return [group async for group in rollouts.generate(problems, num_generations, sampling)]

    order = {problem.id: place for place, problem in enumerate(problems)}
    return sorted(asyncio.run(wait()), key=lambda group: order[group.problem.id])


def random_sequences(
    rng: np.random.Generator, count: int, max_prompt: int = 6, max_response: int = 12, vocab: int = TINY.vocab_size
) -> list[TrainingSequence]:
    """Returns sequences of 1 to `max_prompt` prompt tokens and 1 to `max_response` response tokens, all random."""
    sequences = []
    for _ in range(count):
        prompt, response = (rng.integers(1, size + 1) for size in (max_prompt, max_response))
        sequences.append(
            TrainingSequence(
                prompt_ids=rng.integers(0, vocab, prompt, np.int32),
                response_ids=rng.integers(0, vocab, response, np.int32),
                sampler_logprobs=-rng.exponential(size=response).astype(np.float32),
                loss_mask=np.ones(response, bool),
                advantage=float(rng.normal()),
                weight=1 / (count * int(response)),
            )
        )
    return sequences


def optimizer_config(**changes: Any) -> OptimizerSection:
    """Returns an optimizer configuration with a constant learning rate and without weight decay."""
    settings = {"learning_rate": 1e-2, "schedule": "constant", "end_lr_fraction": 0.0, "max_grad_norm": 1.0}
    return OptimizerSection(**settings | changes)


def trainer_logprobs(
    seed: int, groups: Sequence[Group], temperature: float, model: Transformer = TINY_MODEL
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probabilities of all generated tokens, by the trainer (`tiny_params(seed)`) and the sampler."""
    mesh = make_mesh(1, 1, 1)
    update = _update(temperature, model)
    pairs = [(group.prompt_ids, y) for group in groups for y in group.generations]
    sequences = [
        TrainingSequence(prompt_ids, y.token_ids, y.logprobs, y.loss_mask, 1.0, 1.0) for prompt_ids, y in pairs
    ]
    row_tokens = max(50, *(len(s.prompt_ids) + len(s.response_ids) for s in sequences))
    packed = pack(sequences, row_tokens, rows_per_microbatch=24)
    _, batches = update.with_old_logprobs(state_at(on_mesh(tiny_params(seed, model), mesh, model)), [[], packed])
    masks = [np.asarray(batch.weights) > 0 for batch in batches]
    assert sum(mask.sum() for mask in masks) == sum(y.loss_mask.sum() for _, y in pairs)
    trainer = [np.asarray(batch.old_logprobs)[mask] for batch, mask in zip(batches, masks, strict=True)]
    sampler = [np.asarray(batch.sampler_logprobs)[mask] for batch, mask in zip(batches, masks, strict=True)]
    return np.concatenate(trainer), np.concatenate(sampler)


def assert_exact_versions(groups: Sequence[Group], model: Transformer = TINY_MODEL) -> set[int]:
    """Asserts that each token has the log-probability of the trainer with the weights of the token's version.

    Args:
      groups: Groups that were sampled with temperature 1. The weights of version v are `tiny_params(v, model)`.
      model: Model of the weights.

    Returns:
      The versions of all tokens.
    """

    def marked(group: Group) -> Group:  # The trainer only reorders the versions.
        generations = [dataclasses.replace(y, logprobs=y.weight_versions.astype(np.float32)) for y in group.generations]
        return dataclasses.replace(group, generations=tuple(generations))

    _, of_token = trainer_logprobs(0, [marked(group) for group in groups], 1.0, model)
    versions = set(of_token.astype(int).tolist())
    for version in versions:
        trainer, sampler = trainer_logprobs(version, groups, 1.0, model)
        np.testing.assert_allclose(sampler[of_token == version], trainer[of_token == version], rtol=0, atol=1e-4)
    return versions


@functools.cache
def _update(temperature: float, model: Transformer) -> PolicyUpdate:
    objective = UpdateObjective(policy_gradient_loss, temperature)
    return PolicyUpdate(model, make_mesh(1, 1, 1), objective, optimizer_config(), 1)


def group(problem: Problem, texts: Sequence[str]) -> Group:
    """Returns a group whose responses are single letters, each followed by a stop token."""

    def generation(text: str) -> Generation:
        ids = np.array([2 + LETTERS.index(text), 1], np.int32)
        return Generation(ids, np.full(2, -1, np.float32), np.ones(2, bool), (text,), "stop", np.zeros(2, np.int32))

    generations = [generation(text) for text in texts]
    return Group(problem, np.array([7, 8], np.int32), tuple(generations))


class Scripted:
    """A sampler with predefined completions, each followed by a stop token.

    Args:
      say: Function that maps a request and the index of a seed to the text of the completion.
      alphabet: Characters of the texts and prompts.
    """

    def __init__(self, say: Callable[[Request, int], str], alphabet: str):
        self.tokenizer, self.version = build_character_tokenizer(alphabet), 0
        self._say = say

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        for place, request in enumerate(requests):
            for index in range(len(request.seeds)):
                yield self.completion(place, index, self._say(request, index))

    def completion(self, place: int, index: int, text: str) -> Completion:
        ids = np.array([*self.tokenizer.encode(text), 1], np.int32)
        versions = np.full(len(ids), self.version, np.int32)
        return Completion(place, index, ids, np.full(len(ids), -1, np.float32), "stop", versions)

    async def push_weights(self, params: Params, version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass


class RandomLetters(Scripted):
    """A sampler whose responses are single letters, derived from the seeds.

    Prompts may contain the letters and the characters "pqr:0123456789".
    """

    def __init__(self):
        super().__init__(lambda request, index: LETTERS[request.seeds[index] % 4], LETTERS + "pqr:0123456789")

    def rollouts(self, task: Task) -> Rollouts:
        return Rollouts(self, self.tokenizer, task, max_prompt_tokens=8)


def sampler_counts(rollouts: Rollouts) -> Metrics:
    """Returns the counters of the sampler since the last call."""
    assert isinstance(rollouts.sampler, HasMetrics)
    return rollouts.sampler.metrics()


class ByLetter:
    """A task with reward 1 for the letter that is the answer. Each letter is a strategy."""

    train_problems: Sequence[Problem] = PROBLEMS
    held_out_problems: Sequence[Problem] = PROBLEMS[:2]

    def reward(self, problem: Problem, generation: Generation) -> float:
        return float(generation.text == problem.answer)

    def strategy(self, problem: Problem, generation: Generation) -> str:
        return generation.text


class Talking(ByLetter):
    """A task whose episodes reply with `respond`, and have the reward of their last generation."""

    def respond(self, problem: Problem, generation: Generation) -> str | None:
        """Returns the reply to a generation."""
        raise NotImplementedError

    def start(self, problem: Problem, seed: int) -> "TalkingEpisode":
        return TalkingEpisode(self, problem)


class TalkingEpisode:
    """An episode whose replies depend on the generation only."""

    def __init__(self, task: Talking, problem: Problem):
        self._task, self._problem, self._reward = task, problem, 0.0

    async def reply(self, generation: Generation) -> str | None:
        self._reward = self._task.reward(self._problem, generation)
        return self._task.respond(self._problem, generation)

    async def close(self) -> Outcome:
        return Outcome(self._reward)


class LetterJudge:
    """A judge that clusters responses by letter, and fails for the problems with the ids `failing`."""

    def __init__(self, failing: Sequence[str] = ()):
        self.failing = failing

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        if group.problem.id in self.failing:
            return JudgeFailure("broken", "out of order")
        return Clustering(np.array([LETTERS.index(y.text) for y in group.generations], np.int32))


def unchecked(kind: type, /, **fields: Any) -> Any:
    """Creates a dataclass without its constructor, which would reject other types in tests, but not outside of them."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made
