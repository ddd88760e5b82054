"""Tests the grader on a battery of answer pairs, and each rule that overrules math-verify in both directions."""

import collections
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from answer_pairs import Pair, battery
from drawn_answers import drawn_pairs
from sympy import Expr

from poly_epo_jax.judges.answer import first_equal_index
from poly_epo_jax.tasks import answer_rules, verify_worker
from poly_epo_jax.tasks.answer_rules import canonical_unit, comparable, without_units
from poly_epo_jax.tasks.answers import visible
from poly_epo_jax.tasks.normalization import normalize_latex
from poly_epo_jax.tasks.verifier import Outcome, Verifier

DOCUMENT = Path(__file__).parents[2] / "docs/reference/grading.md"


@pytest.fixture(scope="module")
def verifier():
    pool = Verifier(2)
    yield pool
    pool.close()


def in_this_process(gold: str, answer: str) -> bool:
    """Compares short answers as the verifier does, without its time limit."""
    pair = comparable(normalize_latex(gold), normalize_latex(answer))
    return pair is not None and (pair[0] == pair[1] or verify_worker.same(*pair))


def test_the_battery_has_both_directions():
    pairs = battery()
    assert len(pairs) == len(set(pairs)) >= 300
    directions = collections.defaultdict(set)
    for pair in pairs:
        directions[pair.kind].add(pair.is_equal)
    assert {kind for kind, both in directions.items() if both != {True, False}} == set()


@pytest.mark.slow
def test_every_pair_of_the_battery(verifier: Verifier):
    def graded(pair: Pair) -> bool:
        return verifier.compare(pair.gold, pair.answer) is Outcome.RIGHT

    pairs = battery()
    with ThreadPoolExecutor(4) as executor:
        outcomes = list(executor.map(graded, pairs))
    assert [pair for pair, is_equal in zip(pairs, outcomes, strict=True) if is_equal != pair.is_equal] == []
    assert verifier.take_counts()[Outcome.CRASHED] == 0


@pytest.mark.slow
def test_held_out_notations(verifier: Verifier):
    """No wrong answer is accepted, and at most 1% of the correct ones are rejected."""
    pairs = list(drawn_pairs(60, random.Random(0), held_out=True))
    with ThreadPoolExecutor(4) as executor:
        equal = list(executor.map(lambda pair: verifier.compare(pair.gold, pair.answer) is Outcome.RIGHT, pairs))
    wrong = [pair for pair, is_equal in zip(pairs, equal, strict=True) if is_equal is not pair.is_equal]
    assert [pair for pair in wrong if not pair.is_equal] == []
    assert len(wrong) <= 0.01 * sum(pair.is_equal for pair in pairs), wrong


@pytest.mark.parametrize(
    ("gold", "answer", "is_equal"),
    [
        (r"\text{no solution}", "No solution", True),
        ("xyz", "zxy", True),
        ("IV", "VI", False),
        ("listen", "silent", False),
        ("tea", "eat", False),
        (r"7\text{ cups}", "7", True),
        (r"1-\frac1e", r"1-\frac{1}{\mathrm{e}}", True),
        ("A^T", r"A^{\mathsf{T}}", True),
        ("A", "A^T", False),
        ("f", "f'", False),
        (r"(2,\infty)", r"\left]2;+\infty\right[", True),
        (r"5\%", r"5^\circ", False),
        (r"90^\circ", r"90\text{ rad}", False),
        ("-42", "\N{EN DASH}\N{MATHEMATICAL BOLD DIGIT FOUR}\N{MATHEMATICAL BOLD DIGIT TWO}", True),
        (r"\frac{3}{2}", "1½", True),
        (r"5\text{ euros}", "€5", True),
        (r"20\text{ euros}", r"\euro{20}", True),
        (r"\$20", "USD 20", True),
        (r"\$20", "EUR 20", False),
        (r"5\sqrt[3]{2}", "5∛2", True),
        ("7", r"\mathrm 7", True),
        (r"\frac{1}{e}", r"\operatorname{e}^{-1}", True),
        (r"45^\circ", r"45{}^\circ", True),
        ("A", r"A^\circ", False),
        (r"(0,\infty)", r"\left ] 0 , \infty \right [", True),
        ("(0,1)", r"\mathopen]0,1\mathclose[", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix*}[r]1&2\newline 3&4\end{pmatrix*}", True),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix*}[r]1&2\\3&4\end{vmatrix*}", False),
        (r"\{x | x>0\}", r"\{x \mid x>0\}", True),
        *(("9", f"9{end}", True) for end in (r"\enspace", r"\hfill", r"\par", "{}", r"\text{.}", "。")),
    ],
)
def test_notations(gold: str, answer: str, is_equal: bool):
    assert in_this_process(gold, answer) is is_equal


LETTERS = {
    "numerals": "IX/XI XIV/XVI XIX/XXI LXI/XLI MCM/MMC CCX/CXC LI/IL CD/DC DM/MD LV/VL XC/CX XL/LX VII/IIV XLI/XIL"
    " CLX/CXL MDC/MCD DX/XD MI/IM CI/IC DIX/XID",
    "points": "ABD/ADB PQR/QPR PQ/QP ABCDE/EDCBA BCA/ACB DCBA/ABCD AC/CA ADC/ACD XYZ/ZYX KLM/MLK ABDC/ABCD BADC/ABCD"
    " CBA/BCA RSQ/QRS EFG/GFE AEB/BEA TSR/RST OAB/OBA MNP/NMP ACE/CAE",
    "words": "cat/act arc/car stop/post state/taste least/steal cheap/peach brag/grab evil/vile team/meat lemon/melon"
    " race/care tar/rat pat/tap dusty/study save/vase inch/chin file/life raw/war pit/tip seat/east",
    "products": "ab/ba uv/vu rst/tsr abd/bda pq/qp acd/dca de/ed ae/ea ei/ie abe/bea 3xz/3zx 2ab/2ba 5pqr/5rqp mnk/knm"
    " tuv/vtu bcd/dcb ghj/jhg ws/sw wxy/xyw rh/hr",
}
"""20 pairs of letters in another order for each kind. Only those of products are equal."""


@pytest.mark.parametrize("kind", LETTERS)
def test_only_letters_of_products_commute(kind: str):
    pairs = [pair.split("/") for pair in LETTERS[kind].split()]
    assert len(pairs) == 20
    for first, second in pairs:
        assert in_this_process(first, second) is in_this_process(second, first) is (kind == "products"), (first, second)


RULES = {
    "ambiguous": (("27", "9(3)"), ("27", "26 1")),
    "approximation": (("27", "27"), ("27", r"x \approx 27")),
    "base": (("27_8", "27_{(8)}"), ("27_8", "27_{10}")),
    "date or time": ((r"\text{4:10 p.m.}", r"4:10 \text{ p.m.}"), ("2:30", "1:15")),
    "unit": ((r"5\text{ cm}", r"5 \text{ centimeters}"), (r"5\text{ cm}", r"5 \text{ m}")),
    "another value": (("10^{-19}", r"\frac{1}{10^{19}}"), ("10^{-19}", "10^{-30}")),
    "false equation": (("27", "20 + 7 = 27"), ("27", "26 = 27")),
    "condition": (("55", "P(4)=55"), ("4", "x^2=4")),
    "another function": (("f(2)=3", "f(2) = 3"), ("f(2)=3", "f'(2)=3")),
    "exchanged names": (("a=1, b=2", "1, 2"), ("a=1, b=2", "2, 1")),
}
"""A correct and an incorrect pair of each rule. Without the rule, the incorrect pair would be accepted."""


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_necessary_and_not_too_strict(name: str, monkeypatch: pytest.MonkeyPatch):
    correct, incorrect = RULES[name]
    assert in_this_process(*correct)
    assert not in_this_process(*incorrect)
    for table in (answer_rules.VETOES, verify_worker.VETOES):
        if name in table:
            monkeypatch.delitem(table, name)
    assert in_this_process(*incorrect)


def test_the_table_of_rules_is_documented():
    assert set(RULES) == {*answer_rules.VETOES, *verify_worker.VETOES}
    text = DOCUMENT.read_text()
    reasons = [reason for reason, _ in (*answer_rules.VETOES.values(), *verify_worker.VETOES.values())]
    assert [one for one in (*RULES, *reasons) if one not in text] == []


@pytest.mark.parametrize(
    ("text", "number", "units"),
    [
        (r"5\text{ cm}", "5", {"cm"}),
        (r"5 \text{m} / \text{s}^{2}", "5", {"m/s^2"}),
        (r"10\text{ square feet}", "10", {"ft^2"}),
        (r"3\text{ cm}, 4\text{ cm}", "3 , 4", {"cm"}),
        ("5 apples", "5", {"apple"}),
        ("5 kg", "5", {"kg"}),
        ("2s", "2s", set()),
        ("5m", "5m", set()),
        (r"5\text{ million}", r"5\text{ million}", set()),
        (r"5\text{ or }6", r"5\text{ or }6", set()),
        (r"x\text{ cm}", r"x\text{ cm}", set()),
        (r"\text{cm}", r"\text{cm}", set()),
        (r"5\pi", r"5\pi", set()),
    ],
)
def test_only_known_units_after_numbers_are_removed(text: str, number: str, units: set[str]):
    assert without_units(text) == (number, units)


def test_one_letter_is_a_unit_only_where_the_gold_answer_has_a_unit():
    assert without_units("7 s", one_letter=True) == ("7", {"s"})
    assert comparable(r"7\text{ s}", "7 s") == ("7", "7")
    assert comparable(r"7\text{ s}", "7 m") is comparable(r"7\text{ cm}", "7 m") is None
    assert comparable("7", "7 s") == ("7", "7 s")


def test_units_have_one_canonical_form():
    assert canonical_unit(r"\text{ Centimetres}") == "cm"
    assert canonical_unit("feet per second") == canonical_unit("ft/s") == "ft/s"
    assert canonical_unit("dozen") is None


def test_visible_text():
    for character in "\u200b\ufeff\u200e\u2060\u00ad\u200d":
        assert visible(f"1{character}2") == "12"
    assert visible("1\u00a02") == visible("1\u30002") == "1 2"
    assert visible("\u202e12") == "\u202e12"


@pytest.mark.parametrize(
    "text", [" ", "\\,", "1 ", "a", "1a", "\\text{", "5\\text{ cm}", "jan ", "1/", "\\dot1", "^", "{"]
)
def test_rules_take_linear_time(text: str):
    start = time.thread_time()
    long = ("6" + text * 2_000)[:2_000]
    comparable(normalize_latex(long), normalize_latex(long + "1"))
    assert time.thread_time() - start < 1, "quadratic time would be minutes"


def test_identical_answers_are_equal_without_algebra(monkeypatch: pytest.MonkeyPatch):
    pool = Verifier(1)
    monkeypatch.setattr(pool, "call", lambda *_: pytest.fail("a worker would compare the answers"))
    for answer in ("9^{9^{9}}", r"(2,\infty)", "5?", "26 = 27"):
        assert pool.compare(answer, f" {answer}.") is Outcome.RIGHT
    assert pool.compare("", "") is pool.compare("\u200b", "\u200b") is Outcome.WRONG
    assert pool.take_counts()[Outcome.RIGHT] == 4


def votes(kind: str) -> list[str]:
    """Returns 32 answers of which 24 are different."""
    if kind == "polynomials":
        forms = [(f"(x+{i})^3", f"x^3+{3 * i}x^2+{3 * i * i}x+{i**3}") for i in range(1, 25)]
    else:
        roots = [(i, rf"\sqrt{{{i}}}") for i in range(2, 26)]
        forms = [(rf"\frac{{{i}}}{{{root}+1}}", rf"\frac{{{i}({root}-1)}}{{{i - 1}}}") for i, root in roots]
    return [first for first, _ in forms] + [second for _, second in forms[:8]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["polynomials", "surds"])
def test_a_vote_parses_each_expression_once_and_proves_only_equalities(kind: str, monkeypatch: pytest.MonkeyPatch):
    """Parsing and SymPy's proofs take nearly all of the time. This vote compares up to 468 pairs."""
    counts: collections.Counter[str] = collections.Counter()
    parse, verify = verify_worker.parse, verify_worker.verify

    def counted_parse(*args: Any, **options: Any) -> list[Any]:
        counts["parse"] += 1
        return parse(*args, **options)

    def counted_verify(gold: Any, answer: Any, **options: Any) -> bool:
        counts["verify"] += isinstance(gold, Expr) and isinstance(answer, Expr)  # others are compared as strings
        return verify(gold, answer, **options)

    monkeypatch.setattr(verify_worker, "parse", counted_parse)
    monkeypatch.setattr(verify_worker, "verify", counted_verify)
    verify_worker.parsed.cache_clear()
    answers = votes(kind)
    firsts = first_equal_index(answers, lambda i, j: in_this_process(answers[i], answers[j]))
    assert firsts == [*range(24), *range(8)]
    assert counts == {"parse": 32, "verify": 8}
