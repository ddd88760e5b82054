r"""Rewrites an answer so that each meaning has one spelling in LaTeX, which math-verify reads as intended."""

import re
import unicodedata

from poly_epo_jax.tasks.answers import visible

CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u2043\u2796\u02d7", "-"),
        **dict.fromkeys("\u2032\u2019\u00b4\u02b9", "'"),
        **dict.fromkeys("\u00b0\u00ba\u02da", r"\degree "),
        **dict.fromkeys("\u00b7\u22c5\u2219\u2022", r"\cdot "),
        **dict.fromkeys("\u2044\u2215", "/"),
        **dict.fromkeys("≤⩽≦", r"\leq "),
        **dict.fromkeys("≥⩾≧", r"\geq "),
        **{
            letter: rf"\mathbb{{{unicodedata.normalize('NFKC', letter)}}}"
            for letter in "\u2102\u2115\u211a\u211d\u2124"
        },
        "~": " ",
        "\N{DOUBLE PRIME}": "''",
        "℃": r"\degree C",
        "℉": r"\degree F",
        "\N{RING OPERATOR}": r"\circ ",
        "\N{ASTERISK OPERATOR}": "*",
        "\N{MULTIPLICATION SIGN}": r"\times ",
        "÷": r"\div ",
        "π": r"\pi ",
        "∞": r"\infty ",
        "√": r"\sqrt ",
        "。": ".",
        "±": r"\pm ",
        "≈": r"\approx ",
        "≠": r"\neq ",
        "∅": r"\emptyset ",
        "∈": r"\in ",
        "\N{UNION}": r"\cup ",
        "\N{INTERSECTION}": r"\cap ",
        "→": r"\to ",
        "∠": r"\angle ",
        "…": r"\ldots ",
        "⋯": r"\cdots ",
    }
)
"""LaTeX commands or ASCII characters, by the Unicode symbol that is often typed in their place.

A space replaces `~`, the non-breaking space of LaTeX. Unicode's compatibility form replaces other symbols.
"""
RAISED = re.compile(
    r"(?P<frac>[¼-¾⅐-⅞]|[⁰¹²³⁴-⁹]+\u2044[₀-₉]+)|(?P<up>[⁰ⁱ⁴-ⁿ¹²³]+)|(?P<down>[₀-ₜ]+)|√\s*(?P<sqrt>\d+|[a-z](?![a-z]))"
    r"|√\s*\((?P<root>[^()]*)\)|∛\s*(?P<cbrt>\d+|[a-z](?![a-z]))"
)
LATEX_OF_RAISED = {
    **{"frac": r"\frac{%s}", "up": "^{%s}", "down": "_{%s}", "sqrt": r"\sqrt{%s}", "root": r"\sqrt{%s}"},
    "cbrt": r"\sqrt[3]{%s}",
}
"""LaTeX of the characters of each group of `RAISED`, whose form affects their meaning."""

CURRENCIES = {
    **{r"\$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "¢": "cent", "₩": "won", "₽": "ruble"},
    **{"₪": "shekel", "₫": "dong", "₱": "peso", "₺": "lira", "฿": "baht", "₦": "naira", "₴": "hryvnia"},
}
NAMES_OF_CURRENCIES = {
    **{"euro": "€", "pounds": "£", "yen": "¥", "cent": "¢", "textdollar": r"\$"},
    **{"USD": r"\$", "EUR": "€", "GBP": "£", "INR": "₹"},  # before a number
}

SPACE = r"(?:\s|\\[ ,;:!>])"
BLANK = rf"(?:{SPACE}|\\(?:q?quad|enspace|hfill|par)(?![a-zA-Z])|\\hspace\*?\{{[^{{}}]*\}})"
FONT = r"\\(?:boldsymbol|bm|pmb|math(?:bf|it|sf|tt|normal|cal|scr|frak))(?![a-zA-Z])"
CURRENCY = f"({'|'.join(map(re.escape, CURRENCIES))})"
AMOUNT = r"\\frac\{\d+\}\{\d+\}|\d[\d.,]*"
BOUND = r"((?:[^][,;\\]|\\(?!c[au]p|setminus|right(?![a-z])|[{}]))+)"
REPEATED = r"\\dot\s*(?:(\d)|\{(\d)\})"
NOT_IN_WORD = r"(?<![a-zA-Z\\])%s(?![a-zA-Z])"


def _split_text(match: re.Match[str]) -> str:
    r"""Moves commas and conjunctions out of `\text{}`, where they separate answers as they do elsewhere."""
    parts = re.split(r"([,;]|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))", match[1])
    parts[::2] = (rf"\text{{{part}}}" if part.strip() else "" for part in parts[::2])
    return f" {' '.join(parts)} " if len(parts) > 1 else match[0]


def _primed(match: re.Match[str]) -> str:
    """Makes primes part of a name. math-verify removes quotation marks."""
    text, name, index, primes, other = match.groups()
    return text or f"{name}_{{{(index or other or '').strip('{}')}{'prime' * len(primes)}}}"


def _interval(match: re.Match[str]) -> str:
    """Returns an interval with parentheses for brackets that point outward."""
    left, start, end, right = match.groups()
    is_usual = (left, right) == ("[", "]")
    return match[0] if is_usual else f"{'[('[left == ']']}{start},{end}{'])'[right == '[']}"


def _currency(match: re.Match[str]) -> str:
    before, sign, number, after = match.groups()
    return rf"{sign or ''}{number or ''}\text{{{CURRENCIES[before or after]}}}"


def _mixed_number(match: re.Match[str]) -> str:
    whole, numerator, denominator = (int(digits) for digits in match.groups() if digits)
    if numerator >= denominator:
        return rf"{whole} \cdot \frac{{{numerator}}}{{{denominator}}}"
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    numerator = int(whole + fixed + period) - int(whole + fixed)
    return rf"\frac{{{numerator}}}{{{10 ** len(fixed) * (10 ** len(period) - 1)}}}"


def _angle(match: re.Match[str]) -> str:
    r"""Returns an angle such as `\angle ABC`, which equals `\angle CBA` but is not a product of letters."""
    sign, first, vertex, last = match.groups()
    return rf"{sign}\text{{{''.join((min(first, last), vertex, max(first, last)))}}}"


SPELLINGS = tuple(
    (re.compile(pattern, re.ASCII), replacement)
    for pattern, replacement in (
        # Mathematics mode, sizes, colors, delimiters, rows of matrices, and quotation marks around an answer.
        (r"(?<!\\)\\[][()]|(?<!\\)\$|(?<![a-zA-Z\\\]}^_])\{\}", " "),
        (r"\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|normalsize|[lL]arge|LARGE|[hH]uge|small)(?![a-zA-Z])", " "),
        (r"\\(?:text)?color\s*\{[\w!]*\}|\\math(?:open|close)(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\lbrack(?![a-zA-Z])", "["),
        (r"\\rbrack(?![a-zA-Z])", "]"),
        (r"\\(?:[lr]vert|mid)(?![a-zA-Z])", "|"),
        (r"(?:\\\\|\\(?:cr|(?:tabular)?newline)(?![a-zA-Z]))\s*\*?(?:\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\])?", r"\\\\ "),
        (r"\\hline(?![a-zA-Z])|\\\\\s*(?=\\end)", ""),
        (r"(?<![a-zA-Z\\])d\s*(?=\\end)", "{d}"),
        (r"(\\begin\{array\})\s*\{[clr|\s]*\}", r"\1{c}"),
        (r"\\(begin|end)\{([pbBvV]?)(?:small)?matrix\*?\}(?:\[[lcr]\])?", r"\\\1{\2matrix}"),
        (r"^\s*[\"'`]+(.*?)[\"']+\s*$", r"\1"),
        # Fonts. A font group of at least two letters is a word and becomes `\text`. Others remain mathematics.
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))|\\([NQRZC])(?![a-zA-Z])", r"\\mathbb{\1\2\3}"),
        (r"\\(?:text(?:rm|bf|it|sf|tt|sc|sl|up|md|normal)|mathrm|[mh]box|emph)(?![a-zA-Z])", r"\\text"),
        (
            r"\\(?:text|operatorname\*?)\s*\{\s*((?:arc)?(?:sin|cos|tan|cot|csc)h?|log|ln|exp|lcm|gcd|det)\s*\}",
            r"\\\1 ",
        ),
        (r"\\operatorname\*?\s*(?=\{[a-zA-Z\s]{4,}\})", r"\\text"),
        (r"\{\s*\\rm(?![a-zA-Z])\s*(?=[a-zA-Z\s]+\})", r"\\text{"),
        (rf"{FONT}\s*(?=\{{[a-zA-Z\s]{{2,}}\}})", r"\\text"),
        (rf"(?:{FONT}\s*\{{|\{{\s*\\(?:bf|it|sf|tt)(?![a-zA-Z]))\s*([a-zA-Z]|\\[a-zA-Z]+)\s*\}}", r" \1 "),
        (rf"{FONT}|\\(?:bf|it|rm|sf|tt)(?![a-zA-Z])", " "),
        (r"^\s*\{([^{}\\]*)\}\s*$", r"\1"),
        (r"\\text\s+([a-zA-Z])(?![a-zA-Z])", r"\\text{\1}"),
        (r"\\text\s*(\d)", r" \1"),
        (r"\\(?:text|operatorname)\s*\{\s*([edT])\s*\}", r" \1"),
        # math-verify only recognizes the imaginary unit between word boundaries.
        (r"\\(?:text|operatorname)\s*\{\s*i\s*\}|(?<=\d)i(?![a-zA-Z])", " i "),
        (r"\\wide(?=hat|tilde)", r"\\"),
        (r"(\\(?:hat|bar|vec|tilde|d?dot|overline))(?:\s+([a-zA-Z])(?![a-zA-Z])|\s*(\\[a-z]+)(?!\s*\{))", r"\1{\2\3}"),
        # Words, units and currencies.
        (r"(?<=[a-zA-Z]{3})'(?=[a-zA-Z])", ""),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset"),
        (rf"\\text\s*\{{\s*([-+]?)\s*(?i:infinity)\s*\}}|{NOT_IN_WORD % '(?i:infinity)'}", r"\1\\infty "),
        (rf"(?<!\s)\s*(?:\\text\s*\{{\s*%s\s*\}}|{NOT_IN_WORD}|\\?%%)" % (("(?:per ?cent(?:age)?|pct)",) * 2), r"\\%"),
        (r"(\\text\s*\{\s*)\\degrees?\s*", r"\1deg "),
        (r"\\text\s*\{([^{}]*?)\s*\^\s*\{?(-?\d)\}?\s*\}", r"\\text{\1}^\2"),
        (r"\\text\s*\{([^{}\d\\]*)\}", _split_text),
        # Angles. Degrees are a unit, except in the argument of a function.
        (
            r"\^?\s*\\(?:text)?degrees?(?![a-zA-Z])|\^\s*\{\s*\\(?:circ|degree)\s*\}",
            r"^\\circ ",
        ),
        (r"(?<=\d)\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"(?<=\d)\s*\^\s*(?:o(?![a-zA-Z])|\{\s*o\s*\}|\{?\s*\\text\s*\{\s*o\s*\}(?:\s*\})?)", r"^\\circ "),
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)\s{0,9}(?:\^\s{0,9}\{?\d\}?\s{0,9})?(?:\\left\s{0,9})?[({]?\s{0,9})"
            r"(\d{1,99}(?:\.\d{1,99})?)\s{0,9}\^\s{0,9}\\circ(?![a-zA-Z])",
            r"\1\\frac{\2 \\pi}{180}",
        ),
        (r"(?:(?<=[\d)}])|(?<=\\pi))\s*\^\s*\\circ(?![a-zA-Z])\s*", r"\\text{ deg}"),
        (r"\\text\{ deg\}(?:\\text\s*\{\s*([CFK])\s*\}|([CF])(?![a-zA-Z]))", r"\\text{ \1\2}"),
        # Marks that math-verify removes.
        (r"(?<![a-zA-Z\\])([A-Z])\s*\^\s*\\circ(?![a-zA-Z])", r"\1_{circ}"),
        (r"\\prime(?![a-zA-Z])\s*", "'"),
        (r"\^\s*(?:\{\s*('+)\s*\}|('))", r"\1\2"),
        (r"(\\text\s*\{[^{}]*\})|([a-zA-Z]|\\[a-zA-Z]+)(?:_(\w|\{\w*\}))?('+)(?:_(\w|\{\w*\}))?", _primed),
        (r"(?<=\d)''", r"\\text{ in}"),
        (r"(?<=\d)'", r"\\text{ ft}"),
        (r"(?<=[)\]}])'", r"^{\\prime}"),
        (r"\^\s*(?:T|(?:\\top|\\intercal)(?![a-zA-Z])|\{\s*(?:T|\\top|\\intercal|\{\s*T\s*\})\s*\})", "^T "),
        (r"(?<!matrix\})\^T", "^{{T}}"),
        (r"\\(?:[cl]?dots[bcimo]?)(?![a-zA-Z])|\.{3,}", r"\\text{dots}"),
        (r"(\\angle\s*)([A-Z])([A-Z])([A-Z])(?![a-zA-Z])", _angle),
        # Intervals and numbers.
        (rf"(?:\\left\s*)?(?<!\\sqrt)([][])(?!\{{){BOUND}[,;]{BOUND}(?:\\right\s*)?(?<!\\sqrt)([][])", _interval),
        (r"(\\(?:[dtc]?frac|sqrt|binom))\s+(?=\d)", r"\1"),
        (
            rf"(?<![\w.,^\\])[1-9]\d{{0,2}}(?:(?:{SPACE}{{1,9}}|\{{,\}})\d{{3}})+(?!\d)",
            lambda match: re.sub(rf"{SPACE}|[{{,}}]", "", match[0]),
        ),
        (
            rf"(?<![\w.,^\\}}])(\d{{1,99}}){SPACE}{{0,9}}(?:\\[dtc]?frac\s{{0,9}}(?:(\d)\s{{0,9}}(\d)|"
            rf"\{{(\d{{1,99}})\}}\s{{0,9}}\{{(\d{{1,99}})\}})|(?<!\d)(\d{{1,99}})/(\d{{1,99}})(?![\d.]))",
            _mixed_number,
        ),
        (
            r"(?<![\w.\\])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?!\w)",
            lambda match: rf"{match[1]} \times 10^{{{match[2].lstrip('+')}}}",
        ),
        (
            rf"(?<=[\d.]){REPEATED}(?:(\d{{0,99}}){REPEATED})?",
            lambda match: rf"\overline{{{''.join(digits or '' for digits in match.groups())}}}",
        ),
        (r"(?<![\w.])(\d{1,99})\.(\d{0,99})\\overline\{(\d{1,99})\}", _repeating_decimal),
        (r"(?<=\d)\.(?=/)", ""),
        (
            rf"(?:\\|(?<![a-zA-Z\\])(?=[A-Z]{{3}}\s*\d))({'|'.join(NAMES_OF_CURRENCIES)})(?![a-zA-Z])(?:\{{([\d.,]*)\}})?",
            lambda match: NAMES_OF_CURRENCIES[match[1]] + (match[2] or ""),
        ),
        (rf"\\text\s*\{{\s*{CURRENCY}\s*\}}", r"\1"),
        (rf"(?:US)?{CURRENCY}\s*(-?)({AMOUNT})|(?<=[\d}}]){SPACE}{{0,9}}{CURRENCY}", _currency),
        (rf"^(?:{BLANK}|=)+|(?<![\s,;\\])(?<!\\[:!>])(?:{BLANK}|\\\\|(?<!\\right)\.|\\text\{{\.\}}|[,;])+$", ""),
    )
)
"""Patterns and replacements, in the order of their application."""
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


def normalize_latex(answer: str) -> str:
    r"""Normalizes an answer so that math-verify parses it as intended, see `docs/reference/grading.md`.

    Replaces Unicode symbols, then applies `SPELLINGS`. A plus-minus sign (`\frac{1 \pm 5}{2}`) becomes two numbers.
    """
    answer = RAISED.sub(_raised, visible(answer)).translate(CHARACTERS)
    answer = unicodedata.normalize("NFKC", answer).translate(CHARACTERS)
    for pattern, replacement in SPELLINGS:
        answer = pattern.sub(replacement, answer)
    if PLUS_MINUS.search(answer) and "," not in answer:
        answer = ", ".join(PLUS_MINUS.sub(sign, answer) for sign in "+-")
    return answer


def _raised(match: re.Match[str]) -> str:
    group = match.lastgroup or ""
    return LATEX_OF_RAISED[group] % unicodedata.normalize("NFKC", match[group]).replace("\u2044", "}{")
