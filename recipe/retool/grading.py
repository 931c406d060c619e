r"""Is the final answer of a text the known one? Pure functions; nothing of the text is ever run as code.

The answer is the last complete box (`\boxed{}`, `\fbox{}`), or without any box the last "Answer:" line.
It is compared as an exact integer. A wrong "correct" teaches the model to hedge and is worse than a missed
one, so whatever has two readings is wrong: a text cut inside its last box, two different boxes side by
side, a box with two numbers. A box beats an "Answer:" line, since the box is what the prompt asks for.

Covered: the notations of one integer that models write (see `answers.py`), and any other answer whose text
is the known one once both are normalised.
Not covered: equal values in another form (2^{10}, \frac{6}{2}). `grade(..., fallback=...)` is the seam for
a symbolic comparison; it must bring its own limits on time and memory.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from recipe.retool.answers import MAX_ANSWER_CHARS, normalise, parse_integer

Reason = Literal[
    "equal",
    "different",
    "needs_symbolic",
    "no_answer",
    "truncated_box",
    "several_answers",
    "too_long",
    "no_ground_truth",
    "no_text",
]
Fallback = Callable[[str, str], bool]
"""Says whether two normalised answers have the same value; called only where integers cannot decide."""

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
    truth = _truth_text(ground_truth)
    if not truth:
        return Verdict(False, "no_ground_truth", None)
    reason, extracted = find_answer(own_final_text(text))
    if extracted is None:
        return Verdict(False, reason or "no_answer", None)
    return compare(extracted, truth, fallback)


def _truth_text(ground_truth: object) -> str:
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int):
        return ""
    try:
        return normalise(str(ground_truth))
    except ValueError:  # an int of more digits than Python writes
        return ""


def compare(extracted: str, truth: str, fallback: Fallback | None = None) -> Verdict:
    """The verdict on one answer as written, against a ground truth that is already normalised."""
    if len(extracted) > MAX_ANSWER_CHARS:
        return Verdict(False, "too_long", None)
    answer = normalise(extracted)
    value, known = parse_integer(answer), parse_integer(truth)
    if value is not None and known is not None:
        return Verdict(value == known, "equal" if value == known else "different", extracted)
    if answer and answer == truth:
        return Verdict(True, "equal", extracted)
    if fallback is None:
        return Verdict(False, "needs_symbolic", extracted)
    same = fallback(answer, truth)
    return Verdict(same, "equal" if same else "different", extracted)


_TOOL_END = "</tool_response>"


def own_final_text(transcript: str) -> str:
    """What the model itself wrote after the last tool result and the last thought, without tool calls.

    The text after the *last* </tool_response> is taken, so that a program which prints that tag cannot
    smuggle its output in. What tags cannot tell: a transcript cut inside a tool result that prints one.
    """
    text = transcript.rpartition(_TOOL_END)[2]
    text = text.partition("<tool_response>")[0]  # cut inside a tool result: the rest is not the model's
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    # After the last complete call only a call cut in its middle can follow; earlier text is kept, as a
    # model may answer and then still call.
    pieces = text.split("<tool_call>")
    return pieces[0] + "".join(piece.partition("</tool_call>")[2] for piece in pieces[1:])


_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
_EMPTY_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{\s*\}")
_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]*([^\s{}$\\]{1,100})")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{|\\.|[{}]", re.DOTALL)
_MAX_EMPTY_BOXES = 100


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
    if _hedged(region, final, boxes):
        return "several_answers", None
    return None, final.content


def _last_box(text: str) -> int | None:
    """Where the last box that holds anything begins."""
    boxed = fbox = end = len(text)
    for _ in range(_MAX_EMPTY_BOXES):
        # Each of the two is looked for only past its last hit, so that a missing one costs one scan.
        boxed = text.rfind("\\boxed", 0, end) if boxed >= end else boxed
        fbox = text.rfind("\\fbox", 0, end) if fbox >= end else fbox
        end = max(boxed, fbox)
        if end < 0:
            return None
        if _BOX.match(text, end) and not _EMPTY_BOX.match(text, end):
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


_ANSWER = re.compile(r"\banswer(?: is)?\b[ *_\"]{0,8}[:\uff1a]|答案 ?[:\uff1a]|^#### ", re.IGNORECASE | re.MULTILINE)
_MARKDOWN = " \t*_`"


def _answer_line(text: str) -> tuple[Reason | None, str | None]:
    """What stands behind the last "Answer:" (or "####"): the rest of its line, or the next line with text."""
    marks = list(_ANSWER.finditer(text))
    if not marks:
        return "no_answer", None
    last = marks[-1]
    if len(marks) > 1 and "\n" not in text[marks[-2].end() : last.start()]:
        return "several_answers", None
    rest = text[last.end() :].lstrip(_MARKDOWN + "\r\n")
    answer = rest.partition("\n")[0].strip(_MARKDOWN + "\r")
    return (None, answer) if answer else ("no_answer", None)
