r"""Tells words and names, such as Friday, ABC and IV, from products of variables.

math-verify reads letters without `\text{}` as factors, which commute, and i and e among them as constants.
"""

import re

from poly_epo_jax.tasks.normalization import SPACE

SPACES = SPACE + "{0,9}"
SEPARATORS = re.compile(r"([,;:=]|\\[{}]|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z]))")
ELEMENT = re.compile(
    rf"({SPACES}(?:\\left\s*)?[(\[]?)((?:\\text\s{{0,9}}\{{|[a-zA-Z}}.']|(?<=[a-zA-Z}}])-(?=[a-zA-Z\\])|{SPACE})+?)"
    rf"({SPACES}(?:\\right\s*)?[)\]]?{SPACES})"
)
WORDS = (
    "act add aft age ago aid ail aim air all alp amp ant any ape apt arc are ark arm art ash ask asp ate awe bad"
    " bag ban bar bat bay bed bee beg bet bid big bin bit boa bog bow box boy bud bug bun bur bus but bye cab can"
    " cap car cat cop cot cow cry cub cup dab dam day deb del den dew did dig dim din dip doe dog don dot dry dub"
    " due duo dye ear eat ebb eel egg ego eke elf elk ell elm emu end era eta eve ewe eye fan far fat few fig fin"
    " fir fit flu fog for fox fro fun gab gag gap gar gas gel get gin gob god gum gun gut guy had ham has hat hay"
    " hem hen her hid him hip his hit hog hop hot how hub hug hum hut ice ii iii ill ink inn ion ire its iv ivy jam"
    " jar jaw jet job jog joy jug kea keg key kid kin kit lad lag lam lap law lay lea led leg let lid lie lip lit"
    " lob log lot low mad man map mar mat may men met mid mix mob mom mop mud mug nab nag nap net new nib nil nip"
    " nit no nod nor not now nun nut oak oar oat odd ode off oil old on one opt orb ore our out owe owl own pad pal"
    " pan par pas pat paw pay pea peg pen per pet pie pig pin pit pod pop pot pro pub pun pup put rag ram ran rap"
    " rat raw ray red rev rib rid rig rim rip rob rod rot row rub rug rum run rut rye sac sad sag sap sat saw say"
    " sea see set sew she shy sin sip sir sit six ski sky sly sob son sop sow spa spy sub sue sum sun tab tad tag"
    " tam tan tap tar tax tea ten the tic tie tin tip tis toe ton too top tor tow toy try tub tug tun two urn use"
    " van vat vet vi via vii viii vim vow wan war was wax way web wed wen wet who why wig win wit woe won yam yap"
    " yaw yes yet yew you zip zoo"
)
SHORT_WORDS = frozenset(WORDS.split())


def with_names(gold: str, answer: str) -> tuple[str, str]:
    r"""Writes the names in two answers in lower case as `\text{}`.

    Letters in `\text{}` and words of at least four letters are names. Unless an answer is an equation, so are letters
    of which two are capitals. Words of `SHORT_WORDS` are names if both answers contain one. A name in one answer is a
    name in the other. All other letters are variables.
    """
    sides = [SEPARATORS.split(side) for side in (gold, answer)]
    names = {_letters(part) for side in sides for part in side if _is_name(part, "=" in side)}
    short = [{letters for part in side if (letters := _letters(part)) in SHORT_WORDS} for side in sides]
    names |= short[0] | short[1] if all(short) else set()
    first, second = ("".join(_named(part, names) for part in side) for side in sides)
    return first, second


def _letters(part: str) -> str:
    """Returns the letters of a part of an answer in lower case, or an empty string if it has other content."""
    match = ELEMENT.fullmatch(part)
    return "".join(re.findall("[a-z]", match[2].replace(r"\text", "").lower())) if match else ""


def _is_name(part: str, is_equation: bool) -> bool:
    is_capital = not is_equation and "-" not in part and len(re.findall("[A-Z]", part)) > 1
    return r"\text" in part or is_capital or re.search("[a-zA-Z]{4}", part) is not None


def _named(part: str, names: set[str]) -> str:
    letters, match = _letters(part), ELEMENT.fullmatch(part)
    if match is None or SEPARATORS.fullmatch(part):
        return part
    if letters in names:
        return rf"{match[1]}\text{{{letters}}}{match[3]}"
    # In another order, the parser could read a "d" as a differential.
    return match[1] + " ".join(sorted(letters)) + match[3] if match[2].isalpha() else part
