"""Tests of evaluations: files, interruption and resumption, and results compared with values computed by hand."""

import asyncio
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import halting
import numpy as np
import pandas
import pytest
from fakes import LETTERS, TINY, ByLetter, LetterJudge, RandomLetters, Scripted, tiny_params, unchecked, until
from fork_server import ForkServer
from halting import HaltPoint
from rich.console import Console
from training_runs import as_flags, environment

from configs import polaris
from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import TaskSection
from poly_epo_jax.evaluate.__main__ import _print_results, _table
from poly_epo_jax.evaluate.benchmarks import BENCHMARKS, Benchmark, about_evaluation, open_benchmark
from poly_epo_jax.evaluate.draw import draw_generations
from poly_epo_jax.evaluate.folder import EVALUATED_GENERATION, GENERATIONS, open_folder, read_generations
from poly_epo_jax.evaluate.results import INTERVALS, compute_results
from poly_epo_jax.judges import NoJudge
from poly_epo_jax.metrics.evaluation import omissions
from poly_epo_jax.model import hf
from poly_epo_jax.rollouts.groups import Rollouts
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.startup.read_config import read_config
from poly_epo_jax.system.http_client import ServerError
from poly_epo_jax.tasks import MultiplicationTask, PolynomialTask
from poly_epo_jax.types import Completion, Generation, HasAnswers, Params, Problem, Request, Sampling, Task

ROOT = Path(__file__).parents[2]
PROBLEMS = [Problem(f"problem {i}", f"{i}:", "a") for i in range(9)]


class VotedLetters(ByLetter):
    """Treats letters as answers. b and c are equal answers, and d is a missing answer."""

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        return None if generation.text == "d" else generation.text

    def same_answer(self, problem: Problem, first: str, second: str) -> bool:
        return {first, second} <= {"b", "c"}


class SeededLetters(RandomLetters):
    """Generates letters that depend on the seed. Fails after a given number of groups was written to disk."""

    def __init__(self, groups_before_failure: int = 10**9):
        super().__init__()
        self.left = groups_before_failure
        self.requested: list[str] = []
        self.completed: list[int] = []  # numbers of completed problems

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        for index, request in enumerate(requests):
            if self.left == 0:
                await until(lambda: self.completed[-1] == len(self.requested))
                raise ConnectionError("the server failed")
            self.left -= 1
            self.requested.append(request.problem_id)
            async for completion in super().sample([request], sampling):
                yield dataclasses.replace(completion, request=index)

    async def push_weights(self, params: Params, version: int) -> None:
        raise AssertionError("an evaluation must not push weights")


def draw(folder: Path, sampler: SeededLetters, problems: Sequence[Problem] = PROBLEMS) -> list[int]:
    open_folder(folder, {"sampling": {"seed": 7}})
    benchmark, sampling = Benchmark("letters", VotedLetters(), problems), Sampling(2, seed=7)
    rollouts, show = sampler.rollouts(benchmark.task), sampler.completed.append
    asyncio.run(draw_generations(folder, rollouts, benchmark, LetterJudge(), 4, sampling, show))
    return sampler.completed


def test_an_evaluation_can_be_read_if_reference_answers_are_no_text(tmp_path: Path):
    """A user's task may compare numbers. The rows contain the text of the reference answer."""
    draw(tmp_path, SeededLetters(), [unchecked(Problem, id="p", prompt="1:", answer=7, chat=False, occurrence=0)])
    assert [row["gold"] for row in read_generations(tmp_path)] == ["7"] * 4


def test_interrupted_evaluation_keeps_completed_problems_and_resumes(tmp_path: Path):
    assert draw(tmp_path / "whole", SeededLetters()) == list(range(10))
    with pytest.raises(ConnectionError):
        draw(tmp_path / "broken", SeededLetters(groups_before_failure=4))
    path = tmp_path / "broken" / GENERATIONS
    assert len(list(read_generations(path.parent))) == 16
    content = path.read_text()
    # The state after a crash: a problem with two of its four generations, and a partial line.
    path.write_text(content[: content.rindex("\n", 0, content.rindex("\n", 0, len(content) - 1)) + 30])

    rollouts = SeededLetters()
    assert draw(tmp_path / "broken", rollouts)[0] == 3
    assert len(rollouts.requested) == 6
    assert path.read_bytes() == (tmp_path / "whole" / GENERATIONS).read_bytes()
    assert draw(tmp_path / "broken", SeededLetters(groups_before_failure=0)) == [
        9
    ]  # all problems are complete, so nothing is requested


class Undecided(VotedLetters):
    """Has answers and rewards that raise an exception for one problem each."""

    def answer(self, problem: Problem, generation: Generation) -> str | None:
        return super().answer(problem, generation) if problem.id != "problem 2" else str(1 / 0)

    def reward(self, problem: Problem, generation: Generation) -> float:
        return super().reward(problem, generation) if problem.id != "problem 5" else 1 / 0


class Stopped(SeededLetters):
    """Ends before the request of a problem, after the responses to all others were written."""

    async def sample(self, requests: Sequence[Request], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        (*others, _), count = requests, len(PROBLEMS) - 1
        async for completion in super().sample(others, sampling):
            yield completion
        await until(lambda: self.completed[-1] == count)
        raise ServerError("all servers have failed")


def test_an_evaluation_ends_although_problems_fail(tmp_path: Path):
    def draw_from(sampler: SeededLetters, task: Task, problems: Sequence[Problem] = PROBLEMS) -> dict[str, str]:
        open_folder(tmp_path, {})
        benchmark, sampling = Benchmark("letters", task, problems), Sampling(2, seed=7)
        rollouts, show = sampler.rollouts(task), sampler.completed.append
        return asyncio.run(draw_generations(tmp_path, rollouts, benchmark, NoJudge(), 4, sampling, show))

    failed = draw_from(SeededLetters(), Undecided(), PROBLEMS[:7])
    assert sorted(failed) == ["problem 2", "problem 5"]
    assert "Undecided.answer raised ZeroDivisionError for problem 'problem 2'" in failed["problem 2"]
    assert "Undecided.reward raised ZeroDivisionError for problem 'problem 5'" in failed["problem 5"]
    assert draw_from(Stopped(), VotedLetters()) == {"problem 8": "all servers have failed"}
    assert compute_results(tmp_path)["num_problems"] == 8
    last = SeededLetters()
    assert not draw_from(last, VotedLetters()) and last.requested == ["problem 8"]


def test_folder_with_another_description_is_rejected(tmp_path: Path):
    draw(tmp_path, SeededLetters())
    with pytest.raises(ValueError, match=r"values of model, sampling\.seed; .* choose another --output"):
        open_folder(tmp_path, {"sampling": {"seed": 8}, "model": "another"})


def test_generations_of_unselected_problems_are_kept(tmp_path: Path):
    draw(tmp_path, SeededLetters(), PROBLEMS[:4])
    before = (tmp_path / GENERATIONS).read_bytes()
    with pytest.raises(ValueError, match="generations of 3 problems"):
        draw(tmp_path, SeededLetters(), PROBLEMS[:1])
    assert (tmp_path / GENERATIONS).read_bytes() == before
    assert draw(tmp_path, SeededLetters())[0] == 4  # new problems are added


def test_description_contains_all_settings_that_affect_the_results():
    def about(**changes: Any) -> dict[str, Any]:
        values = polaris.get_config()
        values.update_from_flattened_dict(changes)
        return about_evaluation(read_config(values), "math_500", "a step", 8, True, {"weights": "1"})

    same = {"judge.url": "http://elsewhere", "task.options.num_workers": 3, "train.num_steps": 9}
    for key, value in same.items():
        assert about(**{key: value}) == about(), key
    other = {
        "task.options.template": "{problem}?",
        "model.stop_strings": ("!",),
        "sampling.temperature": 0.5,
        "seed": 9,
        "judge.name": "answer",
        "judge.model": "another",
        "judge.options.prompt_file": "rubric.md",
    }
    for key, value in other.items():
        assert about(**{key: value}) != about(), key
    assert json.loads(json.dumps(about())) == about()


def test_rows_have_every_column(tmp_path: Path):
    draw(tmp_path, SeededLetters(), PROBLEMS[:3])
    rows = list(read_generations(tmp_path))
    assert all(row.keys() == EVALUATED_GENERATION.keys() for row in rows)
    assert [(row["problem"], row["generation"]) for row in rows] == [(p.id, i) for p in PROBLEMS[:3] for i in range(4)]
    for row in rows:
        letter = row["response"]
        assert row["token_ids"] == [2 + LETTERS.index(letter), 1]
        assert (row["prompt"], row["gold"], row["finish_reason"]) == (f"{row['problem'][-1]}:", "a", "stop")
        assert (row["reward"], row["cluster"]) == (float(letter == "a"), LETTERS.index(letter))
        assert row["correct"] is (letter == "a")
        assert (row["answer"] == -1) == (row["answer_text"] is None) == (letter == "d")
    for problem in PROBLEMS[:3]:
        of_problem = [row for row in rows if row["problem"] == problem.id]
        votes = {row["answer_text"]: row["answer"] for row in of_problem if row["answer_text"]}
        assert len(set(votes.values())) == len({text.replace("c", "b") for text in votes})


def test_equal_answers_with_different_rewards_are_different_votes(tmp_path: Path):
    """Both derivations end in 140, but the first one does not decompose 28."""
    ways = "5*(20+9)=100+40=140", "5*(20+8)=100+40=140"
    task = MultiplicationTask()
    sampler = Scripted(lambda request, index: ways[index // 2], task.alphabet)
    rollouts = Rollouts(sampler, sampler.tokenizer, task, max_prompt_tokens=8)
    benchmark = Benchmark("multiplication", task, [Problem("5*28", "5*28:", "5,28")])
    open_folder(tmp_path, {})
    asyncio.run(draw_generations(tmp_path, rollouts, benchmark, NoJudge(), 4, Sampling(20), lambda count: None))
    rows = [(row["correct"], row["answer"], row["answer_text"]) for row in read_generations(tmp_path)]
    assert rows == [(False, 0, "140")] * 2 + [(True, 1, "140")] * 2
    metrics = compute_results(tmp_path)["metrics"]
    assert (metrics["majority_accuracy@4"]["mean"], metrics["majority_vote_share@4"]["mean"]) == (0.5, 0.5)


def test_answers_that_a_task_considers_equal_are_different_votes_if_only_one_is_correct(tmp_path: Path):
    task = VotedLetters()  # b and c are equal answers
    sampler = Scripted(lambda request, index: "bcbc"[index], LETTERS + "1:")
    rollouts = Rollouts(sampler, sampler.tokenizer, task, max_prompt_tokens=8)
    benchmark = Benchmark("letters", task, [Problem("p", "1:", "c")])
    open_folder(tmp_path, {})
    asyncio.run(draw_generations(tmp_path, rollouts, benchmark, NoJudge(), 4, Sampling(2), lambda count: None))
    rows = [(row["answer_text"], row["correct"], row["answer"]) for row in read_generations(tmp_path)]
    assert rows == [("b", False, 0), ("c", True, 1)] * 2


def write(folder: Path, rows: Sequence[tuple[str, str, int | None]]) -> Path:
    """Writes generations.jsonl from tuples (problem, letter, cluster). The environment failed if the letter is "!"."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / GENERATIONS).open("w") as file:
        for number, (problem, letter, cluster) in enumerate(rows):
            row = {"problem": problem, "prompt": "x", "gold": "a", "generation": number, "response": letter}
            row |= {"reward": float(letter == "a"), "correct": letter == "a", "cluster": cluster, "rationale": None}
            row |= {"answer": {"a": 0, "b": 1, "c": 1}.get(letter, -1), "answer_text": letter}
            row |= {"token_ids": [LETTERS.find(letter), 9], "finish_reason": "stop"}
            row |= {"reward": None, "correct": None, "failure": "raised", "reason": "."} if letter == "!" else {}
            file.write(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pandas_recomputes_pass_at_k(tmp_path: Path, k: int):
    letters = {"easy": "aaab", "hard": "bcda", "failed": "a!bc"}
    rows = [(problem, letter, None) for problem, text in letters.items() for letter in text]
    found = compute_results(write(tmp_path, rows))
    page = (Path(__file__).parents[2] / "docs" / "how_to" / "evaluate.md").read_text()
    (block,) = re.findall(r"```python\n(rows = .*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"pandas": pandas, "math": math, "k": k}
    exec(re.sub(r'"runs/.*?"', repr(str(tmp_path / GENERATIONS)), block), names)
    assert names["pass_at_k"] == pytest.approx(found["metrics"][f"pass@{k}"]["mean"], abs=1e-12)


def test_results_by_hand(tmp_path: Path):
    easy = [("easy", letter, cluster) for letter, cluster in zip("aaab", (1, 1, 2, 100), strict=True)]
    hard = [("hard", letter, cluster) for letter, cluster in zip("bcda", (1, 2, 3, 1), strict=True)]
    found = compute_results(write(tmp_path, easy + hard))
    mean = {name: metric["mean"] for name, metric in found["metrics"].items()}
    assert mean["pass@1"] == (3 / 4 + 1 / 4) / 2
    assert mean["pass@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert mean["pass@4"] == mean["solved"] == 1
    assert mean["majority_accuracy@4"] == 1 / 2  # the majority is a in easy, and b or c in hard
    assert mean["majority_vote_share@4"] == (3 / 4 + 2 / 4) / 2
    assert mean["correct_clusters@4"] == (2 + 1) / 2
    assert mean["incorrect_clusters@4"] == (0 + 3) / 2  # cluster 100 is not counted
    assert found["branching"]["mean"] == [(2 + 4) / 2, (2 + 4) / 2]
    assert found["per_problem"] == [
        {"problem": "easy", "num_correct": 3, "num_generations": 4},
        {"problem": "hard", "num_correct": 1, "num_generations": 4},
    ]
    assert all(metric["low"] <= metric["mean"] <= metric["high"] for metric in found["metrics"].values())


def test_results_by_hand_with_failed_generations(tmp_path: Path):
    """Metrics at k are means over the problems with at least k other generations, if most problems have as many."""
    rows = [
        (problem, letter, 1)
        for problem, letters in (("easy", "aa!b"), ("hard", "bcda"), ("one", "!!!a"), ("none", "!!!!"))
        for letter in letters
    ]
    found = compute_results(write(tmp_path, rows))
    mean = {name: metric["mean"] for name, metric in found["metrics"].items()}
    assert mean["pass@1"] == pytest.approx((2 / 3 + 1 / 4 + 1) / 3) and mean["solved"] == 1
    assert mean["pass@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert mean["pass@3"] == pytest.approx((1 + 3 / 4) / 2)
    assert not {"pass@4", "majority_accuracy@4", "correct_clusters@4"} & mean.keys()  # only one problem has four
    assert mean["correct_clusters@2"] == pytest.approx((1 + 1 / 2) / 2)
    assert (found["num_problems"], found["num_generations"], found["num_failed"]) == (3, 4, 8)
    assert [(row["num_correct"], row["num_generations"]) for row in found["per_problem"]] == [(2, 3), (1, 4), (1, 1)]
    assert "8 responses are omitted" in omissions([found])


def test_fractions_of_0_and_1_have_wide_intervals(tmp_path: Path):
    """Clopper-Pearson for 20 of 20 problems is [0.832, 1]. Other metrics keep the bootstrap, which has zero width."""
    rows = [(f"p{i}", letter, 1) for i in range(20) for letter in "aa"]
    metrics = compute_results(write(tmp_path, rows))["metrics"]
    for name in ("pass@1", "pass@2", "solved", "majority_accuracy@2", "majority_vote_share@2"):
        assert metrics[name] == {"mean": 1.0, "low": pytest.approx(0.832, abs=0.01), "high": pytest.approx(1.0)}, name
    assert metrics["correct_clusters@2"] == pytest.approx({"mean": 1.0, "low": 1.0, "high": 1.0})


def test_tables_fit_80_columns_and_name_the_intervals(tmp_path: Path):
    rows = [(f"p{i}", letter, 1) for i in range(5) for letter in "ab" * 32]
    found = [
        {"benchmark": "hmmt_nov_2025", "model": model} | compute_results(write(tmp_path / model, rows))
        for model in ("base", "grpo-trained")
    ]
    with (console := Console(width=80)).capture() as capture:
        console.print(_table(found, 64))
    lines = capture.get().splitlines()
    assert "hmmt_nov_2025: 5 problems, 64 generations each" in lines[0]
    widest = next(line for line in lines if "majority@64 vote share" in line)
    cells = [cell.strip() for cell in widest.strip("│").split("│")]
    assert cells[:2] == ["majority@64 vote share", "base"] and re.fullmatch(r"0\.500 \[0\.\d{3}, 0\.\d{3}\]", cells[2])
    assert "mean [95% interval]" in capture.get()
    assert sum("grpo-trained" in line for line in lines) == 8 and "…" not in capture.get()
    assert found[0]["intervals"] == INTERVALS


def test_names_of_models_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    results = compute_results(write(tmp_path, [("p", "a", 1)] * 2))
    found = [{"benchmark": "a", "model": model} | results for model in ("run[lr3]", "x[/y]")]
    _print_results(found, 2, tmp_path)
    out = capsys.readouterr().out
    assert "run[lr3]" in out and "x[/y]" in out


def test_problems_without_clustering_are_excluded_from_cluster_metrics(tmp_path: Path):
    rows = [(problem, "a", cluster) for problem, cluster in (("p", None), ("q", 1)) for _ in range(2)]
    found = compute_results(write(tmp_path, rows))
    assert (found["num_problems"], found["num_clustered"]) == (2, 1)
    assert found["metrics"]["correct_clusters@2"] == {"mean": 1.0, "low": None, "high": None}
    none = compute_results(write(tmp_path / "none", [("p", "a", None), ("q", "b", None)]))
    assert not [name for name in none["metrics"] if "clusters" in name]


def test_results_do_not_depend_on_the_order_of_generations(tmp_path: Path):
    rng = np.random.default_rng(0)
    rows = [(f"p{i}", str(rng.choice(list(LETTERS))), int(rng.integers(3))) for i in range(6) for _ in range(8)]
    in_order = compute_results(write(tmp_path / "a", rows))
    problems = [rows[8 * i : 8 * i + 8] for i in range(6)]
    shuffled = [row for problem in problems for row in [problem[j] for j in rng.permutation(8)]]
    again = compute_results(write(tmp_path / "b", shuffled))
    for name, metric in in_order["metrics"].items():
        tolerance = 0.05 if name.startswith("majority") else 1e-9  # majority metrics use random subsets
        assert again["metrics"][name]["mean"] == pytest.approx(metric["mean"], abs=tolerance), name
    assert again["branching"] == in_order["branching"]


def test_error_names_the_corrupted_line(tmp_path: Path):
    write(tmp_path, [("p", "a", 1)])
    (tmp_path / GENERATIONS).write_text((tmp_path / GENERATIONS).read_text() + "nonsense\n")
    with pytest.raises(ValueError, match="line 2"):
        compute_results(tmp_path)


def test_benchmarks_by_name_task_and_file(tmp_path: Path):
    section, papers = TaskSection(), read_config(polaris.get_config()).task
    synthetic = open_benchmark("polynomial", section)
    assert isinstance(synthetic.task, HasAnswers)
    assert (synthetic.label, synthetic.problems) == ("polynomial", PolynomialTask().held_out_problems)
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"problem": "1+1?", "answer": "so #### 2"}) + "\n")
    assert open_benchmark(str(file), papers).label == "mine"
    mine = open_benchmark(f"other={file}", papers)
    assert mine.label == "other"
    assert "1+1?" in mine.problems[0].prompt
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl"):
        open_benchmark("missing.jsonl", section)
    # Names that are not similar to a benchmark are not looked up on the Hugging Face Hub either.
    for name, hint in (("polynomail", r"did you mean polynomial\?"), ("another", "")):
        with pytest.raises(ConfigError, match=rf"'{name}' is not a benchmark.*{hint}.* takes .*aime_2025.*polynomial"):
            open_benchmark(f"mine={name}", section)
    assert {"beyond_aime", "aime_2025", "aime_2026", "hmmt_feb_2025", "hmmt_nov_2025", "minerva"} <= BENCHMARKS.keys()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    hf.save_pretrained(folder, tiny_params(), TINY, dtype="float32", eos_token_id=1)
    build_character_tokenizer(PolynomialTask.alphabet).save_pretrained(folder)
    return folder


def flags(model: Path, output: Path, config: str | Path = "configs/polynomial.py") -> list[str]:
    settings = {"mesh.fsdp": 1, "rollouts.max_concurrent": 32, "sampling.max_tokens": 20}
    about = [f"--config={config}", f"--models=tiny={model}", "--benchmarks=polynomial", "--max_problems=6"]
    return [*about, "--num_generations=8", f"--output={output}", *as_flags(settings)]


@pytest.mark.slow
def test_resumed_evaluation_has_the_same_results(fork_server: ForkServer, model: Path, tmp_path: Path):
    halt = HaltPoint(tmp_path / "halted", "problems 2")
    assert fork_server.run("poly_epo_jax.evaluate", flags(model, tmp_path / "whole")).returncode == 0
    halted = [sys.executable, "-m", "poly_epo_jax.evaluate", *flags(model, tmp_path / "killed", halting.FILE)]
    killed = subprocess.Popen(halted, cwd=ROOT, env=environment() | halt.variables)
    try:
        halt.wait(killed)
    finally:
        killed.kill()
        killed.wait()
    path = tmp_path / "killed" / "polynomial" / "tiny" / GENERATIONS
    assert len(path.read_text().splitlines()) == 2 * 8
    assert fork_server.run("poly_epo_jax.evaluate", flags(model, tmp_path / "killed")).returncode == 0
    for name in (GENERATIONS, "results.json"):
        whole = tmp_path / "whole" / "polynomial" / "tiny" / name
        assert path.with_name(name).read_bytes() == whole.read_bytes()


OWN_TASK = """
from pathlib import Path

from configs import polynomial
from poly_epo_jax.tasks import TASKS, PolynomialTask

class Broken(PolynomialTask):
    def reward(self, problem, generation):
        if problem == self.held_out_problems[1] and not Path(__file__).with_name("repaired").exists():
            raise ArithmeticError("not repaired")
        return super().reward(problem, generation)

TASKS["broken"] = Broken

def get_config(method="poly_epo"):
    config = polynomial.get_config(method)
    config.task.name = "broken"
    return config
"""


@pytest.mark.slow
def test_problems_that_fail_are_listed_and_generated_again(fork_server: ForkServer, model: Path, tmp_path: Path):
    config, output = tmp_path / "own.py", tmp_path / "out"
    config.write_text(OWN_TASK)
    arguments = [*flags(model, output, config), "--benchmarks=broken", "--max_problems=3"]
    ended, folder = fork_server.run("poly_epo_jax.evaluate", arguments), output / "broken" / "tiny"
    results = json.loads((folder / "results.json").read_text())
    ((problem, reason),) = results["failed"].items()
    assert ended.returncode == 3 and "Broken.reward raised ArithmeticError" in reason and results["num_problems"] == 2
    assert f"{problem} failed: {reason}\n1 problems failed." in ended.stderr
    config.with_name("repaired").touch()
    assert fork_server.run("poly_epo_jax.evaluate", arguments).returncode == 0
    results = json.loads((folder / "results.json").read_text())
    assert (results["num_problems"], results["failed"]) == (3, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models="], ["--models"]),
        (["--benchmarks=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--benchmarks=aime24", "--models=/no/such/model"], ["aime24", "aime_2025"]),
        (["--models=/no/such/model"], ["/no/such/model"]),
        (["--config.sampling.correlated=True"], ["sampling.correlated=True", "independent"]),
        (["--models=http://127.0.0.1:9"], ["http://127.0.0.1:9"]),
    ],
    ids=lambda value: value[0].removeprefix("--"),
)
def test_invalid_arguments_produce_a_one_line_error(
    fork_server: ForkServer, model: Path, tmp_path: Path, arguments: list[str], words: list[str]
):
    ended = fork_server.run("poly_epo_jax.evaluate", [*flags(model, tmp_path / "out"), *arguments])
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: ") and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert all(word in ended.stderr for word in words), ended.stderr
