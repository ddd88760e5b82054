"""The least time that a program takes: its instructions one after another, and its collectives alongside them.

For a TPU's fusions, XLA itself estimates the cycles. The rest is arithmetic: matrix products at the peak rate of the
device, other instructions at that of its memory, and collectives at that of its links, which carry one at a time.
"""

import dataclasses
import re
from collections.abc import Callable

from poly_epo_jax.bench.aot.collectives import Collective, collective_of, ended_by
from poly_epo_jax.bench.aot.hlo import Instruction, Program, array_bytes, loop_trips, nested
from poly_epo_jax.bench.aot.products import product_flops

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"optimization-barrier", "copy-start", "copy-done", "iota"}
"""Instructions that take no time of their own; copies to and from a TPU's own memory run alongside others."""

NO_ESTIMATE = 2**62  # cycles; XLA writes this or more if it does not know


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak rates of one device. Of its links, only those to another device of the machine count, in one direction."""

    flops_per_second: float
    bytes_per_second: float
    link_bytes_per_second: float
    cycles_per_second: float | None  # None: XLA estimates no cycles for it


@dataclasses.dataclass
class Sent:
    """A collective of the program: it runs `times` times in all, inside `loops` nested loops.

    `waited_seconds` are what the program waits for it in all.
    """

    collective: Collective
    times: int
    loops: int
    waited_seconds: float


@dataclasses.dataclass
class Estimate:
    """Seconds of a program, by what they are spent on, and the FLOPs of its products.

    `kernels` is how often each kernel runs. `costs` are the seconds of instructions by the place in the model's code
    that they come from, without links.
    """

    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("xla", "arithmetic", "kernels", "links"), 0.0)
    )
    flops: int = 0
    kernel_flops: float = 0.0
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)
    collectives: list[Sent] = dataclasses.field(default_factory=list)
    costs: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


def estimate(program: Program, rates: Rates, kernel_flops: Callable[[str], float], open_trips: int = 1) -> Estimate:
    """Walks through the program.

    Args:
      kernel_flops: the FLOPs of one run of a kernel, by its name.
      open_trips: trips assumed for loops whose number of trips depends on the data.
    """
    found = Estimate()
    _run(_Reader(program, rates, kernel_flops, open_trips, found), program.entry, 1, 0)
    return found


@dataclasses.dataclass
class _Reader:
    program: Program
    rates: Rates
    kernel_flops: Callable[[str], float]
    open_trips: int
    found: Estimate


def _run(reader: _Reader, name: str, times: int, loops: int) -> None:
    """Adds a computation's instructions. A collective costs time only as far as it is not done when waited for."""
    clock = link = 0.0
    under_way: dict[str, tuple[float, Sent]] = {}
    computation = reader.program.computations[name]
    for one in computation:
        if one.opcode == "while":
            trips = loop_trips(reader.program, one) or reader.open_trips
            _run(reader, one.named("body"), times * trips, loops + 1)
        elif one.opcode in ("call", "conditional"):
            for called in one.called():
                _run(reader, called, times, loops)
        elif collective := collective_of(reader.program, one):
            sent = Sent(collective, times, loops, 0.0)
            reader.found.collectives.append(sent)
            link = max(link, clock) + collective.sent_bytes / reader.rates.link_bytes_per_second
            under_way[one.name] = link, sent
        begun = {name: sent.collective for name, (_, sent) in under_way.items()}
        is_synchronous = one.name in begun and not begun[one.name].asynchronous
        done = one.name if is_synchronous else ended_by(reader.program, one, begun)
        if done in under_way:
            end, sent = under_way.pop(done)
            sent.waited_seconds += times * max(0.0, end - clock)
            reader.found.seconds["links"] += times * max(0.0, end - clock)
            clock = max(clock, end)
        clock += _compute(reader, one, computation, times)


def _compute(reader: _Reader, one: Instruction, computation: list[Instruction], times: int) -> float:
    """Adds what an instruction computes, without what it sends, and returns the seconds of one run."""
    if one.opcode in FREE or one.opcode in ("while", "call", "conditional") or one.opcode.endswith("-done"):
        return 0.0
    found, rates = reader.found, reader.rates
    flops = sum(product_flops(inner, shapes(within)) for inner, within in _parts(reader.program, one, computation))
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
    """The end of the path that JAX gives an instruction, without the names of loops and closures."""
    found = re.search(r'op_name="([^"]*)"', instruction.attributes)
    path = (
        re.sub(r"\b(while|body|closed_call|checkpoint|jit\(\w+\)|cond)/", "", found[1]) if found else instruction.name
    )
    return "/".join(path.split("/")[-3:])


def _parts(program: Program, one: Instruction, computation: list[Instruction]):
    return [(one, computation), *nested(program, one)]


def shapes(computation: list[Instruction]) -> dict[str, str]:
    return {one.name: one.shape for one in computation}


def kernel_name(instruction: Instruction) -> str:
    """The name of a kernel that is not XLA's own code: one of Mosaic, Triton or cuDNN. "" for anything else."""
    target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    if (
        instruction.opcode != "custom-call"
        or not target
        or not re.search("tpu_custom_call|triton|mosaic|cudnn", target[1])
    ):
        return ""
    named = re.search(r'name = "(\w+)"', instruction.attributes)  # as Triton's kernels are
    return named[1] if named else re.sub(r"(\.\d+|\.clone|\.remat)+$", "", instruction.name)


def estimated_cycles(instruction: Instruction) -> int | None:
    """The cycles that XLA for TPUs expects an instruction to take; None if it does not say."""
    found = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return int(found[1]) if found and int(found[1]) < NO_ESTIMATE else None


def moved_bytes(program: Program, one: Instruction, computation: list[Instruction]) -> int:
    """The bytes that an instruction reads and writes. Of an array that it slices or updates in part, only that part."""
    known = shapes(computation)
    sizes = [array_bytes(known.get(name, "")) for name in one.operands]
    result = array_bytes(one.shape)
    if one.opcode == "dynamic-slice":
        return 2 * result
    if one.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    if one.opcode != "fusion":
        return sum(sizes) + result
    fused = program.computations[one.called()[0]]
    for parameter in (inner for inner in fused if inner.opcode == "parameter"):
        place, users = int(parameter.arguments), [user for user in fused if parameter.name in user.operands]
        if users and all(user.opcode in ("dynamic-slice", "gather", "slice") for user in users):
            sizes[place] = sum(array_bytes(user.shape) for user in users)
        elif [user.opcode for user in users] == ["dynamic-update-slice"] and users[0].operands[0] == parameter.name:
            update = array_bytes(shapes(fused)[users[0].operands[1]])
            sizes[place], result = 0, result - array_bytes(users[0].shape) + 2 * update
    return sum(sizes) + result
