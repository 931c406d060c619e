r"""Units behind an answer: what is a unit, and which spellings are the same one.

A unit is taken off, since the question usually names it. Where both the answer and the known one have one, they must
agree: 5 km is no 5 m. Words that are in no list are units of their own ("12 apples"), words that could change the
number are none ("12 thousand", "33 squared", "12 or").
"""

import re

CURRENCIES = {"\\$": "dollar", "\\pounds": "pound", "\u20ac": "euro", "\u00a3": "pound", "\u00a5": "yuan"}

_DEGREE = re.compile(r" ?(?:\^ ?(?:\\circ|\{ ?\\circ ?\})|\u00b0|\\degree)(?: ?\\(?:text|mathrm) ?\{ ?[CF] ?\})?\Z")
_PERCENT = re.compile(r" ?\\?%\Z")
_IN_TEXT = re.compile(
    r" ?\\(?:text|textrm|textit|textbf|mathrm|mbox|operatorname) ?\{([A-Za-z./\u00b0\u4e00-\u9fff ]{1,40})\}"
    r"(?: ?(?:\^ ?)?(?:\{ ?)?([23]) ?\}?)?\Z"
)
_BARE = re.compile(
    r"([-+]?(?:[\d.,]*\d|\\[dt]?frac ?\{\d+\} ?\{\d+\})) ?"
    r"(?:([A-Za-z]{2,}(?:[ /]+[A-Za-z]{1,20}){0,4})(?: ?\^ ?\{?([23])\}?)?|([\u4e00-\u9fff]{1,4}))"
)
# fmt: off
_ABBREVIATIONS = frozenset((
    "cm", "mm", "km", "kg", "mg", "ft", "mi", "hr", "hrs", "min", "sec", "ml", "dm", "in", "mph", "kph", "rad", "deg",
    "usd", "rmb", "yd", "oz", "lb", "lbs",
))
_NO_UNITS = frozenset((
    "or", "and", "not", "mod", "modulo", "pi", "i", "e", "no", "none", "to", "x", "base", "k", "b", "with", "but",
    "hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "half", "halves", "third", "thirds",
    "quarter", "quarters", "fourth", "fourths", "fifth", "fifths", "tenth", "tenths", "hundredth", "hundredths",
    "thousandth", "thousandths", "squared", "cubed", "factorial", "plus", "minus", "times", "over", "less", "more",
    "than", "remainder", "about", "approximately", "roughly", "almost", "nearly", "wrong", "incorrect", "false", "if",
    "when", "for", "unless", "except", "maybe", "perhaps", "possibly", "divided", "multiplied", "choose", "sqrt",
    "sin", "cos", "tan", "log", "exp", "infty", "infinity", "binary", "hex", "octal", "most", "least", "between",
))
# fmt: on
_NO_UNIT_CHARS = frozenset("百千万亿或和与不非半倍加减乘除余")

_SPELLINGS = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "meter": "m", "metre": "m",
    "kilometer": "km", "kilometre": "km", "inch": "in", "foot": "ft", "feet": "ft", "mile": "mi", "yard": "yd",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "gram": "g", "kilogram": "kg", "pound": "lb",
    "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml", "usd": "dollar", "deg": "degree",
    "percentage": "percent", "radian": "rad", "square": "^2", "sq": "^2", "cubic": "^3", "per": "/",
    "mph": "mi/h", "kph": "km/h", "度": "degree", "米": "m", "厘米": "cm", "千米": "km", "公里": "km", "美元": "dollar",
    "元": "yuan", "rmb": "yuan", "小时": "h", "分钟": "min", "秒": "s", "平方米": "m^2", "平方厘米": "cm^2",
    "立方米": "m^3", "立方厘米": "cm^3",
}  # fmt: skip


def without_unit(text: str) -> tuple[str, str]:
    """An answer without the unit at its end, and the unit in one spelling; the answer as it is and "" without one."""
    for pattern, unit in ((_DEGREE, "degree"), (_PERCENT, "percent")):
        match = pattern.search(text)
        if match and match.start():
            return text[: match.start()], unit
    match = _IN_TEXT.search(text)
    if match and match.start() and (unit := _one_spelling(match[1], match[2])):
        return text[: match.start()], unit
    match = _BARE.fullmatch(text)
    if match and _is_bare_unit(match[2] or match[4]) and (unit := _one_spelling(match[2] or match[4], match[3])):
        return match[1], unit
    return text, ""


def _is_bare_unit(words: str) -> bool:
    first = re.split("[ /]", words)[0]
    return not words.isascii() or len(first) >= 4 or first.lower() in _ABBREVIATIONS  # "3 ab" is a product


def _one_spelling(words: str, power: str | None) -> str:
    """The unit in one spelling, or "" where the words are no unit."""
    parts = words.replace(".", " ").replace("/", " / ").lower().split()
    if not parts or _NO_UNITS.intersection(parts) or _NO_UNIT_CHARS.intersection(words):
        return ""
    spelled = [_SPELLINGS.get(part) or _SPELLINGS.get(_singular(part)) or _singular(part) for part in parts]
    names = " ".join(part for part in spelled if not part.startswith("^")).replace(" / ", "/")
    return names + "".join(part for part in spelled if part.startswith("^")) + (f"^{power}" if power else "")


def _singular(word: str) -> str:
    return word.removesuffix("es") if word.endswith(("ches", "shes", "xes")) else word.removesuffix("s")
