"""Set reinforcement learning for language models in JAX (Poly-EPO)."""
