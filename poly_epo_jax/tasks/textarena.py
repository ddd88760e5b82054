"""Single-player games of the package TextArena, as environments with state."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from poly_epo_jax.config.checks import NOT_EMPTY, SEED, one_of
from poly_epo_jax.registry import Range
from poly_epo_jax.system.daemon_thread import in_daemon_thread
from poly_epo_jax.system.missing_packages import install_command
from poly_epo_jax.tasks.grader import Grader
from poly_epo_jax.tasks.verifier import GradedInWorkers, Outcome as PlayerFailure, Verifier
from poly_epo_jax.types import EpisodeFailure, Generation, Outcome, Problem

WORKER = Path(__file__).with_name("textarena_worker.py")
CPU_SECONDS = 10.0
"""CPU time limit for replaying an episode, in seconds."""

GAMES = (
    *("2048", "Bandit", "Blackjack", "FifteenPuzzle", "FrozenLake", "GuessTheNumber", "LightsOut", "Mastermind"),
    *("Minesweeper", "Sokoban", "Sudoku", "TowerOfHanoi"),
)
"""Games for one player that require neither downloads nor a language model."""

CLUSTERS = {
    "first_move": lambda moves: moves[0],
    "moves": lambda moves: moves,
}
"""Strategies of a nonempty tuple of valid moves, by name of the option `clusters`."""


@dataclasses.dataclass(kw_only=True, eq=False)
class TextArenaTask(GradedInWorkers):
    """A single-player game of TextArena. Each problem is a start of the game, and each response an episode.

    The prompt is a chat message with the first messages of the game, and each reply contains its next messages. A move
    is the text of a turn after the last `</think>`. It should contain the move of the game in square brackets.

    Training and held-out problems have different seeds, which are derived from `seed`. The prompts of problems may be
    equal, if a game hides its state.

    Attributes:
      game: Name of the game, such as `GuessTheNumber-v0` or `Sokoban-v0-medium`. `GAMES` lists the supported games.
      seed: Seed of the starts.
      num_train: Number of training problems.
      num_held_out: Number of held-out problems.
      min_reward: Minimum reward of the game.
      max_reward: Maximum reward of the game. Rewards are rescaled from this range to [0, 1].
      threshold: Minimum rescaled reward of a correct episode.
      raw_score: Whether the reward is the rescaled reward of the game, for example the fraction of the solved part. By
        default, it is 1 for a correct episode and otherwise 0. It is always 0 for a game that did not end, or that an
        invalid move ended.
      clusters: Definition of a strategy: the "first_move" of an episode, or all "moves" in order. Only valid moves
        count.
      num_workers: Number of processes that play or, with `rollouts.environment_workers`, only start the games. 0 starts
        one for every two CPU cores that this process may use, but at least 2.
      train_problems: Training problems.
      held_out_problems: Held-out problems.

    Raises:
      ImportError: If TextArena is not installed.
      ValueError: If the game is not supported or cannot start, or `min_reward` is not smaller than `max_reward`.
    """

    game: Annotated[str, NOT_EMPTY]
    seed: Annotated[int, SEED] = 0
    num_train: Annotated[int, Range(0, 10**6)] = 200
    num_held_out: Annotated[int, Range(0, 10**6)] = 40
    min_reward: float = 0.0
    max_reward: float = 1.0
    threshold: Annotated[float, Range(0.01, 1)] = 1.0
    raw_score: bool = False
    clusters: Annotated[str, one_of(*CLUSTERS)] = "first_move"
    num_workers: Annotated[int, Range(0, 1024)] = 0

    def __post_init__(self):
        if importlib.util.find_spec("textarena") is None:
            raise ImportError(
                f"task.name=textarena requires the package textarena; install it with: {install_command('textarena')}"
            )
        if self.game.partition("-v0")[0] not in GAMES:
            raise ValueError(
                f"task.options.game={self.game!r} is not supported; choose a single-player game that requires neither "
                f"downloads nor a language model: {', '.join(f'{game}-v0' for game in GAMES)}."
            )
        if self.min_reward >= self.max_reward:
            raise ValueError(
                f"task.options.min_reward={self.min_reward:g} must be smaller than max_reward={self.max_reward:g}."
            )
        self._verifier = Verifier(
            self.num_workers, CPU_SECONDS, grader=Grader("textarena", (str(WORKER), self.game), list)
        )
        self._player = self._verifier.call
        seeds = (np.random.SeedSequence(self.seed).generate_state(2) >> 1).tolist()
        with ThreadPoolExecutor(max(2, self.num_workers)) as threads:
            held_out = range(seeds[0], seeds[0] + self.num_held_out)
            train = range(seeds[1], seeds[1] + self.num_train)
            self.held_out_problems: Sequence[Problem] = tuple(threads.map(partial(self._problem, "held_out"), held_out))
            self.train_problems: Sequence[Problem] = tuple(threads.map(partial(self._problem, "train"), train))

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes of a copy in another process, which itself plays the games."""
        return vars(self) | {"_verifier": None, "_player": partial(_play_here, self.game)}

    def start(self, problem: Problem, seed: int) -> "TextArenaEpisode":
        """Starts an episode, whose random numbers after the start of the game are determined by `seed`."""
        return TextArenaEpisode(self, problem.answer, seed)

    def play(self, seed: str, episode_seed: int, moves: Sequence[str]) -> tuple[str, bool, bool, float | None]:
        """Plays a game from its start. Thread-safe.

        Args:
          seed: Seed of the start of the game.
          episode_seed: Seed of the later random numbers of the game.
          moves: All moves.

        Returns:
          The messages of the game after the last move, whether this move was valid, whether the game is over, and the
          reward of the game, or None if the game is not over or an invalid move ended it.

        Raises:
          EpisodeFailure: If the process that plays failed, or the reward is outside the declared range.
        """
        played = self._player(seed, str(episode_seed), json.dumps(moves))
        if isinstance(played, PlayerFailure):
            reason = "it raised an exception at the start" if played is PlayerFailure.WRONG else f"it {played.value}"
            raise EpisodeFailure(f"TextArena failed to play {self.game} with seed {seed}: {reason}.")
        text, valid, over, reward = played
        if reward is not None and not self.min_reward <= reward <= self.max_reward:
            raise EpisodeFailure(
                f"The reward {reward:g} of {self.game} is not between task.options.min_reward={self.min_reward:g} and "
                f"task.options.max_reward={self.max_reward:g}; set the range of the game's rewards."
            )
        return text, valid, over, reward

    def score(self, reward: float | None) -> tuple[float, bool]:
        """Returns the reward of an episode and whether it is correct, for the reward of its game."""
        if reward is None:
            return 0.0, False
        scaled = (reward - self.min_reward) / (self.max_reward - self.min_reward)
        correct = scaled >= self.threshold
        return scaled if self.raw_score else float(correct), correct

    def _problem(self, part: str, seed: int) -> Problem:
        try:
            prompt = self.play(str(seed), 0, ())[0]
        except EpisodeFailure as error:
            raise ValueError(f"{error} Check task.options.game={self.game!r}.") from error
        return Problem(f"{self.game}/{part}/{seed}", prompt, str(seed), chat=True)


def _play_here(game: str, *request: str) -> list[Any]:
    from poly_epo_jax.tasks.textarena_worker import open_grader  # imports TextArena, which only workers do

    return open_grader(game)(*request)


@dataclasses.dataclass(eq=False)
class TextArenaEpisode:
    """An episode of `TextArenaTask`. The game is replayed at every turn, so the episode only stores its moves.

    Attributes:
      task: The task.
      seed: Seed of the start of the game.
      episode_seed: Seed of the later random numbers of the game.
      moves: Moves so far.
      valid_moves: Valid moves so far, see `normalize_move`.
      reward: Reward of the game, or None if it is not over or an invalid move ended it.
    """

    task: TextArenaTask
    seed: str
    episode_seed: int
    moves: list[str] = dataclasses.field(default_factory=list)
    valid_moves: list[str] = dataclasses.field(default_factory=list)
    reward: float | None = None

    async def reply(self, generation: Generation) -> str | None:
        """Returns the next messages of the game, or None if it is over."""
        self.moves.append(generation.turns[-1].rpartition("</think>")[2].strip())
        text, valid, over, self.reward = await in_daemon_thread(
            lambda: self.task.play(self.seed, self.episode_seed, self.moves)
        )
        if valid:
            self.valid_moves.append(normalize_move(self.moves[-1]))
        return None if over else text

    async def close(self) -> Outcome:
        """Returns the outcome of the game."""
        reward, correct = self.task.score(self.reward)
        strategy = CLUSTERS[self.task.clusters](tuple(self.valid_moves)) if self.valid_moves else None
        return Outcome(
            reward,
            strategy,
            correct,
            metrics={"moves": float(len(self.moves)), "invalid_moves": float(len(self.moves) - len(self.valid_moves))},
        )


def normalize_move(move: str) -> str:
    """Returns the text in the first square brackets of a move, or the whole text, in lower case with single spaces."""
    found = re.search(r"\[([^\[\]]*)\]", move)
    return " ".join((found[1] if found else move).lower().split())
