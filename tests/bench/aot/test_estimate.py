"""Collectives and seconds read off programs: what XLA compiles for CPUs, and schedules as GPUs and TPUs have them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from poly_epo_jax.bench.aot.estimate import Rates, estimate, kernel_name
from poly_epo_jax.bench.aot.hlo import Instruction, parse
from poly_epo_jax.parallel.sharding import make_mesh

RATES = Rates(flops_per_second=1e9, bytes_per_second=1e6, link_bytes_per_second=1e3, cycles_per_second=None)


def read(text, rates=RATES, kernel_flops=lambda name: 0.0):
    return estimate(parse(text), rates, kernel_flops)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_the_collectives_of_a_compiled_loop():
    """Seven layers, each of which gathers its weight over four devices; then a sum over all."""
    mesh = make_mesh(1, 4, 1)
    gathered, split = NamedSharding(mesh, PartitionSpec()), PartitionSpec(None, "fsdp", None)

    def layers(x, stack):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, gathered)), None

        return jax.lax.scan(layer, x, stack)[0].sum()

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    stack = jax.ShapeDtypeStruct((7, 128, 128), jnp.float32, sharding=NamedSharding(mesh, split))
    found = read(jax.jit(layers).lower(x, stack).compile().as_text())
    assert found.flops == 7 * 2 * 16 * 128 * 128
    by_kind = {sent.collective.kind: sent for sent in found.collectives}
    gather = by_kind["all-gather"]
    assert (gather.times, gather.loops, gather.collective.asynchronous) == (7, 1, False)
    assert gather.collective.sent_bytes == 128 * 128 * 4 * 3 // 4
    assert gather.waited_seconds == pytest.approx(7 * 128 * 128 * 3 / 1e3)
    assert by_kind["all-reduce"].collective.sent_bytes == 4 * 3 // 4 * 2


OVERLAPPED = """HloModule m, is_scheduled=true

%fused (a: f32[100,100], b: f32[100,100]) -> f32[100,100] {
  %a = f32[100,100]{1,0} parameter(0)
  %b = f32[100,100]{1,0} parameter(1)
  ROOT %d = f32[100,100]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[100,100], w: f32[5]) -> f32[100,100] {
  %x = f32[100,100]{1,0} parameter(0)
  %w = f32[5]{0} parameter(1)
  %start = (f32[5]{0}, f32[20]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %f = f32[100,100]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused
  %done = f32[20]{0} all-gather-done(%start)
  ROOT %g = f32[100,100]{1,0} copy(%f)
}
"""


def test_what_runs_beside_a_collective_is_not_waited_for():
    """60 bytes take 0.06 s of the link; the fusion moves 120 kB in 0.12 s meanwhile, or 0.012 s with faster memory."""
    (sent,) = read(OVERLAPPED).collectives
    assert sent.collective.asynchronous and sent.collective.sent_bytes == 60 and sent.waited_seconds == 0
    (sent,) = read(OVERLAPPED, dataclasses.replace(RATES, bytes_per_second=1e7)).collectives
    assert sent.waited_seconds == pytest.approx(0.06 - 0.012)
    synchronous = OVERLAPPED.replace("dimensions={0}", 'dimensions={0}, backend_config={"is_sync":true}', 1)
    (sent,) = read(synchronous).collectives
    assert not sent.collective.asynchronous and sent.waited_seconds == pytest.approx(0.06)


def test_seconds_are_xlas_where_it_says_them_and_arithmetic_elsewhere():
    found = read(OVERLAPPED)
    assert found.flops == 2 * 100**3
    assert found.seconds == {"xla": 0, "arithmetic": pytest.approx(0.12 + 0.08), "kernels": 0, "links": 0}
    told = OVERLAPPED.replace("calls=%fused", 'calls=%fused, backend_config={"estimated_cycles":"300"}')
    found = read(told, Rates(1e9, 1e6, 1e3, cycles_per_second=1e4))
    assert found.seconds["xla"] == pytest.approx(0.03)
    assert found.seconds["arithmetic"] == pytest.approx(0.08)  # the copy
    assert found.seconds["links"] == pytest.approx(0.06 - 0.03)


SLICED = """HloModule m

%fused (stack: f32[36,1000], i: s32[], sum: f32[36,1000]) -> f32[36,1000] {
  %stack = f32[36,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[36,1000]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,1000]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,1000}
  ROOT %u = f32[36,1000]{1,0} dynamic-update-slice(%sum, %one, %i, %zero)
}

ENTRY %main (stack: f32[36,1000], i: s32[], sum: f32[36,1000]) -> f32[36,1000] {
  %stack = f32[36,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %sum = f32[36,1000]{1,0} parameter(2)
  ROOT %f = f32[36,1000]{1,0} fusion(%stack, %i, %sum), kind=kLoop, calls=%fused
}
"""


def test_of_a_stack_only_the_layer_that_is_read_or_written_counts():
    assert read(SLICED).seconds["arithmetic"] == pytest.approx((4000 + 4 + 2 * 4000) / 1e6)


SCATTERED = """HloModule m

%all-reduce-scatter (input: bf16[40,8]) -> bf16[10,8] {
  %input = bf16[40,8]{1,0:T(8,128)(2,1)} parameter(0)
  %sum = bf16[40,8]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups=mesh['a'=1,'b'=4] {'b'}, to_apply=%add
  %at = u32[] constant(0)
  ROOT %slice = bf16[10,8]{1,0:T(8,128)(2,1)} dynamic-slice(%sum, %at, %at), dynamic_slice_sizes={10,8}
}

ENTRY %main (g: bf16[40,8]) -> bf16[10,8] {
  %g = bf16[40,8]{1,0:T(8,128)(2,1)} parameter(0)
  %kernel = bf16[40,8]{1,0} custom-call(%g), custom_call_target="tpu_custom_call", backend_config={"body":"of
  several { lines }"}
  %kernel.1 = bf16[40,8]{1,0} custom-call(%kernel), custom_call_target="tpu_custom_call"
  ROOT %f = bf16[10,8]{1,0:T(8,128)(2,1)} fusion(%kernel.1), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_scatters_and_kernels_as_tpus_write_them():
    found = read(SCATTERED, kernel_flops=lambda name: {"kernel": 5e8}[name])
    (sent,) = found.collectives
    assert (sent.collective.kind, sent.collective.dtype) == ("reduce-scatter", "bf16")
    assert sent.collective.sent_bytes == 40 * 8 * 2 * 3 // 4
    assert found.kernels == {"kernel": 2} and found.seconds["kernels"] == pytest.approx(1.0)


def test_a_triton_kernel_has_the_name_that_it_was_given():
    text = (
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 8, name = "packed_attention_key_kernel"}'
    )
    assert (
        kernel_name(Instruction("pallas_call.7", "bf16[8]{0}", "custom-call", "%q", text))
        == "packed_attention_key_kernel"
    )
