"""Poly-EPO in one file: trains a tiny policy to solve polynomials in many ways. Takes two minutes on two CPU cores.

    python examples/minimal.py FOLDER

FOLDER is a Hugging Face folder of the tiny policy: the folder that a run of configs/polynomial.py creates in runs/base,
or an export. Each training step is Algorithm 1 of the paper, in four parts. The package performs the same step with
language models as judges, servers and many devices. tests/examples/test_minimal.py verifies that both steps agree.

The suffix of an array's name lists its axes: prompts P, responses to a prompt N, sets of responses K, responses of a
set S, sequences of a prompt and a response B (= P N), token positions T, and vocabulary V.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from poly_epo_jax import set_rl
from poly_epo_jax.model.hf import load_params, read_model_config
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Generation, Problem

P, N, S = 32, 8, 4
MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 10, 14


class Sequences(NamedTuple):
    """Prompts with their responses, and the log-probabilities of the policy that sampled the responses."""

    tokens_BT: np.ndarray
    is_response_BT: np.ndarray
    logprobs_BT: np.ndarray


@jax.jit(static_argnums=0)
def logits(model: nnx.GraphDef, params: Any, tokens_BT: jax.Array | np.ndarray) -> jax.Array:
    """Returns the logits [B, T, V] of the token after each position."""
    policy = nnx.merge(model, params)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    # Attention is causal, so tokens are not affected by the padding at the end of their sequence.
    hidden_BTD = policy(tokens_BT, positions_BT, segment_ids=jnp.ones_like(tokens_BT))
    return hidden_BTD @ policy.head.T


def token_logprobs(model: nnx.GraphDef, params: Any, tokens_BT: jax.Array | np.ndarray) -> jax.Array:
    """Returns the log-probability [B, T] of each token given the tokens before it, and 0 for the first token."""
    logprobs_BTV = jax.nn.log_softmax(logits(model, params, tokens_BT)[:, :-1])
    own_BT = jnp.take_along_axis(logprobs_BTV, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(own_BT, ((0, 0), (1, 0)))


# Part 1: sample N responses to each prompt. Without a key-value cache, each token takes a pass over whole sequences.
def sample(
    model: nnx.GraphDef, params: Any, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], key: jax.Array
) -> Sequences:
    """Samples N responses to each problem. A response ends with its first end-of-sequence token."""
    prompts = [problem.prompt for problem in problems for _ in range(N)]
    rows_B, length = np.arange(len(prompts)), MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    padded = tokenizer(prompts, padding="max_length", max_length=length, padding_side="right", return_tensors="np")
    tokens_BT, lengths_B = np.array(padded["input_ids"], np.int32), np.sum(padded["attention_mask"], axis=1)
    for i in range(MAX_RESPONSE_TOKENS):
        logits_BV = logits(model, params, tokens_BT)[rows_B, lengths_B + i - 1]
        tokens_BT[rows_B, lengths_B + i] = jax.random.categorical(jax.random.fold_in(key, i), logits_BV)
    places_BT = np.arange(length) - lengths_B[:, None]
    is_sampled_BT = (places_BT >= 0) & (places_BT < MAX_RESPONSE_TOKENS)
    is_end_BT = is_sampled_BT & (tokens_BT == tokenizer.eos_token_id)
    is_response_BT = is_sampled_BT & (np.cumsum(is_end_BT, axis=1) - is_end_BT == 0)  # no end before the token
    return Sequences(tokens_BT, is_response_BT, np.asarray(token_logprobs(model, params, tokens_BT)))


# Part 2: compute rewards, and cluster the responses to each prompt by strategy, which is the point (x, y) they name.
def grade(
    task: PolynomialTask, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], sequences: Sequences
) -> tuple[np.ndarray, np.ndarray]:
    """Returns rewards [P, N] and cluster ids [P, N]."""
    rewards_PN, clusters_PN = np.zeros((len(problems), N), np.float32), np.zeros((len(problems), N), np.int32)
    for p, problem in enumerate(problems):
        cluster_ids: dict[Any, int] = {None: set_rl.DEGENERATE_CLUSTER}  # 100; other ids are larger
        for i in range(N):
            tokens_T, is_response_T, logprobs_T = (array_BT[p * N + i] for array_BT in sequences)
            text = str(tokenizer.decode(tokens_T[is_response_T])).removesuffix(str(tokenizer.eos_token))
            response = Generation(tokens_T, logprobs_T, is_response_T, (text,), "stop", np.zeros_like(tokens_T))
            rewards_PN[p, i] = task.reward(problem, response)
            clusters_PN[p, i] = cluster_ids.setdefault(task.strategy(problem, response), 100 + len(cluster_ids))
    return rewards_PN, clusters_PN


# Part 3: the score of a set is its mean reward times its fraction of distinct strategies. The advantage of a set is its
# score minus the mean score of all sets. The advantage of a response is the mean advantage of the sets that contain it.
def advantages(rewards_PN: np.ndarray, clusters_PN: np.ndarray) -> jax.Array:
    """Returns the marginal set advantages [P, N] of the polychromic objective."""
    sets_KS = set_rl.enumerate_sets(N, S)
    return set_rl.marginal_set_advantages(set_rl.polychromic, sets_KS, rewards=rewards_PN, clusters=clusters_PN)


# Part 4: minimize PPO's clipped loss with Adam. Every token of a response has the response's advantage.
def loss(params: Any, model: nnx.GraphDef, sequences: Sequences, advantages_PN: jax.Array) -> jax.Array:
    """Returns the loss of a batch. Probability ratios are 1 in the first update on a batch."""
    is_response_BT, shape = sequences.is_response_BT, sequences.tokens_BT.shape
    weights_PN = set_rl.token_weights(is_response_BT.sum(1).reshape(-1, N), "max", MAX_RESPONSE_TOKENS)
    inputs = set_rl.Tokens(
        logprobs=token_logprobs(model, params, sequences.tokens_BT),
        old_logprobs=jnp.asarray(sequences.logprobs_BT),
        advantages=jnp.broadcast_to(advantages_PN.reshape(-1, 1), shape),
        weights=jnp.where(is_response_BT, weights_PN.reshape(-1, 1), 0.0),
        sequence_ids=jnp.ones(shape, int),
    )
    return set_rl.ppo_clip_loss(inputs, clip_low=0.2, clip_high=0.28)[0]


def make_optimizer(num_steps: int) -> optax.GradientTransformation:
    """Returns Adam with clipped gradients and a linearly decaying learning rate."""
    schedule = optax.linear_schedule(5e-4, 1e-5, num_steps)
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adam(schedule, b1=0.9, b2=0.999, eps=1e-8))


@jax.jit(static_argnums=(0, 1))
def update(model: nnx.GraphDef, optimizer: optax.GradientTransformation, params: Any, state: Any, *batch: Any) -> Any:
    """Returns new weights and optimizer state. `batch` is the sequences and the advantages [P, N]."""
    changes, state = optimizer.update(jax.grad(loss)(params, model, *batch), state, params)
    return optax.apply_updates(params, changes), state


def train(folder: str, num_steps: int) -> None:
    """Trains the policy in the folder, and prints its reward and its number of distinct correct strategies."""
    config = read_model_config(folder, dtype="float32", remat="none")
    model, params = nnx.graphdef(abstract_model(config)), load_params(folder, config)
    task, tokenizer, optimizer = PolynomialTask(), AutoTokenizer.from_pretrained(folder), make_optimizer(num_steps)
    state, rng, key = optimizer.init(params), np.random.default_rng(0), jax.random.key(0)
    for step in range(1, num_steps + 1):
        problems = [task.train_problems[i] for i in rng.choice(len(task.train_problems), P, replace=False)]
        sequences = sample(model, params, tokenizer, problems, jax.random.fold_in(key, step))
        rewards_PN, clusters_PN = grade(task, tokenizer, problems, sequences)
        params, state = update(model, optimizer, params, state, sequences, advantages(rewards_PN, clusters_PN))
        distinct = np.mean([len(set(ids[correct])) for ids, correct in zip(clusters_PN, rewards_PN == 1, strict=True)])
        print(f"step {step}: reward {rewards_PN.mean():.2f}, distinct correct strategies of {N}: {distinct:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--num_steps", type=int, default=150)
    train(**vars(parser.parse_args()))
