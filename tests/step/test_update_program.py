"""Buffers, collectives and copies of the compiled update, which is not executed. Mostly Qwen3-4B on four devices."""

import dataclasses
import functools
import math
import re
from typing import Any

import jax
import pytest
from fakes import optimizer_config
from flax import nnx
from programs import COLLECTIVES, loop_bodies

from poly_epo_jax.model.flops import total_weights
from poly_epo_jax.model.presets import preset_config
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.update import PolicyUpdate

DEVICES, ROW_TOKENS = 4, 8192
CONFIG = preset_config("Qwen/Qwen3-4B-Base")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(jax.device_count() < DEVICES, reason="needs four devices"),
]


@functools.cache
def compiled():
    model = nnx.eval_shape(lambda: Transformer(CONFIG, nnx.Rngs(0)))
    update = PolicyUpdate(
        model, make_mesh(1, DEVICES, 1), UpdateObjective(ppo_clip_loss), optimizer_config(), total_updates=1
    )
    return update.lower(DEVICES, ROW_TOKENS)["gradient"].compile()


def program_text() -> str:
    return compiled().as_text() or ""


def vocabulary_loops():
    """Returns the loop bodies that compute logits [chunk, vocabulary]."""
    logits = re.compile(rf"\[\d+,{CONFIG.vocab_size}\]")
    return [body for body in loop_bodies(program_text()) if logits.search(body)]


def test_no_collective_runs_inside_the_vocabulary_loop():
    loops = vocabulary_loops()
    assert len(loops) >= 2  # forward and backward pass
    assert [kind for text in loops for kind in COLLECTIVES.findall(text)] == []
    assert COLLECTIVES.findall(program_text())  # the pattern finds collectives outside of the loops


def test_no_buffer_is_as_large_as_tokens_times_vocabulary():
    shapes = re.findall(r"\w+\[([\d,]+)\]", program_text())
    of_vocabulary = [list(map(int, shape.split(","))) for shape in shapes if str(CONFIG.vocab_size) in shape.split(",")]
    largest = max(math.prod(shape) for shape in of_vocabulary)
    assert largest == CONFIG.vocab_size * CONFIG.hidden_size  # the head itself
    assert largest < ROW_TOKENS * CONFIG.vocab_size / 2


def test_gradients_are_added_in_place():
    """The accumulated gradient is aliased, and the temporary memory is too small for a second gradient."""
    memory: Any = compiled().memory_analysis()
    gradient_bytes = 4 * total_weights(CONFIG) / DEVICES
    assert memory.alias_size_in_bytes >= gradient_bytes
    head_bytes = 4 * CONFIG.vocab_size * CONFIG.hidden_size  # the head gradient is summed over chunks on each device
    # The input of each layer is kept, in float32 on this backend.
    kept_bytes = 4 * CONFIG.num_layers * ROW_TOKENS * CONFIG.hidden_size
    assert memory.temp_size_in_bytes < kept_bytes + 2 * head_bytes + gradient_bytes / 2


@pytest.mark.parametrize(("scan_unroll", "copied"), [(0, False), (2, True)])
def test_the_layer_loop_copies_all_gradients_only_if_unrolled(scan_unroll: int, copied: bool):
    """The loop copies them with two layers per iteration. If this changes, MAX_UNROLLED_LAYERS can be removed."""
    sizes = {"num_layers": 6, "hidden_size": 64, "mlp_size": 160, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    computed = {"vocab_size": 96, "dtype": "float32", "remat": "none", "scan_unroll": scan_unroll}
    config = dataclasses.replace(CONFIG, **sizes, **computed)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0)))
    update = PolicyUpdate(
        model, make_mesh(1, 1, 1), UpdateObjective(ppo_clip_loss), optimizer_config(), total_updates=1
    )
    text = update.lower(4, 32)["gradient"].compile().as_text() or ""
    of_gate = re.compile(r"= f32\[6,64,160\]\S* copy\(")
    assert any(of_gate.search(body) for body in loop_bodies(text)) == copied
