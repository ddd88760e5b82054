"""Opens a policy, its weights, tokenizer and stop tokens, from a Hugging Face model folder."""

import dataclasses
import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jax.sharding import Mesh
from jaxtyping import Int
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poly_epo_jax.config.keys import ConfigError, LoraSection, ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import MODEL_FILES, copy_files, model_files, new_folder, write_tokenizer
from poly_epo_jax.model.lora import check_adapter, init_adapter, lora_fields, split_adapter, without_adapter
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.model.stop_strings import stop_string_ids
from poly_epo_jax.model.transformer import Transformer, abstract_model
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.system.digests import DIGESTS, check_digests, file_digests, json_digest, write_digests
from poly_epo_jax.system.json_files import read_object
from poly_epo_jax.system.text import first_line
from poly_epo_jax.tasks.verifier import Grader, Outcome, Verifier
from poly_epo_jax.types import Params

NO_ADAPTER = LoraSection()
# Limits of CPU time in seconds and of memory in GiB for rendering a short prompt.
TEMPLATE_SECONDS, TEMPLATE_GB = 2.0, 1.0


@dataclasses.dataclass
class Policy:
    """A language model without its weights.

    Attributes:
      path: Local model folder.
      config: Model configuration.
      model: Abstract model, with the shapes of the weights in place of arrays.
      tokenizer: Tokenizer of the model folder.
      stop_ids: Tokens that end a response.
    """

    path: Path
    config: ModelConfig
    model: Transformer
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]

    def load_params(self, mesh: Mesh, seed: int = 0, base: Params | None = None) -> Params:
        """Loads the weights of the model folder onto a mesh, and adds a new adapter if the policy has one.

        Args:
          mesh: Mesh to shard the weights over.
          seed: Random seed of the adapter.
          base: Weights of the model folder, if they are already loaded.

        Returns:
          All weights of the policy.
        """
        adapter = init_adapter(self.config, seed, param_shardings(self.model, mesh))
        return merge_params(adapter, self.load_base(mesh) if base is None else base)

    def load_base(self, mesh: Mesh) -> Params:
        """Loads the weights of the model folder onto a mesh, without an adapter."""
        _, shardings = split_adapter(self.config, param_shardings(self.model, mesh))
        return hf.load_params(self.path, without_adapter(self.config), shardings)

    def load_reference(self, mesh: Mesh, seed: int) -> Params:
        """Loads the initial values of the weights that may be trained, which define the reference policy.

        Args:
          mesh: Mesh to shard the weights over.
          seed: Random seed of the adapter.

        Returns:
          The initial adapter, whose output is zero, or all weights if the policy has no adapter.
        """
        return init_adapter(self.config, seed, param_shardings(self.model, mesh)) or self.load_base(mesh)

    def save_description(self, folder: Path) -> None:
        """Copies configuration and tokenizer to a folder, so that exports do not depend on the base policy folder.

        An existing folder is replaced after all files are copied.
        """
        with new_folder(folder, replace=True) as new:
            copy_files(self.path, new, ("config.json", "generation_config.json"))
            write_tokenizer(self.path, new)
            write_digests(new)


def find_model(path: str, download: bool = True) -> Path:
    """Returns the local folder of a model.

    Args:
      path: Model folder, or Hugging Face Hub name in the form `organization/name`.
      download: Whether to download a model of the Hub that is not in the local cache.

    Returns:
      The model folder. It may not exist if `path` is not a Hub name.

    Raises:
      OSError: If `path` is the address of a bucket, or if a model of the Hub is not cached locally, and downloading it
        fails or is disabled.
      ValueError: If a model of the Hub is not supported. Its weights are not downloaded then.
    """
    if "://" in path:
        raise OSError(
            f"model.path={path} is an address, which cannot be read; mount the bucket (such as with gcsfuse) or "
            "copy the model (such as with gcloud storage cp -r), and set the path of the folder."
        )
    if Path(path).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return Path(path)
    hf.read_model_config(_cached_model(path, ("config.json",), download))
    return _cached_model(path, MODEL_FILES, download)


def _cached_model(name: str, patterns: Sequence[str], download: bool) -> Path:
    """Returns the folder of a Hub model in the local cache, after a download of the files that are missing."""
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns), local_files_only=not download))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise OSError(
            f"{name} is not a local folder, and downloading it failed: {first_line(error)}. Correct the name, or "
            "download the model elsewhere and set the path of its folder instead."
        ) from error


def model_digest(folder: Path) -> str:
    """Returns a digest of the files of a model folder, which identifies the model independently of its path.

    Raises:
      ValueError: If the folder contains links to other folders, or special files.
      OSError: If a file cannot be read.
    """
    files = [file for file in model_files(folder) if file.name != DIGESTS]
    return json_digest(dict(zip([file.name for file in files], file_digests(files), strict=True)))


def open_policy(
    path: Path, section: ModelSection, max_sequence_tokens: int = 0, lora: LoraSection = NO_ADAPTER
) -> Policy:
    """Opens the policy in a Hugging Face model folder. Weights are not loaded.

    Args:
      path: Local model folder.
      section: The `model` section of the configuration.
      max_sequence_tokens: Maximum number of tokens of a training sequence, see ModelConfig.
      lora: The `lora` section of the configuration. The default selects a policy without an adapter.

    Returns:
      The policy.

    Raises:
      ValueError, FileNotFoundError: If the folder is missing or corrupted, if the model is not supported, if a stop
        string is not contained in any token, or if the embedding has no row for a stop token.
    """
    model_files(path)
    check_digests(path)
    compute = section.compute_options | lora_fields(lora)
    config = hf.read_model_config(path, max_sequence_tokens=max_sequence_tokens, **compute)
    check_adapter(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # Tokenizers raise many types of errors, and few of them name the file.
        raise ValueError(
            f"Failed to load the tokenizer in {path}: {first_line(error)}. Create or download the model folder again."
        ) from error
    templates = tokenizer.chat_template or ()
    for template in templates.values() if isinstance(templates, dict) else filter(None, [templates]):
        if not _renders(template, json.dumps(dict(section.chat_template_options))):
            raise ValueError(
                f"{path}: rendering a short prompt with the chat template takes more than {TEMPLATE_SECONDS:g} s "
                f"of CPU time or {TEMPLATE_GB:g} GiB of memory; correct the chat template."
            )
    # All users of the tokenizer apply its chat template with these variables.
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **section.chat_template_options)
    stop_ids = {*_eos_ids(path), *stop_string_ids(tokenizer, section.stop_strings)}
    if isinstance(tokenizer.eos_token_id, int):  # differs from the ids in the folder's other files for base models
        stop_ids.add(tokenizer.eos_token_id)
    check_embedded(tokenizer, sorted(stop_ids), config.vocab_size)
    return Policy(path, config, abstract_model(config), tokenizer, tuple(sorted(stop_ids)))


@functools.cache
def _renders(template: str, variables: str) -> bool:
    """Returns False if rendering a chat template exceeds a limit. Other errors occur when a prompt is rendered."""
    script = str(Path(__file__).with_name("template_worker.py"))
    worker = Verifier(1, TEMPLATE_SECONDS, TEMPLATE_GB, Grader("jinja2", (script,), bool))
    outcome = worker.call(template, variables)
    worker.close()
    return outcome not in (Outcome.TIMED_OUT, Outcome.CRASHED)


def check_embedded(
    tokenizer: PreTrainedTokenizerBase, token_ids: Int[np.ndarray, " T"] | Sequence[int], vocab_size: int
) -> None:
    """Checks that the embedding has a row for each token. JAX would read the last row instead of a missing one.

    Args:
      tokenizer: Tokenizer of the policy.
      token_ids: Token ids [T].
      vocab_size: Number of rows of the embedding.

    Raises:
      ValueError: If the embedding has no row for a token. The message contains the name and the id of the token.
    """
    ids = np.asarray(token_ids)
    for index in ids[ids >= vocab_size]:
        name = tokenizer.convert_ids_to_tokens(int(index))
        raise ValueError(
            f"Token {name!r} has id {index}, but the policy's embedding has only {vocab_size} rows; add rows for new "
            "tokens (resize_token_embeddings of transformers), or remove the token from the prompts, the chat template "
            "and the stop tokens."
        )


def check_stop_ids(policy: Policy) -> None:
    """Checks that responses of the policy can end before the token limit.

    Raises:
      ConfigError: If the policy has no stop tokens.
    """
    if not policy.stop_ids:
        raise ConfigError(
            f"{policy.path} has no stop tokens: model.stop_strings is empty, and generation_config.json, config.json "
            "and the tokenizer do not define an end-of-sequence token. Set model.stop_strings."
        )


def _eos_ids(folder: Path) -> list[int]:
    """Returns the end-of-sequence tokens of generation_config.json or, if it has none, of config.json.

    Raises:
      ValueError: If the value is neither a token id nor a list of token ids.
    """
    for file in (folder / "generation_config.json", folder / "config.json"):
        eos = read_object(file, "create or download the model folder again").get("eos_token_id")
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if any(type(index) is not int or index < 0 for index in ids):
            raise ValueError(f"{file}: eos_token_id={eos!r} must be a token id or a list of token ids; correct it.")
        if ids:
            return ids
    return []
