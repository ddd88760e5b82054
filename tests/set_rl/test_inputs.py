"""Tests that all functions of set_rl convert their inputs alike, and reject invalid inputs by name."""

import inspect
import os
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.set_rl.groups import as_array

REWARDS = np.array([[1, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]])
CLUSTERS = np.array([[0, 1, 1, 2, 100, 0], [3, 3, 2, 2, 1, 1]])
RNG = np.random.default_rng(0)
FEATURES = {
    "rewards": REWARDS.astype(np.float32),
    "clusters": CLUSTERS.astype(np.int32),
    "mean_logprob": -RNG.random((2, 6)).astype(np.float32),
    "embeddings": RNG.normal(size=(2, 6, 3)).astype(np.float32),
}
OPTIONS = {
    "alpha": 1.0,
    "beta": 0.5,
    "diversity_coef": 0.5,
    "k": 3,
    "kl": 0.7,
    "scale": 1.0,
    "set_size": 3,
    "tau": 0.3,
    "weight": 1.0,
}


def marginal(objective):
    def advantages(**features):
        return set_rl.marginal_set_advantages(objective, set_rl.enumerate_sets(6, 3), **features)

    advantages.__signature__ = inspect.signature(objective)
    return advantages


TENSOR_PROGRAM = """
import shutil, subprocess
import numpy as np, jax, jax.extend.backend
from poly_epo_jax import set_rl

class Tensor(np.ndarray):  # has the methods of torch that set_rl calls
    requires_grad = False
    detach = cpu = float = np.ndarray.copy
    numpy = lambda self: np.array(self)
    is_floating_point = lambda self: True
    element_size = lambda self: self.itemsize
    new_tensor = lambda self, values: np.array(values)

def used_mib():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return subprocess.check_output(query, text=True).split() if shutil.which("nvidia-smi") else []

before = used_mib()
advantages = set_rl.grpo_advantages(np.array([[1, 0, 0]], np.float32).view(Tensor))
assert advantages.argmax() == 0
print(jax.config.jax_platforms, set(jax.extend.backend.backends()))
print(*before)
print(*used_mib())
"""


FUNCTIONS = {name: getattr(set_rl, name) for name in dir(set_rl) if name.endswith("_advantages")}
del FUNCTIONS["marginal_set_advantages"]
FUNCTIONS["synergy"] = set_rl.exploration_exploitation_synergy
FUNCTIONS |= {name: entry.score for name, entry in set_rl.OBJECTIVES.items()}
FUNCTIONS |= {f"marginal of {name}": marginal(entry.score) for name, entry in set_rl.OBJECTIVES.items()}
EVERY = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.fixture(autouse=True)
def _as_imported_by_users(monkeypatch):
    """Disables the type checks of the tests, which reject some inputs before the functions do."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def call_with(function, features):
    parameters = inspect.signature(function).parameters
    return function(**{name: value for name, value in (features | OPTIONS).items() if name in parameters})


def call(function, **changes):
    return np.stack([np.asarray(part) for part in jax.tree.leaves(call_with(function, FEATURES | changes))])


@EVERY
@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float16])
def test_other_types_of_rewards_give_the_advantages_of_float32(function, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = call(function, rewards=REWARDS.astype(dtype), clusters=CLUSTERS.astype(np.uint8))
    np.testing.assert_array_equal(found, call(function))
    assert found.dtype == np.float32


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.int64, np.float64, jnp.bfloat16])
def test_all_types_of_rewards_are_converted_to_float32(dtype):
    rewards = as_array("rewards", REWARDS.astype(dtype))
    assert rewards.dtype == np.float32
    np.testing.assert_array_equal(rewards, REWARDS)


@EVERY
def test_lists_give_the_advantages_of_arrays(function):
    lists = {name: values.tolist() for name, values in FEATURES.items()}
    np.testing.assert_array_equal(call(function, **lists), call(function))


@pytest.mark.slow
@EVERY
def test_unsigned_rewards_are_converted_under_jit(function):
    names = [name for name in inspect.signature(function).parameters if name in FEATURES]
    jitted = jax.jit(lambda **features: call_traced(function, features))
    arguments = {name: FEATURES[name] for name in names} | {"rewards": REWARDS.astype(np.uint8)}
    for part, expected in zip(jax.tree.leaves(jitted(**arguments)), call(function), strict=False):
        np.testing.assert_allclose(part, expected, atol=1e-5)


def call_traced(function, features):
    options = {name: value for name, value in OPTIONS.items() if name in inspect.signature(function).parameters}
    return jax.tree.leaves(function(**features, **options))


INVALID = {
    "rewards": [
        (np.where(REWARDS == 1, np.nan, 0), r"rewards contains NaN at index \[0, 0\]"),
        (np.where(REWARDS == 1, -np.inf, 0), r"rewards contains -inf at index \[0, 0\]"),
        (np.where(REWARDS == 1, 1e39, 0), r"rewards contains 1e\+39 at index \[0, 0\].*float32"),
        (np.ones(6), r"rewards \(6,\)"),
        (np.ones((2, 6, 1)), r"rewards \(2, 6, 1\)"),
        ([[1, 0], [1]], "rewards of type builtins.list"),
        (np.full((2, 6), "1"), "rewards has the type <U1"),
        (np.full((2, 6), None), "rewards has the type object"),
        (np.full((2, 6), 1j), "rewards has the type complex128"),
    ],
    "clusters": [
        (CLUSTERS + 2**32, r"clusters contains 4294967296 at index \[0, 0\].*int32"),
        (CLUSTERS.astype(np.uint64) + 2**63, r"clusters contains 9223372036854775808"),
        (CLUSTERS / 2, "clusters has the type float64.*integers"),
        (CLUSTERS[:, :5], r"rewards \(2, 6\), clusters \(2, 5\)"),
    ],
    "mean_logprob": [
        (np.full((2, 6), -np.inf), "mean_logprob contains -inf"),
        (np.ones((2, 5)), r"mean_logprob \(2, 5\)"),
    ],
    "embeddings": [
        (np.full((2, 6, 3), np.inf), "embeddings contains inf"),
        (np.ones((2, 6)), r"embeddings \(2, 6\)"),
    ],
}


@EVERY
def test_invalid_values_are_rejected_by_name(function, request):
    for name in set(inspect.signature(function).parameters) & set(INVALID):
        for values, message in INVALID[name]:
            is_objective = function in [entry.score for entry in set_rl.OBJECTIVES.values()]
            if is_objective and list(inspect.signature(function).parameters) == ["rewards"] and np.ndim(values[0]) != 1:
                continue  # such objectives score sets of any shape
            with pytest.raises(ValueError, match=message):
                call(function, **{name: values})


def test_objectives_of_rewards_reject_non_finite_values():
    for objective in (set_rl.mean_reward, set_rl.pass_at_n):
        with pytest.raises(ValueError, match=r"rewards contains inf at index \[1, 0\]"):
            objective(np.array([[1, 2], [np.inf, 0]]))


@pytest.mark.slow
@EVERY
def test_results_have_the_kind_of_the_first_argument(function):
    assert {type(part) for part in jax.tree.leaves(call_with(function, FEATURES))} == {np.ndarray}
    arrays = {name: jnp.asarray(values) for name, values in FEATURES.items()}
    assert all(isinstance(part, jax.Array) for part in jax.tree.leaves(call_with(function, arrays)))
    constants = jax.jit(lambda: call_with(function, FEATURES))()
    np.testing.assert_allclose(jax.tree.leaves(constants), call(function), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@EVERY
def test_torch_tensors(function):
    torch = pytest.importorskip("torch")
    given = {name: torch.from_numpy(values) for name, values in FEATURES.items()}
    found = jax.tree.leaves(call_with(function, given))
    assert {(type(part), part.dtype) for part in found} == {(torch.Tensor, torch.float32)}
    np.testing.assert_array_equal(np.stack(found), call(function))
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        (first, *_) = jax.tree.leaves(call_with(function, given | {"rewards": given["rewards"].to(dtype)}))
        np.testing.assert_array_equal(first, found[0])
    with pytest.raises(ValueError, match=r"rewards of type torch\.Tensor .*pass rewards\.detach\(\)"):
        call_with(function, given | {"rewards": torch.from_numpy(FEATURES["rewards"]).requires_grad_()})


def test_tensors_take_no_memory_of_a_gpu():
    """JAX, which allocates most of the memory of all GPUs when it starts, starts on the CPU only."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", TENSOR_PROGRAM]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    platforms, *used = ended.stdout.splitlines()
    assert platforms == "cpu {'cpu'}"
    before, after = (np.array(text.split(), int) for text in used)
    assert (after - before < 100).all()  # MiB; a JAX process on a GPU uses more without an allocation


def test_custom_features_keep_their_type():
    assert as_array("lengths", np.array([2**31 - 1, -(2**31)])).dtype == jnp.int32
    assert as_array("solved", [True, False]).dtype == bool
    assert as_array("quality", np.ones(2, np.float16)).dtype == jnp.float16
    with pytest.raises(ValueError, match="lengths contains 2147483648 at index"):
        as_array("lengths", np.array([1, 2**31]))


def test_float64_is_kept_if_it_is_enabled():
    with jax.enable_x64(True):
        advantages = set_rl.grpo_advantages(np.array([[1.0, 1 / 3, 0]]))
        assert advantages.dtype == jnp.float64
        np.testing.assert_allclose(advantages, [[5 / 9, -1 / 9, -4 / 9]], rtol=1e-15)
        assert set_rl.grpo_advantages(np.eye(3, dtype=np.float32)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (set_rl.enumerate_sets(8, 3), "sets hold the generations 0 to 7.*num_generations=6"),
        (set_rl.enumerate_sets(5, 3), "sets hold the generations 0 to 4.*num_generations=6"),
        ([[0, 1], [-1, 2]], "sets hold the generations -1 to 2"),
        (np.array([[0, 2**32]]), "sets contains 4294967296"),
        ([[0.0, 1.0]], "sets has the type float64"),
        (np.zeros((0, 3), int), r"sets have shape \(0, 3\)"),
    ],
)
def test_sets_of_another_group_size_are_rejected(sets, message):
    with pytest.raises(ValueError, match=message):
        set_rl.marginal_set_advantages(set_rl.mean_reward, sets, rewards=FEATURES["rewards"])


@pytest.mark.parametrize("convert", [np.array, jnp.asarray, lambda sets: np.stack([sets, sets]), np.ndarray.tolist])
def test_copies_of_all_sets_of_a_smaller_group_are_rejected(convert):
    sets = convert(set_rl.enumerate_sets(5, 3))
    with pytest.raises(ValueError, match=r"generations 0 to 4, .* num_generations=6"):
        set_rl.marginal_set_advantages(set_rl.mean_reward, sets, rewards=FEATURES["rewards"])


def test_sampled_sets_without_the_last_generations_are_accepted():
    sets = [[0, 1], [1, 2], [0, 2]]
    advantages = set_rl.marginal_set_advantages(set_rl.mean_reward, sets, rewards=FEATURES["rewards"])
    np.testing.assert_allclose(
        advantages, [[1 / 12, -1 / 6, 1 / 12, 0, 0, 0], [-1 / 12, -1 / 12, 1 / 6, 0, 0, 0]], atol=1e-7
    )


@pytest.mark.parametrize(("num_generations", "set_size", "number"), [(64, 8, "4,426,165,368"), (300, 297, "4,455,100")])
def test_too_many_sets_are_rejected_before_they_are_allocated(num_generations, set_size, number):
    with pytest.raises(ValueError, match=rf"{number} sets.* GB; draw some of them with sample_sets"):
        set_rl.enumerate_sets(num_generations, set_size)


def test_losses_convert_and_check_response_tokens():
    values: list[Any] = [[-1, -2, -3], [-1, -1, 5], [True, False, True], [1, 0.5, 0]]
    lists = set_rl.Tokens(*values, sequence_ids=[1, 1, 0])  # pyright: ignore[reportArgumentType]
    as_floats = [jnp.asarray(row, jnp.float32) for row in values]
    arrays = set_rl.Tokens(*as_floats, sequence_ids=jnp.array([1, 1, 0]))
    for name, loss in set_rl.LOSSES.items():
        np.testing.assert_array_equal(loss(lists)[0], loss(arrays)[0], err_msg=name)
        for field in ("logprobs", "old_logprobs", "advantages"):
            broken = lists._replace(**{field: [0, np.nan, np.nan]})
            with pytest.raises(ValueError, match=rf"{field} contains NaN at index \[1\]"):
                loss(broken)
    np.testing.assert_allclose(set_rl.token_weights([[3, 1]], "own", 8), [[1 / 6, 1 / 2]])
    np.testing.assert_allclose(set_rl.token_weights(np.array([[3, 1]], np.uint8), "own", 8), [[1 / 6, 1 / 2]])
    with pytest.raises(ValueError, match=r"lengths \(2,\)"):
        set_rl.token_weights(np.array([3, 1]), "own", 8)
