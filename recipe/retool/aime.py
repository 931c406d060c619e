"""AIME 2024 and 2025: which problem a text is, and whether its answer is the known one.

Public copies differ in ids, spelling, figures and in at least one wrong answer (384 for 385 in 2024-I-12). So a row is
known by its id, by the hash of its text, or by its words: copies of one problem share most of their pairs of
neighbouring words.

The texts are (c) MAA and not in this repository; the tables hold ids, answers and hashes.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from recipe.retool.questions import question_key

SAMPLES = Path(__file__).with_name("samples")
"""Small real data that the project ships; see its README.md."""
YEARS = ("2024", "2025")
_SAME_WORDS = 0.65
"""Least share of common word pairs. Of copies of other origin, all 30 of 2024 (twice) and 26 of 30 of 2025 lie above;
no problem lies above for another."""
_HASH_CHARS = 4


@dataclass(frozen=True, slots=True)
class AimeProblem:
    """One problem of AIME as the tables have it.

    Attributes:
        problem_id: "2024-I-4".
        answer: 0 to 999, without leading zeros.
        key: `question_key` of one public copy's text.
        word_pairs: short hashes of that text's pairs of neighbouring words.
    """

    problem_id: str
    answer: str
    key: str
    word_pairs: frozenset[str]

    @property
    def data_source(self) -> str:
        """The name of the year's data set: verl names validation metrics after it."""
        return f"aime_{self.problem_id[:4]}"


@cache
def known_problems() -> tuple[AimeProblem, ...]:
    """The 60 problems of both years."""
    problems = []
    for year in YEARS:
        table = json.loads((SAMPLES / f"aime_{year}_keys.json").read_text(encoding="utf-8"))
        for entry in table["problems"]:
            pairs = entry["word_pairs"]
            hashes = {pairs[at : at + _HASH_CHARS] for at in range(0, len(pairs), _HASH_CHARS)}
            problems.append(AimeProblem(entry["id"], entry["answer"], entry["sha256"], frozenset(hashes)))
    return tuple(problems)


_FIGURE = re.compile(r"\[asy\].*?\[/asy\]|\\begin\{(asy|tikzpicture)\}.*?\\end\{\1\}", re.DOTALL)


def word_pairs(text: str) -> set[str]:
    """Short hashes of the pairs of neighbouring words and numbers of a text, figures and commands left out."""
    words = re.findall(r"[a-z]{2,}|\d+", re.sub(r"\\[A-Za-z]+", " ", _FIGURE.sub(" ", text)).lower())
    return {sha256(" ".join(pair).encode()).hexdigest()[:_HASH_CHARS] for pair in pairwise(words)}


def identify(problem_id: str, question: str, among: Iterable[AimeProblem] | None = None) -> AimeProblem | None:
    """The problem of AIME that a row is, or None."""
    problems = known_problems() if among is None else tuple(among)
    key = question_key(question)
    for problem in problems:
        if problem.problem_id == problem_id or problem.key == key:
            return problem
    pairs = word_pairs(question)
    best = max(problems, key=lambda problem: _likeness(pairs, problem.word_pairs), default=None)
    return best if best and _likeness(pairs, best.word_pairs) >= _SAME_WORDS else None


def _likeness(one: set[str], other: frozenset[str]) -> float:
    """Dice's coefficient of two sets, 0 to 1."""
    return 2 * len(one & other) / (len(one) + len(other) or 1)
