"""Command line errors are reported as one line, and a short run writes all its files and can be resumed."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from fakes import PATIENCE, TINY, tiny_params
from fork_server import ForkServer
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict
from safetensors.numpy import load_file
from training_runs import rows_of
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs import polynomial
from poly_epo_jax import main
from poly_epo_jax.config.keys import Config, ConfigError, JudgeSection, ModelSection
from poly_epo_jax.export import __main__ as export
from poly_epo_jax.judges import NoJudge
from poly_epo_jax.model import hf
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import LOGGED_GENERATION, read_method, read_rows
from poly_epo_jax.report import build as report
from poly_epo_jax.startup import base_policy
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.startup.resume_checks import check_resume_inputs, check_resume_model
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Clustering, Group

ROOT = Path(__file__).parents[1]
FILE = "--config=configs/polynomial.py"


@pytest.fixture(autouse=True)
def _restore_process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the working directory, signal handlers and JAX configuration."""
    monkeypatch.chdir(ROOT)
    sigterm = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, sigterm)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def error_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Returns a function that runs main with invalid flags in a new run folder, and returns the error message."""

    def run_with_error(file: str, *overrides: str) -> str:
        folders = [f"--config.workdir={tmp_path / 'run'}", f"--config.compilation_cache_dir={tmp_path / 'compiled'}"]
        assert main.main([file, *folders, *overrides] if file else overrides) == 1
        (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
        return checked_message(error)

    return run_with_error


def checked_message(text: str) -> str:
    assert text.startswith("Error: ")
    assert len(text.splitlines()) == 1, text
    assert text == " ".join(text.split())
    return text


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy with 4 heads and 2 key-value heads, and a tokenizer for polynomials."""
    folder = tmp_path_factory.mktemp("policies") / "tiny"
    hf.save_pretrained(folder, tiny_params(), TINY, dtype="float32", eos_token_id=1)
    build_character_tokenizer(PolynomialTask.alphabet).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["", "--config.seed=1"], ["--config is missing"]),
        ([""], ["--config is missing", "configs/polynomial.py"]),
        (
            [FILE + ":poly_eop"],
            ["Unknown name ':poly_eop'", "a method (poly_epo, grpo, grpo_div, max_rl, dapo), a mesh (laptop, "],
        ),
        (
            ["--config=configs/polynomail.py"],
            ["configs/polynomail.py is not a file", "in configs: ", "polynomial.py"],
        ),
        (["--config=configs/"], ["configs/ is not a file", "polynomial.py"]),
        (["--config=polynomail"], ["no recipe polynomail; did you mean polynomial? Recipes in configs: countdown, "]),
        (["--config=configs"], ["no recipe configs; choose a recipe", "polynomial"]),
        (["--config=grpo,laptop"], ["grpo,laptop is not a recipe, but", '":grpo,laptop"', '"polynomial:grpo,laptop"']),
        ([FILE, "--config.train.num_stepz=3"], ["no key config.train.num_stepz", "from config.train.num_steps."]),
        ([FILE, "--config.trian.num_steps=3"], ["no key config.trian.num_steps", "from config.train.num_steps,"]),
        ([FILE, "--config.train.num-steps=3"], ["no key config.train.num-steps", "config.train.num_steps"]),
        ([FILE, "--config.optimizer.lr=3"], ["no key config.optimizer.lr", "from config.optimizer.learning_rate,"]),
        ([FILE, "--config.wordkir=runs/x"], ["no key config.wordkir", "config.workdir"]),
        ([FILE, "-config.workdir=runs/x"], ["unknown argument -config.workdir", "write --config.workdir=runs/x."]),
        ([FILE, "--config.task.optins.seed=3"], ["no key config.task.optins.seed", "config.task.options"]),
        ([FILE, "--config.log.options.seed=3"], ["no key config.log.options.seed"]),
        ([FILE, "--config.task.options.degree=9"], ["task.options.degree=9 must lie between 1 and 3."]),
        ([FILE, "--config.task.options.degree=two"], ["task.options.degree='two' must be a whole number."]),
        ([FILE, "--config.seed.x=3"], ["no key config.seed.x", "config.seed"]),
        ([FILE, "--config.xxxxxxxxxxxx=3"], ["no key config.xxxxxxxxxxxx", "--help lists the keys"]),
        ([FILE, "--config.train.num_steps=abc"], ["train.num_steps='abc' must be a whole number."]),
        ([FILE, "--config.train.num_steps=1.5"], ["train.num_steps='1.5' must be a whole number."]),
        ([FILE, "--config.optimizer.learning_rate=fast"], ["optimizer.learning_rate='fast' must be a finite number."]),
        ([FILE, "--config.train.profile_steps=12:10"], ["train.profile_steps='12:10' must be FIRST:LAST", "10:12"]),
        ([FILE, "--config.train.profile_steps=abc"], ["train.profile_steps='abc' must be FIRST:LAST"]),
        ([FILE, "--config.train=3"], ["no key config.train", "config.train.num_steps"]),
        ([FILE, "--config.task.options=3"], ["task.options=3 must be a dictionary."]),
        ([FILE, "--config.rollouts.shared_servers=yes"], ["rollouts.shared_servers='yes' must be True or False."]),
        ([FILE, "--config.train.num_steps", "3"], ["--config.train.num_steps has no value", "num_steps=VALUE"]),
        ([FILE, "--num_steps=3"], ["unknown argument --num_steps; write --config.train.num_steps=3."]),
        ([FILE, "--config.hosts.count=2"], ["no key config.hosts.count", "now config.hosts.num_processes."]),
        (["configs/polynomial.py"], ["unknown argument configs/polynomial.py; write --config=configs/polynomial.py."]),
        ([FILE, "--print_confg"], ["unknown argument --print_confg; write --print_config."]),
        ([FILE, "train.num_steps=3"], ["unknown argument train.num_steps; write --config.train.num_steps=3."]),
        ([FILE, "--config.task.name=chess"], ["task.name='chess'", "multiplication_prose, polynomial"]),
        ([FILE, "--config.judge.name=jury"], ["judge.name='jury'", "exact"]),
        ([FILE, "--config.rollouts.name=remote"], ["rollouts.name='remote'", "embedded"]),
        ([FILE, "--config.algo.loss=dpo"], ["algo.loss='dpo'", "ppo_clip"]),
        ([FILE, "--config.algo.objective=mean"], ["algo.objective='mean'", "mean_reward, pass_at_n, polychromic"]),
        ([FILE, "--config.sampling.temperature=0"], ["sampling.temperature=0.0", "positive"]),
        (
            [FILE, "--config.train.row_tokens=1000000", "--config.train.rows_per_device=60000"],
            ["train.rows_per_device=60000 of", "GB", "lower train.row_tokens"],
        ),
        ([FILE, "--config.train.prompts_per_batch=1024"], ["train.prompts_per_batch=1024", "training problems, 110"]),
        ([FILE, "--config.train.trainable_pattern=nothing"], ["train.trainable_pattern='nothing' matches no weight"]),
        ([FILE, "--config.sampling.max_tokens=40000", "--config.train.row_tokens=50000"], ["32768 positions"]),
        ([FILE, "--config.base.cache_dir=setup.py/base"], ["base.cache_dir=setup.py/base cannot be written to"]),
        (
            [FILE, "--config.compilation_cache_dir=/proc/compiled"],
            ["compilation_cache_dir=/proc/compiled cannot be written"],
        ),
        ([FILE, "--config.algo.set_size=8"], ["algo.set_size=8", "train.num_generations=8"]),
        (
            [FILE, "--config.task.options={'digits': 3}"],
            ["task.options has 'digits'", "it takes degree, "],
        ),
        ([FILE, "--config.task.options={'degree': 9}"], ["task.options.degree=9 must lie between 1 and 3."]),
        ([FILE, "--config.task.options={'num_train': 999}"], ["num_train=999", "at most"]),
        ([FILE, "--config.task.options={'num_held_out': 0}"], ["eval.every=20", "set eval.every=0"]),
        ([FILE, "--config.model.path=/no/such/model"], ["/no/such/model is not a folder"]),
        ([FILE, "--config.model.path=configs"], ["configs has no config.json"]),
        (
            [FILE, "--config.mesh.data=16", "--config.mesh.fsdp=1"],
            ["mesh.data=16", "takes 16 devices", "there are 8", "data=8, fsdp=1, tensor=1"],
        ),
        ([FILE, "--config.mesh.data=-1"], ["mesh.data=-1", "at most one may be -1"]),
        (
            [FILE, "--config.mesh.tensor=8"],
            ["mesh.tensor=8 does not divide the model's num_heads=4", "data=1, fsdp=4, tensor=2"],
        ),
    ],
    ids=lambda value: value[-1].removeprefix("--") or "nothing" if isinstance(value, list) else None,
)
def test_invalid_arguments_are_reported(arguments: list[str], words: list[str], error_message):
    text = error_message(*arguments)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--config.mesh.tensor=4", "--config.mesh.fsdp=1"], ["mesh.tensor=4", "num_kv_heads=2"]),
        (["--config.train.max_prompt_tokens=1"], ["train.max_prompt_tokens=1 ", "held-out problem", "eval.every=0"]),
        (["--config.train.max_prompt_tokens=1", "--config.eval.every=0"], ["only 0 training problems"]),
        (["--config.workdir=setup.py/run"], ["Not a directory", "setup.py/run"]),
        (["--config.log.wandb_project=mine"], ["'mine'", "wandb is not installed"]),
    ],
    ids=lambda value: value[0].removeprefix("--"),
)
def test_errors_after_loading_the_policy_are_reported(overrides, words, error_message, policy_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    text = error_message(FILE, f"--config.model.path={policy_folder}", "--config.mesh.fsdp=1", *overrides)
    assert all(word in text for word in words), text


def saved_run(folder: Path, **changes: Any) -> None:
    """Creates a run folder with a checkpoint and a configuration that differs from the file's."""
    config = polynomial.get_config()
    config.update_from_flattened_dict(changes)
    for name in ("checkpoints/5", "policy"):
        (folder / name).mkdir(parents=True)
    for name, text in (("config.json", config.to_json()), ("about.json", "{}"), ("metrics.jsonl", "")):
        (folder / name).write_text(text)


def test_a_run_is_not_resumed_with_other_settings(tmp_path: Path, error_message):
    mutable = {"train.num_steps": 7, "train.rows_per_device": 2, "mesh.data": 2, "model.path": "/moved"}
    mutable |= {"train.profile_steps": "1:2"}
    immutable = {"optimizer.schedule": "constant", "rollouts.in_flight": True}
    saved_run(tmp_path / "run", seed=3, **immutable, **mutable)
    changes = "optimizer.learning_rate=1e-3", "train.deterministic=True", "log.generations_every=3"
    changed = [f"--config.{change}" for change in changes]
    text = error_message(FILE, "--config.optimizer.schedule=constant", *changed)
    in_flight = "rollouts.in_flight (the staleness of responses depends on it)"
    assert (
        f"contains a run with different values of optimizer.learning_rate, {in_flight}, seed, train.deterministic; "
        in text
    )
    assert str(tmp_path / "run") in text


def test_a_run_is_not_resumed_with_fewer_steps_than_it_has_completed(tmp_path: Path, error_message):
    saved_run(tmp_path / "run", **{"optimizer.schedule": "constant", "train.num_steps": 9})
    flags = "--config.optimizer.schedule=constant", "--config.train.num_steps=4"
    assert f"train.num_steps=4 is lower than the 5 steps that the run in {tmp_path / 'run'} has" in error_message(
        FILE, *flags
    )


def test_a_run_folder_that_links_to_a_missing_folder(tmp_path: Path, error_message):
    (tmp_path / "run").symlink_to(tmp_path / "gone")
    text = error_message(FILE)
    assert f"workdir={tmp_path / 'run'} cannot be created" in text and f"links to {tmp_path / 'gone'}, which" in text
    with pytest.raises(FileExistsError, match="already exists"):
        hf.save_pretrained(tmp_path / "run", tiny_params(), TINY)


def test_a_run_is_not_resumed_from_a_model_with_other_shapes(tmp_path: Path):
    saved_run(tmp_path / "run")
    (tmp_path / "run" / "policy").rmdir()
    for folder in (tmp_path / "run" / "policy", tmp_path / "other"):
        hf.save_pretrained(folder, tiny_params(), TINY, dtype="float32")
    description = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(description | {"num_hidden_layers": 3}))
    check_resume_model(tmp_path / "run", tmp_path / "run" / "policy")
    check_resume_model(tmp_path / "new", tmp_path / "other")
    with pytest.raises(ConfigError, match=r"differs from \S+ in num_layers; set model\.path"):
        check_resume_model(tmp_path / "run", tmp_path / "other")


@pytest.mark.parametrize(
    ("saved", "flags", "words"),
    [
        (
            {"train.num_steps": 7},
            ["--config.train.num_steps=14"],
            "train.num_steps (optimizer.schedule=linear depends on it); ",
        ),
        (
            {"algo.kl_coef": 0.01, "model.path": "/first"},
            ["--config.algo.kl_coef=0.01", "--config.model.path=/second"],
            "model.path (the reference policy of algo.kl_coef=0.01); ",
        ),
    ],
    ids=["steps", "reference"],
)
def test_settings_of_the_schedule_and_the_kl_term_cannot_change(tmp_path: Path, error_message, saved, flags, words):
    saved_run(tmp_path / "run", **saved)
    assert words in error_message(FILE, *flags)


@pytest.mark.parametrize(
    ("versions", "named"),
    [
        ([], "(another version)"),
        ([{"poly_epo_jax": "0.0.9"}, {"poly_epo_jax": "0.1.0", "commit": "213dbac"}], "0.1.0 213dbac"),
    ],
    ids=["unknown", "recorded"],
)
def test_a_run_of_another_version_is_not_used(tmp_path: Path, error_message, capsys, versions, named):
    config = read_config(polynomial.get_config()).to_dict()
    config["judge"]["max_failed_share"] = config["judge"].pop("max_failed_fraction")
    config["task"]["options"] = {"seed": 1}  # options are not keys; these belong to another run
    saved_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    (tmp_path / "run" / "about.json").write_text(json.dumps({"versions": versions}))
    keys = "judge.max_failed_fraction, judge.max_failed_share"
    text = f"{tmp_path / 'run'} contains a run of poly_epo_jax {named}, with different keys {keys}; use that version"
    assert text in error_message(FILE)
    with pytest.raises(ConfigError, match=re.escape(text)):  # used by the evaluation
        open_trained_policy(tmp_path / "run", ModelSection(), make_mesh(1, 1, 1))
    assert export.main([str(tmp_path / "run"), str(tmp_path / "exported")]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "about.json", "metrics.jsonl"])
def test_checkpoints_without_the_other_files_of_their_run_are_not_resumed(tmp_path: Path, error_message, name: str):
    saved_run(tmp_path / "run")
    (tmp_path / "run" / name).rename(tmp_path / name)
    text = error_message(FILE, "--config.seed=9")
    assert text.startswith(f"Error: {tmp_path / 'run'} contains checkpoints but no {name}, ")
    assert "restore the missing files, set --config.workdir to a new folder, or delete this folder" in text
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["5"]
    assert not (tmp_path / "run" / name).exists()


@pytest.mark.parametrize("content", ["", '{"seed": 3', "[3]", "[]", "3", "\0" * 9, "[" * 9999])
def test_a_run_with_a_corrupted_configuration_is_not_resumed(tmp_path: Path, error_message, content: str):
    saved_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(content)
    assert f"{tmp_path / 'run' / 'config.json'} is not a JSON object (" in error_message(FILE)
    assert (tmp_path / "run" / "config.json").read_text() == content


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([FILE + ":ppo"], ["Unknown name ':ppo'"]),
        ([FILE, "--config.train.num_stepz=3"], ["no key config.train.num_stepz", "config.train.num_steps"]),
        ([FILE, "--config.model.path=/no/such/model"], ["/no/such/model is not a folder"]),
    ],
    ids=["method", "key", "model"],
)
def test_an_error_terminates_the_process_without_traceback(
    fork_server: ForkServer, arguments: list[str], words: list[str], tmp_path: Path
):
    folders = [f"--config.workdir={tmp_path / 'run'}", f"--config.compilation_cache_dir={tmp_path / 'compiled'}"]
    ended = fork_server.run("poly_epo_jax.main", [*arguments, *folders])
    assert ended.returncode == 1
    assert ended.stdout == ""
    text = checked_message(ended.stderr.removesuffix("\n"))
    assert all(word in text for word in words), text
    assert not (tmp_path / "run").exists()


def small_config(folder: Path, **changes: Any) -> ConfigDict:
    config = polynomial.get_config()
    config.update_from_flattened_dict(
        {
            "workdir": str(folder / "run"),
            "compilation_cache_dir": str(folder / "compiled"),
            "base.cache_dir": str(folder / "base"),
            "base.clean_steps": 3,
            "base.noisy_steps": 2,
            "base.batch_size": 8,
            "base.hidden_size": 16,
            "base.mlp_size": 24,
            "base.num_layers": 1,
            "base.head_dim": 8,
            "train.num_steps": 3,
            "optimizer.schedule": "constant",  # so that the number of steps may change
            "train.prompts_per_batch": 4,
            "train.prompts_per_minibatch": 2,
            "train.num_generations": 4,
            "train.rows_per_device": 4,
            "algo.set_size": 2,
            "algo.kl_coef": 0.01,
            "algo.entropy_coef": 0.01,  # the barely trained policy rarely earns a reward to learn from
            "mesh.fsdp": 1,
            "checkpoint.every": 2,
            "eval.every": 2,
            "eval.num_problems": 4,
            "eval.num_generations": 4,
            "log.generations_every": 2,
        }
        | changes
    )
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short run, its base policy and its compiled programs."""
    folder = tmp_path_factory.mktemp("finished")
    main.run(read_config(small_config(folder)))
    return folder


@pytest.mark.slow
def test_the_resumed_run_repeats_an_interrupted_evaluation(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    evaluate, calls = main.evaluate_held_out, []

    async def interrupted(*arguments: Any) -> dict[str, float]:
        calls.append(arguments)
        if len(calls) == 2:
            raise ServerError("The server terminated.")
        return await evaluate(*arguments)

    config = read_config(small_config(finished, workdir=str(tmp_path / "run")))
    monkeypatch.setattr(main, "evaluate_held_out", interrupted)
    with pytest.raises(ServerError, match="terminated"):
        main.run(config)
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()
    main.run(config)
    assert len(calls) == 4  # before the first step, after step 2 twice, and after the last step
    for name in ("metrics.jsonl", "generations.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / "run" / name).read_bytes()


def test_a_base_policy_is_created_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class NoTraining:
        def __init__(self, *arguments: Any, **keywords: Any):
            pass

        def init(self, params: Any) -> SimpleNamespace:
            return SimpleNamespace(params=params)

        def __call__(self, state: SimpleNamespace, minibatches: Any) -> tuple[SimpleNamespace, dict[str, float]]:
            return state, {}

    def disk_is_full(*arguments: Any, **keywords: Any) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(base_policy, "PolicyUpdate", NoTraining)
    config, task, mesh = read_config(small_config(tmp_path)), PolynomialTask(), make_mesh(1, 1, 1)
    with monkeypatch.context() as broken, pytest.raises(OSError, match="disk is full"):
        broken.setattr(PreTrainedTokenizerBase, "save_pretrained", disk_is_full)
        base_policy.base_policy(config, task, mesh)
    folder = base_policy.base_policy(config, task, mesh)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert sorted(folder.parent.iterdir()) == [folder.with_name(f".{folder.name}.lock"), folder]

    monkeypatch.setattr(base_policy, "_make", None)  # not called again
    assert base_policy.base_policy(config, task, mesh) == folder


@pytest.mark.slow
def test_a_short_run_writes_its_folder_and_can_be_extended(finished: Path, tmp_path: Path):
    config, run = small_config(finished), tmp_path / "run"
    shutil.copytree(finished / "run", run)
    assert json.loads((run / "config.json").read_text()) == json.loads(config.to_json())
    rows = [(row["step"], "eval/reward" in row) for row in read_rows(run / "metrics.jsonl")]
    assert rows == [(0, True), (1, False), (2, False), (2, True), (3, False), (3, True)]
    assert all(row["policy/update_norm"] > 0 for row in rows_of(run))
    timing = read_rows(run / "timing.jsonl")
    stages = ["advantages", "evaluate", "generate", "grade", "judge", "logprobs", "step", "sync", "update"]
    assert [key for key in timing[1] if key.startswith("seconds/")] == [f"seconds/{stage}" for stage in stages]
    assert all(row["tokens_per_second"] > 0 for row in timing)
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()) == ["2", "3"]
    assert any((run / "tensorboard").iterdir())

    generations = read_rows(run / "generations.jsonl")
    assert [row["step"] for row in generations] == [2] * 16 + [3] * 16
    assert all(row.keys() == LOGGED_GENERATION.keys() for row in generations)
    assert read_method(run) == "Poly-EPO"

    page = report.write_report([run], tmp_path / "report")
    assert page.exists()
    assert {"training_dynamics.png", "pass_at_k.png"} <= {path.name for path in page.parent.iterdir()}

    exported = tmp_path / "policy"
    assert export.main([str(run), str(exported), "--dtype", "float32"]) == 0
    assert "# Poly-EPO on polynomial" in (exported / "README.md").read_text()
    # Users edit README.md, and it is not downloaded with a model.
    assert json.loads((exported / "digests.json").read_text()).keys() == {path.name for path in exported.iterdir()} - {
        "README.md",
        "digests.json",
    }
    with ocp.CheckpointManager(run / "checkpoints") as manager, warnings.catch_warnings(action="ignore"):
        args = ocp.args.Composite(state=ocp.args.StandardRestore())  # Orbax warns that the saved structure is used
        trained = manager.restore(3, args=args).state["trainable"]
    theirs = load_file(exported / "model.safetensors")
    np.testing.assert_array_equal(theirs["model.embed_tokens.weight"], trained["embed"])
    q = trained["layers"]["q"][0]
    np.testing.assert_array_equal(theirs["model.layers.0.self_attn.q_proj.weight"], q.reshape(q.shape[0], -1).T)
    assert AutoTokenizer.from_pretrained(exported).encode("y=x:") == build_character_tokenizer(
        PolynomialTask.alphabet
    ).encode("y=x:")
    assert export.main([str(run), str(tmp_path / "other"), "--step", "1"]) == 2  # only 2 and 3 were kept

    longer = small_config(finished, **{"workdir": str(run), "train.num_steps": 4, "log.generations_every": 1})
    main.run(read_config(longer))
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
    assert [row["step"] for row in rows_of(run, "eval/reward")] == [0, 2, 3, 4]
    assert [row["step"] for row in read_rows(run / "generations.jsonl")] == [2] * 16 + [3] * 16 + [4] * 16


class UnreachableJudge:
    """A judge whose server does not respond. It interrupts this process while the process waits for the server."""

    has_waited = False

    async def identity(self) -> dict[str, str]:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(PATIENCE)
        self.has_waited = True
        return {}

    async def cluster(self, group: Group) -> Clustering | None: ...


def test_a_run_is_not_resumed_after_a_file_in_its_configuration_has_changed(tmp_path: Path):
    (tmp_path / "rules.txt").write_text("1")
    section = JudgeSection(options={"rules": str(tmp_path / "rules.txt")})
    config = Config(workdir=str(tmp_path / "run"), judge=section)
    digests = check_resume_inputs(config, NoJudge())
    saved_run(tmp_path / "run")
    (tmp_path / "run" / "about.json").write_text(json.dumps({"digests": digests}))
    assert check_resume_inputs(config, NoJudge()) == digests
    (tmp_path / "rules.txt").write_text("2")
    with pytest.raises(ConfigError, match=r"has changed .*: judge\.options\.rules\."):
        check_resume_inputs(config, NoJudge())


@pytest.mark.usefixtures("default_signals")
def test_an_interrupt_in_a_notebook_ends_the_wait_for_the_judge(tmp_path: Path):
    judge = UnreachableJudge()

    async def cell() -> None:  # notebooks execute cells in a running event loop
        check_resume_inputs(Config(workdir=str(tmp_path / "run")), judge)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    loop.close()
    assert not judge.has_waited


def test_a_missing_logger_is_reported_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(main, "prepare", pytest.fail)
    config = polynomial.get_config()
    config.workdir, config.log.wandb_project = str(tmp_path / "run"), "p"
    with pytest.raises(ImportError, match="wandb_project='p', but wandb is not installed"):
        main.run(read_config(config))
    assert not list(tmp_path.iterdir())
