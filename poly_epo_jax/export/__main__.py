"""Exports a trained policy as a Hugging Face folder: python -m poly_epo_jax.export RUN FOLDER [--step N|best]

If the policy was trained with LoRA, its adapter is merged into the weights. With --adapter, only the adapter is
written, in the format of PEFT.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.export.model_card import model_card
from poly_epo_jax.model import hf
from poly_epo_jax.model.hf_files import language_tensor_names, open_tensors
from poly_epo_jax.model.peft import save_adapter
from poly_epo_jax.model.stop_strings import control_tokens
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import read_config
from poly_epo_jax.startup.trained_policy import base_folder, base_name, open_trained_policy
from poly_epo_jax.system.output_folder import user_path
from poly_epo_jax.system.signals import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None). Returns the exit code: 2 if the export fails."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.export", description="Export the trained policy of a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Hugging Face folder to create; must not exist")
    parser.add_argument(
        "--step",
        type=_step,
        help="step of the checkpoint, or best for the best step by checkpoint.best (default: the newest checkpoint)",
    )
    parser.add_argument(
        "--dtype",
        default="",
        choices=["bfloat16", "float32"],
        help="dtype of the written weights (default: bfloat16, or float32 for an adapter)",
    )
    parser.add_argument("--adapter", action="store_true", help="write only the adapter, in the format of PEFT")
    parser.add_argument("--base", type=user_path, help="folder of the base policy of an adapter, if it was moved")

    def work() -> None:
        options = parser.parse_args(arguments)
        export(
            options.run,
            options.folder,
            options.step,
            options.dtype or ("float32" if options.adapter else "bfloat16"),
            adapter=options.adapter,
            base=options.base,
        )
        print(f"{'adapter' if options.adapter else 'policy'}: {options.folder}")
        print(f"Upload it to the Hugging Face Hub with: hf upload USER/NAME {shlex.quote(str(options.folder))}")

    return exit_code(work, after_ctrl_c="nothing was written. Rerun the command to start over.")


def _step(text: str) -> int | Literal["best"]:
    return "best" if text == "best" else int(text)


def export(
    run: Path,
    folder: Path,
    step: int | Literal["best"] | None = None,
    dtype: str = "bfloat16",
    *,
    adapter: bool = False,
    base: Path | None = None,
) -> None:
    """Writes weights, tokenizer and model card of a checkpoint to a Hugging Face folder.

    The tokenizer files of the base policy are copied, because training does not change them. Stop strings that are
    control tokens become end-of-sequence tokens. The model card lists the other stop strings. If `adapter` is True, the
    folder contains neither tokenizer nor end-of-sequence tokens, and the model card lists all stop strings.

    Args:
      run: The run folder.
      folder: The folder to create.
      step: Step of the checkpoint, or "best" for the best step by `checkpoint.best`. If None, the newest checkpoint is
        exported.
      dtype: Dtype of the written weights.
      adapter: Whether to write only the LoRA adapter. If False, an adapter is merged into the weights.
      base: Folder of the base policy of an adapter. If None, the path that the run recorded is used.

    Raises:
      FileNotFoundError: If the run has no checkpoint of this step, or its base policy is missing.
      FileExistsError: If `folder` already exists.
      CheckpointError: If the checkpoint is corrupted or, with `step=None`, if all checkpoints are corrupted.
      ValueError: If `adapter` is True and the run has no adapter or the base policy lacks an adapted weight, or if
        another version of the package, with other configuration keys, trained the run.
    """
    policy, params, found = open_trained_policy(run, ModelSection(), make_mesh(1, 1, 1), step, base)
    if adapter and not policy.config.lora_targets:
        raise ValueError(f"{run} did not train an adapter; export it without --adapter.")
    strings = read_config(run)["model"]["stop_strings"]
    control = {} if adapter else control_tokens(policy.tokenizer, strings)
    card = model_card(run, found, [string for string in strings if string not in control])
    if adapter:
        save_adapter(
            folder,
            params,
            policy.config,
            base_name(run, base),
            dtype,
            card,
            language_tensor_names(open_tensors(base_folder(run, base))),
        )
        return
    pad_token_id = policy.tokenizer.pad_token_id
    assert isinstance(pad_token_id, int | None)
    hf.save_pretrained(
        folder,
        params,
        policy.config,
        dtype=dtype,
        eos_token_id=sorted({*policy.stop_ids, *control.values()}),
        pad_token_id=pad_token_id,
        tokenizer=policy.path,
        card=card,
    )


if __name__ == "__main__":
    sys.exit(main())
