"""Draws gold answers of many kinds of notation, and rewrites them with the same or with another meaning."""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from answer_pairs import Pair

import poly_epo_jax.tasks
from poly_epo_jax.tasks.answer_names import SHORT_WORDS
from poly_epo_jax.tasks.answer_rules import UNITS

LISTS = Path(poly_epo_jax.tasks.__file__).with_name("words").glob("categories_*.txt")
WORDS = sorted({word for file in LISTS for word in re.findall("(?<=[,:/] |./)[a-z]{4,12}(?=[,/\n])", file.read_text())})
ROMAN = (
    "IV",
    "VI",
    "IX",
    "XI",
    "VII",
    "XII",
    "XIV",
    "XVI",
    "XIX",
    "XXI",
    "XL",
    "LX",
    "XC",
    "CX",
    "CD",
    "DC",
    "CM",
    "MC",
)
VARIABLES = "abckmnpqrstuvwxyz"
STYLES = (0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6)
"""Code points of the digit 0 in five mathematical alphabets."""
MINUSES = "\u2010\u2011\u2012\u2013\u2014\u2212\ufe63\uff0d"
VULGAR = {(1, 2): "½", (1, 3): "⅓", (2, 3): "⅔", (1, 4): "¼", (3, 4): "¾", (1, 5): "⅕", (5, 6): "⅚", (3, 8): "⅜"}
CURRENCIES = {
    "dollar": (r"\$%s", r"%s\$", r"%s\text{ dollars}", r"\text{\$}%s", "%s dollars"),
    "euro": ("€%s", "%s€", "%s €", r"%s\text{ euros}", r"\text{€}%s", r"\euro %s"),
    "pound": ("£%s", r"\pounds %s", r"%s\text{ pounds}", r"\text{£}%s"),
    "yen": ("¥%s", r"%s\text{ yen}", r"\yen %s", "￥%s"),
    "cent": ("%s¢", r"%s\text{ cents}", r"%s\text{¢}"),
}
ANGLES = {
    "degree": (r"%s^\circ", r"%s^{\circ}", "%s°", r"%s\text{ degrees}", "%sº", r"%s\degree", r"%s\text{ deg}", "%s˚"),
    "radian": (r"%s\text{ rad}", r"%s\text{ radians}", "%s rad", r"%s\,\mathrm{rad}"),
    "percent": (r"%s\%%", r"%s\text{ percent}", "%s%%", "%s percent", r"%s \%%"),
}
COUNTED = {
    **{
        name: (rf"%s\text{{ {name}s}}", f"%s {name}s", rf"%s\,\mathrm{{{name}s}}") for name in ("cup", "cube", "square")
    },
    "area": (
        r"%s\text{ cm}^2",
        r"%s\text{ square centimeters}",
        r"%s\text{ cm²}",
        r"%s\text{ sq cm}",
        r"%s\text{ cm^2}",
    ),
    "volume": (r"%s\text{ cm}^3", r"%s\text{ cubic centimeters}", "%s cm³", r"%s\text{ cu cm}", r"%s\mathrm{cm}^{3}"),
    "length": (r"%s\text{ cm}", "%s cm", r"%s\ \mathrm{cm}", r"%s\text{ centimetres}"),
}
MARKS = {
    "prime": ("%s'", r"%s^\prime", r"%s^{\prime}", "%s\N{PRIME}", "%s\N{RIGHT SINGLE QUOTATION MARK}"),
    "double prime": ("%s''", r"%s^{\prime\prime}", "%s\N{DOUBLE PRIME}"),
    "transpose": ("%s^T", "%s^{T}", r"%s^\top", r"%s^{\top}", r"%s^{\mathsf{T}}", r"%s^\mathrm{T}", r"%s^{\mathrm T}"),
    "bar": (r"\bar{%s}", r"\overline{%s}", r"\bar %s", r"\overline %s"),
    "hat": (r"\hat{%s}", r"\hat %s", r"\widehat{%s}"),
    "vector": (r"\vec{%s}", r"\vec %s"),
    "tilde": (r"\tilde{%s}", r"\widetilde{%s}"),
    "dot": (r"\dot{%s}", r"\dot %s"),
    "star": ("%s^*", "%s^{*}"),
    "nothing": ("%s", r"\mathbf{%s}", r"\boldsymbol{%s}", r"\mathbf %s"),
}
FORMULAS = (
    "e^{#}",
    "#e",
    r"1-\frac{#}{e}",
    "e^{#x}",
    r"\frac{e^{#}}{#}",
    "#+#i",
    "#e^x",
    r"\ln #+e",
    "#x+#",
    "x^{#}-#",
)
UPRIGHT = {
    "e": (r"\mathrm{e}", r"\text{e}", r"{\rm e}", "\N{SCRIPT SMALL E}", r"\mathrm e"),
    "i": (r"\mathrm{i}", r"\text{i}", r"\mathrm i"),
    "x": (r"\boldsymbol{x}", r"\mathbf x", r"\bm{x}", "\N{MATHEMATICAL ITALIC SMALL X}", r"\mathsf{x}"),
}
CONSTANT = re.compile(r"(?<![a-zA-Z\\])[eix](?![a-zA-Z])")
BLANKS = (r"\,", r"\;", r"\ ", "~", r"\quad", r"\qquad", " ", r"\!", ".", r"\hspace{1em}", r"\\")
ROWS = (
    ("&", r"\\"),
    (" & ", r" \\ "),
    ("&", r"\\[2pt]"),
    (" & ", " \\\\\n"),
    (r"\,&\,", r"\\"),
    (r"&\quad ", r" \\[1ex] "),
    ("&", r"\cr "),
    ("&", r"\\*"),
)
FRAMES = (
    (r"\begin{pmatrix}", r"\end{pmatrix}"),
    (r"\begin{bmatrix}", r"\end{bmatrix}"),
    (r"\left(\begin{array}{cc}", r"\end{array}\right)"),
    (r"\left[\begin{matrix}", r"\end{matrix}\right]"),
    (r"\left(\begin{smallmatrix}", r"\end{smallmatrix}\right)"),
)


class Drawn(NamedTuple):
    """A gold answer, an answer with the same meaning, and one with another meaning."""

    gold: str
    same: str
    other: str


def number(rng: random.Random) -> int:
    return rng.choice((rng.randint(2, 9), rng.randint(10, 99), rng.randint(100, 999)))


def permuted(letters: str, rng: random.Random) -> str:
    """Returns the letters in another order."""
    while (order := "".join(rng.sample(letters, len(letters)))) == letters:
        pass
    return order


def another(choices: Sequence[str], than: str, rng: random.Random) -> str:
    return rng.choice([one for one in choices if one != than])


def in_a_font(text: str, rng: random.Random) -> str:
    fonts = (
        r"\text{%s}",
        r"\mathrm{%s}",
        r"\textbf{%s}",
        r"\textit{%s}",
        r"\mathbf{%s}",
        r"{\rm %s}",
        r"\text{ %s }",
        "%s",
    )
    return rng.choice(fonts) % text


def word(rng: random.Random) -> Drawn:
    words = [rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2)))]
    changed = rng.choice(WORDS) if rng.random() < 0.5 else permuted(words[0], rng)
    while changed == words[0]:
        changed = rng.choice(WORDS)
    text, written = " ".join(words), [" ".join(words).capitalize(), " ".join(words)]
    return Drawn(
        in_a_font(text, rng), in_a_font(rng.choice(written), rng), in_a_font(" ".join([changed, *words[1:]]), rng)
    )


def name(rng: random.Random) -> Drawn:
    letters = rng.choice(ROMAN) if rng.random() < 0.4 else "".join(rng.sample("ABCDEFGHPQXYZ", rng.randint(2, 5)))
    if len(set(letters)) == 1:
        return name(rng)
    spaced = " ".join(letters) if rng.random() < 0.3 else letters
    return Drawn(in_a_font(letters, rng), in_a_font(spaced, rng), in_a_font(permuted(letters, rng), rng))


def product(rng: random.Random) -> Drawn:
    letters = "".join(rng.sample(VARIABLES, rng.randint(2, 3)))
    order, changed = permuted(letters, rng), letters[:-1] + another(VARIABLES, letters[-1], rng)
    if {letters, order, changed} & (SHORT_WORDS | UNITS.keys()):
        return product(rng)
    factor = rng.choice(("", str(rng.randint(2, 9))))
    return Drawn(factor + letters, factor + rng.choice(("", " ", r" \cdot ")).join(order), factor + changed)


def formula(rng: random.Random) -> Drawn:
    gold = re.sub("#", lambda _: str(number(rng)), rng.choice(FORMULAS))
    same = CONSTANT.sub(lambda match: rng.choice(UPRIGHT[match[0]]) + " ", gold)
    changed = rng.choice((rf"{same}+1", f"-({same})", rf"2 \cdot ({same})"))
    return Drawn(gold, same, changed)


def characters(rng: random.Random) -> Drawn:
    size, zero = number(rng), rng.choice(STYLES)
    if rng.random() < 0.3:
        (top, bottom), symbol = rng.choice(list(VULGAR.items()))
        whole = rng.choice((0, size))
        gold = rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"
        return Drawn(gold, f"{whole or ''}{symbol}", f"{whole + 1}{symbol}")
    if rng.random() < 0.4:
        raised = str(size).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        return Drawn(f"x^{{{size}}}", f"x{raised}", f"x{raised}²")
    digits, more = ("".join(chr(zero + int(digit)) for digit in str(one)) for one in (size, size + 1))
    sign = rng.choice(MINUSES)
    return Drawn(f"-{size}", f"{sign}{digits}", rng.choice((digits, f"{sign}{more}")))


def of_forms(forms: dict[str, Sequence[str]], bare: bool) -> Callable[[random.Random], Drawn]:
    """Returns a function that draws a number in one form of a kind, in another form, and in a form of another kind.

    Args:
      forms: Templates with the number, by kind.
      bare: Whether the number alone has the same meaning.
    """

    def draw(rng: random.Random) -> Drawn:
        kind, size = rng.choice(list(forms)), str(number(rng))
        same = "%s" if bare and rng.random() < 0.2 else rng.choice(forms[kind])
        others = [forms[another(list(forms), kind, rng)], ["%s0"], ["-%s"]]
        other = rng.choice(rng.choice(others) if bare else others[0])
        return Drawn(rng.choice(forms[kind]) % size, same % size, other % size)

    return draw


def mark(rng: random.Random) -> Drawn:
    kind, (letter, term) = rng.choice(list(MARKS)), rng.sample("fguvwzABM", 2)
    changed = another(list(MARKS), kind, rng)
    gold, same, other = (rng.choice(MARKS[one]) % letter for one in (kind, kind, changed))
    if "star" in (kind, changed) or rng.random() < 0.5:
        return Drawn(gold, same, other)
    return Drawn(f"2{gold}+{term}", f"{term}+2{same}", f"{term}+2{other}")


def interval(rng: random.Random) -> Drawn:
    ends = sorted(rng.sample(range(-20, 99), 2))
    left, right = rng.choice("[("), rng.choice(")]")
    start, end = str(ends[0]), str(ends[1])
    if rng.random() < 0.3:
        right, end = ")", rng.choice((r"\infty", r"+\infty"))

    def outward(left: str, right: str) -> str:
        brackets = "]" if left == "(" else "[", "[" if right == ")" else "]"
        forms = ("%s%s,%s%s", "%s %s , %s %s", r"\left%s%s,%s\right%s", "%s%s;%s%s")
        return rng.choice(forms[: 3 if brackets == ("[", "]") else 4]) % (brackets[0], start, end, brackets[1])

    changed = ("[" if left == "(" else "(", right)
    if "infty" not in end and rng.random() < 0.5:
        changed = (left, another(")]", right, rng))
    return Drawn(f"{left}{start},{end}{right}", outward(left, right), outward(*changed))


def matrix(rng: random.Random) -> Drawn:
    shape = rng.choice(((2, 2), (2, 1), (3, 2)))
    entries = [[str(rng.randint(-9, 9)) for _ in range(shape[1])] for _ in range(shape[0])]
    changed = [list(row) for row in entries]
    changed[-1][0] = str(int(changed[-1][0]) + 1)

    def write(rows: Sequence[Sequence[str]]) -> str:
        (start, end), (column, row) = rng.choice(FRAMES), rng.choice(ROWS)
        return start + row.join(column.join(one) for one in rows) + rng.choice(("", r"\\", r" \\ ")) + end

    return Drawn(write(entries), write(entries), write(changed))


def elements(rng: random.Random) -> Drawn:
    values = rng.sample(range(-20, 99), 3)
    frames = (
        r"\{%s\}",
        r"\lbrace %s\rbrace",
        r"\left\lbrace %s \right\rbrace",
        r"\left\{%s\right\}",
        r"\big\{%s\big\}",
    )
    orders = (values, rng.sample(values, 3), [values[0] + 1, *values[1:]])
    gold, same, other = (rng.choice(frames) % ", ".join(map(str, order)) for order in orders)
    return Drawn(gold, same, other) if values[0] + 1 not in values else elements(rng)


def blank(rng: random.Random) -> Drawn:
    gold = rng.choice(("%d", "-%d", "x+%d", r"\frac{1}{%d}", r"\sqrt{%d}", "(1,%d)")) % (number(rng) + 1)
    end = "".join(rng.choices(BLANKS, k=rng.randint(1, 2)))
    return Drawn(gold, gold + end, f"-({gold}){end}")


def dots(rng: random.Random) -> Drawn:
    first, last = rng.randint(1, 5), rng.randint(10, 99)
    forms = (r"\ldots", r"\dots", "...", "…", r"\dotsc", r"\cdots")
    gold, same = (f"{first}, {first + 1}, {rng.choice(forms)}, {last}" for _ in range(2))
    return Drawn(gold, same, rng.choice((f"{first}, {first + 1}, {last}", same + "1", f"{first}, {first + 1}")))


KINDS: dict[str, Callable[[random.Random], Drawn]] = {
    "words": word,
    "names": name,
    "products": product,
    "upright constants and fonts": formula,
    "Unicode characters": characters,
    "currencies": of_forms(CURRENCIES, bare=True),
    "degrees, radians, percentages": of_forms(ANGLES, bare=True),
    "counted things": of_forms(COUNTED, bare=True),
    "marks": mark,
    "outward brackets": interval,
    "matrices": matrix,
    "delimiters of sets": elements,
    "blanks": blank,
    "dots": dots,
}


def drawn_pairs(count: int, rng: random.Random, held_out: bool) -> Iterator[Pair]:
    """Yields pairs of each kind, half of them with another meaning.

    Args:
      count: Number of answers that are drawn of each kind.
      rng: Random state.
      held_out: Whether to yield the half of the pairs that was not used to develop the grader, or the other half.
    """
    for kind, draw in KINDS.items():
        for _ in range(count):
            gold, same, other = draw(rng)
            for answer in (same, other):
                if zlib.crc32(f"{gold} {answer}".encode()) % 2 == held_out:
                    yield Pair(kind, gold, answer, answer == same)
