"""Flags under which XLA compiles quickly, for processes that compile more than they compute."""

FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    # LLVM by itself compiles twice as fast as MLIR and LLVM; jaxlib 0.12 has no choice, and takes no notice.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
