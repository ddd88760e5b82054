"""Tests of audits of judges with known faults, their resumption, and runs whose auditor sleeps or is dead."""

import asyncio
import errno
import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fakes import PATIENCE, ByLetter, LetterJudge
from tiny_training import tiny_config, tiny_update, train_tiny

from poly_epo_jax.audit import background
from poly_epo_jax.audit.__main__ import main
from poly_epo_jax.audit.auditor import Auditor, missing_audits
from poly_epo_jax.audit.background import BackgroundAudit, check_inflation
from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.judges import JUDGES, JudgeEntry
from poly_epo_jax.metrics.judge_audit import summarize
from poly_epo_jax.records.run_folder import AUDIT, AUDITED, CONFIG, GENERATIONS, METRICS
from poly_epo_jax.rollouts.grading import JudgeError
from poly_epo_jax.rollouts.joined_judge import JoinedJudge
from poly_epo_jax.startup.command_line import read_arguments
from poly_epo_jax.startup.read_config import training_judge
from poly_epo_jax.system import http_client
from poly_epo_jax.system.json_files import append_rows, read_rows
from poly_epo_jax.system.signals import Stopped, StopSignal
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.train import _exit
from poly_epo_jax.types import Clustering, Group, JudgeFailure

TASK: Any = TASKS["polynomial_prose"](num_train=8, num_held_out=1)
WORDINGS = ("We get ({},{}).", "Let us take ({},{}).", "Note that ({},{}) is a point.")


def strategies(group: Group) -> list[int]:
    """Returns ids of the points of the responses."""
    points = [TASK.strategy(group.problem, generation) for generation in group.generations]
    return [points.index(point) for point in points]


class Perfect:
    def __init__(self, *_: Any):
        pass

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return Clustering(np.array(strategies(group), np.int32))


class Announced(Perfect):
    """Assigns responses that announce another method to another cluster."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        is_announced = ["different approach" in generation.text for generation in group.generations]
        return Clustering(np.array(strategies(group), np.int32) + 50 * np.array(is_announced))


class Padded(Perfect):
    """Assigns responses of different lengths to different clusters."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        lengths = [len(generation.text) for generation in group.generations]
        return Clustering(np.array([lengths.index(length) for length in lengths], np.int32))


class Positional(Perfect):
    """Joins the first half of the responses, regardless of their texts."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        count = len(group.generations)
        return Clustering((np.arange(count) >= count // 2).astype(np.int32))


class Seeded(Perfect):
    """Joins all responses with seed 0, and separates them with other seeds."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        seed = int(group.generations[0].weight_versions[0])
        return Clustering(np.arange(len(group.generations), dtype=np.int32) * min(seed, 1))


class Dead(Perfect):
    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return JudgeFailure("unreachable", "no server")


class Asleep(Perfect):
    """Waits until the test ends, without giving up its thread."""

    is_over = threading.Event()

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        self.is_over.wait()
        return JudgeFailure("unreachable", "woken")


class Raises(Perfect):
    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        raise RuntimeError("a bug")


class Letters(Perfect):
    """Clusters the responses of the tiny policy, which are letters."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        texts = [generation.text for generation in group.generations]
        return Clustering(np.array([texts.index(text) for text in texts], np.int32))


FAULTY = (Letters, Perfect, Announced, Padded, Positional, Seeded, Dead, Asleep, Raises)


@pytest.fixture(autouse=True)
def judges() -> Iterator[None]:
    for kind in FAULTY:
        JUDGES[kind.__name__] = JudgeEntry(kind, "a test")
    Asleep.is_over.clear()
    yield
    Asleep.is_over.set()
    for kind in FAULTY:
        del JUDGES[kind.__name__]


def config_of(judge: str, auditor: str = "Perfect", **changes: Any) -> Config:
    own = {"judge.name": judge, "audit.judge.name": auditor, "audit.every": 2, "log.generations_every": 1}
    return tiny_config(**own | {"task.name": "polynomial_prose"} | changes)


def write_run(folder: Path, steps: Sequence[int] = (1, 2, 3, 4, 5), clusters: type = Perfect) -> Path:
    """Writes a run that logged six responses, with two points in three wordings, to each of eight problems."""
    folder.mkdir()
    for step in steps:
        for problem in TASK.train_problems:
            texts = [wording.format(x, x + 1) for x in (1, 2) for wording in WORDINGS]
            rows = [
                {"step": step, "problem": problem.id, "prompt": problem.prompt, "generation": number, "response": text}
                | {"reward": 1.0, "correct": True, "cluster": 3 * (clusters is not Perfect) + number // 3}
                | {"rationale": None, "occurrence": 0, "advantage": 0.0}
                for number, text in enumerate(texts)
            ]
            append_rows(folder / GENERATIONS, rows)
    return folder


def audited(folder: Path, config: Config) -> dict[str, Any]:
    """Audits all steps of a run that lack results, and returns the summary of all rows."""
    auditor = Auditor(config, TASK)
    for step, groups in missing_audits(folder, auditor, config.audit.every, 5):
        append_rows(folder / AUDIT, asyncio.run(auditor.audit(step, groups)))
    return summarize(read_rows(folder / AUDIT, AUDITED), config.algo.set_size)


UPDATE = tiny_update(tiny_config(**{"train.num_steps": 4}))
"""Update that all runs share."""
RATES = ("repetition", "order", "paraphrase", "announcement", "padding")


@pytest.mark.parametrize(
    ("judge", "wrong"),
    [
        ("Perfect", ()),
        ("Announced", ("announcement",)),
        ("Padded", ("repetition", "order", "paraphrase", "announcement", "padding")),
        ("Positional", ("order",)),
        ("Seeded", ("repetition", "order")),
    ],
)
def test_each_probe_finds_the_fault_of_a_judge(judge: str, wrong: Sequence[str], tmp_path: Path):
    found = audited(write_run(tmp_path / "run"), config_of(judge))
    rates = {name: found[name]["mean"] for name in RATES}
    copies = ("paraphrase", "announcement", "padding") if judge == "Positional" else ()
    # The clusters of Positional in a request with a copy depend on the place of the copy.
    assert {name for name, rate in rates.items() if rate} - {*copies} == {*wrong}
    assert found["inflation"]["mean"] == 1 == found["adjusted_rand_index"]["mean"]  # of the recorded clusters
    assert found["order"]["num_problems"] == 3 * 8  # steps 2, 4 and 5


def test_a_copy_in_other_words_is_created_for_each_prompt(tmp_path: Path):
    found = audited(write_run(tmp_path / "run"), config_of("Padded"))
    assert found["paraphrase"]["mean"] == found["announcement"]["mean"] == found["padding"]["mean"] == 1


def test_inflation_compares_the_recorded_clusters_with_those_of_the_auditor(tmp_path: Path):
    found = audited(write_run(tmp_path / "run"), config_of("Perfect", "Padded"))
    assert found["auditor_clusters"]["mean"] == 3 and found["inflation"]["mean"] == pytest.approx(2 / 3)
    assert found["auditor_objective"]["mean"] > found["objective"]["mean"]


def test_failures_are_rows_and_requests_without_a_reply_are_repeated(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=(2,))
    assert audited(run, config_of("Perfect", "Dead"))["inflation"] is None
    rows = [*read_rows(run / AUDIT, AUDITED)]
    assert [row["failures"] for row in rows] == [{"auditor": "unreachable: no server"}] * 8
    assert audited(run, config_of("Perfect"))["inflation"]["mean"] == 1
    assert len([*read_rows(run / AUDIT, AUDITED)]) == 8  # the failed rows are replaced
    assert not [*missing_audits(run, Auditor(config_of("Perfect"), TASK), 2, 5)]


def test_a_second_model_writes_the_paraphrases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reply: dict[str, Any] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "writer"}]})
        body = json.loads(request.content)
        text = body["messages"][-1]["content"].replace(*reply["changes"])
        assert body["model"] == "writer" and request.headers["authorization"] == "Bearer secret"
        message = {"role": "assistant", "content": f"<think>so</think>{text} That is all."}
        return httpx.Response(reply["status"], json={"choices": [{"finish_reason": reply["end"], "message": message}]})

    monkeypatch.setattr(http_client, "open_transport", lambda proxy: httpx.MockTransport(answer))
    monkeypatch.setenv("WRITER_KEY", "secret")
    keys: Any = {"audit.paraphrase.url": "http://localhost:9", "audit.paraphrase.api_key_env": "WRITER_KEY"}
    found = {}
    for name, changes, end, status in (
        ("reworded", (".", " holds."), "stop", 200),
        ("moved", ("(", "(3, 4), ("), "stop", 200),
        ("another answer", (")", "0)"), "stop", 200),
        ("cut off", (".", "."), "length", 200),
        ("secret", (".", "."), "stop", 500),
    ):
        reply |= {"changes": changes, "end": end, "status": status}
        run = write_run(tmp_path / name, steps=(2,))
        rate = audited(run, config_of("Padded", **keys))["paraphrase"]
        failures = {row["failures"].get("paraphrase", "") for row in read_rows(run / AUDIT, AUDITED)}
        found[name] = (rate and (rate["mean"], rate["num_problems"]), {one.partition(":")[0] for one in failures})
        assert "secret" not in "".join(failures)
    assert found == {
        "reworded": ((1.0, 8), {""}),
        "moved": ((1.0, 8), {""}),  # the last point is the answer
        "another answer": (None, {""}),  # not a copy, because its answer differs
        "cut off": (None, {"truncated"}),
        "secret": (None, {"unavailable"}),
    }
    auditor = Auditor(config_of("Perfect", **keys), TASK)
    assert len(next(missing_audits(run, auditor, 2, 5))[1]) == 8  # the failed requests are repeated
    assert "and 8 requests to audit.paraphrase.url (0.00" in auditor.cost(8)
    assert "paraphrase.url" not in Auditor(config_of("Perfect"), TASK).cost(8)


def test_an_exception_of_a_judge_is_a_failure(tmp_path: Path):
    run = write_run(tmp_path / "run", steps=(2,))
    audited(run, config_of("Raises"))
    assert all(row["failures"]["order"] == "raised: RuntimeError: a bug" for row in read_rows(run / AUDIT, AUDITED))
    assert not [*missing_audits(run, Auditor(config_of("Raises"), TASK), 2, 5)]  # a bug is not repeated


def test_the_sample_is_the_same_in_each_command(tmp_path: Path):
    run = write_run(tmp_path / "run")
    config = config_of("Perfect", **dict[str, Any]({"audit.num_prompts": 3}))
    audited(run, config)
    first = [row["group"] for row in read_rows(run / AUDIT, AUDITED)]
    assert len(first) == 9 and not [*missing_audits(run, Auditor(config, TASK), 2, 5)]
    assert len({name.partition(", ")[2] for name in first}) > 3  # steps have different samples


def test_the_command_audits_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_run(tmp_path / "run")
    (run / "lock").write_text("process 1 on localhost (run)")
    flags = ["--config=polynomial", "--config.task.name=polynomial_prose", "--config.audit.judge.name=exact"]
    flags += ["--config.task.options.num_train=8", "--config.task.options.num_held_out=1"]
    assert main([str(run), *flags, "--config.audit.every=10"]) == 0
    printed = capsys.readouterr().out
    assert "40 requests to judge.name='exact' and 8 requests to audit.judge.name='exact'" in printed
    assert len([*read_rows(run / AUDIT, AUDITED)]) == 8
    assert "8 prompts, audited steps: 1" in printed and "inflation" in printed
    assert main([str(run), *flags]) == 1 and "audit.every=0" in capsys.readouterr().err


def test_audits_by_another_judge_are_not_reported_as_those_of_the_requested_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = write_run(tmp_path / "run", steps=(2,))
    (run / "lock").write_text("process 1 on localhost (run)")
    flags = ["--config=polynomial", "--config.task.name=polynomial_prose", "--config.audit.every=10"]
    flags += ["--config.task.options.num_train=8", "--config.task.options.num_held_out=1"]
    loose = ["--config.audit.judge.name=ngrams", "--config.audit.judge.options.threshold=0.3"]
    assert main([str(run), *flags, "--config.audit.judge.name=exact"]) == 0
    before = (run / AUDIT).read_bytes()
    assert main([str(run), *flags, *loose]) == 1
    error = capsys.readouterr().err
    assert "'exact' instead of 'ngrams {\"threshold\": 0.3}'" in error and "rename or delete" in error
    assert (run / AUDIT).read_bytes() == before
    assert main([str(run), *flags, "--config.audit.judge.name=exact"]) == 0
    (run / AUDIT).unlink()
    assert main([str(run), *flags, *loose]) == 0


@pytest.mark.parametrize(
    "flag", ["judge.name=ngrams", "judge.verify=second", "algo.set_size=3", "seed=4", "task.options.num_train=9"]
)
def test_another_configuration_than_that_of_the_run_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
):
    run = write_run(tmp_path / "run", steps=(2,))
    (run / "lock").write_text("process 1 on localhost (run)")
    flags = ["--config=polynomial", "--config.task.name=polynomial_prose", "--config.task.options.num_train=8"]
    flags += ["--config.task.options.num_held_out=1", "--config.audit.judge.name=exact", "--config.audit.every=10"]
    (run / CONFIG).write_text(json.dumps(read_arguments(flags).to_dict()))
    assert main([str(run), *flags, f"--config.{flag}"]) == 1
    assert capsys.readouterr().err.startswith(
        f"Error: {flag.partition('=')[0]} differ from {run / CONFIG}; set --config"
    )
    assert main([str(run), *flags, "--config.judge.max_concurrent=3"]) == 0


def train_audited(folder: Path, auditor: str | None, num_steps: int = 4, **changes: Any) -> list[str]:
    """Trains the tiny policy, with an auditor or without audits, and returns the order of the calls of its judge."""
    judge, stop = Calls(), StopSignal()
    settings = {"train.num_steps": num_steps, "log.generations_every": 1, "eval.every": 0, "workdir": str(folder)}
    audit = None
    if auditor is not None:
        audited = {"judge.name": "Letters", "audit.judge.name": auditor, "audit.every": 2}
        audit = BackgroundAudit(tiny_config(**settings | audited | changes), ByLetter(), stop)
        settings |= {"audit.every": 2}
    try:
        train_tiny(folder, changes=settings, judge=judge, update=UPDATE, audit=audit and audit.submit)
    finally:
        if audit is not None:
            audit.close(0.0 if auditor == "Asleep" else PATIENCE)
    asyncio.run(stop.check())
    return judge.calls


class Calls(LetterJudge):
    """Records the responses of each call."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        self.calls.append(f"{group.problem.id}: {[generation.text for generation in group.generations]}")
        return await super().cluster(group)


@pytest.fixture(scope="module")
def unaudited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    folder = tmp_path_factory.mktemp("unaudited") / "run"
    return folder, train_audited(folder, None)


@pytest.mark.parametrize("auditor", ["Letters", "Dead", "Asleep", "Raises"])
def test_a_run_has_the_same_rows_whatever_the_auditor_does(
    auditor: str, unaudited: tuple[Path, list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    folder, calls = unaudited
    assert train_audited(tmp_path / "run", auditor) == calls
    for name in (METRICS, GENERATIONS):
        assert (tmp_path / "run" / name).read_bytes() == (folder / name).read_bytes()
    rows = [*read_rows(tmp_path / "run" / AUDIT, AUDITED)]
    assert [row["step"] for row in rows] == [2, 2, 2, 4, 4, 4]
    failure = {"Dead": "unreachable", "Asleep": "unfinished", "Raises": "raised"}.get(auditor)
    if failure is None:
        assert not any(row["failures"] for row in rows)
    else:
        reasons = [row["failures"]["audit" if failure == "unfinished" else "auditor"] for row in rows]
        assert all(reason.startswith(failure) for reason in reasons)
        assert "Warning: The audits of 3 of 3 prompts failed" in capsys.readouterr().err


def test_a_resumed_run_repeats_the_audits_that_are_missing(tmp_path: Path):
    train_audited(tmp_path / "run", "Asleep", num_steps=2)
    rows = [*read_rows(tmp_path / "run" / AUDIT, AUDITED)]
    assert [row["step"] for row in rows] == [2, 2, 2] and all(row["failures"] for row in rows)
    train_audited(tmp_path / "run", "Letters", num_steps=4)
    rows = [*read_rows(tmp_path / "run" / AUDIT, AUDITED)]
    assert sorted(row["step"] for row in rows) == [2, 2, 2, 4, 4, 4] and not any(row["failures"] for row in rows)


def test_a_failed_write_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run, writes = write_run(tmp_path / "run", steps=(2, 4)), iter([OSError(errno.ENOSPC, "the disk is full"), None])

    def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
        if error := next(writes):
            raise error
        append_rows(path, rows)

    monkeypatch.setattr(background, "append_rows", append)
    BackgroundAudit(config_of("Perfect", workdir=str(run)), TASK, StopSignal()).close(PATIENCE)
    assert {row["step"] for row in read_rows(run / AUDIT, AUDITED)} == {4}
    printed = capsys.readouterr().err
    assert printed.startswith("Warning: An audit is not recorded: ") and "the disk is full" in printed
    assert printed.count("\n") == 1


class Single(Perfect):
    """Assigns all responses to one cluster."""

    async def cluster(self, group: Group) -> Clustering | JudgeFailure:
        return Clustering(np.zeros(len(group.generations), np.int32))


def test_an_inflation_above_the_limit_stops_the_run(tmp_path: Path):
    JUDGES["Single"] = JudgeEntry(Single, "a test")
    try:
        train_audited(tmp_path / "low", "Single", **dict[str, Any]({"audit.stop_inflation": 5.0}))
        with pytest.raises(Stopped) as stopped:
            train_audited(tmp_path / "high", "Single", **dict[str, Any]({"audit.stop_inflation": 1.01}))
    finally:
        del JUDGES["Single"]
    with pytest.raises(JudgeError, match=r"in step 2, above audit\.stop_inflation=1\.01\. .* Saved after step 3\.$"):
        _exit(pickle.loads(pickle.dumps(stopped.value)), 3)  # processes exchange the exception
    with pytest.raises(SystemExit, match="143"):
        _exit(Stopped(signal.SIGTERM), 3)


def test_a_run_is_not_resumed_while_its_last_audit_exceeds_the_limit(tmp_path: Path):
    """The audits of later steps are not finished."""
    rows = [
        {"step": step, "group": f"{step}, {number}", "clusters": [0, 1], "auditor": auditor}
        | {"rewards": [1.0, 1.0], "probes": {}, "failures": {}}
        for step, auditor in ((2, [0, 1]), (4, [0, 0]), (6, None))
        for number in range(3)
    ]
    append_rows(tmp_path / AUDIT, rows)

    def check(limit: float) -> None:
        check_inflation(config_of("Perfect", workdir=str(tmp_path), **dict[str, Any]({"audit.stop_inflation": limit})))

    check(0.0)
    check(2.5)
    with pytest.raises(
        ConfigError, match=r"2\.000 .* in step 4, above audit\.stop_inflation=1\.5\. .* raise the limit"
    ):
        check(1.5)
    append_rows(tmp_path / AUDIT, [row | {"step": 8} for row in rows if row["step"] == 2])
    check(1.5)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["audit.every=15"], "log.generations_every=10"),
        (["audit.every=10", "judge.name=none", "algo.advantages=grpo"], "judge.name='none'"),
        (["judge.verify=second"], "audit.judge.name"),
        (["audit.stop_inflation=1.5"], "audit.judge.name"),
        (["audit.judge.name=llm"], "audit.judge.url"),
        (["audit.paraphrase.url=localhost"], "audit.paraphrase.url"),
        (["audit.judge.options.error_rat=0.5", "audit.judge.name=exact"], "error_rat"),
    ],
)
def test_invalid_combinations_are_rejected(flags: list[str], named: str):
    with pytest.raises(ConfigError, match=named):
        read_arguments(["--config=polynomial", *(f"--config.{flag}" for flag in flags)])


def test_verified_judges_are_joined():
    flags = ["judge.verify=second", "audit.judge.name=ngrams"]
    config = read_arguments(["--config=polynomial", *(f"--config.{flag}" for flag in flags)])
    assert isinstance(training_judge(config, TASK), JoinedJudge)


def test_a_folder_with_a_pipe_is_rejected_before_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo(tmp_path / GENERATIONS)  # reading it would block
    flags = ["--config=polynomial", "--config.audit.every=10", "--config.log.generations_every=10"]
    assert main([str(tmp_path), *flags]) == 1
    assert f"{tmp_path / GENERATIONS} is a link or a special file" in capsys.readouterr().err
