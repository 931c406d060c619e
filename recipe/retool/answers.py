r"""What an answer means: its text without decoration, and the integer that it writes.

Only notation is taken off, and only where one reading exists. Nothing is computed but a power of ten
(2\times 10^{22} is how large integers are written), and nothing is evaluated.
"""

import re
import unicodedata

MAX_ANSWER_CHARS = 4_000
"""Longest answer that is read. Below the 4,300 digits from which Python's int() refuses, and far above any
real answer (the longest of DAPO-Math-17k has 23 digits)."""
_MAX_EXPONENT = 4_000
_UNWRAPS = 8
"""How many decorations around each other are taken off; more is not an answer but an attempt."""

_MINUS = "\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d"
_QUOTES = "'\"`\u2018\u2019\u201c\u201d"
_SPACING = re.compile(r"\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\(?:thin|med|thick)space(?![A-Za-z])|\s+")
_NOISE = re.compile(
    r"\\!|\\(?:left|right|displaystyle|textstyle|big|Big|bigg|limits)(?![A-Za-z])",
)
# Marks around an answer, taken off at its ends only: inside, 2**5 is no 25 and $12$$33$ no 1233.
# One at a time, since a repeated group that is searched for before an end takes quadratic time.
_OPENING = re.compile(r"\A(?:\\?\$|\\[(\[]|\*\*) ?")
_CLOSING = re.compile(r" ?(?:\\?\$|\\[)\]]|\*\*)\Z")
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|bb)|operatorname|boldsymbol|bm|mbox|boxed|fbox)\s*(?=\{)"
)
_DEGREE = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0|\\degree|degrees?)\s*\Z")
_UNIT = re.compile(
    r"\s*\\(?:text|textrm|textit|mathrm|mbox|operatorname)\s*\{([A-Za-z./\u00b0\u4e00-\u9fff ]{1,40})\}"
    r"(?:\s*\^\s*(?:[23]|\{[23]\}))?\s*\Z"
)
# fmt: off
_NO_UNITS = frozenset((
    "or", "and", "not", "mod", "pi", "i", "e", "no", "none", "to", "x",
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "base", "k", "b",
))
# fmt: on
_NO_UNIT_CHARS = frozenset("百千万亿或和与不非")
_LABEL = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is|:)|答案\s*[是为:\uff1a]{1,2})\s*", re.IGNORECASE)
_EQUATION = re.compile(r"([^=,;]{0,60}[^=,;<>!:~\s])\s*=\s*([^=]*)\Z")
_NOT_A_NAME = re.compile(r"\\(?:ne|not|text|quad|pmod|bmod|mod)(?![a-z])|\bor\b|\band\b|[\u4e00-\u9fff]", re.IGNORECASE)


def normalise(answer: str) -> str:
    """An answer without decoration: dollars, spacing, quotes, text commands, degrees, units, "x =", full stop.

    Too long an answer comes back empty, which equals nothing.
    """
    if len(answer) > MAX_ANSWER_CHARS:
        return ""
    text = "".join(map(_plain, answer)).replace("{,}", ",")
    text = _SPACING.sub(" ", _NOISE.sub("", text)).strip()
    for _ in range(_UNWRAPS):
        before = text
        text = _CLOSING.sub("", _OPENING.sub("", text))
        text = text.strip(_QUOTES + " ").rstrip(".\u3002 ")
        text = _LABEL.sub("", text, count=1) if _LABEL.match(text) else text
        text = _without_unit(_DEGREE.sub("", text))
        text = re.sub(r"\s*\\?%\Z", "", text)
        text = _unwrapped(text)
        text = _right_side(text)
        if text == before:
            break
    return text


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


def _without_unit(text: str) -> str:
    match = _UNIT.search(text)
    if not match or match.start() == 0:
        return text
    words = match[1].replace(".", " ").replace("/", " ").lower().split()
    if not words or _NO_UNITS.intersection(words) or _NO_UNIT_CHARS.intersection(match[1]):
        return text
    return text[: match.start()]


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


def _right_side(text: str) -> str:
    """The value of "name = value", where the left side is one expression and there is one equals sign."""
    match = _EQUATION.match(text)
    if not match or _NOT_A_NAME.search(match[1]) or not re.search("[A-Za-z]", match[1]):
        return text
    return match[2]


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
