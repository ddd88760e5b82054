"""Evaluations identify models, problems and rubrics by content: new content under the same path is never combined."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_judge import FakeJudge, serving
from fakes import TINY, tiny_params
from fork_server import ForkServer
from training_runs import SETTINGS, as_flags

from configs import polaris
from poly_epo_jax.config.keys import Config, TaskSection
from poly_epo_jax.config.section import changed_keys
from poly_epo_jax.evaluate.benchmarks import about_evaluation, open_benchmark
from poly_epo_jax.evaluate.folder import open_folder
from poly_epo_jax.model import hf
from poly_epo_jax.model.policy import model_digest
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.startup.resume_checks import problems_digest
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.tasks.verifier import GradedInWorkers


def write_model(folder: Path, seed: int = 0) -> None:
    """Writes a model folder, and replaces its weights if it exists."""
    shutil.rmtree(folder, ignore_errors=True)
    tokenizer = build_character_tokenizer(PolynomialTask.alphabet)
    hf.save_pretrained(folder, tiny_params(seed), TINY, dtype="float32", eos_token_id=1, tokenizer=tokenizer)


def test_a_model_is_identified_by_its_files(tmp_path: Path):
    folder = tmp_path / "model"
    write_model(folder)
    first = model_digest(folder)
    write_model(folder, seed=1)
    assert model_digest(folder) != first
    write_model(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert model_digest(folder) == model_digest(tmp_path / "copy") == first
    (tmp_path / "copy" / "README.md").write_text("A model card.")
    assert model_digest(tmp_path / "copy") == first
    (tmp_path / "copy" / "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(tmp_path / "copy") != first


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    return changed_keys(old, json.loads(json.dumps(new)))


def test_a_benchmark_file_is_identified_by_its_content(tmp_path: Path):
    file, config = tmp_path / "mine.jsonl", read_config(polaris.get_config())

    def about(answer: str) -> dict[str, Any]:
        file.write_text(json.dumps({"problem": "1+1?", "answer": answer}) + "\n")
        problems = open_benchmark(str(file), config.task).problems
        return about_evaluation(config, str(file), "a step", 8, False, {"problems": problems_digest(problems)})

    first, second = about("2"), about("3")
    assert changes(first, second) == ["digests.problems", "digests.task_options.train"]
    assert first["digests"].keys() == {"problems", "task_options.train"}
    assert about("2") == first
    open_folder(tmp_path / "folder", first)
    with pytest.raises(ValueError, match=r"different values of problems, task_options\.train; .*--output"):
        open_folder(tmp_path / "folder", second)
    assert json.loads((tmp_path / "folder" / "about.json").read_text()) == first


def test_the_system_prompt_is_used_and_recorded(tmp_path: Path):
    (file := tmp_path / "mine.jsonl").write_text('{"problem": "1+1?", "answer": "2"}')
    abouts = []
    for system_prompt in ("", "Be brief."):
        config = Config(task=TaskSection(name="math", system_prompt=system_prompt))
        (problem,) = open_benchmark(str(file), config.task).problems
        assert problem.system == system_prompt
        abouts.append(about_evaluation(config, str(file), "a step", 8, False, {}))
    assert changes(*abouts) == ["system_prompt"]
    with pytest.raises(ValueError, match=r"task\.system_prompt requires"):
        open_benchmark("polynomial", TaskSection(system_prompt="Be brief."))


def test_results_of_another_version_of_the_grader_are_not_combined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1?", "answer": "2"}')
    benchmark = open_benchmark(str(tmp_path / "mine.jsonl"), TaskSection(name="math"))
    before = benchmark.digests
    open_folder(tmp_path / "folder", {"digests": before})
    monkeypatch.setattr(GradedInWorkers, "grader_version", "another version")
    with pytest.raises(ValueError, match="different values of grader;"):
        open_folder(tmp_path / "folder", {"digests": benchmark.digests})


def test_synthetic_problems_are_identified_by_their_content():
    first, again, other = (
        problems_digest(open_benchmark("polynomial", TaskSection(name="polynomial", options={"seed": seed})).problems)
        for seed in (0, 0, 1)
    )
    assert first == again != other


def test_a_rubric_is_identified_by_its_content(tmp_path: Path):
    rubric, values = tmp_path / "rubric.md", polaris.get_config()
    values.judge.options = {"prompt_file": str(rubric)}

    def about(text: str, judged: bool = True) -> dict[str, Any]:
        rubric.write_text(text)
        return about_evaluation(read_config(values), "math_500", "a step", 8, judged, {})

    assert changes(about("Cluster."), about("Cluster by method.")) == ["digests.judge.options.prompt_file"]
    assert about("Cluster.", judged=False) == about("Cluster by method.", judged=False)


def test_descriptions_of_earlier_versions_are_rejected(tmp_path: Path):
    about = about_evaluation(read_config(polaris.get_config()), "math_500", "a step", 8, False, {"weights": "1"})
    open_folder(tmp_path, {key: value for key, value in about.items() if key != "digests"})
    with pytest.raises(ValueError, match="different values of digests;"):
        open_folder(tmp_path, about)


@pytest.fixture
def evaluate(fork_server: ForkServer, tmp_path: Path, caches: dict[str, Path]):
    """Evaluates a model, and returns the error message, the description and the bytes of the results."""

    def run(model: Path, **more: Any) -> tuple[str, dict[str, Any], bytes]:
        values = {"mesh.fsdp": 1, "rollouts.max_concurrent": 16, "sampling.max_tokens": 20}
        settings = values | {"task.options": SETTINGS["task.options"]} | caches | more
        flags = ["--config=configs/polynomial.py", f"--models=m={model}", "--benchmarks=polynomial", "--max_problems=2"]
        output = tmp_path / "out"
        ended = fork_server.run(
            "poly_epo_jax.evaluate", [*flags, "--num_generations=4", f"--output={output}", *as_flags(settings)]
        )
        last = ended.stderr.splitlines()[-1:]  # warnings may come first
        assert (ended.returncode == 1) == any(line.startswith("Error: ") for line in last), ended.stderr
        folder = output / "polynomial" / "m"
        about = json.loads((folder / "about.json").read_text())
        return ended.stderr if ended.returncode else "", about, (folder / "results.json").read_bytes()

    return run


@pytest.mark.slow
def test_new_weights_under_the_same_path_are_not_given_the_old_results(evaluate, tmp_path: Path):
    model = tmp_path / "model"
    write_model(model)
    error, about, results = evaluate(model)
    assert (error, about["digests"]["model_files"]) == ("", model_digest(model))
    assert json.loads(results)["digests"] == about["digests"]
    write_model(model, seed=1)
    error, again, kept = evaluate(model)
    assert "different values of model_files; restore them, choose another --output" in error
    assert (again, kept) == (about, results)
    write_model(model)  # a new file with the same content
    assert evaluate(model) == ("", about, results)


@pytest.mark.slow
def test_a_changed_rubric_or_judge_model_is_not_given_the_old_clusters(
    evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, rubric = tmp_path / "model", tmp_path / "rubric.md"
    write_model(model)
    rubric.write_text("Cluster the {num_responses} responses.")
    options = f"{{'prompt_file': '{rubric}'}}"
    with serving() as url:
        judge = {"judge.name": "llm", "judge.url": url, "judge.model": "", "judge.options": options}
        error, about, results = evaluate(model, **judge)
        assert (error, about["digests"]["judge.model"]) == ("", "judge-1")
        assert json.loads(results)["num_clustered"] == 2
        rubric.write_text("Cluster the {num_responses} responses by method.")
        error, *kept = evaluate(model, **judge)
        assert "different values of judge.options.prompt_file;" in error
        assert kept == [about, results]
        rubric.write_text("Cluster the {num_responses} responses.")
        monkeypatch.setattr(FakeJudge, "model", "judge-2")
        assert "different values of judge.model;" in evaluate(model, **judge)[0]
        monkeypatch.setattr(FakeJudge, "model", "judge-1")
        assert evaluate(model, **judge) == ("", about, results)


@pytest.mark.slow
def test_a_run_that_was_trained_again_is_not_given_the_old_results(
    evaluate, fork_server: ForkServer, tmp_path: Path, caches: dict[str, Path]
):
    run = tmp_path / "run"

    def train(seed: int) -> str:
        settings = SETTINGS | caches | {"workdir": run, "train.num_steps": 1, "eval.every": 0, "seed": seed}
        ended = fork_server.run("poly_epo_jax.main", ["--config=configs/polynomial.py", *as_flags(settings)])
        assert ended.returncode == 0, ended.stderr
        return json.loads((run / "checkpoints" / "1" / "data" / "metadata").read_text())["digest"]

    digest = train(seed=0)
    error, about, results = evaluate(run)
    assert (error, about["model"], about["digests"]["weights"]) == ("", f"{run} step 1", digest)
    run.rename(tmp_path / "first")
    assert train(seed=1) != digest
    error, *kept = evaluate(run)
    assert "different values of weights;" in error and kept == [about, results]
    shutil.rmtree(run)
    (tmp_path / "first").rename(run)
    assert evaluate(run) == ("", about, results)
