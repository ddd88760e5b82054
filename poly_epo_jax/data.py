"""The order in which prompts are seen: reshuffled every epoch, with a position that a checkpoint can hold."""

from collections.abc import Sequence

import grain
from grain import DatasetIterator

from poly_epo_jax.types import Problem


def problem_batches(problems: Sequence[Problem], batch_size: int, seed: int) -> DatasetIterator[list[Problem]]:
    """Endless batches of problems; `get_state()` and `set_state()` move its exact position in and out.

    Raises:
      ValueError: there are fewer problems than a batch takes.
    """
    if batch_size > len(problems):
        raise ValueError(
            f"A batch takes {batch_size} prompts, but there are only {len(problems)} training problems; lower "
            "train.prompts_per_batch or use more problems."
        )
    # Grain's own "without end" is 2^63 - 1 problems, which overflows for batches of one.
    epochs = grain.MapDataset.source(problems).shuffle(seed=seed).repeat(10**9)
    dataset = epochs.batch(batch_size, batch_fn=list)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
