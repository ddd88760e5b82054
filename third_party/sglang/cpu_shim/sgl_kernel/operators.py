"""Operators of Qwen3.5 in PyTorch, under the names that SGLang calls. They support float32, which those for AMX do not.

The tokens T of all sequences are concatenated. `cu_seqlens` are the indices of the first token of each sequence,
followed by T. States are stored in pools with one slot per sequence, and are updated in place.
"""

import torch
import torch.nn.functional as F


def causal_conv1d_fn_cpu(
    x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc, seq_lens_cpu
):
    """Computes the convolution of prompts, x [C, T] -> [C, T], and stores their last inputs."""
    outputs, width = [], weight.shape[1] - 1
    for part, slot, continues in zip(x.split(list(seq_lens_cpu), dim=1), cache_indices, has_initial_state, strict=True):
        read = torch.cat([conv_states[slot].to(x.dtype) * continues, part], dim=1)
        outputs.append(_convolve(read[None], weight, bias, activation)[0])
        conv_states[slot] = read[:, read.shape[1] - width :].to(conv_states.dtype)
    return torch.cat(outputs, dim=1)


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, *, conv_state_indices):
    """Computes the convolution of one token per sequence, x [B, C] -> [B, C]."""
    read = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[..., None]], dim=2)
    conv_states[conv_state_indices] = read[..., 1:].to(conv_states.dtype)
    return _convolve(read, weight, bias, activation)[..., 0]


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """Returns the log-decays and the betas [1, T, H] of all tokens."""
    return (-A_log.float().exp() * F.softplus(a.float() + dt_bias.float()))[None], b.sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *, q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, head_first, use_qk_l2norm_in_kernel
):
    """Applies the gated delta rule to sequences, one token after the other.

    Returns:
      A tuple of the outputs [1, T, H, V], and None for the states, which are stored in the pool [slots, H, V, K].
    """
    assert use_qk_l2norm_in_kernel and not head_first
    repeats = v.shape[2] // k.shape[2]
    q, k = (x[0].float().repeat_interleave(repeats, dim=1) for x in (q, k))
    q, k = (x * (x.square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, v, decay, beta = q * q.shape[-1] ** -0.5, v[0].float(), g[0].exp()[..., None, None], beta[0].float()[..., None]
    y = torch.empty_like(v)
    for slot, start, end in zip(initial_state_indices, cu_seqlens[:-1], cu_seqlens[1:], strict=False):
        state = initial_state[slot].float()
        for t in range(start, end):
            state = state * decay[t]
            change = beta[t] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
            state = state + change[..., None] * k[t][..., None, :]
            y[t] = torch.einsum("hvk,hk->hv", state, q[t])
        initial_state[slot] = state.to(initial_state.dtype)
    return y[None], None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log,
    dt_bias,
    q,
    k,
    v,
    a,
    b,
    initial_state_source,
    initial_state_indices,
    cu_seqlens,
    use_qk_l2norm_in_kernel,
    softplus_beta,
    softplus_threshold,
):
    """Applies the gated delta rule to one token per sequence. See `chunk_gated_delta_rule_cpu`."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        initial_state=initial_state_source,
        initial_state_indices=initial_state_indices,
        cu_seqlens=cu_seqlens,
        head_first=False,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )[0]


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, num_heads_qk, num_heads_v, head_qk, head_v):
    """Splits the projections into queries, keys and values [T, C], output gates [T, H, V], and both inputs of gates."""
    qkv, z = qkvz.split([2 * num_heads_qk * head_qk + num_heads_v * head_v, num_heads_v * head_v], dim=-1)
    b, a = ba.chunk(2, dim=-1)
    return qkv, z.reshape(-1, num_heads_v, head_v), b, a


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, num_heads):
    """Splits queries and gates, and normalizes queries and keys. Returns queries, keys and gates, each [T, H * D]."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = (
        F.rms_norm(x, (head_dim,), 1 + weight, eps).flatten(1)
        for x, weight in ((q, q_weight), (k.reshape(len(q), -1, head_dim), k_weight))
    )
    return q, k, gate.flatten(1)


def fused_sigmoid_mul_cpu(x, gate):
    """Multiplies x by the sigmoid of the gate in place."""
    x.mul_(gate.sigmoid())


def _convolve(read, weight, bias, activation):
    y = F.conv1d(read, weight[:, None], bias, groups=len(weight))
    return F.silu(y) if activation == "silu" else y


for _function in (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _function.__name__, _function)
# SGLang reads this name, but only calls it for models without output gates.
torch.ops.sgl_kernel.fused_qk_gemma_rmsnorm_cpu = None
