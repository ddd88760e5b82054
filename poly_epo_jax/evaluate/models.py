"""Opens the models of an evaluation: run folders, Hugging Face folders or names, and servers."""

import asyncio
import dataclasses
import sys
from pathlib import Path

import httpx
from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.evaluate.benchmarks import label_of, split_label
from poly_epo_jax.model.policy import Policy, find_model, model_digest, open_policy
from poly_epo_jax.records.run_folder import CHECKPOINTS
from poly_epo_jax.rollouts import model_info
from poly_epo_jax.startup.trained_policy import open_trained_policy, run_digests
from poly_epo_jax.system.http_client import ServerError, describe_error
from poly_epo_jax.types import Params


@dataclasses.dataclass
class Model:
    """A model to evaluate, either on a server or with weights in this process.

    Attributes:
      policy: Model configuration, tokenizer and stop tokens.
      weights: Description of the weights, for about.json: the path of a run with the step, the path that a server
        reports with the version, or the Hugging Face folder or name.
      digests: Digests that identify the content of the model, for about.json. "model_files" is the digest of its folder
        (for a server, of its tokenizer's folder), and "weights" the digest of the checkpoint of a run.
      url: URL of the server. Empty if `params` is given.
      params: Weights for the embedded sampler. None if the model is served at `url`.
    """

    policy: Policy
    weights: str
    digests: dict[str, str]
    url: str = ""
    params: Params | None = None


def open_model(name: str, config: Config, mesh: Mesh) -> tuple[str, Model]:
    """Opens a model to evaluate.

    Args:
      name: A run folder, a Hugging Face folder or name, or the URL of a server. The prefix `label=` sets the label.
      config: The configuration.
      mesh: Mesh for weights in this process.

    Returns:
      The label and the model.

    Raises:
      ValueError, OSError: If the model is not found or not supported, or if the server does not respond.
    """
    label, source = label_of(name), split_label(name)[1]
    if source.startswith(("http://", "https://")):
        url = source.rstrip("/")
        try:
            served = asyncio.run(model_info(url, config))
        except httpx.HTTPError as error:
            raise ServerError(
                f"Failed to read the model of {url}: {describe_error(error)}. Start an SGLang or sglang-jax server, or "
                "set --config.rollouts.name=vllm for a vLLM server."
            ) from error
        named = f"{url} names the tokenizer {served.tokenizer_path}"  # whose folder could contain anything
        if not config.model.path:
            raise ConfigError(f"{named}; set --config.model.path to a folder or Hub name with this tokenizer.")
        if config.model.path != served.tokenizer_path:
            print(f"Warning: {named}, but model.path={config.model.path} is used; check them.", file=sys.stderr)
        policy = open_policy(find_model(config.model.path), config.model)
        return label, Model(policy, served.weights, {"model_files": model_digest(policy.path)}, url)
    if not (Path(source) / CHECKPOINTS).is_dir():
        policy = open_policy(find_model(source), config.model)
        digests = {"model_files": model_digest(policy.path)}
        return label, Model(policy, source, digests, params=policy.load_params(mesh))
    policy, params, step = open_trained_policy(Path(source), config.model, mesh)
    digests = run_digests(Path(source), step)
    if "weights" not in digests:
        raise FileNotFoundError(f"Checkpoint {step} of {source} was deleted while it was read; rerun the command.")
    return label, Model(policy, f"{source} step {step}", digests, params=params)
