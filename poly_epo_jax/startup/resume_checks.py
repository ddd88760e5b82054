"""Checks that a resumed run has the same configuration, problems and model, except for keys that may change.

A run folder stores the configuration of its run in config.json. In about.json, it stores digests of the content that
the configuration refers to. A command with the same `workdir` resumes the run from its newest checkpoint.
"""

import dataclasses
import json
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.judges import judge_identity
from poly_epo_jax.model import hf
from poly_epo_jax.model.fingerprint import fingerprints
from poly_epo_jax.model.policy import Policy, model_digest
from poly_epo_jax.parallel import hosts
from poly_epo_jax.records import run_folder
from poly_epo_jax.step.optimizer import decays
from poly_epo_jax.system.digests import json_digest, option_digests
from poly_epo_jax.system.output_folder import check_output
from poly_epo_jax.system.signals import Stopped, StopSignal, run_in_loop
from poly_epo_jax.types import Judge, Params, Problem, Task

MUTABLE_KEYS = (
    "workdir",
    "compilation_cache_dir",
    "train.num_steps",
    "train.profile_steps",
    "mesh.",
    "hosts.",
    "train.rows_per_device",
    "checkpoint.",
    "log.",
    "base.cache_dir",
    "model.path",
    "rollouts.",
    "audit.every",
    "audit.num_prompts",
    "audit.wait_seconds",
    "audit.paraphrase.",
    "audit.stop_inflation",
    *(
        f"{judge}.{key}"
        for judge in ("judge", "audit.judge")
        for key in ("url", "api_key_env", "options.attempts", "timeout_seconds", "wait_seconds", "max_concurrent")
    ),
    "judge.max_failed_fraction",
)
"""Keys, and prefixes of keys, that may change when a run is resumed, except for `_immutable_keys`."""


def check_resume_config(workdir: Path, config: Config) -> None:
    """Checks that a run can be resumed with this configuration.

    Args:
      workdir: Run folder. It may not exist yet.
      config: Configuration of the resuming command.

    Raises:
      ValueError: If the folder contains files that are not from a run, or links.
      ConfigError: If the saved configuration has other keys, or other values of keys that must not change, if files of
        the run are missing, or if the run has completed more steps than configured.
    """
    check_output(workdir, "run", is_known=bool(run_folder.checkpoint_steps(workdir)))
    saved = run_folder.resumable_config(workdir)
    if saved is None:
        return
    check_version(workdir, saved)
    new = json.loads(json.dumps(config.to_dict()))
    immutable = _immutable_keys(config)
    mutable = MUTABLE_KEYS if config.judge.verify else (*MUTABLE_KEYS, "audit.judge.")
    if changed := [key for key in changed_keys(saved, new) if key in immutable or not key.startswith(mutable)]:
        reasons = [f"{key} ({immutable[key]})" if key in immutable else key for key in changed]
        raise ConfigError(
            f"{workdir} contains a run with different values of {', '.join(reasons)}; restore them, set "
            "--config.workdir to a new folder, or delete this folder."
        )
    step = max(run_folder.checkpoint_steps(workdir))
    if step > config.train.num_steps:
        raise ConfigError(
            f"train.num_steps={config.train.num_steps} is lower than the {step} steps that the run in {workdir} has "
            "completed; raise it, or set --config.workdir to a new folder."
        )


def check_version(run: Path, saved: Mapping[str, Any]) -> None:
    """Checks that the configuration of a run has the keys of this version of the package.

    Args:
      run: Run folder.
      saved: Content of its config.json.

    Raises:
      ConfigError: If the configuration has other keys. The message contains the version and commit that the run was
        trained with.
    """
    if changed := changed_keys(_names(saved), _names(Config().to_dict())):
        used = [{}, *run_folder.read_about(run).get("versions", [])][-1]
        version = " ".join(filter(None, (used.get("poly_epo_jax") or "(another version)", used.get("commit"))))
        raise ConfigError(
            f"{run} contains a run of poly_epo_jax {version}, with different keys {', '.join(changed)}; use that "
            "version for this run, or another run folder."
        )


def check_resume_model(workdir: Path, policy: Path) -> None:
    """Checks that a run can be resumed with this model.

    Args:
      workdir: Run folder. It may not exist yet.
      policy: Hugging Face folder of `model.path`.

    Raises:
      ConfigError: If the model configuration differs from the configuration in the run folder.
    """
    saved = workdir / run_folder.POLICY
    if run_folder.resumable_config(workdir) is None or not saved.is_dir():
        return
    old, new = (dataclasses.asdict(hf.read_model_config(folder)) for folder in (saved, policy))
    if different := changed_keys(old, new):
        raise ConfigError(
            f"The model of the run in {workdir} differs from {policy} in {', '.join(different)}; set model.path to the "
            "model of the run, or --config.workdir to a new folder."
        )


def check_same_content(workdir: Path, source: str, digests: dict[str, str]) -> dict[str, str]:
    """Checks that content outside the run folder is the same as at the start of the run.

    Args:
      workdir: Run folder. It may not exist yet.
      source: Keys or folder that the content was read from, for the error message.
      digests: Digests by the name of the content. Names that about.json does not contain are not compared.

    Returns:
      The digests, to be recorded in about.json.

    Raises:
      ConfigError: If a digest differs from the digest in about.json.
    """
    is_resumed = run_folder.resumable_config(workdir) is not None
    saved = run_folder.read_about(workdir).get("digests", {}) if is_resumed else {}
    if changed := [name for name, digest in digests.items() if saved.get(name, digest) != digest]:
        raise ConfigError(
            f"{source} has changed since the run in {workdir} was started: {', '.join(changed)}. Restore it, set "
            f"--config.workdir to a new folder, or delete {workdir}."
        )
    return digests


def check_resume_inputs(config: Config, judge: Judge) -> dict[str, str]:
    """Checks that a resumed run has the judge and the files of its start. Every process must call this function.

    Args:
      config: Configuration of the resuming command.
      judge: The judge. If it has a server, the function waits until the server responds.

    Returns:
      Digests of the judge and of the files that the configuration names, to be recorded in about.json.

    Raises:
      ConfigError: If a digest differs from the digest in about.json, except for `model.path`, which may change.
      ServerError: If the judge's server does not respond within `judge.wait_seconds`.
      KeyboardInterrupt, SystemExit: If a signal ends the wait.
    """
    workdir, stop = Path(config.workdir), StopSignal()

    async def identity() -> dict[str, str]:
        try:
            with stop.on_signals():
                return await stop.run_interruptible(judge_identity(judge))
        except Stopped as stopped:
            raise KeyboardInterrupt if stopped.number == signal.SIGINT else SystemExit(128 + stopped.number) from None

    judge_digests = hosts.run_on_first(lambda: run_in_loop(identity(), stop))
    hosts.run_on_all(lambda: check_same_content(workdir, "The judge", judge_digests))
    files = input_digests(config)
    compared = {name: digest for name, digest in files.items() if name != "model.path"}
    hosts.run_on_all(lambda: check_same_content(workdir, "A file that the configuration names", compared))
    return judge_digests | files


def problem_digests(task: Task) -> dict[str, str]:
    """Returns digests of the training and held-out problems of a task, and of their order, see `problems_digest`."""
    return {
        "training problems": problems_digest(task.train_problems),
        "held-out problems": problems_digest(task.held_out_problems),
    }


def reference_digests(reference: Params) -> dict[str, str]:
    """Returns the digest of the weights of a reference policy. Every process of a mesh must call this function."""
    return {"weights of the reference policy": json_digest(fingerprints(reference))}


def policy_digests(policy: Policy) -> dict[str, str]:
    """Returns digests of the content of a model folder that `check_resume_model` does not compare, except weights."""
    content = {
        "chat template": policy.tokenizer.chat_template,
        "vocabulary": policy.tokenizer.get_vocab(),
        "stop tokens": policy.stop_ids,
    }
    return {name: json_digest(value) for name, value in content.items()}


def input_digests(config: Config) -> dict[str, str]:
    """Returns digests of the files that a configuration names, by key.

    These are the model folder, and the files in `task.options` and `judge.options`. Models of the Hub are not included.
    """
    folder = config.model.path
    digests = {"model.path": model_digest(Path(folder))} if folder and Path(folder).is_dir() else {}
    for section in ("task", "judge"):
        digests |= option_digests(f"{section}.options", getattr(config, section).options)
    return digests


def problems_digest(problems: Sequence[Problem]) -> str:
    """Returns a digest of problems and their order, which does not depend on their source."""
    plain = str | int | float | None  # the text of other types may differ between processes
    return json_digest(
        [
            [
                *(one.id, one.prompt, one.answer if isinstance(one.answer, plain) else type(one.answer).__name__),
                *(one.chat, *one.tools, *([dict(one.columns)] if one.columns else []), *filter(None, [one.system])),
            ]
            for one in problems
        ]
    )


def _immutable_keys(config: Config) -> dict[str, str]:
    """Returns the keys of MUTABLE_KEYS that this run must not change, with the reason."""
    immutable = {"rollouts.in_flight": "the staleness of responses depends on it"}
    if decays(config.optimizer):
        immutable["train.num_steps"] = f"optimizer.schedule={config.optimizer.schedule} depends on it"
    if config.algo.kl_coef:
        immutable["model.path"] = f"the reference policy of algo.kl_coef={config.algo.kl_coef:g}"
    return immutable


def _names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a configuration and of its sections, without values."""
    return {key: dict.fromkeys(value, key) if isinstance(value, dict) else key for key, value in config.items()}
