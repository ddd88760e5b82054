"""Tests of the FLOPs of matmuls, against brute-force counts and programs with known matmuls."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.bench.aot.estimate import Rates, estimate_cost
from poly_epo_jax.bench.aot.hlo import Instruction, matmul_flops, parse


def counted(program_text: str, default_trip_count: int = 1) -> int:
    rates = Rates(1.0, 1.0, 1.0, None)
    return estimate_cost(parse(program_text), rates, lambda kernel: 0.0, default_trip_count).flops


def text_of(function, *shapes):
    return (
        jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
        or ""
    )


def test_matmuls_of_known_size():
    assert counted(text_of(lambda a, b: a @ b, (300, 700), (700, 200))) == 2 * 300 * 700 * 200
    batched = text_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (5, 30, 70), (5, 70, 20))
    assert counted(batched) == 2 * 5 * 30 * 70 * 20


def test_matmuls_in_loops_are_multiplied_by_the_trip_count():
    def scanned(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    def nested_loops(x, stack):
        return jax.lax.fori_loop(0, 3, lambda i, x: scanned(x, stack), x)

    assert counted(text_of(scanned, (64, 128), (7, 128, 128))) == 7 * 2 * 64 * 128 * 128
    assert counted(text_of(nested_loops, (64, 128), (7, 128, 128))) == 21 * 2 * 64 * 128 * 128


def test_data_dependent_loops_use_the_default_trip_count():
    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ w, x)

    text = text_of(until, (64, 128), (128, 128))
    assert counted(text, default_trip_count=5) == 5 * counted(text) == 5 * 2 * 64 * 128 * 128


def by_brute_force(size, kernel, out, stride, pad, dilation, kernel_dilation):
    """Counts multiply-adds along one axis of a convolution with a dilated and padded input."""
    spread = np.zeros((size - 1) * dilation + 1, int)
    spread[::dilation] = 1
    count = 0
    for o, k in itertools.product(range(out), range(kernel)):
        at = o * stride + k * kernel_dilation - pad
        count += 0 <= at < len(spread) and spread[at]
    return count


@pytest.mark.parametrize("stride, pad, dilation, kernel_dilation", itertools.product((1, 2), (0, 3), (1, 2), (1, 3)))
def test_convolutions_do_not_count_padding(stride, pad, dilation, kernel_dilation):
    size, kernel = 9, 4
    out = ((size - 1) * dilation + 1 + 2 * pad - (kernel - 1) * kernel_dilation - 1) // stride + 1
    if out < 1:
        pytest.skip("the window is wider than its input")
    window = f"size={kernel} stride={stride} pad={pad}_{pad} lhs_dilate={dilation} rhs_dilate={kernel_dilation}"
    line = Instruction(
        "c", f"f32[2,{out},5]", "convolution", "%x, %w", f", window={{{window}}}, dim_labels=b0f_0io->b0f"
    )
    flops = matmul_flops(line, {"x": f"f32[2,{size},3]", "w": f"f32[{kernel},3,5]"})
    assert flops == 2 * 2 * 3 * 5 * by_brute_force(size, kernel, out, stride, pad, dilation, kernel_dilation)


def test_a_matmul_that_is_a_full_convolution_on_tpus():
    """The query projection multiplies [16384, 2560, 1] by [32 heads, 128, 2560]."""
    attributes = ", window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0oi->b0f"
    line = Instruction("q", "bf16[16384,32,128]", "convolution", "%x, %w", attributes)
    flops = matmul_flops(line, {"x": "bf16[16384,2560,1]", "w": "bf16[32,128,2560]"})
    assert flops == 2 * 16384 * 2560 * 32 * 128


def test_a_matmul_that_calls_cublas_on_gpus():
    attributes = (
        ', custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}'
    )
    line = Instruction("g", "(bf16[300,200], s8[4194304])", "custom-call", "%x, %w", attributes)
    assert matmul_flops(line, {"x": "bf16[300,700]", "w": "bf16[700,200]"}) == 2 * 300 * 700 * 200
