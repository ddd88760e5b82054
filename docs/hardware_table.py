"""Computes the tables of docs/reference/hardware.md with the memory plan, which requires no accelerator.

python docs/hardware_table.py        replaces the tables of the page; takes seconds
"""

import runpy
from collections.abc import Iterable
from pathlib import Path

from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.memory_plan.plan import make_plan, max_rows
from poly_epo_jax.model.lora import lora_fields
from poly_epo_jax.model.presets import PRESETS, preset_config
from poly_epo_jax.parallel.devices import DEVICES, Machine
from poly_epo_jax.parallel.mesh import AXES
from poly_epo_jax.startup.command_line import read_arguments

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "hardware.md"
START, END = "<!-- The following tables are written by docs/hardware_table.py. -->\n\n", "<!-- End of the tables. -->\n"

CARDS = {24: "rtx4090", 32: "rtx5090", 40: "a100-40", 48: "", 80: "h100", 141: "h200"}
"""Key of DEVICES of a GPU with each amount of memory in GB, or "" for a GPU that is not in DEVICES."""
MEMORY_FRACTION = 0.95
"""Fraction of a single GPU's memory that JAX may use, as with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95."""
ADAPTER = ("lora.rank=16", "model.param_dtype=bfloat16")
MODELS = ("Qwen3-4B", "Qwen3-32B")
BYTES = ("weights and moments, GB", "peak, GB")
ROWS = tuple(f"{card} GB" for card in CARDS)
"""Columns with the number of rows that fit on each card."""


def table() -> str:
    """Returns the tables: one GPU, adapters, the meshes of machines.py, and compiled programs."""
    return "".join(f"{line}\n" for part in (_one_gpu, _adapters, _meshes, _compiled) for line in part())


def main() -> None:
    """Replaces the tables of the page."""
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + table() + END + rest.partition(END)[2])


def _one_gpu() -> Iterable[str]:
    yield from _header("model", "trained", *BYTES, *ROWS)
    dense = (model for model in PRESETS if not preset_config(model).num_experts)  # others exceed these GPUs
    for model in dense:
        for trained, keys in (("all", ()), ("LoRA", ADAPTER)):
            cells = _on_cards(_read("gsm8k", "model.remat=full", "rollouts.max_concurrent=16", *keys), model)
            if any(rows != "0" for rows in cells[len(BYTES) :]):
                yield _row(model, trained, *cells)
    yield ""


def _adapters() -> Iterable[str]:
    yield from ("### LoRA with long sequences", "")
    yield (
        "Qwen3-4B with adapters of rank 16 and the lengths of the paper's run, with the same memory fraction. Servers "
        "on other devices generate."
    )
    yield ""
    yield from _header("row tokens", "remat", BYTES[1], *ROWS)
    for tokens in (5_120, 8_192, 16_384, 32_768):
        for remat in ("full", "attention"):
            config = _read("polaris", f"train.row_tokens={tokens}", f"model.remat={remat}", *ADAPTER)
            yield _row(f"{tokens:,}", remat, *_on_cards(config, "Qwen3-4B")[1:])
    yield ""


def _meshes() -> Iterable[str]:
    yield from ("### Machines", "")
    yield (
        "The paper's run on the [machines](configuration.md#machines) on which it fits, with Qwen3-4B and, with the "
        "same settings, Qwen3-32B. Peaks are for one row and the rematerialization that `model.remat=auto` selects, "
        "rows for `full`. Servers generate on GPUs, and the trainer on TPUs."
    )
    yield ""
    sizes = [f"{model.removeprefix('Qwen3-')}: {column}" for model in MODELS for column in (BYTES[1], "rows")]
    yield from _header("machine", "devices", "limit, GB", *sizes)
    for name, mesh in MESHES.items():
        kind = mesh["device_kind"]
        if kind == "cpu":
            continue
        axes = {axis: mesh.get(axis, 1) for axis in AXES}
        machine, config = Machine(kind, axes, mesh["processes"]), _read(f"polaris:{name}")
        limit = int((DEVICES[kind].memory_bytes or 0) * DEVICES[kind].jax_share)
        planned = [cell for model in MODELS for cell in _planned(config, model, machine, limit)[1:]]
        if set(map(str, planned[1::2])) != {"0"}:
            yield _row(name, mesh["num_devices"], f"{limit / 1e9:.0f}", *planned)
    yield ""


def _compiled() -> Iterable[str]:
    yield from ("### Compiled programs", "")
    yield (
        "Memory of the gradient of an update, compiled for a device of `h100x1`, `h100x8` or `v5p-8` with jax 0.10.2 "
        "but not run, compared with the plan. Without a mesh, the program is for one device. `python "
        "benchmarks/memory_grid.py` compiles this grid."
    )
    yield ""
    yield from runpy.run_path(str(ROOT / "benchmarks" / "memory_grid.py"))["table"]()
    yield ""


def _on_cards(config: Config, model: str) -> list[str]:
    """Returns the bytes on the smallest card that fits one row or else on the largest, and the rows on each card."""
    one: dict[str, int] = dict.fromkeys(AXES, 1)
    plans = [
        _planned(config, model, Machine(device, one), int(MEMORY_FRACTION * gigabytes * 10**9))
        for gigabytes, device in CARDS.items()
    ]
    state, peak, _ = next((plan for plan in plans if plan[2] != "0"), plans[-1])
    return [state, peak, *(rows for _, _, rows in plans)]


def _planned(config: Config, model: str, machine: Machine, limit: int) -> tuple[str, str, str]:
    """Returns bytes of weights and moments and of the peak with one row, in GB, and the number of rows that fit."""
    compute = {name: config.model[name] for name in ("dtype", "param_dtype", "remat")}
    shape = preset_config(model, **compute, **lora_fields(config.lora))
    plan = make_plan(config, shape, machine, limit, num_rows=1)
    state, peak = (f"{size / 1e9:.1f}" for size in (sum(plan.resident.values()), plan.needed_bytes))
    return state, peak, str(max_rows(config, shape, machine, limit))


def _read(recipe: str, *keys: str) -> Config:
    file, _, names = recipe.partition(":")
    return read_arguments([f"--config={ROOT}/configs/{file}.py:{names}", *(f"--config.{key}" for key in keys)])


def _header(*columns: str) -> list[str]:
    return [_row(*columns), "|---" * len(columns) + "|"]


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
