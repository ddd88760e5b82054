"""Tests training with several processes on this machine, with collectives between CPUs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from halting import SECONDS
from reserved_ports import reserve_port
from training_runs import Run, rows_of

from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.run_folder import read_rows

STEPS, CHECKPOINT_EVERY = 8, 3
CHANGES = {
    "train.num_steps": STEPS,
    "checkpoint.every": CHECKPOINT_EVERY,
    "eval.every": 4,
    "optimizer.schedule": "constant",  # A shorter run then equals the start of a longer run.
    "train.prompts_per_batch": 6,  # Not divisible by four processes.
    "train.prompts_per_minibatch": 3,
}
XLA_WARNING = re.compile(r"W\d{4} \S+ +\d+ \w+\.cc:\d+\] ")
SAMPLED = ("step", "problem", "occurrence", "prompt", "generation", "response", "reward", "cluster")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, caches: dict[str, Path]) -> Run:
    run = Run(tmp_path_factory.mktemp("hosts"), "single", CHANGES | caches)
    run.finish()
    return run


def run_of(single: Run, name: str, count: int, **changes: object) -> Run:
    return Run(single.folder.parent, name, single.changes | changes, count)


def assert_same(run: Run, single: Run) -> None:
    """Compares weights (to 1e-5), sampled tokens and logged rows. Each row must exist once."""
    before, after = jax.tree.leaves(single.params()), jax.tree.leaves(run.params())
    assert max(float(np.abs(leaf).max()) for leaf in before) > 0.1
    for one, other in zip(before, after, strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=0, atol=1e-5)
    assert [row["step"] for row in rows_of(run.folder)] == list(range(1, STEPS + 1))
    for name in ("reward", "eval/reward"):
        rows, expected = (rows_of(one.folder, name) for one in (run, single))
        assert [(row["step"], row[name]) for row in rows] == [(row["step"], row[name]) for row in expected]
    samples, expected = (read_rows(one.folder / "generations.jsonl") for one in (run, single))
    assert [[row[key] for key in SAMPLED] for row in samples] == [[row[key] for key in SAMPLED] for row in expected]


def _kill_first(run: Run, at: str) -> str:
    """Kills the first of two processes, checks that the other exits with an error, and returns its log."""
    killed, survived = run.stop(at, signal.SIGKILL)
    assert killed == -signal.SIGKILL and survived
    return run.log(1, until="from the last checkpoint.")


@pytest.fixture(scope="module")
def eventful(single: Run) -> tuple[Run, str]:
    """Runs training with four, two and one process, until it is stopped twice.

    The first processes receive SIGTERM, the first of the next two is killed, and a single process runs to the end.

    Returns:
      A tuple of the run and the log of the process that was not killed.
    """

    def by(count: int, **changes: object) -> Run:
        return run_of(single, "eventful", count, **changes)

    preempted = by(4, **{"mesh.data": 2, "mesh.fsdp": 2})
    assert preempted.stop("push 2", signal.SIGTERM, index=1) == [128 + signal.SIGTERM] * 4
    found = re.search(r"SIGTERM: Saved after step (\d+)\. Rerun the command", preempted.log())
    assert found and preempted.checkpoints()[-1] == int(found[1]) == preempted.logged_steps()[-1]
    # Only the first process logs.
    assert "step" in preempted.log(0) and all("step" not in preempted.log(index) for index in range(1, 4))

    survivor_log = _kill_first(by(2), f"commit {2 * CHECKPOINT_EVERY}")
    ended = by(1)
    ended.finish()
    return ended, survivor_log


@pytest.mark.slow
def test_several_processes_match_a_single_process(single: Run, eventful: tuple[Run, str]):
    assert_same(eventful[0], single)


def terminated(process: int) -> str:
    return (
        f"Error: process {process} of 2 was terminated, could not connect to the other processes within 300 s, or lost "
        "one of them; see the logs of all processes. Restart all processes to resume from the last checkpoint."
    )


@pytest.mark.slow
def test_killing_one_process_terminates_the_other_with_a_message(eventful: tuple[Run, str]):
    """`test_an_error_between_collectives_terminates_all_processes` ends the second process instead of the first."""
    # Output of the collectives may precede the message on the same line.
    assert eventful[1].strip().endswith(terminated(1))


END = "-- end of a script"
JOIN = """
import asyncio, functools, sys
from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.parallel import hosts

coordinator, index = sys.argv[1], int(sys.argv[2])
hosts.join(HostsSection(coordinator, 2, index, init_timeout_seconds=300))
print = functools.partial(print, file=sys.stderr)  # The collectives write to stdout at any time.
"""
GATHERING = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from poly_epo_jax.parallel.sharding import AXES, host_mesh, params_on_host

weight = np.arange(32, dtype=np.float32).reshape(8, 4)
for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0]):
    devices = np.array([jax.devices()[i] for i in order]).reshape(1, 2, 2, 1)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    params = {"w": jax.make_array_from_callback(weight.shape, split, weight.__getitem__)}
    for dtype in ("", "bfloat16"):  # Both types represent the integers up to 32 exactly.
        here = params_on_host(params, mesh, dtype)["w"]
        is_full = here.is_fully_addressable and (np.asarray(here) == weight).all()
        print(tuple(host_mesh(mesh).shape.values()), bool(is_full and here.dtype == (dtype or "float32")))
"""
FAILING = """
async def work(fails):
    if fails:
        raise ValueError(f"no luck on {index}")
    return "x" * (10**index)

gathered = asyncio.run(hosts.gather(work(False)))
print([len(one) for one in gathered], len(asyncio.run(hosts.barrier(work(False)))), hosts.run_on_first(lambda: index))
print(hosts.gather_from_all(lambda: 10 * index))
for fails in (index == 1, index == 0, True):
    for way in (hosts.gather, hosts.barrier):
        try:
            asyncio.run(way(work(fails)))
        except Exception as error:
            print(type(error).__name__, error)
try:
    hosts.run_on_first(lambda: 1 / 0)
except Exception as error:
    print(type(error).__name__, error)
"""
COMPUTING = """
async def compute(fails):
    if fails:
        raise ValueError(f"no luck on {index}")

asyncio.run(hosts.collective(compute(index == 1)))
hosts.run_on_first(lambda: 0)
"""


@pytest.fixture(scope="module")
def two_processes() -> list[list[list[str]]]:
    """Runs the scripts above in two connected processes with two devices each, which the last script terminates.

    Returns:
      For each process, the lines that each script prints, without warnings of XLA.
    """
    coordinator = f"127.0.0.1:{reserve_port()}"
    flags = "--xla_force_host_platform_device_count=2"
    environment = os.environ | {"JAX_COORDINATOR_BIND_ADDRESS": coordinator, "XLA_FLAGS": flags}
    script = f"print({END!r})".join((JOIN, GATHERING, FAILING, COMPUTING))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, coordinator, str(index)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [one.communicate(timeout=SECONDS)[1] for one in processes]
    assert [one.returncode for one in processes] == [1, 1]
    return [
        [[line for line in part.splitlines() if not XLA_WARNING.match(line)] for part in output.split(f"{END}\n")[1:]]
        for output in outputs
    ]


@pytest.mark.slow
def test_each_process_gathers_full_weights_for_any_device_order(two_processes: list[list[list[str]]]):
    # The devices of a process are neighbors along tensor in the first mesh, along fsdp in the second, and neither in
    # the third.
    assert [parts[0] for parts in two_processes] == [["(1, 1, 2, 1) True"] * 6] * 2


@pytest.mark.slow
def test_an_error_on_one_process_is_raised_on_all(two_processes: list[list[list[str]]]):
    zero, one = ["ValueError no luck on 0"] * 2, ["ValueError no luck on 1"] * 2
    of_zero, of_one = (["HostError Process 0 of 2: no luck on 0"] * 2, ["HostError Process 1 of 2: no luck on 1"] * 2)
    first, second = (parts[1] for parts in two_processes)
    assert first == ["[1, 10] 1 0", "[0, 10]", *of_one, *zero, *zero, "ZeroDivisionError division by zero"]
    assert second == ["[1, 10] 10 0", "[0, 10]", *one, *of_zero, *one, "HostError Process 0 of 2: division by zero"]


@pytest.mark.slow
def test_an_error_between_collectives_terminates_all_processes(two_processes: list[list[list[str]]]):
    first, second = (parts[2] for parts in two_processes)
    assert second[0] == "Traceback (most recent call last):" and second[-3] == "ValueError: no luck on 1"
    assert second[-2] == "Process 1 failed in a computation of all processes: no luck on 1"
    assert first[-2].startswith("Process 0 lost its connection to the other processes: ")
    assert [first[-1], second[-1]] == [terminated(0), terminated(1)]


def test_shares_partition_the_items(monkeypatch: pytest.MonkeyPatch):
    items = list(range(7))
    for count in (1, 2, 3, 4, 9):
        monkeypatch.setattr(hosts, "count", lambda count=count: count)
        shares = []
        for index in range(count):
            monkeypatch.setattr(hosts, "index", lambda index=index: index)
            shares.append(hosts.share(items))
        assert [item for share in shares for item in share] == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_total_sums_counters():
    assert hosts.total([{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 5.0}]) == {"a": 3.0, "b": 5.0}
