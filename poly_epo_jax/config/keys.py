"""Declares every configuration key once, with its type, default value, help text and allowed values.

The defaults train polynomial solving on a laptop. A configuration file starts from `default.get_config` and sets only
the keys that differ. The command line overrides both: --config.optimizer.learning_rate=1e-4

The sections are typed and frozen. `read_config` builds them from a user's configuration. It also checks the names of
components against their registries, and combinations of keys.

`--help` prints the docstrings of the sections, and each key as `KEY = VALUE  TYPE: HELP TEXT; ALLOWED VALUES`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from poly_epo_jax.config.checks import (
    COORDINATOR,
    FRACTION,
    NOT_EMPTY,
    PATTERN,
    PLAIN,
    SEED,
    URL,
    URLS,
    Check,
    ConfigError as ConfigError,
    Range,
    one_of,
)
from poly_epo_jax.config.section import Section, key

FLOATS = one_of("float32", "bfloat16")
STEPS = Range(1, 10**9)
SECONDS = Range(0.1, 10**6)
TOKENS = Range(1, 2**24)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = Check(
    lambda names: bool(names) and len(set(names)) == len(names) and set(names) <= set(PROJECTIONS),
    f"must list at least one of {', '.join(PROJECTIONS)}, without duplicates",
)


def _is_step_range(text: str) -> bool:
    match = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", text)
    return not text or (match is not None and int(match[1]) <= int(match[2]))


STEP_RANGE = Check(_is_step_range, "must be FIRST:LAST with 1 <= FIRST <= LAST, such as 10:12")


@dataclasses.dataclass(frozen=True)
class ModelSection(Section, name="model"):
    """Weights, dtypes, rematerialization and attention kernel of the policy."""

    path: str = key("", "Hugging Face folder or hub name of the policy (empty = the base policy of the section base)")
    stop_strings: tuple[str, ...] = key(
        (), "strings that end a response after a token that contains one, as end-of-sequence tokens of the model do"
    )
    chat_template_options: Mapping[str, Any] = key(
        {}, "variables of the chat template, such as --config.model.chat_template_options.enable_thinking=False", PLAIN
    )
    dtype: str = key("float32", "dtype of activations and matrix products", FLOATS)
    param_dtype: str = key("float32", "dtype of stored weights (to train, bfloat16 requires lora.rank)", FLOATS)
    remat: str = key("none", "rematerialization policy (auto = the least recomputation that fits into memory)")
    scan_unroll: int = key(0, "layers per layer-scan iteration (0 = all if at most four, otherwise 1)", Range(0, 64))
    attention: str = key(
        "auto", "attention kernel (auto = triton on GPU, splash on TPU, blockwise elsewhere or if a self-check fails)"
    )

    @property
    def compute_options(self) -> dict[str, Any]:
        """The keys that are fields of `model.config.ModelConfig`, with their values."""
        return {name: self[name] for name in ("dtype", "param_dtype", "remat", "scan_unroll", "attention")}


@dataclasses.dataclass(frozen=True)
class BaseSection(Section, name="base"):
    """Tiny policy for an empty model.path, fitted to demonstrations with learning rate warm-up and cosine decay."""

    cache_dir: str = key("runs/base", "cache of base policies, reused for the same task and base keys", NOT_EMPTY)
    seed: int = key(0, "random seed of the initial weights and of the demonstrations", SEED)
    hidden_size: int = key(64, "width of the residual stream", Range(1, 65_536))
    mlp_size: int = key(192, "hidden width of the MLP", Range(1, 262_144))
    num_layers: int = key(2, "number of transformer layers", Range(1, 64))
    num_heads: int = key(4, "number of query heads", Range(1, 1024))
    num_kv_heads: int = key(2, "number of key-value heads; must divide base.num_heads", Range(1, 1024))
    head_dim: int = key(16, "width of an attention head; must be even", Range(2, 1024))
    batch_size: int = key(128, "demonstrations per training step of the base policy", Range(1, 65_536))
    clean_steps: int = key(1200, "training steps on correct demonstrations", Range(1, 10**6))
    clean_learning_rate: float = key(3e-3, "peak learning rate of the base.clean_steps", Range(1e-12, 1))
    noisy_steps: int = key(120, "further training steps on demonstrations with deliberate mistakes", Range(0, 10**6))
    noisy_learning_rate: float = key(1e-3, "peak learning rate of the base.noisy_steps", Range(1e-12, 1))
    error_rate: float = key(1.0, "mistake rate in the base.noisy_steps, relative to the task's rate", Range(0, 100))
    skew: float = key(0.0, "preference for strategies: rank k has weight exp(-skew k) (0 = uniform)", Range(0, 100))


@dataclasses.dataclass(frozen=True)
class TaskSection(Section, name="task"):
    """The task, which provides problems and rewards responses."""

    name: str = key("polynomial", "name of the task")
    options: Mapping[str, Any] = key({}, "keyword arguments of the task, such as --config.task.options.seed=1")
    system_prompt: str = key("", "system message before the first message of each chat (empty = none)")


@dataclasses.dataclass(frozen=True)
class ChatServerKeys(Section):
    """Keys of an OpenAI-compatible server."""

    url: str = key("", "address of an OpenAI-compatible server, such as http://127.0.0.1:30001", URL)
    model: str = key("", "name of the model on the server (empty = the first model that the server lists)")
    api_key_env: str = key("", "environment variable with the API key of the server (empty = no key)")
    max_concurrent: int = key(64, "maximum number of concurrent requests to the server", Range(1, 65_536))
    timeout_seconds: float = key(300.0, "timeout in seconds of one request to the server", SECONDS)
    wait_seconds: float = key(
        600.0,
        "maximum wait in seconds for a server that does not respond or limits the rate of requests",
        Range(0, 10**6),
    )


@dataclasses.dataclass(frozen=True)
class _JudgeEntryKeys(Section):
    name: str = key("exact", "name of the judge (none = no clusters, for methods that do not use them)")
    options: Mapping[str, Any] = key({}, "keyword arguments of the judge, such as --config.judge.options.attempts=2")


@dataclasses.dataclass(frozen=True)
class JudgeKeys(ChatServerKeys, _JudgeEntryKeys):  # fields of the last base class come first
    """Keys that select a judge and its server."""


@dataclasses.dataclass(frozen=True)
class JudgeSection(JudgeKeys, name="judge"):
    """The judge, which clusters the responses to a prompt. Keys from url to wait_seconds apply to servers only."""

    max_failed_fraction: float = key(
        0.25,
        "maximum fraction of a batch's prompts on which the judge may fail before training stops, unless its failures "
        "do not affect the update",
        FRACTION,
    )
    on_failure: str = key(
        "drop",
        "prompts on which the judge failed (drop = left out of the update if the method reads the judge's output, "
        "drop_always = left out with every method, distinct = each response is its own cluster, only to reproduce "
        "code that does so)",
        one_of("drop", "drop_always", "distinct"),
    )
    verify: str = key(
        "",
        "judge whose partition is joined with that of judge.name in each step (second = audit.judge: two responses "
        "share a cluster if either judge assigns them to one, directly or through others; empty = none)",
        one_of("", "second"),
    )


@dataclasses.dataclass(frozen=True)
class AuditorSection(JudgeKeys, name="audit.judge"):
    """The auditor, a second judge that clusters the audited responses."""

    name: str = key("none", "name of the auditor (none = audits without a second judge)")


@dataclasses.dataclass(frozen=True)
class ParaphraseSection(ChatServerKeys, name="audit.paraphrase"):
    """Server of a model that writes the copies of the paraphrase probe. If url is empty, rules change the wording."""


@dataclasses.dataclass(frozen=True)
class AuditSection(Section, name="audit"):
    """Audits of the judge on logged steps, beside training. Keys audit.judge.* select a second judge, the auditor."""

    every: int = key(
        0, "interval between audited steps, a multiple of log.generations_every (0 = no audits)", Range(0, 10**9)
    )
    num_prompts: int = key(16, "number of prompts per audited step, drawn at random", Range(1, 10**6))
    wait_seconds: float = key(
        60.0, "maximum wait in seconds for audits in progress at the end of a run", Range(0, 10**6)
    )
    stop_inflation: float = key(
        0.0,
        "inflation above which a run is saved and stops: clusters of the judge / clusters of the auditor, the lower "
        "end of the 95% interval of an audited step (0 = never)",
        Range(1, 1000, special=0),
    )
    judge: AuditorSection = AuditorSection()
    paraphrase: ParaphraseSection = ParaphraseSection()


@dataclasses.dataclass(frozen=True)
class RolloutsSection(Section, name="rollouts"):
    """The sampler, which generates responses, and environments. Keys from urls onwards apply to servers only."""

    name: str = key("embedded", "name of the sampler")
    options: Mapping[str, Any] = key({}, "keyword arguments of the sampler, such as sleep for sglang")
    max_concurrent: int = key(
        512, "maximum number of concurrent generations (with servers, per server or router worker)", Range(1, 10**6)
    )
    grading_timeout_seconds: float = key(
        600.0, "timeout in seconds of an own reward on a response, judge on a prompt, or metric", SECONDS
    )
    episode_timeout_seconds: float = key(
        120.0, "timeout in seconds of all calls of an environment in one episode, without waiting for others", SECONDS
    )
    environment_workers: int = key(
        0,
        "number of processes that run environments, one call at a time each (0 = an event loop of the trainer, for "
        "environments that wait instead of computing)",
        Range(0, 1024),
    )
    environment_memory_gb: float = key(
        4.0, "memory limit in GiB of each of these processes, on Linux", Range(0.1, 10**6)
    )
    min_group: int = key(
        0,
        "minimum number of responses of a prompt that are trained on if the environment or an own reward fails on the "
        "others; prompts with fewer are left out (0 = the minimum of the method, such as algo.set_size + 1)",
        Range(0, 4096),
    )
    max_failed_fraction: float = key(
        0.25,
        "maximum fraction of a batch's prompts that failures may leave out (see min_group) before training stops",
        FRACTION,
    )
    urls: str = key("", "comma-separated addresses of servers or routers, such as http://127.0.0.1:30000", URLS)
    shared_servers: bool = key(
        False, "whether all processes use the same servers (False = separate servers on each host)"
    )
    in_flight: bool = key(False, "whether weight updates keep running generations, which continue with the new weights")
    weight_sync: str = key(
        "disk", "weight transport: disk (a folder that servers read) or tensor (CUDA IPC on one host)"
    )
    weights_dir: str = key(
        "/dev/shm", "parent directory of the weight folder; must be visible to all hosts that run servers", NOT_EMPTY
    )
    weights_dtype: str = key("bfloat16", "compute dtype of the servers, in which weights are sent to them", FLOATS)
    tensor_parallel: int = key(1, "tensor-parallel size of each server, for weight_sync=tensor", Range(1, 1024))
    timeout_seconds: float = key(1800.0, "timeout in seconds to generate for a prompt or to update weights", SECONDS)
    wait_seconds: float = key(
        900.0, "maximum wait in seconds for a generation server that does not respond", Range(0, 10**6)
    )

    @property
    def user_code_limits(self) -> tuple[float, float, int, float]:
        """Limits of environments, rewards and judges, in the order of the arguments of `Rollouts`."""
        return (
            self.episode_timeout_seconds,
            self.grading_timeout_seconds,
            self.environment_workers,
            self.environment_memory_gb,
        )


@dataclasses.dataclass(frozen=True)
class SamplingSection(Section, name="sampling"):
    """Sampling of responses. Training requires temperature > 0, top_p = 1 and top_k = 0; evaluations do not."""

    max_tokens: int = key(14, "maximum number of tokens of a response, T_max in the paper", TOKENS)
    temperature: float = key(
        1.0, "temperature of sampling and of the trained log-probabilities (0 = greedy)", Range(0.01, 100, special=0)
    )
    top_p: float = key(1.0, "total probability of the most likely tokens to sample from (1 = all)", Range(1e-6, 1))
    top_k: int = key(0, "number of most likely tokens to sample from (0 = all)", Range(0, 10**6))
    max_turns: int = key(
        64, "maximum number of the policy's turns in an episode, for tasks with episodes", Range(1, 10**6)
    )
    correlated: bool = key(
        False, "spread the generations of a training group evenly over the policy's distribution (embedded sampler)"
    )


@dataclasses.dataclass(frozen=True)
class AlgoSection(Section, name="algo"):
    """Advantage estimator and policy loss."""

    advantages: str = key("marginal_set", "name of the advantage estimator")
    options: Mapping[str, Any] = key({}, "keyword arguments of the estimator, such as --config.algo.options.k=2")
    objective: str = key("polychromic", "set objective of algo.advantages=marginal_set")
    set_size: int = key(4, "number n of generations per set", Range(1, 4095))
    num_sets: int = key(0, "number K of sets drawn per prompt (0 = all C(N, n) sets)", Range(0, 10**6))
    diversity_coef: float = key(0.5, "diversity coefficient lambda of algo.advantages=grpo_div", Range(0, 1000))
    focal_gamma: float = key(
        0.0, "exponent of the factor (1 - mean reward of the prompt) of all advantages (0 = off)", Range(0, 100)
    )
    loss: str = key("ppo_clip", "name of the token loss")
    loss_options: Mapping[str, Any] = key({}, "keyword arguments of the loss, except clip_low and clip_high")
    clip_low: float = key(0.20, "lower clip range: probability ratios are clipped to at least 1 - clip_low", FRACTION)
    clip_high: float = key(
        0.28, "upper clip range: probability ratios are clipped to at most 1 + clip_high", Range(0, 1000)
    )
    # own gives every response the same total weight (GRPO). max gives every token the same weight (Poly-EPO). token
    # also does, but the total weight of an update is 1 (DAPO).
    length_normalization: str = key(
        "max",
        "divisor T_i of token losses: own (tokens of response i), max (sampling.max_tokens) or token (mean number of "
        "tokens of the update's responses)",
        one_of("own", "max", "token"),
    )
    truncated: str = key(
        "train",
        "use of responses that the limit sampling.max_tokens ends (train = as other responses, mask = left out of the "
        "update, penalize = a penalty for long responses is subtracted from the advantages of the estimator)",
        one_of("train", "mask", "penalize"),
    )
    overlong_tokens: int = key(
        0,
        "number of tokens before sampling.max_tokens over which the penalty of algo.truncated=penalize grows "
        "(0 = a fifth of sampling.max_tokens, as in DAPO)",
        Range(1, 2**24, special=0),
    )
    # DAPO's maximum penalty is 1, half of the difference between its rewards, -1 and 1.
    overlong_penalty: float = key(
        0.5, "maximum penalty of algo.truncated=penalize, the penalty of a truncated response", Range(0, 1000)
    )
    importance_cap: float = key(
        0.0,
        "cap of the token weights p(trainer) / p(sampler), for samplers with different numerics or older weights "
        "(0 = unweighted, as in the paper)",
        Range(0.001, 10**6, special=0),
    )
    # Off by default, because the masked responses depend on the response lengths and on the sampler.
    max_mismatch_ratio: float = key(
        0.0,
        "limit M on the geometric mean of p(trainer) / p(sampler) over a response; responses outside [1 / M, M] are "
        "masked (0 = no masking)",
        Range(1.001, 10**6, special=0),
    )
    kl_coef: float = key(0.0, "weight of KL(policy || initial policy)", Range(0, 1000))
    entropy_coef: float = key(0.0, "weight of the entropy bonus", Range(0, 1000))


@dataclasses.dataclass(frozen=True)
class TrainSection(Section, name="train"):
    """Batches, refill, staleness, packing and trainable weights."""

    num_steps: int = key(150, "number of training steps; each generates one batch and trains on it", STEPS)
    prompts_per_batch: int = key(64, "number of prompts per step", Range(1, 10**6))
    prompts_per_minibatch: int = key(32, "number of prompts per optimizer update", Range(1, 10**6))
    num_generations: int = key(8, "number N of generations per prompt", Range(1, 4096))
    max_prompt_tokens: int = key(10, "maximum number of prompt tokens; problems with more are dropped", TOKENS)
    trainable_pattern: str = key(
        "", "regular expression of the dotted paths of trained weights (empty = all weights)", PATTERN
    )
    # Above 0 requires a sampler with its own devices and algo.importance_cap, which corrects for the older policy.
    staleness: int = key(
        0,
        "maximum age k of the sampling policy in steps; the prompts of the next k batches are generated during the "
        "update (0 = on-policy; above 1 requires rollouts.in_flight)",
        Range(0, 64),
    )
    # A prompt without signal has a largest |advantage| of at most 1e-6, under the estimator of algo.advantages.
    refill: bool = key(
        False, "whether a step draws prompts until train.prompts_per_batch of them have an advantage other than 0"
    )
    max_draws: int = key(
        0,
        "maximum number of prompts that a step draws with train.refill; if too few have an advantage other than 0, the "
        "batch is smaller (0 = 4 x train.prompts_per_batch)",
        Range(0, 10**7),
    )
    deterministic: bool = key(
        False,
        "whether programs on GPUs are deterministic, which makes them slower; programs on CPUs and TPUs always are",
    )
    profile_steps: str = key(
        "", "first and last step to trace with the profiler of JAX, such as 10:12 (empty = none)", STEP_RANGE
    )
    row_tokens: int = key(
        0, "tokens per packed row (0 = two sequences of maximum length, rounded up)", Range(1, 2**24, special=0)
    )
    rows_per_device: int = key(
        0,
        "rows per microbatch on each group of mesh.tensor devices (0 = 1/8 of the rows that a minibatch can fill, "
        "within 256 to 4,096 tokens)",
        Range(1, 65_536, special=0),
    )


@dataclasses.dataclass(frozen=True)
class LoraSection(Section, name="lora"):
    """Low-rank adapters (LoRA), trained in float32 while the weights of the model are frozen."""

    rank: int = key(0, "rank of the adapters (0 = train the weights of the model instead)", Range(1, 1024, special=0))
    alpha: float = key(32.0, "scale of the adapters; their output is multiplied by alpha / rank", Range(1e-6, 10**6))
    targets: tuple[str, ...] = key(PROJECTIONS, "projections of every layer that have an adapter", TARGETS)


@dataclasses.dataclass(frozen=True)
class OptimizerSection(Section, name="optimizer"):
    """AdamW optimizer and learning rate schedule."""

    learning_rate: float = key(5e-4, "peak learning rate (0 = frozen weights)", Range(1e-12, 1, special=0))
    warmup_updates: int = key(0, "number of optimizer updates of linear learning rate warm-up", Range(0, 10**9))
    schedule: str = key("linear", "learning rate schedule after the warm-up")
    end_lr_fraction: float = key(0.02, "final learning rate of linear and cosine, relative to the peak", FRACTION)
    b1: float = key(0.9, "decay rate of the first moment", Range(0, 0.9999))
    b2: float = key(0.999, "decay rate of the second moment", Range(0, 0.999999))
    first_moment_dtype: str = key(
        "float32", "dtype of the first moment; bfloat16 halves its memory (the second moment is always float32)", FLOATS
    )
    eps: float = key(1e-8, "constant added to the square root of the second moment", Range(1e-20, 1))
    weight_decay: float = key(0.0, "decoupled weight decay, multiplied by the learning rate", Range(0, 10))
    max_grad_norm: float = key(0.3, "maximum global gradient norm; larger gradients are scaled down", Range(1e-8, 1e8))


@dataclasses.dataclass(frozen=True)
class MeshSection(Section, name="mesh"):
    """Device mesh. One of data, fsdp, tensor and expert may be -1, to use all remaining devices."""

    data: int = key(1, "number of replicas of the weights", Range(1, 10**5, special=-1))
    fsdp: int = key(-1, "number of shards of each weight along its embedding axis", Range(1, 10**5, special=-1))
    tensor: int = key(1, "number of shards of heads, MLP and vocabulary", Range(1, 10**5, special=-1))
    expert: int = key(1, "number of shards of the experts of a mixture", Range(1, 10**5, special=-1))
    device_kind: str = key("", "required device kind, such as v5p (empty = any)")
    num_devices: int = key(0, "number of devices (0 = all available devices)", Range(0, 10**5))


@dataclasses.dataclass(frozen=True)
class HostsSection(Section, name="hosts"):
    """Multi-process training. All processes have the same configuration except for hosts.process_id."""

    coordinator_address: str = key(
        "", "HOST:PORT of the first process (auto = from SLURM or the TPU pod, empty = one process)", COORDINATOR
    )
    num_processes: int = key(1, "number of processes; ignored if hosts.coordinator_address=auto", Range(1, 10**5))
    process_id: int = key(
        0, "index of this process, from 0; ignored if hosts.coordinator_address=auto", Range(0, 10**5)
    )
    init_timeout_seconds: int = key(
        300, "timeout in seconds for connecting to the other processes at startup", Range(1, 10**6)
    )


@dataclasses.dataclass(frozen=True)
class CheckpointSection(Section, name="checkpoint"):
    """Saving of checkpoints."""

    every: int = key(50, "interval between checkpoints, in steps", STEPS)
    keep: int = key(2, "number of checkpoints to keep; older checkpoints are deleted", STEPS)
    best: str = key(
        "",
        "held-out metric, such as eval/reward; a step with a higher value than all before is saved, and the best "
        "checkpoint is kept in addition to the newest ones (empty = none)",
    )
    accept_changed_code: bool = key(False, "whether a run continues although the user's code has changed")


@dataclasses.dataclass(frozen=True)
class EvalSection(Section, name="eval"):
    """Evaluation on held-out problems during training."""

    every: int = key(20, "interval between evaluations, in steps (0 = no evaluations)", Range(0, 10**9))
    num_problems: int = key(40, "number of held-out problems to evaluate, in the order of the task", Range(1, 10**6))
    num_generations: int = key(64, "number of generations per problem", Range(1, 4096))


@dataclasses.dataclass(frozen=True)
class LogSection(Section, name="log"):
    """Logged generations, Weights & Biases and Trackio."""

    generations_every: int = key(10, "interval between batches written to generations.jsonl, in steps", STEPS)
    wandb_project: str = key("", "name of the Weights & Biases project (empty = disabled)")
    trackio_project: str = key("", "name of the Trackio project (empty = disabled)")

    @property
    def projects(self) -> dict[str, str]:
        """Projects of the enabled loggers, by module."""
        projects = {"wandb": self.wandb_project, "trackio": self.trackio_project}
        return {module: project for module, project in projects.items() if project}


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """The configuration of a run: three keys, and a section for each component."""

    workdir: str = key("runs/default", "run folder; if it contains a checkpoint, the run is resumed", NOT_EMPTY)
    compilation_cache_dir: str = key("runs/compiled", "folder of compiled programs, which later runs reuse", NOT_EMPTY)
    seed: int = key(0, "random seed of the data order, sampled tokens, drawn sets and new adapters", SEED)

    model: ModelSection = ModelSection()
    base: BaseSection = BaseSection()
    task: TaskSection = TaskSection()
    judge: JudgeSection = JudgeSection()
    audit: AuditSection = AuditSection()
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


def max_sequence_tokens(config: Config) -> int:
    """Returns the maximum number of tokens of a prompt with its response."""
    return config.train.max_prompt_tokens + config.sampling.max_tokens


def max_draws(train: TrainSection) -> int:
    """Returns the maximum number of prompts that a step draws."""
    return (train.max_draws or 4 * train.prompts_per_batch) if train.refill else train.prompts_per_batch


def updates_per_step(train: TrainSection) -> int:
    """Returns the number of optimizer updates per step."""
    return train.prompts_per_batch // train.prompts_per_minibatch
