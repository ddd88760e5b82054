"""Writes a trained policy as a Hugging Face folder: python -m poly_epo_jax.export RUN FOLDER [--step N]"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from poly_epo_jax.config import ModelSection
from poly_epo_jax.model import hf
from poly_epo_jax.model.sharding import make_mesh
from poly_epo_jax.policy import open_trained_policy


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code: 2 if there is nothing to export."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.export", description="Export a run's policy.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the Hugging Face folder to write; must not exist")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the written weights")
    options = parser.parse_args(arguments)
    try:
        export(options.run, options.folder, options.step, options.dtype)
    except KeyboardInterrupt:
        print("Ctrl-C: nothing is written; the same command begins anew.", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"policy: {options.folder}")
    return 0


def export(run: Path, folder: Path, step: int | None = None, dtype: str = "bfloat16") -> None:
    """Writes the policy of a run's checkpoint, weights and tokenizer, to `folder`.

    Raises:
      FileNotFoundError: the run has no such checkpoint.
      FileExistsError: `folder` is there already.
      CheckpointError: the checkpoint is damaged.
    """
    policy, params, _ = open_trained_policy(run, ModelSection(), make_mesh(1, 1, 1), step)
    stop_ids, tokenizer = policy.stop_ids, policy.tokenizer
    hf.save_pretrained(folder, params, policy.config, dtype=dtype, eos_token_id=stop_ids, tokenizer=tokenizer)


if __name__ == "__main__":
    sys.exit(main())
