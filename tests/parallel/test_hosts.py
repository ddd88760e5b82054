"""Several processes train as one: real processes on this machine, with collectives between CPUs."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from sglang_servers import free_port
from training_runs import Run, rows_of

from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.run_folder import read_rows

STEPS, CHECKPOINT_EVERY = 10, 4
CHANGES = {
    "train.num_steps": STEPS,
    "checkpoint.every": CHECKPOINT_EVERY,
    "eval.every": 5,
    "optimizer.schedule": "constant",  # so that a shorter run is the beginning of a longer one
    "train.prompts_per_batch": 6,  # which four processes cannot share evenly
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
    """Weights to 1e-5, every sampled token, every row once."""
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


@pytest.fixture(scope="module")
def eventful(single: Run) -> tuple[Run, list[str]]:
    """One run, by four processes until SIGTERM, twice by two until one is killed, and by two to its end.

    Beside it what the survivors said.
    """

    def by(count: int, **changes: object) -> Run:
        return run_of(single, "eventful", count, **changes)

    preempted = by(4, **{"mesh.data": 2, "mesh.fsdp": 2})
    assert preempted.stop(5, 0.0, signal.SIGTERM, index=1) == [128 + signal.SIGTERM] * 4
    found = re.search(r"SIGTERM: Saved after step (\d+)\. Rerun the command", preempted.log())
    assert found and preempted.checkpoints()[-1] == int(found[1]) == preempted.logged_steps()[-1]
    # One process logs.
    assert "step" in preempted.log(0) and all("step" not in preempted.log(index) for index in range(1, 4))

    others_died = []
    for killed, step in ((1, 7), (0, 2 * CHECKPOINT_EVERY)):
        pair = by(2)
        codes = pair.stop(step, 0.0, signal.SIGKILL, index=killed)
        assert codes[killed] == -signal.SIGKILL and codes[1 - killed] != 0
        others_died.append(pair.log(1 - killed, until="from the last checkpoint."))
    ended = by(2)
    ended.finish()
    assert f"Done: {ended.folder}" in ended.log(0) and "Done" not in ended.log(1)
    return ended, others_died


@pytest.mark.slow
def test_several_train_as_one_and_checkpoints_move(single: Run, eventful: tuple[Run, list[str]]):
    assert_same(eventful[0], single)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [1, 0])
def test_the_death_of_one_ends_the_other_with_a_sentence(eventful: tuple[Run, list[str]], killed: int):
    # The collectives' own output may precede it on its line.
    assert (
        eventful[1][1 - killed]
        .strip()
        .endswith(
            f"Error: process {1 - killed} of 2 was ended from outside, or did not find the others in 300 s, "
            "or one of them is gone, whose log says why. Start all of them again: they go on from the last checkpoint."
        )
    )


JOIN = """
import asyncio, functools, sys
from poly_epo_jax.config.keys import HostsSection
from poly_epo_jax.parallel import hosts

coordinator, index = sys.argv[1], int(sys.argv[2])
hosts.join(HostsSection(coordinator, 2, index, wait_seconds=60))
print = functools.partial(print, file=sys.stderr)  # the collectives write of themselves to stdout, at any moment
"""
FAILING = """
async def work(fails):
    if fails:
        raise ValueError(f"no luck on {index}")
    return "x" * (10**index)

gathered = asyncio.run(hosts.gather(work(False)))
print([len(one) for one in gathered], len(asyncio.run(hosts.barrier(work(False)))), hosts.on_first(lambda: index))
print(hosts.on_each(lambda: 10 * index))
for fails in (index == 1, index == 0, True):
    for way in (hosts.gather, hosts.barrier):
        try:
            asyncio.run(way(work(fails)))
        except Exception as error:
            print(type(error).__name__, error)
try:
    hosts.on_first(lambda: 1 / 0)
except Exception as error:
    print(type(error).__name__, error)
"""
COMPUTING = """
async def compute(fails):
    if fails:
        raise ValueError(f"no luck on {index}")

hosts.on_first(lambda: 0)  # from here on both are connected, so that the end of one is noticed at once
asyncio.run(hosts.collective(compute(index == 1)))
hosts.on_first(lambda: 0)
"""
GATHERING = """
import jax, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from poly_epo_jax.parallel.sharding import AXES, host_mesh, params_on_host

weight = np.arange(32, dtype=np.float32).reshape(8, 4)
for order in ([0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 2, 0]):
    devices = np.array([jax.devices()[i] for i in order]).reshape(1, 2, 2)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 3)
    split = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    params = {"w": jax.make_array_from_callback(weight.shape, split, weight.__getitem__)}
    here = params_on_host(params, mesh)["w"]
    print(tuple(host_mesh(mesh).shape.values()), bool(here.is_fully_addressable and (np.asarray(here) == weight).all()))
"""


def said_by_two(script: str, devices: int = 1, code: int = 0) -> list[list[str]]:
    """The lines that two processes with so many devices each print, but XLA's warnings.

    The script has join() called for it.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    flags = f"--xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"JAX_COORDINATOR_BIND_ADDRESS": coordinator, "XLA_FLAGS": flags}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + script, coordinator, str(index)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    said = [one.communicate(timeout=120)[1].splitlines() for one in processes]
    assert [one.returncode for one in processes] == [code, code]
    return [[line for line in lines if not XLA_WARNING.match(line)] for lines in said]


@pytest.mark.slow
def test_what_fails_on_one_is_raised_on_all():
    zero, one = ["ValueError no luck on 0"] * 2, ["ValueError no luck on 1"] * 2
    of_zero, of_one = (["HostError Process 0 of 2: no luck on 0"] * 2, ["HostError Process 1 of 2: no luck on 1"] * 2)
    first, second = said_by_two(FAILING)
    assert first == ["[1, 10] 1 0", "[0, 10]", *of_one, *zero, *zero, "ZeroDivisionError division by zero"]
    assert second == ["[1, 10] 10 0", "[0, 10]", *one, *of_zero, *one, "HostError Process 0 of 2: division by zero"]


@pytest.mark.slow
def test_what_fails_where_all_compute_ends_all():
    first, second = said_by_two(COMPUTING, code=1)
    assert second[0] == "Traceback (most recent call last):" and second[-3] == "ValueError: no luck on 1"
    assert second[-2] == "Process 1 failed where all compute together: no luck on 1"
    assert first[-2].startswith("Process 0 lost touch with the others: ")
    assert [lines[-1].split(" was ended")[0] for lines in (first, second)] == [
        "Error: process 0 of 2",
        "Error: process 1 of 2",
    ]


@pytest.mark.slow
def test_every_host_gathers_whole_weights_from_any_order_of_devices():
    # The first mesh has one host's devices side by side along tensor, the second along fsdp, and the third mixes them.
    assert said_by_two(GATHERING, devices=2) == [["(1, 1, 2) True", "(1, 1, 2) True", "(1, 1, 2) True"]] * 2


def test_shares_are_the_whole(monkeypatch: pytest.MonkeyPatch):
    items = list(range(7))
    for count in (1, 2, 3, 4, 9):
        monkeypatch.setattr(hosts, "count", lambda count=count: count)
        shares = []
        for index in range(count):
            monkeypatch.setattr(hosts, "index", lambda index=index: index)
            shares.append(hosts.share(items))
        assert [item for share in shares for item in share] == items
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_counts_add_up():
    assert hosts.total([{"a": 1.0, "b": 0.0}, {"a": 2.0, "b": 5.0}]) == {"a": 3.0, "b": 5.0}
