"""The samplers that produce generations: what each can do, and how to open it."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.model.qwen3 import Qwen3
from poly_epo_jax.parallel import hosts
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.client import SGLangSampler
from poly_epo_jax.rollouts.servers.dialect import ServedModel
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync, TensorSync
from poly_epo_jax.rollouts.sglang import SGLANG
from poly_epo_jax.types import Registry, Sampler

WEIGHT_SYNCS = ("disk", "tensor")


def _embedded(model: Qwen3, mesh: Mesh, stop_ids: Sequence[int], config: Config) -> Sampler:
    return open_weights(model, mesh, stop_ids, config, config.train.max_prompt_tokens)


def _jetstream(model: Qwen3, mesh: Mesh, stop_ids: Sequence[int], config: Config) -> Sampler:
    from poly_epo_jax.rollouts.jetstream.engine import EngineSize
    from poly_epo_jax.rollouts.jetstream.sampler import JetStreamSampler  # google-jetstream is optional

    samples = config.train.num_generations
    slots = max(1, config.rollouts.max_concurrent // samples)
    size = EngineSize(slots, samples, config.train.max_prompt_tokens, config.sampling.max_tokens)
    return JetStreamSampler(model, mesh, stop_ids, size)


def _sglang(model: Qwen3, mesh: Mesh, stop_ids: Sequence[int], config: Config, *, sleep: bool = False) -> SGLangSampler:
    if sleep and config.train.staleness:
        raise ConfigError("rollouts.options.sleep=True lets no server generate meanwhile; set train.staleness=0.")
    section, longest = config.rollouts, config.train.max_prompt_tokens
    if section.shared and not hosts.is_first():
        sync = None
    elif section.weight_sync == "disk":
        run = f"{Path(config.workdir).absolute()} {hosts.index()}"
        sync = DiskSync(Path(section.weights_dir), run, model.config, section.weights_dtype)
    else:
        sync = TensorSync(model.config, section.weights_dtype, section.tensor_parallel)
    weights = ServedWeights(sync, longest, section.timeout_seconds, section.wait_seconds, sleeps=sleep)
    urls = [url.strip() for url in section.urls.split(",") if url.strip()]
    return _client(urls, weights, model, stop_ids, config)


def _client(
    urls: Sequence[str],
    weights: ServedWeights | AdoptedWeights,
    model: Qwen3,
    stop_ids: Sequence[int],
    config: Config,
) -> SGLangSampler:
    return SGLangSampler(
        urls,
        weights,
        stop_ids,
        vocab_size=model.config.vocab_size,
        max_concurrent=config.rollouts.max_concurrent,
        timeout_seconds=config.rollouts.timeout_seconds,
    )


def open_weights(model: Qwen3, mesh: Mesh, stop_ids: Sequence[int], config: Config, max_prompt_tokens: int) -> Sampler:
    """Returns a sampler for evaluating local weights; it takes prompts of up to `max_prompt_tokens`."""
    return EmbeddedSampler(model, mesh, stop_ids, max_prompt_tokens, config.rollouts.max_concurrent)


async def served_model(url: str) -> ServedModel:
    """What a server reports about its model.

    Raises:
      httpx.HTTPError: the server does not report it.
    """
    return await SGLANG.served_model(url)


def open_server(url: str, model: Qwen3, stop_ids: Sequence[int], config: Config) -> Sampler:
    """Returns a sampler for evaluating whatever weights a server of this model has."""
    return _client([url], AdoptedWeights(config.rollouts.wait_seconds), model, stop_ids, config)


@dataclasses.dataclass(frozen=True)
class SamplerEntry:
    """A sampler that training can use.

    Args:
      open: (model, mesh, stop_ids, config, **options) -> sampler; the model may be abstract, the mesh is this host's.
      title: its name in prose.
      needs_urls: whether its servers must be listed in rollouts.urls.
      while_training: whether it can generate while the policy is trained (train.staleness).
      cache_growth: if it decodes in the trainer's memory, the most that its caches take while they grow, as a multiple
        of full-length caches; None if it decodes elsewhere.
      has_slots: whether it decodes in `embedded.slots`, the only decoder that bench times.
    """

    open: Callable[..., Sampler]
    title: str
    needs_urls: bool = False
    while_training: bool = False
    cache_growth: float | None = None
    has_slots: bool = False


SAMPLERS: Registry[SamplerEntry] = Registry(
    # The last time it grows, a cache of three quarters of the full length is copied into one of full length.
    embedded=SamplerEntry(_embedded, "the trainer's own sampler", cache_growth=1.75, has_slots=True),
    jetstream=SamplerEntry(_jetstream, "JetStream", cache_growth=1.0),
    sglang=SamplerEntry(_sglang, "SGLang servers", needs_urls=True, while_training=True),
)
