"""Tests of the files in docs/how_to/extend.md, which run exactly as shown, and of examples/boxes.py."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from extending import FILES, ROOT
from fakes import PATIENCE
from fork_server import ForkServer
from training_runs import SETTINGS, as_flags, environment, rows_of

from poly_epo_jax.config.keys import ModelSection
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import GENERATIONS, read_method, read_rows
from poly_epo_jax.report.build import write_report
from poly_epo_jax.startup.trained_policy import open_trained_policy
from poly_epo_jax.types import DEGENERATE_CLUSTER

pytestmark = pytest.mark.slow

# Trains a base policy that is sometimes correct. All tests share the base policy and the compiled programs.
SHORT = SETTINGS | {"base.clean_steps": 300, "train.num_steps": 2, "log.generations_every": 1, "eval.every": 0}
EVALUATED = SHORT | {"eval.every": 20}
# The tests of the boxes share their base policy and their programs.
SMALL_BOXES = {
    **{key: value for key, value in SETTINGS.items() if key.startswith("base.") and not key.endswith("_steps")},
    "train.prompts_per_batch": 16,
    "train.prompts_per_minibatch": 8,
    "optimizer.learning_rate": 3e-3,
    "optimizer.schedule": "constant",  # so that runs of different lengths have the same first steps
    "log.generations_every": 1,
    "eval.every": 0,
}
Command = Callable[..., subprocess.CompletedProcess[str]]
Train = Callable[..., list[dict]]
BOXES = ROOT / "examples" / "boxes.py"
# On a busy machine, a pause could otherwise divide a call of the sampler. Tokens remain the same, but log-probabilities
# are rounded differently in calls of other sizes.
PATIENT = f"""
from poly_epo_jax.rollouts import turn_queue

turn_queue.QUIET_SECONDS = {PATIENCE}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mine")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / BOXES.name).write_text(BOXES.read_text() + PATIENT)
    return folder


@pytest.fixture
def command(folder: Path, caches: dict[str, Path], fork_server: ForkServer) -> Command:
    """Runs the training command with one of the files, in its folder."""

    def run(name: str, **settings: object) -> subprocess.CompletedProcess[str]:
        return fork_server.run("poly_epo_jax.main", [f"--config={name}", *as_flags(settings | caches)], folder)

    return run


@pytest.fixture
def typed(folder: Path, caches: dict[str, Path]) -> Callable[..., str]:
    """Types `python -m MODULE`, with the packages of a user, in the folder of the files, and returns the output."""

    def run(module: str, *arguments: str, **settings: object) -> str:
        words = [sys.executable, "-m", module, *arguments, *as_flags(settings | caches)]
        variables = environment(path=ROOT) | {"COLUMNS": "300"}
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture
def train(folder: Path, command: Command) -> Train:
    """Trains with one of the files and returns the rows of its training steps."""

    def run(name: str, run_dir: str, **settings: object) -> list[dict]:
        done = command(name, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return rows_of(folder / "runs" / run_dir)

    return run


def advantages(folder: Path) -> list[float]:
    return [row["advantage"] for row in read_rows(folder / GENERATIONS)]


def test_all_files_are_covered():
    covered = set(re.findall(r'(?:train\(\s*"|--config=)(\w+\.py)', Path(__file__).read_text()))
    covered_elsewhere = {"my_family.py"}  # by test_model_family.py
    assert FILES.keys() | {BOXES.name} == covered | covered_elsewhere


def test_a_single_turn_task(train: Train, folder: Path):
    small = {key: value for key, value in SHORT.items() if key != "task.options"} | {"base.clean_steps": 150}
    train("my_sums.py", "my-sums", **small)
    rows, found = read_rows(folder / "runs/my-sums" / GENERATIONS), {}
    for row in rows:
        numbers = [int(number) for number in re.findall(r"\d+", row["response"])]
        if row["correct"]:
            assert f"{sum(numbers)}=" == row["prompt"]
        if row["cluster"] != DEGENERATE_CLUSTER:
            group = found.setdefault((row["step"], row["problem"]), {})
            assert group.setdefault(tuple(sorted(numbers)), row["cluster"]) == row["cluster"]
    assert 0 < np.mean([row["correct"] for row in rows]) < 1
    assert all(len(set(group.values())) == len(group) for group in found.values())


def test_a_set_objective(train: Train, folder: Path):
    # Sets are small, because only sets without an incorrect response have a positive score.
    rows = train("my_objective.py", "my-objective", **SHORT, **{"algo.set_size": 2})
    assert read_method(folder / "runs/my-objective") == "All correct"
    assert len(rows) == 2 and any(advantages(folder / "runs/my-objective"))


def test_an_estimator_that_reads_the_mean_log_probability(train: Train, folder: Path):
    train("my_estimator.py", "my-estimator", **SHORT)
    rows = read_rows(folder / "runs/my-estimator" / GENERATIONS)
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["problem"], row["reward"]), []).append(row)
    # For equal rewards, advantages differ only because of the log-probabilities.
    varied = [group for group in groups.values() if len({row["response"] for row in group}) > 1]
    assert varied and all(np.ptp([row["advantage"] for row in group]) > 0 for group in varied)


def test_a_loss_with_an_option(train: Train, folder: Path):
    rows = train("my_loss.py", "my-loss", **SHORT)
    # The first minibatch is on policy and has no changes. The range is narrow for the changes of the second.
    assert all(0 < row["policy/clip_fraction"] < 1 for row in rows)
    wide = {"algo.loss_options.max_change": 1.0, "workdir": "runs/my-wide-loss"}
    rows = train("my_loss.py", "my-wide-loss", **SHORT, **wide)
    assert all(row["policy/clip_fraction"] == 0 for row in rows)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("max_chang", 0.1, ["algo.loss_options", "'max_chang'", "near_policy", "max_change"]),
        ("max_change", 1.5, ["algo.loss_options.max_change=1.5", "between 0 and 1"]),
    ],
)
def test_invalid_options_of_a_loss_are_rejected(command: Command, option: str, value: object, expected: list[str]):
    done = command("my_loss.py", **SHORT, **{f"algo.loss_options.{option}": value})
    assert done.returncode == 1 and done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1
    assert all(text in done.stderr for text in expected), done.stderr


@pytest.fixture(scope="module")
def boxes(folder: Path, caches: dict[str, Path], fork_server: ForkServer) -> Path:
    """Trains in the boxes, and returns the folder of the run."""
    flags = as_flags(SMALL_BOXES | caches | {"train.num_steps": 14})
    done = fork_server.run("poly_epo_jax.main", ["--config=boxes.py:grpo", *flags], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "boxes-grpo"


def test_an_environment_is_learned_and_its_judge_clusters_by_box(boxes: Path):
    rewards = [row["reward"] for row in rows_of(boxes)]
    assert 0.1 < rewards[0] < 0.45
    assert np.mean(rewards[-5:]) > 2 * rewards[0]
    clusters: dict[tuple, dict[str, int]] = {}
    for row in read_rows(boxes / GENERATIONS):
        known = clusters.setdefault((row["step"], row["problem"], row["occurrence"]), {})
        opened = row["turns"][0] if row["turns"][0] in [*"abcdef"] else ""
        assert known.setdefault(opened, row["cluster"]) == row["cluster"]
        is_named = bool(opened) and opened in row["prompt"]
        assert row["correct"] == (is_named and f"={row['turns'][-1]}" == row["turns"][1])
        assert (row["cluster"] == DEGENERATE_CLUSTER) == (opened == "")
    assert all(len(set(known.values())) == len(known) for known in clusters.values())


KILLED = """
    async def reply(self, generation):
        if pathlib.Path("kill-at").exists() and next(REPLIES) == int(pathlib.Path("kill-at").read_text()):
            pathlib.Path("kill-at").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_killed_in_an_episode_resumes_with_the_same_bytes(command: Command, folder: Path, boxes: Path):
    text = (folder / BOXES.name).read_text()
    text = text.replace("import random\n", "import itertools, os, pathlib, random, signal\n")
    text = text.replace("    async def reply(self, generation):\n", KILLED.lstrip("\n"))
    (folder / "killed.py").write_text(
        text.replace("class BoxesEpisode", "REPLIES = itertools.count()\n\n\nclass BoxesEpisode")
    )
    settings = SMALL_BOXES | {"train.num_steps": 4, "checkpoint.every": 1}
    (folder / "kill-at").write_text(str(16 * 8 * 2 * 5 // 2))  # in step 3, if each episode has two replies
    assert command("killed.py:grpo", **settings, workdir="runs/killed").returncode == -signal.SIGKILL
    assert rows_of(folder / "runs/killed") and len(rows_of(folder / "runs/killed")) < 4
    resumed = command("killed.py:grpo", **settings, workdir="runs/killed")
    assert resumed.returncode == 0, resumed.stderr
    for name in ("metrics.jsonl", "generations.jsonl"):
        rows = (folder / "runs/killed" / name).read_bytes()
        assert rows.count(b'"step": 4,') and (boxes / name).read_bytes().startswith(rows)


def test_a_judge_by_embeddings(train: Train, folder: Path):
    train("my_judge.py", "my-judge", **SHORT)
    assert read_method(folder / "runs/my-judge") == "Spread"
    assert len({row["cluster"] for row in read_rows(folder / "runs/my-judge" / GENERATIONS)}) > 1


def test_a_sampler(train: Train, folder: Path):
    train("my_sampler.py", "my-sampler", **EVALUATED)
    recorded = [json.loads(line) for line in (folder / "runs/completions.jsonl").read_text().splitlines()]
    assert len(recorded) == 2 * 8 * 8 + 2 * 8 * 8  # two steps, and two evaluations


def test_an_evaluation_metric(train: Train, typed: Callable[..., str], folder: Path):
    train("my_metric.py", "my-metric", **EVALUATED)
    evaluated = rows_of(folder / "runs/my-metric", "eval/all_correct@8")
    assert [row["step"] for row in evaluated] == [0, 2]
    for row in evaluated:
        assert row["eval/all_correct@1"] == pytest.approx(row["eval/pass@1"])
        assert row["eval/all_correct@8"] <= row["eval/all_correct@2"] <= row["eval/pass@1"]
    flags = ["--models=trained=runs/my-metric", "--benchmarks=polynomial", "--num_generations=4", "--max_problems=4"]
    output = typed("poly_epo_jax.evaluate", "--config=my_metric.py", *flags, **SETTINGS)
    assert "all correct@4" in output
    metrics = json.loads((folder / "runs/evaluation/polynomial/trained/results.json").read_text())["metrics"]
    assert 0 <= metrics["all_correct@4"]["mean"] <= metrics["all_correct@1"]["mean"] == metrics["pass@1"]["mean"]
    assert "<th>all_correct@4</th>" in write_report([folder / "runs/evaluation"], folder / "report").read_text()


def test_a_logged_metric(train: Train, folder: Path):
    # Each task has its own base policy. This one need not be correct.
    first, last = train("my_counter.py", "my-counter", **EVALUATED | {"base.clean_steps": 60})
    before, _ = rows_of(folder / "runs/my-counter", "eval/degenerate_fraction")
    assert first["task/invalid_responses"] == pytest.approx(
        64 * (before["eval/degenerate_fraction"] + first["clusters/degenerate_fraction"])
    )
    assert last["task/invalid_responses"] == pytest.approx(64 * last["clusters/degenerate_fraction"])


def test_training_part_of_the_weights(train: Train, folder: Path):
    train("my_part.py", "my-part", **SHORT, **{"checkpoint.every": 1})
    mesh = make_mesh(1, 1, 1)
    (_, before, _), (_, after, _) = (
        open_trained_policy(folder / "runs/my-part", ModelSection(), mesh, step) for step in (1, 2)
    )
    changed = {name for name, weight in after["layers"].items() if not np.array_equal(weight, before["layers"][name])}
    assert changed == {"q", "k", "v", "o"}
    np.testing.assert_array_equal(after["embed"], before["embed"])
