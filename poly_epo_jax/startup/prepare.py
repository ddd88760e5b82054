"""Builds the mesh, task and judge of a run, and checks folders, data, sequence lengths and memory before anything is
computed.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config, max_sequence_tokens
from poly_epo_jax.memory_plan.plan import Plan, batch_bytes, plan_of
from poly_epo_jax.memory_plan.tables import amount, remedy
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import check_adapter, lora_fields, trained_pattern
from poly_epo_jax.model.partition import split_params
from poly_epo_jax.model.policy import find_model
from poly_epo_jax.model.presets import has_preset, preset_config
from poly_epo_jax.model.transformer import AUTO, abstract_model, param_shapes
from poly_epo_jax.parallel.compiler_options import use_deterministic_programs
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.rollouts.prompts import with_system_prompt
from poly_epo_jax.startup.base_policy import base_shape
from poly_epo_jax.startup.read_config import make_task, training_judge
from poly_epo_jax.startup.resume_checks import check_same_content, problem_digests
from poly_epo_jax.startup.resume_code import check_resume_code
from poly_epo_jax.startup.rules import check_rules, task_rules
from poly_epo_jax.step.advantages import check_estimator, check_loss
from poly_epo_jax.step.partial_groups import min_group
from poly_epo_jax.system.limits import memory_limit
from poly_epo_jax.types import Judge, Task

MEMORY_TOLERANCE = 1.1
"""Maximum ratio of planned to available memory on CPUs, where plans contain estimates and the system can swap. A plan
for an accelerator must fit: it is seldom more than a few percent above the memory of compiled programs."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The components of a run that are built before its policy.

    Attributes:
      mesh: Mesh over the devices of all processes.
      task: Provides the problems and computes rewards.
      judge: Clusters responses.
      model_config: Model configuration; `remat` is resolved if `model.remat=auto`.
      plan: Memory plan of the run.
      rows_that_fit: Maximum number of rows per device that the plan allows.
      digests: Digests of the problems, see `check_same_content`.
      code: Digests of the user's code, see `check_resume_code`.
    """

    mesh: Mesh
    task: Task
    judge: Judge
    model_config: ModelConfig
    plan: Plan
    rows_that_fit: int
    digests: dict[str, str]
    code: dict[str, Any]


def prepare(config: Config) -> Prepared:
    """Builds the components of a run that are built before its policy, and checks that the run can start.

    Raises:
      ValueError, OSError: If a folder is not writable, if the data, sequence lengths, mesh or memory do not fit the
        configuration, or if the run was started with other problems.
    """
    for key, folder in _output_folders(config).items():
        check_writable(key, Path(folder))
    mesh = make_mesh(**config.mesh)
    code = check_resume_code(config)
    task = make_task(config.task)
    check_rules(task_rules(config, task))
    with_system_prompt(task.train_problems, config.task.system_prompt)  # raises an error if it cannot be used
    digests = check_same_content(
        Path(config.workdir),
        f"task.name={config.task.name} with task.options={dict(config.task.options)}",
        problem_digests(task),
    )
    judge = training_judge(config, task)
    for size in {config.train.num_generations, min_group(config)}:
        check_estimator(config.algo, size)
    check_loss(config.algo)
    model_config = configured_shape(config, task)
    if max_sequence_tokens(config) > model_config.max_position:
        raise ConfigError(
            f"train.max_prompt_tokens={config.train.max_prompt_tokens} and sampling.max_tokens="
            f"{config.sampling.max_tokens} allow sequences of {max_sequence_tokens(config)} tokens, but the model has "
            f"only {model_config.max_position} positions; lower one of them."
        )
    split_params(param_shapes(abstract_model(model_config)), trained_pattern(config))
    plan, rows_that_fit = plan_of(config, model_config)
    check_memory(config, plan, rows_that_fit)
    model_config = dataclasses.replace(model_config, remat=plan.remat)
    return Prepared(mesh, task, judge, model_config, plan, rows_that_fit, digests, code)


def configure_compiler(config: Config) -> None:
    """Sets the folder of compiled programs, which later commands reuse, and whether programs are deterministic."""
    use_deterministic_programs(config.train.deterministic)
    compilation_cache.reset_cache()  # JAX would continue to use the folder of an earlier run in the same process.
    jax.config.update("jax_compilation_cache_dir", str(Path(config.compilation_cache_dir).absolute()))


def model_shape(config: Config) -> ModelConfig:
    """Returns the `configured_shape` of a run. With `model.remat=auto`, the memory plan determines `remat`.

    Raises:
      ValueError, OSError: If the model or the task does not exist, or if the mesh does not fit the devices or, with
        `auto`, the model.
    """
    model_config = configured_shape(config)
    return (
        dataclasses.replace(model_config, remat=plan_of(config, model_config)[0].remat)
        if model_config.remat == AUTO
        else model_config
    )


def configured_shape(config: Config, task: Task | None = None) -> ModelConfig:
    """Returns the model configuration of a run with `remat` as configured, without loading weights.

    Without `model.path`, the configuration is taken from `config.base`. Otherwise, it is read from the model's folder
    or, if the folder does not exist, from a preset. A model of the Hub that has no preset is downloaded.

    Args:
      config: Configuration of the run.
      task: The run's task, on which the model depends without `model.path`. If None, it is created if necessary.

    Raises:
      ValueError, OSError: If the model or the task does not exist.
    """
    compute = (
        config.model.compute_options | {"max_sequence_tokens": max_sequence_tokens(config)} | lora_fields(config.lora)
    )
    if not config.model.path:
        return dataclasses.replace(base_shape(config.base, task or make_task(config.task)), **compute)
    if not Path(config.model.path).is_dir() and has_preset(config.model.path):
        found = preset_config(config.model.path, **compute)
    else:
        found = hf.read_model_config(find_model(config.model.path), **compute)
    check_adapter(found)
    return found


def check_writable(key: str, folder: Path) -> None:
    """Checks that a folder is writable, or can be created, by creating and removing a temporary folder.

    Args:
      key: Dotted key that names the folder, for the error message.
      folder: The folder. It may not exist yet.

    Raises:
      ConfigError: If the folder is not writable, or is a symbolic link to a folder that does not exist.
    """
    if dangling := next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None):
        raise ConfigError(
            f"{key}={folder} cannot be created, because {dangling} links to {dangling.readlink()}, which does not "
            "exist; create that folder, or choose another one."
        )
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"{key}={folder} cannot be written to ({error.strerror or error}); choose a writable folder."
        ) from error


def check_memory(config: Config, plan: Plan, rows_that_fit: int) -> None:
    """Checks that a configuration fits into device and host memory, according to its memory plan.

    Args:
      config: The configuration.
      plan: Its memory plan, from `plan_of`.
      rows_that_fit: Maximum number of rows per device that fit, from `plan_of`.

    Raises:
      ConfigError: If the configuration does not fit. The message names the cause of the peak and a remedy.
    """
    tolerance = MEMORY_TOLERANCE if plan.machine.platform == "cpu" else 1
    if plan.memory_bytes is not None and plan.needed_bytes > tolerance * plan.memory_bytes:
        peak_use = {
            "gradient": f"train.rows_per_device={plan.rows_per_device} of train.row_tokens={plan.row_tokens} tokens",
            "generate": f"rollouts.max_concurrent={config.rollouts.max_concurrent} responses",
        }.get(plan.peak_stage, "the model with its optimizer")
        raise ConfigError(
            f"{peak_use} needs {amount(plan.needed_bytes, 4)} of memory per device, but JAX may use only "
            f"{amount(plan.memory_bytes, 4)}; {remedy(plan, rows_that_fit)}."
        )
    if batch_bytes(config) > memory_limit():
        raise ConfigError(
            f"train.prompts_per_batch={config.train.prompts_per_batch} with "
            f"train.num_generations={config.train.num_generations} needs {amount(batch_bytes(config))} of host memory, "
            f"but this process may use only {amount(memory_limit())}; lower them, sampling.max_tokens or algo.num_sets."
        )


def _output_folders(config: Config) -> dict[str, str]:
    """Returns the folders that the run writes to, by key."""
    folders = {"workdir": config.workdir, "compilation_cache_dir": config.compilation_cache_dir}
    if not config.model.path:
        folders["base.cache_dir"] = config.base.cache_dir
    if SAMPLERS[config.rollouts.name].needs_urls and config.rollouts.weight_sync == "disk":
        folders["rollouts.weights_dir"] = config.rollouts.weights_dir
    return folders
