"""Replaces the CPU build of `sgl_kernel`, which is not available as a wheel.

SGLang imports these names when it starts on CPU. Only the first function is called during normal serving; the others
are used by speculative decoding. The operators of Qwen3.5 are in `operators.py`.
`torch.ops.sgl_kernel.convert_weight_packed` must remain undefined, because SGLang would otherwise assume the build for
AMX.
"""

from sgl_kernel import operators as operators

__version__ = "0.0.0+cpustub"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    offset = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[offset : offset + end - start].to(req_to_token.dtype)
        offset += end - start


def _missing(name):
    def function(*arguments, **keywords):
        raise NotImplementedError(f"sgl_kernel.{name} is not implemented by the replacement for CPU tests.")

    function.__name__ = name
    return function


for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
    "build_tree_kernel_efficient_cpu",
):
    globals()[_name] = _missing(_name)
