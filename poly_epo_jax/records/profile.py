"""Records a trace of some training steps with the profiler of JAX, for TensorBoard and Perfetto."""

from pathlib import Path

import jax

from poly_epo_jax.parallel import hosts
from poly_epo_jax.records.run_folder import TENSORBOARD


class StepProfiler:
    """Traces consecutive steps on the first process. Other processes write no traces.

    Python calls are not traced, because they would be most of the trace and slow down the steps.

    Args:
      steps: Value of `train.profile_steps`.
      workdir: Run folder. Traces are written to its TensorBoard folder.
    """

    def __init__(self, steps: str, workdir: Path):
        first, _, last = steps.partition(":")
        self._steps = range(int(first), int(last) + 1) if steps and hosts.is_first() else range(0)
        self._folder, self._is_tracing = workdir / TENSORBOARD, False

    def start_step(self, step: int) -> None:
        """Starts the trace if the step is the first of the steps that are still to be traced, and stops it after them.

        Args:
          step: The step that starts. 0 stops the trace.
        """
        if (step in self._steps) == self._is_tracing:
            return
        self._is_tracing = not self._is_tracing
        if self._is_tracing:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
        else:
            jax.profiler.stop_trace()
