"""SGLang servers and routers, and sglang-jax, which does not support weight updates."""
