"""Registers `rollouts.name=jetstream`, which runs the programs of the embedded sampler with JetStream's scheduler."""

from collections.abc import Sequence

from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.rollouts import SAMPLERS, SamplerEntry
from poly_epo_jax.types import Sampler


def open_jetstream(model: Transformer, mesh: Mesh, stop_ids: Sequence[int], config: Config) -> Sampler:
    """Returns a sampler that decodes on the mesh of this process with JetStream.

    Args:
      model: The policy. It may be abstract.
      mesh: Mesh of this process.
      stop_ids: Token ids that end a generation.
      config: Configuration of the run.

    Raises:
      ConfigError: If the supported version of google-jetstream is not installed.
    """
    from poly_epo_jetstream.engine import EngineSize
    from poly_epo_jetstream.sampler import JetStreamSampler  # A memory plan does not require google-jetstream.

    samples = config.train.num_generations
    slots = max(1, config.rollouts.max_concurrent // samples)
    size = EngineSize(slots, samples, config.train.max_prompt_tokens, config.sampling.max_tokens)
    return JetStreamSampler(model, mesh, stop_ids, size)


SAMPLERS["jetstream"] = SamplerEntry(open_jetstream, "JetStream", cache_growth=1.0)
