"""A policy: model, weights, tokenizer and stop tokens, from a Hugging Face folder or a run's checkpoint."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poly_epo_jax.config.keys import LoraSection, ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.lora import first_adapter, lora_fields, split_adapter, without_adapter
from poly_epo_jax.model.partition import merge_params
from poly_epo_jax.model.qwen3 import Qwen3, abstract_model
from poly_epo_jax.model.stop_strings import stop_string_ids
from poly_epo_jax.parallel.sharding import param_shardings
from poly_epo_jax.system.digests import DIGESTS, check_digests, write_digests
from poly_epo_jax.system.text import first_line
from poly_epo_jax.types import Params

NO_ADAPTER = LoraSection()


@dataclasses.dataclass
class Policy:
    """A model's structure without its weights, its tokenizer and its stop tokens."""

    path: Path
    config: ModelConfig
    model: Qwen3
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]

    def load_params(self, mesh: Mesh, seed: int = 0, base: Params | None = None) -> Params:
        """The weights in the folder, laid out on the mesh, together with a new adapter if the policy has one.

        Args:
          seed: the adapter's seed.
          base: the weights in the folder, if they are loaded already.
        """
        adapter = first_adapter(self.config, seed, param_shardings(self.model, mesh))
        return merge_params(adapter, self.load_base(mesh) if base is None else base)

    def load_base(self, mesh: Mesh) -> Params:
        """The weights in the folder alone, laid out on the mesh."""
        _, shardings = split_adapter(self.config, param_shardings(self.model, mesh))
        return hf.load_params(self.path, without_adapter(self.config), shardings)

    def load_reference(self, mesh: Mesh, seed: int) -> Params:
        """The weights that training changes, as they were before: all weights, or an adapter that adds nothing yet."""
        return first_adapter(self.config, seed, param_shardings(self.model, mesh)) or self.load_base(mesh)

    def save_description(self, folder: Path) -> None:
        """Copies what the folder holds besides weights, so that a run can be exported even if its base policy moves."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DIGESTS).unlink(missing_ok=True)
        for name in ("config.json", "generation_config.json"):
            if (self.path / name).exists():
                shutil.copy(self.path / name, folder)
        self.tokenizer.save_pretrained(folder)
        write_digests(folder)


def find_model(path: str, download: bool = True) -> Path:
    """The local folder of a model that is given by its folder or, as `organisation/name`, by its name on the hub.

    Args:
      download: whether to download the model from the hub if it is not here yet.

    Raises:
      OSError: the model is not here and cannot be downloaded.
    """
    if Path(path).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return Path(path)
    try:
        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]  # templates and vocabularies, too
        return Path(snapshot_download(path, allow_patterns=patterns, local_files_only=not download))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise OSError(
            f"{path} is no folder, and cannot be downloaded ({first_line(error)}); correct model.path, or download "
            "the model elsewhere and give its folder."
        ) from error


def open_policy(path: Path, section: ModelSection, longest_sequence: int = 0, lora: LoraSection = NO_ADAPTER) -> Policy:
    """The policy in a Hugging Face folder, to be computed as the `model` section of the configuration says.

    Args:
      lora: the `lora` section, for a policy with an adapter.
      longest_sequence: the most tokens of a sequence that it is trained on, see ModelConfig.

    Raises:
      ValueError, FileNotFoundError: the folder is missing, damaged, or holds what this code cannot run.
    """
    check_digests(path)
    compute = {name: value for name, value in section.items() if name not in ("path", "stop_strings")}
    config = hf.read_config(path, longest_sequence=longest_sequence, **compute, **lora_fields(lora))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers and transformers raise many types, and few of them name the file
        raise ValueError(
            f"{path} has no tokenizer that can be read ({first_line(error)}); make or download the folder again."
        ) from error
    return Policy(path, config, abstract_model(config), tokenizer, _stop_ids(path, tokenizer, section.stop_strings))


def _stop_ids(path: Path, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> tuple[int, ...]:
    """The end-of-sequence tokens of generation_config.json and of the tokenizer, which differ for base models.

    Raises:
      ValueError: no token contains one of the strings.
    """
    file = path / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    listed: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    own = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    return tuple(sorted({*listed, *own, *stop_string_ids(tokenizer, strings)}))
