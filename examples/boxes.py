"""Own problems, environment, reward and judge in one file, which trains the tiny policy of the quick start.

    python -m poly_epo_jax.main --config=examples/boxes.py

Six boxes contain digits. The policy opens one of the two boxes that the prompt names, receives its digit, and repeats
it: `bd?` is continued with `d`, the reply `=7`, and `7`. Each opened box is a strategy.
"""

import itertools
import random
from collections.abc import Sequence

from poly_epo_jax.config import default
from poly_epo_jax.judges import JUDGES, JudgeEntry
from poly_epo_jax.judges.exact import clusters_of
from poly_epo_jax.tasks import TASKS
from poly_epo_jax.types import Outcome, Problem

BOXES, DIGITS = tuple("abcdef"), tuple("0123456789")


def make_problems():
    """Returns the problems, which must be the same at every start of a run. They can also be read from a file."""
    pairs = itertools.permutations(BOXES, 2)
    return [Problem(id=f"boxes/{a}{b}", prompt=f"{a}{b}?", answer=a + b) for a, b in pairs]


def reward(problem, opened, digit, repeated):
    """Returns 1 if the policy opened a box that the prompt names and repeated its digit, and 0 otherwise."""
    return float(opened != "" and opened in problem.answer and repeated == digit)


class BoxesEpisode:
    """The environment of one response. Its state are the digits, which depend on the seed, and the policy's actions."""

    def __init__(self, problem, seed):
        self.problem, self.opened, self.repeated = problem, "", ""
        self.digits = dict(zip(BOXES, random.Random(seed).sample(DIGITS, len(BOXES)), strict=True))

    async def reply(self, generation):
        """Returns the digit of a box, or None to end the episode."""
        said = generation.turns[-1]
        if not self.opened and said in self.digits:
            self.opened = said
            return f"={self.digits[said]}"
        self.repeated = said
        return None

    async def close(self):
        """Returns the reward, and metrics, whose means are logged as `episode/NAME`."""
        value = reward(self.problem, self.opened, self.digits.get(self.opened), self.repeated)
        return Outcome(value, metrics={"opened": float(self.opened != "")})


class BoxesTask:
    """The task, which provides problems and environments. Its arguments are set with `task.options`."""

    alphabet = "".join((*BOXES, *DIGITS, "?="))

    def __init__(self, num_held_out: int = 6):
        problems = make_problems()
        random.Random(0).shuffle(problems)
        self.train_problems: Sequence[Problem] = problems[num_held_out:]
        self.held_out_problems: Sequence[Problem] = problems[:num_held_out]

    def start(self, problem, seed):
        return BoxesEpisode(problem, seed)

    def demonstration(self, problem, rng, style):
        """Returns the turns of a response, for the tiny policy. Responses with a mistake open a random box."""
        box = str(rng.choice(BOXES if style.draw_mistake(1.0, rng) else tuple(problem.answer)))
        digit = str(rng.choice(DIGITS))
        return box, f"={digit}", digit


class BoxesJudge:
    """Clusters the responses to a prompt by the box that they open. Responses that open none are degenerate."""

    async def cluster(self, group):
        opened = [generation.turns[0] for generation in group.generations]
        return clusters_of([box if box in BOXES else None for box in opened])


TASKS["boxes"] = BoxesTask
JUDGES["boxes"] = JudgeEntry(lambda task, section: BoxesJudge(), "opened boxes")


def get_config(config_string="poly_epo"):
    """Returns the configuration. `config_string` selects a method and a machine by name, separated by commas."""
    config = default.get_config(config_string)
    config.task.name = config.judge.name = "boxes"
    config.base.clean_steps, config.base.noisy_steps = 300, 200
    config.train.num_steps = 40
    config.train.prompts_per_batch, config.train.prompts_per_minibatch = 16, 8
    config.optimizer.learning_rate = 1e-3
    config.workdir = f"runs/boxes-{default.parse_config_string(config_string)[0]}"
    return config
