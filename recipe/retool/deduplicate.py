"""Rows to questions: each question once, questions with conflicting answers out.

Cost is per *different* row, not per row: each batch is dictionary-encoded in C++, so the hundred repeats
of DAPO's hub file cost a hash each, and text is cleaned once per different prompt.
"""

# pyarrow.compute makes its functions when it is imported, where pyright cannot see them.
# pyright: reportAttributeAccessIssue=false

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recipe.retool.questions import Question, clean_question, question_key, same_answer_key
from recipe.retool.sources import RowBatch


@dataclass(slots=True)
class Problem:
    """A question as it goes into the output, with what its rows said."""

    key: str
    """Identity of the question, see `question_key`."""
    question: Question
    answer: str
    """The first row's answer, exactly as written there."""
    problem_id: str
    data_source: str
    rows: int
    """Rows of the input that ask this question."""
    answers: Counter[str] = field(default_factory=Counter)
    """Rows by answer; more than one entry is a conflict."""


@dataclass(slots=True)
class _Pair:
    """One different (prompt, answer): where it was first seen and how often."""

    prompt: str
    answer: str
    problem_id: str | None
    data_source: str | None
    rows: int


class Deduplicator:
    """Takes rows batch by batch and gives the problems in order of first appearance."""

    def __init__(self) -> None:
        self.rows = 0
        self.empty_rows = 0
        """Rows without a user message or without an answer."""
        self._prompt_ids: dict[str, int] = {}
        self._answer_ids: dict[str, int] = {}
        self._pairs: dict[int, _Pair] = {}

    def add(self, batch: RowBatch) -> None:
        """Take the next rows of the input."""
        self.rows += len(batch.prompt)
        prompts = _global_codes(batch.prompt, self._prompt_ids)
        answers = _global_codes(batch.answer, self._answer_ids)
        present = (prompts >= 0) & (answers >= 0)
        self.empty_rows += int(len(present) - np.count_nonzero(present))
        positions = np.flatnonzero(present)
        codes = (prompts[positions] << 32) | answers[positions]
        different, first, counts = np.unique(codes, return_index=True, return_counts=True)
        for at in np.argsort(first):  # in row order, so that "first" means first in the file
            code = int(different[at])
            pair = self._pairs.get(code)
            if pair is not None:
                pair.rows += int(counts[at])
                continue
            row = int(positions[first[at]])
            self._pairs[code] = _Pair(
                prompt=batch.prompt[row].as_py(),
                answer=batch.answer[row].as_py().strip(),
                problem_id=batch.problem_id[row].as_py(),
                data_source=batch.data_source[row].as_py(),
                rows=int(counts[at]),
            )

    def problems(self) -> list[Problem]:
        """Every different question with its answers, conflicts included, in order of first appearance."""
        found: dict[str, Problem] = {}
        cleaned: dict[str, tuple[str, Question]] = {}
        for pair in self._pairs.values():
            if pair.prompt not in cleaned:
                question = clean_question(pair.prompt)
                cleaned[pair.prompt] = (question_key(question.text), question)
            key, question = cleaned[pair.prompt]
            problem = found.get(key)
            if problem is None:
                problem = found[key] = Problem(
                    key=key,
                    question=question,
                    answer=pair.answer,
                    problem_id=pair.problem_id or "",
                    data_source=pair.data_source or "",
                    rows=0,
                )
            problem.rows += pair.rows
            problem.answers[same_answer_key(pair.answer)] += pair.rows
        return list(found.values())


def _global_codes(column: pa.StringArray, known: dict[str, int]) -> np.ndarray:
    """int64 number of each value over all batches so far; -1 for null and blank values."""
    encoded = pc.dictionary_encode(column)
    numbers = [
        known.setdefault(value, len(known)) if value is not None and value.strip() else -1
        for value in encoded.dictionary.to_pylist()
    ]
    codes = np.asarray(pc.fill_null(encoded.indices, len(numbers)))
    return np.array([*numbers, -1], dtype=np.int64)[codes]
