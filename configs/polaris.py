"""The main experiment of the paper: Qwen3-4B-Base on POLARIS-53K, with Qwen3-4B-Instruct as judge, on 4 x H200.

python -m poly_epo_jax.main --config=configs/polaris.py    (or :grpo, :dapo, :h200x8, :grpo,matched, :grpo,authors)

Requires running servers for the policy and the judge. `bash launch/node.sh` starts them and this command on one node,
and documents the use of each GPU. With a mesh of TPUs, the trainer generates, and `bash launch/tpu.sh` starts it. 850
steps of 1,024 responses are two epochs. docs/explanation/paper_and_code.md lists the configuration key of each
hyperparameter in the paper's table.
"""

from typing import Any

from ml_collections import ConfigDict

from poly_epo_jax.config import default
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.config.methods import METHOD_PRESETS

SEQUENCES_PER_CHIP = {"v4": 6, "v5e": 2, "v5p": 32, "v6e": 6}
"""Sequences that each chip of a TPU decodes at the same time. The cache of a sequence takes 1.3 GB while it grows."""

AUTHORS = {
    "algo.length_normalization": "max",
    "algo.loss_options.dual_clip": 3.0,
    "optimizer.weight_decay": 0.01,
    "judge.url": "https://generativelanguage.googleapis.com/v1beta/openai",
    "judge.model": "gemini-2.0-flash",
    "judge.api_key_env": "GEMINI_API_KEY",
    "judge.max_concurrent": 32,
    "judge.on_failure": "distinct",
    "judge.max_failed_fraction": 1.0,
    "judge.options.temperature": 0.0,
    "judge.options.send_seed": False,
    "judge.options.max_tokens": 8192,  # the model's limit
    "judge.options.response_format": "json_object",
    "judge.options.single_message": True,
    "judge.options.rationale_key": "chain_of_thought",
    "judge.options.cluster_key": "cluster_id",
    "judge.options.max_response_chars": 10**7,  # responses are not shortened
}
"""Keys, apart from the clip range, whose values in the authors' scripts for Poly-EPO and GRPO differ from this file."""

MATCHED = {"algo.length_normalization": "max", "judge.on_failure": "drop_always"}
"""Keys with which the methods differ only in their advantages, and are trained on the same prompts and responses."""

COMPARISONS: dict[str, dict[str, dict[str, Any]]] = {
    "authors": {
        "poly_epo": {**AUTHORS, "algo.clip_high": 0.28},
        "grpo": {**AUTHORS, "algo.clip_high": 0.20},
    },
    # The advantages of DAPO are those of GRPO, so its matched form would be grpo.
    "matched": {method: MATCHED for method in METHOD_PRESETS if method != "dapo"},
}
"""Keys that a comparison changes, by the names of the comparison and of the method.

authors: The comparison of the authors' scripts, except for the texts of the prompts for policy and judge.
matched: The comparison of advantages alone.
"""


def get_config(config_string: str = "poly_epo") -> ConfigDict:
    """Returns the configuration. `config_string` names a method, a machine and a comparison, separated by commas."""
    config = default.get_config(config_string, comparison=COMPARISONS)
    method, mesh, comparison = default.parse_config_string(config_string, comparison=COMPARISONS)
    changes = COMPARISONS[comparison].get(method) if comparison else {}
    if changes is None:
        reason = {
            "authors": f"the authors' published files do not contain both the estimator and a script of {method}",
            "matched": f"the advantages of {method} are those of grpo",
        }[comparison]
        raise ValueError(
            f"':{config_string}' is not available, because {reason}; choose "
            f"{' or '.join(COMPARISONS[comparison])}, or another comparison."
        )
    config.workdir = "-".join(filter(None, ("runs/polaris", comparison, method)))

    config.model.path = "Qwen/Qwen3-4B-Base"
    # The prompt is a chat turn. Base models may end their turn with either token.
    config.model.stop_strings = ("<|im_end|>", "<|endoftext|>")
    config.model.dtype = "bfloat16"
    config.model.remat = "auto"
    config.model.scan_unroll = 1

    config.task.name = "math"
    config.task.options.train = "POLARIS-Project/Polaris-Dataset-53K"

    config.judge.name = "llm"
    config.judge.url = "http://127.0.0.1:30010"  # Qwen/Qwen3-4B-Instruct-2507
    config.audit.every = 20

    if sequences := SEQUENCES_PER_CHIP.get(config.mesh.device_kind):  # the embedded sampler of each host generates
        config.rollouts.max_concurrent = sequences * MESHES[mesh]["num_devices"] // MESHES[mesh]["processes"]
    else:
        config.rollouts.name = "sglang"
        config.rollouts.urls = "http://127.0.0.1:30000,http://127.0.0.1:30001,http://127.0.0.1:30002"
        config.rollouts.max_concurrent = 352  # 128 x 8 responses on three servers, with some slack for imbalance

    config.sampling.max_tokens = 4096
    config.train.max_prompt_tokens = 1024
    config.train.num_steps = 850
    config.train.prompts_per_batch = 128
    config.train.prompts_per_minibatch = 64
    # A row of 16,384 tokens fits three sequences of the maximum length of 5,120 tokens, or more shorter ones.
    config.train.row_tokens = 16_384
    config.train.rows_per_device = 1
    config.optimizer.learning_rate = 1e-6
    config.optimizer.schedule = "constant"
    config.optimizer.end_lr_fraction = 0.0

    config.eval.every = 0  # set it together with task.options.held_out
    config.checkpoint.every = 25
    config.log.generations_every = 1
    config.update_from_flattened_dict(changes)
    return config
