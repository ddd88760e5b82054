"""Registry of the metrics that a training run logs, in metrics.jsonl and timing.jsonl.

Progress display, reports and model cards read titles and meanings from `LOGGED_METRICS`. Metrics of the evaluations
during training are named `eval/NAME`. Their titles and meanings follow from `EVALUATION_METRICS` unless they are
listed here. A configuration file can register the metrics that its own components log.
"""

import dataclasses

import numpy as np

from poly_epo_jax.metrics import evaluation
from poly_epo_jax.registry import Registry

_HELD_OUT = "eval/"


@dataclasses.dataclass(frozen=True)
class LoggedMetric:
    """A metric with one value per training step.

    Attributes:
      title: Name in tables and figures.
      meaning: One sentence that defines the metric, with its unit.
      watch_for: Values that require attention and the reaction, or empty if there are none.
      brief: Short label for the progress display of a run. If empty, the display does not show the metric.
      drawn: Whether reports draw the metric over training steps.
      digits: Number of decimals in summaries.
      unit_axis: Whether figures draw the metric on an axis from 0 to 1.
      fallback: Whether a value above 0 means that something failed, was repeated or was left out. The progress display
        shows these metrics as soon as they are not 0.
    """

    title: str
    meaning: str
    watch_for: str = ""
    brief: str = ""
    drawn: bool = False
    digits: int = 3
    unit_axis: bool = False
    fallback: bool = False


LOGGED_METRICS: Registry[LoggedMetric] = Registry(
    {
        # Evaluations during training.
        "eval/reward": LoggedMetric(
            "Held-out reward",
            "Mean reward of generations on problems that are not trained on.",
            "A decrease while `reward` increases: the policy overfits to the training problems.",
            brief="reward",
            unit_axis=True,
        ),
        "eval/degenerate_fraction": LoggedMetric(
            "Held-out degenerate responses", "Fraction of generations that contain no attempt at reasoning."
        ),
        "eval/judge_failed_problems": LoggedMetric(
            "Held-out judge failures",
            "Number of held-out problems on which the judge failed.",
            "Above 0: the cluster metrics of the evaluation omit these problems.",
            fallback=True,
        ),
        "eval/environment_failed_responses": LoggedMetric(
            "Held-out failed responses",
            "Number of responses to held-out problems on which the environment or an own reward failed.",
            "Above 0: all metrics of the evaluation omit these responses.",
            fallback=True,
        ),
        "eval/environment_failed_problems": LoggedMetric(
            "Held-out failed problems",
            "Number of held-out problems on all of whose responses the environment or an own reward failed.",
            "Above 0: all metrics of the evaluation omit these problems.",
            fallback=True,
        ),
        "eval/environment/retries": LoggedMetric(
            "Held-out repeated episodes",
            "Number of held-out episodes that were repeated because the environment failed.",
            fallback=True,
        ),
        "eval/environment/no_room": LoggedMetric(
            "Held-out episodes without room",
            "Number of held-out episodes that ended because a reply left no tokens or turns for the policy.",
            fallback=True,
        ),
        "eval/judge/retries": LoggedMetric(
            "Held-out judge retries",
            "Number of requests to the judge about held-out problems that were repeated. Its other counters are named "
            "in the same way.",
            fallback=True,
        ),
        # Generations of a step.
        "reward": LoggedMetric(
            "Training reward",
            "Mean reward of the step's generations, before the update.",
            "Constantly 0: GRPO and Poly-EPO then have advantage 0 on all prompts, and nothing is learned.",
            brief="reward",
            drawn=True,
            unit_axis=True,
        ),
        "rewards/*": LoggedMetric(
            "Reward part {name}",
            "Mean of a part of the reward, rescaled to [0, 1], over the step's generations that have it.",
            drawn=True,
            unit_axis=True,
        ),
        "solved": LoggedMetric(
            "Solved prompts",
            "Fraction of the step's prompts with at least one correct generation.",
            "Near 0: with 0/1 rewards, GRPO and Poly-EPO have advantage 0 on prompts without a correct generation.",
            brief="solved",
            drawn=True,
            unit_axis=True,
        ),
        "train/solved_in_batch": LoggedMetric("Problems solved", "Number of distinct problems that the step solves."),
        "train/ever_solved": LoggedMetric(
            "Problems ever solved", "Number of distinct training problems solved so far.", drawn=True, digits=0
        ),
        "clusters/correct": LoggedMetric(
            "Correct clusters per prompt",
            "Number of distinct clusters among the correct generations of a prompt, mean over prompts.",
            "A decrease towards 1 while `reward` increases: the policy converges to one strategy per prompt.",
            brief="correct clusters",
            drawn=True,
        ),
        "clusters/incorrect": LoggedMetric(
            "Incorrect clusters per prompt",
            "Number of distinct clusters among the incorrect generations of a prompt, mean over prompts.",
            brief="incorrect clusters",
            drawn=True,
        ),
        "clusters/synergy": LoggedMetric(
            "Synergy",
            "Mean absolute value of the covariance term of the set advantage: the covariance of reward and diversity "
            "over the sets that contain a generation, minus the covariance over all sets.",
            brief="synergy",
            drawn=True,
        ),
        "clusters/degenerate_fraction": LoggedMetric(
            "Degenerate responses",
            "Fraction of the step's generations that contain no attempt at reasoning.",
            "An increase: read the responses with cluster 100 in generations.jsonl.",
        ),
        "episode/turns": LoggedMetric(
            "Turns of an episode", "Mean number of the policy's turns in an episode.", drawn=True
        ),
        "episode/*": LoggedMetric(
            "Metrics of episodes", "Mean of a metric of the environment over the step's episodes that have it."
        ),
        "response/length": LoggedMetric(
            "Response length",
            "Mean number of tokens that the policy generated per response.",
            "Values near `sampling.max_tokens`: see `response/truncated`.",
            drawn=True,
        ),
        "response/truncated": LoggedMetric(
            "Truncated responses",
            "Fraction of generations that reached sampling.max_tokens. Truncated responses rarely contain an answer.",
            "An increase or a large fraction: increase `sampling.max_tokens`.",
            drawn=True,
            unit_axis=True,
            fallback=True,
        ),
        "response/looped": LoggedMetric(
            "Responses that end in a loop",
            "Fraction of generations whose last 64 or more tokens repeat one sequence of tokens at least four times.",
            "An increase: read the ends of these responses in generations.jsonl. If `algo.truncated` is mask, "
            "truncated loops are not trained on, so nothing makes them less likely.",
            drawn=True,
            unit_axis=True,
        ),
        "response/masked": LoggedMetric(
            "Masked truncated responses",
            "Number of truncated responses of the step, which algo.truncated=mask leaves out.",
            fallback=True,
        ),
        "response/penalty": LoggedMetric(
            "Overlong penalty",
            "Mean penalty of algo.truncated=penalize over the generations of the step, before it is centered over "
            "each prompt's generations.",
        ),
        "response/staleness": LoggedMetric(
            "Staleness of responses",
            "Number of training steps by which the sampling weights were older than the policy before the update, "
            "as a mean over the generated tokens.",
            "Above `train.staleness`: responses were sampled with outdated weights.",
        ),
        "response/max_staleness": LoggedMetric(
            "Maximum staleness of responses",
            "Staleness of the oldest generated token of the step.",
            "Above `train.staleness`: responses were sampled with outdated weights.",
        ),
        "data/reward/*": LoggedMetric(
            "Reward by dataset",
            "Mean reward of the generations for the problems of a dataset (`Problem.source`). Only logged for steps "
            "with problems of several datasets.",
        ),
        "data/drawn": LoggedMetric(
            "Drawn prompts",
            "Number of prompts whose responses the step received, including discarded prompts.",
            "Constantly `train.max_draws`: few prompts have an advantage other than 0, and batches are smaller.",
        ),
        "data/with_signal": LoggedMetric(
            "Prompts with signal",
            "Number of the step's prompts with an absolute advantage above 1e-6, without discarded prompts.",
            "Far below `train.prompts_per_batch`: set `train.refill`, or filter the problems.",
            drawn=True,
            digits=0,
        ),
        "data/without_signal": LoggedMetric(
            "Prompts without signal",
            "Number of the step's prompts whose advantages are all 0, without discarded prompts and without prompts "
            "that a failure of the judge excludes.",
        ),
        "data/discarded": LoggedMetric(
            "Discarded prompts",
            "Number of prompts whose responses were discarded, because train.refill had drawn more prompts than the "
            "batch requires or, with train.staleness, because a run was interrupted that had drawn them ahead. Their "
            "problems are drawn again.",
        ),
        "data/too_old": LoggedMetric(
            "Outdated prompts",
            "Number of the step's prompts that are not trained on, because their responses were sampled with weights "
            "that are more than train.staleness steps old. Only logged with train.staleness above 0.",
            "Above 0: servers generate with outdated weights; read their logs.",
            fallback=True,
        ),
        "data/too_old_length": LoggedMetric(
            "Response length of outdated prompts",
            "Mean number of tokens that the policy generated per response to the prompts of `data/too_old`.",
            "Different from `response/length`: the update then prefers short or long responses.",
        ),
        # Updates of a step.
        "policy/entropy": LoggedMetric(
            "Policy entropy",
            "Mean entropy of the next-token distribution over trained tokens, in nats.",
            "Near 0: responses to a prompt are almost identical, so most advantages are 0.",
            brief="entropy",
            drawn=True,
        ),
        "policy/expert_load": LoggedMetric(
            "Largest load of an expert",
            "Largest number of tokens of an expert in a microbatch, relative to the mean of all experts. Mean over "
            "layers and trained tokens. Only logged for mixtures of experts.",
            "An increase: the router prefers few experts. With `mesh.expert` above 1, the device with the largest load "
            "determines the time of a layer.",
        ),
        "policy/kl": LoggedMetric(
            "KL(old policy, current policy)",
            "Mean estimate of KL(old, current) over trained tokens, in nats. The old policy is the policy before the "
            "step's first update, so the metric grows with the size of the step's updates.",
            "A sudden increase: lower `optimizer.learning_rate`. Always 0 if a step has one update.",
            drawn=True,
        ),
        "policy/reference_kl": LoggedMetric(
            "KL(current policy, initial policy)",
            "Mean estimate of KL(current, initial) over trained tokens, in nats. Only logged if algo.kl_coef is set.",
            drawn=True,
        ),
        "policy/clip_fraction": LoggedMetric(
            "Clipped tokens",
            "Fraction of trained tokens whose probability ratio is clipped by the loss.",
            "A large fraction: lower `optimizer.learning_rate`. Always 0 if a step has one update.",
            brief="clip fraction",
            drawn=True,
        ),
        "policy/gradient_norm": LoggedMetric(
            "Gradient norm",
            "Norm of the gradient before it is clipped to optimizer.max_grad_norm, mean over the step's updates.",
            "0: all advantages are 0. Isolated peaks: compare them with `policy/kl` and `mismatch/max`.",
            drawn=True,
        ),
        "policy/covariance_fraction": LoggedMetric(
            "Tokens with high covariance",
            "Fraction of trained tokens that the loss clip_cov excludes from the gradient, or that kl_cov penalizes.",
        ),
        "policy/ratio": LoggedMetric(
            "Probability ratio", "Mean ratio of the current to the old policy's probability over trained tokens."
        ),
        "policy/loss": LoggedMetric(
            "Loss", "Value of the minimized objective, mean over the step's updates.", "Not a measure of progress."
        ),
        "policy/learning_rate": LoggedMetric("Learning rate", "Learning rate, mean over the step's updates."),
        "policy/update_norm": LoggedMetric(
            "Update norm", "Norm of the change of the trained weights, mean over the step's updates."
        ),
        "policy/weight_norm": LoggedMetric(
            "Weight norm", "Norm of the trained weights after an update, mean over the step's updates."
        ),
        "packing/padding_fraction": LoggedMetric(
            "Padding",
            "Fraction of the tokens in packed rows that are padding.",
            "A large fraction: adjust `train.row_tokens` or `train.rows_per_device`.",
        ),
        "mismatch/mean": LoggedMetric(
            "Sampler mismatch",
            "Mean absolute difference of log p between trainer and sampler over response tokens, in nats.",
            "Values above the rounding errors of the dtype: the sampler computes another policy.",
        ),
        "mismatch/max": LoggedMetric(
            "Maximum sampler mismatch",
            "Maximum absolute difference of log p between trainer and sampler over response tokens, in nats.",
            "Large values at a small mean: set `algo.max_mismatch_ratio`, for example to 1.05.",
        ),
        "mismatch/kl": LoggedMetric(
            "KL(sampler, trainer)",
            "Mean estimate of KL(sampler, trainer) over response tokens, in nats, before the step's first update.",
            "Above about 1e-3: set `algo.importance_cap`, for example to 2.",
        ),
        "mismatch/truncated_fraction": LoggedMetric(
            "Capped importance weights",
            "Fraction of response tokens whose importance weight is reduced to algo.importance_cap.",
        ),
        "mismatch/masked_responses": LoggedMetric(
            "Masked responses",
            "Number of responses that algo.max_mismatch_ratio excludes from the update.",
            fallback=True,
        ),
        # Failures and retries.
        "environment/failed_responses": LoggedMetric(
            "Failed responses",
            "Number of the step's responses on which the environment or an own reward failed. They have no reward, and "
            "are not trained on.",
            "Above 0: the column `reason` in generations.jsonl describes the failures.",
            fallback=True,
        ),
        "environment/failed_prompts": LoggedMetric(
            "Failed prompts",
            "Number of the step's prompts with too few other responses (`rollouts.min_group`). They are left out.",
            "Above `rollouts.max_failed_fraction` of the prompts: the run stops.",
            fallback=True,
        ),
        "environment/failed/*": LoggedMetric(
            "Failed responses by kind",
            "Number of the step's responses on which the environment or an own reward failed in this way.",
            "`late`: increase `rollouts.episode_timeout_seconds`, or `rollouts.grading_timeout_seconds` for rewards. "
            "`raised`: correct the environment or reward. `long`: shorten replies to `max_reply_tokens`.",
        ),
        "environment/no_room": LoggedMetric(
            "Episodes without room",
            "Number of episodes that ended with reward 0 because a reply left no tokens or turns for the policy.",
            "A tenth of the episodes: increase `sampling.max_tokens` or `sampling.max_turns`, or shorten the replies.",
            fallback=True,
        ),
        "environment/retries": LoggedMetric(
            "Repeated episodes", "Number of episodes that were repeated because the environment failed.", fallback=True
        ),
        "judge/failed_prompts": LoggedMetric(
            "Judge failures",
            "Number of the step's prompts on which the judge failed.",
            "`judge.on_failure` selects their use. Above `judge.max_failed_fraction` of the prompts: a method that "
            "reads clusters stops the run.",
            fallback=True,
        ),
        "judge/failed/*": LoggedMetric(
            "Judge failures by kind",
            "Number of the step's prompts on which the judge failed in this way.",
            "`truncated`: increase the option `max_tokens` of the judge. `refused`: prompts may be too long. "
            "`limited`: lower `judge.max_concurrent`.",
        ),
        "judge/skipped_updates": LoggedMetric(
            "Skipped updates",
            "Number of the step's updates without a prompt that could be trained on.",
            "Above 0: these updates do not change the weights, but count in the learning rate schedule.",
            fallback=True,
        ),
        "judge/retries": LoggedMetric(
            "Judge retries", "Number of requests to the judge that were repeated.", fallback=True
        ),
        "judge/shortened_responses": LoggedMetric(
            "Shortened responses",
            "Number of responses that were shortened to fit into the judge's prompt.",
            "Above 0: the judge does not read the middle of these responses; increase `max_response_chars`.",
            fallback=True,
        ),
        "judge/prompt_tokens": LoggedMetric(
            "Judge's prompt tokens", "Number of tokens of the requests to the judge, if its server reports it."
        ),
        "judge/reply_tokens": LoggedMetric(
            "Judge's reply tokens", "Number of tokens of the judge's replies, if its server reports it."
        ),
        "grader/timeouts": LoggedMetric(
            "Grader timeouts",
            "Number of answers with reward 0 because their comparison exceeded its time limit.",
            "Above 0 in many steps: correct answers may have reward 0.",
            fallback=True,
        ),
        "grader/crashes": LoggedMetric(
            "Grader crashes",
            "Number of answers with reward 0 because their comparison ended its worker process.",
            "Above 0 in many steps: correct answers may have reward 0.",
            fallback=True,
        ),
        "rollouts/server_failures": LoggedMetric(
            "Server failures",
            "Number of failures of generation servers.",
            "Above 0: read the logs of the servers.",
            fallback=True,
        ),
        "rollouts/resampled": LoggedMetric(
            "Resampled generations", "Number of generations that were resampled.", fallback=True
        ),
        "rollouts/invalid_responses": LoggedMetric(
            "Invalid server responses",
            "Number of generations that were resampled because a response was invalid.",
            "Above 0: read the logs of the servers.",
            fallback=True,
        ),
        "rollouts/replaced_characters": LoggedMetric(
            "Replaced characters",
            "Number of characters of prompts and replies that the tokenizer cannot encode, if there are any. They are "
            "replaced with U+FFFD, or removed if the tokenizer cannot encode U+FFFD.",
            "Above 0: correct the prompts, or the texts that the environment returns.",
            fallback=True,
        ),
        "rollouts/bytes_proofs": LoggedMetric(
            "Updates proven by checksums",
            "Number of weight updates of servers that are proven by checksums of their tensors.",
        ),
        "rollouts/change_proofs": LoggedMetric(
            "Updates proven by changes",
            "Number of weight updates of servers that are proven by a change of their log-probabilities of a probe.",
        ),
        "rollouts/trainer_proofs": LoggedMetric(
            "Updates that agree with the trainer",
            "Number of weight updates of servers whose log-probabilities of a probe agree with the trainer's.",
        ),
        "rollouts/rejected_updates": LoggedMetric(
            "Rejected weight updates",
            "Number of weight updates of servers that failed the verification by content.",
            "Above 0: the error messages name the servers. They are not given prompts until an update succeeds.",
            fallback=True,
        ),
        "checkpoints/corrupted": LoggedMetric(
            "Corrupted checkpoints",
            "Number of corrupted checkpoints that were skipped when the run was resumed.",
            "Above 0: check the disk; the files are in checkpoints.corrupted/.",
        ),
        "attention/disabled_kernels": LoggedMetric(
            "Disabled attention kernels",
            "Number of attention kernels that failed the self-check and are not used.",
            "Above 0: the much slower blockwise implementation is used instead; run the doctor.",
        ),
        # Time and memory.
        "seconds/step": LoggedMetric(
            "Step time", "Duration of the step, in seconds.", "An increase: compare the stages."
        ),
        "seconds/*": LoggedMetric("Stage time", "Seconds for which the stage was in progress for the step's batch."),
        "exclusive_seconds/*": LoggedMetric(
            "Exclusive stage time",
            "Seconds of the step in which no other stage was in progress.",
            "The largest value: halving this stage saves at least half of this time.",
        ),
        "judge/overlap_fraction": LoggedMetric(
            "Judge overlap",
            "Fraction of the judge's time in which other prompts were still being generated.",
            "Near 0 with a judge server: the step waits for the judge after all responses are generated.",
        ),
        "sync/step_fraction": LoggedMetric(
            "Sync fraction", "Fraction of the step's duration that is spent on pushing weights."
        ),
        "tokens_per_second": LoggedMetric("Tokens per second", "Generated tokens divided by the step's duration."),
        "memory/peak_bytes": LoggedMetric(
            "Peak memory",
            "Peak memory of the most heavily used local device or, on CPU, of the process, in bytes.",
            "Values near the memory of the device: see the memory plan (bench `--plan`).",
        ),
    }
)
"""Logged metrics by name. `PREFIX/*` stands for all names with this prefix without a separate entry, and `{name}` in
its title for the rest of the name."""

# Prefixes of the metrics that tasks, samplers and judges report themselves.
_COUNTERS = (
    *("grader/", "rollouts/"),
    *("judge/retries", "judge/shortened_responses", "judge/prompt_tokens", "judge/reply_tokens"),
    *("environment/retries", "environment/no_room"),
)
_RESERVED = frozenset(name for name in LOGGED_METRICS if not name.startswith(_COUNTERS))


def is_reserved(name: str) -> bool:
    """Returns True if the name is reserved for metrics of the training loop."""
    family = f"{name.rpartition('/')[0]}/*"
    return name == "step" or name.startswith((_HELD_OUT, "policy/")) or bool({name, family} & _RESERVED)


def held_out(name: str) -> str:
    """Returns the name under which a run logs an evaluation metric on held-out problems."""
    return _HELD_OUT + name


def held_out_metrics(num_generations: int, with_clusters: bool) -> list[str]:
    """Returns the names of the metrics of evaluations during training, without counts and fractions of failures.

    Metrics of graded rewards are included, which evaluations omit if all rewards are 0 or 1.

    Args:
      num_generations: Number of generations per problem.
      with_clusters: Whether the judge clusters responses.
    """
    values = {"rewards": 0.5, "correct": False} | ({"clusters": 0} if with_clusters else {})
    arrays = {name: np.full((1, num_generations), value) for name, value in values.items()}
    names = evaluation.problem_values(arrays, curves=False).keys() - {evaluation.MEAN_REWARD}
    return [HELD_OUT_REWARD, *sorted(map(held_out, names))]


def is_held_out(name: str) -> bool:
    """Returns True if the logged metric was measured on held-out problems."""
    return name.startswith(_HELD_OUT)


def describe(name: str) -> LoggedMetric:
    """Returns the entry of a logged metric. A metric without an entry has its name as title."""
    if name not in LOGGED_METRICS and is_held_out(name):
        metric = evaluation.describe(name.removeprefix(_HELD_OUT))
        shown = {"brief": metric.title, "digits": metric.digits, "unit_axis": metric.is_fraction}
        return LoggedMetric(f"Held-out {metric.title}", metric.meaning, **shown)
    prefix, _, last = name.rpartition("/")
    family = LOGGED_METRICS.get(f"{prefix}/*", LoggedMetric(name, ""))
    return LOGGED_METRICS.get(name, dataclasses.replace(family, title=family.title.replace("{name}", last)))


HELD_OUT_REWARD, HELD_OUT_SOLVED = held_out("reward"), held_out("solved")
HELD_OUT_CORRECT_CLUSTERS = held_out(evaluation.at(evaluation.CORRECT_CLUSTERS, 8))
