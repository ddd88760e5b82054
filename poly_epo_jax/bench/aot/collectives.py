"""Finds the collectives of a program: their start and end instructions, and the bytes that each device sends."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from poly_epo_jax.bench.aot.hlo import ARRAY, Instruction, Program, array_bytes, nested

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


class Collective(NamedTuple):
    """A collective operation.

    Attributes:
      kind: One of `KINDS`.
      dtype: XLA name of the dtype in which the data is sent.
      sent_bytes: Bytes that each device sends in one execution of a ring algorithm.
      asynchronous: Whether other instructions can run during the collective.
      channel: Channel id that XLA assigned to the collective.
    """

    kind: str
    dtype: str
    sent_bytes: int
    asynchronous: bool
    channel: str


def collective_of(program: Program, instruction: Instruction) -> Collective | None:
    """Returns the collective that an instruction executes, contains in a fusion, or starts.

    Args:
      program: Program that contains the instruction.
      instruction: Instruction to inspect.

    Returns:
      The collective, or None if the instruction does not start a collective.
    """
    if instruction.opcode.endswith(("-done", "-update")) or _continues(instruction):
        return None
    fused = [one for one, _ in nested(program, instruction)]
    found = next((one for one in [instruction, *fused] if one.opcode.removesuffix("-start") in KINDS), None)
    if found is None:
        return None
    begins = instruction.opcode.endswith("-start") or "async-collective-start" in instruction.name
    kind = found.opcode.removesuffix("-start")
    if kind == "all-reduce" and any(one.opcode == "dynamic-slice" for one in fused):
        kind = "reduce-scatter"  # XLA for TPUs fuses an all-reduce and a dynamic-slice for this purpose.
    asynchronous = begins and '"is_sync":true' not in instruction.attributes
    types = ARRAY.search(found.shape)
    return Collective(
        kind, types[1] if types else "", _sent_bytes(program, found, kind, fused), asynchronous, _channel(found)
    )


def ended_by(program: Program, instruction: Instruction, in_flight: Mapping[str, Collective]) -> str:
    """Finds the collective for which an instruction waits.

    Args:
      program: Program that contains the instruction.
      instruction: Instruction to inspect.
      in_flight: Collectives that have started and not ended, by the name of the instruction that started them.

    Returns:
      The name of the instruction that started the collective, or "" if the instruction does not wait for a collective.
    """
    if "async-collective-done" in instruction.name:
        channels = {_channel(one) for one, _ in nested(program, instruction) if one.opcode in KINDS}
        return next((name for name, one in in_flight.items() if one.channel in channels), "")
    done = instruction.operands[0] if instruction.opcode.endswith("-done") else ""
    return done if done in in_flight else ""


def _continues(instruction: Instruction) -> bool:
    """Returns True for a matmul that overlaps a collective on TPUs, or for the end of a collective.

    These instructions refer to a collective that has already started.
    """
    return "async-collective-start" not in instruction.name and (
        "async-collective-done" in instruction.name or any("async_collective" in n for n in instruction.called())
    )


def _channel(instruction: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", instruction.attributes)
    return found[1] if found else ""


def _sent_bytes(program: Program, found: Instruction, kind: str, fused: list[Instruction]) -> int:
    """Returns the bytes that each device of a ring of n sends: (n - 1) / n of gathered or scattered data.

    An all-reduce sends its data twice, as a reduce-scatter and an all-gather. A permute sends all of its data.
    """
    computation = fused or next(c for c in program.computations.values() if any(one is found for one in c))
    shapes = {one.name: one.shape for one in computation}
    size = sum(array_bytes(shapes.get(name, "")) for name in found.operands)
    if kind == "collective-permute":
        return size
    devices = group_size(found.attributes)
    total = size * devices if kind == "all-gather" else size
    return total * (devices - 1) // devices * (2 if kind == "all-reduce" else 1)


def group_size(attributes: str) -> int:
    """Returns the number of devices in each replica group of a collective, or 1 if the attributes do not contain it."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    if grid := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(grid[2])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]))
    return 1
