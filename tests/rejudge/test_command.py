"""Tests of the command poly-epo rejudge: inputs, judges, resumption, cluster sheets and the page."""

import asyncio
import csv
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import until
from fork_server import ForkServer
from reports import HOSTILE

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.keys import Config
from poly_epo_jax.rejudge.__main__ import main
from poly_epo_jax.rejudge.inputs import RecordedTask, read_inputs, with_answers
from poly_epo_jax.rejudge.judges import CLUSTERINGS, judge_configs
from poly_epo_jax.rejudge.results import RESULTS
from poly_epo_jax.rejudge.sheets import SHEET, read_sheet
from poly_epo_jax.tasks import PolynomialTask
from poly_epo_jax.types import Problem, Task


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_file(path: Path, num_problems: int, num_responses: int = 8) -> Path:
    """Writes a file of problems with random words as responses."""
    rng = np.random.default_rng(0)
    words = ["sum", "sums", "product", "induction", "=cases", HOSTILE]
    texts = [[words[index] for index in row] for row in rng.integers(0, len(words), (num_problems, num_responses))]
    rewards = rng.integers(0, 2, (num_problems, num_responses)).tolist()
    rows = [
        {"problem": f"Prove {i}.", "responses": responses, "rewards": given}
        for i, (responses, given) in enumerate(zip(texts, rewards, strict=True))
    ]
    return write_lines(path, rows)


def generation(problem: Problem, index: int, response: str, step: int, cluster: int | None) -> dict[str, Any]:
    texts = {"problem": problem.id, "prompt": problem.prompt, "response": response, "rationale": None}
    return texts | {"generation": index, "reward": 1, "correct": True, "cluster": cluster, "step": step}


def write_run(folder: Path, task: PolynomialTask, clusters: Sequence[int | None]) -> Path:
    """Writes a run that logged six responses to the same problem at two steps."""
    problem, texts = (
        task.train_problems[0],
        ("(x=0,y=1)", "(x=0,y=1)", "(x=1,y=2)", "nonsense", "nonsense", "(x=1,y=2)"),
    )
    rows = [
        generation(problem, index, texts[index], step, clusters[index])
        for step in (3, 10)
        for index in reversed(range(6))
    ]
    write_lines(folder / "generations.jsonl", rows)
    return folder


def test_a_run_is_judged_again_with_the_task_of_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run", PolynomialTask(), [5, 5, 6, 100, 100, 6])
    judges = ("--judge=exact", "--judge=letters=ngrams:options.length=1,options.threshold=0.5")
    output = tmp_path / "out"
    assert main([str(run), "--config=polynomial", *judges, f"--output={output}", "--num_seeds=1"]) == 0
    results = json.loads((output / RESULTS).read_bytes())
    assert results["num_problems"] == 2 == results["num_shared"] and results["method"] == "Poly-EPO"
    by_pair = {(pair["first"], pair["second"]): pair for pair in results["pairs"]}
    assert list(by_pair) == [("exact", "letters"), ("exact", "recorded"), ("letters", "recorded")]
    equal = by_pair["exact", "recorded"]["adjusted_rand_index"]
    assert equal["low"] < equal["mean"] == 1 and equal["high"] == pytest.approx(
        1
    )  # few equal values do not show that all are equal
    assert by_pair["exact", "recorded"]["sign_changes"]["mean"] == 0
    assert by_pair["exact", "letters"]["adjusted_rand_index"]["mean"] < 1
    exact, letters = (results["judges"][label] for label in ("exact", "letters"))
    assert exact["degenerate"]["mean"] == pytest.approx(1 / 3) and exact["clusters"]["mean"] == 2
    assert exact["order_sensitivity"]["mean"] == 0 and exact["seed_agreement"] is None
    assert letters["judge"] == {"name": "ngrams", "model": "", "options": {"length": 1, "threshold": 0.5}}
    printed = capsys.readouterr().out
    assert "exact, recorded" in printed and f"report: {output / 'report.html'}" in printed
    assert "sensitivity to order" in printed and "agreement between seeds" not in printed  # a single seed

    again = [str(run), "--config=polynomial", *judges, f"--output={output}", "--num_seeds=1", "--reference=recorded"]
    assert main(again) == 0
    pairs = json.loads((output / RESULTS).read_bytes())["pairs"]
    assert pairs == [by_pair["exact", "recorded"], by_pair["letters", "recorded"]]


def test_a_corrected_sheet_is_kept_and_compared(tmp_path: Path):
    source, output = write_file(tmp_path / "words.jsonl", 4), tmp_path / "out"
    arguments = [str(source), "--config=polynomial", "--judge=ngrams", f"--output={output}"]
    assert main(arguments) == 0
    sheet = output / "ngrams" / SHEET
    with sheet.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file)
    assert len(rows) == 32 and all(not cell.startswith("=") for row in rows for cell in row)
    judged = json.loads((output / "ngrams" / CLUSTERINGS).read_text().splitlines()[0])["clusters"]
    groups = read_inputs([str(source)])
    assert read_sheet(sheet, groups)["row 1"].tolist() == judged  # both are numbered by first appearance

    cluster = header.index("cluster")
    for row in rows[:8]:
        row[cluster] = "100" if row[cluster] == "0" else "a proof by cases"
    rows[8][cluster] = ""  # the second problem is incomplete
    with sheet.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    assert main([*arguments, f"--reference={sheet}"]) == 0
    reference = read_sheet(sheet, groups)
    assert list(reference) == ["row 1", "row 3", "row 4"]
    assert reference["row 1"].tolist() == [100 if label == 0 else 0 for label in judged]
    (pair,) = json.loads((output / RESULTS).read_bytes())["pairs"]
    assert (pair["first"], pair["second"], pair["num_problems"]) == ("ngrams", "reference", 3)
    assert 0 < pair["adjusted_rand_index"]["mean"] < 1

    page = (output / "report.html").read_text()
    assert "ngrams and reference" in page and "<script>alert" not in page

    with sheet.open("a", newline="") as file:
        csv.writer(file).writerow(rows[9])
    with pytest.raises(ValueError, match="two rows for response 2 to 'row 2'"):
        read_sheet(sheet, groups)


@pytest.mark.slow
def test_a_killed_command_resumes_with_the_same_results(tmp_path: Path, fork_server: ForkServer):
    source, log = write_file(tmp_path / "words.jsonl", 200), tmp_path / "log.txt"
    judges = ["--judge=ngrams", "--judge=letters=ngrams:options.length=1,options.threshold=0.6"]
    arguments = [
        str(source),
        "--config=polynomial",
        *judges,
        "--config.judge.max_concurrent=1",
        "--num_seeds=1",
        "--num_orders=1",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fork_server.run("poly_epo_jax.rejudge", [*arguments, f"--output={whole}"]).returncode == 0

    written = killed / "letters" / CLUSTERINGS

    def has_rows() -> bool:
        return written.exists() and written.read_bytes().count(b"\n") > 5

    process = fork_server.start("poly_epo_jax.rejudge", [*arguments, f"--output={killed}"], log)
    asyncio.run(until(has_rows))
    os.kill(process, signal.SIGKILL)
    fork_server.wait()
    num_rows = written.read_bytes().count(b"\n")
    assert num_rows < 200 and not (killed / RESULTS).exists()
    assert fork_server.run("poly_epo_jax.rejudge", [*arguments, f"--output={killed}"]).returncode == 0
    for name in (RESULTS, f"ngrams/{CLUSTERINGS}", f"letters/{CLUSTERINGS}", f"letters/{SHEET}"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert (killed / "letters" / "timing.jsonl").read_bytes().count(b"\n") >= 200


def test_problems_are_spread_over_all_inputs(tmp_path: Path):
    first, second = write_file(tmp_path / "a.jsonl", 5), write_run(tmp_path / "run", PolynomialTask(), [None] * 6)
    names = [group.name for group in read_inputs([str(first), str(second)])]
    assert len(names) == 7 == len({*names}) and names[0] == f"{first}: row 1" and "step 10, " in names[-1]
    assert [group.name for group in read_inputs([str(first), str(second)], 3)] == [names[0], names[3], names[6]]
    assert read_inputs([str(second)])[0].responses[:3] == ("(x=0,y=1)", "(x=0,y=1)", "(x=1,y=2)")
    assert read_inputs([str(second)])[0].clusters is None


GOOD = {"problem": "1 + 1", "responses": ["2", "3"], "rewards": [1, 0]}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([GOOD, {"problem": "1 + 1", "responses": ["2", "3"]}], "row 2 must have the columns problem"),
        ([GOOD | {"rewards": [1]}], "a number in rewards, for each response"),
        ([GOOD | {"responses": ["2", 3]}], "a text in responses"),
        ([GOOD | {"rewards": [1, 2]}], "numbers from 0 to 1"),
        ([GOOD | {"rewards": [True, 0]}], "numbers from 0 to 1"),
        ([GOOD | {"responses": ["2"], "rewards": [1]}], "a single response to 'row 1'"),
        ([GOOD | {"id": "a"}, GOOD | {"id": "a"}], "'a' twice"),
    ],
)
def test_invalid_files_are_rejected(tmp_path: Path, rows: list[dict[str, Any]], words: str):
    with pytest.raises(ValueError, match=words):
        read_inputs([str(write_lines(tmp_path / "rows.jsonl", rows))])


def test_a_folder_without_generations_is_rejected(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"generations\.jsonl"):
        read_inputs([str(tmp_path)])


def test_problems_without_an_answer_are_looked_up_in_the_task(tmp_path: Path):
    task: Task = PolynomialTask()
    groups = read_inputs([str(write_run(tmp_path / "run", PolynomialTask(), [None] * 6))])
    assert groups[0].problem.answer == "" and with_answers(groups, task)[0].problem == task.train_problems[0]
    with pytest.raises(ConfigError, match="does not contain the problem"):
        with_answers(groups, RecordedTask([]))
    answered = read_inputs([str(write_lines(tmp_path / "rows.jsonl", [GOOD | {"answer": 2}]))])
    assert with_answers(answered, RecordedTask([]))[0].problem == Problem("row 1", "1 + 1", "2")


def test_judges_inherit_the_keys_of_the_configuration():
    config = Config()
    assert {label: one.judge for label, one in judge_configs(config, []).items()} == {"exact": config.judge}
    text = "a=llm:url=http://127.0.0.1:1/v1beta,model=a,b,options.temperature=0,options.max_tokens=9"
    judge = judge_configs(config, [text])["a"].judge
    assert (judge.name, judge.url, judge.model) == ("llm", "http://127.0.0.1:1/v1beta", "a,b")
    assert judge.options == {"temperature": 0, "max_tokens": 9} and judge.wait_seconds == config.judge.wait_seconds
    ngrams = judge_configs(config, ["ngrams:options.length=2"])["ngrams"]
    assert judge_configs(ngrams, ["ngrams:options.threshold=0.5"])["ngrams"].judge.options == {
        "length": 2,
        "threshold": 0.5,
    }
    assert judge_configs(ngrams, ["exact"])["exact"].judge.options == {}


@pytest.mark.parametrize(
    ("judges", "words"),
    [
        (["nothing"], r"judge\.name"),
        (["none"], "does not cluster"),
        (["exact", "exact"], "duplicate"),
        (["recorded=exact"], "reserved"),
        (["a/b=exact"], "folder name"),
        ([""], "must have the form"),
        (["llm"], r"judge\.url"),
        (["ngrams:options.size=3"], "has 'size', which ngrams does not accept"),
        (["ngrams:length=3"], r"judge\.length"),
        (["ngrams:options.length"], "has no value"),
    ],
)
def test_invalid_judges_are_rejected(judges: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        judge_configs(Config(), judges)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "The input is missing"),
        (["rows.jsonl", "--num_seeds=0"], "--num_seeds=0"),
        (["rows.jsonl", "--judge=llm:url=http://user:secret@host"], "--judge contains a user or password"),
        (["rows.jsonl", "--config.algo.set_size=8"], r"algo.set_size=8 requires 9 responses"),
        (["rows.jsonl", "--reference=rows.jsonl"], "must have the columns problem, response and cluster"),
        (["rows.jsonl", "--reference=exact"], "--reference=exact is neither"),
        (["rows.jsonl", "--reference=recorded"], "--reference=recorded is neither"),
    ],
)
def test_invalid_arguments_produce_a_one_line_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
):
    write_file(tmp_path / "rows.jsonl", 3)
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--config=polynomial", "--judge=ngrams", f"--output={tmp_path}"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("Error: ") and words in printed and len(printed.splitlines()) == 1
    assert "secret" not in printed


def test_other_responses_are_not_mixed_with_earlier_clusterings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, arguments = (
        tmp_path / "rows.jsonl",
        ["--config=polynomial", "--judge=ngrams", f"--output={tmp_path / 'out'}"],
    )
    assert main([str(write_file(source, 2)), *arguments]) == 0
    assert main([str(write_file(source, 3)), *arguments]) == 1
    assert "different values of problems" in capsys.readouterr().err
