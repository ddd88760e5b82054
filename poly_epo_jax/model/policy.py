"""Opens a policy, its weights, tokenizer and stop tokens, from a Hugging Face model folder."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poly_epo_jax.config.keys import LoraSection, ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf_files import new_folder
from poly_epo_jax.model.lora import init_adapter, lora_fields, split_adapter, without_adapter
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.model.qwen3 import Qwen3, abstract_model
from poly_epo_jax.model.stop_strings import stop_string_ids
from poly_epo_jax.model.tokenizer_files import copy_files, write_tokenizer
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.system.digests import check_digests, write_digests
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import Params

NO_ADAPTER = LoraSection()


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
    model: Qwen3
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
      OSError: If a model of the Hub is not cached locally and is not downloaded.
    """
    if Path(path).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return Path(path)
    try:
        patterns = [
            "*.json",
            "*.safetensors",
            "*.txt",
            "*.jinja",
            "*.model",
        ]  # includes chat templates and vocabularies
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=not download))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise OSError(
            f"{path} is not a local folder, and downloading it failed: {first_line(error)}. Correct model.path, or "
            "download the model elsewhere and set model.path to its folder."
        ) from error


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
      ValueError, FileNotFoundError: If the folder is missing or corrupted, or if the model is not supported.
    """
    check_digests(path)
    compute = {name: value for name, value in section.items() if name not in ("path", "stop_strings")}
    config = hf.read_model_config(path, max_sequence_tokens=max_sequence_tokens, **compute, **lora_fields(lora))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # Tokenizers raise many types of errors, and few of them name the file.
        raise ValueError(
            f"Failed to load the tokenizer in {path}: {first_line(error)}. Create or download the model folder again."
        ) from error
    return Policy(path, config, abstract_model(config), tokenizer, _stop_ids(path, tokenizer, section.stop_strings))


def _stop_ids(path: Path, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of generation_config.json and of the tokenizer, and the tokens of stop
    strings.

    The end-of-sequence tokens of both files differ for base models.

    Raises:
      ValueError: If one of the strings is not contained in any token.
    """
    file = path / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    listed: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    own = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    return tuple(sorted({*listed, *own, *stop_string_ids(tokenizer, strings)}))
