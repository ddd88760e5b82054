"""The cache of base policies is keyed by the demonstrations, so that it follows changes of a task's code."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import ByLetter
from jax.sharding import Mesh
from tiny_training import tiny_config

from poly_epo_jax.config.keys import BaseSection, Config, TaskSection
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.startup import base_policy
from poly_epo_jax.startup.base_policy import base_policy_folder, build_character_tokenizer
from poly_epo_jax.tasks import DemonstrationStyle, PolynomialTask
from poly_epo_jax.types import Problem, Task


def folder(task: Task, section: TaskSection | None = None, **base: Any) -> Path:
    return base_policy_folder(BaseSection(**base), section or TaskSection(), task)


class Shouting(PolynomialTask):
    """Edited demonstrations: the same draws, and other text for one problem in fifty."""

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        text = super().demonstration(problem, rng, style)
        edited = {one.prompt for one in self.train_problems[::50]}
        return text[::-1] if problem.prompt in edited else text


class Careless(PolynomialTask):
    """Edited mistakes: demonstrations without mistakes are unchanged."""

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> str:
        return super().demonstration(problem, rng, dataclasses.replace(style, error_rate=2 * style.error_rate))


class Lettered(PolynomialTask):
    alphabet = PolynomialTask.alphabet + "#"


class Prompted(PolynomialTask):
    """Edited prompts: demonstrations are unchanged."""

    def problem(self, item: Any) -> Problem:
        problem = super().problem(item)
        return dataclasses.replace(problem, prompt=f"{problem.prompt}:")


class InTurns(PolynomialTask):
    """The same text in turns, of which the second is a reply, which is not trained on."""

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> Any:
        return tuple(super().demonstration(problem, rng, style))


@pytest.mark.parametrize("edited", [Shouting, Careless, Lettered, Prompted, InTurns])
def test_edited_demonstrations_have_another_folder(edited: type[PolynomialTask]):
    assert folder(PolynomialTask()) == folder(PolynomialTask()) != folder(edited()) == folder(edited())


def test_the_folder_depends_on_the_sections_except_the_cache_directory():
    task, first = PolynomialTask(), folder(PolynomialTask())
    assert first.name != folder(task, seed=1).name != folder(task, skew=0.5).name != first.name
    assert folder(task, TaskSection(options={"seed": 1})).name != first.name
    assert folder(task, cache_dir="/elsewhere") == Path("/elsewhere") / first.name
    assert first.parent == Path("runs/base") and first.name.startswith("polynomial-")


def test_a_task_without_demonstrations_has_no_base_policy():
    with pytest.raises(ValueError, match=r"ByLetter does not provide demonstrations .* set model\.path"):
        folder(ByLetter())


class Accented(PolynomialTask):
    """A prompt that no demonstration of the first thousands is drawn for."""

    def __init__(self):
        super().__init__()
        last = dataclasses.replace(self.held_out_problems[-1], prompt="\u00e9\ud83d?")
        self.held_out_problems = [*self.held_out_problems[:-1], last]
        self.demonstrated_problems = self.train_problems


class Emphatic(InTurns):
    """A character in a reply of some demonstrations."""

    def demonstration(self, problem: Problem, rng: np.random.Generator, style: DemonstrationStyle) -> Any:
        first, *others = super().demonstration(problem, rng, style)
        return (first, f"{problem.prompt}!" if problem is self.train_problems[7] else problem.prompt, *others)


@pytest.mark.parametrize(("task", "characters"), [(Accented, r"'\?', 'é', '\\ud83d'"), (Emphatic, "'!'")])
def test_an_alphabet_without_a_character_of_the_texts_is_refused(task: type[PolynomialTask], characters: str):
    with pytest.raises(ValueError, match=rf"^{task.__name__}\.alphabet lacks {characters}, which prompts"):
        folder(task())


def test_a_character_that_only_later_demonstrations_contain_is_named():
    tokenizer = build_character_tokenizer("abc")
    with pytest.raises(ValueError, match="cannot encode '!'"):
        base_policy._sequences(tokenizer, [Problem("p", "a", "")], [("b", "!", "c")])


def test_a_base_policy_is_fitted_again_after_its_demonstrations_were_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config, mesh, fitted = tiny_config(**{"base.cache_dir": str(tmp_path)}), make_mesh(1, 1, 1), []

    def fit(config: Config, task: Task, mesh: Mesh, folder: Path) -> None:
        folder.mkdir()
        fitted.append(type(task))

    monkeypatch.setattr(base_policy, "_make", fit)
    first, second = (base_policy.base_policy(config, task, mesh) for task in (PolynomialTask(), Shouting()))
    assert base_policy.base_policy(config, PolynomialTask(), mesh) == first != second
    assert fitted == [PolynomialTask, Shouting]
