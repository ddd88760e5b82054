"""Memory and CPU limits of containers, on the file trees that kernels and container runtimes present."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from poly_epo_jax.config.default import get_config
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.config.section import read_section
from poly_epo_jax.memory_plan.plan import machine_of, plan_of
from poly_epo_jax.model.presets import preset_config
from poly_epo_jax.model.transformer import AUTO
from poly_epo_jax.startup.prepare import check_memory
from poly_epo_jax.study.queue import cores
from poly_epo_jax.system import limits
from poly_epo_jax.system.limits import cpu_limit, memory_limit
from poly_epo_jax.tasks.verifier import Verifier

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
CORES = len(os.sched_getaffinity(0))
UNLIMITED = "9223372036854771712"
V1 = "cgroup cgroup rw,"
V2 = "cgroup2 cgroup2 rw"


class Tree:
    """A fake root folder with the control groups of this process."""

    def __init__(self, root: Path):
        self.root = root

    def process(self, groups: str, mounts: Mapping[str, tuple[str, str]]) -> None:
        """Writes /proc/self/cgroup, and /proc/self/mountinfo with (mounted group, kind) by mount point."""
        lines = [
            "22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw",
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs t rw",
        ]
        lines += [f"32 31 0:29 {top} {path} rw,nosuid shared:9 - {kind}" for path, (top, kind) in mounts.items()]
        self.files("/proc/self", cgroup=groups, mountinfo="\n".join(lines))

    def files(self, group: str, **texts: str) -> None:
        """Writes files into a folder. `_` in names stands for the first dot."""
        folder = self.root / group.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    return Tree(tmp_path)


def container(tree: Tree, memory: str, cpu: str = "max 100000") -> None:
    """A container with cgroup v2 and its own namespace."""
    tree.process("0::/", {"/sys/fs/cgroup": ("/", V2)})
    tree.files("/sys/fs/cgroup", memory_max=memory, memory_high="max", cpu_max=cpu)


def test_the_machine_is_the_limit_without_groups(tree: Tree):
    """As on systems without /proc, or without a mounted hierarchy."""
    assert (memory_limit(), cpu_limit()) == (MACHINE, CORES)
    tree.process("0::/user.slice", {})
    assert (memory_limit(), cpu_limit()) == (MACHINE, CORES)


def test_a_container_with_its_own_namespace(tree: Tree):
    container(tree, "1073741824", "50000 100000")
    assert (memory_limit(), cpu_limit()) == (2**30, 1)
    container(tree, "max")
    assert (memory_limit(), cpu_limit()) == (MACHINE, CORES)
    container(tree, str(2 * MACHINE), f"{CORES * 200000} 100000")
    assert (memory_limit(), cpu_limit()) == (MACHINE, CORES)


@pytest.mark.parametrize("limited", ["", "/user.slice", "/user.slice/job.scope", "/user.slice/job.scope/step"])
@pytest.mark.parametrize("name", ["memory_max", "memory_high"])
def test_the_smallest_limit_of_the_parents(tree: Tree, limited: str, name: str):
    tree.process("0::/user.slice/job.scope/step", {"/sys/fs/cgroup": ("/", V2)})
    for group in ("", "/user.slice", "/user.slice/job.scope", "/user.slice/job.scope/step", "/user.slice/other"):
        tree.files(f"/sys/fs/cgroup{group}", memory_max="max", memory_high="max", cpu_max="max 100000")
    tree.files("/sys/fs/cgroup/user.slice/other", memory_max="1000", cpu_max="1000 100000")
    tree.files(f"/sys/fs/cgroup{limited}", **{name: "700000000"}, cpu_max="110000 100000")
    assert memory_limit() == 700_000_000
    assert cpu_limit() == min(CORES, 2)


def test_version_1_as_under_slurm(tree: Tree):
    """The limit is that of the job; the step has none. The unified hierarchy is mounted without controllers."""
    job = "/slurm/uid_0/job_7"
    tree.process(
        f"9:name=systemd:/\n4:memory:{job}/step_0\n3:cpu,cpuacct:{job}\n0::/",
        {
            "/sys/fs/cgroup/memory": ("/", V1 + "memory"),
            "/sys/fs/cgroup/cpu,cpuacct": ("/", V1 + "cpu,cpuacct"),
            "/sys/fs/cgroup/unified": ("/", V2),
        },
    )
    for group, limit in {"": UNLIMITED, job: "3000000000", f"{job}/step_0": UNLIMITED}.items():
        tree.files(f"/sys/fs/cgroup/memory{group}", memory_limit_in_bytes=limit)
    tree.files("/sys/fs/cgroup/cpu,cpuacct", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    tree.files(f"/sys/fs/cgroup/cpu,cpuacct{job}", cpu_cfs_quota_us="100000", cpu_cfs_period_us="100000")
    assert (memory_limit(), cpu_limit()) == (3_000_000_000, 1)


@pytest.mark.parametrize("path", ["/docker/abc", "/docker/abc/run"])
def test_version_1_in_a_container_without_a_namespace(tree: Tree, path: str):
    """The process sees its full path, but only its own group is mounted."""
    tree.process(f"4:memory:{path}", {"/sys/fs/cgroup/memory": ("/docker/abc", V1 + "memory")})
    tree.files("/sys/fs/cgroup/memory", memory_limit_in_bytes="2000000000")
    assert memory_limit() == 2_000_000_000


@pytest.mark.parametrize("path", ["/../other", "/kubepods/pod1/abc"])
def test_a_group_outside_of_the_mounted_part(tree: Tree, path: str):
    """The mounted group is the best that is visible."""
    tree.process(f"0::{path}", {"/sys/fs/cgroup": ("/" if ".." in path else "/docker/abc", V2)})
    tree.files("/sys/fs/cgroup", memory_max="2000000000")
    tree.files("/sys/fs/other", memory_max="1000")
    assert memory_limit() == 2_000_000_000


# The limits in use


def cpu_config(**changes: object) -> Config:
    config = get_config()
    config.mesh.device_kind = "cpu"
    config.mesh.num_devices = 1
    config.update_from_flattened_dict(changes)
    return read_section(Config, config.to_dict())


def test_the_plan_of_a_container_is_compared_with_its_memory(tree: Tree):
    container(tree, "1000000000")
    assert machine_of(cpu_config())[1] == 10**9
    assert machine_of(cpu_config(**{"mesh.num_devices": 4}))[1] == 250_000_000
    with pytest.raises(ConfigError, match=r"may use only 1 GB; .*container with more memory"):
        check_memory(config := cpu_config(), *plan_of(config, preset_config("Qwen3-0.6B", remat="full")))


def test_remat_auto_depends_on_the_memory_of_the_container(tree: Tree, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sysconf", lambda _: 10**6)  # a machine with 1 TB
    config, shape = cpu_config(**{"train.row_tokens": 4096}), preset_config("Qwen3-0.6B", remat=AUTO)
    plan, _ = plan_of(config, dataclasses.replace(shape, remat="full"))
    assert plan.memory_bytes == 10**12 and plan_of(config, shape)[0].remat == "none"
    container(tree, str(int(1.13 * plan.needed_bytes)))  # a plan must leave 10% free
    assert plan_of(config, shape)[0].remat == "full"


def test_the_host_memory_of_a_batch_is_that_of_the_container(tree: Tree):
    config = cpu_config(**{"train.prompts_per_batch": 4096, "train.num_generations": 1024})
    plan = plan_of(config, preset_config("Qwen3-0.6B", remat="full"))
    container(tree, "600000000")
    with pytest.raises(ConfigError, match=r"train\.prompts_per_batch=4096 .* may use only 0\.6 GB"):
        check_memory(config, *plan)


def test_worker_processes_respect_the_quota(tree: Tree, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert len(cores(0)) == 64 and Verifier()._num_workers == 32
    # A study binds each of its 64 runs to one core. The runs start 128 worker processes together.
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert Verifier()._num_workers == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    container(tree, "max", "600000 100000")
    assert len(cores(0)) == 6 and len(cores(7)) == 7
    assert Verifier()._num_workers == 3
