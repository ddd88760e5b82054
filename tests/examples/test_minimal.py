"""Tests of examples/minimal.py: its length, its imports, and the equality of its step with the trainer's step."""

import ast
import asyncio
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from training_runs import SETTINGS

from examples import minimal
from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config, max_sequence_tokens
from poly_epo_jax.judges.exact import ExactJudge
from poly_epo_jax.model.policy import Policy, open_policy
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.read_config import make_task, read_config
from poly_epo_jax.step.advantages import batch_features, make_advantages
from poly_epo_jax.step.minibatches import MinibatchPacker
from poly_epo_jax.step.packing import make_pack
from poly_epo_jax.step.update import make_update
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Generation, GradedGroup, Group, Params, Problem

FILE = Path(minimal.__file__)
LIBRARIES = {"jax", "numpy", "optax", "flax", "transformers"}
PACKAGES = {"set_rl", "model", "tasks", "types"}
NUM_PROMPTS, NUM_STEPS = 6, 10


def test_the_example_is_short_and_imports_few_packages():
    source = FILE.read_text()
    assert len(source.splitlines()) <= 150
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= LIBRARIES | sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom) and node.module == "poly_epo_jax":
            assert {alias.name for alias in node.names} <= PACKAGES
        elif isinstance(node, ast.ImportFrom):
            library, name, *_ = [*str(node.module).split("."), ""]
            assert library in LIBRARIES | sys.stdlib_module_names or (library == "poly_epo_jax" and name in PACKAGES)


@pytest.fixture(scope="module")
def config(caches: dict[str, Path]) -> Config:
    """Returns the default configuration with a smaller policy and one update per step."""
    changes: dict[str, Any] = {key: value for key, value in SETTINGS.items() if key.startswith("base.")}
    changes |= {
        "base.clean_steps": 100,
        "base.cache_dir": str(caches["base.cache_dir"]),
        "train.num_steps": NUM_STEPS,
        "train.prompts_per_batch": NUM_PROMPTS,
        "train.prompts_per_minibatch": NUM_PROMPTS,
    }
    user_config = default.get_config()
    user_config.task.options = ast.literal_eval(SETTINGS["task.options"])
    user_config.update_from_flattened_dict(changes)
    return read_config(user_config)


@pytest.fixture(scope="module")
def task(config: Config) -> PolynomialTask:
    task = make_task(config.task)
    assert isinstance(task, PolynomialTask)
    return task


@pytest.fixture(scope="module")
def policy(config: Config, task: PolynomialTask) -> Policy:
    return open_policy(base_policy(config, task, make_mesh(1, 1, 1)), config.model, max_sequence_tokens(config))


def graded_groups(
    task: PolynomialTask, policy: Policy, problems: Sequence[Problem], sequences: minimal.Sequences
) -> list[GradedGroup]:
    """Converts the sequences of the example to graded groups."""
    generations = []
    for tokens, is_response, logprobs in zip(*sequences, strict=True):
        ids = tokens[is_response]
        ended = ids[-1] == policy.tokenizer.eos_token_id
        text = str(policy.tokenizer.decode(ids[:-1] if ended else ids))
        mask, reason = np.ones(len(ids), bool), "stop" if ended else "length"
        generations.append(Generation(ids, logprobs[is_response], mask, (text,), reason, np.zeros(len(ids), np.int32)))
    graded = []
    for p, problem in enumerate(problems):
        prompt_ids = np.array(policy.tokenizer(problem.prompt)["input_ids"], np.int32)
        group = Group(problem, prompt_ids, tuple(generations[p * minimal.N : (p + 1) * minimal.N]))
        rewards = np.array([task.reward(problem, generation) for generation in group.generations], np.float32)
        clustering = asyncio.run(ExactJudge(task).cluster(group))
        graded.append(GradedGroup(group, rewards, rewards == 1, clustering))
    return graded


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 1000.0], ids=["small gradient", "clipped gradient"])
def test_a_step_equals_the_trainers_step(config: Config, task: PolynomialTask, policy: Policy, scale: float):
    """Compares rewards, clusters, advantages, loss, gradient, and the weights after two updates on the same batch."""
    mesh, problems = make_mesh(1, 1, 1), task.train_problems[:NUM_PROMPTS]
    params, model = jax.device_get(policy.load_params(mesh)), nnx.graphdef(policy.model)
    sequences = minimal.sample(model, params, policy.tokenizer, problems, jax.random.key(0))
    rewards, clusters = minimal.grade(task, policy.tokenizer, problems, sequences)
    assert 0 < rewards.mean() < 1 and len(np.unique(clusters)) > 2
    advantages = minimal.advantages(rewards, clusters)

    graded = graded_groups(task, policy, problems, sequences)
    features = batch_features(graded)
    np.testing.assert_array_equal(rewards, features["rewards"])
    np.testing.assert_array_equal(same_cluster(clusters), same_cluster(features["clusters"]))
    trainers_advantages = make_advantages(config.algo, config.seed)(1, problems, features)
    np.testing.assert_allclose(advantages, trainers_advantages, atol=1e-6)
    advantages, trainers_advantages = advantages * scale, trainers_advantages * scale

    loss, gradient = jax.value_and_grad(minimal.loss)(params, model, sequences, advantages)
    optimizer = minimal.make_optimizer(NUM_STEPS)
    new_params, opt_state = params, optimizer.init(params)
    for _ in range(2):
        new_params, opt_state = minimal.update(model, optimizer, new_params, opt_state, sequences, advantages)

    pack = make_pack(config, mesh.shape, share_prompts=True)
    packer = MinibatchPacker(1, pack, config.algo.length_normalization, config.sampling.max_tokens)
    update = make_update(config, policy.model, mesh)
    state = update.init(policy.load_params(mesh))
    minibatches = update.with_old_logprobs(state, packer(graded, trainers_advantages) * 2)
    trainers_gradient, sums = update.gradient(state, minibatches[0])
    np.testing.assert_allclose(loss, sum(float(metrics["loss"]) for metrics in sums), rtol=0, atol=1e-5)
    assert_close(gradient, trainers_gradient, 1e-5 * largest(trainers_gradient))
    assert (float(optax.global_norm(trainers_gradient)) > config.optimizer.max_grad_norm) == (scale > 1)
    state, _ = update(state, minibatches)
    assert_close(new_params, state.params, 2e-6)
    assert largest(jax.tree.map(np.subtract, new_params, params)) > config.optimizer.learning_rate


def same_cluster(clusters: np.ndarray) -> np.ndarray:
    return clusters[:, :, None] == clusters[:, None]


def largest(tree: Params) -> float:
    return max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(tree))


def assert_close(found: Params, expected: Params, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), found, jax.device_get(expected))


@pytest.mark.slow
def test_training_prints_each_step(policy: Policy, capsys: pytest.CaptureFixture[str]):
    """tests/repository/test_documents.py runs the command."""
    minimal.train(str(policy.path), num_steps=3)
    printed = capsys.readouterr().out
    line = r"step (\d): reward (\d\.\d\d), distinct correct strategies of 8: (\d\.\d\d)\n"
    assert re.fullmatch(line * 3, printed)
    assert [step for step, *_ in re.findall(line, printed)] == ["1", "2", "3"]
