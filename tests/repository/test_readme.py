"""Tests that README.md is short, and that its numbers are those of the code and of the documents."""

import contextlib
import io
import itertools
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from poly_epo_jax import set_rl
from poly_epo_jax.config.machines import MESHES
from poly_epo_jax.step.advantages import ADVANTAGES
from poly_epo_jax.tasks import TASKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
METHOD = (ROOT / "docs" / "explanation" / "method.md").read_text()
STRATEGIES, REWARDS = "AAAAABAC", (1, 1, 1, 1, 1, 1, 0, 0)


def count_words(text: str, code: bool = False) -> int:
    """Counts the words that a reader sees, without tables, images and addresses, and without code unless `code`."""
    text = re.sub(r"```\w*\n(.*?)```", r"\1" if code else "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith("|"))


def from_all_sets() -> tuple[list[float], float]:
    """Computes the advantages of the example from its 70 sets, without `set_rl`, and the mean score of the sets."""
    sets = list(itertools.combinations(range(8), 4))
    scores = [sum(REWARDS[i] for i in one) / 4 * len({STRATEGIES[i] for i in one}) / 4 for one in sets]
    mean = sum(scores) / 70
    containing = [[score for one, score in zip(sets, scores, strict=True) if i in one] for i in range(8)]
    assert all(len(own) == 35 for own in containing)
    return [sum(own) / 35 - mean for own in containing], mean


def short(value: float, digits: int = 3, sign: str = "+") -> str:
    """Formats a number as in the documents, without the zero before the decimal point."""
    return f"{value:{sign}.{digits}f}".replace("0.", ".", 1)


def test_the_readme_is_short():
    first_screen, _ = README.split("\n## How it works\n")
    (caption,) = re.findall(r"^\*(?!\*).*?\*$", first_screen, re.MULTILINE | re.DOTALL)
    assert count_words(README) <= 900
    assert count_words(first_screen, code=True) <= 120
    assert len(caption.split()) <= 50


def test_the_advantages_of_the_example():
    advantages, mean = from_all_sets()
    group, clusters = np.array([REWARDS]), np.array([[ord(letter) for letter in STRATEGIES]])
    np.testing.assert_allclose(set_rl.polychromic_advantages(group, clusters, set_size=4), [advantages], atol=1e-7)
    baseline = np.asarray(set_rl.grpo_advantages(group))[0]
    for index, strategy in ((5, "B"), (0, "A"), (6, "A"), (7, "C")):
        own, of_grpo = short(advantages[index]), short(baseline[index], 2)
        assert re.search(rf"\{own}\s+to\s+.*\b{strategy}|\b{strategy}\s+has\s+\{own}", README), f"{strategy}: {own}"
        assert of_grpo in README
        kind = "correct" if REWARDS[index] else "incorrect"
        numbers = f" | {short(mean + advantages[index], sign='')} | {own} | {of_grpo} |"
        assert re.search(rf"^\| {kind}, {strategy}.*{re.escape(numbers)}$", METHOD, re.MULTILINE), numbers
    assert f"all sets is {short(mean, sign='')}" in METHOD
    sums = {letter: sum(a for a, own in zip(advantages, STRATEGIES, strict=True) if own == letter) for letter in "ABC"}
    assert f"A {short(sums['A'])}, B {short(sums['B'])} and C {short(sums['C'])}" in METHOD


@pytest.mark.slow
def test_the_figure_of_the_example():
    (axes,) = runpy.run_path(str(ROOT / "docs" / "images" / "draw_example.py"))["draw"]().axes
    advantages, mean = from_all_sets()
    unit = np.sqrt(np.mean(np.square(advantages)))
    texts = {text.get_text().replace("\u2212", "-") for text in axes.texts}
    assert {f"{advantage / unit:+.1f}" for advantage in advantages} | {"+0.6", "-1.7"} <= texts
    assert f"mean of all 70 sets: {short(mean, sign='')}" in texts
    assert {"1 \u00d7 1/4 = .25", "1 \u00d7 2/4 = .50", ".75 \u00d7 1/4 = .19", ".75 \u00d7 2/4 = .38"} <= texts


def test_the_example_for_other_trainers_prints_its_comment():
    (block,) = re.findall(r"```python\n(import numpy.*?)```", README, re.DOTALL)
    *code, comment = block.splitlines()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec("\n".join(code), {})
    assert f"# {printed.getvalue().strip()}" == comment


def test_the_counts_in_the_readme():
    estimators, objectives, losses = len(ADVANTAGES), len(set_rl.OBJECTIVES), len(set_rl.LOSSES)
    assert f"{estimators} advantage estimators, {objectives} set objectives, {losses} losses" in README
    assert f"mathematics from any dataset, {len(TASKS) - 4} small domains, the datasets of [reasoning-gym]" in README
    assert f"meshes for {len(MESHES)} machines" in README
    methods = (ROOT / "docs" / "reference" / "methods.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", methods, re.MULTILINE)) >= {*ADVANTAGES, *set_rl.LOSSES}


def test_the_counts_of_claims():
    claims = (ROOT / "docs" / "explanation" / "claims.md").read_text()
    counts = re.compile(r"^\| ([a-z ]+) \| (\d+) \|", re.MULTILINE)
    assert counts.findall(README) == counts.findall(claims) != []
