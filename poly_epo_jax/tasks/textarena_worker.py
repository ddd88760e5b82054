"""Plays the games of TextArena. Runs in worker processes, because the games draw from the global random generators.

`worker.py` runs this script in the processes of the task. With `rollouts.environment_workers`, those processes import
it instead. TextArena imports clients of online services.
"""

import copy
import functools
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from textarena.envs.registration import make  # pyright: ignore[reportMissingImports]

MAX_STARTED = 256
"""Maximum number of started games that are kept. Generating a room of Sokoban takes up to a second."""


@functools.cache
def open_grader(game: str) -> Callable[[str, str, str], list[Any]]:
    """Returns a function that plays a game from its start, so that episodes share no state.

    Args:
      game: Name of the game in TextArena.

    Returns:
      A function `(seed, episode_seed, moves)`. `seed` determines the start of the game, `episode_seed` its later random
      numbers, and `moves` is a JSON list. It returns the new messages of the game, whether the last move was valid,
      whether the game is over, and its reward, which is None if the game is not over, if an invalid move ended it or
      if a move raised an exception.
    """
    start = functools.lru_cache(MAX_STARTED)(functools.partial(start_game, game))

    def play(seed: str, episode_seed: str, moves: str) -> list[Any]:
        env, messages = copy.deepcopy(start(int(seed)))
        seed_generators(int(episode_seed))
        valid = True
        for move in json.loads(moves):
            try:
                done, _ = env.step(move)
            except Exception as error:  # for example for a number of 5,000 digits
                return [f"{type(error).__name__}: {error}", False, True, None]
            invalid_end = env.state.game_info[0]["invalid_move"]
            messages, valid = new_messages(env), env.state.error_count == 0 and not invalid_end
            if done:
                return [messages, valid, True, None if invalid_end else float(env.close()[0][0])]
        return [messages, valid, False, None]

    return play


def start_game(game: str, seed: int) -> tuple[Any, str]:
    """Returns a game that has just started, and its first messages."""
    seed_generators(seed)
    env = make(env_id=game)
    env.reset(num_players=1, seed=seed)
    return env, new_messages(env)


def seed_generators(seed: int) -> None:
    """Seeds the generators from which the games draw."""
    random.seed(seed)
    np.random.seed(seed)


def new_messages(env: Any) -> str:
    """Returns the messages of the game since the last call, without the player's moves."""
    return "\n".join(
        text.strip() for _, text, kind in env.state.get_current_player_observation() if kind.name != "PLAYER_ACTION"
    )
