"""Meshes by the names of machines, chosen by a word after the configuration file: --config=configs/polaris.py:h200x8

`device` is the kind of the devices and `devices` their number. For TPUs these are chips, but a v5p slice is named by
its cores, two to a chip. `processes` is the number of hosts that run the command. config.py explains the rest.
"""

MESHES = {
    "laptop": {"device": "cpu", "devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "rtx4090x1": {"device": "rtx4090", "devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "h100x1": {"device": "h100", "devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "h200x1": {"device": "h200", "devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "h200x2": {"device": "h200", "devices": 2, "processes": 1, "data": 1, "fsdp": 2, "tensor": 1},
    "h200x4": {"device": "h200", "devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "h200x8": {"device": "h200", "devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    # Two nodes of eight: weights are gathered within a node, and only gradients pass between the nodes.
    "h200x16": {"device": "h200", "devices": 16, "processes": 2, "data": 2, "fsdp": 8, "tensor": 1},
    "v5p-8": {"device": "v5p", "devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v5p-16": {"device": "v5p", "devices": 8, "processes": 2, "data": 1, "fsdp": 8, "tensor": 1},
    "v5p-32": {"device": "v5p", "devices": 16, "processes": 4, "data": 1, "fsdp": 16, "tensor": 1},
    "v5p-64": {"device": "v5p", "devices": 32, "processes": 8, "data": 1, "fsdp": 32, "tensor": 1},
    "v6e-1": {"device": "v6e", "devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "v6e-4": {"device": "v6e", "devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v6e-8": {"device": "v6e", "devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    "v6e-16": {"device": "v6e", "devices": 16, "processes": 4, "data": 1, "fsdp": 16, "tensor": 1},
    "v6e-32": {"device": "v6e", "devices": 32, "processes": 8, "data": 1, "fsdp": 32, "tensor": 1},
    "v6e-64": {"device": "v6e", "devices": 64, "processes": 16, "data": 1, "fsdp": 64, "tensor": 1},
}

_TPU_OPTIONS: dict[str, bool | str] = {
    # By default a large gather becomes a ring of partial products, which on eight chips are too thin to fill a matrix
    # unit: by XLA's own estimate a forward layer of Qwen3-4B takes 20.0 ms with it on a v6e-8, and 8.6 ms without.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
}
# Updates wait for gathers of weights: 2% of an update, by arithmetic. xla_tpu_enable_async_collective_fusion would
# overlap them with products. But newer compilers refuse it on all TPUs except the v5e, because results may be wrong,
# and together with splash it was seen to make NaN on a v6e (jax-ml/jax#38741).

COMPILER_OPTIONS: dict[str, dict[str, bool | str]] = {"v5p": _TPU_OPTIONS, "v6e": _TPU_OPTIONS}
"""XLA's options by device, where its defaults lose time on the programs of an update."""
