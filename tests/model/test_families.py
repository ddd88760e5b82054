"""Compares each model family with transformers on tiny random models, beyond their windows and original lengths."""

import dataclasses
import functools
import os
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from families import FAMILIES, LENGTHS, make_config, packed_row, sequences, write_model
from jax.sharding import Mesh
from test_hf import FLOAT32
from test_layer import build
from training_runs import SETTINGS, as_flags, rows_of

from poly_epo_jax import main
from poly_epo_jax.model import decoding
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.hf import exported_tensors, load_params, read_model_config, save_pretrained
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.parallel.sharding import make_mesh, param_shardings
from poly_epo_jax.rollouts.embedded.slots import Finished, Job, Slots
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.types import Params, Sampling

if os.environ.get("POLY_EPO_REQUIRE_TORCH"):
    import torch  # pyright: ignore[reportMissingImports]
else:
    torch = pytest.importorskip(
        "torch", reason="torch is not installed; run bash launch/test.sh all, which installs it for CPUs"
    )

from make_references import load_transformer, logits_and_gradients, tensor_shapes, transformer_logits

torch.set_num_threads(1)
pytestmark = pytest.mark.slow  # requires torch; test_references.py compares with stored results

MAX_TOKENS = 44
# test_transformers.py compares Qwen2. Only the weights of the experts differ between qwen3_moe and qwen3_moe_raw.
# The tests of meshes and of the sampler therefore have one of them.
CASES = [name for name in FAMILIES if name not in ("qwen2", "qwen3_moe_raw")]
# The weights and norms that are sharded differently: norms over all heads, norms per head and of outputs, experts, and
# linear attention. The other cases differ in the frequencies, windows and layers of rotary embeddings, which are not
# sharded.
SHARDED = ["olmo2", "gemma3", "qwen3_moe", "qwen3_5"]


class Case(NamedTuple):
    """A model of transformers, the folder that it has written, and the model that is read from the folder."""

    name: str
    transformer: Any
    folder: Path
    config: ModelConfig
    params: Params


@pytest.fixture(scope="module", params=[*CASES, "qwen3_moe_raw"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    drawn, folder = tmp_path_factory.mktemp("drawn"), tmp_path_factory.mktemp(request.param)
    write_model(drawn, request.param, tensor_shapes(request.param))
    transformer = load_transformer(drawn)
    transformer.save_pretrained(folder)
    config = read_model_config(folder, **FLOAT32)
    return Case(request.param, transformer, folder, config, load_params(folder, config))


@functools.partial(jax.jit, static_argnums=0)
def logits_of(config: ModelConfig, params: Params, row: tuple[Any, ...]) -> jax.Array:
    model = build(config, params)
    return (model(*row) @ model.head.T).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def gradients_and_logits(config: ModelConfig, params: Params, row: tuple[Any, ...]) -> tuple[Params, jax.Array]:
    """Returns the gradients of sum(sin(logits)) without the padding, and the logits."""

    def loss(params):
        logits = logits_of(config, params, row)
        return jnp.sin(logits[:, : sum(LENGTHS)]).sum(), logits

    return jax.grad(loss, has_aux=True)(params)


@pytest.fixture(scope="module")
def on_one_device(case: Case) -> tuple[Params, np.ndarray]:
    """The gradients and the logits [T, V] of the packed row on one device, as NumPy arrays."""
    gradients, logits = jax.device_get(gradients_and_logits(case.config, case.params, packed_row()))
    return gradients, logits[0]


def assert_close(found: Any, expected: Any, relative: float) -> None:
    """Compares two trees, or two arrays. Tolerances are relative to the largest element of each array."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=relative * np.abs(y).max(), rtol=0)


def test_logits_and_gradients_of_packed_rows(case, on_one_device):
    expected, gradients = logits_and_gradients(case.transformer)
    params, found = on_one_device
    for ours, theirs in zip(np.split(found, np.cumsum(LENGTHS)), expected, strict=False):
        assert theirs.std() > 0.3
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    tensors = dict(exported_tensors(params, case.config, "float32"))
    assert tensors.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert_close(tensors[name], gradient, 1e-4)


@functools.cache
def decode_step(config: ModelConfig) -> Any:
    return jax.jit(functools.partial(decoding.decode, config))


def decoded_logits(config: ModelConfig, params: Params) -> np.ndarray:
    """Returns the logits [row, step, V] of cached decoding of all tokens. The tests of generations also prefill."""
    weights = jax.jit(decoding.decoding_weights, static_argnums=0)(config, params)
    tokens = np.stack([np.pad(row, (0, max(LENGTHS) - len(row))) for row in sequences()])
    cache, steps = decoding.init_cache(config, len(LENGTHS), max(LENGTHS)), []
    for position in range(max(LENGTHS)):
        positions, active = jnp.full(len(LENGTHS), position), position < jnp.asarray(LENGTHS)
        logits, cache = decode_step(config)(weights, jnp.asarray(tokens[:, position]), positions, active, cache)
        steps.append(np.asarray(logits).T)
    return np.stack(steps, axis=1)


def assert_decoded(found: np.ndarray, expected: Sequence[Any], atol: float) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=atol, rtol=0)


def test_logits_of_cached_decoding(case):
    with torch.no_grad():
        assert_decoded(decoded_logits(case.config, case.params), transformer_logits(case.transformer), atol=1e-4)


def test_bfloat16_is_as_accurate_as_transformers(case):
    """The mean error of the logits is at most twice the error of transformers with bfloat16 weights."""
    with torch.no_grad():
        exact = torch.cat(transformer_logits(case.transformer)).numpy()
        coarse = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.bfloat16).eval()
        rounded = torch.cat(transformer_logits(coarse)).numpy()
    config = dataclasses.replace(case.config, dtype="bfloat16")
    ours = np.asarray(logits_of(config, case.params, packed_row()))[0, : sum(LENGTHS)]
    assert 0 < np.abs(ours - exact).mean() <= 2 * np.abs(rounded - exact).mean()


def test_exported_folders(case, tmp_path):
    save_pretrained(tmp_path / "ours", case.params, case.config, dtype="float32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        for found, expected in zip(transformer_logits(again), transformer_logits(case.transformer), strict=True):
            torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert read_model_config(tmp_path / "ours", **FLOAT32) == case.config
    jax.tree.map(np.testing.assert_array_equal, load_params(tmp_path / "ours", case.config), case.params)


def test_the_folder_of_qwen3_5_contains_a_vision_model(tmp_path):
    """The language model is read. Whether its head is tied is a setting of the complete model."""
    text = make_config("qwen3_5")
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=True)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    read = read_model_config(tmp_path, **FLOAT32)
    assert read.family == "qwen3_5_text" and read.tie_word_embeddings
    found = np.asarray(logits_of(read, load_params(tmp_path, read), packed_row()))[0, : sum(LENGTHS)]
    with torch.no_grad():
        np.testing.assert_allclose(found, torch.cat(transformer_logits(model)), atol=1e-4)


def mesh_of(case: Case, num_devices: int) -> Mesh:
    """Returns a mesh of eight devices or of one. Experts are sharded in place of `data`."""
    if num_devices == 1:
        return make_mesh(1, 1, 1)
    return make_mesh(1, 2, 2, 2) if case.config.num_experts else make_mesh(2, 2, 2)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("case", SHARDED, indirect=True)
def test_results_do_not_depend_on_the_mesh(case, on_one_device):
    """The gradients of four equal rows are four times the gradients of one of them."""
    mesh = mesh_of(case, 8)
    row = tuple(jnp.tile(x, (4, 1)) for x in packed_row())
    params = jax.device_put(case.params, param_shardings(abstract_model(case.config), mesh))
    with jax.set_mesh(mesh):
        found, tiled = gradients_and_logits(case.config, params, row)
    gradients, logits = on_one_device
    gradients = jax.tree.map(lambda x: 4 * x, gradients)
    for one in np.asarray(tiled):
        np.testing.assert_allclose(one, logits, atol=1e-5)
    for name in ("log_decay_rate", "time_step_bias"):
        # The terms of these sums over tokens almost cancel: weights that differ by 1e-7 change the sums by 2e-5.
        sums, expected = (x.get("linear_layers", {}).pop(name, ()) for x in (found, gradients))
        assert_close(sums, expected, 5e-5)
    assert_close(found, gradients, 1e-5)


@pytest.fixture(scope="module")
def greedy_answers(case: Case) -> list[tuple[list[int], np.ndarray]]:
    """The tokens with which transformers continues each sequence greedily, and their log-probabilities."""

    def answer(prompt: np.ndarray) -> tuple[list[int], np.ndarray]:
        found = case.transformer.generate(
            torch.as_tensor(prompt)[None],
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logprobs = torch.log_softmax(torch.cat(found.logits), dim=-1).max(dim=-1).values
        return found.sequences[0, len(prompt) :].tolist(), logprobs.numpy()

    with torch.no_grad():
        return [answer(prompt) for prompt in sequences()]


def generate_greedily(case: Case, mesh: Mesh, limits: Sequence[int]) -> list[Finished]:
    """Generates twice for each sequence, at most `limits` tokens, so that slots are reused by shorter prompts."""
    prompts = sequences()
    params = jax.device_put(case.params, param_shardings(abstract_model(case.config), mesh))
    with jax.set_mesh(mesh):
        weights = jax.jit(decoding.decoding_weights, static_argnums=0)(case.config, params)
    slots = Slots(
        case.config,
        weights,
        mesh,
        np.zeros(0, np.int32),
        prompts,
        [Job(i // 2, i, limits[i // 2]) for i in range(2 * len(prompts))],
        Sampling(max(limits), temperature=0.0),
        num_slots=4,
        max_prompts=4,
        max_length=max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)),
    )
    finished = []
    while not slots.is_done:
        finished += slots.advance()
    return sorted(finished, key=lambda one: one.job)


def assert_answers(
    found: Sequence[Finished], expected: Sequence[tuple[list[int], np.ndarray]], limits: Sequence[int]
) -> None:
    """Compares two generations of each sequence with the first tokens of transformers."""
    assert [one.job for one in found] == list(range(2 * len(limits)))
    for one in found:
        (tokens, logprobs), limit = expected[one.job // 2], limits[one.job // 2]
        assert one.token_ids.tolist() == tokens[:limit]
        np.testing.assert_allclose(one.logprobs, logprobs[:limit], atol=1e-4, rtol=0)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs eight devices")
@pytest.mark.parametrize("case", CASES, indirect=True)
def test_greedy_generations_match_transformers(case, greedy_answers):
    """The sampler also computes the log-probabilities of transformers, which are those of the trainer."""
    # Caches of layers with and without windows, and with linear and full attention, grow, shrink and grow again.
    limits = (16, MAX_TOKENS, 18) if case.name in ("gemma3", "qwen3_5") else (16, 40, 30)
    found = generate_greedily(case, mesh_of(case, 8 if case.name in SHARDED else 1), limits)
    assert_answers(found, greedy_answers, limits)


# One case for each kind of weights that other tests do not train: experts with a separate head, and linear attention.
# The tests above compare the gradients and the log-probabilities of the sampler, which a step uses, in all cases.
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen3_5"], indirect=True)
def test_two_steps_of_training(case, tmp_path, caches, monkeypatch):
    """The sampler and the trainer compute the same log-probabilities before and after an update."""
    tokenizer = build_character_tokenizer(string.digits + string.punctuation + string.ascii_lowercase + " \n")
    assert len(tokenizer) == case.config.vocab_size
    save_pretrained(tmp_path / "model", case.params, case.config, dtype="float32", eos_token_id=1, tokenizer=tokenizer)
    settings = (
        SETTINGS
        | caches
        | {
            "workdir": tmp_path / "run",
            "model.path": tmp_path / "model",
            "mesh.num_devices": 1,
            "sampling.max_tokens": 16,
            "algo.entropy_coef": 0.01,  # Random weights earn no rewards, so only the entropy has a gradient.
            "train.num_steps": 2,
            "train.prompts_per_minibatch": 8,  # one update per step
            "eval.every": 0,
        }
    )
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main.main(["--config=configs/polynomial.py", *as_flags(settings)]) == 0
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/update_norm"] > 0 and row["mismatch/kl"] < 1e-5 for row in rows)
