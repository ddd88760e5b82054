"""Former names of configuration keys and command-line flags. Error messages about a former name state the new name."""

RENAMED = {
    "compilation_cache": "compilation_cache_dir",
    "algo.div_coef": "algo.diversity_coef",
    "algo.max_mismatch": "algo.max_mismatch_ratio",
    "hosts.coordinator": "hosts.coordinator_address",
    "hosts.count": "hosts.num_processes",
    "hosts.index": "hosts.process_id",
    "hosts.wait_seconds": "hosts.init_timeout_seconds",
    "judge.max_failed_share": "judge.max_failed_fraction",
    "mesh.device": "mesh.device_kind",
    "mesh.devices": "mesh.num_devices",
    "optimizer.final_fraction": "optimizer.end_lr_fraction",
    "rollouts.shared": "rollouts.shared_servers",
    "rollouts.turn_timeout_seconds": "rollouts.episode_timeout_seconds",
    "train.trainable": "train.trainable_pattern",
    "--compile-for": "--compile_for",
    "--judge": "--cluster",
    "--layers": "--num_layers",
    "--parallel": "--num_parallel",
    "--plans": "--plan_all_meshes",
}
