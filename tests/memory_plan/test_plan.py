"""Compares memory plans with compiled programs, and tests presets and the nearest valid mesh."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

import jax
import pytest
from fakes import optimizer_config
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from configs import gsm8k, polaris, polynomial
from poly_epo_jax.bench import __main__ as bench
from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config, ConfigError, LoraSection
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.config.section import read_section
from poly_epo_jax.memory_plan.gradient import gradient_bytes
from poly_epo_jax.memory_plan.layer_arrays import LAYER_ARRAYS, layer_values
from poly_epo_jax.memory_plan.plan import Plan, choose_remat, machine_of, make_plan, max_rows, plan_of
from poly_epo_jax.memory_plan.tables import print_plan, print_plans
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.flops import gradient_passes
from poly_epo_jax.model.lora import lora_fields, trained_pattern
from poly_epo_jax.model.presets import PRESETS, preset_config
from poly_epo_jax.model.transformer import AUTO, REMAT_POLICIES, Transformer, abstract_model
from poly_epo_jax.parallel.devices import DEVICES, Machine, device_name
from poly_epo_jax.parallel.mesh import AXES, RULES, check_mesh, fill_mesh, nearest_mesh
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.startup.prepare import check_memory, configured_shape, model_shape
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import microbatch_rows
from poly_epo_jax.step.update import PolicyUpdate


def planned(name: str, config: Config, **compute: Any) -> tuple[Plan, int]:
    machine, memory_bytes = machine_of(config)
    shape = preset_config(name, **compute)
    return make_plan(config, shape, machine, memory_bytes), max_rows(config, shape, machine, memory_bytes)


# Compiled programs


@dataclasses.dataclass(frozen=True)
class Case:
    """A model preset on a mesh, with one row per device."""

    model: str
    mesh: tuple[int, ...]
    row_tokens: int
    remat: str
    rank: int = 0
    dtype: str = "bfloat16"
    is_linear: bool = False  # Three of four layers have linear attention.

    def sizes(self) -> dict[str, int]:
        return {**dict.fromkeys(AXES, 1), **dict(zip(AXES, self.mesh, strict=False))}

    def device_mesh(self) -> Mesh:
        sizes = self.sizes()
        return make_mesh(sizes["data"], sizes["fsdp"], sizes["tensor"], sizes["expert"])

    def shape(self) -> ModelConfig:
        shape = preset_config(self.model, remat=self.remat, dtype=self.dtype, **lora_fields(self.config().lora))
        return dataclasses.replace(shape, **LINEAR) if self.is_linear else shape

    def ratio_limits(self) -> tuple[float, float]:
        """Returns limits of the ratio of planned to held bytes. Later jax stores bfloat16 in two bytes on CPUs too."""
        return 0.9, math.inf if self.dtype == "bfloat16" and LATER_JAX else 1.1

    def config(self) -> Config:
        config = polaris.get_config()
        config.lora.rank = self.rank
        config.mesh.update(self.sizes())
        config.train.row_tokens = self.row_tokens
        return read_section(Config, config.to_dict())


LINEAR: dict[str, Any] = {
    "num_layers": 8,
    "gated_attention": True,
    "linear_layers": (True, True, True, False),
    "linear_key_heads": 16,
    "linear_value_heads": 16,
    "linear_key_dim": 128,
    "linear_value_dim": 128,
    "conv_size": 4,
}
SMALL = Case("Qwen3-0.6B", (1, 2, 2), 2048, "full")
LARGE = [
    Case("Qwen3-0.6B", (1, 2, 2), 4096, "dots"),
    Case("Qwen3-1.7B", (1, 1, 1), 4096, "attention"),
    Case("Qwen3-8B", (2, 4, 1), 8192, "full"),
    *(Case("Qwen3-0.6B", (1, 1, 1), 4096, remat, dtype="float32") for remat in ("full", "none")),
    Case("Qwen3-30B-A3B", (1, 2, 1, 4), 4096, "full", dtype="float32"),
    *(Case("Qwen3-0.6B", (1, 1, 1), 4096, remat, dtype="float32", is_linear=True) for remat in ("full", "dots")),
]
LATER_JAX = jax.__version_info__ > (0, 10, 2)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_devices_gather_the_tokens_of_the_other_shards_of_the_experts(num_shards: int):
    case = Case("Qwen3-30B-A3B", (1, 1, 1, num_shards), 4096, "full")
    config, shape, machine = case.config(), case.shape(), Machine("v5p", case.sizes())
    rows = 16  # The layers then need more memory than the head.
    activations = gradient_bytes(config, shape, machine, rows)["layer activations"]
    inputs_and_gradients = 2 * (num_shards - 1) * shape.hidden_size
    assert activations == rows * 4096 * 2 * (layer_values(shape, machine, "layer") + inputs_and_gradients)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("case", [SMALL, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=str)
def test_plan_matches_compiled_programs(case: Case):
    config, shape = case.config(), case.shape()
    machine = Machine("cpu", case.sizes())
    plan = make_plan(config, shape, machine, None)
    model = nnx.eval_shape(lambda: Transformer(shape, nnx.Rngs(0)))
    update = PolicyUpdate(
        model, case.device_mesh(), UpdateObjective(ppo_clip_loss), optimizer_config(), total_updates=1
    )
    lowered = update.lower(microbatch_rows(config, machine.mesh), config.train.row_tokens)
    memory: dict[str, Any] = {name: lowered[name].compile().memory_analysis() for name in plan.stages}

    # The optimizer's arguments are weights, two moments and gradients of equal size. Moments stay during the gradient.
    weights = memory["optimizer"].argument_size_in_bytes / 4
    resident = {"gradient": 2 * weights, "optimizer": 0}
    held, (least, most) = {}, case.ratio_limits()
    for name, program in memory.items():
        result = program.output_size_in_bytes - program.alias_size_in_bytes
        held[name] = resident[name] + program.argument_size_in_bytes + result + program.temp_size_in_bytes
        assert least < plan.stage_bytes(name) / held[name] < most, name
    assert least < plan.peak_bytes / max(held.values()) < most
    assert plan.resident["parameters"] == pytest.approx(weights, rel=2e-3)
    if most == math.inf:
        return
    # Compares only the terms that depend on rows, remat and the head.
    temporary = sum(size for name, size in plan.stages["gradient"].items() if name != "sum of gradients")
    # The plan counts arrays of a layer of each kind, of which the program may reuse a part.
    assert temporary == pytest.approx(memory["gradient"].temp_size_in_bytes, rel=0.15 if case.is_linear else 0.1)


LORA = [
    *(Case("Qwen3-0.6B", (1, 1, 1), 4096, remat, rank=16, dtype="float32") for remat in ("dots", "none")),
    Case("Qwen3-4B", (1, 4, 2), 16_384, "full", rank=16),
    # If the head is the peak, bfloat16 programs for CPUs hold up to 18% more: a copy of the head in float32.
    Case("Qwen3-0.6B", (1, 2, 2), 8192, "attention", rank=64),
]


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("case", LORA, ids=str)
def test_plan_with_adapters_matches_compiled_programs(case: Case):
    """Frozen weights do not have moments or a sum of gradients."""
    config, shape = case.config(), case.shape()
    machine = Machine("cpu", case.sizes())
    plan = make_plan(config, shape, machine, None)
    update = PolicyUpdate(
        abstract_model(shape),
        case.device_mesh(),
        UpdateObjective(ppo_clip_loss),
        optimizer_config(),
        total_updates=1,
        trainable=trained_pattern(config),
    )
    lowered = update.lower(microbatch_rows(config, machine.mesh), config.train.row_tokens)
    program = lowered["gradient"].compile().memory_analysis()
    assert program is not None
    result = program.output_size_in_bytes - program.alias_size_in_bytes
    held = plan.resident["optimizer moments"] + program.argument_size_in_bytes + result + program.temp_size_in_bytes
    least, most = case.ratio_limits()
    assert least < plan.stage_bytes("gradient") / held < most
    # The arguments are weights, both moments and gradients.
    given = sum(plan.resident.values()) + plan.stages["optimizer"]["sum of gradients"]
    optimizer = lowered["optimizer"].compile().memory_analysis()
    assert optimizer is not None
    assert given == pytest.approx(optimizer.argument_size_in_bytes, rel=5e-3)


# Sums


def test_only_adapters_have_moments_gradients_and_a_reference():
    def bytes_of(rank: int, **changes: Any) -> Plan:
        config = polaris.get_config("h100x1")
        config.update_from_flattened_dict({"lora.rank": rank, "algo.kl_coef": 0.1} | changes)
        config = read_config(config)
        return planned("Qwen3-4B", config, param_dtype="bfloat16", **lora_fields(config.lora))[0]

    plan = bytes_of(16)
    # For q, k, v, o, gate, up and down of 36 layers: rank times the sum of inputs and outputs.
    sides = (2560 + 4096) * 2 + (2560 + 1024) * 2 + (2560 + 9728) * 3
    adapter = 36 * 16 * sides * 4
    assert plan.resident["parameters"] == pytest.approx(2 * 4.02e9, rel=2e-3)
    assert plan.resident["adapter"] == plan.resident["reference policy"] == adapter
    assert plan.resident["optimizer moments"] == 2 * adapter
    assert plan.stages["gradient"]["sum of gradients"] == adapter
    assert bytes_of(32).resident["adapter"] == 2 * adapter
    of_two = bytes_of(16, **{"lora.targets": ("q_proj", "v_proj")}).resident["adapter"]
    assert of_two == 36 * 16 * (2560 + 4096 + 2560 + 1024) * 4
    assert "adapter" not in bytes_of(0).resident


@pytest.mark.parametrize("targets", [(), ("q_proj", "up_proj")])
@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_layers_save_the_arrays_of_their_remat_policy(remat: str, targets: tuple[str, ...]):
    """The residual stream, the MLP, queries and keys have 1,000, 100, 10 and 1 values per token."""
    lora = lora_fields(LoraSection(rank=8, targets=targets)) if targets else {}
    shape = ModelConfig(50, 1000, 100, 1, 10, 1, 1, attention="triton", **lora)
    machine = Machine("h200", dict.fromkeys(AXES, 1))
    products = {"q": 10, "k": 1, "v": 1, "o": 1000, "gate": 100, "up": 100}
    adapter_products = sum(products[name] for name in shape.lora_targets)
    expected = {
        "full": 1000,
        "attention": 1000 + 10,
        "dots": 1000 + 10 + sum(products.values()) + adapter_products,
        "none": 4 * 1000 + 6 * 100 + 4 * 10 + 3 * 1,
    }
    assert layer_values(shape, machine, remat) == expected[remat]
    assert layer_values(shape, machine, "layer") == 5 * 1000 + 6 * 100 + 3 * 10 + 4 * 1


def test_norms_of_outputs_save_the_products_that_they_normalize():
    """The residual stream has 1,000 values per token. Compiled programs were compared once, at the size of 0.6B."""
    machine, shape = Machine("h200", dict.fromkeys(AXES, 1)), ModelConfig(50, 1000, 100, 1, 10, 1, 1)
    for pre_norm, more in ((False, {"dots": 1000}), (True, {"dots": 1000, "none": 2000, "layer": 2000})):
        normalized = dataclasses.replace(shape, pre_norm=pre_norm, post_norm=True)
        for holder in ("layer", *REMAT_POLICIES):
            found = layer_values(normalized, machine, holder) - layer_values(shape, machine, holder)
            assert found == more.get(holder, 0), holder


def test_layer_arrays_have_unique_names():
    assert len({array.name for array in LAYER_ARRAYS}) == len(LAYER_ARRAYS)
    assert {holder for array in LAYER_ARRAYS for holder in array.held} == {"layer", *REMAT_POLICIES}


def test_cpu_plans_include_the_process_overhead():
    config, shape = read_config(polynomial.get_config()), preset_config("Qwen3-0.6B", param_dtype="bfloat16")
    for mesh in (1, 1, 1), (2, 2, 1):
        machine = Machine("cpu", dict(zip(AXES, (*mesh, 1), strict=True)))
        plan = make_plan(config, shape, machine, None)
        programs = [plan.stages[name] for name in ("gradient", "optimizer")]
        blocks = sum(size for terms in programs for term, size in terms.items() if term != "sum of gradients")
        assert plan.process_overhead["malloc fragmentation"] == blocks * machine.num_devices
        assert plan.needed_bytes - plan.peak_bytes == sum(plan.process_overhead.values()) // machine.num_devices
        for available, fits in (plan.needed_bytes, True), (plan.needed_bytes - 1, False):
            assert make_plan(config, shape, machine, available).fits == fits
        on_gpu = make_plan(config, shape, dataclasses.replace(machine, device="h200"), None)
        assert not on_gpu.process_overhead and on_gpu.needed_bytes == on_gpu.peak_bytes


def test_gradient_passes_count_only_trained_weights():
    config, shape = read_config(polaris.get_config()), preset_config("Qwen3-4B")
    assert gradient_passes(config, shape) == 3
    adapted = preset_config("Qwen3-4B", **lora_fields(LoraSection(rank=16)))
    assert 2 < gradient_passes(config, adapted) < 2.01
    part = dataclasses.replace(config, train=dataclasses.replace(config.train, trainable_pattern="embed"))
    assert gradient_passes(part, shape) == pytest.approx(2 + 151_936 * 2560 / 4.02e9, rel=1e-3)


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_preset_can_be_planned(mesh: str, model: str):
    config = read_config(polaris.get_config(mesh))
    plan, rows = planned(model, config)
    check_mesh(config.mesh, plan.machine.mesh, dataclasses.asdict(preset_config(model)), config.train.row_tokens)
    assert math.prod(plan.machine.mesh.values()) == MESHES[mesh]["num_devices"]
    assert plan.peak_bytes == max(sum(plan.resident.values()) + sum(terms.values()) for terms in plan.stages.values())
    assert plan.memory_bytes is not None and plan.fits == (plan.peak_bytes <= plan.memory_bytes) == (rows > 0)


def test_the_largest_number_of_rows_fits_and_one_more_does_not():
    config = read_config(polaris.get_config("h200x4"))
    machine, memory_bytes = machine_of(config)
    shape = preset_config("Qwen3-4B")
    rows = max_rows(config, shape, machine, memory_bytes)
    assert 1 < rows < 40
    assert make_plan(config, shape, machine, memory_bytes, rows).fits
    assert not make_plan(config, shape, machine, memory_bytes, rows + 1).fits
    # With enough memory, the minibatch is the limit: 512 sequences, three per row, on four devices.
    assert max_rows(config, shape, machine, 10**15) == 512 // 3 // 4


def test_plans_depend_on_sharding_dtypes_and_remat():
    def bytes_of(mesh: str = "h200x4", changes: Mapping[str, Any] | None = None, **compute: Any) -> Plan:
        config = polaris.get_config(mesh)
        config.update_from_flattened_dict(dict(changes or {}))
        return planned("Qwen3-4B", read_config(config), **compute)[0]

    plan = bytes_of()
    assert bytes_of("h200x8").resident["parameters"] == plan.resident["parameters"] // 2
    assert bytes_of("h100x8").fits and bytes_of("h100x8").resident == bytes_of("h200x8").resident
    assert bytes_of(changes={"mesh.data": 2, "mesh.fsdp": 2}).resident["parameters"] == 2 * plan.resident["parameters"]
    assert bytes_of(param_dtype="bfloat16").resident["parameters"] == plan.resident["parameters"] // 2
    moments = bytes_of(changes={"optimizer.first_moment_dtype": "bfloat16"}).resident["optimizer moments"]
    assert moments == plan.resident["optimizer moments"] * 3 // 4
    layers = bytes_of(changes={"train.trainable_pattern": r"layers\.(q|o)"})
    share = 2 * 36 * 2560 * 4096 / (4.02e9)  # fraction of the weights; q and o have 32 heads of width 128
    assert layers.resident["parameters"] == plan.resident["parameters"]
    assert layers.resident["optimizer moments"] == pytest.approx(share * plan.resident["optimizer moments"], rel=2e-3)
    assert list(layers.stages["optimizer"]) == ["sum of gradients"]  # everything else is updated in place
    assert layers.stages["optimizer"]["sum of gradients"] == pytest.approx(4 * 4.02e9 * share / 4, rel=2e-3)
    assert "reference policy" in bytes_of(changes={"algo.kl_coef": 0.1}).resident
    by_remat = [bytes_of(remat=remat).stage_bytes("gradient") for remat in ("full", "attention", "dots", "none")]
    assert by_remat == sorted(set(by_remat))
    embedded = bytes_of(changes={"rollouts.name": "embedded"})
    assert list(embedded.stages) == ["gradient", "optimizer", "generate"]
    assert embedded.stages["generate"]["gathered weights"] == pytest.approx(2 * 4.02e9, rel=2e-3)
    one = bytes_of("h200x1", {"rollouts.name": "embedded"})
    assert one.stages["generate"]["gathered weights"] == 0
    # 352 slots, 88 per device, with 5,120 tokens of 147 kB each, plus three quarters while the cache grows.
    assert embedded.stages["generate"]["keys and values"] == pytest.approx(1.75 * 88 * 5120 * 147_456)


def test_a_plan_counts_the_copy_and_the_slots_of_each_host():
    """A host of v5p-64 has four of 32 chips. With tensor=4, each of them holds a quarter of the host's copy."""
    config = polaris.get_config("v5p-64")
    config.update_from_flattened_dict({"mesh.fsdp": 8, "mesh.tensor": 4, "rollouts.max_concurrent": 64})
    plan, _ = planned("Qwen3-32B", read_config(config))
    copy = 2 * 32.76e9 / 4  # bytes in bfloat16
    assert plan.machine.host.mesh == {"data": 1, "fsdp": 1, "tensor": 4, "expert": 1}
    assert plan.fits and plan.resident["copy of the host"] == pytest.approx(copy, rel=2e-3)
    assert plan.stages["push weights"]["copy of the host"] == plan.resident["copy of the host"]
    generate = plan.stages["generate"]
    assert generate["decoding weights"] == pytest.approx(copy, rel=2e-3) and generate["gathered weights"] == 0
    # All chips of a host decode its 64 sequences, with two of the eight key-value heads each.
    assert generate["keys and values"] == pytest.approx(1.75 * 64 * 5120 * 2 * 64 * 2 * 128 * 2)
    config.update_from_flattened_dict({"rollouts.name": "sglang", "rollouts.urls": "http://127.0.0.1:30000"})
    on_disk, _ = planned("Qwen3-32B", read_config(config))
    assert "copy of the host" not in on_disk.resident
    assert on_disk.stages["push weights"]["copy of the host"] == pytest.approx(2 * copy, rel=2e-3)
    assert "push weights" not in planned("Qwen3-4B", read_config(polaris.get_config("v6e-8")))[0].stages


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.2, 1.6, 3, 10])
def test_auto_selects_the_least_recomputation_that_fits(share: float):
    """AUTO selects the first policy that leaves a tenth of the memory free, for several sizes around that of `full`."""
    config, shape = read_config(polaris.get_config("v5p-8")), preset_config("Qwen3-4B")
    machine, _ = machine_of(config)

    def plan_with(remat: str, memory_bytes: int | None) -> Plan:
        return make_plan(config, dataclasses.replace(shape, remat=remat), machine, memory_bytes)

    memory_bytes = int(share * plan_with("full", None).peak_bytes)
    fitting = [remat for remat in REMAT_POLICIES if plan_with(remat, None).peak_bytes <= 0.9 * memory_bytes]
    least = min(fitting, key=lambda remat: -plan_with(remat, None).peak_bytes, default="full")
    assert plan_with(AUTO, memory_bytes) == plan_with(least, memory_bytes)
    assert choose_remat(config, shape, machine, memory_bytes) == least
    assert plan_with(AUTO, None) == plan_with("full", None)


def test_auto_is_resolved_for_each_mesh_and_printed(capsys):
    config = read_config(polaris.get_config("v6e-8"))
    shape = model_shape(config)
    assert shape.remat == plan_of(config, dataclasses.replace(shape, remat=AUTO))[0].remat != AUTO
    console = Console(width=200)
    unresolved = configured_shape(config)
    found = print_plans(config, unresolved, {name: MESHES[name] for name in ("v6e-1", "h200x16")}, console)
    assert found["v6e-1"]["remat"] == "full" and found["h200x16"]["remat"] in ("dots", "none")
    assert plan_of(config, unresolved) == plan_of(config, shape)  # also the number of rows
    assert print_plan(*plan_of(config, shape), console)["remat"] == shape.remat
    assert f"model.remat={shape.remat}, train.rows_per_device=1" in capsys.readouterr().out


def test_a_plan_needs_neither_devices_nor_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(jax, "devices", None)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    bench.plan(read_config(polaris.get_config("v5p-16")), tmp_path / "plan.json", every_mesh=False)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["mesh"] == {"data": 1, "fsdp": 8, "tensor": 1, "expert": 1} and found["memory_bytes"] == 95e9
    assert "8 x v5p" in capsys.readouterr().out
    bench.plan(read_config(polaris.get_config()), tmp_path / "plan.json", every_mesh=True)
    found = json.loads((tmp_path / "plan.json").read_text())
    assert list(found) == list(MESHES)
    assert found["h200x4"]["memory_bytes"] == 0.75 * 141e9
    assert (found["v6e-1"]["max_rows_per_device"], found["v6e-4"]["max_rows_per_device"]) == (0, 2)


def test_a_plan_that_exceeds_the_memory_prints_a_warning(tmp_path, capsys):
    bench.plan(read_config(polaris.get_config("v6e-1")), tmp_path / "plan.json", every_mesh=False)
    assert "Warning: a device needs" in capsys.readouterr().out


def test_the_remedy_depends_on_the_stage_and_both_amounts_differ(capsys):
    config = read_config(gsm8k.get_config("v5e-1"))
    plan = plan_of(config, preset_config("Qwen3-0.6B", remat="full"))
    print_plan(*plan, Console(width=200))
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Warning: ")]
    with pytest.raises(ConfigError, match=r"rollouts\.max_concurrent=48 ") as error:
        check_memory(config, *plan)
    for text in (warning, str(error.value)):
        assert "16.01 GB" in text and "only 16 GB; lower rollouts.max_concurrent or sampling.max_tokens, or use" in text


@pytest.mark.parametrize("device, tolerance", [("h100", 1.0), ("v5p", 1.0), ("", 1.0), ("cpu", 1.1)])
def test_only_plans_for_cpus_may_exceed_the_memory(device: str, tolerance: float):
    config, machine = read_config(polaris.get_config()), Machine(device, dict.fromkeys(AXES, 1))
    plan = make_plan(config, preset_config("Qwen3-0.6B"), machine, None)
    check_memory(config, dataclasses.replace(plan, memory_bytes=int(plan.needed_bytes / tolerance) + 1), 0)
    with pytest.raises(ConfigError, match=r"train\.rows_per_device"):
        check_memory(config, dataclasses.replace(plan, memory_bytes=int(plan.needed_bytes / tolerance) - 1), 0)


# Presets


@pytest.mark.parametrize("name", MESHES)
def test_presets_use_all_their_devices(name: str):
    mesh = MESHES[name]
    assert mesh["device_kind"] in DEVICES
    assert math.prod(mesh[axis] for axis in AXES if axis in mesh) == mesh["num_devices"]
    assert mesh["num_devices"] % mesh["processes"] == 0
    config = polynomial.get_config(name)
    read_config(config)
    assert {key: value for key, value in mesh.items() if key != "processes"} | {"expert": 1} == config.mesh.to_dict()
    assert config.workdir == polynomial.get_config().workdir


@pytest.mark.parametrize("config_string", ["grpo,v5p-16", "v5p-16,grpo"])
def test_names_can_have_any_order(config_string: str):
    config = polaris.get_config(config_string)
    assert (config.workdir, config.algo.advantages) == ("runs/polaris-grpo", "grpo")
    assert config.mesh.device_kind == "v5p" and config.mesh.fsdp == 8


@pytest.mark.parametrize(
    ("config_string", "complaint"),
    [
        ("grpo,v5p-17", "':v5p-17'.*grpo_div.*v5p-16"),
        ("grpo,poly_epo", "more than one method"),
        ("v5p-8,laptop", "one mesh"),
    ],
)
def test_invalid_names_are_rejected(config_string: str, complaint: str):
    with pytest.raises(ValueError, match=complaint):
        default.get_config(config_string)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("TPU v5p", "v5p"),
        ("TPU v5", "v5p"),
        ("TPU v5 lite", "v5e"),
        ("TPU v4", "v4"),
        ("TPU v6 lite", "v6e"),
        ("cpu", "cpu"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-80"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", ""),
        ("Tesla T4", ""),
    ],
)
def test_device_names_follow_from_the_device_kind_of_jax(kind: str, name: str):
    assert device_name(kind) == name


# The mesh

ROW_TOKENS = 40


def meshes_of(num_devices: int) -> list[dict[str, int]]:
    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    sizes = itertools.product(divisors, repeat=len(AXES))
    return [dict(zip(AXES, each, strict=True)) for each in sizes if math.prod(each) == num_devices]


@pytest.mark.parametrize("num_devices", [1, 4, 6, 8, 12])
def test_the_open_axis_takes_the_remaining_devices(num_devices: int):
    for mesh, axis in itertools.product(meshes_of(num_devices), AXES):
        assert fill_mesh(mesh | {axis: -1}, num_devices) == mesh


@pytest.mark.parametrize("num_devices", [1, 2, 8, 12, 30])
def test_the_nearest_mesh_matches_brute_force(num_devices: int):
    def works(mesh: Mapping[str, int]) -> bool:
        return 12 % mesh["fsdp"] == 0 and 4 % mesh["tensor"] == 0

    for wanted in ((*each, 1) for each in itertools.product((1, 2, 3, 5, 8), repeat=3)):
        for left_out in (set(), {"fsdp"}, {"data"}):
            fixed = {axis: n for axis, n in zip(AXES, wanted, strict=True) if axis not in left_out}
            change = {
                tuple(mesh.values()): sum(abs(mesh[axis] - n) for axis, n in fixed.items())
                for mesh in meshes_of(num_devices)
                if works(mesh)
            }
            found = nearest_mesh(fixed, num_devices, works)
            tied = [mesh for mesh, distance in change.items() if distance == min(change.values())]
            assert tuple(found.values()) in tied
            assert found["fsdp"] == max(mesh[1] for mesh in tied if mesh[3] == found["expert"])


def test_errors_suggest_a_valid_mesh():
    """For each invalid mesh of twelve devices, the error message suggests a mesh that is valid."""
    sizes = {"hidden_size": 48, "num_heads": 8, "num_kv_heads": 4, "mlp_size": 96, "vocab_size": 60, "num_experts": 4}
    sizes = dict.fromkeys(RULES, 0) | sizes
    rejected = 0
    for mesh in meshes_of(12):
        if all(sizes[field] % mesh[axis] == 0 for field, axis in RULES.items() if axis):
            check_mesh(mesh, mesh, sizes, ROW_TOKENS)
            continue
        rejected += 1
        with pytest.raises(ConfigError) as error:
            check_mesh(mesh, mesh, sizes, ROW_TOKENS)
        message = str(error.value)
        advised = dict(part.split("=") for part in message.rstrip(".").rpartition(" is ")[2].split(", "))
        check_mesh(mesh, {axis: int(size) for axis, size in advised.items()}, sizes, ROW_TOKENS)
        assert message.count("\n") == 0
    assert rejected > 5


def test_the_nearest_mesh_keeps_the_configured_axes():
    sizes = {"hidden_size": 48, "num_heads": 8, "num_kv_heads": 8, "mlp_size": 96, "vocab_size": 64}
    sizes = dict.fromkeys(RULES, 0) | sizes
    asked = {"data": 1, "fsdp": -1, "tensor": 3, "expert": 1}
    with pytest.raises(ConfigError, match=r"num_heads=8; the nearest .* on 12 devices is data=1, fsdp=6, tensor=2"):
        check_mesh(asked, {"data": 1, "fsdp": 4, "tensor": 3, "expert": 1}, sizes, ROW_TOKENS)
