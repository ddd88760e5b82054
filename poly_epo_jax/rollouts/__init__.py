"""Registry of the samplers that training can use, and constructors of samplers for evaluation."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jax.sharding import Mesh

from poly_epo_jax.config.keys import Config, ConfigError, max_sequence_tokens
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.transformer import Transformer
from poly_epo_jax.parallel import hosts
from poly_epo_jax.registry import Registry
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.servers.adopted_weights import AdoptedWeights
from poly_epo_jax.rollouts.servers.client import ServerSampler
from poly_epo_jax.rollouts.servers.content_check import ContentCheck
from poly_epo_jax.rollouts.servers.dialect import Dialect, ModelInfo
from poly_epo_jax.rollouts.servers.served_weights import ServedWeights
from poly_epo_jax.rollouts.servers.weight_reference import WeightReference
from poly_epo_jax.rollouts.servers.weight_sync import DiskSync
from poly_epo_jax.rollouts.sglang.dialect import SGLANG, check_network
from poly_epo_jax.rollouts.sglang.tensor_sync import TensorSync
from poly_epo_jax.rollouts.vllm import VLLM
from poly_epo_jax.types import Sampler

WEIGHT_SYNCS = ("disk", "tensor")


def _embedded(model: Transformer, mesh: Mesh, stop_ids: Sequence[int], config: Config) -> Sampler:
    train, most = config.train, config.rollouts.max_concurrent
    full_batch = train.prompts_per_batch * train.num_generations if train.refill else 0
    return EmbeddedSampler(model, mesh, stop_ids, train.max_prompt_tokens, most, full_batch)


def _sglang(
    model: Transformer, mesh: Mesh, stop_ids: Sequence[int], config: Config, *, sleep: bool = False
) -> ServerSampler:
    if sleep and config.train.staleness:
        raise ConfigError(
            f"rollouts.options.sleep=True does not support train.staleness={config.train.staleness}; set "
            "train.staleness=0."
        )
    return _trained_client(SGLANG, model, mesh, stop_ids, config, sleep)


def _vllm(model: Transformer, mesh: Mesh, stop_ids: Sequence[int], config: Config) -> ServerSampler:
    if config.rollouts.weight_sync != "disk":
        raise ConfigError(
            f"rollouts.weight_sync={config.rollouts.weight_sync!r} does not support rollouts.name='vllm'; set "
            "rollouts.weight_sync=disk."
        )
    return _trained_client(
        _vllm_dialect(config, model.config.vocab_size, config.train.max_prompt_tokens), model, mesh, stop_ids, config
    )


def _vllm_dialect(config: Config, vocab_size: int = 0, max_prompt_tokens: int = 0) -> VLLM:
    return VLLM(vocab_size, max_prompt_tokens + config.sampling.max_tokens, config.sampling.temperature)


def _trained_client(
    dialect: Dialect, model: Transformer, mesh: Mesh, stop_ids: Sequence[int], config: Config, sleeps: bool = False
) -> ServerSampler:
    section = config.rollouts
    if dialect is SGLANG:
        check_network(model.config, max_sequence_tokens(config))
    if section.shared_servers and not hosts.is_first():
        sync = None
    elif section.weight_sync == "disk":
        run = f"{Path(config.workdir).absolute()} {hosts.index()}"
        sync = DiskSync(Path(section.weights_dir), run, model.config, section.weights_dtype)
    else:
        sync = TensorSync(model.config, section.weights_dtype, section.tensor_parallel)
    check = ContentCheck(
        dialect,
        WeightReference(model, mesh, section.weights_dtype),
        max_sequence_tokens(config),
        model.config.vocab_size,
        stop_ids,
        in_flight=section.in_flight,
    )
    weights = ServedWeights(
        sync,
        dialect,
        check,
        section.timeout_seconds,
        section.wait_seconds,
        sleeps=sleeps,
        in_flight=section.in_flight,
    )
    return _client([url.strip() for url in section.urls.split(",") if url.strip()], weights, model, stop_ids, config)


def _client(
    urls: Sequence[str],
    weights: ServedWeights | AdoptedWeights,
    model: Transformer,
    stop_ids: Sequence[int],
    config: Config,
) -> ServerSampler:
    return ServerSampler(
        urls,
        weights,
        stop_ids,
        vocab_size=model.config.vocab_size,
        max_concurrent=config.rollouts.max_concurrent,
        timeout_seconds=config.rollouts.timeout_seconds,
    )


async def model_info(url: str, config: Config) -> ModelInfo:
    """Returns the model that the server at `url` reports.

    Args:
      url: URL of the server or router.
      config: Configuration. Only `rollouts.name` is used, see `open_server`.

    Raises:
      httpx.HTTPError: If the server does not respond or its response is invalid.
      ServerError: If the server was started without the settings that an evaluation requires.
    """
    return await SAMPLERS[config.rollouts.name].dialect(config).model_info(url)


def open_server(
    url: str, model: Transformer, stop_ids: Sequence[int], config: Config, weights: str | None = None
) -> Sampler:
    """Returns a sampler that generates with the current weights of a server.

    Args:
      url: URL of the server or router.
      model: The policy. It may be abstract.
      stop_ids: Token ids that end a generation.
      config: Configuration. Only section `sampling`, and `name`, `max_concurrent` and the timeouts of section
        `rollouts`, are used. The kind of server is SGLang, unless `rollouts.name` is the name of another kind.
      weights: Path and version of the weights that the server must report, `ModelInfo.weights`. If None, any weights
        are accepted.

    Raises:
      ConfigError: If servers of this kind are known to compute another network than that of the policy.
    """
    dialect = SAMPLERS[config.rollouts.name].dialect(config, model.config.vocab_size)
    if dialect is SGLANG:
        check_network(model.config, config.sampling.max_tokens)
    return _client([url], AdoptedWeights(dialect, config.rollouts.wait_seconds, weights), model, stop_ids, config)


@dataclasses.dataclass(frozen=True)
class SamplerEntry:
    """A sampler that training can use.

    Attributes:
      open: Function `(model, mesh, stop_ids, config, **options) -> sampler`. The model may be abstract. The mesh is
        that of this process. The options are those of `rollouts.options`.
      title: Name of the sampler in messages.
      dialect: Function `(config, vocab_size=0) -> dialect` that returns the API of servers that are evaluated.
      needs_urls: Whether its servers must be listed in `rollouts.urls`.
      while_training: Whether it can generate while the policy is trained, as `train.staleness` above 0 requires, and
        continue generations with new weights, as `rollouts.in_flight` requires.
      cache_growth: Peak size of its caches while they grow, as a multiple of full-length caches, if it decodes in the
        trainer's memory, with weights in the compute type. None if it decodes elsewhere.
      has_slots: Whether it decodes with `embedded.slots`, the only decoder that the benchmark measures.
    """

    open: Callable[..., Sampler]
    title: str
    dialect: Callable[..., Dialect] = lambda config, vocab_size=0: SGLANG
    needs_urls: bool = False
    while_training: bool = False
    cache_growth: float | None = None
    has_slots: bool = False


def pushed_dtype(config: Config, model_config: ModelConfig) -> str:
    """Returns the type in which several processes copy the weights to their samplers, see `params_on_host`.

    Samplers in the trainer's memory convert all weights to the compute type. Converting before the copy halves it. An
    adapter is merged in float32 after the copy. Servers have their own type.
    """
    converts = SAMPLERS[config.rollouts.name].cache_growth is not None and not model_config.lora_targets
    return model_config.dtype if converts else model_config.param_dtype


SAMPLERS: Registry[SamplerEntry] = Registry(
    # When a cache grows for the last time, a cache of 3/4 of the full length is copied into one of full length.
    embedded=SamplerEntry(_embedded, "the trainer's own sampler", cache_growth=1.75, has_slots=True),
    sglang=SamplerEntry(_sglang, "SGLang servers", needs_urls=True, while_training=True),
    vllm=SamplerEntry(_vllm, "vLLM servers", _vllm_dialect, needs_urls=True, while_training=True),
)
"""Samplers by the name that `rollouts.name` selects."""
