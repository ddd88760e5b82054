"""Rules for combinations of configuration keys: the condition of each violation, and its error message.

Rules are evaluated in order until the first violation, so a rule may rely on the previous ones.
"""

import math
from collections.abc import Iterator

from poly_epo_jax.config.keys import Config, ConfigError, max_sequence_tokens, updates_per_step
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.metrics.logged import held_out_metrics
from poly_epo_jax.rollouts import SAMPLERS
from poly_epo_jax.set_rl import OBJECTIVES
from poly_epo_jax.step.advantages import OWN_FEATURES, make_estimator
from poly_epo_jax.types import Interactive, Task

MAX_SETS = 10**6  # maximum number of sets per prompt
MAX_UPDATES = 10**9  # maximum number of optimizer updates of a run, because they are counted in 32 bits

Rules = Iterator[tuple[object, str]]
"""Pairs of a condition, which is true if the rule is violated, and the error message."""


def check_rules(rules: Rules) -> None:
    """Raises ConfigError with the message of the first violated rule, if there is one."""
    for is_violated, message in rules:
        if is_violated:
            raise ConfigError(message)


def command_rules(config: Config) -> Rules:
    """Yields the rules for all commands."""
    base, audit = config.base, config.audit
    yield (
        base.num_heads % base.num_kv_heads,
        f"base.num_kv_heads={base.num_kv_heads} must divide base.num_heads={base.num_heads}.",
    )
    yield (
        base.head_dim % 2,
        f"base.head_dim={base.head_dim} must be even, because rotary embeddings rotate pairs of values.",
    )
    for judge in (config.judge, audit.judge):
        yield (
            JUDGES[judge.name].needs_url and not judge.url,
            f"{judge.dotted('url')}='' must be the address of the judge server.",
        )
    yield (
        audit.every % config.log.generations_every,
        f"audit.every={audit.every} must be a multiple of log.generations_every={config.log.generations_every}, "
        "because audits read generations.jsonl; change one of them.",
    )
    needs_auditor = "judge.verify='second'" if config.judge.verify else f"audit.stop_inflation={audit.stop_inflation:g}"
    yield (
        (config.judge.verify or audit.stop_inflation) and not JUDGES[audit.judge.name].clusters,
        f"{needs_auditor} requires a second judge that clusters; set audit.judge.name.",
    )
    yield (
        audit.every and not JUDGES[config.judge.name].clusters,
        f"audit.every={audit.every} requires clusters, which judge.name={config.judge.name!r} does not provide; set "
        "audit.every=0.",
    )


def training_rules(config: Config) -> Rules:
    """Yields the further rules for training, section by section."""
    for rules in (_sampling, _sets, _batches, _weights, _lengths, _estimator, _rollouts, _staleness):
        yield from rules(config)


def task_rules(config: Config, task: Task) -> Rules:
    """Yields the rules for training on a task."""
    yield (
        config.eval.every and not task.held_out_problems,
        f"eval.every={config.eval.every}, but the task has no held-out problems; set eval.every=0.",
    )
    best, judge = config.checkpoint.best, JUDGES[config.judge.name]
    metrics = held_out_metrics(config.eval.num_generations, judge.clusters) if best and config.eval.every else ()
    yield (
        best and best not in metrics,
        f"checkpoint.best={best!r} must be a held-out metric of the run: {', '.join(metrics)}."
        if metrics
        else f"checkpoint.best={best!r} requires evaluations; set eval.every.",
    )
    yield (
        config.train.prompts_per_batch > len(task.train_problems),
        f"train.prompts_per_batch={config.train.prompts_per_batch} exceeds the number of training problems, "
        f"{len(task.train_problems)}; lower it, or use more problems.",
    )
    yield (
        isinstance(task, Interactive) and config.algo.truncated == "mask",
        "algo.truncated='mask' would leave episodes that reach sampling.max_tokens or sampling.max_turns out of the "
        "update, so nothing would make them less likely; set algo.truncated=train.",
    )
    yield (
        isinstance(task, Interactive) and config.rollouts.in_flight,
        f"rollouts.in_flight=True is not supported with task.name={config.task.name!r}, because updates wait for the "
        "end of episodes; set rollouts.in_flight=False.",
    )
    yield (
        isinstance(task, Interactive) and config.sampling.correlated,
        f"sampling.correlated=True is not supported with task.name={config.task.name!r}, because generations have "
        "different prompts after the first turn; set sampling.correlated=False.",
    )


def _sampling(config: Config) -> Rules:
    sampling = config.sampling
    yield (
        sampling.temperature == 0,
        "sampling.temperature=0.0 must be positive, because training requires random sampling.",
    )
    yield (
        sampling.top_p < 1 or sampling.top_k,
        f"sampling.top_p={sampling.top_p} and sampling.top_k={sampling.top_k} would bias the gradient, because the "
        "trained log-probabilities are normalized over all tokens; set top_p=1 and top_k=0 for training.",
    )


def _sets(config: Config) -> Rules:
    algo, num_generations = config.algo, config.train.num_generations
    yield (
        algo.set_size >= num_generations,
        f"algo.set_size={algo.set_size} must be smaller than train.num_generations={num_generations}, also for methods "
        "without sets, because all runs log metrics of sets; lower algo.set_size.",
    )
    all_sets = math.comb(num_generations, algo.set_size)
    yield (
        algo.num_sets > all_sets,
        f"algo.num_sets={algo.num_sets} must be at most C(N, n) = {all_sets}, or 0 for all sets.",
    )
    yield (
        not (algo.num_sets or OBJECTIVES[algo.objective].closed_form) and all_sets > MAX_SETS,
        f"algo.num_sets=0 selects all {all_sets} sets; set it to a smaller number, such as 1000.",
    )


def _batches(config: Config) -> Rules:
    train, warmup_updates = config.train, config.optimizer.warmup_updates
    yield (
        train.prompts_per_batch % train.prompts_per_minibatch,
        f"train.prompts_per_minibatch={train.prompts_per_minibatch} must divide "
        f"train.prompts_per_batch={train.prompts_per_batch}.",
    )
    yield (
        train.max_draws and (not train.refill or train.max_draws < train.prompts_per_batch),
        f"train.max_draws={train.max_draws} requires train.refill=True and at least "
        f"train.prompts_per_batch={train.prompts_per_batch} prompts; set train.max_draws=0 for the default limit.",
    )
    updates = updates_per_step(train)
    yield (
        train.num_steps * updates > MAX_UPDATES,
        f"train.num_steps={train.num_steps} with {updates} updates per step exceeds the maximum of {MAX_UPDATES:,} "
        "updates; lower it.",
    )
    yield (
        warmup_updates >= train.num_steps * updates,
        f"optimizer.warmup_updates={warmup_updates} must be smaller than the number of updates of the run, "
        f"{train.num_steps * updates:,} (train.num_steps={train.num_steps}); lower it, or raise train.num_steps.",
    )


def _weights(config: Config) -> Rules:
    rank, pattern, param_dtype = config.lora.rank, config.train.trainable_pattern, config.model.param_dtype
    yield (
        rank and pattern,
        f"lora.rank={rank} trains only adapters, which excludes train.trainable_pattern={pattern!r}; set only one of "
        "them.",
    )
    yield (
        param_dtype != "float32" and not rank,
        f"model.param_dtype={param_dtype!r} must be float32 for weights that are trained, because bfloat16 rounds away "
        "almost all small updates; set model.dtype=bfloat16 for activations and matrix products only, or train an "
        "adapter (lora.rank).",
    )


def _lengths(config: Config) -> Rules:
    row_tokens, max_tokens, algo = config.train.row_tokens, config.sampling.max_tokens, config.algo
    yield (
        row_tokens and row_tokens < max_sequence_tokens(config),
        f"train.row_tokens={row_tokens} must be at least train.max_prompt_tokens + sampling.max_tokens = "
        f"{max_sequence_tokens(config)} tokens.",
    )
    yield (
        algo.truncated == "penalize" and algo.overlong_tokens > max_tokens,
        f"algo.overlong_tokens={algo.overlong_tokens} must be at most sampling.max_tokens={max_tokens}; lower it, or "
        "set it to 0.",
    )


def _estimator(config: Config) -> Rules:
    estimator, num_generations, judge = make_estimator(config.algo), config.train.num_generations, config.judge.name
    yield (
        num_generations < estimator.min_generations,
        f"train.num_generations={num_generations} must be at least {estimator.min_generations} for {estimator.title} "
        f"with algo.options={dict(config.algo.options)}.",
    )
    features = JUDGES[judge].features
    added = [name for name in estimator.reads if name not in (*OWN_FEATURES, "clusters")]
    missing = [name for name in added if features is not None and name not in features]
    yield (
        missing,
        f"{estimator.title} reads {', '.join(missing)}, which judge.name={judge!r} does not provide; choose a judge "
        "that does, or change algo.advantages or algo.objective.",
    )
    yield (
        "clusters" in estimator.reads and not JUDGES[judge].clusters,
        f"{estimator.title} requires clusters, which judge.name={judge!r} does not provide; choose another judge, or a "
        "method without clusters, such as GRPO (append :grpo to the configuration file).",
    )
    yield (
        added and config.judge.on_failure == "distinct",
        f"judge.on_failure='distinct' only replaces clusters, but {estimator.title} also reads {', '.join(added)} of "
        "the judge, which are missing where the judge failed; set judge.on_failure=drop.",
    )


def _rollouts(config: Config) -> Rules:
    rollouts, sampler = config.rollouts, SAMPLERS[config.rollouts.name]
    yield (
        rollouts.min_group > config.train.num_generations,
        f"rollouts.min_group={rollouts.min_group} must be at most "
        f"train.num_generations={config.train.num_generations}; lower it.",
    )
    yield (
        sampler.needs_urls and not rollouts.urls,
        "rollouts.urls='' must be the address of at least one server of the policy.",
    )
    yield (
        config.sampling.correlated and not sampler.has_slots,
        f"sampling.correlated=True is not supported with rollouts.name={rollouts.name!r}, which draws its own random "
        "numbers; set sampling.correlated=False or rollouts.name=embedded.",
    )
    yield (
        rollouts.in_flight and not sampler.while_training,
        f"rollouts.in_flight=True is not supported with rollouts.name={rollouts.name!r}, whose generations end before "
        f"an update; set rollouts.in_flight=False, or rollouts.name={_names_while_training()}.",
    )
    yield (
        rollouts.in_flight and rollouts.shared_servers,
        "rollouts.shared_servers=True is not supported with rollouts.in_flight=True, because other processes would "
        "accept completions before the first process has verified the update; set one of them to False.",
    )


def _staleness(config: Config) -> Rules:
    """Yields the rules for samplers that generate ahead.

    With staleness 1, the sampler generates the next batch with the current weights while an update replaces them. The
    weights that generated a batch are then one step older than the weights that are trained on it.
    """
    rollouts, staleness = config.rollouts, config.train.staleness
    yield (
        staleness and rollouts.shared_servers,
        f"rollouts.shared_servers=True is not supported with train.staleness={staleness}, because one process would "
        "update the servers while others still generate; set rollouts.shared_servers=False or train.staleness=0.",
    )
    yield (
        staleness and not SAMPLERS[rollouts.name].while_training,
        f"rollouts.name={rollouts.name!r} shares the weights and devices of the trainer, so it cannot generate during "
        f"an update; set train.staleness=0, or rollouts.name={_names_while_training()}.",
    )
    yield (
        staleness and not config.algo.importance_cap,
        "algo.importance_cap=0.0 would not correct for the older policy that generates with "
        f"train.staleness={staleness}; set it, for example to 2.",
    )
    yield (
        staleness > 1 and not rollouts.in_flight,
        f"train.staleness={staleness} requires rollouts.in_flight=True, because weight updates otherwise wait for all "
        "responses in progress; set it, or set train.staleness=1.",
    )


def _names_while_training() -> str:
    """Returns the names of the samplers that can generate while the policy is trained."""
    return " or ".join(name for name, sampler in SAMPLERS.items() if sampler.while_training)
