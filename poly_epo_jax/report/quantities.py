"""The quantities that reports show for runs: a title for each, and one sentence on what it means."""

from typing import NamedTuple

from poly_epo_jax.metrics import names


class Quantity(NamedTuple):
    title: str
    meaning: str


HELD_OUT = {
    names.HELD_OUT_REWARD: Quantity(
        "Held-out reward", "Mean reward of generations on problems that are not trained on."
    ),
    names.HELD_OUT_CORRECT_CLUSTERS: Quantity(
        "Held-out distinct correct of 8",
        "Clusters among the correct ones of 8 generations of a held-out problem, in expectation: 1 is a single "
        "strategy, 8 are eight different ones.",
    ),
}
"""Measured by the evaluations during training."""

TRAINING = {
    "reward": Quantity("Training reward", "Mean reward of the step's generations, before the update."),
    "solved": Quantity("Prompts with a correct generation", "Share of the step's prompts; the others teach nothing."),
    "clusters/correct": Quantity(
        "Clusters among correct", "Distinct strategies among a prompt's correct generations, mean over prompts."
    ),
    "clusters/incorrect": Quantity(
        "Clusters among incorrect", "Distinct strategies among a prompt's incorrect generations, mean over prompts."
    ),
    "synergy": Quantity(
        "Synergy",
        "Mean size of the part of a set advantage that is the covariance of reward and diversity over the sets which "
        "hold a generation, less that over all sets.",
    ),
    "response/length": Quantity("Response length", "Tokens that the policy wrote per generation, mean over the step."),
    "response/truncated": Quantity(
        "Share cut off", "Generations that reached sampling.max_tokens before they ended; they rarely hold an answer."
    ),
    "policy/entropy": Quantity(
        "Policy entropy",
        "Of the distribution of the next token, in nats, mean over trained tokens; 0: no choice is left.",
    ),
    "policy/kl": Quantity(
        "KL from the sampling policy",
        "In nats per trained token, between the policy before the step's updates and the one that is trained; it grows "
        "with how far a step's updates go.",
    ),
    "policy/reference_kl": Quantity(
        "KL to the initial policy", "In nats per trained token; only measured where algo.kl_coef is set."
    ),
    "policy/clip_fraction": Quantity(
        "Clipped tokens", "Share of trained tokens whose probability ratio is clipped, so that they have no gradient."
    ),
    "policy/gradient_norm": Quantity(
        "Gradient norm", "Before it is clipped to optimizer.max_grad_norm, mean over the step's updates."
    ),
}
"""Measured at every training step."""

QUANTITIES = HELD_OUT | TRAINING
