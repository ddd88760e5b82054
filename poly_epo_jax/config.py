"""Every configuration key, declared once: its type, its default, its meaning and what it may be.

The defaults train polynomial solving well on a laptop. A configuration file states only what differs, and builds on
`default_config.get_config`. The command line overrides both: --config.optimizer.learning_rate=1e-4

The sections are typed and frozen; `choices.read_config` makes them of what a user has written. It also checks the
names of parts against their registries, and what the sections say together.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from poly_epo_jax.section import FRACTION, NOT_NEGATIVE, PATTERN, POSITIVE, Check, Section, changed_keys, key, one_of
from poly_epo_jax.section import ConfigError as ConfigError

FLOATS = one_of("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelSection(Section, name="model"):
    """The policy's weights, and how it computes."""

    path: str = key("", "a Hugging Face folder, or a name on the hub; empty: the policy that `base` describes")
    stop_tokens: tuple[str, ...] = key((), "end a response, besides the end-of-sequence tokens which the folder names")
    dtype: str = key("float32", "of activations and matrix products", FLOATS)
    param_dtype: str = key("float32", "of weights", FLOATS)
    remat: str = key("none", "what the backward pass recomputes")
    scan_unroll: int = key(2, "layers per step of the layer scan", POSITIVE)
    attention: str = key("auto", "blockwise (anywhere), tokamax (GPU), splash (TPU); auto picks the backend's own")


@dataclasses.dataclass(frozen=True)
class BaseSection(Section, name="base"):
    """A tiny policy fitted to the task's synthetic demonstrations, where model.path is empty."""

    cache_dir: str = key("runs/base", "kept here, and reused by every run with the same task and recipe")
    seed: int = key(0, "of its first weights and of the demonstrations")
    hidden_size: int = key(64, "width of the residual stream", POSITIVE)
    mlp_size: int = key(192, "inner width of the MLP", POSITIVE)
    num_layers: int = key(2, "transformer layers", POSITIVE)
    num_heads: int = key(4, "query heads", POSITIVE)
    num_kv_heads: int = key(2, "key-value heads, each shared by several query heads", POSITIVE)
    head_dim: int = key(16, "width of a head", POSITIVE)
    batch_size: int = key(128, "demonstrations per step", POSITIVE)
    clean_steps: int = key(1200, "first on right demonstrations", POSITIVE)
    clean_learning_rate: float = key(3e-3, "peak, warmed up to and decayed from within those steps", POSITIVE)
    noisy_steps: int = key(120, "then on demonstrations with deliberate mistakes, for RL to correct", NOT_NEGATIVE)
    noisy_learning_rate: float = key(1e-3, "peak, likewise", POSITIVE)
    error_rate: float = key(1.0, "scale of those mistakes; each task says what 1 means")
    skew: float = key(0.0, "0: all strategies equally likely; larger: concentrated on a few")


@dataclasses.dataclass(frozen=True)
class TaskSection(Section, name="task"):
    """The problems, and what their responses earn."""

    name: str = key("polynomial", "the task")
    options: Mapping[str, Any] = key({}, "keyword arguments of that task, such as --config.task.options.seed=1")


@dataclasses.dataclass(frozen=True)
class JudgeSection(Section, name="judge"):
    """Who clusters the responses to a prompt. Keys from `url` to `wait_seconds` are for judges behind a server."""

    name: str = key("exact", "the judge; none: no clusters, for methods that read none")
    options: Mapping[str, Any] = key({}, "keyword arguments of that judge, such as --config.judge.options.attempts=2")
    max_failed_share: float = key(0.25, "of a batch's prompts; the run stops where the judge fails on more", FRACTION)
    url: str = key("", "of an OpenAI-compatible server, such as http://127.0.0.1:30001")
    model: str = key("", "by the name it has there; empty: the first that the server lists")
    api_key_env: str = key("", "the environment variable that holds the key of a hosted model")
    max_concurrent: int = key(64, "requests at once", POSITIVE)
    timeout_seconds: float = key(300.0, "per request", POSITIVE)
    wait_seconds: float = key(600.0, "for a server that does not answer", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class RolloutsSection(Section, name="rollouts"):
    """The sampler, which generates the responses. Keys from `urls` on are for samplers behind servers."""

    name: str = key("embedded", "the sampler")
    options: Mapping[str, Any] = key({}, "keyword arguments of that sampler")
    max_concurrent: int = key(512, "generations at once; with servers, for each URL", POSITIVE)
    urls: str = key("", "of servers or routers, such as http://127.0.0.1:30000; commas between several")
    shared: bool = key(False, "on several hosts: whether all use the same servers; else each has its own at urls")
    weight_sync: str = key("disk", "how: disk (a folder that the servers read) or tensor (CUDA IPC on one host)")
    weights_dir: str = key("/dev/shm", "the folder is made in this one, which all hosts of servers see")
    weights_dtype: str = key("bfloat16", "what the servers compute with", FLOATS)
    tensor_parallel: int = key(1, "of each server, for tensor", POSITIVE)
    timeout_seconds: float = key(1800.0, "for the generations of one prompt, and for a weight update", POSITIVE)
    wait_seconds: float = key(900.0, "for a server that does not answer, at the start or later", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class SamplingSection(Section, name="sampling"):
    """How each token of a response is drawn."""

    max_tokens: int = key(14, "longest response, the paper's T_max", POSITIVE)
    temperature: float = key(1.0, "of sampling, and of the log-probabilities that are trained", NOT_NEGATIVE)
    top_p: float = key(
        1.0,
        "sample from the likeliest tokens that reach this probability; 1: off",
        Check(lambda p: 0 < p <= 1, "must lie between 0 and 1, and above 0; 1 switches it off"),
    )
    top_k: int = key(0, "sample from this many likeliest tokens; 0: off", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class AlgoSection(Section, name="algo"):
    """From rewards and clusters to advantages, and from those to the loss."""

    advantages: str = key("marginal_set", "the advantage estimator")
    options: Mapping[str, Any] = key({}, "keyword arguments of an advantage estimator of your own")
    objective: str = key("polychromic", "the set objective of marginal_set")
    set_size: int = key(4, "n, generations per set", POSITIVE)
    num_sets: int = key(0, "K sets drawn per prompt; 0: all C(N, n)", NOT_NEGATIVE)
    div_coef: float = key(0.5, "lambda of grpo_div", NOT_NEGATIVE)
    loss: str = key("ppo_clip", "the loss of a token")
    clip_low: float = key(0.20, "probability ratios are clipped below 1 - clip_low", NOT_NEGATIVE)
    clip_high: float = key(0.28, "and above 1 + clip_high", NOT_NEGATIVE)
    length_normalization: str = key("max", "T_i: a response's own length, or max: T_max", one_of("own", "max"))
    old_logprobs: str = key("trainer", "whose log-probabilities ratios are to", one_of("trainer", "sampler"))
    importance_cap: float = key(2.0, "largest ratio to the sampler's (truncated importance sampling)", POSITIVE)
    kl_coef: float = key(0.0, "weight of KL(policy || initial policy)", NOT_NEGATIVE)
    entropy_coef: float = key(0.0, "weight of the entropy bonus", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class TrainSection(Section, name="train"):
    """The batch of a step, and its rows."""

    num_steps: int = key(150, "each generates one batch and trains on it", POSITIVE)
    prompts_per_batch: int = key(64, "generated per step", POSITIVE)
    prompts_per_minibatch: int = key(32, "one optimizer update each", POSITIVE)
    num_generations: int = key(8, "N, per prompt", POSITIVE)
    max_prompt_tokens: int = key(10, "longest prompt; problems with a longer one are left out", POSITIVE)
    trainable: str = key("", "regular expression of dotted paths of weights that are trained; empty: all", PATTERN)
    staleness: int = key(
        0, "1: the next batch is generated while this one is trained, one step off-policy", one_of(0, 1)
    )
    row_tokens: int = key(40, "sequences are packed into rows of this many tokens", POSITIVE)
    rows_per_device: int = key(
        72, "rows whose gradient is taken at once, on each group of mesh.tensor devices", POSITIVE
    )


@dataclasses.dataclass(frozen=True)
class OptimizerSection(Section, name="optimizer"):
    """AdamW."""

    learning_rate: float = key(5e-4, "peak", POSITIVE)
    warmup_updates: int = key(0, "updates of linear rise before it", NOT_NEGATIVE)
    schedule: str = key("linear", "after the warm-up")
    final_fraction: float = key(0.02, "of the learning rate, where linear and cosine end", FRACTION)
    b1: float = key(0.9, "decay of the gradient's running mean", FRACTION)
    b2: float = key(0.999, "decay of the squared gradient's", FRACTION)
    first_moment_dtype: str = key("float32", "bfloat16 halves it; the second moment would stall in less", FLOATS)
    eps: float = key(1e-8, "added to the square root of the latter", NOT_NEGATIVE)
    weight_decay: float = key(0.0, "decoupled, times the learning rate", NOT_NEGATIVE)
    max_grad_norm: float = key(0.3, "longer gradients are scaled down to this norm", POSITIVE)


@dataclasses.dataclass(frozen=True)
class MeshSection(Section, name="mesh"):
    """Devices along each axis; one of the axes may be -1, for all that are left."""

    data: int = key(1, "replicas of the weights")
    fsdp: int = key(-1, "shards of each weight along its embedding axis")
    tensor: int = key(1, "shards of heads, MLP and vocabulary")
    device: str = key("", "what the devices must be; empty: whatever is there")
    devices: int = key(0, "how many there are; 0: not said", NOT_NEGATIVE)


@dataclasses.dataclass(frozen=True)
class HostsSection(Section, name="hosts"):
    """Several processes that train as one, with the same configuration but for the index."""

    coordinator: str = key("", "HOST:PORT of the first; auto: SLURM or the TPU pod knows; empty: a single process")
    count: int = key(1, "how many there are, where not auto")
    index: int = key(0, "which of them this is, likewise")
    wait_seconds: int = key(300, "for each other at the start", POSITIVE)


@dataclasses.dataclass(frozen=True)
class CheckpointSection(Section, name="checkpoint"):
    """When the run is saved."""

    every: int = key(50, "steps", POSITIVE)
    keep: int = key(2, "the newest ones", POSITIVE)


@dataclasses.dataclass(frozen=True)
class EvalSection(Section, name="eval"):
    """Evaluation on held-out problems during training."""

    every: int = key(20, "steps; 0: never", NOT_NEGATIVE)
    num_problems: int = key(40, "the first ones", POSITIVE)
    num_generations: int = key(64, "per problem", POSITIVE)


@dataclasses.dataclass(frozen=True)
class LogSection(Section, name="log"):
    """What is written besides metrics."""

    generations_every: int = key(10, "steps between batches written to generations.jsonl", POSITIVE)
    wandb_project: str = key("", "empty: no Weights & Biases")


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The whole; a part gets its own section of it."""

    workdir: str = key("runs/default", "the run folder; a checkpoint found in it is resumed")
    compilation_cache: str = key("runs/compiled", "compiled programs are kept here and reused by later runs")
    seed: int = key(0, "of the data order and of every sampled token")

    model: ModelSection = ModelSection()
    base: BaseSection = BaseSection()
    task: TaskSection = TaskSection()
    judge: JudgeSection = JudgeSection()
    rollouts: RolloutsSection = RolloutsSection()
    sampling: SamplingSection = SamplingSection()
    algo: AlgoSection = AlgoSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    mesh: MeshSection = MeshSection()
    hosts: HostsSection = HostsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    eval: EvalSection = EvalSection()
    log: LogSection = LogSection()


def microbatch_rows(train: TrainSection, mesh_shape: Mapping[str, int]) -> int:
    """Rows whose gradient is taken at once on all devices of a mesh: its data and fsdp axes split them."""
    return train.rows_per_device * mesh_shape["data"] * mesh_shape["fsdp"]


__all__ = ["Config", "ConfigError", "changed_keys", "microbatch_rows"]
