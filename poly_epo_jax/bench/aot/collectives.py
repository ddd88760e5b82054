"""The collectives of a program: the instructions that begin and end them, and the bytes that each device sends."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from poly_epo_jax.bench.aot.hlo import ARRAY, Instruction, Program, array_bytes, nested

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


class Collective(NamedTuple):
    """`sent_bytes` are sent by each device in one run, in a ring, as `dtype`; `channel` is XLA's number for it."""

    kind: str
    dtype: str
    sent_bytes: int
    asynchronous: bool
    channel: str


def collective_of(program: Program, instruction: Instruction) -> Collective | None:
    """The collective that an instruction is, fuses or begins; None if it is something else."""
    if instruction.opcode.endswith(("-done", "-update")) or _goes_on(instruction):
        return None
    fused = [one for one, _ in nested(program, instruction)]
    found = next((one for one in [instruction, *fused] if one.opcode.removesuffix("-start") in KINDS), None)
    if found is None:
        return None
    begins = instruction.opcode.endswith("-start") or "async-collective-start" in instruction.name
    kind = found.opcode.removesuffix("-start")
    if kind == "all-reduce" and any(one.opcode == "dynamic-slice" for one in fused):
        kind = "reduce-scatter"  # as TPUs write it
    asynchronous = begins and '"is_sync":true' not in instruction.attributes
    types = ARRAY.search(found.shape)
    sent = _sent_bytes(program, found, kind, fused)
    return Collective(kind, types[1] if types else "", sent, asynchronous, _channel(found))


def ended_by(program: Program, instruction: Instruction, under_way: Mapping[str, Collective]) -> str:
    """The name of the instruction that began the collective that this one waits for; "" if it waits for none."""
    if "async-collective-done" in instruction.name:
        channels = {_channel(one) for one, _ in nested(program, instruction) if one.opcode in KINDS}
        return next((name for name, one in under_way.items() if one.channel in channels), "")
    done = instruction.operands[0] if instruction.opcode.endswith("-done") else ""
    return done if done in under_way else ""


def _goes_on(instruction: Instruction) -> bool:
    """Whether this is a product that runs alongside a TPU's collective, or a collective's end: both name it again."""
    if "async-collective-start" in instruction.name:
        return False
    return "async-collective-done" in instruction.name or any("async_collective" in n for n in instruction.called())


def _channel(instruction: Instruction) -> str:
    found = re.search(r"channel_id=(\d+)", instruction.attributes)
    return found[1] if found else ""


def _sent_bytes(program: Program, found: Instruction, kind: str, fused: list[Instruction]) -> int:
    """In a ring of n devices, each sends (n - 1) / n of what is gathered or scattered, and all of what is permuted."""
    computation = fused or next(c for c in program.computations.values() if any(one is found for one in c))
    shapes = {one.name: one.shape for one in computation}
    size = sum(array_bytes(shapes.get(name, "")) for name in found.operands)
    if kind == "collective-permute":
        return size
    devices = group_size(found.attributes)
    whole = size * devices if kind == "all-gather" else size
    return whole * (devices - 1) // devices * (2 if kind == "all-reduce" else 1)


def group_size(attributes: str) -> int:
    """How many devices take part in a collective together; 1 if the attributes do not say."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    if grid := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(grid[2])
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", mesh[2]))
    return 1
