"""Tests that docs/tutorials/own_problems.md works as typed, with a tiny policy instead of SmolLM2."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from extending import ROOT, files_on
from fork_server import ForkServer
from responses import response
from training_runs import SETTINGS, as_flags, environment, rows_of

from poly_epo_jax.config import default
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import GENERATIONS, read_rows
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.types import Problem

PAGE = (ROOT / "docs" / "tutorials" / "own_problems.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in re.sub(r"\\\n *", "", block).splitlines() if line.startswith("python")]
FILES = files_on("tutorials/own_problems.md")
POLICY = {key: value for key, value in SETTINGS.items() if key.startswith("base.")} | {
    "base.clean_steps": 20,
    "base.noisy_steps": 0,
}
SMALL = {
    "train.max_prompt_tokens": 128,
    "sampling.max_tokens": 24,
    "train.row_tokens": 512,
    "train.num_steps": 2,
    "eval.every": 2,
    "log.generations_every": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a folder that contains only the files of the page."""
    folder = tmp_path_factory.mktemp("sentences")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def run(folder: Path, command: str) -> str:
    """Types a command of the page in a new process, and returns its output."""
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, cwd=folder, env=environment(path=ROOT), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_module(server: ForkServer, folder: Path, command: str) -> str:
    """Types a command `python -m ...` in a process that has already executed the slow imports."""
    _, _, module, *arguments = command.split()
    done = server.run(module, arguments, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Demonstrated:
    """Demonstrations for a tiny policy, which generates letters and spaces after a few steps of training on them."""

    def __init__(self, words: list[str], prompt: str):
        self.train_problems: Sequence[Problem] = [Problem(word, prompt.format(word), word) for word in words]
        self.held_out_problems: Sequence[Problem] = self.train_problems[:1]
        self.alphabet = "".join(sorted(set("".join(problem.prompt for problem in self.train_problems))))

    def reward(self, problem: Problem, generation: object) -> float:
        return 0.0

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: object) -> str:
        return f" The {problem.answer} is a {problem.answer}.\n"


@pytest.mark.slow
def test_the_page_runs_as_typed(folder: Path, tmp_path: Path, caches: dict[str, Path], fork_server: ForkServer):
    problems, *commands = COMMANDS
    run(folder, problems)
    words = [json.loads(line)["word"] for line in (folder / "words.jsonl").read_text().splitlines()]
    assert (folder / "words.jsonl").read_text().startswith(re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)[0])
    assert len(words) == len(set(words)) == 60

    prompt = _assigned(FILES["sentences.py"], "PROMPT")
    config = default.get_config()
    config.update_from_flattened_dict({**POLICY, **SMALL, "train.row_tokens": 0, "base.cache_dir": str(tmp_path)})
    base_policy(read_config(config), Demonstrated(words, prompt), make_mesh(1, 1, 1)).rename(folder / "smollm2")

    flags = " ".join(as_flags(SMALL | {"compilation_cache_dir": caches["compilation_cache_dir"]}))
    train, baseline, evaluate, report, export, plan = commands
    for command, name in ((train, "poly_epo"), (baseline, "grpo")):
        run_module(fork_server, folder, f"{command} {flags}")
        rows = read_rows(folder / "runs" / name / GENERATIONS)
        _check_clusters(rows)
        (before, after) = rows_of(folder / "runs" / name, "eval/largest_cluster")
        assert 1 / 16 <= min(before["eval/largest_cluster"], after["eval/largest_cluster"]) <= 1
    run(folder, f"{train.replace('sentences', 'two_rewards')} {flags}")  # imports sentences.py from this folder
    _check_rewards(folder / "runs" / "poly_epo-two-rewards")
    output = run_module(fork_server, folder, f"{evaluate} {flags}".replace("=64", "=8"))
    assert "largest" in output
    for model in ("base", "grpo", "poly_epo"):
        results = json.loads((folder / "runs/evaluation/sentences" / model / "results.json").read_text())
        assert 1 / 8 <= results["metrics"]["largest_cluster"]["mean"] <= 1
    run_module(fork_server, folder, report)
    assert (folder / "runs/report/report.html").stat().st_size > 50_000
    run_module(fork_server, folder, export)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (folder / "policy").iterdir()
    }
    (line,) = re.findall(r"^# (Plan: .*)$", PAGE, re.MULTILINE)
    assert line in " ".join(run(folder, plan).split())


def _assigned(source: str, name: str) -> str:
    """Returns the string that a file assigns to a name."""
    (value,) = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name
    ]
    return ast.literal_eval(value)


def _check_clusters(rows: list[dict]) -> None:
    """Checks that the responses to a prompt have the same cluster if and only if their first words are equal."""
    clusters: dict[tuple, dict[str, int]] = {}
    for row in rows:
        if found := re.findall("[a-z]+", row["response"].lower()):
            known = clusters.setdefault((row["step"], row["problem"]), {})
            assert known.setdefault(found[0], row["cluster"]) == row["cluster"]
    assert all(len(set(known.values())) == len(known) for known in clusters.values())


def _check_rewards(run: Path) -> None:
    """Checks the weighted mean of the two rewards of each response, and their logged means."""
    rows = read_rows(run / GENERATIONS)
    assert rows
    for row in rows:
        parts = {"contains_word": float(row["problem"] in re.findall("[a-z]+", row["response"].lower()))}
        parts["brevity"] = 1 - min(len(row["response"]), 100) / 100
        assert row["rewards"] == pytest.approx(parts)
        assert row["reward"] == pytest.approx((parts["contains_word"] + 0.25 * parts["brevity"]) / 1.25)
        assert row["correct"] == (parts["contains_word"] == 1)
    last = rows_of(run)[-1]
    for name in ("contains_word", "brevity"):
        found = [row["rewards"][name] for row in rows if row["step"] == last["step"]]
        assert last[f"rewards/{name}"] == pytest.approx(np.mean(found))


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        (" The river is far away.", 1),
        (" We saw the Dog near a river.", 1),
        (" The rivers are far away.", 0),
        (" The river is far away", 0),
        (" The river is far. We swim.", 0),
        (" the river is far away.", 0),
        (" The river.", 0),
        (" The river, the river, the river is.", 0),
        ("", 0),
    ],
)
def test_the_reward(text: str, reward: float, monkeypatch: pytest.MonkeyPatch):
    for registry in ("poly_epo_jax.tasks.TASKS", "poly_epo_jax.judges.JUDGES"):
        monkeypatch.setattr(registry, {})
    monkeypatch.setattr("poly_epo_jax.metrics.evaluation.EVALUATION_METRICS", {})
    module = ModuleType("sentences")
    exec(FILES["sentences.py"], module.__dict__)
    task = object.__new__(module.SentencesTask)
    assert task.reward(Problem("river", "", "river"), response(text)) == reward
    ids = np.array([[0, 0, 0, 1], [0, 1, 2, 100]])
    np.testing.assert_allclose(module.largest_cluster(ids), [0.75, 0.25])
