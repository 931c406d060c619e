r"""Is the final answer of a text the known one? Nothing of the text is ever run as code.

The answer is the last complete box (`\boxed{}`, `\fbox{}`), or without any box the last "Answer:" line.
It is compared as an exact integer. A wrong "correct" teaches the model to hedge and is worse than a missed
one, so whatever has two readings is wrong: a text cut inside its last box, two different boxes side by
side, a box with two numbers. A box beats an "Answer:" line, since the box is what the prompt asks for.

Two steps, so that one can be had without the other:
1. `grade(text, truth)`: pure, microseconds, no other process. Knows the notations of one integer that models write
   (`answers.py`, `units.py`), and any other answer whose text is the known one once both are normalised.
2. `grade(text, truth, fallback=same_value)`: also equal values in another form (2^{10}, \frac{6}{2}, intervals, sets,
   matrices), by exact arithmetic and then by sympy in a process with limits (`symbolic/`).

Not covered: what restates a question (sums, integrals, limits, remainders left to be computed), rounded values
(0.33 is no 1/3), and words in other words.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

from recipe.retool.answers import MAX_ANSWER_CHARS, Answer, normalise, parse_integer, read_answer
from recipe.retool.own_text import own_final_text
from recipe.retool.symbolic.tree import Comparison

Reason = Literal[
    "equal",
    "different",
    "needs_symbolic",
    "unreadable",
    "undecided",
    "unevaluated",
    "no_answer",
    "truncated_box",
    "several_answers",
    "too_long",
    "no_ground_truth",
    "no_text",
]
Fallback = Callable[[str, str], Comparison]
"""Compares two normalised answers by value; called only where integers and equal texts cannot decide."""

_WINDOW_CHARS = 20_000
"""How far before the last box an enclosing one is looked for, and before the end an "Answer:" line."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What grading one text gave."""

    correct: bool
    reason: Reason
    extracted: str | None
    """The answer as written in the text, or None where none was found."""


def grade(text: str | bytes | None, ground_truth: object, *, fallback: Fallback | None = None) -> Verdict:
    """The verdict on the final answer of a text. Never raises, whatever the text is.

    Args:
        text: What the model wrote. Thoughts, tool calls and tool results in it are left out first.
        ground_truth: The known answer; an int is taken as its digits, None and blank match nothing.
        fallback: Symbolic comparison for answers that are not both integers; None leaves them wrong.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not isinstance(text, str) or not text or text.isspace():
        return Verdict(False, "no_text", None)
    truth = _truth(ground_truth)
    if not truth.text:
        return Verdict(False, "no_ground_truth", None)
    # A program that reads "\b" as an escape leaves a backspace of "\boxed".
    reason, extracted = find_answer(own_final_text(text).replace("\boxed", "\\boxed"))
    if extracted is None:
        return Verdict(False, reason or "no_answer", None)
    return compare(extracted, truth, fallback)


def _truth(ground_truth: object) -> Answer:
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | Integral | float):
        return Answer("")
    if isinstance(ground_truth, float):  # 33.0 from a column that has gaps is the integer 33
        ground_truth = int(ground_truth) if ground_truth.is_integer() else repr(float(ground_truth))
    try:
        truth = read_answer(str(ground_truth), "name")
    except ValueError:  # an int of more digits than Python writes
        return Answer("")
    return Answer("") if truth.text.casefold() in MISSING else truth


def compare(extracted: str, truth: Answer, fallback: Fallback | None = None) -> Verdict:
    """The verdict on one answer as written, against a ground truth that has been read."""
    if len(extracted) > MAX_ANSWER_CHARS:
        return Verdict(False, "too_long", None)
    # Where the known answer is an equation (x + y = 1), both sides of the given one count.
    answer = read_answer(extracted, "keep" if "=" in truth.text else "value")
    if answer.choice and answer.choice == truth.text:
        return Verdict(True, "equal", extracted)
    if (answer.unit and truth.unit and answer.unit != truth.unit) or (
        answer.name and truth.name and answer.name != truth.name
    ):
        return Verdict(False, "different", extracted)
    value, known = parse_integer(answer.text), parse_integer(truth.text)
    if value is not None and known is not None and (value == known or "percent" not in (answer.unit, truth.unit)):
        return Verdict(value == known, "equal" if value == known else "different", extracted)
    if answer.text and _same_text(answer.text, truth.text):
        return Verdict(True, "equal", extracted)
    if fallback is None:
        return Verdict(False, "needs_symbolic", extracted)
    found = fallback(answer.text, truth.text)
    if found == "different":
        found = _other_form(extracted, answer, truth, fallback)
    return Verdict(found == "equal", found, extracted)


MISSING = frozenset(("none", "nan", "null", "n/a", "<na>", "nat"))
"""What a missing value becomes when a program writes it as text. No answer is right for it."""
_SCALES = {"percent": "({})/100", "degree": "({})*\\pi/180"}


def _same_text(answer: str, truth: str) -> bool:
    """Equal, or equal but for capitals where both are words ("No solution")."""
    return answer == truth or (answer.casefold() == truth.casefold() and bool(re.fullmatch("[A-Za-z ]{4,}", truth)))


def _other_form(extracted: str, answer: Answer, truth: Answer, fallback: Fallback) -> Comparison:
    """The comparison again where the answer has a second form: 75% for 3/4, 60 degrees for pi/3, y - 2x = 3."""
    for one, other in ((answer, truth), (truth, answer)):
        if one.unit in _SCALES and not other.unit and (one.unit == "percent" or "\\pi" in other.text):
            return fallback(_SCALES[one.unit].format(one.text), other.text)
    if truth.name and not answer.name and "=" in extracted:
        return fallback(read_answer(extracted, "keep").text, f"{truth.name} = {truth.text}")
    return "different"


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
# An empty box, or the words that prompts put into the box which they ask for.
_PLACEHOLDER = re.compile(
    r"\\(?:boxed|fbox)\s{0,9}\{\s*(?:\\text(?:bf)?\s?\{)?[\s<'\"\[({]{0,9}"
    r"(?:(?:the |your )?(?:final[ _]?)?answer(?: goes here)?|\.{3}|\u2026|\\[lcd]?dots)?[\s>.'\"\])}]{0,9}\}",
    re.IGNORECASE,
)
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*([^\s{}$\\]{1,100})")
# Two backslashes before a box are JSON's or Python's, not a line end of TeX's.
_BRACES = re.compile(r"\\{1,2}(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
_MAX_PLACEHOLDERS = 100


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    content: str


def find_answer(text: str) -> tuple[Reason | None, str | None]:
    """(None, the final answer as written), or (why there is none, None)."""
    last = _last_box(text)
    if last is None:
        return _answer_line(text[-_WINDOW_CHARS:])
    offset = max(0, last - _WINDOW_CHARS)
    region = text[offset : last + 2 * MAX_ANSWER_CHARS]
    at = last - offset
    if not _OPEN_BOX.match(region, at):
        bare = _BARE_BOX.match(region, at)
        return (None, bare[1].rstrip(".,;")) if bare else ("truncated_box", None)
    boxes = _complete_boxes(region)
    around = [box for box in boxes if box.start <= at < box.end]
    if not around:
        return ("too_long" if len(text) > last + 2 * MAX_ANSWER_CHARS else "truncated_box"), None
    final = min(around, key=lambda box: box.start)
    beside = region[max(0, final.start - _HEDGE_CHARS) : final.start]
    if _hedged(region, final, boxes) or _OR_AFTER.match(region, final.end) or _OR_BEFORE.search(beside):
        return "several_answers", None
    return None, final.content


def _last_box(text: str) -> int | None:
    """Where the last box that holds anything begins."""
    boxed = fbox = end = len(text)
    for _ in range(_MAX_PLACEHOLDERS):
        # Each of the two is looked for only past its last hit, so that a missing one costs one scan.
        boxed = text.rfind("\\boxed", 0, end) if boxed >= end else boxed
        fbox = text.rfind("\\fbox", 0, end) if fbox >= end else fbox
        end = max(boxed, fbox)
        if end < 0:
            return None
        if _BOX.match(text, end) and not _PLACEHOLDER.match(text, end):
            return end
    return None


def _complete_boxes(text: str) -> list[_Box]:
    """Every box whose braces balance, escaped braces aside, in the order in which they end."""
    boxes: list[_Box] = []
    open_at: list[tuple[int, int] | None] = []
    for token in _BRACES.finditer(text):
        if token[0] == "{":
            open_at.append(None)
        elif token[0] == "}":
            opened = open_at.pop() if open_at else None
            if opened:
                boxes.append(_Box(opened[0], token.end(), text[opened[1] : token.start()]))
        elif token[0].endswith("{") and len(token[0]) > 2:
            open_at.append((token.start(), token.end()))
    return boxes


_HEDGE_CHARS = 60
_WORD = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|[\u4e00-\u9fff]+")
# fmt: off
_HEDGE_WORDS = frozenset((
    "or", "and", "maybe", "perhaps", "possibly", "alternatively", "also", "either", "to",
    "或", "或者", "和", "与", "及", "以及", "\\text", "\\quad", "\\qquad", "\\lor", "\\vee", "\\mathrm",
))
# fmt: on


# "\\boxed{33} or 12", "12 or \\boxed{33}": another number beside the box, in no box of its own.
_OR_AFTER = re.compile(
    r"[\s$.,)]{0,9}(?:\(?\bor\b|\(?或者?)[\s$(]{0,9}(?:maybe |perhaps |possibly |also )?[\s$(]{0,9}[-+]?\d", re.I
)
_OR_BEFORE = re.compile(r"\d[\s$.,)]{0,9}(?:\bor\b|或者?)[\s$(]{0,9}\Z", re.IGNORECASE)


def _hedged(text: str, final: _Box, boxes: list[_Box]) -> bool:
    """Whether another answer stands right before the final one: "12 or 33" in two boxes."""
    before = max((box for box in boxes if box.end <= final.start), key=lambda box: box.end, default=None)
    if before is None or not before.content.strip() or final.start - before.end > _HEDGE_CHARS:
        return False
    words = _WORD.findall(text[before.end : final.start].lower())
    return _HEDGE_WORDS.issuperset(words) and not _same(before.content, final.content)


def _same(left: str, right: str) -> bool:
    left, right = normalise(left), normalise(right)
    value = parse_integer(left)
    return left == right if value is None else value == parse_integer(right)


_ANSWER = re.compile(
    r"\banswer(?: is)?\b[ *_\"]{0,8}[:\uff1a]|答案[ *_]{0,8}(?:[是为]? ?[:\uff1a]|[是为])"
    r"|^#### |\b(?:the|final|our) answer is\b(?! ?:)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.\u3002](?:\s|\Z)")
_MARKDOWN = " \t*_`"


def _answer_line(text: str) -> tuple[Reason | None, str | None]:
    """What stands behind the last "Answer:" (or "####", "the answer is"): one sentence of its line or of the next."""
    marks = list(_ANSWER.finditer(text))
    if not marks:
        return "no_answer", None
    last = marks[-1]
    if len(marks) > 1 and "\n" not in text[marks[-2].end() : last.start()]:
        return "several_answers", None
    rest = text[last.end() :].lstrip(_MARKDOWN + "\r\n")
    answer = rest.partition("\n")[0].strip(_MARKDOWN + "\r")
    end = _SENTENCE_END.search(answer)
    if end and re.search(r"\d|\\", answer[end.end() :]):
        return "several_answers", None  # "33. Or rather 12."
    answer = answer[: end.start()] if end else answer
    return (None, answer) if answer else ("no_answer", None)
