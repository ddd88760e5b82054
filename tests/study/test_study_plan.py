"""Tests of the runs of a study: commands, validation before the first run, and detection of finished runs."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from poly_epo_jax import main
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.evaluate import __main__ as evaluate
from poly_epo_jax.evaluate.benchmarks import about_evaluation
from poly_epo_jax.startup.resume_checks import input_digests
from poly_epo_jax.startup.trained_policy import run_digests
from poly_epo_jax.study import Evaluation, Study, StudyTask
from poly_epo_jax.study.folder import RunKey
from poly_epo_jax.study.plan import StudyRun, make_runs, write_plan

METHODS = {"GRPO": {"algo.advantages": "grpo"}, "sets-of-2": {"algo.set_size": 2, "eval.every": 7}}
POLYNOMIAL = str(Path(__file__).parents[2] / "configs" / "polynomial.py")


def study(folder: Path, **fields: Any) -> Study:
    tasks = {"even": StudyTask(POLYNOMIAL), "skewed": StudyTask(f"{POLYNOMIAL}:grpo_div", {"base.skew": 0.5})}
    given = {"methods": METHODS, "seeds": (3, 4), "learning_rates": (1e-3, 2.5e-4), "settings": {"eval.every": 5}}
    return Study(**({"tasks": tasks, "folder": str(folder)} | given | fields))


def test_runs_combine_all_methods_rates_seeds_and_tasks(tmp_path: Path):
    runs = make_runs(study(tmp_path))
    assert len({run.folder for run in runs}) == len(runs) == 16
    assert [run.key.seed for run in runs] == [3] * 8 + [4] * 8, "ordered by seed"
    for run in runs:
        config, run_key = run.config, run.key
        assert (config.seed, config.optimizer.learning_rate) == (run_key.seed, run_key.rate)
        assert config.workdir == str(run.folder) == str(tmp_path / run_key.task / run_key.name)
        assert config.base.skew == (0.5 if run_key.task == "skewed" else 0.0)
        assert config.algo.advantages == (
            "grpo" if run_key.method == "GRPO" else "grpo_div" if run_key.task == "skewed" else "marginal_set"
        )
        assert config.eval.every == (7 if run_key.method == "sets-of-2" else 5), "methods override `settings`"
    assert runs[0].train_command[:2] == ["poly_epo_jax.main", f"--config={POLYNOMIAL}"]
    assert runs[0].key == RunKey("even", "GRPO", 1e-3, 3) and runs[0].key.name == "GRPO-lr0.001-seed3"


def test_runs_with_equal_labels_are_rejected(tmp_path: Path):
    tasks = {"a": StudyTask(POLYNOMIAL), "a-b": StudyTask(POLYNOMIAL)}
    with pytest.raises(ConfigError, match="same name TASK-METHOD"):
        make_runs(study(tmp_path, tasks=tasks, methods={"b-c": {}, "c": {}}, baseline="c"))


def test_command_line_overrides_the_study_file(tmp_path: Path):
    runs = make_runs(study(tmp_path), ["--config.eval.every=9", "--config.train.num_steps=3"])
    assert {(run.config.eval.every, run.config.train.num_steps) for run in runs} == {(9, 3)}
    with pytest.raises(ConfigError, match=r"^--config\.seed is controlled by `seeds`"):
        make_runs(study(tmp_path), ["--config.seed=9"])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train.num_step": 3}, "config.train.num_step;"),
        ({"train.num_steps": 0}, "train.num_steps=0"),
        ({"train.num_steps": "many"}, "train.num_steps='many'"),
        ({"algo.loss": "ppo"}, "algo.loss='ppo'"),
        ({"task.options": {"num_trains": 3}}, "'num_trains'"),
        ({"hosts.coordinator_address": "auto"}, "hosts.coordinator_address"),
    ],
)
def test_invalid_setting_produces_one_line_that_names_the_first_run(
    tmp_path: Path, settings: dict[str, Any], sentence: str
):
    with pytest.raises(ConfigError) as raised:
        make_runs(study(tmp_path, settings=settings, methods={"GRPO": {}}))
    (line,) = str(raised.value).splitlines()
    assert line.startswith("even/GRPO-lr0.001-seed3: ") and sentence in line
    assert not list(tmp_path.iterdir())


MATH = {"task.name": "math", "task.options": {"train": "problems.jsonl"}, "judge.name": "llm", "judge.url": "http://a"}


@pytest.mark.parametrize(
    ("evaluation", "sentence"),
    [
        (Evaluation(), "evaluation.benchmarks is empty, but task.name=math is not a benchmark; set it"),
        (Evaluation(["math_500"], num_generations=500), "evaluation.num_generations=500 must be at most"),
        (Evaluation(["math_500"], num_generations=500, judge=False), ""),
        (
            Evaluation(["math_50"]),
            "'math_50' is not a benchmark, a file or a dataset OWNER/NAME; did you mean math_500?",
        ),
    ],
)
def test_evaluations_that_would_fail_after_training_are_rejected(tmp_path: Path, evaluation: Evaluation, sentence: str):
    planned = study(tmp_path, settings=MATH, tasks={"math": StudyTask(POLYNOMIAL)}, evaluation=evaluation)
    if not sentence:
        assert make_runs(planned)
        return
    with pytest.raises(ConfigError) as raised:
        make_runs(planned)
    assert all(line.split(": ", 1)[1].startswith(sentence) for line in str(raised.value).splitlines())


def test_all_invalid_settings_are_reported(tmp_path: Path):
    methods = {"good": {}, "bad": {"algo.set_size": 8}, "worse": {"algo.nothing": 8}}
    with pytest.raises(ConfigError) as raised:
        make_runs(study(tmp_path, methods=methods))
    first, second = str(raised.value).splitlines()
    assert first.startswith("even/bad-lr0.001-seed3: algo.set_size=8 ") and "train.num_generations=8" in first
    assert second.startswith("even/worse-lr0.001-seed3: ") and "config.algo.nothing" in second


def test_folder_of_another_study_is_rejected(tmp_path: Path):
    (run, *_) = make_runs(study(tmp_path))
    finish(run)
    with pytest.raises(ConfigError, match=r"GRPO-lr0\.001-seed3.*base\.skew"):
        make_runs(study(tmp_path, settings={"eval.every": 5, "base.skew": 2.0}))


def finish(run: StudyRun, step: int | None = None) -> None:
    """Writes the files of a run that logged and saved `step`, by default its last step."""
    step = run.config.train.num_steps if step is None else step
    (run.folder / "checkpoints" / str(step)).mkdir(parents=True)
    (run.folder / "policy").mkdir()
    (run.folder / "config.json").write_text(json.dumps(run.config.to_dict()))
    (run.folder / "about.json").write_text(json.dumps({"digests": input_digests(run.config)}))
    (run.folder / "metrics.jsonl").write_text(f'{{"step": 0}}\n{{"step": {step}, "eval/reward": 1}}\n{{"step": 99')


def test_run_is_finished_when_its_last_step_is_logged_and_saved(tmp_path: Path):
    constant = study(tmp_path, settings={"optimizer.schedule": "constant"})
    first, second, third, *_ = make_runs(constant)
    assert not first.is_trained()
    finish(first)
    assert first.is_trained()
    (longer, *_) = make_runs(constant, ["--config.train.num_steps=200"])
    assert longer.folder == first.folder and not longer.is_trained()
    finish(second, step=149)
    assert not second.is_trained()
    finish(third)
    (third.folder / "checkpoints" / "150").rmdir()  # killed after logging and before saving
    assert not third.is_trained()


def write_evaluation(run: StudyRun, benchmark: str, label: str, **digests: str) -> Path:
    """Writes the evaluation of the last step of a run, with additional digests that only the evaluation computes."""
    assert run.evaluation is not None
    folder = run.folder.parent.parent / "evaluation" / label / run.key.label
    folder.mkdir(parents=True, exist_ok=True)
    step = run.config.train.num_steps
    known = run_digests(run.folder, step) | {"problems": "1", "judge.model": "j"} | digests
    number, judged = run.evaluation.num_generations, run.evaluation.judge
    about = about_evaluation(run.config, benchmark, f"{run.folder} step {step}", number, judged, known)
    (folder / "about.json").write_text(json.dumps(about))
    (folder / "results.json").write_text("{}")
    return folder


def test_evaluation_is_finished_when_results_of_the_final_weights_exist(tmp_path: Path):
    (run, *_) = make_runs(study(tmp_path, evaluation=Evaluation(num_generations=16)))
    assert not run.is_evaluated() and dataclasses.replace(run, evaluation=None).is_evaluated()
    assert run.evaluate_command[0] == "poly_epo_jax.evaluate"
    assert {
        "--benchmarks=polynomial",
        f"--models=even-GRPO-lr0.001-seed3={run.folder}",
        "--num_generations=16",
        f"--output={tmp_path / 'evaluation'}",
    } <= set(run.evaluate_command)
    assert evaluate.main([*run.evaluate_command[1:], "--print_config"]) == 0
    assert main.main([*run.train_command[1:], "--print_config"]) == 0
    folder = write_evaluation(run, "polynomial", "polynomial")
    assert folder == tmp_path / "evaluation" / "polynomial" / "even-GRPO-lr0.001-seed3"
    assert run.is_evaluated()
    assert not dataclasses.replace(run, evaluation=Evaluation(num_generations=8)).is_evaluated()
    (folder / "results.json").unlink()
    assert not run.is_evaluated(), "interrupted"


def test_runs_with_correlated_generations_are_evaluated_with_independent_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    methods = {"correlated": {"sampling.correlated": True}}
    (run, *_) = make_runs(study(tmp_path, methods=methods, evaluation=Evaluation(num_generations=16)))
    assert run.config.sampling.correlated
    assert evaluate.main([*run.evaluate_command[1:], "--print_config"]) == 0
    assert "sampling.correlated = False" in capsys.readouterr().out


def test_evaluations_on_files_and_datasets_are_found(tmp_path: Path):
    file = tmp_path / "test.jsonl"
    benchmarks = (str(file), "openai/gsm8k:main:test")
    (run, *_) = make_runs(study(tmp_path, evaluation=Evaluation(benchmarks=benchmarks, num_generations=16)))
    file.write_text("1")
    for benchmark, label in zip(benchmarks, ("test", "gsm8k"), strict=True):
        assert not run.is_evaluated()
        write_evaluation(run, benchmark, label)
    assert run.is_evaluated()
    file.write_text("2")
    assert not run.is_evaluated()
    file.write_text("1")
    assert run.is_evaluated()


def test_evaluation_of_replaced_weights_or_by_another_rubric_is_not_finished(tmp_path: Path):
    rubric = tmp_path / "rubric.md"
    rubric.write_text("1")
    judge = {"judge.name": "llm", "judge.url": "http://judge", "judge.options": {"prompt_file": str(rubric)}}
    settings = {**judge, "eval.every": 5}
    (run, *_) = make_runs(study(tmp_path, settings=settings, evaluation=Evaluation(num_generations=16)))
    finish(run)
    record = run.folder / "checkpoints" / "150" / "data" / "metadata"
    record.parent.mkdir()
    record.write_text('{"digest": "1"}')
    write_evaluation(run, "polynomial", "polynomial")
    assert run.is_evaluated()
    rubric.write_text("2")
    assert not run.is_evaluated()
    rubric.write_text("1")
    record.write_text('{"digest": "2"}')  # trained again
    assert not run.is_evaluated()
    run.drop_weights()
    assert run.is_evaluated(), "emptied checkpoints are not compared"
    (run.folder / "policy" / "chat_template.jinja").touch()
    assert not run.is_evaluated()


def test_runs_with_changed_files_are_rejected(tmp_path: Path):
    model, rubric = tmp_path / "model", tmp_path / "rubric.md"
    model.mkdir()
    judge = {"judge.name": "llm", "judge.url": "http://judge", "judge.options": {"prompt_file": str(rubric)}}
    given = study(tmp_path / "study", settings={**judge, "eval.every": 5, "model.path": str(model)})
    for file in (model / "config.json", rubric):
        file.write_text("1")
    (run, *_) = make_runs(given)
    finish(run)
    assert make_runs(given)[0].is_trained()
    for file, key in ((model / "config.json", "model.path"), (rubric, "judge.options.prompt_file")):
        file.write_text("2")
        with pytest.raises(ConfigError, match=rf"GRPO-lr0\.001-seed3: .*{run.folder} .*: {key}\."):
            make_runs(given)
        file.write_text("1")
    shutil.rmtree(run.folder)
    rubric.write_text("2")
    assert not make_runs(given)[0].is_trained()


@pytest.mark.slow
def test_study_process_does_not_initialize_devices():
    """Otherwise, it would reserve device memory that the runs need."""
    code = "from poly_epo_jax.study import Study, StudyTask; from poly_epo_jax.study.plan import make_runs"
    code += f"; runs = make_runs(Study({{'a': StudyTask({POLYNOMIAL!r})}}, folder='runs/none'))"
    code += "; from jax._src import xla_bridge; print(len(runs), len(xla_bridge._backends))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "9 0\n"


def test_plan_contains_baseline_and_runs(tmp_path: Path):
    one = study(tmp_path / "new", baseline="GRPO")
    runs = make_runs(one)
    write_plan(one, runs)
    plan = json.loads((tmp_path / "new" / "study.json").read_text())
    assert plan["baseline"] == "GRPO" and len(plan["runs"]) == 16
    assert RunKey(**plan["runs"][5]) == runs[5].key
