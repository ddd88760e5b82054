"""Meshes of named machines. A name after the configuration file selects one: --config=configs/polaris.py:h200x8

`device_kind` is the device kind and `num_devices` the number of devices. On TPUs, a device is a chip, while v4 and v5p
slices are named after their number of cores, two per chip. `processes` is the number of processes, one per host. The
other keys are documented in config/keys.py.
"""

MESHES = {
    "laptop": {"device_kind": "cpu", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "rtx4090x1": {"device_kind": "rtx4090", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "rtx5090x1": {"device_kind": "rtx5090", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "l4x1": {"device_kind": "l4", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "a100-40x1": {"device_kind": "a100-40", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "a100-80x1": {"device_kind": "a100-80", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "a100-80x8": {"device_kind": "a100-80", "num_devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    "h100x1": {"device_kind": "h100", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "h100x8": {"device_kind": "h100", "num_devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    "h200x1": {"device_kind": "h200", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "h200x2": {"device_kind": "h200", "num_devices": 2, "processes": 1, "data": 1, "fsdp": 2, "tensor": 1},
    "h200x4": {"device_kind": "h200", "num_devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "h200x8": {"device_kind": "h200", "num_devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    # Two nodes with eight GPUs each: weights are gathered within a node, and only gradients are sent between nodes.
    "h200x16": {"device_kind": "h200", "num_devices": 16, "processes": 2, "data": 2, "fsdp": 8, "tensor": 1},
    "v4-8": {"device_kind": "v4", "num_devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v5e-1": {"device_kind": "v5e", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "v5e-4": {"device_kind": "v5e", "num_devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v5e-8": {"device_kind": "v5e", "num_devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    "v5e-16": {"device_kind": "v5e", "num_devices": 16, "processes": 4, "data": 1, "fsdp": 16, "tensor": 1},
    "v5e-64": {"device_kind": "v5e", "num_devices": 64, "processes": 16, "data": 1, "fsdp": 64, "tensor": 1},
    "v5p-8": {"device_kind": "v5p", "num_devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v5p-16": {"device_kind": "v5p", "num_devices": 8, "processes": 2, "data": 1, "fsdp": 8, "tensor": 1},
    "v5p-32": {"device_kind": "v5p", "num_devices": 16, "processes": 4, "data": 1, "fsdp": 16, "tensor": 1},
    "v5p-64": {"device_kind": "v5p", "num_devices": 32, "processes": 8, "data": 1, "fsdp": 32, "tensor": 1},
    "v6e-1": {"device_kind": "v6e", "num_devices": 1, "processes": 1, "data": 1, "fsdp": 1, "tensor": 1},
    "v6e-4": {"device_kind": "v6e", "num_devices": 4, "processes": 1, "data": 1, "fsdp": 4, "tensor": 1},
    "v6e-8": {"device_kind": "v6e", "num_devices": 8, "processes": 1, "data": 1, "fsdp": 8, "tensor": 1},
    "v6e-16": {"device_kind": "v6e", "num_devices": 16, "processes": 4, "data": 1, "fsdp": 16, "tensor": 1},
    "v6e-32": {"device_kind": "v6e", "num_devices": 32, "processes": 8, "data": 1, "fsdp": 32, "tensor": 1},
    "v6e-64": {"device_kind": "v6e", "num_devices": 64, "processes": 16, "data": 1, "fsdp": 64, "tensor": 1},
}
