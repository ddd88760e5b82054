"""The policy that the run would begin with, if it is already here: a check downloads and fits nothing."""

from pathlib import Path

from poly_epo_jax.base_policy import base_policy_folder
from poly_epo_jax.doctor.finding import Missing, Subject
from poly_epo_jax.model.sharding import params_on_host
from poly_epo_jax.policy import Policy, find_model, open_policy, open_trained_policy
from poly_epo_jax.run_folder import resumable_config
from poly_epo_jax.types import Params


def find_policy(subject: Subject) -> Policy:
    """The policy: model, tokenizer and stop tokens.

    Raises:
      Missing: the policy is not here.
    """
    config = subject.config
    if not config.model.path:
        folder = base_policy_folder(config.base, config.task)
        if not folder.exists():
            raise Missing("the base policy is made when the run starts")
    else:
        try:
            folder = find_model(config.model.path, download=False)
        except OSError:
            folder = Path(config.model.path)
        if not folder.is_dir():
            raise Missing(f"model.path={config.model.path} is not on this machine; the run downloads it")
    return open_policy(folder, config.model, lora=config.lora)


def first_weights(subject: Subject, policy: Policy) -> tuple[Params, int]:
    """A whole copy of the weights on this host's devices, and their step: the newest checkpoint's, if there is one."""
    run, mesh = Path(subject.config.workdir), subject.mesh
    if resumable_config(run) is None:
        params, step = policy.load_params(mesh, subject.config.seed), 0
    else:
        _, params, step = open_trained_policy(run, subject.config.model, mesh)
    return params_on_host(params, mesh), step
