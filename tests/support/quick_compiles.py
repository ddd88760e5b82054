"""XLA flags for fast compilation, for processes whose compilation takes longer than their computations."""

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # LLVM alone compiles twice as fast as MLIR with LLVM. jaxlib 0.12 ignores this option.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
