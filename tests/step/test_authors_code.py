"""Compares `configs/polaris.py:poly_epo,authors` and `:grpo,authors` with the formulas of the authors' code.

The reference functions were written for these tests from the formulas in verl/trainer/ppo/core_algos.py of
https://github.com/ifdita-hasan/polyepo, with the values that its scripts set. They use torch in float64.
"""

import itertools
import os

import jax
import numpy as np
import pytest

from configs import polaris
from poly_epo_jax import set_rl
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.step.advantages import make_advantages, make_loss
from poly_epo_jax.types import Problem

if os.environ.get("POLY_EPO_REQUIRE_TORCH"):
    import torch  # pyright: ignore[reportMissingImports]
else:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed; run bash launch/test.sh all, which installs it for CPUs"
    )

torch.set_num_threads(1)
pytestmark = pytest.mark.slow  # requires torch

P, N, T = 3, 8, 12
SETS = torch.tensor(list(itertools.combinations(range(N), 4)))
CLIP_HIGH = {"poly_epo": 0.28, "grpo": 0.2}
"""`clip_ratio_high` in the script of each method."""


def poly_epo_advantages(rewards, clusters):
    """Returns the advantages [N] of one prompt: sums over the sets of each response, divided by their number + 1e-6."""
    distinct = sum((clusters[SETS] == cluster).any(dim=1).double() for cluster in range(1, N + 1))  # without 100
    scores = rewards[SETS].mean(dim=1) * distinct / 4
    holds = (SETS[:, :, None] == torch.arange(N)).any(dim=1).double()  # [sets, N]
    return ((scores - scores.mean()) @ holds) / (holds.sum(dim=0) + 1e-6)


def grpo_advantages(rewards, clusters):
    """Returns the advantages [N] of one prompt, with norm_adv_by_std_in_grpo=False."""
    return rewards - rewards.mean()


REFERENCE = {"poly_epo": poly_epo_advantages, "grpo": grpo_advantages}


def policy_loss(logprobs, old_logprobs, advantages, mask, clip_high):
    """Returns the loss of sequences [P N, T]: dual clip 3, and the mean over micro-batches of one sequence each.

    The aggregation seq-mean-token-sum-norm divides the sum of a micro-batch by the padded length of a response.
    """
    ratio = torch.exp(torch.clamp(logprobs - old_logprobs, -20, 20))
    clipped = torch.maximum(-advantages * ratio, -advantages * torch.clamp(ratio, 1 - 0.2, 1 + clip_high))
    of_token = torch.where(advantages < 0, torch.minimum(-advantages * 3.0, clipped), clipped)
    micro_batches = [(losses * used).sum() / mask.shape[-1] for losses, used in zip(of_token, mask, strict=True)]
    return torch.stack(micro_batches).mean()


@pytest.mark.parametrize("method", REFERENCE)
def test_advantages_loss_and_gradient_are_those_of_the_authors_code(method: str):
    config = polaris.get_config(f"{method},authors")
    config.sampling.max_tokens = T
    algo = read_config(config).algo
    our_advantages, our_loss = make_advantages(algo, seed=0), make_loss(algo)

    @jax.jit
    def loss_and_gradient(logprobs, *arrays):
        return jax.value_and_grad(lambda logprobs: our_loss(set_rl.Tokens(logprobs, *arrays))[0])(logprobs)

    clipped, problems = 0, [Problem(str(place), "", "") for place in range(P)]
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rewards = (rng.random((P, N)) < rng.random((P, 1))).astype(np.float32)
        clusters = np.where(rng.random((P, N)) < 0.25, 100, rng.integers(1, rng.integers(2, N + 1), (P, N)))
        lengths = rng.integers(1, T + 1, (P, N))
        old_logprobs = -rng.exponential(1.0, (P * N, T)).astype(np.float32)
        logprobs = old_logprobs + rng.normal(0, 0.8, (P * N, T)).astype(np.float32)

        found = our_advantages(seed, problems, {"rewards": rewards, "clusters": clusters.astype(np.int32)})
        groups = zip(torch.tensor(rewards).double(), torch.tensor(clusters), strict=True)
        expected = torch.stack([REFERENCE[method](*group) for group in groups])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

        mask = np.arange(T) < lengths.reshape(-1, 1)
        weights = set_rl.token_weights(lengths, algo.length_normalization, config.sampling.max_tokens)
        rows = (np.repeat(found.reshape(-1, 1), T, axis=1), np.where(mask, np.reshape(weights, (-1, 1)), 0))
        value, gradient = loss_and_gradient(logprobs, old_logprobs, *rows, mask.astype(int))
        current, old = (torch.tensor(array, dtype=torch.float64) for array in (logprobs, old_logprobs))
        current.requires_grad_()
        of_token = expected.reshape(-1, 1).expand(-1, T)
        loss = policy_loss(current, old, of_token, torch.tensor(mask).double(), CLIP_HIGH[method])
        (expected_gradient,) = torch.autograd.grad(loss, current)
        np.testing.assert_allclose(value, loss.item(), rtol=1e-5, atol=1e-5 * float(abs(expected_gradient).sum()))
        np.testing.assert_allclose(
            gradient, expected_gradient, rtol=1e-5, atol=1e-5 * float(abs(expected_gradient).max())
        )
        clipped += int(((logprobs - old_logprobs > np.log(3)) & (rows[0] < 0) & mask).sum())
    assert clipped > 100  # the dual clip takes effect
