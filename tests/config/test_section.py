"""A section validates its keys and rejects invalid values with a one-line message."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from poly_epo_jax.config.checks import FRACTION, NOT_EMPTY, Check, ConfigError, one_of
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.renamed import RENAMED
from poly_epo_jax.config.section import Section, key, read_section
from poly_epo_jax.registry import Range


@dataclasses.dataclass(frozen=True)
class Oven(Section, name="oven"):
    """The oven of a recipe."""

    degrees: float = key(180.0, "temperature in degrees Celsius", Range(30, 300))
    shelf: int = key(2, "shelf, counted from below", Range(1, 9, special=-1))
    heat: str = key("both", "source of the heat", one_of("top", "both"))
    fan: bool = key(False, "whether the fan runs")
    moisture: float = key(0.5, "fraction of water", FRACTION)
    dishes: tuple[str, ...] = key((), "dishes that fit")
    extras: Mapping[str, Any] = key({}, "other properties")


@dataclasses.dataclass(frozen=True)
class Recipe(Section):
    """A recipe with its oven."""

    name: str = key("bread", "name of the recipe", NOT_EMPTY)
    minutes: int = key(30, "baking time in minutes", Check(lambda minutes: minutes < 100, "must be below 100"))
    oven: Oven = Oven()


def test_a_section_is_a_mapping_of_its_keys():
    oven = Oven(degrees=200)
    assert dict(**oven) == {
        "degrees": 200,
        "shelf": 2,
        "heat": "both",
        "fan": False,
        "moisture": 0.5,
        "dishes": (),
        "extras": {},
    }
    assert len(oven) == 7 and "shelf" in oven and "color" not in oven
    with pytest.raises(KeyError):
        oven["read"]


def test_other_keys_have_their_defaults():
    recipe = read_section(Recipe, {"minutes": 40, "oven": {"fan": True}})
    assert recipe == Recipe(minutes=40, oven=Oven(fan=True))
    assert recipe.to_dict()["oven"]["fan"] is True
    assert [name for name, _, _ in recipe.flat()][:4] == ["name", "minutes", "oven.degrees", "oven.shelf"]
    assert {name: field.metadata["meaning"] for name, field, _ in recipe.flat()}[
        "oven.shelf"
    ] == "shelf, counted from below"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"oven": {"degrees": 0}}, ["oven.degrees=0 ", "between 30 and 300."]),
        ({"oven": {"degrees": 10**400}}, ["oven.degrees=0x"]),
        ({"oven": {"degrees": float("nan")}}, ["oven.degrees=nan ", "a finite number."]),
        ({"oven": {"degrees": float("inf")}}, ["oven.degrees=inf ", "a finite number."]),
        ({"oven": {"degrees": None}}, ["oven.degrees=None ", "a finite number."]),
        ({"oven": {"shelf": 10_000}}, ["oven.shelf=10000 ", "-1, or lie between 1 and 9."]),
        ({"oven": {"shelf": 1.5}}, ["oven.shelf=1.5 ", "a whole number."]),
        ({"oven": {"shelf": True}}, ["oven.shelf=True ", "a whole number."]),
        ({"oven": {"heat": "left"}}, ["oven.heat='left' ", "both, top."]),
        ({"oven": {"fan": 1}}, ["oven.fan=1 ", "True or False."]),
        ({"oven": {"moisture": 1.1}}, ["oven.moisture=1.1 ", "between 0 and 1."]),
        ({"minutes": 100}, ["minutes=100 ", "below 100."]),
        ({"name": 3}, ["name=3 ", "a string without control characters."]),
        ({"name": "bread\0"}, ["name='bread\\x00' ", "a string without control characters."]),
        ({"name": "\ud800"}, ["name='\\ud800' ", "a string without control characters."]),
        ({"name": " "}, ["name=' ' ", "must not be empty."]),
        ({"oven": {"dishes": "pan"}}, ["oven.dishes='pan' ", "a list, where each item must be a string"]),
        ({"oven": {"dishes": ("pan", 3)}}, ["oven.dishes=('pan', 3) ", "a list, where each item must be a string"]),
        ({"oven": 3}, ["oven=3 ", "a section."]),
        ({"minuts": 3}, ["There is no key minuts; did you mean minutes?", " minutes, name, oven."]),
        ({"oven": {"color": "red"}}, ["There is no key oven.color", " degrees, dishes, extras, fan, heat, "]),
    ],
)
def test_errors_name_the_key_and_its_values(values: dict[str, Any], words: list[str]):
    with pytest.raises(ConfigError) as error:
        read_section(Recipe, values)
    message = str(error.value)
    assert message.startswith(words[0]) and all(word in message for word in words), message


def test_former_names_of_keys_are_reported_with_the_new_names():
    new = {name for name, _, _ in Config().flat()}
    for former, name in RENAMED.items():
        if not former.startswith("--"):
            section, _, key = former.rpartition(".")
            values = {section: {key: 1}} if section else {key: 1}
            with pytest.raises(ConfigError, match=f"{former}; it is now {name}\\.$"):
                read_section(Config, values)
            assert name in new and former not in new


def test_sections_do_not_share_options():
    first, second = Oven(), Oven()
    assert first.extras == second.extras and first.extras is not second.extras
