"""What a question is: its clean text, its identity, its language and the one instruction put under it.

Every data set is brought to the bare question first, so that two data sets ask in the same words and
the same question is found again whatever was wrapped around it.
"""

import re
import unicodedata
from dataclasses import dataclass
from hashlib import sha256

from recipe.retool.answers import normalise

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""The one instruction under every question.

Why \\boxed{}: the model was trained on it (these are the words that its authors recommend for maths), the
box has a beginning and an end that a grader finds without guessing, and a tool call or a table cannot be
mistaken for it. DAPO's own "Answer:" line is taken off, since two formats in one prompt (DAPO's, and the
\\boxed{'...'} with quotes that verl's recipe appends) are answered in either and graded in one.

Source: model card of Qwen/Qwen3-4B-Instruct-2507, "Best Practices"; verl v0.6.1 recipe/retool/retool.py.
"""

DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
"""Source: BytedTsinghua-SIA/DAPO-Math-17k, column prompt."""
DAPO_SUFFIX = 'Remember to put your answer on its own line after "Answer:".'
"""Source: BytedTsinghua-SIA/DAPO-Math-17k, column prompt."""

CHINESE_SUFFIX = (
    "让我们一步一步地思考。请以“Answer: \\boxed{<final_answer>}”的格式输出最终答案。"
    "如果是选择题，请按顺序输出正确的选项，不带任何标点或空格。对于其他类型的问题，请只输出最终答案的数值。"  # noqa: RUF001
)
"""A wrapper inside the wrapper: some twenty Chinese rows of DAPO-Math-17k ask for a third format.

Source: found in BytedTsinghua-SIA/DAPO-Math-17k, column prompt.
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A question without wrapper, and what had to be done to its characters."""

    text: str
    repaired: int
    """Control characters put back into the LaTeX command or ligature that they came from."""
    dropped: int
    """Control characters taken out, since what they stood for cannot be known."""


def strip_wrapper(prompt: str) -> str:
    """The question inside a prompt: without DAPO's wrappers, our instruction and outer blanks."""
    text = prompt.strip().removeprefix(DAPO_PREFIX)
    for suffix in (DAPO_SUFFIX, INSTRUCTION, CHINESE_SUFFIX):
        text = text.rstrip().removesuffix(suffix)
    return text.strip()


def build_prompt(question: str) -> str:
    """The user message of a row: the question, a blank line, the instruction."""
    return f"{question}\n\n{INSTRUCTION}"


# JSON or Python once read "\frac" as form feed + "rac". Only rests that are no English word are listed:
# a wrong repair would change a question silently, a missing one costs at most a readable word.
_ESCAPES = (
    ("\a", r"\\a", r"lpha|ngle|pprox|rcsin|rccos|rctan"),
    ("\b", r"\\b", r"eta|inom|igl?|igr|oxed|ar|egin|ullet|mod|old(?:symbol)?|ot"),
    ("\t", r"\\t", r"ext(?:bf|it|rm)?|imes|heta|riangle|frac|ilde"),
    ("\f", r"\\f", r"rac|orall|box|loor"),
    ("\r", r"\\r", r"ight|ho|angle|ceil|floor"),
    ("\v", r"\\v", r"ec|ert|arphi|arepsilon|dots"),
    ("\n", r"\\n", r"abla"),
)
_BROKEN_COMMANDS = [
    # A lone backslash before the character is what is left of a doubled one ("\\\f" + "rac" in AIME 2024-I-15).
    (re.compile(rf"(?:(?<!\\)\\)?{char}(?=(?:{rests})(?![A-Za-z]))"), command)
    for char, command, rests in _ESCAPES
]
# Old TeX fonts hold the ligature "fi" at the place of the form feed: "de\fne" is "define". Where both the
# ligature and its letters survived ("fi\fve", "\ffirst") the character says nothing new and is dropped.
_LIGATURE = re.compile("(?<!fi)\f(?=(?:rst|nds?|nes?|ned|tting|lled|lls?|es|ed|nite|nitely|nal|gures?|ves?)\\b)")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_ANY_SUSPECT = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]|\nabla(?![A-Za-z])")


def clean_question(prompt: str) -> Question:
    """The bare question of a prompt, with broken control characters repaired where only one reading exists.

    Tabs and line ends that are plain layout stay. Carriage returns become line ends.
    """
    if not _ANY_SUSPECT.search(prompt):
        return Question(strip_wrapper(prompt), 0, 0)
    # Before anything is stripped: a question may begin with the tab of a broken "\\text".
    text, repaired = prompt, 0
    for pattern, command in _BROKEN_COMMANDS:
        text, count = pattern.subn(command, text)
        repaired += count
    text, count = _LIGATURE.subn("fi", text)
    repaired += count
    text, dropped = _CONTROL.subn("", text)
    return Question(strip_wrapper(text.replace("\r\n", "\n").replace("\r", "\n")), repaired, dropped)


def question_key(question: str) -> str:
    """Identity of a question: sha256 (hex) of its text in NFKC with every run of whitespace as one space."""
    normal = " ".join(unicodedata.normalize("NFKC", question).split())
    return sha256(normal.encode("utf-8", "surrogatepass")).hexdigest()


_IDEOGRAPH = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")


def language_of(question: str) -> str:
    """Language of a question: "zh" if it holds any Chinese character, else "en".

    One character is enough: questions made of formulas with a single Chinese word are common in DAPO.
    """
    return "zh" if _IDEOGRAPH.search(question) else "en"


_INTEGER = re.compile(r"-?\d+", re.ASCII)


def answer_kind(answer: str) -> str:
    """Coarse kind of a ground truth, for the report: how it must be compared."""
    if not _INTEGER.fullmatch(answer):
        return "other"
    if answer.startswith("-"):
        return "negative integer"
    return "integer" if len(answer) <= 18 else "integer beyond 18 digits"


def same_answer_key(answer: str) -> str:
    """Text under which two spellings of one answer ("033" and "33", "$x$" and "x") are the same."""
    if not _INTEGER.fullmatch(answer):
        return normalise(answer) or answer
    digits = answer.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if answer.startswith("-") and digits != "0" else digits
