"""Counts the FLOPs of a program's matmuls. A multiply-add counts as two FLOPs.

XLA represents matmuls as convolutions on TPUs, and some matmuls as calls of cuBLAS on GPUs.
"""

import functools
import math
import re
from collections.abc import Mapping

from poly_epo_jax.bench.aot.hlo import Instruction, dimensions


def matmul_flops(instruction: Instruction, shapes: Mapping[str, str]) -> int:
    """Counts the FLOPs of one execution of an instruction.

    Args:
      instruction: Instruction to inspect.
      shapes: Shapes of the instructions in its computation, by name.

    Returns:
      The FLOPs, or 0 if the instruction is not a matmul.
    """
    library = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', instruction.attributes)  # Set for cuBLAS calls.
    if instruction.opcode not in ("dot", "convolution") and not library:
        return 0
    left, right = (dimensions(shapes[name]) for name in instruction.operands[:2])
    out = dimensions(instruction.shape)
    if library or instruction.opcode == "dot":
        summed = re.findall(r"\d+", library[1]) if library else instruction.numbers("lhs_contracting_dims")
        return 2 * math.prod(out) * math.prod(left[int(axis)] for axis in summed)
    return _convolution_flops(instruction, left, right, out)


def _convolution_flops(instruction: Instruction, left: list[int], right: list[int], out: list[int]) -> int:
    """Counts the FLOPs of a convolution, without multiplications by padding and by dilation zeros."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    assert labels, instruction
    inputs, kernel, outputs = labels.groups()
    total = 2 * out[outputs.index("b")] * out[outputs.index("f")] * right[kernel.index("i")]
    window = dict(
        re.findall(r"(\w+)=([\d_x\-]+)", (re.search(r"window=\{(.*?)\}", instruction.attributes) or ["", ""])[1])
    )
    for axis in range(len(left) - 2):
        label = str(axis)
        settings = {name: values.split("x")[axis] for name, values in window.items()}
        total *= _num_multiplications(
            left[inputs.index(label)],
            right[kernel.index(label)],
            out[outputs.index(label)],
            int(settings.get("stride", 1)),
            int(settings.get("pad", "0_0").partition("_")[0]),
            int(settings.get("lhs_dilate", 1)),
            int(settings.get("rhs_dilate", 1)),
        )
    return total


@functools.cache
def _num_multiplications(
    size: int, kernel: int, out: int, stride: int, pad: int, dilation: int, kernel_dilation: int
) -> int:
    """Returns the number of pairs of an output and a window position that read an input element, along one axis."""
    # Output o and window position k read position o * stride + k * kernel_dilation - pad of the dilated input.
    spread = (size - 1) * dilation + 1
    if dilation == 1:
        firsts = (k * kernel_dilation - pad for k in range(kernel))
        return sum(max(0, min(out, (spread - 1 - at) // stride + 1) - max(0, -(at // stride))) for at in firsts)
    positions = (o * stride + k * kernel_dilation - pad for o in range(out) for k in range(kernel))
    return sum(0 <= at < spread and at % dilation == 0 for at in positions)
