"""Flags that make XLA compile quickly, for processes that compile more than they compute."""

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # LLVM alone compiles twice as fast as MLIR with LLVM; jaxlib 0.12 offers no choice, and ignores this.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
