"""Runs the update of update_case.py with this package, which packs sequences. Child process of update_peers.py."""

import functools

import numpy as np
import update_case
from flax import nnx

from poly_epo_jax.config.keys import OptimizerSection
from poly_epo_jax.model.hf import load_params, read_model_config
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.set_rl import ppo_clip_loss
from poly_epo_jax.step.objective import UpdateObjective
from poly_epo_jax.step.packing import TrainingSequence, pack
from poly_epo_jax.step.update import PolicyUpdate

# (rows per microbatch, tokens per row): the fastest values that need less memory than both baselines.
MICROBATCH = {"full": (4, 512), "lognormal": (1, 2432)}
REMAT = "dots"


def main() -> None:
    """Measures one case."""
    folder, case = update_case.model_and_case()
    config = read_model_config(folder, dtype="float32", remat=REMAT)
    optimizer = OptimizerSection(
        learning_rate=update_case.LEARNING_RATE,
        schedule="constant",
        end_lr_fraction=0.0,
        b1=update_case.B1,
        b2=update_case.B2,
        eps=update_case.EPS,
        weight_decay=update_case.WEIGHT_DECAY,
        max_grad_norm=update_case.MAX_GRAD_NORM,
    )
    update = PolicyUpdate(
        nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))),
        make_mesh(1, 1, 1),
        UpdateObjective(
            functools.partial(ppo_clip_loss, clip_low=update_case.CLIP_LOW, clip_high=update_case.CLIP_HIGH),
            entropy_coef=update_case.ENTROPY_COEF,
        ),
        optimizer,
        total_updates=1,
    )
    state = update.init(load_params(folder, config))

    batch = update_case.random_batch(case)
    rows, row_tokens = MICROBATCH[case]
    masks = [np.ones(len(response), bool) for response in batch.responses]
    columns = zip(batch.prompts, batch.responses, batch.old_logprobs, masks, batch.advantages.tolist(), strict=True)
    sequences = [TrainingSequence(*row, weight=1 / batch.response_tokens) for row in columns]
    # The batch's old log-probabilities are packed as sampler log-probabilities, and then used as old log-probabilities.
    minibatch = [
        packed._replace(old_logprobs=packed.sampler_logprobs, on_policy=np.array(False))
        for packed in pack(sequences, row_tokens, rows)
    ]

    def step() -> dict[str, float]:
        nonlocal state
        state, metrics = update(state, [minibatch])
        return {name: metrics[f"policy/{name}"] for name in ("loss", "gradient_norm", "entropy")}

    setting = f"{len(minibatch)} microbatches of {rows} x {row_tokens}, remat {REMAT}"
    update_case.report(case, batch, step, sum(packed.tokens.size for packed in minibatch), setting)


if __name__ == "__main__":
    main()
