"""Tests of the report page in Chromium: figures, controls, and no external requests."""

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
    assert browser.errors == []
    assert {url for url in browser.requests if not url.startswith("data:image/svg+xml;base64,")} == {page.as_uri()}


def choose(tab: chromium.Tab, control: str, value: str) -> None:
    event = "input" if control == "search" else "change"
    tab.run(f"document.getElementById('{control}').value = '{value}'")
    tab.run(f"document.getElementById('{control}').dispatchEvent(new Event('{event}'))")


def problems(tab: chromium.Tab) -> list[str]:
    return tab.run("[...document.querySelectorAll('#problems button .text')].map((one) => one.textContent)")


def text(tab: chromium.Tab, selector: str) -> str:
    return tab.run(f"document.querySelector('{selector}').innerText")


def test_all_figures_are_drawn(tab: chromium.Tab):
    titles = tab.run("[...document.querySelectorAll('img.figure')].map((one) => one.alt)")
    assert titles == [
        *("pass@k", "Majority voting", "Branching", "Rollout trees"),
        *("Held-out metrics during training", "Held-out pass@k", "Training dynamics", "Timeline"),
    ]
    drawn = "[...document.querySelectorAll('img.figure')].every((one) => one.complete && one.naturalWidth > 300)"
    assert tab.run(drawn)


def test_generations_are_selected_and_filtered(tab: chromium.Tab):
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
    assert problems(tab) == [] and text(tab, "#problem") == "No matching problems."
    choose(tab, "search", "")
    tab.run("document.querySelectorAll('#problems button')[3].click()")
    choose(tab, "model", "poly_epo")
    choose(tab, "part", "minerva")
    assert text(tab, "#problem h3") == "problem-3"
    assert text(tab, "#problems [aria-current=true] .text") == "problem-3"
    assert text(tab, "#left-out").startswith("Showing 6 of 6 problems and 48 of 48 generations.")


def test_generations_of_a_problem_are_grouped_by_cluster(tab: chromium.Tab):
    choose(tab, "model", "a-run")
    choose(tab, "part", "step 200")
    heads = tab.run("[...document.querySelectorAll('.cluster h4')].map((one) => one.textContent)")
    assert [head.split(" generation")[0] for head in heads] == [
        *("Cluster 3 3", "Cluster 1 2", "Cluster 0 1", "Cluster 2 1", "Degenerate 1"),
    ]
    assert "5 of 8 correct, 4 clusters" in text(tab, "#problem")
    assert "reward 1 · advantage +0.071 · generation 4" in text(tab, "#problem")
    tab.run("document.querySelectorAll('#problems button')[1].click()")
    assert "5 of 8 correct, not clustered" in text(tab, "#problem")
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
def test_page_fits_the_width_of_the_screen(tab: chromium.Tab, page: Path, width: int, scheme: str):
    tab.open(page, width, 844, scheme)
    tab.run("document.querySelectorAll('details').forEach((one) => { one.open = true })")
    assert tab.run("document.documentElement.scrollWidth <= innerWidth")
    background = "rgb(22, 22, 24)" if scheme == "dark" else "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.body).backgroundColor") == background
