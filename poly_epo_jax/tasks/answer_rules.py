r"""Rules that compare answers as text, because math-verify accepts or rejects them incorrectly.

Each rule of `VETOES` rejects answers that math-verify would accept. `comparable` applies them before the algebra.
"""

import re
from collections.abc import Callable

from poly_epo_jax.tasks.answer_names import SPACES, with_names
from poly_epo_jax.tasks.normalization import BLANK, CURRENCIES, SPACE

APPROXIMATION = re.compile(r"\\(?:(?:thick)?approx(?:eq)?|simeq)(?![a-zA-Z])")
BASE = re.compile(r"(?<=\d)\s*_\s*(\w|\{[^{}]*(?:\{[^{}]*\}[^{}]*)?\})", re.ASCII)

DECIMAL = re.compile(r"(?<![\d.])(\d{1,3}(?:,\d{3})+|\d*)\.(\d+)(?!\d)", re.ASCII)
# Without a multiplication sign, SymPy would parse adjacent numbers as a mixed number: 2(3) as 5.
FACTORS = re.compile(r"((?<![\w^_.\\}])\d+|\))\s*(?=\(|\\left\s*\()|\)\s*(?=\d)", re.ASCII)
EXTRA_BLANKS = re.compile(rf"(?<!\d){BLANK}+|{BLANK}+(?!\d)")
BRACED_INDEX = re.compile(r"([\^_])\{([^{}\\]|\\[a-zA-Z]+)\}")
NUMBER_AS_TEXT = re.compile(r"\\text\s*\{\s*(-?\d[\d.,]*)\s*\}", re.ASCII)
AMBIGUOUS = re.compile(
    rf"(?<![\w\\^_.}}])\d+(?:\.\d+)?{BLANK}+[\d.]"  # two adjacent numbers
    r"|(?<![\w^_}])\d+\s*\{|(?:^|[^}\]\w\s^_])\s*\{\d+\}\s*[\d{]|\\phantom"  # numbers in braces, or invisible content
    r"|\\text\s*\{(?:[^{}]*[^{}\w^/])?\d|\u2030",  # text that contains a number and is not a unit; per mille
    re.ASCII,
)

MONTH = r"(?i:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?)"
DATE = re.compile(
    rf"(?<!\d)(?:\d{{1,2}}/\d{{1,2}}/(?:\d{{2}}|\d{{4}})|\d{{4}}([-/])\d{{1,2}}\1\d{{1,2}})(?!\d)"
    rf"|(?<![a-zA-Z\\])(?:{MONTH}|(?i:nov|dec)(?i:ember)?|May)\.?{SPACES}\d|\d{SPACES}(?:{MONTH}|May)(?![a-z])"
    rf"|\d{SPACES}(?:\\text\s{{0,9}}\{{)?\s{{0,9}}(?i:[ap]\.\s?m\.|[ap]m\b)",
    re.ASCII,
)
CLOCK = re.compile(rf"{SPACES}\d{{1,2}}:\d{{2}}(?::\d{{2}})?{SPACES}", re.ASCII)
NOT_TEXT = re.compile(rf"\\text|{SPACE}|[{{}}.,$]")

PERCENT = re.compile(r"\\%")
UNIT_NAMES = (
    "mm millimeter millimetre|cm centimeter centimetre|dm decimeter|m meter metre|km kilometer kilometre"
    "|in inch inches|ft foot feet|yd yard|mi mile|mg milligram|g gram gm|kg kilogram|t ton tonne|lb pound|oz ounce"
    "|ms millisecond|s sec second|min minute|h hr hour|day|week|month|yr year|decade|century centuries"
    "|L l liter litre|mL ml milliliter|gal gallon|quart|pint|cup|tablespoon|teaspoon|acre|ha hectare|cc|mph"
    "|kmh kph kmph|N newton|J joule|kJ|W watt|kW|V volt|A amp ampere|K kelvin|C celsius|F fahrenheit|Pa|Hz hertz"
    "|mol mole|eV|ohm|KB|MB megabyte|GB|rad radian|deg degree|arcsec|erg|dyn dyne|dollar USD|cent|euro EUR"
    "|penny pennies|dime|nickel|quarter|rupee|yuan|point|unit|square|cubic|sq|cu|per|th|st|nd|rd|way|person people"
    "|man men|woman women|child children|student|boy|girl|player|team|number|digit|integer|term|solution|root"
    "|triangle|rectangle|side|edge|vertex vertices|face|coin|ball|marble|card|book|page|apple|orange|ticket|tile"
    "|block|cube|egg|car|game|step|move|time|pair|set|subset|arrangement|combination|permutation"
    "|possibility possibilities|outcome|path|word|letter|handshake|song|cookie|candy candies|flower|tree|animal|dog"
    "|cat|fish|bird|sheep|cow|chicken|house|room|chair|piece|gift|pen|pencil|box boxes|bag|bottle|meal|pie|toy"
    "|cupcake|cub|cuboid|cucumber|curtain|cushion|curve|currant|customer|cubit|cubicle|cupful|squad|squid|squirrel"
)
UNITS = {word: words.split()[0] for words in UNIT_NAMES.split("|") for word in words.split()}
UNITS |= {name: UNITS.get(name, name) for name in CURRENCIES.values()}
"""Units and counted things, by their abbreviations and names in the singular."""
BEFORE_UNIT = rf"(?<=[\d)}}]){SPACES}|(?<=\\circ){SPACES}|(?<=\\pi){SPACES}"
UNIT = rf"(?:{SPACES}/?{SPACES}\\text\s*\{{[^{{}}\d]*\}}(?:\s*\^\s*\{{?-?\d\}}?)?)+"
UNIT_AS_TEXT = re.compile(f"(?:{BEFORE_UNIT}){UNIT}", re.ASCII)
UNIT_AS_LETTERS = re.compile(
    rf"(?:{BEFORE_UNIT})([a-zA-Z]+(?:[ /][a-zA-Z]+)*(?:\s*\^\s*\{{?\d\}}?)?){SPACES}$", re.ASCII
)
POWER_IN_WORDS = re.compile(r"(?<![a-z])(?:square|sq|(cubic|cu))(?![a-z]) *([a-zA-Z]+)")


def canonical_unit(text: str) -> str | None:
    r"""Returns a unit such as `\text{ square feet}` in a canonical form such as `ft^2`, or None if it is unknown."""
    plain = re.sub(rf"\\text|{SPACE}+|[{{}}.]", " ", text).strip()
    plain = POWER_IN_WORDS.sub(lambda match: f"{match[2]}^{3 if match[1] else 2}", plain)
    words = re.findall("[a-zA-Z]+", plain)
    named = {word: _unit(word) for word in words}
    if not words or None in named.values():
        return None
    plain = re.sub("[a-zA-Z]+", lambda match: named[match[0]] or "", plain)
    plain = re.sub(r"\s*(?:/|per)\s*", "/", plain).replace(" ^", "^").replace("^ ", "^").strip()
    return plain.removeprefix("deg ")


def _unit(word: str) -> str | None:
    lower = word.lower() if len(word) > 2 else word
    candidates = (word, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((UNITS[one] for one in candidates if one in UNITS and (one == word or len(one) > 1)), None)


def without_units(text: str, one_letter: bool = False) -> tuple[str, set[str]]:
    r"""Removes known units after numbers.

    Args:
      text: A normalized answer.
      one_letter: Whether a single letter that is not in `\text{}` may be a unit. Otherwise it is a variable.

    Returns:
      The answer without units, and the canonical forms of the units.
    """
    found: set[str] = set()

    def remove(match: re.Match[str]) -> str:
        unit = canonical_unit(match[0])
        found.update([unit] if unit else [])
        return match[0] if unit is None else " "

    text = UNIT_AS_TEXT.sub(remove, text)
    letters = UNIT_AS_LETTERS.search(text)
    if letters and (one_letter or re.match("[a-zA-Z]{2}", letters[1])):
        text = UNIT_AS_LETTERS.sub(remove, text)
    return text.strip(), found


def another_unit(gold: str, answer: str) -> bool:
    """Returns True if both answers have units or percent signs, and these differ."""
    units, others = (set(PERCENT.findall(side)) for side in (gold, answer))
    units |= without_units(gold)[1]
    others |= without_units(answer, one_letter=True)[1]
    if not units and others == {"deg"} and r"\pi" in gold:
        units = {"rad"}
    return bool(units) and others not in (set(), units)


def bases(text: str) -> list[str]:
    """Returns the number bases that an answer names."""
    return [re.sub(r"[^\w]", "", match[1].replace(r"\text", "")) for match in BASE.finditer(text)]


def another_base(gold: str, answer: str) -> bool:
    """Returns True if the answer names another base than the gold answer, whose default is 10."""
    named, meant = bases(answer), bases(gold)
    return bool(named) and named != meant and (bool(meant) or set(named) != {"10"})


def as_date(text: str) -> str | None:
    """Returns a date, or a time with a.m. or p.m., without spaces and fonts. Returns None for other answers."""
    return _plain(text) if DATE.search(text) else None


def another_date(gold: str, answer: str) -> bool:
    """Returns True if one answer is a date, or both are times, and their texts differ."""
    is_text = as_date(gold) or as_date(answer) or (CLOCK.fullmatch(gold) and CLOCK.fullmatch(answer))
    return bool(is_text) and _plain(gold) != _plain(answer)


def _plain(text: str) -> str:
    return NOT_TEXT.sub("", text).lower()


def is_ambiguous(gold: str, answer: str) -> bool:
    """Returns True if an answer contains numbers that are adjacent, hidden, or part of a text, and the texts differ."""
    numbers = _numbers(gold, answer)
    return numbers[0] != numbers[1] and any(map(AMBIGUOUS.search, numbers))


def _numbers(gold: str, answer: str) -> tuple[str, str]:
    """Returns both answers without units, bases and fonts of numbers."""
    number, units = without_units(gold)
    other, _ = without_units(answer, one_letter=bool(units))
    number, other = (NUMBER_AS_TEXT.sub(r"\1", BASE.sub("", side)) for side in (number, other))
    return as_date(gold) or number, as_date(answer) or other


def _fraction(match: re.Match[str]) -> str:
    whole, digits = match.groups()
    fraction = rf"\frac{{{whole.replace(',', '')}{digits}}}{{1{'0' * len(digits)}}}"
    return f"{{{fraction}}}" if match.string[: match.start()].endswith(("^", "_")) else fraction


VETOES: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "ambiguous": ("math-verify adds adjacent numbers, and ignores hidden ones.", is_ambiguous),
    "approximation": (
        "math-verify reads only one side of the sign.",
        lambda gold, answer: bool(APPROXIMATION.search(answer)),
    ),
    "base": ("math-verify ignores or misreads the base of a number.", another_base),
    "date or time": ("math-verify divides 12/25/2020 and 2:30.", another_date),
    "unit": ("math-verify removes units without comparing them.", another_unit),
}
"""Reason and function `(gold, answer) -> rejected` of each rule, by name, see `docs/reference/grading.md`."""


def comparable(gold: str, answer: str) -> tuple[str, str] | None:
    """Rewrites two normalized answers for math-verify: without units and bases, and with fractions for decimals.

    Returns:
      The gold answer and the answer, or None if a rule of `VETOES` rejects the answer.
    """
    gold, answer = with_names(gold, answer)
    if any(rejects(gold, answer) for _, rejects in VETOES.values()):
        return None
    number, other = (FACTORS.sub(r"\g<0> \\cdot ", DECIMAL.sub(_fraction, side)) for side in _numbers(gold, answer))
    return (number, number if _without_blanks(number) == _without_blanks(other) else other)


def _without_blanks(text: str) -> str:
    return BRACED_INDEX.sub(r"\1\2", EXTRA_BLANKS.sub("", text))
