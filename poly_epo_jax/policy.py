"""A policy is model, weights, tokenizer and stop tokens: those of a Hugging Face folder, or of a run's checkpoint."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from flax import nnx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError
from jax.sharding import Mesh
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poly_epo_jax.checkpoint import Checkpoints
from poly_epo_jax.config import ModelSection
from poly_epo_jax.digests import DIGESTS, check_digests, write_digests
from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.qwen3 import Qwen3, abstract_model
from poly_epo_jax.model.sharding import param_shardings
from poly_epo_jax.run_folder import CHECKPOINTS, POLICY, read_config
from poly_epo_jax.types import Params


@dataclasses.dataclass
class Policy:
    """A model's structure, without weights, and what turns text into its tokens."""

    path: Path
    config: ModelConfig
    model: Qwen3
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]

    def load_params(self, mesh: Mesh) -> Params:
        """The weights in the folder, laid out on the mesh."""
        return hf.load_params(self.path, self.config, param_shardings(self.model, mesh))

    def save_description(self, folder: Path) -> None:
        """Copies what the folder holds besides weights, so that a run can be exported wherever its base policy went."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DIGESTS).unlink(missing_ok=True)
        for name in ("config.json", "generation_config.json"):
            if (self.path / name).exists():
                shutil.copy(self.path / name, folder)
        self.tokenizer.save_pretrained(folder)
        write_digests(folder)


def find_model(path: str) -> Path:
    """The local folder of a model that is named by its folder or, as `organisation/name`, by its place on the hub.

    Raises:
      OSError: it is neither here nor to be had from there.
    """
    if Path(path).is_dir() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        return Path(path)
    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.txt"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise OSError(
            f"{path} is no folder, and cannot be downloaded ({_first_line(error)}); correct model.path, or download "
            "the model elsewhere and give its folder."
        ) from error


def open_policy(path: Path, section: ModelSection) -> Policy:
    """The policy in a Hugging Face folder, computed with as the `model` section of the configuration says.

    Raises:
      ValueError, FileNotFoundError: the folder is missing, damaged, or holds what this code cannot run.
    """
    check_digests(path)
    compute = {name: value for name, value in section.items() if name not in ("path", "stop_tokens")}
    config = hf.read_config(path, **compute)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # tokenizers and transformers have many kinds, and few that say which file it is
        raise ValueError(
            f"{path} has no tokenizer that can be read ({_first_line(error)}); make or download the folder again."
        ) from error
    return Policy(path, config, abstract_model(config), tokenizer, _stop_ids(path, tokenizer, section.stop_tokens))


def open_trained_policy(
    run: Path, section: ModelSection, mesh: Mesh, step: int | None = None
) -> tuple[Policy, Params, int]:
    """The policy of a run folder, its weights at `step` (None: the newest checkpoint) laid out on the mesh, that step.

    Args:
      section: the `model` section of a configuration: how to compute.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      CheckpointError: it is damaged; or, where it is the newest, all are.
    """
    if not (run / CHECKPOINTS).is_dir():
        raise FileNotFoundError(f"{run} has no checkpoints; give the run folder of a training run.")
    checkpoints = Checkpoints(run / CHECKPOINTS, read_only=True)
    policy = open_policy(run / POLICY, section)
    abstract, shardings = nnx.to_pure_dict(nnx.split(policy.model)[1]), param_shardings(policy.model, mesh)
    trainable = read_config(run)["train"]["trainable"]

    def restore(step: int) -> Params:
        return checkpoints.restore_params(step, abstract, shardings, trainable)

    if step in checkpoints.steps:
        return policy, restore(step), step
    newest = checkpoints.newest(restore) if step is None else None
    if newest is None:
        raise FileNotFoundError(f"{run} has no checkpoint of step {step}; it has those of {checkpoints.steps}.")
    return policy, newest[1], newest[0]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _stop_ids(path: Path, tokenizer: PreTrainedTokenizerBase, more: Sequence[str]) -> tuple[int, ...]:
    """The end-of-sequence tokens of generation_config.json and of the tokenizer, which differ for base models.

    Raises:
      ValueError: one of `more` is no token.
    """
    vocabulary = tokenizer.get_vocab()
    for token in more:
        if token not in vocabulary:
            raise ValueError(f"model.stop_tokens: {token!r} is no token of {path}; leave it out, or correct it.")
    file = path / "generation_config.json"
    eos = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
    listed: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    own = [tokenizer.eos_token_id] if isinstance(tokenizer.eos_token_id, int) else []
    return tuple(sorted({*listed, *own, *(vocabulary[token] for token in more)}))
