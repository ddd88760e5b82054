"""The sampler outside the trainer: SGLang servers."""
