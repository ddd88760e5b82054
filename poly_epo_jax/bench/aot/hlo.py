"""Parses the text of an optimized XLA program: its instructions, the trip counts of its loops, and FLOPs of matmuls.

A multiply-add counts as two FLOPs. XLA represents matmuls as convolutions on TPUs, and some matmuls as calls of cuBLAS
on GPUs.

XLA's `cost_analysis` is not sufficient: it counts the body of a loop only once, and returns nothing for GPUs.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BYTES = {f"{kind}{bits}": bits // 8 for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)} | {"pred": 1, "bf16": 2}
ARRAY = re.compile(rf"\b({'|'.join(sorted(BYTES, key=len, reverse=True))})\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One instruction of a program. All fields are text.

    Attributes:
      name: Name of the instruction.
      shape: Shape of the result, without layouts.
      opcode: Operation.
      arguments: Text in parentheses after the operation.
      attributes: Text after the parentheses.
    """

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self) -> list[str]:
        """Returns the names of the computations that this instruction calls, except those of loops and reductions.

        For a conditional, these are the computations of all branches.
        """
        if self.opcode == "conditional":
            branches = re.findall(
                r"(?:branch_computations=\{[^}]*|(?:true|false)_computation=%[\w.\-]+)", self.attributes
            )
            return re.findall(r"%([\w.\-]+)", " ".join(branches))
        found = re.search(r"\bcalls=%([\w.\-]+)", self.attributes)
        if not found and self.opcode in ("call", "async-start"):
            found = re.search(r"\bto_apply=%([\w.\-]+)", self.attributes)
        return [found[1]] if found else []

    def named(self, attribute: str) -> str:
        """Returns the computation in an attribute such as `body`, or "" if the attribute is missing."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    def numbers(self, attribute: str) -> list[int]:
        """Returns the numbers in an attribute such as `lhs_contracting_dims`, or an empty list if it is missing."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return [int(number) for number in found[1].split(",") if number] if found else []


class Program(NamedTuple):
    """A compiled program.

    Attributes:
      computations: Instructions of each computation in execution order, by the name of the computation.
      entry: Name of the computation that runs first.
    """

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """Parses the result of `Compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if header and not line.startswith(" ") and ("->" in line or header[1]):
            current = header[2]
            computations[current] = []
            entry = current if header[1] else entry
        elif line.rstrip() == "}":
            current = ""
        elif current and (found := _instruction(line)):
            computations[current].append(found)
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    rest = line[head.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, rest = rest.partition("(")
    end = _closing("(" + rest) - 1
    shape = re.sub(r"/\*.*?\*/|\{[^{}]*\}", "", shape)
    return Instruction(head[1], shape, opcode, rest[:end], rest[end + 1 :])


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the first one."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return index
    return len(text)


def dimensions(shape: str) -> list[int]:
    """Returns the dimensions of the first array in a shape."""
    found = ARRAY.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def array_bytes(shape: str) -> int:
    """Returns the bytes of all arrays in a shape, which may be a tuple."""
    arrays = ((kind, [int(size) for size in sizes.split(",") if size]) for kind, sizes in ARRAY.findall(shape))
    return sum(BYTES[kind] * math.prod(sizes) for kind, sizes in arrays)


def nested(program: Program, instruction: Instruction) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """Yields all instructions that a fusion or asynchronous start contains, at any depth, with their computations.

    Args:
      program: Program that contains the instruction.
      instruction: Instruction to inspect. For other kinds of instructions, nothing is yielded.
    """
    if instruction.opcode in ("while", "call", "conditional"):  # Their computations are scheduled separately.
        return
    for name in instruction.called():
        for one in program.computations[name]:
            yield one, program.computations[name]
            yield from nested(program, one)


def loop_trips(program: Program, loop: Instruction) -> int | None:
    """Returns the trip count of a loop.

    Args:
      program: Program that contains the loop.
      loop: The `while` instruction.

    Returns:
      The trip count that XLA determined, or the constant with which the loop counter is compared. None if the trip
      count depends on the data.
    """
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(known[1])
    condition = program.computations[loop.named("condition")]
    constants = [one for one in condition if one.opcode == "constant" and one.shape in ("s32[]", "u32[]", "s64[]")]
    inner = [one for step in condition for name in step.called() for one in program.computations[name]]
    compared = any(one.opcode == "compare" and "direction=LT" in one.attributes for one in [*condition, *inner])
    values = {int(one.arguments) for one in constants}
    return values.pop() if compared and len(values) == 1 else None


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
