"""Tests that corrupted checkpoints, base policies and model folders are detected.

Corrupted data must either load exactly as it was saved, or be rejected. If the newest checkpoint is corrupted, the
previous checkpoint must be restored. A corrupted base policy must be trained again.
"""

import contextlib
import io
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from fakes import TINY, TINY_ALPHABET, tiny_params
from outcome import Outcome

from configs import polynomial
from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.checkpoint import CheckpointError, Checkpoints
from poly_epo_jax.model.policy import open_policy
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup import base_policy
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.digests import DIGESTS
from poly_epo_jax.tasks import PolynomialTask

DAMAGES = ("flip", "flip", "flip", "zeros", "truncate", "empty", "delete")
STEPS = (5, 10)


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    """Corrupts checkpoints in half of the attempts, and model folders or base policies in the others.

    Attempts corrupt one file, except that every second attempt with checkpoints truncates a file of each checkpoint.
    """
    attacks = (_checkpoints(random, folder), _model_folders(random, folder), _base_policies(random, folder))
    for one in itertools.cycle((attacks[0], attacks[0], attacks[1], attacks[2])):
        yield next(one)


def damage(random: random.Random, file: Path, kind: str) -> None:
    """Corrupts a file.

    Args:
      random: Selects the position and extent of the corruption.
      file: The file to corrupt.
      kind: One of DAMAGES.
    """
    content = bytearray(file.read_bytes())
    position = random.randrange(max(1, len(content)))
    if kind == "flip" and content:
        content[position] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        length = min(len(content) - position, random.randint(1, 512))
        content[position : position + length] = bytes(length)
    elif kind == "truncate":
        del content[position:]
    file.unlink()
    if kind != "delete":
        file.write_bytes(b"" if kind == "empty" else content)


def _damaged_copies(random: random.Random, original: Path, target: Path, below: str = ".") -> Iterator[str]:
    """Repeatedly replaces `target` with a copy that has a corrupted file below `below`, and yields a description."""
    while True:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(original, target)
        file = random.choice(sorted(path for path in (target / below).rglob("*") if path.is_file()))
        kind = random.choice(DAMAGES)
        damage(random, file, kind)
        yield f"{kind} of {file.relative_to(target)}"


def _same(found: Any, expected: Any) -> bool:
    return jax.tree.structure(found) == jax.tree.structure(expected) and all(
        jax.tree.leaves(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), found, expected))
    )


def _checkpoints(random: random.Random, folder: Path) -> Iterator[Outcome]:
    states = {step: {"trainable": tiny_params(step), "moments": tiny_params(step + 1)} for step in STEPS}
    original, copy = folder / "intact", folder / "copy" / "checkpoints"
    checkpoints = Checkpoints(original, keep=2)
    for step, state in states.items():
        checkpoints.save(step, jax.device_put(state), {"next_index": step})
    checkpoints.close()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = states[STEPS[0]]
    shardings = jax.tree.map(lambda _: device, like)
    for what in _damaged_copies(random, original, copy, str(STEPS[-1])):
        shutil.rmtree(copy.with_name("checkpoints.corrupted"), ignore_errors=True)
        checkpoints, message = Checkpoints(copy, keep=2), io.StringIO()
        with contextlib.redirect_stderr(message):
            found = checkpoints.restore_latest(lambda step: checkpoints.restore(step, like, shardings))  # noqa: B023
        assert found is not None
        step, (state, data) = found
        held = _same(state, states[step]) and data == {"next_index": step}
        if step != STEPS[-1]:
            held = held and len(message.getvalue().splitlines()) == 1 and checkpoints.num_corrupted == 1
            checkpoints.save(STEPS[-1], jax.device_put(states[STEPS[-1]]), {"next_index": STEPS[-1]})
            checkpoints.close()
            again = Checkpoints(copy, read_only=True).restore(STEPS[-1], like, shardings)
            held = held and _same(again[0], states[STEPS[-1]])
        yield Outcome("checkpoint", held, f"{what}: step {step}, data {data}\n{message.getvalue()}")

        with contextlib.redirect_stderr(io.StringIO()):
            for step in STEPS:
                damage(random, next((copy / str(step)).glob("data/*")), "truncate")
            try:
                checkpoints = Checkpoints(copy, read_only=True)
                held = checkpoints.restore_latest(lambda step: checkpoints.restore(step, like, shardings)) is None  # noqa: B023
            except CheckpointError as error:
                held = len(str(error).splitlines()) == 1
        yield Outcome("all checkpoints", held, what)


def _model_folders(random: random.Random, folder: Path) -> Iterator[Outcome]:
    for digests in itertools.cycle((True, False)):
        original, copy = folder / f"model-{digests}", folder / "model-copy"
        if not original.exists():
            tokenizer = build_character_tokenizer(TINY_ALPHABET)
            hf.save_pretrained(original, tiny_params(), TINY, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
            if not digests:
                (original / DIGESTS).unlink()
        what = next(_damaged_copies(random, original, copy))
        if not digests and what.startswith(("flip", "zeros")):
            continue  # cannot be detected without digests
        yield _loads("exported model" if digests else "model without digests", copy, original, what)


def _loads(kind: str, folder: Path, original: Path, what: str) -> Outcome:
    try:
        policy, intact = (open_policy(path, ModelSection()) for path in (folder, original))
        params = policy.load_params(make_mesh(1, 1, 1))
        held = _same(params, tiny_params()) and policy.tokenizer.get_vocab() == intact.tokenizer.get_vocab()
        message = "loaded" if held else "loaded another model"
        if "generation_config" in what or "tokenizer_config" in what:
            held, message = True, "loaded without an optional file"
    except (ValueError, OSError) as error:
        message = str(error)
        held = len(message.splitlines()) == 1
    except Exception as error:
        held, message = False, f"{type(error).__name__}: {error}"
    return Outcome(kind, held, f"{what}: {message}")


def _base_policies(random: random.Random, folder: Path) -> Iterator[Outcome]:
    config = polynomial.get_config()
    config.base.cache_dir = str(folder / "base")
    config, task, mesh = read_config(config), PolynomialTask(), make_mesh(1, 1, 1)
    original = folder / "fitted"
    tokenizer = build_character_tokenizer(TINY_ALPHABET)
    hf.save_pretrained(original, tiny_params(), TINY, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    target = base_policy.base_policy_folder(config.base, config.task, task)

    def fit(*arguments: Any) -> None:
        shutil.copytree(original, target)

    refit: Callable[..., Any] = mock.Mock(side_effect=fit)
    for what in _damaged_copies(random, original, target):
        message = io.StringIO()
        with mock.patch.object(base_policy, "_make", refit), contextlib.redirect_stderr(message):
            path = base_policy.base_policy(config, task, mesh)
        outcome = _loads("base policy", path, original, what)
        yield Outcome(outcome.kind, outcome.held and "loaded" in outcome.what, f"{outcome.what}\n{message.getvalue()}")
