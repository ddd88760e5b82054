"""Tests of the task textarena: games, replays, rewards, strategies, error messages, and short training runs."""

import asyncio
import dataclasses
import importlib.util
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import TINY, tiny_params
from responses import response
from sglang_servers import SGLangServer, require_sglang, running
from training_runs import SETTINGS, as_flags, rows_of

from poly_epo_jax import main
from poly_epo_jax.model import hf
from poly_epo_jax.model.transformer import abstract_model
from poly_epo_jax.startup.base_policy import build_character_tokenizer
from poly_epo_jax.tasks import TextArenaTask
from poly_epo_jax.tasks.textarena import CLUSTERS, GAMES, TextArenaEpisode, normalize_move
from poly_epo_jax.types import EpisodeFailure, Interactive, Outcome, Strategic

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("textarena") is None and not os.environ.get("POLY_EPO_REQUIRE_TEXTARENA"),
    reason="requires the extra textarena, which `launch/test.sh all` installs",
)

DIRECTIONS = ("up", "down", "left", "right")
MOVES = {
    "GuessTheNumber-v0": lambda rng: f"[{rng.randint(1, 20)}]",
    "Mastermind-v0": lambda rng: f"[{' '.join(map(str, rng.sample(range(1, 7), 4)))}]",
    "FrozenLake-v0": lambda rng: f"I go [{rng.choice(DIRECTIONS)}].",
    "Sokoban-v0": lambda rng: f"<think>[up]?</think>[{rng.choice(DIRECTIONS)}]",
}
"""Random moves of the tested games."""


@pytest.fixture(scope="module", params=MOVES)
def task(request: pytest.FixtureRequest) -> Iterator[TextArenaTask]:
    task = TextArenaTask(game=request.param, num_train=3, num_held_out=2, num_workers=1, raw_score=True)
    yield task
    task.close()


async def play(task: TextArenaTask, problem: int, seed: int, moves: Sequence[str]) -> tuple[list[str | None], Outcome]:
    """Returns the replies to moves, up to the end of the game, and the outcome. Waits between moves."""
    episode, replies = task.start(task.train_problems[problem], seed), []
    for move in moves:
        replies.append(await episode.reply(dataclasses.replace(response(""), turns=("ignored", "reply", move))))
        await asyncio.sleep(0.002 * random.random())
        if replies[-1] is None:
            break
    return replies, await episode.close()


def reference(game: str, seed: int, moves: Sequence[str]) -> tuple[list[str], dict[int, float] | None]:
    """Plays a game with the package itself. Returns the observations and the rewards."""
    import textarena  # pyright: ignore[reportMissingImports]

    state = random.getstate()
    env = textarena.make(env_id=game)
    env.reset(num_players=1, seed=seed)
    seen = [env.get_observation()[1]]
    for move in moves:
        done, _ = env.step(move.rpartition("</think>")[2])
        if done:
            break
        seen.append(env.get_observation()[1])
    random.setstate(state)
    return seen, env.close()[0]


@needs_package
@pytest.mark.slow
def test_concurrent_episodes_equal_the_games_of_the_package(task: TextArenaTask):
    assert isinstance(task, Interactive) and not isinstance(task, Strategic)
    assert len({problem.id for problem in task.train_problems}) == 3
    rng, draw = random.Random(0), MOVES[task.game]
    episodes = [(i % 3, i, [draw(rng) for _ in range(rng.randint(1, 12))]) for i in range(12)]

    async def play_all() -> Any:
        return await asyncio.gather(*(play(task, *episode) for episode in episodes))

    together = asyncio.run(play_all())
    for (problem, seed, moves), (replies, outcome) in zip(episodes, together, strict=True):
        assert asyncio.run(play(task, problem, seed + 1, moves)) == (replies, outcome), (
            "these games draw only at the start"
        )
        seen, rewards = reference(task.game, int(task.train_problems[problem].answer), moves)
        assert " ".join(task.train_problems[problem].prompt.split()) in " ".join(seen[0].replace("[GAME] ", "").split())
        for reply, observation in zip(replies, seen[1:], strict=False):
            assert reply is not None
            # The observation of the package repeats all previous messages, with names of their senders.
            assert " ".join(reply.splitlines()[-1].split()) in " ".join(observation.split())
        assert (replies[-1] is None) == (rewards is not None)
        assert 0 <= outcome.reward <= 1 and outcome.correct == (outcome.reward == 1)
        assert outcome.metrics["moves"] == len(replies)
        if rewards and outcome.metrics["invalid_moves"] < 2:
            assert outcome.reward == rewards[0]


@needs_package
@pytest.mark.slow
def test_a_game_that_an_invalid_move_ends_has_the_reward_0(task: TextArenaTask):
    move = MOVES[task.game](random.Random(1))
    replies, outcome = asyncio.run(play(task, 0, 0, [move, "nonsense", "nonsense", move]))
    assert replies[-1] is None and outcome.reward == 0 and outcome.correct is False
    assert outcome.metrics["invalid_moves"] >= 2
    huge = asyncio.run(play(task, 0, 0, [f"[{'9' * 5000}]"] * 2))[1]
    assert (huge.reward, huge.strategy, huge.correct) == (0, None, False)
    unfinished = asyncio.run(play(task, 0, 0, []))[1]
    assert unfinished == Outcome(0.0, None, False, {"moves": 0.0, "invalid_moves": 0.0})


@needs_package
@pytest.mark.slow
def test_guess_the_number_is_won_and_scored():
    task = TextArenaTask(game="GuessTheNumber-v0", num_train=2, num_held_out=1, num_workers=1, clusters="moves")
    outcomes = {n: asyncio.run(play(task, 0, 0, [f"My guess: [{n}]"]))[1] for n in range(1, 21)}
    (number,) = (n for n, outcome in outcomes.items() if outcome.correct)
    assert all(outcome.strategy == (str(n),) for n, outcome in outcomes.items())
    assert [outcomes[n].reward for n in (number, number % 20 + 1)] == [1.0, 0.0]
    other = number % 20 + 1
    assert asyncio.run(play(task, 0, 0, [f"[{other}]", f"[{number}]"]))[1].strategy == (str(other), str(number))
    task.max_reward = 0.5
    with pytest.raises(EpisodeFailure, match=r"reward 1 .*max_reward=0.5"):
        asyncio.run(play(task, 0, 0, [f"[{number}]"]))
    task.max_reward = 4.0
    assert asyncio.run(play(task, 0, 0, [f"[{number}]"]))[1].reward == 0
    task.raw_score = True
    assert asyncio.run(play(task, 0, 0, [f"[{number}]"]))[1].reward == 0.25
    task.close()


@needs_package
@pytest.mark.slow
def test_random_numbers_during_a_game_depend_on_the_seed_of_the_episode():
    task = TextArenaTask(game="Blackjack-v0", num_train=1, num_held_out=1, num_workers=2)
    moves = ["[stand]"] * 4
    first, again, other = (asyncio.run(play(task, 0, seed, moves))[0] for seed in (0, 0, 1))
    assert first == again != other
    task.close()


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("game", ["Chess-v0", "Wordle-v0", "GuessTheNumber"])
def test_games_that_cannot_be_played_are_rejected(game: str):
    with pytest.raises(ValueError, match=f"task.options.game='{game}'"):
        TextArenaTask(game=game, num_train=1, num_held_out=0, num_workers=1)


def test_a_missing_package_and_a_wrong_range_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install .*\[textarena\]'"):
        TextArenaTask(game="Sokoban-v0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match="min_reward=1 must be smaller"):
        TextArenaTask(game="Sokoban-v0", min_reward=1.0)


def test_moves_are_normalized():
    assert [normalize_move(move) for move in ("[Up]", "a [ 1  2 ] b [3]", "Go  LEFT", "[]", "")] == [
        *("up", "1 2", "go left", "", "")
    ]
    assert CLUSTERS["first_move"](("a", "b")) == "a" and CLUSTERS["moves"](("a", "b")) == ("a", "b")
    assert len(set(GAMES)) == 12


def test_the_outcome_of_an_episode():
    task = object.__new__(TextArenaTask)
    task.min_reward, task.max_reward, task.threshold, task.raw_score, task.clusters = (
        -1.0,
        1.0,
        0.75,
        True,
        "first_move",
    )
    for reward, expected in ((None, (0.0, False)), (-1.0, (0.0, False)), (0.5, (0.75, True)), (1.0, (1.0, True))):
        outcome = asyncio.run(TextArenaEpisode(task, "0", 0, ["x", "up"], ["up"], reward).close())
        assert (outcome.reward, outcome.correct, outcome.strategy) == (*expected, "up")
        assert outcome.metrics == {"moves": 2.0, "invalid_moves": 1.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy of characters. Many characters end a turn, so that turns are short."""
    alphabet = "\n√" + "".join(map(chr, range(32, 127)))
    tokenizer = build_character_tokenizer(alphabet)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    config = dataclasses.replace(TINY, vocab_size=len(tokenizer))
    stops = [1, *(tokenizer.get_vocab()[character] for character in "ABCDEFGHIJKLMNOPQRSTUVWXYZ efghijklm")]
    folder = tmp_path_factory.mktemp("policy") / "model"
    params = tiny_params(0, abstract_model(config))
    hf.save_pretrained(folder, params, config, dtype="float32", eos_token_id=stops, tokenizer=tokenizer)
    return folder


def train(folder: Path, policy: Path, game: str, **changes: Any) -> list[dict[str, Any]]:
    """Trains two steps in this process and returns their metrics."""
    options = {"game": game, "num_train": 4, "num_held_out": 2, "num_workers": 1, "raw_score": True}
    settings = SETTINGS | {
        "workdir": folder,
        "model.path": policy,
        "mesh.num_devices": 1,
        "task.name": "textarena",
        "task.options": str(options),
        "sampling.max_tokens": 1024,
        "train.max_prompt_tokens": 1024,
        "train.row_tokens": 2048,
        "train.rows_per_device": 1,
        "train.num_steps": 2,
        "train.prompts_per_batch": 2,
        "train.prompts_per_minibatch": 2,
        "eval.every": 0,
        "log.generations_every": 1,
    }
    assert main.main(["--config=configs/polynomial.py", *as_flags(settings | changes)]) == 0
    return rows_of(folder)


@needs_package
@pytest.mark.slow
def test_training_with_environment_workers_is_the_same(policy: Path, tmp_path: Path, caches: dict[str, Path]):
    runs = [
        train(tmp_path / str(num), policy, "Mastermind-v0", **caches, **{"rollouts.environment_workers": num})
        for num in (0, 2)
    ]
    assert [row["step"] for row in runs[0]] == [1, 2]
    assert max(row["episode/moves"] for row in runs[0]) > 1
    names = [name for name in runs[0][0] if name.startswith(("episode/", "reward", "strategies"))]
    assert {"episode/moves", "episode/invalid_moves"} <= {*names}
    assert [[row[name] for name in names] for row in runs[0]] == [[row[name] for name in names] for row in runs[1]]


@needs_package
@pytest.mark.slow
def test_training_with_an_sglang_server(policy: Path, tmp_path: Path, caches: dict[str, Path]):
    require_sglang()
    server = SGLangServer(policy, tmp_path / "log", "--max-total-tokens", "32768", "--context-length", "2048")
    with running([server]):
        changes = caches | {"rollouts.name": "sglang", "rollouts.urls": server.url, "rollouts.weights_dtype": "float32"}
        rows = train(
            tmp_path / "run", policy, "GuessTheNumber-v0", **changes, **{"rollouts.weights_dir": tmp_path / "w"}
        )
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["mismatch/max"] for row in rows) < 1e-3
