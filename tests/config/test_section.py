"""A section checks itself, and says in one sentence what is wrong."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from poly_epo_jax.config.checks import FRACTION, NOT_EMPTY, Check, ConfigError, Range, one_of
from poly_epo_jax.config.section import Section, key, read_section


@dataclasses.dataclass(frozen=True)
class Oven(Section, name="oven"):
    """Where it is baked."""

    degrees: float = key(180.0, "Celsius", Range(30, 300))
    shelf: int = key(2, "from below", Range(1, 9, other=-1))
    heat: str = key("both", "where it comes from", one_of("top", "both"))
    fan: bool = key(False, "whether it blows")
    moisture: float = key(0.5, "share of water", FRACTION)
    dishes: tuple[str, ...] = key((), "that fit")
    extras: Mapping[str, Any] = key({}, "anything else")


@dataclasses.dataclass(frozen=True)
class Recipe(Section):
    """The whole."""

    name: str = key("bread", "what it is called", NOT_EMPTY)
    minutes: int = key(30, "how long", Check(lambda minutes: minutes < 100, "must be below 100"))
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
    assert len(oven) == 7 and "shelf" in oven and "colour" not in oven
    with pytest.raises(KeyError):
        oven["read"]


def test_values_are_read_and_the_rest_is_as_declared():
    recipe = read_section(Recipe, {"minutes": 40, "oven": {"fan": True}})
    assert recipe == Recipe(minutes=40, oven=Oven(fan=True))
    assert recipe.to_dict()["oven"]["fan"] is True
    assert [name for name, _, _ in recipe.flat()][:4] == ["name", "minutes", "oven.degrees", "oven.shelf"]
    assert {name: field.metadata["meaning"] for name, field, _ in recipe.flat()}["oven.shelf"] == "from below"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"oven": {"degrees": 0}}, "oven.degrees=0 must lie between 30 and 300."),
        ({"oven": {"degrees": 10**400}}, "oven.degrees=0x"),
        ({"oven": {"degrees": float("nan")}}, "oven.degrees=nan must be a finite number."),
        ({"oven": {"degrees": float("inf")}}, "oven.degrees=inf must be a finite number."),
        ({"oven": {"degrees": None}}, "oven.degrees=None must be a finite number."),
        ({"oven": {"shelf": 10_000}}, "oven.shelf=10000 must be -1, or lie between 1 and 9."),
        ({"oven": {"shelf": 1.5}}, "oven.shelf=1.5 must be a whole number."),
        ({"oven": {"shelf": True}}, "oven.shelf=True must be a whole number."),
        ({"oven": {"heat": "left"}}, "oven.heat='left' must be one of both, top."),
        ({"oven": {"fan": 1}}, "oven.fan=1 must be True or False."),
        ({"oven": {"moisture": 1.1}}, "oven.moisture=1.1 must lie between 0 and 1."),
        ({"minutes": 100}, "minutes=100 must be below 100."),
        ({"name": 3}, "name=3 must be a text without control characters."),
        ({"name": "bread\0"}, "name='bread\\x00' must be a text without control characters."),
        ({"name": "\ud800"}, "name='\\ud800' must be a text without control characters."),
        ({"name": " "}, "name=' ' must not be empty."),
        ({"oven": {"dishes": "pan"}}, "oven.dishes='pan' must be a list, each of which must be a text"),
        ({"oven": {"dishes": ("pan", 3)}}, "oven.dishes=('pan', 3) must be a list, each of which must be a text"),
        ({"oven": 3}, "oven=3 must be a section."),
        ({"minuts": 3}, "There is no key minuts; did you mean minutes? It takes minutes, name, oven."),
        ({"oven": {"colour": "red"}}, "There is no key oven.colour; it takes degrees, dishes, extras, fan, heat, "),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as error:
        read_section(Recipe, values)
    assert str(error.value).startswith(sentence)


def test_sections_share_no_options():
    first, second = Oven(), Oven()
    assert first.extras == second.extras and first.extras is not second.extras
