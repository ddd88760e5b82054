"""Tests that non-finite values from any source stop the run with an error, and are never saved in a checkpoint.

An attempt trains the tiny policy for several steps with one source of NaN, infinity or very large values. It passes if
all saved numbers are finite and, for sources that must be rejected, the run stops with a known exception type. If the
error message names a valid checkpoint, it must be the newest checkpoint.
"""

import contextlib
import dataclasses
import io
import itertools
import os
import random as randomness
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import quick_compiles

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", quick_compiles.FLAGS)

import jax
import jax.numpy as jnp
import numpy as np
from fakes import ByLetter, LetterJudge, RandomLetters, tiny_params
from outcome import Outcome
from tiny_training import saved, train_tiny

from poly_epo_jax.model.checkpoint import Checkpoints
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.set_rl import Tokens, ppo_clip_loss
from poly_epo_jax.step.advantages import ADVANTAGES, Estimator, make_estimator
from poly_epo_jax.step.objective import DivergenceError
from poly_epo_jax.types import Clustering, Completion, Generation, Group, Params, Problem

STEPS = 4
NOT_FINITE = (np.nan, np.inf, -np.inf)
Settings = dict[str, Any]


class Rewards(ByLetter):
    """A task that returns `value` as the reward of one call."""

    def __init__(self, value: Any, call: int):
        self.value, self.call, self.calls = value, call, itertools.count(1)

    def reward(self, problem: Problem, generation: Generation) -> float:
        return self.value if next(self.calls) == self.call else super().reward(problem, generation)


class Logprobs(RandomLetters):
    """A sampler that returns `value` as the first log-probability of each prompt's second generation in one step."""

    def __init__(self, value: float, step: int):
        super().__init__()
        self.value, self.step = value, step

    def completion(self, place: int, index: int, text: str) -> Completion:
        completion = super().completion(place, index, text)
        if self.version == self.step and index == 1:
            completion.logprobs[0] = self.value
        return completion


class Embeddings(LetterJudge):
    """A judge that returns `value` as one element of a feature in one call."""

    def __init__(self, value: float, call: int):
        super().__init__()
        self.value, self.left = value, call

    async def cluster(self, group: Group) -> Clustering:
        clustering = await super().cluster(group)
        assert isinstance(clustering, Clustering)
        self.left -= 1
        embedding = np.ones((len(clustering.ids), 3), np.float32)
        embedding[1, 2] = self.value if self.left == 0 else 1.0
        return dataclasses.replace(clustering, features={"embedding": embedding})


def sometimes(value: float) -> Callable[..., Estimator]:
    """Creates an estimator whose advantages are `value` in random steps, with probability 0.4."""

    def make(algo: Any) -> Estimator:
        estimator = make_estimator(dataclasses.replace(algo, advantages="grpo"))

        def advantages(key: jax.Array, features: Any) -> jax.Array:
            return jnp.where(jax.random.uniform(key) < 0.4, value, estimator.advantages(key, features))

        return estimator._replace(advantages=advantages)

    return make


def broken_loss(value: float, tokens: Tokens, **clip: float) -> Any:
    """Returns the loss times `value`."""
    loss, metrics = ppo_clip_loss(tokens, **clip)
    return loss * value, metrics


def broken_gradient(tokens: Tokens, **clip: float) -> Any:
    """Returns a finite loss whose derivative at a log-ratio of 0 is not finite."""
    loss, metrics = ppo_clip_loss(tokens, **clip)
    return loss + jnp.sum(jnp.sqrt(jnp.abs(tokens.log_ratio))), metrics


def with_weight(value: float, random: randomness.Random) -> Params:
    """Returns weights of which one random element is `value`."""
    params = tiny_params()
    leaf = random.choice(jax.tree.leaves(params))
    leaf.reshape(-1)[random.randrange(leaf.size)] = value
    return params


def sources(random: randomness.Random) -> list[tuple[str, bool, Callable[[], Settings]]]:
    """Returns the sources of invalid values: name, whether it must stop the run, and function that returns changes."""
    value, step, call = random.choice(NOT_FINITE), random.randrange(1, STEPS), random.randrange(1, 24 * STEPS)
    huge = 10 ** random.uniform(20, 38)

    def key(kind: str, ends: bool, **changes: float) -> tuple[str, bool, Callable[[], Settings]]:
        return kind, ends, lambda: {name.replace("__", "."): change for name, change in changes.items()}

    ADVANTAGES.pop("attack", None)
    ADVANTAGES["attack"] = sometimes(random.choice([*NOT_FINITE, huge]))
    return [
        ("reward that is not finite", True, lambda: {"task": Rewards(value, call)}),
        ("reward out of range", True, lambda: {"task": Rewards(random.choice([2.0, -0.5, 1e300, None]), call)}),
        ("sampler's log-probability", True, lambda: {"sampler": Logprobs(value, step)}),
        ("judge's feature", True, lambda: {"judge": Embeddings(value, random.randrange(1, 3 * STEPS))}),
        ("estimator", False, lambda: {"algo.advantages": "attack"}),
        ("loss", True, lambda: {"loss": lambda tokens: broken_loss(value, tokens)}),
        ("gradient of a finite loss", True, lambda: {"loss": broken_gradient}),
        ("weight of the model", True, lambda: {"params": with_weight(value, random)}),
        key("learning rate", True, optimizer__learning_rate=huge),
        key("learning rate, infinite", True, optimizer__learning_rate=np.inf),
        key("learning rate, large", False, optimizer__learning_rate=10 ** random.uniform(0, 20)),
        key("weight decay", True, optimizer__weight_decay=huge * 100),
        key("eps=0", False, optimizer__eps=0.0),
        key("eps=nan", True, optimizer__eps=np.nan),
        key("b1=1", True, optimizer__b1=1.0),
        key("b2=1", True, optimizer__b2=1.0),
        key("max_grad_norm=nan", True, optimizer__max_grad_norm=np.nan),
        key("max_grad_norm, tiny or huge", False, optimizer__max_grad_norm=random.choice([1e-45, 1e-30, 1e38, np.inf])),
        key("temperature, tiny", True, sampling__temperature=random.choice([1e-45, 1e-38, 1e-30])),
        key("temperature, huge", False, sampling__temperature=random.choice([1e38, np.inf])),
        key("kl_coef", False, algo__kl_coef=huge),
        key("entropy_coef", True, algo__entropy_coef=1e38),
        key("clip_high", False, algo__clip_high=random.choice([np.inf, 1e38, np.nan])),
    ]


def attempt(kind: str, ends: bool, settings: Settings, folder: Path) -> Outcome:
    """Trains with one source of invalid values.

    Args:
      kind: Name of the source.
      ends: Whether the source must stop the run.
      settings: Configuration keys (names with a dot) and arguments of `train_tiny` to change.
      folder: Run folder, which is deleted first.
    """
    changes = {name: settings.pop(name) for name in list(settings) if "." in name}
    shutil.rmtree(folder, ignore_errors=True)
    error = None
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train_tiny(folder, **settings, changes={"train.num_steps": STEPS, "eval.every": 0} | changes)
    except (ValueError, DivergenceError) as caught:
        error = caught
    except Exception as caught:
        return Outcome(kind, False, f"{changes or settings}: {type(caught).__name__}: {caught}")

    steps = Checkpoints(folder / "checkpoints").steps if folder.exists() else []
    weights = {step: jax.tree.leaves(saved(folder, step)) for step in steps}
    wrong = [step for step, leaves in weights.items() if not all(np.isfinite(leaf).all() for leaf in leaves)]
    rows = read_rows(folder / "metrics.jsonl")
    empty = [f"{name} of step {row['step']}" for row in rows for name, number in row.items() if number is None]
    named = re.search(r"checkpoint of step (\d+) is valid", str(error))
    faults = [f"checkpoint {step} is not finite" for step in wrong] + [f"{name} is not finite" for name in empty]
    if ends and error is None:
        faults.append("training did not stop")
    if error is None and STEPS not in steps:
        faults.append("the last step is not saved")
    if named and int(named[1]) != max(steps, default=0):
        faults.append(f"{named[0]}, but the checkpoints are {steps}")
    return Outcome(kind, not faults, f"{changes or settings}: {'; '.join(faults)} ({error})")


def attack(random: randomness.Random, folder: Path) -> Iterator[Outcome]:
    """Tries all sources in random order, repeatedly."""
    before = signal.getsignal(signal.SIGTERM)  # training installs a handler that remains afterwards
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    try:
        for turn in itertools.count():
            count = len(sources(random))
            for place in random.sample(range(count), count):
                kind, ends, make = sources(random)[place]
                yield attempt(kind, ends, make(), folder / "run" / str(turn))
    finally:
        signal.signal(signal.SIGTERM, before)
