"""FLOPs of products read off instructions, against counts by brute force and against programs of known products."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poly_epo_jax.bench.aot.estimate import Rates, estimate
from poly_epo_jax.bench.aot.hlo import Instruction, parse
from poly_epo_jax.bench.aot.products import product_flops


def counted(program_text: str, open_trips: int = 1) -> int:
    return estimate(parse(program_text), Rates(1.0, 1.0, 1.0, None), lambda kernel: 0.0, open_trips).flops


def text_of(function, *shapes):
    return (
        jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
        or ""
    )


def test_products_of_known_size():
    assert counted(text_of(lambda a, b: a @ b, (300, 700), (700, 200))) == 2 * 300 * 700 * 200
    batched = text_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (5, 30, 70), (5, 70, 20))
    assert counted(batched) == 2 * 5 * 30 * 70 * 20


def test_a_product_in_a_loop_counts_as_often_as_the_loop_runs():
    def scanned(x, stack):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    def nested_loops(x, stack):
        return jax.lax.fori_loop(0, 3, lambda i, x: scanned(x, stack), x)

    assert counted(text_of(scanned, (64, 128), (7, 128, 128))) == 7 * 2 * 64 * 128 * 128
    assert counted(text_of(nested_loops, (64, 128), (7, 128, 128))) == 21 * 2 * 64 * 128 * 128


def test_loops_that_depend_on_data_count_as_told():
    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: x @ w, x)

    text = text_of(until, (64, 128), (128, 128))
    assert counted(text, open_trips=5) == 5 * counted(text) == 5 * 2 * 64 * 128 * 128


def by_brute_force(size, kernel, out, stride, pad, dilation, kernel_dilation):
    """Multiply-adds along one axis: an input spread out by zeros and padded, and a window moved over it."""
    spread = np.zeros((size - 1) * dilation + 1, int)
    spread[::dilation] = 1
    count = 0
    for o, k in itertools.product(range(out), range(kernel)):
        at = o * stride + k * kernel_dilation - pad
        count += 0 <= at < len(spread) and spread[at]
    return count


@pytest.mark.parametrize("stride, pad, dilation, kernel_dilation", itertools.product((1, 2), (0, 3), (1, 2), (1, 3)))
def test_convolutions_count_what_meets_no_padding(stride, pad, dilation, kernel_dilation):
    size, kernel = 9, 4
    out = ((size - 1) * dilation + 1 + 2 * pad - (kernel - 1) * kernel_dilation - 1) // stride + 1
    if out < 1:
        pytest.skip("the window is wider than its input")
    window = f"size={kernel} stride={stride} pad={pad}_{pad} lhs_dilate={dilation} rhs_dilate={kernel_dilation}"
    line = Instruction(
        "c", f"f32[2,{out},5]", "convolution", "%x, %w", f", window={{{window}}}, dim_labels=b0f_0io->b0f"
    )
    flops = product_flops(line, {"x": f"f32[2,{size},3]", "w": f"f32[{kernel},3,5]"})
    assert flops == 2 * 2 * 3 * 5 * by_brute_force(size, kernel, out, stride, pad, dilation, kernel_dilation)


def test_a_product_that_a_tpu_writes_as_a_full_convolution():
    """[16384, 2560, 1] by [32 heads, 128, 2560], as XLA for TPUs projects the queries."""
    attributes = ", window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0oi->b0f"
    line = Instruction("q", "bf16[16384,32,128]", "convolution", "%x, %w", attributes)
    flops = product_flops(line, {"x": "bf16[16384,2560,1]", "w": "bf16[32,128,2560]"})
    assert flops == 2 * 16384 * 2560 * 32 * 128


def test_a_product_that_a_gpu_leaves_to_cublas():
    attributes = (
        ', custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}'
    )
    line = Instruction("g", "(bf16[300,200], s8[4194304])", "custom-call", "%x, %w", attributes)
    assert product_flops(line, {"x": "bf16[300,700]", "w": "bf16[700,200]"}) == 2 * 300 * 700 * 200
