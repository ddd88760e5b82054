"""The sampler inside the trainer."""
