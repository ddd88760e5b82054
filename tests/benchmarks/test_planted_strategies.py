"""Tests of benchmarks/planted_strategies.py: the task reads the planted strategies and mistakes from all wordings."""

import sys
from pathlib import Path

import pytest
from responses import response

from poly_epo_jax.rejudge.inputs import read_inputs
from poly_epo_jax.rejudge.sheets import read_sheet
from poly_epo_jax.tasks import MultiplicationProseTask, MultiplicationTask

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_all_wordings_have_the_strategy_and_the_reward_of_the_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(FOLDER))
    import planted_strategies  # pyright: ignore[reportMissingImports]

    planted = []
    worded = planted_strategies.worded
    monkeypatch.setattr(
        planted_strategies, "worded", lambda text, *others: planted.append(text) or worded(text, *others)
    )
    planted_strategies.main(tmp_path)
    sys.modules.pop("planted_strategies")

    task, short = MultiplicationProseTask(), MultiplicationTask(digits=(3, 2))
    groups = read_inputs([str(tmp_path / "responses.jsonl")])
    assert len(groups) == 50
    for number, group in enumerate(groups):
        demonstrations = planted[8 * number : 8 * number + 8]
        strategies = [short.strategy(group.problem, response(text)) for text in demonstrations]
        found = [task.strategy(group.problem, response(text)) for text in group.responses]
        assert None not in found
        pairs = {*zip(strategies, found, strict=True)}
        assert len(pairs) == len({*strategies}) == len({*found})
        assert group.rewards == tuple(short.reward(group.problem, response(text)) for text in demonstrations)
    wordings = read_sheet(tmp_path / "wordings.csv", groups)
    assert {*wordings} == {group.name for group in groups}
    assert {*wordings[groups[0].name].tolist()} <= {0, 1, 2, 3}
