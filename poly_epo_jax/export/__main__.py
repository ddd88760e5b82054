"""Writes a trained policy as a Hugging Face folder: python -m poly_epo_jax.export RUN FOLDER [--step N]

A policy that was trained with LoRA is written whole, with its adapter merged; --adapter writes only the adapter, in
PEFT's format.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.export.model_card import model_card
from poly_epo_jax.model import hf
from poly_epo_jax.model.peft import save_adapter
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.trained_policy import base_name, open_trained_policy
from poly_epo_jax.system.signals import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code: 2 if there is nothing to export."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.export", description="Export a run's policy.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder to write; must not exist")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument(
        "--dtype",
        default="",
        choices=["bfloat16", "float32"],
        help="of the written weights; default: bfloat16, and float32 for an adapter",
    )
    parser.add_argument("--adapter", action="store_true", help="write the adapter alone, as PEFT reads it")
    parser.add_argument("--base", type=Path, help="the base policy of an adapter, if it is not where the run had it")
    options = parser.parse_args(arguments)
    dtype = options.dtype or ("float32" if options.adapter else "bfloat16")

    def work() -> None:
        export(options.run, options.folder, options.step, dtype, adapter=options.adapter, base=options.base)
        print(f"{'adapter' if options.adapter else 'policy'}: {options.folder}")

    return exit_code(work, after_ctrl_c="nothing is written; the same command starts again.")


def export(
    run: Path,
    folder: Path,
    step: int | None = None,
    dtype: str = "bfloat16",
    *,
    adapter: bool = False,
    base: Path | None = None,
) -> None:
    """Writes the policy of a run's checkpoint to `folder`: weights, tokenizer and model card.

    Args:
      adapter: write only its adapter.
      base: the base policy's folder, if a run with an adapter no longer finds it.

    Raises:
      FileNotFoundError: the run has no such checkpoint, or its base policy is gone.
      FileExistsError: `folder` exists already.
      CheckpointError: the checkpoint is damaged.
      ValueError: the run has no adapter.
    """
    policy, params, found = open_trained_policy(run, ModelSection(), make_mesh(1, 1, 1), step, base)
    card = model_card(run, found)
    if adapter:
        save_adapter(folder, params, policy.config, base_name(run, base), dtype, card)
        return
    described = {"eos_token_id": policy.stop_ids, "tokenizer": policy.tokenizer, "card": card}
    hf.save_pretrained(folder, params, policy.config, dtype=dtype, **described)


if __name__ == "__main__":
    sys.exit(main())
