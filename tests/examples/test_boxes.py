"""Tests of examples/boxes.py: its length, episodes and judge. tests/examples/test_extending.py trains with it."""

import asyncio
import dataclasses
import runpy
from pathlib import Path
from typing import Any

import pytest
from responses import response

from poly_epo_jax.judges import JUDGES
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import DEGENERATE_CLUSTER, Clustering, Generation, Group, Interactive, Judge, Outcome

FILE = Path(__file__).parents[2] / "examples" / "boxes.py"


@pytest.fixture
def example() -> Any:
    yield runpy.run_path(str(FILE))
    TASKS.pop("boxes", None)
    JUDGES.pop("boxes", None)


def in_turns(*turns: str) -> Generation:
    return dataclasses.replace(response(""), turns=turns)


def test_the_file_is_short():
    assert len(FILE.read_text().splitlines()) < 120


def test_episodes_and_clusters(example: dict[str, Any]):
    task, judge = example["BoxesTask"](), example["BoxesJudge"]()
    assert isinstance(task, Interactive) and isinstance(judge, Judge)
    assert not {one.prompt for one in task.train_problems} & {one.prompt for one in task.held_out_problems}
    problem = task.train_problems[0]
    first, other = problem.answer

    async def play(box: str, is_repeated: bool = True) -> tuple[Generation, Outcome]:
        episode = task.start(problem, 7)
        reply = await episode.reply(in_turns(box))
        if reply is not None:
            digit = reply[1] if is_repeated else "?"
            assert await episode.reply(in_turns(box, reply, digit)) is None
            return in_turns(box, reply, digit), await episode.close()
        return in_turns(box), await episode.close()

    async def main() -> None:
        wrong = next(box for box in "abcdef" if box not in problem.answer)
        played = [await play(box) for box in (first, other, wrong, "z", "")] + [await play(first, is_repeated=False)]
        assert [outcome.reward for _, outcome in played] == [1, 1, 0, 0, 0, 0]
        assert [outcome.metrics["opened"] for _, outcome in played] == [1, 1, 1, 0, 0, 1]
        prompt_ids = played[0][0].token_ids
        found = await judge.cluster(Group(problem, prompt_ids, tuple(one for one, _ in played)))
        assert isinstance(found, Clustering)
        assert found.ids.tolist() == [0, 1, 2, DEGENERATE_CLUSTER, DEGENERATE_CLUSTER, 0]

    asyncio.run(main())
