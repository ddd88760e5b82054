"""Tests that fingerprints depend on the bits of an array but not on its sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.parallel.sharding import make_mesh


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8])
def test_every_bit_changes_the_fingerprint(dtype: type):
    values = np.asarray(np.random.default_rng(0).integers(-100, 100, (3, 5)), dtype)
    before = fingerprints({"x": {"y": values}})
    assert before.keys() == {"x.y"} and before == fingerprints({"x": {"y": jnp.array(values)}})
    changed = set()
    size = 8 * values.nbytes
    for bit in range(size):
        words = bytearray(values.tobytes())
        words[bit // 8] ^= 1 << bit % 8
        changed.add(fingerprints({"x": {"y": np.frombuffer(words, dtype).reshape(3, 5)}})["x.y"])
    assert before["x.y"] not in changed and len(changed) == size
    assert fingerprints({"x": {"y": values[::-1]}}) != before


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
def test_fingerprints_do_not_depend_on_the_mesh():
    values = np.random.default_rng(0).standard_normal((8, 6, 4)).astype(np.float32)
    mesh, spec = make_mesh(2, 2, 2), jax.sharding.PartitionSpec(("data", "fsdp"), "tensor")
    sharded = jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))
    assert fingerprints([sharded]) == fingerprints([values])
