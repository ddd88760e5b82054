"""The page in a real browser: what it draws, what hovering and keys tell, and that it stays by itself."""

import os
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from reports import HOSTILE, write_fake_evaluation
from test_report import write_fake_run

from poly_epo_jax.report import build as report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    evaluation = write_fake_evaluation(folder / "evaluation", {"base": 0.2, "poly_epo": 0.5}, num_tokens=80)
    run = write_fake_run(folder / "a-run", seed=0)
    return report.write_report([evaluation, run], folder / "report")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    program = chromium.find()
    if program is None:
        assert not os.environ.get("POLY_EPO_REQUIRE_CHROMIUM"), "Chromium is not installed."
        pytest.skip("Chromium is not installed; POLY_EPO_REQUIRE_CHROMIUM=1 fails instead.")
    with chromium.open_tab(program, tmp_path_factory.mktemp("profile")) as tab:
        yield tab


@pytest.fixture
def tab(browser: chromium.Tab, page: Path) -> Iterator[chromium.Tab]:
    browser.requests.clear()
    browser.open(page)
    yield browser
    assert browser.complaints == []
    assert set(browser.requests) == {page.as_uri()}


def choose(tab: chromium.Tab, control: str, value: str) -> None:
    event = "input" if control == "search" else "change"
    tab.run(f"document.getElementById('{control}').value = '{value}'")
    tab.run(f"document.getElementById('{control}').dispatchEvent(new Event('{event}'))")


def problems(tab: chromium.Tab) -> list[str]:
    return tab.run("[...document.querySelectorAll('#problems button .text')].map((one) => one.textContent)")


def text(tab: chromium.Tab, selector: str) -> str:
    return tab.run(f"document.querySelector('{selector}').innerText")


def box(tab: chromium.Tab, element: str) -> dict[str, float]:
    return tab.run(f"{element}.getBoundingClientRect().toJSON()")


OVERLAPPING_TEXTS = """[...document.querySelectorAll('figure svg')].flatMap((svg) => {
  const texts = [...svg.querySelectorAll('text')].filter((text) => text.textContent);
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const beside = (a, b) => a.right <= b.left || b.right <= a.left || a.bottom - 3 <= b.top || b.bottom - 3 <= a.top;
  return boxes.filter((a, i) => boxes.some((b, j) => i < j && !beside(a, b)));
}).length"""


def test_all_figures_are_drawn(tab: chromium.Tab):
    titles = tab.run("[...document.querySelectorAll('#figures h2')].map((one) => one.textContent)")
    assert titles == [
        *("pass@k", "Majority voting", "Branching", "Rollout trees"),
        *("Held out, during training", "Training dynamics", "Timeline"),
    ]
    assert tab.run("document.querySelectorAll('figure').length") == 3 * 2 + 2 + 3 + 6 + 2
    assert tab.run("[...document.querySelectorAll('figure.lines')].every((one) => one.querySelector('path.line'))")
    assert tab.run("document.querySelectorAll('figure.tree .leaf-right, figure.tree .leaf-wrong').length") == 16
    assert tab.run(
        "[...document.querySelectorAll('figure.timeline')].map((one) => one.querySelectorAll('.cut').length)"
    ) == [*(0, 3)]
    drawn = tab.run("[...document.querySelectorAll('figure svg')].map((svg) => svg.innerHTML).join()")
    assert not any(word in drawn for word in ("NaN", "undefined", "Infinity"))


def test_hovering_tells_exact_numbers_beside_the_point(tab: chromium.Tab):
    tab.run("document.querySelector('figure').scrollIntoView()")
    dot = box(tab, "document.querySelectorAll('figure .dot')[1]")
    tab.move_mouse(dot["x"] + 4, dot["y"] + 4)
    said = text(tab, "figure .tip")
    assert "base" in said and "pass@2 0." in said and " to " in said
    tip = box(tab, "document.querySelector('figure .tip')")
    assert tip["left"] - 40 < dot["x"] < tip["right"] + 40 and tip["top"] - 40 < dot["y"] < tip["bottom"] + 40
    tab.move_mouse(1, 1)
    assert tab.run("document.querySelector('figure .tip').hidden")


def test_keys_walk_along_a_line_and_to_the_next(tab: chromium.Tab):
    tab.run("document.querySelector('figure svg').focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        tab.press(key)
        said.append(text(tab, "figure .tip").replace("\n", " ").split(" 0.")[0])
    assert said == ["base pass@1", "base pass@2", "poly_epo pass@2", "poly_epo pass@1"]
    tab.press("Escape")
    assert tab.run("document.querySelector('figure .tip').hidden")


def test_a_bar_tells_its_numbers_wherever_it_is_touched(tab: chromium.Tab):
    tab.run("document.querySelector('figure.timeline').scrollIntoView()")
    bar = box(tab, "document.querySelector('figure.timeline .bar')")
    for share in (0.05, 0.5, 0.95):
        tab.move_mouse(bar["x"] + share * bar["width"], bar["y"] + bar["height"] / 2)
        said = text(tab, "figure.timeline .tip").replace("\n", " ")
        assert said == "generate for step 199: 8 s, 44.4% of the step; 2 s of it alone"
        ring = box(tab, "document.querySelector('figure.timeline .here')")
        assert ring["x"] + ring["width"] / 2 == pytest.approx(bar["x"] + share * bar["width"], abs=2)
    tab.run("document.querySelector('figure.timeline svg').focus()")
    tab.press("ArrowDown")
    assert text(tab, "figure.timeline .tip").startswith("grade")


def test_generations_are_chosen_and_filtered(tab: chromium.Tab):
    everything = [f"problem-{number}" for number in range(6)]
    assert problems(tab) == everything
    choose(tab, "filter", "unsolved")
    unsolved = problems(tab)
    choose(tab, "filter", "solved")
    assert unsolved[0] == "problem-0" and sorted(unsolved + problems(tab)) == everything
    choose(tab, "filter", "mixed")
    assert "problem-2" in problems(tab) and not {"problem-0", "problem-1"} & set(problems(tab))
    choose(tab, "filter", "all")
    choose(tab, "search", "X < 4")
    assert problems(tab) == ["problem-4"]
    choose(tab, "search", "nowhere")
    assert problems(tab) == [] and text(tab, "#problem") == "No problem fits."
    choose(tab, "search", "")
    tab.run("document.querySelectorAll('#problems button')[3].click()")
    choose(tab, "model", "poly_epo")
    choose(tab, "part", "minerva")
    assert text(tab, "#problem h3") == "problem-3"
    assert text(tab, "#problems [aria-current=true] .text") == "problem-3"
    assert text(tab, "#left-out").startswith("Here are 6 problems of 6 and 48 generations of 48")


def test_a_problem_shows_its_generations_by_cluster(tab: chromium.Tab):
    choose(tab, "model", "a-run")
    choose(tab, "part", "step 200")
    heads = tab.run("[...document.querySelectorAll('.cluster h4')].map((one) => one.textContent)")
    assert [head.split(" generation")[0] for head in heads] == [
        *("Cluster 3 3", "Cluster 1 2", "Cluster 0 1", "Cluster 2 1", "Degenerate 1"),
    ]
    assert "5 of 8 right, 4 clusters" in text(tab, "#problem")
    assert "reward 1 · advantage +0.071 · generation 4" in text(tab, "#problem")
    tab.run("document.querySelectorAll('#problems button')[1].click()")
    assert "5 of 8 right, not clustered" in text(tab, "#problem")
    assert "advantage" not in text(tab, "#problem")


def test_hostile_text_is_shown_as_text(tab: chromium.Tab):
    choose(tab, "filter", "all")
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    shown = HOSTILE.replace("\x00\x1b", "\\x00\\x1b").replace("\u202e", "\\u202e").replace("\ud800", "?")
    assert shown in text(tab, "#problem")
    assert f"Judge: It tries strategy 0. {shown}" in text(tab, "#problem")
    assert tab.run("document.querySelectorAll('#problem script, #problem img, #problem b').length") == 0
    assert tab.run("document.scripts.length") == 2


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "light"), (390, "dark")])
def test_nothing_is_wider_than_the_screen_or_overlaps(tab: chromium.Tab, page: Path, width: int, scheme: str):
    tab.open(page, width, 844, scheme)
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    assert tab.run(OVERLAPPING_TEXTS) == 0
    background = "rgb(22, 22, 24)" if scheme == "dark" else "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.body).backgroundColor") == background
