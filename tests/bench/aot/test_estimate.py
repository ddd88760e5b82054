"""Tests of estimated collectives and times, for programs compiled for CPUs and excerpts of GPU and TPU programs."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from poly_epo_jax.bench.aot.estimate import Rates, estimate_cost, kernel_name
from poly_epo_jax.bench.aot.hlo import Instruction, parse
from poly_epo_jax.parallel.sharding import make_mesh

RATES = Rates(flops_per_second=1e9, bytes_per_second=1e6, link_bytes_per_second=1e3, cycles_per_second=None)


def read(text, rates=RATES, kernel_flops=lambda name: 0.0):
    return estimate_cost(parse(text), rates, kernel_flops)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_the_collectives_of_a_compiled_loop():
    """Seven layers gather their weights over four devices, followed by a sum over all devices."""
    mesh = make_mesh(1, 4, 1)
    gathered, sharded = NamedSharding(mesh, PartitionSpec()), PartitionSpec(None, "fsdp", None)

    def layers(x, stack):
        def layer(x, w):
            return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, gathered)), None

        return jax.lax.scan(layer, x, stack)[0].sum()

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    stack = jax.ShapeDtypeStruct((7, 128, 128), jnp.float32, sharding=NamedSharding(mesh, sharded))
    found = read(jax.jit(layers).lower(x, stack).compile().as_text())
    assert found.flops == 7 * 2 * 16 * 128 * 128
    by_kind = {use.collective.kind: use for use in found.collectives}
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


def test_overlapped_collectives_add_only_exposed_time():
    """The link needs 0.06 s for 60 bytes. The fusion moves 120 kB in 0.12 s, or in 0.012 s with faster memory."""
    (use,) = read(OVERLAPPED).collectives
    assert use.collective.asynchronous and use.collective.sent_bytes == 60 and use.waited_seconds == 0
    (use,) = read(OVERLAPPED, dataclasses.replace(RATES, bytes_per_second=1e7)).collectives
    assert use.waited_seconds == pytest.approx(0.06 - 0.012)
    synchronous = OVERLAPPED.replace("dimensions={0}", 'dimensions={0}, backend_config={"is_sync":true}', 1)
    (use,) = read(synchronous).collectives
    assert not use.collective.asynchronous and use.waited_seconds == pytest.approx(0.06)


def test_times_come_from_xla_estimates_or_from_peak_rates():
    found = read(OVERLAPPED)
    assert found.flops == 2 * 100**3
    assert found.seconds == {"xla": 0, "arithmetic": pytest.approx(0.12 + 0.08), "kernels": 0, "links": 0}
    estimated = OVERLAPPED.replace("calls=%fused", 'calls=%fused, backend_config={"estimated_cycles":"300"}')
    found = read(estimated, Rates(1e9, 1e6, 1e3, cycles_per_second=1e4))
    assert found.seconds["xla"] == pytest.approx(0.03)
    assert found.seconds["arithmetic"] == pytest.approx(0.08)  # This is the time of the copy.
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


def test_only_the_accessed_layer_of_a_stack_counts():
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


def test_reduce_scatters_and_kernels_of_tpus():
    found = read(SCATTERED, kernel_flops=lambda name: {"kernel": 5e8}[name])
    (use,) = found.collectives
    assert (use.collective.kind, use.collective.dtype) == ("reduce-scatter", "bf16")
    assert use.collective.sent_bytes == 40 * 8 * 2 * 3 // 4
    assert found.kernels == {"kernel": 2} and found.seconds["kernels"] == pytest.approx(1.0)


def test_names_of_triton_kernels():
    text = (
        'custom_call_target="__gpu$xla.gpu.triton", backend_config={grid_x = 8, name = "packed_attention_key_kernel"}'
    )
    assert (
        kernel_name(Instruction("pallas_call.7", "bf16[8]{0}", "custom-call", "%q", text))
        == "packed_attention_key_kernel"
    )
