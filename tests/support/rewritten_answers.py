"""Rewritings of gold answers that preserve or change their meaning, which a grader must distinguish.

Each rewriting takes a gold answer and returns the rewritten answer, or None if it is not applicable.
"""

import math
import random
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

Rewriting = Callable[[str, random.Random], str | None]

INTEGER = re.compile(r"-?\d{1,15}", re.ASCII)
FRACTION = re.compile(r"\\d?frac\{(\d{1,9})\}\{(\d{1,9})\}", re.ASCII)
DECIMAL = re.compile(r"\d{0,9}\.\d{1,9}", re.ASCII)
ROOT = re.compile(r"(\d{1,6})\s*\\sqrt\{(\d{1,6})\}", re.ASCII)
DEGREES = re.compile(r"(\d{1,6})\^\s*\{?\\circ\}?", re.ASCII)
PERCENT = re.compile(r"(\d{1,6})\\%", re.ASCII)
IN_BASE = re.compile(r"(\d{1,15})_\{?(\d{1,2})\}?", re.ASCII)
PAIR = re.compile(r"\((-?\d{1,9}),\s*(-?\d{1,9})\)", re.ASCII)
NUMBERS = re.compile(r"-?\d{1,9}(?:,\s*-?\d{1,9})+", re.ASCII)
METHOD_PRESETS = re.compile(r"[a-zA-Z]{2}")

GOLDS = (
    *("27", "1296", "-3", "0", "1234567", "2025", "100", "6"),
    *(r"\frac{1}{3}", r"\frac{3}{4}", r"\frac{17}{5}", r"\dfrac{22}{7}", r"\frac{448}{3}", r"\frac{1}{3000}"),
    *("0.75", "12.5", ".35625", r"3\sqrt{13}", r"5\sqrt{2}", r"\sqrt{66}", r"4\pi", r"1-\frac{2}{\pi}", r"2+\sqrt{5}"),
    *(r"75^\circ", r"45^{\circ}", r"40\%", r"150\%", "4210_5", "27_{8}", "x^2+2x+1", r"\frac{11+9a}{20}", "2k+2"),
    *("(1, 2)", "(3, -1)", "(15,-29)", "(7, 4)", "2, 3", "-2, 5, 11", r"2^{25} \cdot 26!", r"\binom{8}{3}"),
)
"""Gold answers for use without a dataset."""


def is_number(gold: str) -> bool:
    """Returns True if a gold answer is a single number in any notation, and can therefore be negated or have a unit."""
    plain = re.sub(r"\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right)(?![a-zA-Z])", "", gold)
    return re.fullmatch(r"[-+*/^!\d.{}()\s]+", plain, re.ASCII) is not None and ",," not in gold and gold.strip() != ""


def is_plain(gold: str) -> bool:
    """Returns True if the meaning of a gold answer is unambiguous."""
    forms = (DEGREES, PERCENT, IN_BASE, PAIR, NUMBERS)
    number = is_number(gold) and re.search(r"\d", gold) and not re.search(r"[.,]$|\d\s+\d", gold)
    return len(gold) < 60 and bool(number or any(form.fullmatch(gold) for form in forms))


def fraction_of(gold: str) -> Fraction | None:
    if match := FRACTION.fullmatch(gold):
        return Fraction(int(match[1]), int(match[2])) if int(match[2]) else None
    return Fraction(gold) if INTEGER.fullmatch(gold) or DECIMAL.fullmatch(gold) else None


def wrapped(before: str, after: str, applies: Callable[[str], bool] = lambda gold: True) -> Rewriting:
    return lambda gold, _: f"{before}{gold}{after}" if applies(gold) else None


def no_words(gold: str) -> bool:
    return not METHOD_PRESETS.search(re.sub(r"\\[a-zA-Z]+", "", gold)) and "text" not in gold and "begin" not in gold


def one_value(gold: str) -> bool:
    return no_words(gold) and not re.search(r"[,=<>]|\\[lg]eq?|\\in|\\pm|\\cup|_|\\%|\.\.\.", gold)


def matched(pattern: re.Pattern[str], write: Callable[[re.Match[str]], str | None]) -> Rewriting:
    return lambda gold, _: write(match) if (match := pattern.fullmatch(gold)) else None


def thousands(separator: str) -> Rewriting:
    def write(gold: str, _: random.Random) -> str | None:
        if not INTEGER.fullmatch(gold) or len(gold.lstrip("-")) < 4 or gold.lstrip("-").startswith("0"):
            return None
        return f"{int(gold):,}".replace(",", separator)

    return write


def of_fraction(write: Callable[[Fraction], str | None]) -> Rewriting:
    def rewrite(gold: str, _: random.Random) -> str | None:
        value = fraction_of(gold)
        return None if value is None or not FRACTION.fullmatch(gold) else write(value)

    return rewrite


def mixed(after_whole: str, percent: bool = False) -> Callable[[Fraction], str | None]:
    def write(value: Fraction) -> str | None:
        value = value * 100 if percent else value
        whole, rest = divmod(value.numerator, value.denominator)
        if not whole or not rest:
            return None
        numerals = rf"{whole}{after_whole}\frac{{{rest}}}{{{value.denominator}}}"
        return numerals + (r"\%" if percent else "")

    return write


def as_decimal(places: int, exact: bool) -> Callable[[Fraction], str | None]:
    def write(value: Fraction) -> str | None:
        text = f"{float(value):.{places}f}"
        return text if (Fraction(text) == value) is exact and Fraction(text) else None

    return write


def shuffled(template: str) -> Rewriting:
    def write(gold: str, rng: random.Random) -> str | None:
        if not NUMBERS.fullmatch(gold):
            return None
        numbers = [number.strip() for number in gold.split(",")]
        if len({int(number) for number in numbers}) < len(numbers) or re.fullmatch(r"\d{1,3}(,\d{3})+", gold):
            return None
        rng.shuffle(numbers)
        return template % ", ".join(numbers)

    return write


SAME: dict[str, Rewriting] = {
    "dollars": wrapped("$", "$", no_words),
    "parentheses of LaTeX": wrapped(r"\(", r"\)"),
    "display style": wrapped(r"\displaystyle ", ""),
    "boldsymbol": wrapped(r"\boldsymbol{", "}", one_value),
    "bm": wrapped(r"\bm{", "}", one_value),
    "mathbf": wrapped(r"\mathbf{", "}", one_value),
    "bf": wrapped(r"{\bf ", "}", one_value),
    "text": wrapped(r"\text{", "}", lambda gold: bool(INTEGER.fullmatch(gold))),
    "colour": wrapped(r"\color{blue}", ""),
    "coloured": wrapped(r"\textcolor{red}{", "}", one_value),
    "braces": wrapped("{", "}", one_value),
    "another box": wrapped(r"\boxed{", "}"),
    "full stop": wrapped("", "."),
    "spaces": wrapped("  ", "\n"),
    "assignment": wrapped("x = ", "", one_value),
    "named twice": lambda gold, _: f"{gold} = {gold}" if is_number(gold) else None,
    "product with one": wrapped(r"1 \cdot (", ")", one_value),
    "sum with nothing": wrapped("0 + ", "", lambda gold: is_number(gold) and not gold.startswith("-")),
    "tfrac": lambda gold, _: re.sub(r"\\d?frac", r"\\tfrac", gold) if "frac" in gold else None,
    "unicode": lambda gold, _: (
        gold.replace("-", "\N{MINUS SIGN}").replace(r"\pi", "π") if re.search(r"-|\\pi", gold) else None
    ),
    "left and right": lambda gold, _: (
        gold.replace("(", r"\left(").replace(")", r"\right)")
        if one_value(gold) and "(" in gold and "left" not in gold
        else None
    ),
    "thousands with a comma": thousands(","),
    "thousands with a comma in braces": thousands("{,}"),
    "thousands with a thin space": thousands(r"\,"),
    "thousands with a space": thousands(" "),
    "thousands with an escaped space": thousands(r"\ "),
    "leading zero": matched(INTEGER, lambda match: None if "-" in match[0] else f"0{match[0]}"),
    "fraction of an integer": matched(INTEGER, lambda match: rf"\frac{{{2 * int(match[0])}}}{{2}}"),
    "sum of an integer": matched(INTEGER, lambda match: f"{int(match[0]) - 7} + 7"),
    "chain of an integer": matched(INTEGER, lambda match: f"x = {int(match[0]) - 7} + 7 = {match[0]}"),
    "base ten": matched(INTEGER, lambda match: rf"{match[0]}_{{10}}"),
    "unit": matched(INTEGER, lambda match: rf"{match[0]} \text{{ cm}}"),
    "angle": matched(INTEGER, lambda match: f"{match[0]}°"),
    "slash": of_fraction(lambda value: f"{value.numerator}/{value.denominator}"),
    "expanded": of_fraction(lambda value: rf"\frac{{{6 * value.numerator}}}{{{6 * value.denominator}}}"),
    "over": of_fraction(lambda value: rf"{{{value.numerator}}}\div{{{value.denominator}}}"),
    "mixed number": of_fraction(mixed("")),
    "mixed number with a thin space": of_fraction(mixed(r"\,")),
    "mixed percentage": of_fraction(mixed("", percent=True)),
    "finite decimal": of_fraction(as_decimal(6, exact=True)),
    "fraction of a decimal": matched(
        DECIMAL, lambda match: rf"\frac{{{Fraction(match[0]).numerator}}}{{{Fraction(match[0]).denominator}}}"
    ),
    "digits of a decimal": matched(DECIMAL, lambda match: f"{match[0]}00"),
    "root of a square": matched(ROOT, lambda match: rf"\sqrt{{{int(match[1]) ** 2 * int(match[2])}}}"),
    "root first": matched(ROOT, lambda match: rf"\sqrt{{{match[2]}}} \cdot {match[1]}"),
    "degree sign": matched(DEGREES, lambda match: f"{match[1]}°"),
    "degree command": matched(DEGREES, lambda match: rf"{match[1]}\degree"),
    "degrees in words": matched(DEGREES, lambda match: rf"{match[1]}\text{{ degrees}}"),
    "degrees left out": matched(DEGREES, lambda match: match[1]),
    "percent in words": matched(PERCENT, lambda match: rf"{match[1]} \text{{ percent}}"),
    "percent left out": matched(PERCENT, lambda match: match[1]),
    "percentage as a decimal": matched(PERCENT, lambda match: f"{int(match[1]) / 100:.4f}"),
    "base in parentheses": matched(IN_BASE, lambda match: rf"{match[1]}_{{({match[2]})}}"),
    "base left out": matched(IN_BASE, lambda match: match[1]),
    "pair in braces": matched(PAIR, lambda match: f"{{{match[0]}}}"),
    "pair in a set": matched(PAIR, lambda match: rf"\{{{match[0]}\}}"),
    "bold pair": matched(PAIR, lambda match: rf"\boldsymbol{{{match[0]}}}"),
    "pair with other spaces": matched(PAIR, lambda match: rf"\left( {match[1]} ,{match[2]}\right)"),
    "another order": shuffled("%s"),
    "a set": shuffled(r"\{%s\}"),
}


def with_second_number(template: str) -> Rewriting:
    """Returns a rewriting that adds an incorrect number next to the correct one."""

    def write(gold: str, rng: random.Random) -> str | None:
        if not INTEGER.fullmatch(gold):
            return None
        return template.format(right=gold, wrong=int(gold) + rng.choice([-9, -2, -1, 1, 2, 10, 100]))

    return write


def another_digit(gold: str, rng: random.Random) -> str | None:
    """Changes one digit of a number in which every digit affects the value."""
    if not is_number(gold) and not PAIR.fullmatch(gold) and not NUMBERS.fullmatch(gold):
        return None
    places = [place for place, character in enumerate(gold) if "1" <= character <= "8"]
    # In 0^3, 1^2, 0/5 or -0, changing a digit may not change the value. Factors may also be exchanged.
    if not places or re.search(r"(?<![\d.])[01](?![\d.])|\^|\\frac.*\\frac|\*|\\cdot|\\times", gold):
        return None
    place = rng.choice(places)
    return gold[:place] + str(int(gold[place]) + 1) + gold[place + 1 :]


def if_positive(template: str, minimum: int = 3) -> Rewriting:
    """Returns a rewriting of integers of at least `minimum`, whose values are changed by the template."""
    return matched(
        INTEGER,
        lambda match: template.replace("#", match[0]) if int(match[0]) >= minimum and match[0][0] != "0" else None,
    )


OTHER: dict[str, Rewriting] = {
    "another digit": another_digit,
    "negative": lambda gold, _: f"-({gold})" if is_number(gold) and fraction_of(gold) != 0 else None,
    "one more": wrapped("1 + ", "", lambda gold: is_number(gold) and gold[0] != "-"),
    "ten times": lambda gold, _: rf"10 \cdot ({gold})" if is_number(gold) and fraction_of(gold) != 0 else None,
    "a variable": lambda gold, _: f"({gold})y" if is_number(gold) and fraction_of(gold) != 0 else None,
    "false equation": with_second_number("{wrong} = {right}"),
    "false equation, right first": with_second_number("{right} = {wrong}"),
    "false chain": with_second_number("x = {wrong} = {right}"),
    "false sum": with_second_number("{wrong} + 0 = {right}"),
    "congruence": with_second_number(r"{wrong} \equiv {right}"),
    "or": with_second_number(r"{wrong} \text{{ or }} {right}"),
    "or in the text": with_second_number(r"{right} \text{{ or maybe {wrong}}}"),
    "comma": with_second_number("{wrong}, {right}"),
    "semicolon": with_second_number("{right}; {wrong}"),
    "set of two": with_second_number(r"\{{{right}, {wrong}\}}"),
    "equations": with_second_number("x = {wrong}, x = {right}"),
    "inequality": with_second_number("{wrong} < {right}"),
    "not equal": with_second_number(r"{wrong} \neq {right}"),
    "arrow": with_second_number(r"{wrong} \to {right}"),
    "implication": with_second_number(r"{wrong} \Rightarrow {right}"),
    "crossed out": with_second_number(r"\cancel{{{wrong}}} {right}"),
    "quad": with_second_number(r"{right} \quad {wrong}"),
    "plus or minus": matched(INTEGER, lambda match: rf"\pm {match[0]}" if int(match[0]) else None),
    "percentage": if_positive(r"#\%", 1),
    "percentage in words": if_positive(r"# \text{ percent}", 1),
    "base eight": if_positive("#_{8}", 1),
    "base two": if_positive("#_2", 1),
    "factorial": if_positive("#!"),
    "square": if_positive("#^2"),
    "root": if_positive(r"\sqrt{#}"),
    "reciprocal": if_positive(r"\frac{1}{#}"),
    "imaginary": if_positive("#i"),
    "thousandth": if_positive("0.#"),
    "nearly": if_positive("#.0000001"),
    "power of ten": if_positive(r"# \times 10^{-9}"),
    "product read as a sum": matched(INTEGER, lambda match: f"{int(match[0]) - 1}(1)" if int(match[0]) > 3 else None),
    "factors read as a sum": matched(INTEGER, lambda match: f"({int(match[0]) - 2})(2)" if int(match[0]) > 4 else None),
    "groups read as a sum": matched(
        INTEGER, lambda match: f"{{{int(match[0]) - 1}}}{{1}}" if int(match[0]) > 3 else None
    ),
    "numbers side by side": matched(INTEGER, lambda match: f"1 {int(match[0]) - 1}" if int(match[0]) > 3 else None),
    "phantom": matched(INTEGER, lambda match: rf"\phantom{{1}}{int(match[0]) - 1}" if int(match[0]) > 3 else None),
    "upside down": of_fraction(
        lambda value: rf"\frac{{{value.denominator}}}{{{value.numerator}}}" if value not in (0, 1) else None
    ),
    "six digits": of_fraction(as_decimal(6, exact=False)),
    "nine digits": of_fraction(as_decimal(9, exact=False)),
    "approximated": of_fraction(
        lambda value: rf"\frac{{{value.numerator}}}{{{value.denominator}}} \approx {float(value):.3f}"
    ),
    "rounded": of_fraction(as_decimal(2, exact=False)),
    "mixed number of a product": of_fraction(
        lambda value: rf"{value.numerator} \cdot \frac{{1}}{{{value.denominator + 1}}}" if value else None
    ),
    "decimal of a root": matched(
        ROOT,
        lambda match: (
            f"{int(match[1]) * math.sqrt(int(match[2])):.8f}"
            if math.isqrt(int(match[2])) ** 2 != int(match[2])
            else None
        ),
    ),
    "another base": matched(IN_BASE, lambda match: f"{match[1]}_{{{int(match[2]) + 1}}}" if match[2] != "9" else None),
    "hundredfold percentage": matched(PERCENT, lambda match: rf"{match[1]}00\%" if int(match[1]) else None),
    "hundredth of a percentage": matched(PERCENT, lambda match: f"0.00{match[1]}" if int(match[1]) else None),
    "radians": matched(DEGREES, lambda match: rf"{match[1]}\pi" if int(match[1]) else None),
    "pair exchanged": matched(PAIR, lambda match: f"({match[2]}, {match[1]})" if match[1] != match[2] else None),
    "longer pair": matched(PAIR, lambda match: f"({match[1]}, {match[2]}, {match[2]})"),
    "closed pair": matched(PAIR, lambda match: f"[{match[1]}, {match[2]}]" if int(match[1]) < int(match[2]) else None),
    "two pairs": matched(PAIR, lambda match: f"{match[0]}, ({match[2]}, {int(match[1]) + 1})"),
    "fewer numbers": matched(NUMBERS, lambda match: match[0].rpartition(",")[0] if "," in match[0][5:] else None),
}


def pairs(golds: Sequence[str], rewritings: dict[str, Rewriting], rng: random.Random) -> list[tuple[str, str, str]]:
    """Returns (kind, gold answer, rewritten answer) for each gold answer and each applicable rewriting."""
    rewritten = ((kind, gold, rewrite(gold, rng)) for gold in golds for kind, rewrite in rewritings.items())
    return [(kind, gold, answer) for kind, gold, answer in rewritten if answer is not None and answer != gold]
