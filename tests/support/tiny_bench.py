"""Configuration with which the bench runs in seconds."""

TINY = {
    "train.prompts_per_batch": 4,
    "train.prompts_per_minibatch": 2,
    "train.num_generations": 4,
    "algo.set_size": 2,
    "train.rows_per_device": 2,
    "rollouts.max_concurrent": 8,
    "base.hidden_size": 16,
    "base.mlp_size": 32,
}
