"""Compares launch/jobset.yaml with the schema of JobSet, the machines of the package and the configuration keys."""

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from poly_epo_jax.bench.aot.topology import TPU_SHAPES
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.startup.command_line import read_arguments

MANIFEST = Path(__file__).parents[2] / "launch" / "jobset.yaml"
SCHEMA = json.loads(Path(__file__).with_name("jobset_schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


@pytest.fixture
def manifest() -> dict[str, Any]:
    return yaml.safe_load(MANIFEST.read_text())


def violations(value: Any, schema: dict[str, Any], place: str = "") -> Iterator[str]:
    """Yields the places where a value violates a schema with the keywords of jobset_schema.json."""
    types = ("string", "integer") if "x-kubernetes-int-or-string" in schema else (schema.get("type", "object"),)
    if schema.get("type") and not isinstance(value, tuple(TYPES[name] for name in types)):
        yield f"{place}: {types}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{place}: {schema['enum']}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{place}[{index}]")
    elif isinstance(value, dict):
        yield from (f"{place}.{key} is missing" for key in schema.get("required", ()) if key not in value)
        known, others = schema.get("properties"), schema.get("additionalProperties", {})
        for key, item in value.items():
            if known is not None and key not in known:
                yield f"{place}.{key} is unknown"
            yield from violations(item, known.get(key, {}) if known else others, f"{place}.{key}")


def trainer(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the specification of the job and of its container."""
    (group,) = manifest["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, container


def test_the_manifest_follows_the_schema(manifest: dict[str, Any]):
    assert list(violations(manifest, SCHEMA)) == []
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


def test_the_schema_rejects_errors(manifest: dict[str, Any]):
    job, container = trainer(manifest)
    job["parallelism"], job["paralellism"] = "4", 4
    del container["name"]
    manifest["spec"]["failurePolicy"]["rules"][0]["action"] = "Restart"
    found = "\n".join(violations(manifest, SCHEMA))
    assert all(key in found for key in ("parallelism: ", "paralellism is unknown", "name is missing", "FailJobSet"))
    assert len(found.splitlines()) == 4


def test_each_process_gets_the_configuration_of_its_slice(manifest: dict[str, Any], tmp_path: Path):
    job, container = trainer(manifest)
    environment = {one["name"]: one["value"] for one in container["env"]} | {"JOB_COMPLETION_INDEX": "3"}
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run(container["command"], env=environment | path, capture_output=True, text=True, check=True)
    doctor, train = map(shlex.split, ended.stdout.splitlines())
    assert doctor[:3] == ["-m", "poly_epo_jax.doctor", "--short"] and train[:2] == ["-m", "poly_epo_jax.main"]
    assert doctor[3:] == train[2:]
    config = read_arguments(train[2:])
    machine = MESHES[train[2].partition(":")[2]]
    assert job["parallelism"] == job["completions"] == config.hosts.num_processes == machine["processes"]
    assert config.hosts.process_id == 3
    name, (group,) = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"]
    assert config.hosts.coordinator_address.startswith(f"{name}-{group['name']}-0-0.{name}:")
    nodes, chips = job["template"]["spec"]["nodeSelector"], container["resources"]["limits"]["google.com/tpu"]
    assert chips * machine["processes"] == machine["num_devices"]
    shape = TPU_SHAPES[machine["device_kind"], machine["num_devices"]]
    assert nodes["cloud.google.com/gke-tpu-topology"] == shape
    (mount,) = container["volumeMounts"]
    for folder in (config.workdir, config.base.cache_dir, config.compilation_cache_dir):
        assert folder.startswith(mount["mountPath"])


def test_a_signal_during_the_doctor_or_the_run_ends_the_container(manifest: dict[str, Any], tmp_path: Path):
    """The stand-in of Python handles SIGTERM as a run does: it saves, and exits with 143."""
    _, container = trainer(manifest)
    environment = {one["name"]: one["value"] for one in container["env"]} | {"JOB_COMPLETION_INDEX": "0"}
    (tmp_path / "python").write_text(
        "#!/bin/bash\necho ${2##*.}\n[ ${2##*.} = $STOPPED ] || exit 0\n"
        "trap 'kill $!; echo saved; exit 143' TERM\nkill -TERM $PPID\nsleep 60 & wait\n"
    )
    (tmp_path / "python").chmod(0o755)
    for stopped, steps in (("doctor", ["doctor"]), ("main", ["doctor", "main"])):
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STOPPED": stopped}
        ended = subprocess.run(container["command"], env=environment | path, capture_output=True, text=True)
        assert (ended.returncode, ended.stdout.split()) == (143, [*steps, "saved"])
