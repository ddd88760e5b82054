"""Options are accepted by their registry entry, or rejected with a one-line message."""

from collections.abc import Sequence
from typing import Annotated, Any

import pytest

from poly_epo_jax.config.checks import ConfigError
from poly_epo_jax.config.options import Entry, check_options
from poly_epo_jax.registry import Range


def judge(task: Any, section: Any, *, attempts: int = 3, share: float = 0.5, rubric: str = "", strict: bool = False):
    pass


def needy(path: str, limit: int = 3):
    pass


def anything(task: Any, section: Any, **options: Any):
    pass


def ranged(
    task: Any,
    *,
    times: Annotated[int, Range(1, 10)] = 3,
    digits: tuple[int, int] = (1, 2),
    files: str | Sequence[str] = "",
):
    pass


def nothing(task: Any, section: Any):
    pass


@pytest.mark.parametrize(
    ("factory", "num_given", "options"),
    [
        (judge, 2, {}),
        (judge, 2, {"attempts": 1, "share": 1, "rubric": "mine.md", "strict": True}),
        (needy, 0, {"path": "x"}),
        (anything, 2, {"whatever": [1]}),
        (nothing, 2, {}),
        (ranged, 1, {"times": 10, "digits": [1, 3], "files": ("a", "b")}),
        (ranged, 1, {"files": "a"}),
    ],
)
def test_valid_options_are_accepted(factory: Any, num_given: int, options: dict[str, Any]):
    check_options("judge.options", Entry("mine", factory, num_given), options)
    factory(*[None] * num_given, **options)


@pytest.mark.parametrize(
    ("factory", "num_given", "options", "words"),
    [
        (
            judge,
            2,
            {"atempts": 1},
            ["judge.options has 'atempts'", "mine", "did you mean attempts?", " attempts, rubric, share, strict."],
        ),
        (judge, 2, {"task": 1}, ["judge.options has 'task'", "mine", " attempts, rubric, "]),
        (nothing, 2, {"attempts": 1}, ["judge.options has 'attempts'", "mine", " none."]),
        (judge, 2, {"attempts": "3"}, ["judge.options.attempts='3' ", "whole number."]),
        (judge, 2, {"attempts": True}, ["judge.options.attempts=True ", "whole number."]),
        (judge, 2, {"share": "half"}, ["judge.options.share='half' ", "finite number."]),
        (judge, 2, {"rubric": 3}, ["judge.options.rubric=3 ", "string"]),
        (judge, 2, {"strict": 1}, ["judge.options.strict=1 ", "True or False."]),
        (judge, 2, {"share": float("inf")}, ["judge.options.share=inf ", "finite number."]),
        (anything, 2, {"whatever": [{1: 2}]}, ["judge.options.whatever=[{1: 2}] ", "strings, finite numbers, "]),
        (anything, 2, {"whatever": float("nan")}, ["judge.options.whatever=nan ", "strings, finite numbers, "]),
        (anything, 2, {"whatever": b"x"}, ["judge.options.whatever=b'x' ", "strings, finite numbers, "]),
        (ranged, 1, {"times": 11}, ["judge.options.times=11 ", "between 1 and 10."]),
        (ranged, 1, {"times": "3"}, ["judge.options.times='3' ", "whole number."]),
        (ranged, 1, {"digits": 3}, ["judge.options.digits=3 ", "list of 2: a whole number, a whole number."]),
        (ranged, 1, {"digits": (1, True)}, ["judge.options.digits=(1, True) ", "list of 2: a whole number, "]),
        (ranged, 1, {"files": [3]}, ["judge.options.files=[3] ", "a string without control characters or a list, "]),
        (needy, 0, {"limit": 1}, ["judge.options lacks 'path'", "mine", "judge.options.path"]),
    ],
)
def test_invalid_options_are_rejected(factory: Any, num_given: int, options: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        check_options("judge.options", Entry("mine", factory, num_given), options)
    message = str(error.value)
    assert message.startswith(words[0]) and all(word in message for word in words), message


def bounded(tokens: Any, *, clip_low: float, reach: Annotated[float, Range(0, 1)] = 0.5):
    pass


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reach": 5}, "algo.loss_options.reach=5 must lie between 0 and 1"),
        ({"clip_low": 0.1}, "set algo.clip_low instead"),
        ({"clip_high": 0.1}, "set algo.clip_high instead"),
    ],
)
def test_given_parameters_are_not_options(options: dict[str, Any], words: str):
    entry = Entry("mine", bounded, num_given=1, given=("clip_low", "clip_high"))
    check_options("algo.loss_options", entry, {"reach": 0.1})
    with pytest.raises(ConfigError, match=words):
        check_options("algo.loss_options", entry, options)
