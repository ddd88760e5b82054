"""Estimates a lower bound of a program's run time.

Instructions run one after another, and asynchronous collectives overlap with them. On TPUs, XLA estimates the cycles of
fusions. For all other instructions, the time is computed from peak rates. Collectives take the time of their data at
the link bandwidth, and the links transfer one collective at a time. Kernels take the time of their FLOPs. Other
instructions take the longer of the times of their matmuls and of their memory traffic.
"""

import dataclasses
import re
from collections.abc import Callable

from poly_epo_jax.bench.aot.collectives import Collective, collective_of, ended_by
from poly_epo_jax.bench.aot.hlo import Instruction, Program, array_bytes, loop_trips, matmul_flops, nested
from poly_epo_jax.model.experts import EXPERTS_SCOPE

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"optimization-barrier", "copy-start", "copy-done", "iota"}
"""Instructions without run time. Copies to and from the on-chip memory of a TPU overlap with other instructions."""

NO_ESTIMATE = 2**62  # XLA writes this number of cycles or more if it has no estimate.


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of one device.

    Attributes:
      flops_per_second: FLOPs per second of matmuls.
      bytes_per_second: Memory bandwidth, in bytes per second.
      link_bytes_per_second: Bandwidth of all links to other devices of the machine in one direction, in bytes per
        second.
      cycles_per_second: Clock rate. If None, XLA does not estimate cycles for the device.
    """

    flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float
    cycles_per_second: float | None


@dataclasses.dataclass
class CollectiveUse:
    """A collective of a program, with its executions.

    Attributes:
      collective: The collective.
      times: Number of executions in one run of the program.
      loops: Number of nested loops that contain the collective.
      waited_seconds: Total time in seconds that the program waits for the collective.
    """

    collective: Collective
    times: int
    loops: int
    waited_seconds: float


@dataclasses.dataclass
class ProgramEstimate:
    """Estimated costs of one run of a program on one device.

    Attributes:
      seconds: Seconds by category: "xla" (estimated by XLA), "arithmetic" (from peak rates), "kernels" and "links".
      flops: FLOPs of matmuls outside kernels.
      kernel_flops: FLOPs of kernels.
      kernels: Number of executions of each kernel.
      collectives: Collectives of the program.
      costs: Seconds of instructions, without waiting for links, by their opcode, their origin in the model's code and
        their shape.
    """

    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("xla", "arithmetic", "kernels", "links"), 0.0)
    )
    flops: int = 0
    kernel_flops: float = 0.0
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    collectives: list[CollectiveUse] = dataclasses.field(default_factory=list)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        """Estimated run time of the program in seconds."""
        return sum(self.seconds.values())


def estimate_cost(
    program: Program,
    rates: Rates,
    kernel_flops: Callable[[str], float],
    default_trip_count: int = 1,
    expert_blocks: int = 1,
) -> ProgramEstimate:
    """Estimates the costs of one run of a program.

    Args:
      program: Program to estimate.
      rates: Peak rates of one device.
      kernel_flops: Function that maps the name of a kernel to the FLOPs of one execution.
      default_trip_count: Number of iterations of loops whose trip count depends on the data.
      expert_blocks: Number of iterations of the loops over blocks of experts.

    Returns:
      The estimated costs.
    """
    found = ProgramEstimate()
    _run(_Reader(program, rates, kernel_flops, default_trip_count, expert_blocks, found), program.entry, 1, 0)
    return found


@dataclasses.dataclass
class _Reader:
    """Arguments of `estimate_cost`, and the costs found so far."""

    program: Program
    rates: Rates
    kernel_flops: Callable[[str], float]
    default_trip_count: int
    expert_blocks: int
    found: ProgramEstimate


def _run(reader: _Reader, name: str, times: int, loops: int) -> None:
    """Adds the costs of a computation. A collective only adds the time for which an instruction must wait for it."""
    clock = link = 0.0
    in_flight: dict[str, tuple[float, CollectiveUse]] = {}
    computation = reader.program.computations[name]
    for one in computation:
        if one.opcode == "while":
            default = reader.expert_blocks if EXPERTS_SCOPE in one.attributes else reader.default_trip_count
            _run(reader, one.named("body"), times * (loop_trips(reader.program, one) or default), loops + 1)
        elif one.opcode in ("call", "conditional"):
            for called in one.called():
                _run(reader, called, times, loops)
        elif collective := collective_of(reader.program, one):
            use = CollectiveUse(collective, times, loops, 0.0)
            reader.found.collectives.append(use)
            link = max(link, clock) + collective.sent_bytes / reader.rates.link_bytes_per_second
            in_flight[one.name] = link, use
        begun = {name: use.collective for name, (_, use) in in_flight.items()}
        is_synchronous = one.name in begun and not begun[one.name].asynchronous
        done = one.name if is_synchronous else ended_by(reader.program, one, begun)
        if done in in_flight:
            end, use = in_flight.pop(done)
            use.waited_seconds += times * max(0.0, end - clock)
            reader.found.seconds["links"] += times * max(0.0, end - clock)
            clock = max(clock, end)
        clock += _compute(reader, one, computation, times)


def _compute(reader: _Reader, one: Instruction, computation: list[Instruction], times: int) -> float:
    """Adds the costs of an instruction without its communication, and returns the seconds of one execution."""
    if one.opcode in FREE or one.opcode in ("while", "call", "conditional") or one.opcode.endswith("-done"):
        return 0.0
    found, rates = reader.found, reader.rates
    flops = sum(
        matmul_flops(inner, shapes(within)) for inner, within in [(one, computation), *nested(reader.program, one)]
    )
    found.flops += times * flops
    if kernel := kernel_name(one):
        work = reader.kernel_flops(kernel)
        found.kernels[kernel] = found.kernels.get(kernel, 0) + times
        found.kernel_flops += times * work
        kind, seconds = "kernels", work / rates.flops_per_second
    elif rates.cycles_per_second and (cycles := estimated_cycles(one)) is not None:
        kind, seconds = "xla", cycles / rates.cycles_per_second
    elif one.opcode.endswith("-start") or collective_of(reader.program, one):
        kind, seconds = "arithmetic", flops / rates.flops_per_second
    else:
        moved = moved_bytes(reader.program, one, computation)
        kind, seconds = "arithmetic", max(flops / rates.flops_per_second, moved / rates.bytes_per_second)
    found.seconds[kind] += times * seconds
    origin = f"{one.opcode} {origin_of(one)} {one.shape[:60]}"
    found.costs[origin] = found.costs.get(origin, 0.0) + times * seconds
    return seconds


def origin_of(instruction: Instruction) -> str:
    """Returns the last three parts of the JAX name of an instruction, without the names of loops and closures."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    path = (
        re.sub(r"\b(while|body|closed_call|checkpoint|jit\(\w+\)|cond)/", "", found[1]) if found else instruction.name
    )
    return "/".join(path.split("/")[-3:])


def shapes(computation: list[Instruction]) -> dict[str, str]:
    """Returns the shapes of the instructions of a computation by name."""
    return {one.name: one.shape for one in computation}


def kernel_name(instruction: Instruction) -> str:
    """Returns the name of a Mosaic, Triton or cuDNN kernel, or "" for any other instruction."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    if (
        instruction.opcode != "custom-call"
        or not target
        or not re.search("tpu_custom_call|triton|mosaic|cudnn", target[1])
    ):
        return ""
    named = re.search(r'name = "(\w+)"', instruction.attributes)  # Set for Triton kernels.
    return named[1] if named else re.sub(r"(\.\d+|\.clone|\.remat)+$", "", instruction.name)


def estimated_cycles(instruction: Instruction) -> int | None:
    """Returns the cycles that XLA for TPUs estimates for an instruction, or None if there is no estimate."""
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else None


def moved_bytes(program: Program, one: Instruction, computation: list[Instruction]) -> int:
    """Counts the bytes that an instruction reads and writes.

    Only the accessed part of an array counts if the instruction slices or partially updates it.

    Args:
      program: Program that contains the instruction.
      one: Instruction to inspect.
      computation: Computation that contains the instruction.
    """
    known = shapes(computation)
    sizes, result = [array_bytes(known.get(name, "")) for name in one.operands], array_bytes(one.shape)
    if one.opcode == "dynamic-slice":
        return 2 * result
    if one.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if one.opcode != "fusion":
        return sum(sizes) + result
    fused = program.computations[one.called()[0]]
    for parameter in (inner for inner in fused if inner.opcode == "parameter"):
        index, users = int(parameter.arguments), [user for user in fused if parameter.name in user.operands]
        if users and all(user.opcode in ("dynamic-slice", "gather", "slice") for user in users):
            sizes[index] = sum(array_bytes(user.shape) for user in users)
        elif [user.opcode for user in users] == ["dynamic-update-slice"] and users[0].operands[0] == parameter.name:
            update = array_bytes(shapes(fused)[users[0].operands[1]])
            sizes[index], result = 0, result - array_bytes(users[0].shape) + 2 * update
    return sum(sizes) + result
