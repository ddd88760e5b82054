"""Runs the update of update_case.py with Tunix. Child process of update_peers.py.

Uses Tunix's model, PPO loss and jitted train step with the configuration of Tunix's PPO learner. As in that learner,
responses are padded to the fixed maximum, and the output head processes all tokens. Packing is not used, because Tunix
masks packed rows only with its TPU attention kernel.
"""

from typing import Any

import jax.numpy as jnp
import optax
import update_case
from tunix.models.qwen3.model import RematConfig  # pyright: ignore[reportMissingImports]
from tunix.models.qwen3.params import create_model_from_safe_tensors  # pyright: ignore[reportMissingImports]
from tunix.rl.algo_core import ppo_policy_loss_fn  # pyright: ignore[reportMissingImports]
from tunix.rl.common import TrainExample  # pyright: ignore[reportMissingImports]
from tunix.rl.ppo.ppo_learner import PPOConfig  # pyright: ignore[reportMissingImports]
from tunix.rl.trainer import Trainer  # pyright: ignore[reportMissingImports]
from tunix.sft.peft_trainer import TrainingConfig  # pyright: ignore[reportMissingImports]
from tunix_model import read_config

REMAT = RematConfig.NONE  # The fastest option.


def main() -> None:
    """Measures one case."""
    folder, case = update_case.model_and_case()
    model = create_model_from_safe_tensors(folder, read_config(folder, REMAT), dtype=jnp.float32)
    clip = optax.clip_by_global_norm(update_case.MAX_GRAD_NORM)
    rates = update_case.LEARNING_RATE, update_case.B1, update_case.B2, update_case.EPS
    optimizer = optax.chain(clip, optax.adamw(*rates, weight_decay=update_case.WEIGHT_DECAY))
    algorithm = PPOConfig(
        epsilon_low=update_case.CLIP_LOW, epsilon_high=update_case.CLIP_HIGH, entropy_coef=update_case.ENTROPY_COEF
    )
    trainer = Trainer(model, optimizer, TrainingConfig(eval_every_n_steps=1), custom_checkpoint_metadata_fn=dict)
    trainer.with_loss_fn(
        lambda model, train_example: ppo_policy_loss_fn(model, train_example, algorithm, pad_id=0, eos_id=-1),
        has_aux=True,
    )
    trainer.with_gen_model_input_fn(lambda example: {"train_example": example})
    train_step, _ = trainer.jit_train_and_eval_step(cache_nnx_graph=True)

    batch = update_case.random_batch(case)
    padded = {name: jnp.asarray(x) for name, x in batch.padded(update_case.MAX_RESPONSE).items()}
    example = TrainExample(
        prompt_ids=jnp.asarray(batch.prompts),
        prompt_mask=jnp.ones(batch.prompts.shape, bool),
        completion_ids=padded["responses"],
        completion_mask=padded["mask"],
        advantages=jnp.broadcast_to(jnp.asarray(batch.advantages)[:, None], padded["mask"].shape),
        ref_per_token_logps=None,
        old_per_token_logps=padded["old_logprobs"],
    )

    def step() -> dict[str, Any]:
        loss, metrics, gradient_norm = train_step(example)
        return {"loss": loss, "gradient_norm": gradient_norm, "entropy": metrics["loss/entropy"]}

    setting = f"padded to the maximum, head on all tokens, remat {REMAT.name}"
    update_case.report(case, batch, step, len(batch.prompts) * (update_case.PROMPT + update_case.MAX_RESPONSE), setting)


if __name__ == "__main__":
    main()
