"""Operators that SGLang imports for linear attention, and a replacement of its gated norm."""

from sglang.kernels.ops.attention.fla import layernorm_gated

from sgl_kernel.operators import causal_conv1d_fn_cpu, causal_conv1d_update_cpu, chunk_gated_delta_rule_cpu

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]


def _layernorm_fn(x, weight, bias, *, is_rms_norm, activation, **options):
    assert is_rms_norm and activation in ("swish", "silu")
    return layernorm_gated.rms_norm_ref(x, weight, bias, **options)


# Without AMX, SGLang would call a Triton kernel, which does not run on CPUs.
layernorm_gated.layernorm_fn = _layernorm_fn
