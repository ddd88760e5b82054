"""Strict tests: shapes and types are checked at run time, rank promotion and warnings are errors."""

import os

# Eight CPU devices, for the meshes; set before jax is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
from jaxtyping import install_import_hook

install_import_hook("poly_epo_jax", "beartype.beartype")
jax.config.update("jax_numpy_rank_promotion", "raise")
