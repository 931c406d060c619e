"""Which questions are kept: one side of the data read, and every row that is left out counted by its cause."""

from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from recipe.retool.aime import identify
from recipe.retool.data_files import find_files
from recipe.retool.deduplicate import Deduplicator, Problem
from recipe.retool.grading import MISSING
from recipe.retool.mapping import load_description
from recipe.retool.questions import build_prompt, language_of, same_answer_key
from recipe.retool.sources import SOME_AIME, SourceFile, open_file
from verl_ext.errors import DataError

CountTokens = Callable[[Sequence[str]], list[int]]
"""Tokens of each user message, with the chat template and the tool's schema around it."""
_MOST_AIME_ROWS = 2_000
"""Only files of at most so many questions are looked through for AIME's."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked to leave out."""

    max_rows: int | None = None
    """Rows kept per side at most, the first ones."""
    language: str = "all"
    """"en", "zh" or "all"; for training questions only, since a validation set is judged whole."""
    max_prompt_tokens: int | None = None
    """Longest prompt, counted by `CountTokens`; for training questions only."""


@dataclass(slots=True)
class Split:
    """One side of the data on its way to the output."""

    name: str
    files: list[SourceFile]
    rows: int
    empty_rows: int
    problems: list[Problem]
    aime: "AimeCheck | None" = None


@dataclass(slots=True)
class Selection:
    """What is kept of a side, and why the rest is not."""

    kept: list[Problem] = field(default_factory=list)
    causes: Counter[str] = field(default_factory=Counter)
    """Rows left out, by cause."""
    conflicts: list[Problem] = field(default_factory=list)
    tokens: list[int] | None = None
    """Tokens of each kept prompt, or None where they were not counted."""


@dataclass(slots=True)
class AimeCheck:
    """How some problems of AIME compare with the table of known answers."""

    answers_right: int = 0
    texts_known: int = 0
    """Texts whose hash is in the table."""
    not_known: int = 0
    """Texts that are no copy that we know of, so that their answers could not be checked."""

    def __add__(self, other: "AimeCheck") -> "AimeCheck":
        """Both counts together."""
        return AimeCheck(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


def open_source(source: str, split: str, data_root: Path | None) -> list[SourceFile]:
    """The recognised files behind what a user gave: a path, a hub id, or a YAML file that describes a data set.

    Raises:
        DataError: nothing there, or columns that are not known.
    """
    if Path(source).suffix in (".yaml", ".yml"):
        description = load_description(Path(source).expanduser())
        files = find_files(description.path, split, data_root)
        return [open_file(path, description.mapping) for path in files]
    return [open_file(path) for path in find_files(source, split, data_root)]


def read_split(name: str, sources: Sequence[list[SourceFile]], advance: Callable[[int], None]) -> Split:
    """Every different question of some sources.

    Args:
        name: "train" or "val".
        sources: the files of each source, see `open_source`.
        advance: called with the number of rows that were read since the last call.

    Raises:
        DataError: no rows, a value that does not fit, or an answer of AIME that is not the known one.
    """
    split = Split(name, [file for files in sources for file in files], rows=0, empty_rows=0, problems=[])
    found: dict[str, Problem] = {}
    for files in sources:
        deduplicator = Deduplicator()
        for file in files:
            for batch in file.batches():
                deduplicator.add(batch)
                advance(len(batch.prompt))
        split.rows += deduplicator.rows
        split.empty_rows += deduplicator.empty_rows
        problems = deduplicator.problems()
        if check := _check_aime(problems, paths(files)):
            split.aime = split.aime + check if split.aime else check
        for problem in problems:
            known = found.setdefault(problem.key, problem)
            if known is not problem:
                known.rows += problem.rows
                known.answers += problem.answers
    if not split.rows:
        raise DataError(f"no rows in {paths(split.files)}: give a file with at least one.")
    split.problems = list(found.values())
    return split


def select(split: Split, limits: Limits, reserved: Set[str], count_tokens: CountTokens | None) -> Selection:
    """The problems to keep.

    Args:
        split: what was read.
        limits: what to leave out.
        reserved: keys of questions that are for validation alone.
        count_tokens: None counts nothing, and leaves nothing out for its length.
    """
    found = Selection(causes=Counter({"empty": split.empty_rows}))
    candidates = [problem for problem in split.problems if _is_wanted(problem, split, limits, reserved, found)]
    if count_tokens:
        lengths = count_tokens([build_prompt(problem.question.text) for problem in candidates])
        found.tokens = []
    else:
        lengths = [0] * len(candidates)
    longest = limits.max_prompt_tokens if split.name == "train" and count_tokens else None
    for problem, tokens in zip(candidates, lengths, strict=True):
        if longest is not None and tokens > longest:
            found.causes["over-long"] += problem.rows
        elif limits.max_rows is not None and len(found.kept) >= limits.max_rows:
            found.causes["beyond max rows"] += problem.rows
        else:
            found.causes["duplicate"] += problem.rows - 1
            found.kept.append(problem)
            if found.tokens is not None:
                found.tokens.append(tokens)
    _name_problems(found.kept)
    found.causes = Counter({cause: rows for cause, rows in found.causes.items() if rows})
    return found


def _is_wanted(problem: Problem, split: Split, limits: Limits, reserved: Set[str], found: Selection) -> bool:
    if not problem.question.text or problem.answer.casefold() in MISSING:
        found.causes["empty"] += problem.rows
    elif len(problem.answers) > 1:
        found.causes["conflicting"] += problem.rows
        found.conflicts.append(problem)
    elif problem.key in reserved:
        found.causes["in validation"] += problem.rows
    elif split.name == "train" and limits.language not in ("all", language_of(problem.question.text)):
        found.causes["language"] += problem.rows
    else:
        return True
    return False


def _name_problems(problems: list[Problem]) -> None:
    """Every problem gets an id of its own: where the data gives none or one twice, from its question."""
    seen: set[str] = set()
    for problem in problems:
        if not problem.problem_id or problem.problem_id in seen:
            problem.problem_id = f"sha256-{problem.key[:16]}"
        seen.add(problem.problem_id)


def _check_aime(problems: Sequence[Problem], where: str) -> AimeCheck | None:
    """Name the problems of AIME and compare their answers, if most of a source's questions are AIME's.

    Raises:
        DataError: an answer is not the known one, or a table that only AIME is known to have holds something else.
    """
    claims_aime = any(problem.data_source == SOME_AIME for problem in problems)
    if len(problems) > _MOST_AIME_ROWS and not claims_aime:
        return None
    known = [identify(problem.problem_id, problem.question.text) for problem in problems[:_MOST_AIME_ROWS]]
    found = [one for one in known if one]
    if len(found) * 2 <= len(problems):
        if claims_aime:
            raise DataError(
                f"{where} holds {len(problems)} questions, of which {len(found)} are those of AIME 2024 and 2025: "
                "describe the data set in a YAML file (keys path, question, answer, id, data_source) and give that."
            )
        return None
    check, wrong = AimeCheck(), []
    sources = Counter(one.data_source for one in found)
    for problem, one in zip(problems, known, strict=True):
        problem.data_source = one.data_source if one else sources.most_common(1)[0][0]
        if one is None:
            check.not_known += 1
            continue
        problem.problem_id = one.problem_id
        check.texts_known += problem.key == one.key
        if set(problem.answers) == {same_answer_key(one.answer)}:
            check.answers_right += 1
        else:
            wrong.append(f"{one.problem_id} has {' and '.join(problem.answers)}, known is {one.answer}")
    if wrong:
        raise DataError(f"wrong AIME answers in {where}: {'; '.join(wrong)}. Use another copy.")
    return check


def paths(files: Sequence[SourceFile]) -> str:
    """The files of a source, for messages."""
    return ", ".join(str(file.path) for file in files)
