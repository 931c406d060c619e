r"""What an answer means: its text without decoration, and the integer that it writes.

Only notation is taken off, and only where one reading exists. What is computed is a power of ten
(2\times 10^{22} is how large integers are written) and both sides of an equation between numbers.
"""

import re
import unicodedata
from fractions import Fraction
from typing import Literal, NamedTuple

from recipe.retool.symbolic.exact import NotRational, TooLarge, rational_value
from recipe.retool.symbolic.expressions import parse
from recipe.retool.symbolic.tree import Unreadable
from recipe.retool.units import CURRENCIES, without_unit

MAX_ANSWER_CHARS = 4_000
"""Longest answer that is read. Below the 4,300 digits from which Python's int() refuses, and far above any
real answer (the longest of DAPO-Math-17k has 23 digits)."""
_MAX_EXPONENT = 4_000
_UNWRAPS = 8
"""How many decorations around each other are taken off; more is not an answer but an attempt."""

_MINUS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"
_QUOTES = "'\"`\u2018\u2019\u201c\u201d"
# Not behind a backslash: "\\ " ends a row of a matrix.
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])|\s+")
_NOISE = re.compile(
    r"\\!|\\(?:left|right|displaystyle|textstyle|big|Big|bigg|limits|bf|rm)(?![A-Za-z])",
)
# Marks around an answer, taken off at its ends only: inside, 2**5 is no 25 and $12$$33$ no 1233.
# One at a time, since a repeated group that is searched for before an end takes quadratic time.
_OPENING = re.compile(r"\A(?:\\?\$|\\[(\[]|\*\*) ?")
_CLOSING = re.compile(r" ?(?:\\?\$|\\[)\]]|\*\*)\Z")
_CURRENCY = re.compile(r"(\\\$|\\pounds|[\u20ac\u00a3\u00a5])(?= ?[\d.-])")
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bb)|operatorname|boldsymbol|bm|mbox|boxed|fbox)\s*(?=\{)"
)
_LABEL = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|:)|答案\s*[是为:\uff1a]{1,2})\s*", re.IGNORECASE)
_CHOICE = re.compile(r"(?:\\(?:text(?:bf|rm)?|math(?:bf|rm)) ?\{)? ?\(([A-J])\) ?\}? ?[:.]? ?(\S.*)")
_CHOICE_ALONE = re.compile(r"\(?([A-Z])[).]?")


class Answer(NamedTuple):
    """An answer taken apart: what is compared, and what stood around it.

    Attributes:
        text: the answer itself; "" for one that is too long, which equals nothing.
        unit: its unit in one spelling ("cm^2", "degree"), or "".
        name: the name that it is given to ("x" of "x = 33"), or "".
        choice: the letter in front of it, as in "(C) 33", or "".
    """

    text: str
    unit: str = ""
    name: str = ""
    choice: str = ""


def normalise(answer: str) -> str:
    """An answer without decoration: dollars, spacing, quotes, text commands, degrees, units, "x =", full stop."""
    return read_answer(answer).text


def read_answer(answer: str, equation: Literal["value", "name", "keep"] = "value") -> Answer:
    """The parts of an answer as it was written.

    Args:
        answer: The inside of a box, the rest of an "Answer:" line, or a ground truth.
        equation: Of "left = right", take the right side ("value"), take it only where the left side is a bare name
            ("name", for ground truths: x^2 + y^2 = 1 is no 1), or take both ("keep").
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return Answer("")
    text = "".join(map(_plain, answer)).replace("{,}", ",")
    text = _SPACING.sub(" ", _NOISE.sub("", text)).strip()
    unit = name = choice = ""
    for _ in range(_UNWRAPS):
        before = text
        if currency := _CURRENCY.match(text):
            unit, text = unit or CURRENCIES[currency[1]], text[currency.end() :]
        text = _CLOSING.sub("", _OPENING.sub("", text))
        text = text.strip(_QUOTES + " ").rstrip(".\u3002 ")
        text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
        text, found = without_unit(text)
        unit = unit or found
        text = _unwrapped(text)
        if match := _CHOICE.fullmatch(text):
            choice, text = match.groups()
        if equation != "keep":
            text, found = _right_side(text, any_left=equation == "value")
            name = name or found
        if text == before:
            break
    match = _CHOICE_ALONE.fullmatch(text)
    return Answer(match[1] if match else text, unit, name, choice)


def _plain(char: str) -> str:
    """One character with the other scripts' digits, fullwidth forms and minus signs as ASCII; "" if invisible.

    Not NFKC: that would make 10² into 102.
    """
    if char.isascii():
        return char if char.isprintable() else (" " if char.isspace() else "")
    if char in _MINUS:
        return "-"
    if "\uff01" <= char <= "\uff5e":
        return chr(ord(char) - 0xFEE0)
    if unicodedata.category(char) == "Nd":
        return str(unicodedata.decimal(char))
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) in ("Cf", "Cc", "Cs") else char


def _unwrapped(text: str) -> str:
    """The inside of a group or text command that holds the whole answer."""
    wrapper = _WRAPPER.match(text)
    inner = text[wrapper.end() :] if wrapper else text
    if not (inner.startswith("{") and inner.endswith("}")):
        return text
    depth = 0
    for at, char in enumerate(inner):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return inner[1:-1] if at == len(inner) - 1 else text
    return text


_MAX_EQUALS = 6
_MAX_LEFT_CHARS = 60
_NO_EQUATION = re.compile(r"[<>!:~]=?|=\s*=|\\(?:le|leq|ge|geq|ne|neq|in|approx|equiv|sim|not)(?![A-Za-z])")
_NOT_A_LEFT_SIDE = re.compile(
    r"[,;\u4e00-\u9fff]|\\(?:text|quad|pmod|bmod|mod|pm)(?![a-z])|\bor\b|\band\b", re.IGNORECASE
)
# A left side that is a name and nothing else: x, a_{1}, f(x), \theta, \angle ABC, Area.
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?!frac|sqrt)[A-Za-z]+(?: ?[A-Z]{1,3})?|[A-Za-z]{4,20})"
    r"(?:_(?:\w|\{\w{1,9}\}))?(?:\([\w, -]{1,12}\))?"
)


def _right_side(text: str, *, any_left: bool) -> tuple[str, str]:
    """The value of "left = value", and the left side if it is a bare name.

    A left side with a value of its own must have the same: 2^5 + 1 = 33 is a 33, and 12 = 33 is nothing.
    """
    *lefts, value = (part.strip() for part in text.split("=", _MAX_EQUALS))
    if not lefts or not value or not all(lefts) or "=" in value or _NO_EQUATION.search(text):
        return text, ""
    name = lefts[0] if _NAME.fullmatch(lefts[0]) else ""
    if not any_left and (not name or len(lefts) > 1):
        return text, ""
    known = _rational(value)
    if known == 0 and not name:
        return text, ""  # x^2 + y - 1 = 0 is the normal form of an equation, not the number 0
    for left in lefts:
        if len(left) > _MAX_LEFT_CHARS or _NOT_A_LEFT_SIDE.search(left):
            return text, ""
        own = _rational(left)
        if (own is None and not re.search("[A-Za-z]", left)) or (own is not None and own != known):
            return text, ""
        if len(lefts) > 1 and not _is_readable(left):
            return text, ""
    return value, name


def _is_readable(text: str) -> bool:
    try:
        parse(text)
    except Unreadable:
        return False
    return True


def _rational(text: str) -> Fraction | None:
    try:
        return rational_value(parse(text))
    except (Unreadable, NotRational, TooLarge):
        return None


_PLAIN_INTEGER = re.compile(r"([+-]?) ?(\d+|[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?: \d{3})+)(?:\.0*)?", re.ASCII)
_SCIENTIFIC = re.compile(
    r"([+-]?\d{1,40})(?:\.(\d{1,40}))? ?(?:\\times|\\cdot|\u00d7|x|\*) ?10 ?\^ ?(?:\{ ?(\d{1,5}) ?\}|(\d))", re.ASCII
)


def parse_integer(answer: str) -> int | None:
    """The exact integer that a normalised answer writes, or None where it writes something else.

    Reads signs, leading zeros, thousands in groups of three (comma or space), a zero fraction, and
    a times ten to the b.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return None
    match = _PLAIN_INTEGER.fullmatch(answer)
    if match:
        return int(match[1] + match[2].replace(",", "").replace(" ", ""))
    match = _SCIENTIFIC.fullmatch(answer)
    if match:
        fraction, exponent = match[2] or "", int(match[3] or match[4])
        if len(fraction) <= exponent <= _MAX_EXPONENT:
            return int(match[1] + fraction) * 10 ** (exponent - len(fraction))
    return None
