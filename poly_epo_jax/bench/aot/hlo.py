"""Reads the text of an optimised XLA program: its instructions, and how often each runs.

XLA's own `cost_analysis` counts the body of a loop only once, and says nothing at all for GPUs.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

BYTES = {f"{kind}{bits}": bits // 8 for kind in ("s", "u", "f") for bits in (8, 16, 32, 64)} | {"pred": 1, "bf16": 2}
ARRAY = re.compile(rf"\b({'|'.join(sorted(BYTES, key=len, reverse=True))})\[([\d,]*)\]")


class Instruction(NamedTuple):
    """One instruction: `shape` without layouts, `arguments` in the parentheses and `attributes` after them, as text."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    def called(self) -> list[str]:
        """The computations that run once each time this one runs, except those of loops and reductions."""
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
        """The computation that an attribute such as `body` names; "" without the attribute."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    def numbers(self, attribute: str) -> list[int]:
        """The numbers that an attribute such as `lhs_contracting_dims` lists in braces."""
        found = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return [int(number) for number in found[1].split(",") if number] if found else []


class Program(NamedTuple):
    """The instructions of every computation, in execution order."""

    computations: dict[str, list[Instruction]]
    entry: str


def parse(text: str) -> Program:
    """The program of `Compiled.as_text()`."""
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
    """The place of the parenthesis that closes the first one."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return place
    return len(text)


def dimensions(shape: str) -> list[int]:
    """The sizes of the first array in a shape."""
    found = ARRAY.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def array_bytes(shape: str) -> int:
    """The bytes of all arrays in a shape, which may be a tuple."""
    arrays = ((kind, [int(size) for size in sizes.split(",") if size]) for kind, sizes in ARRAY.findall(shape))
    return sum(BYTES[kind] * math.prod(sizes) for kind, sizes in arrays)


def nested(program: Program, instruction: Instruction) -> Iterator[tuple[Instruction, list[Instruction]]]:
    """All instructions that this one fuses or starts, at any depth, each with its computation; none for a plain one."""
    if instruction.opcode in ("while", "call", "conditional"):  # these have schedules of their own
        return
    for name in instruction.called():
        for one in program.computations[name]:
            yield one, program.computations[name]
            yield from nested(program, one)


def loop_trips(program: Program, loop: Instruction) -> int | None:
    """How often the loop runs: from XLA's own count, or the constant that its counter is compared with; None: open."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    condition = program.computations[loop.named("condition")]
    constants = [one for one in condition if one.opcode == "constant" and one.shape in ("s32[]", "u32[]", "s64[]")]
    inner = [one for step in condition for name in step.called() for one in program.computations[name]]
    compared = any(one.opcode == "compare" and "direction=LT" in one.attributes for one in [*condition, *inner])
    values = {int(one.arguments) for one in constants}
    return values.pop() if compared and len(values) == 1 else None
