"""A run is only resumed with the problems, policy files and reference weights that it was started with."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fakes import TINY, TINY_ALPHABET, ByLetter, tiny_params
from jax.experimental.compilation_cache import compilation_cache
from safetensors.numpy import load_file, save_file
from training_runs import rows_of

from poly_epo_jax import main
from poly_epo_jax.config import default
from poly_epo_jax.config.keys import Config, ConfigError, ModelSection
from poly_epo_jax.export.__main__ import export
from poly_epo_jax.model import hf
from poly_epo_jax.model.policy import open_policy
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import read_about
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.startup.resume_checks import (
    check_resume_config,
    check_same_content,
    policy_digests,
    problem_digests,
    reference_digests,
)
from poly_epo_jax.types import Problem


@pytest.fixture
def policy_folder(tmp_path: Path) -> Path:
    """A random policy and its tokenizer, without digests, like folders from other sources."""
    folder = tmp_path / "policy"
    hf.save_pretrained(folder, tiny_params(), TINY, dtype="float32", eos_token_id=1)
    tokenizer = build_character_tokenizer(TINY_ALPHABET)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)
    return folder


def edit_text(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def scale_weight(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: tensors[name] * np.float32(1.01)}, folder / "model.safetensors", {"format": "pt"})


POLICY_CHANGES: dict[str, Callable[[Path], None]] = {
    "chat template": lambda folder: edit_text(folder / "chat_template.jinja", "}}", "}}!"),
    "vocabulary": lambda folder: edit_text(folder / "tokenizer.json", '"a"', '"?"'),
    "stop tokens": lambda folder: edit_text(folder / "generation_config.json", ": 1", ": 2"),
}


@pytest.mark.parametrize("name", POLICY_CHANGES)
def test_digests_of_a_policy_identify_the_changed_file(policy_folder: Path, name: str):
    before = policy_digests(open_policy(policy_folder, ModelSection()))
    assert list(before) == list(POLICY_CHANGES) and before == policy_digests(open_policy(policy_folder, ModelSection()))
    POLICY_CHANGES[name](policy_folder)
    after = policy_digests(open_policy(policy_folder, ModelSection()))
    assert [name for name in before if after[name] != before[name]] == [name]


def test_digests_of_problems_identify_text_answer_id_and_order():
    problems = [Problem("a", "1+1", "2"), Problem("b", "1+2", "3")]

    def digests(train: list[Problem]) -> dict[str, str]:
        task = ByLetter()
        task.train_problems = train
        return problem_digests(task)

    before = digests(problems)
    assert list(before) == ["training problems", "held-out problems"]
    assert digests([Problem("a", "1+1", "2"), Problem("b", "1+2", "3")]) == before
    graded_by = Problem("b", "1+2", "3", columns={"solution": "3"})
    for other in (Problem("c", "1+2", "3"), Problem("b", "1+3", "3"), Problem("b", "1+2", "4"), graded_by):
        assert digests([problems[0], other])["training problems"] != before["training problems"]
    assert digests(problems[::-1])["training problems"] != before["training problems"]
    assert digests(problems[::-1])["held-out problems"] == before["held-out problems"]
    digests([Problem("a", "\ud800", "1")])  # problems are validated elsewhere
    tools = [({"name": name},) for name in ("search", "run")]
    prompted = [Problem("a", "1+1", "2", chat=True, tools=one) for one in ((), *tools)]
    encoded = [digests([problem])["training problems"] for problem in (problems[0], *prompted)]
    assert len(set(encoded)) == 4  # the prompt of each of these problems has other tokens


def test_the_digest_of_reference_weights_changes_with_one_weight_and_not_with_the_mesh(policy_folder: Path):
    policy = open_policy(policy_folder, ModelSection())
    before = reference_digests(policy.load_reference(make_mesh(1, 1, 1), 0))
    assert reference_digests(policy.load_reference(make_mesh(1, 4, 2), 0)) == before
    scale_weight(policy_folder, "model.norm.weight")
    after = reference_digests(policy.load_reference(make_mesh(1, 1, 1), 0))
    assert list(after) == list(before) and after != before


def test_only_recorded_digests_of_a_resumed_run_are_compared(tmp_path: Path):
    new = {"chat template": "1", "vocabulary": "2", "rubric": "3"}
    assert check_same_content(tmp_path / "run", "/models/q", new) == new
    for folder in ("checkpoints/5", "policy"):
        (tmp_path / "run" / folder).mkdir(parents=True)
    for name, text in (("config.json", "{}"), ("metrics.jsonl", ""), ("about.json", "{}")):
        (tmp_path / "run" / name).write_text(text)
    assert check_same_content(tmp_path / "run", "/models/q", new) == new  # a run of an earlier version
    saved = {"chat template": "1", "vocabulary": "0", "rubric": "0"}
    (tmp_path / "run" / "about.json").write_text(json.dumps({"digests": saved}))
    with pytest.raises(ConfigError, match=r"^/models/q has changed .*/run was started: vocabulary, rubric\. Restore "):
        check_same_content(tmp_path / "run", "/models/q", new)
    assert check_same_content(tmp_path / "run", "/models/q", saved) == saved


AUDITED = {
    "judge.name": "llm",
    "judge.url": "http://a:1",
    "judge.verify": "second",
    "audit.judge.name": "llm",
    "audit.judge.url": "http://b:1",
}


@pytest.mark.parametrize("judge", ["judge", "audit.judge"])
def test_the_servers_of_both_judges_may_move_when_a_run_is_resumed(judge: str, tmp_path: Path):
    def configure(changes: dict[str, Any]) -> Config:
        config = default.get_config("poly_epo")
        config.update_from_flattened_dict(AUDITED)
        config.judge.options = config.audit.judge.options = {"attempts": 3}
        config.update_from_flattened_dict(changes)
        return read_config(config)

    (tmp_path / "run" / "checkpoints" / "1").mkdir(parents=True)
    for name in ("metrics.jsonl", "about.json"):
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "run" / "config.json").write_text(json.dumps(configure({}).to_dict()))
    server = {"url": "http://c:1", "api_key_env": "OTHER_KEY", "options.attempts": 4, "max_concurrent": 2}
    limits = {"timeout_seconds": 1.0, "wait_seconds": 1.0}
    moved = configure({f"{judge}.{key}": value for key, value in (server | limits).items()})
    check_resume_config(tmp_path / "run", moved)
    with pytest.raises(ConfigError, match=rf"different values of {re.escape(judge)}\.model; restore"):
        check_resume_config(tmp_path / "run", configure({f"{judge}.model": "other"}))


@pytest.fixture
def config(policy_folder: Path, tmp_path: Path) -> Iterator[Callable[..., Config]]:
    """Returns a function that configures a run with two data files, and trains part of the weights with a KL term."""
    for name, letters in (("train", "abcd"), ("held_out", "efgh")):
        rows = [{"problem": letter, "answer": "1"} for letter in letters]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def configure(**changes: Any) -> Config:
        config = default.get_config("grpo")
        config.update_from_flattened_dict(
            {
                "workdir": str(tmp_path / "run"),
                "compilation_cache_dir": str(tmp_path / "compiled"),
                "model.path": str(policy_folder),
                "task.name": "math",
                "judge.name": "none",
                "train.num_steps": 2,
                "train.prompts_per_batch": 2,
                "train.prompts_per_minibatch": 2,
                "train.num_generations": 4,
                "train.rows_per_device": 4,
                "train.max_prompt_tokens": 4,
                "sampling.max_tokens": 4,
                "algo.set_size": 2,
                "algo.entropy_coef": 0.01,  # no response earns a reward
                "optimizer.schedule": "constant",
                "mesh.fsdp": 1,
                "eval.every": 2,
                "eval.num_generations": 2,
            }
            | changes
        )
        sources = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "held_out")}
        config.task.options = sources | {"template": "{problem}", "num_workers": 1}
        return read_config(config)

    yield configure
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


def assert_refused(config: Config, source: str, name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        main.run(config)
    assert f"{source} has changed since the run in {config.workdir} was started: {name}. " in str(refused.value)


@pytest.mark.slow
def test_a_run_is_not_resumed_after_its_content_has_changed(config: Callable[..., Config], tmp_path: Path):
    trained = config(**{"algo.kl_coef": 0.01, "train.trainable_pattern": r"layers\..*"})
    main.run(trained)
    reference = "weights of the reference policy"
    digests = read_about(tmp_path / "run")["digests"]
    files = {f"task.options.{name}" for name in ("train", "held_out")} | {"model.path"}
    assert digests.keys() == {"training problems", "held-out problems", *POLICY_CHANGES, reference} | files
    records = {file: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()}
    problems = f"task.name=math with task.options={dict(trained.task.options)}"
    changes: list[tuple[str, str, Path, Callable[[Path], None]]] = [
        (problems, "training problems", tmp_path, lambda root: edit_text(root / "train.jsonl", '"a"', '"i"')),
        (problems, "held-out problems", tmp_path, lambda root: edit_text(root / "held_out.jsonl", '"1"', '"2"')),
        *((trained.model.path, name, tmp_path / "policy", change) for name, change in POLICY_CHANGES.items()),
        *(  # a trained weight, and a frozen weight
            (trained.model.path, reference, tmp_path / "policy", partial(scale_weight, name=name))
            for name in ("model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight")
        ),
    ]
    for source, name, folder, change in changes:
        before = {file: file.read_bytes() for file in folder.iterdir() if file.is_file()}
        change(folder)
        assert_refused(trained, source, name)
        for file, content in before.items():
            file.write_bytes(content)
    assert {file: file.read_bytes() for file in (tmp_path / "run").iterdir() if file.is_file()} == records
    main.run(dataclasses.replace(trained, train=dataclasses.replace(trained.train, num_steps=3)))
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]
    assert read_about(tmp_path / "run")["digests"] == digests


@pytest.mark.slow
def test_an_adapter_is_not_used_with_other_base_weights(config: Callable[..., Config], tmp_path: Path):
    adapted = config(**{"lora.rank": 2, "algo.kl_coef": 0.01})
    main.run(adapted)
    scale_weight(tmp_path / "policy", "model.embed_tokens.weight")
    for use in (lambda: main.run(adapted), lambda: export(tmp_path / "run", tmp_path / "exported")):
        with pytest.raises(ConfigError) as refused:
            use()
        assert f"trained with other frozen weights than those in {tmp_path / 'policy'}; " in str(refused.value)
    assert not (tmp_path / "exported").exists()
