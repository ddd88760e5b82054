"""Parses the text of an optimized XLA program: its instructions, and the trip counts of its loops.

XLA's `cost_analysis` is not sufficient: it counts the body of a loop only once, and returns nothing for GPUs.
"""

import math
import re
from collections.abc import Iterator
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
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations[loop.named("condition")]
    constants = [one for one in condition if one.opcode == "constant" and one.shape in ("s32[]", "u32[]", "s64[]")]
    inner = [one for step in condition for name in step.called() for one in program.computations[name]]
    compared = any(one.opcode == "compare" and "direction=LT" in one.attributes for one in [*condition, *inner])
    values = {int(one.arguments) for one in constants}
    return values.pop() if compared and len(values) == 1 else None
