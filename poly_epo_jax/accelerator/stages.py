"""Stages in the order of their value: processes, their seconds on an H100, and how their results are read."""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from poly_epo_jax.accelerator import figures

ROOT = Path.cwd()  # launch/accelerator.sh starts the command in the root of the repository
KILLED_RUN, RANDOM_TEXT = ROOT / "launch" / "killed_run.py", ROOT / "launch" / "random_text.py"
COMPARED = "countdown-grpo-lr3e-05-seed0,countdown-poly_epo-lr3e-05-seed0"  # runs whose generations are drawn as trees
# Configuration of the rehearsal.
TINY_POLICY = {
    "base__hidden_size": 32,
    "base__mlp_size": 64,
    "base__num_layers": 1,
    "base__head_dim": 8,
    "base__clean_steps": 300,
    "base__noisy_steps": 10,
    "base__batch_size": 64,
}
TINY_BATCH = {"train__prompts_per_batch": 8, "train__prompts_per_minibatch": 4}
TINY_TASK = {"max_coefficient": 1, "max_constant": 9, "max_x": 1, "num_train": 28, "num_held_out": 8}


class Measurement(NamedTuple):
    """A process that writes results. Its working folder is the output folder.

    Attributes:
      name: Name of its log in the folder of the stage.
      seconds: Time on an H100, which determines its fraction of the time of all measurements.
      command: Program and arguments.
      exit_code: Expected exit code. Negative values are signals.
    """

    name: str
    seconds: float
    command: Sequence[str]
    exit_code: int = 0


class Stage(NamedTuple):
    """Measurements of one kind.

    Attributes:
      name: Name of the stage and of its folder.
      measurements: Processes, which run one after another.
      read: Reads the figures from the folder of the stage, as far as they are measured.
    """

    name: str
    measurements: Sequence[Measurement]
    read: Callable[[Path], Iterable[dict[str, Any]]]


def make_stages(is_small: bool) -> list[Stage]:
    """Creates all stages. With `is_small`, sizes are tiny, to rehearse the command on any machine."""
    recipe = "--config=polynomial" if is_small else "--config=gsm8k"
    doctor = Measurement("doctor", 50, _package("doctor", recipe, "--short", "--output=doctor/doctor.json"))
    return [
        Stage("doctor", [doctor], figures.read_doctor),
        Stage("learning", _learning(is_small), figures.read_learning),
        Stage("update", _update(is_small), figures.read_bench),
        Stage("decode", _decode(is_small), figures.read_bench),
        Stage("step", _step(is_small), figures.read_step),
        Stage("tests", _tests(), figures.read_tests),
        Stage("compare", _compare(is_small), figures.read_comparison),
    ]


def _package(command: str, *flags: str, **changes: object) -> list[str]:
    # Returns a command of the package. In the names of changed configuration keys, `__` stands for a dot.
    return [
        sys.executable,
        "-m",
        f"poly_epo_jax.{command}",
        *flags,
        *[f"--config.{key.replace('__', '.')}={value}" for key, value in changes.items()],
    ]


def _learning(is_small: bool) -> list[Measurement]:
    # Trains a tiny policy without interruption, and again with a kill and a resume.
    fixed = {"train__num_steps": 20, "checkpoint__every": 6, "eval__every": 0, "log__generations_every": 1}
    tiny = {**TINY_POLICY, **TINY_BATCH, "task__options": TINY_TASK, "optimizer__learning_rate": 2e-3}
    found = []
    for kind, seconds in (("deterministic", 54), ("default", 36)):
        changes = fixed | (tiny if is_small else {}) | {"train__deterministic": kind == "deterministic"}
        whole, killed = (
            _package("main", "--config=polynomial", **changes, workdir=f"learning/{kind}{suffix}")
            for suffix in ("", "-killed")
        )
        found += [
            Measurement(kind, seconds / 2, whole),
            Measurement(f"{kind}-killed", seconds / 4, [sys.executable, str(KILLED_RUN), *killed[3:]], -9),
            Measurement(f"{kind}-resumed", seconds / 4, killed),
        ]
    return found


def _update(is_small: bool) -> list[Measurement]:
    # Measures the programs of the update of four models with random weights. Servers are not contacted.
    return [
        Measurement(name, seconds, _bench(is_small, f"update/{name}", "logprobs,gradient,optimizer", **changes))
        for name, seconds, changes in (
            ("Qwen3-0.6B", 60, {"model__path": "Qwen/Qwen3-0.6B"}),
            ("Qwen3-1.7B", 50, {"model__path": "Qwen/Qwen3-1.7B"}),
            ("Qwen3-4B-LoRA", 50, {"model__path": "Qwen/Qwen3-4B", "lora__rank": 16, "model__param_dtype": "bfloat16"}),
            ("Qwen3-4B", 50, {"model__path": "Qwen/Qwen3-4B"}),
        )
    ]


def _decode(is_small: bool) -> list[Measurement]:
    # Measures the embedded sampler. Keys and values of 512 sequences of 512 tokens take 30 GB with Qwen3-0.6B.
    changes = {
        "model__path": "Qwen/Qwen3-0.6B",
        "rollouts__name": "embedded",
        "train__max_prompt_tokens": 128,
        "sampling__max_tokens": 384,
        "train__row_tokens": 4096,
    }
    return [
        Measurement(
            f"{slots}-slots",
            seconds,
            _bench(is_small, f"decode/{slots}-slots", "generate", **changes, rollouts__max_concurrent=slots),
        )
        for slots, seconds in ((64, 30), (256, 20), (512, 20))
    ]


def _bench(is_small: bool, name: str, stages: str, **changes: object) -> list[str]:
    recipe = "--config=polynomial" if is_small else "--config=polaris"
    changes = {**TINY_BATCH, "base__num_layers": 1} if is_small else changes | {"mesh__fsdp": 1, "model__remat": "auto"}
    return _package("bench", recipe, f"--stages={stages}", f"--output={name}.json", **changes)


def _step(is_small: bool) -> list[Measurement]:
    # Trains for two whole steps with each method. The first step includes compilation.
    sizes = ("hidden_size=64", "mlp_size=128", "num_layers=2", "head_dim=16", "vocab_size=512") if is_small else ()
    changes = {**TINY_BATCH, "sampling__max_tokens": 32, "train__row_tokens": 256} if is_small else {}
    changes |= {"model__path": "step/model"}
    model = [sys.executable, str(RANDOM_TEXT), "step/model", "Qwen3-0.6B", *sizes]
    return [
        Measurement("model", 10, model),
        *(
            Measurement(
                name, seconds, _package("main", f"--config={RANDOM_TEXT}:{name}", **changes, workdir=f"step/{name}")
            )
            for name, seconds in (("grpo", 35), ("poly_epo", 25))
        ),
    ]


def _tests() -> list[Measurement]:
    # Runs the tests in a list, on the platform that POLY_EPO_TEST_PLATFORM selects, see tests/conftest.py.
    flags = ["-v", "--tb=short", "-m", "", "-p", "no:cacheprovider", f"--config-file={ROOT / 'pyproject.toml'}"]
    names = (ROOT / "tests" / "accelerator.txt").read_text().split()
    return [Measurement("pytest", 50, [sys.executable, "-m", "pytest", *flags, *(str(ROOT / name) for name in names)])]


def _compare(is_small: bool) -> list[Measurement]:
    # Trains and evaluates the runs of a study, and reports the runs that are finished, also as trees of generations.
    # Small models leave most of a GPU idle, so three processes share it.
    changes = {**TINY_POLICY, **TINY_BATCH, "train__num_steps": 3} if is_small else {}
    study = _package("study", str(ROOT / "studies" / "accelerator.py"), **changes)
    shared = ["env", "XLA_PYTHON_CLIENT_MEM_FRACTION=0.3", *study, *([] if is_small else ["--gpus=0,0,0"])]
    return [
        Measurement("study", 460, shared),
        Measurement("report", 50, [*study, "--report"]),
        Measurement("trees", 30, _package("report", "runs/study-accelerator/evaluation", f"--models={COMPARED}")),
    ]
