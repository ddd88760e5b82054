"""Every configuration key, declared once: its type, its default, its meaning and its allowed values.

The defaults train polynomial solving well on a laptop. A configuration file states only what differs, and builds on
`default.get_config`. The command line overrides both: --config.optimizer.learning_rate=1e-4

The sections are typed and frozen; `read_config` builds them from what a user has written. It also checks the
names of parts against their registries, and combinations of sections.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from poly_epo_jax.config.checks import (
    COORDINATOR,
    FRACTION,
    NOT_EMPTY,
    PATTERN,
    SEED,
    URL,
    URLS,
    Check,
    ConfigError,
    Range,
    one_of,
)
from poly_epo_jax.config.section import Section, changed_keys, key

FLOATS = one_of("float32", "bfloat16")
STEPS = Range(1, 10**9)
SECONDS = Range(0.1, 10**6)
TOKENS = Range(1, 2**24)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = Check(
    lambda names: bool(names) and len(set(names)) == len(names) and set(names) <= set(PROJECTIONS),
    f"must name some of {', '.join(PROJECTIONS)}, each once",
)


@dataclasses.dataclass(frozen=True)
class ModelSection(Section, name="model"):
    """The policy's weights, and how it computes."""

    path: str = key("", "a Hugging Face folder, or a name on the hub; empty: the policy that `base` describes")
    stop_strings: tuple[str, ...] = key(
        (),
        "a token that holds one of these ends a response, as do the end-of-sequence tokens which the folder names",
    )
    dtype: str = key("float32", "of activations and matrix products", FLOATS)
    param_dtype: str = key("float32", "of weights", FLOATS)
    remat: str = key("none", "what the backward pass recomputes; auto: as little as the memory plan allows")
    scan_unroll: int = key(0, "layers per step of the layer scan; 0: one, or all of at most four", Range(0, 64))
    attention: str = key(
        "auto", "blockwise (anywhere), triton (GPU), splash (TPU); auto: the device's own, if its self-check holds"
    )


@dataclasses.dataclass(frozen=True)
class BaseSection(Section, name="base"):
    """A tiny policy fitted to the task's synthetic demonstrations, where model.path is empty."""

    cache_dir: str = key("runs/base", "kept here, and reused by every run with the same task and recipe", NOT_EMPTY)
    seed: int = key(0, "of its first weights and of the demonstrations", SEED)
    hidden_size: int = key(64, "width of the residual stream", Range(1, 65_536))
    mlp_size: int = key(192, "inner width of the MLP", Range(1, 262_144))
    num_layers: int = key(2, "transformer layers", Range(1, 64))
    num_heads: int = key(4, "query heads", Range(1, 1024))
    num_kv_heads: int = key(2, "key-value heads, each shared by several query heads", Range(1, 1024))
    head_dim: int = key(16, "width of a head", Range(2, 1024))
    batch_size: int = key(128, "demonstrations per step", Range(1, 65_536))
    clean_steps: int = key(1200, "first on right demonstrations", Range(1, 10**6))
    clean_learning_rate: float = key(3e-3, "peak, warmed up to and decayed from within those steps", Range(1e-12, 1))
    noisy_steps: int = key(120, "then on demonstrations with deliberate mistakes, for RL to correct", Range(0, 10**6))
    noisy_learning_rate: float = key(1e-3, "peak, likewise", Range(1e-12, 1))
    error_rate: float = key(1.0, "scale of those mistakes; each task says what 1 means", Range(0, 100))
    skew: float = key(0.0, "0: all strategies equally likely; larger: concentrated on a few", Range(0, 100))


@dataclasses.dataclass(frozen=True)
class TaskSection(Section, name="task"):
    """The problems, and the rewards of their responses."""

    name: str = key("polynomial", "the task")
    options: Mapping[str, Any] = key({}, "keyword arguments of that task, such as --config.task.options.seed=1")


@dataclasses.dataclass(frozen=True)
class JudgeSection(Section, name="judge"):
    """What clusters the responses to a prompt. Keys from `url` to `wait_seconds` are for judges behind a server."""

    name: str = key("exact", "the judge; none: no clusters, for methods that read none")
    options: Mapping[str, Any] = key({}, "keyword arguments of that judge, such as --config.judge.options.attempts=2")
    max_failed_share: float = key(
        0.25, "of a batch's prompts; where it fails on more, a run that reads it stops", FRACTION
    )
    url: str = key("", "of an OpenAI-compatible server, such as http://127.0.0.1:30001", URL)
    model: str = key("", "by the name it has there; empty: the first that the server lists")
    api_key_env: str = key("", "the environment variable that holds the key of a hosted model")
    max_concurrent: int = key(64, "requests at once", Range(1, 65_536))
    timeout_seconds: float = key(300.0, "per request", SECONDS)
    wait_seconds: float = key(600.0, "for a server that does not answer", Range(0, 10**6))


@dataclasses.dataclass(frozen=True)
class RolloutsSection(Section, name="rollouts"):
    """The sampler, which generates the responses. Keys from `urls` on are for samplers behind servers."""

    name: str = key("embedded", "the sampler")
    options: Mapping[str, Any] = key({}, "keyword arguments of that sampler, such as sleep of sglang")
    max_concurrent: int = key(512, "generations at once; with servers, for each URL", Range(1, 10**6))
    urls: str = key("", "of servers or routers, such as http://127.0.0.1:30000; commas between several", URLS)
    shared: bool = key(False, "on several hosts: whether all use the same servers; else each has its own at urls")
    weight_sync: str = key("disk", "how: disk (a folder that the servers read) or tensor (CUDA IPC on one host)")
    weights_dir: str = key("/dev/shm", "the folder is made in this one, which all hosts of servers see", NOT_EMPTY)
    weights_dtype: str = key("bfloat16", "what the servers compute with", FLOATS)
    tensor_parallel: int = key(1, "of each server, for tensor", Range(1, 1024))
    timeout_seconds: float = key(1800.0, "for the generations of one prompt, and for a weight update", SECONDS)
    wait_seconds: float = key(900.0, "for a server that does not answer, at the start or later", Range(0, 10**6))


@dataclasses.dataclass(frozen=True)
class SamplingSection(Section, name="sampling"):
    """How each token of a response is drawn."""

    max_tokens: int = key(14, "longest response, the paper's T_max", TOKENS)
    temperature: float = key(
        1.0, "of sampling, and of the log-probabilities that are trained", Range(0.01, 100, other=0)
    )
    top_p: float = key(
        1.0,
        "sample from the likeliest tokens that reach this probability; 1: off",
        Range(1e-6, 1),
    )
    top_k: int = key(0, "sample from this many likeliest tokens; 0: off", Range(0, 10**6))


@dataclasses.dataclass(frozen=True)
class AlgoSection(Section, name="algo"):
    """How rewards and clusters become advantages, and advantages the loss."""

    advantages: str = key("marginal_set", "the advantage estimator")
    options: Mapping[str, Any] = key({}, "numbers of the advantage estimator, such as --config.algo.options.k=8")
    objective: str = key("polychromic", "the set objective of marginal_set")
    set_size: int = key(4, "n, generations per set", Range(1, 4095))
    num_sets: int = key(0, "K sets drawn per prompt; 0: all C(N, n)", Range(0, 10**6))
    div_coef: float = key(0.5, "lambda of grpo_div", Range(0, 1000))
    loss: str = key("ppo_clip", "the loss of a token")
    loss_options: Mapping[str, Any] = key({}, "keyword arguments of the loss, except clip_low and clip_high")
    clip_low: float = key(0.20, "lower clip range: probability ratios are clipped to at least 1 - clip_low", FRACTION)
    clip_high: float = key(
        0.28, "upper clip range: probability ratios are clipped to at most 1 + clip_high", Range(0, 1000)
    )
    length_normalization: str = key("max", "T_i: a response's own length, or max: T_max", one_of("own", "max"))
    importance_cap: float = key(
        0.0,
        "weigh tokens by p(trainer) / p(sampler), at most this, as for a sampler of other arithmetic or older weights; "
        "0: off, as in the paper, for a sampler that computes what the trainer does",
        Range(0.001, 10**6, other=0),
    )
    max_mismatch: float = key(
        0.0,
        "a response is masked where the geometric mean of that ratio is above this or below 1 / this; 0: off, as what "
        "it masks depends on the responses' lengths and the sampler",
        Range(1.001, 10**6, other=0),
    )
    kl_coef: float = key(0.0, "weight of KL(policy || initial policy)", Range(0, 1000))
    entropy_coef: float = key(0.0, "weight of the entropy bonus", Range(0, 1000))


@dataclasses.dataclass(frozen=True)
class TrainSection(Section, name="train"):
    """The batch of a step, and its rows."""

    num_steps: int = key(150, "each generates one batch and trains on it", STEPS)
    prompts_per_batch: int = key(64, "generated per step", Range(1, 10**6))
    prompts_per_minibatch: int = key(32, "one optimizer update each", Range(1, 10**6))
    num_generations: int = key(8, "N, per prompt", Range(1, 4096))
    max_prompt_tokens: int = key(10, "longest prompt; problems with a longer one are left out", TOKENS)
    trainable: str = key("", "regular expression of dotted paths of weights that are trained; empty: all", PATTERN)
    staleness: int = key(
        0, "1: the next batch is generated while this one is trained, one step off-policy", Range(0, 1)
    )
    row_tokens: int = key(
        0, "sequences are packed into rows of this many tokens; 0: twice the longest", Range(1, 2**24, other=0)
    )
    rows_per_device: int = key(
        0,
        "rows whose gradient is taken at once, on each group of mesh.tensor devices; 0: an eighth of what a minibatch "
        "can fill, but 256 to 4,096 tokens",
        Range(1, 65_536, other=0),
    )


@dataclasses.dataclass(frozen=True)
class LoraSection(Section, name="lora"):
    """Low-rank adapters (LoRA), which are trained in float32 while the model's own weights stay unchanged."""

    rank: int = key(
        0, "inner width of the adapters; 0: none, and the model's own weights are trained", Range(1, 1024, other=0)
    )
    alpha: float = key(32.0, "adapters are scaled by alpha / rank", Range(1e-6, 10**6))
    targets: tuple[str, ...] = key(PROJECTIONS, "the projections of every layer that have one", TARGETS)


@dataclasses.dataclass(frozen=True)
class OptimizerSection(Section, name="optimizer"):
    """AdamW."""

    learning_rate: float = key(5e-4, "peak", Range(1e-12, 1))
    warmup_updates: int = key(0, "updates of linear rise before it", Range(0, 10**9))
    schedule: str = key("linear", "after the warm-up")
    final_fraction: float = key(0.02, "of the learning rate, where linear and cosine end", FRACTION)
    b1: float = key(0.9, "decay of the gradient's running mean", Range(0, 0.9999))
    b2: float = key(0.999, "decay of the squared gradient's", Range(0, 0.999999))
    first_moment_dtype: str = key("float32", "bfloat16 halves it; the second moment would stall in less", FLOATS)
    eps: float = key(1e-8, "added to the square root of the latter", Range(1e-20, 1))
    weight_decay: float = key(0.0, "decoupled, times the learning rate", Range(0, 10))
    max_grad_norm: float = key(0.3, "longer gradients are scaled down to this norm", Range(1e-8, 1e8))


@dataclasses.dataclass(frozen=True)
class MeshSection(Section, name="mesh"):
    """Devices along each axis; one of the axes may be -1, for all remaining devices."""

    data: int = key(1, "replicas of the weights", Range(1, 10**5, other=-1))
    fsdp: int = key(-1, "shards of each weight along its embedding axis", Range(1, 10**5, other=-1))
    tensor: int = key(1, "shards of heads, MLP and vocabulary", Range(1, 10**5, other=-1))
    device: str = key("", "what the devices must be; empty: whatever is there")
    devices: int = key(0, "how many there are; 0: not said", Range(0, 10**5))


@dataclasses.dataclass(frozen=True)
class HostsSection(Section, name="hosts"):
    """Several processes that train as one, with the same configuration except for the index."""

    coordinator: str = key(
        "", "HOST:PORT of the first; auto: SLURM or the TPU pod knows; empty: a single process", COORDINATOR
    )
    count: int = key(1, "how many there are, where not auto", Range(1, 10**5))
    index: int = key(0, "which of them this is, likewise", Range(0, 10**5))
    wait_seconds: int = key(300, "for each other at the start", Range(1, 10**6))


@dataclasses.dataclass(frozen=True)
class CheckpointSection(Section, name="checkpoint"):
    """When the run is saved."""

    every: int = key(50, "steps", STEPS)
    keep: int = key(2, "the newest ones", STEPS)


@dataclasses.dataclass(frozen=True)
class EvalSection(Section, name="eval"):
    """Evaluation on held-out problems during training."""

    every: int = key(20, "steps; 0: never", Range(0, 10**9))
    num_problems: int = key(40, "the first ones", Range(1, 10**6))
    num_generations: int = key(64, "per problem", Range(1, 4096))


@dataclasses.dataclass(frozen=True)
class LogSection(Section, name="log"):
    """What is written besides metrics."""

    generations_every: int = key(10, "steps between batches written to generations.jsonl", STEPS)
    wandb_project: str = key("", "empty: no Weights & Biases")


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The whole configuration; each part gets its own section of it."""

    workdir: str = key("runs/default", "the run folder; a checkpoint found in it is resumed", NOT_EMPTY)
    compilation_cache: str = key("runs/compiled", "compiled programs are kept here and reused by later runs", NOT_EMPTY)
    seed: int = key(0, "of the data order, of every sampled token and of new adapters", SEED)

    model: ModelSection = ModelSection()
    base: BaseSection = BaseSection()
    task: TaskSection = TaskSection()
    judge: JudgeSection = JudgeSection()
    rollouts: RolloutsSection = RolloutsSection()
    sampling: SamplingSection = SamplingSection()
    algo: AlgoSection = AlgoSection()
    train: TrainSection = TrainSection()
    lora: LoraSection = LoraSection()
    optimizer: OptimizerSection = OptimizerSection()
    mesh: MeshSection = MeshSection()
    hosts: HostsSection = HostsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()


def longest_sequence(config: Config) -> int:
    """The most tokens that a prompt and its response can have together."""
    return config.train.max_prompt_tokens + config.sampling.max_tokens


def updates_per_step(train: TrainSection) -> int:
    """How many optimizer updates a step makes."""
    return train.prompts_per_batch // train.prompts_per_minibatch


__all__ = ["Config", "ConfigError", "changed_keys", "longest_sequence", "updates_per_step"]
