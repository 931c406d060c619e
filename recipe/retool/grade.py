"""Grades a file of answers with our grader, verl's and math-verify: `python -m recipe.retool.grade FILE`.

Called by `invoke grade`. Says how often each calls an answer right, how often they agree, and shows the answers
over which they differ, so that a person can judge who is right.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from recipe.retool.answer_files import GivenAnswer, read_answers
from recipe.retool.grading import grade
from recipe.retool.other_graders import OtherGrader, Outcome
from recipe.retool.symbolic.equality import POOL, same_value
from verl_ext.errors import DataError, VerlAgsError
from verl_ext.runs import find_run
from verl_ext.settings import Settings

OURS, STRICT, MATH_VERIFY = "ours", "strict box (verl)", "math-verify"
_SHOWN, _TAIL_CHARS = 20, 100


@dataclass(slots=True)
class Graded:
    """One answer with what each grader says.

    Attributes:
        reason: why ours says so.
        extracted: what ours took for the answer.
        outcomes: by grader; True or False, or text where a grader gave neither.
    """

    given: GivenAnswer
    reason: str
    extracted: str | None
    outcomes: dict[str, Outcome]

    @property
    def differs(self) -> bool:
        """Whether two graders disagree; one that gives no verdict calls nothing right."""
        return len({outcome is True for name, outcome in self.outcomes.items() if outcome != "not installed"}) > 1


@dataclass(slots=True)
class GradedFile:
    """All answers of a file, and the seconds that each grader took for them."""

    graded: list[Graded] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def right(self, name: str) -> int:
        """Answers that a grader calls right."""
        return sum(one.outcomes[name] is True for one in self.graded)

    def agreement(self, one: str, other: str) -> float:
        """Share of the answers on which two graders say the same."""
        same = sum((row.outcomes[one] is True) == (row.outcomes[other] is True) for row in self.graded)
        return same / len(self.graded) if self.graded else 1.0

    def mistakes(self, name: str) -> tuple[int, int, int] | None:
        """Wrong verdicts, false positives and false negatives against a person's, or None without one."""
        judged = [row for row in self.graded if row.given.correct is not None]
        if not judged:
            return None
        false_positives = sum(row.outcomes[name] is True and not row.given.correct for row in judged)
        false_negatives = sum(row.outcomes[name] is not True and bool(row.given.correct) for row in judged)
        return false_positives + false_negatives, false_positives, false_negatives


def compare_graders(answers: Sequence[GivenAnswer], console: Console | None = None) -> GradedFile:
    """Grade every answer with every grader.

    Args:
        answers: see `read_answers`.
        console: where progress goes; None is silent.
    """
    console = console or Console(quiet=True)
    comparison = GradedFile()
    with ExitStack() as stack:
        strict = stack.enter_context(closing(OtherGrader("strict_box", "verl")))
        math_verify = stack.enter_context(closing(OtherGrader("math_verify", "math_verify")))
        graders: dict[str, Callable[[GivenAnswer], Outcome]] = {
            STRICT: lambda given: strict(given.response, given.truth),
            MATH_VERIFY: lambda given: math_verify(given.text, given.truth),
        }
        comparison.seconds = dict.fromkeys((OURS, *graders), 0.0)
        for given in track(answers, "grading", console=console, transient=True):
            started_s = time.perf_counter()
            verdict = grade(given.text, given.truth, fallback=same_value)
            comparison.seconds[OURS] += time.perf_counter() - started_s
            outcomes: dict[str, Outcome] = {OURS: verdict.correct}
            for name, grader in graders.items():
                started_s = time.perf_counter()
                outcomes[name] = grader(given)
                comparison.seconds[name] += time.perf_counter() - started_s
            comparison.graded.append(Graded(given, verdict.reason, verdict.extracted, outcomes))
    POOL.close()
    return comparison


def totals_table(comparison: GradedFile) -> Table:
    """How often each grader calls an answer right, and its mistakes where the file has a person's verdict."""
    table = Table("grader", "right", "share", title=f"{len(comparison.graded)} answers")
    judged = comparison.mistakes(OURS) is not None
    for title in ("wrong", "false +", "false -") if judged else ():
        table.add_column(title)
    table.add_column("seconds")
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for name in comparison.seconds:
        if _not_installed(comparison, name):
            continue
        right = comparison.right(name)
        cells = [str(right), f"{right / max(1, len(comparison.graded)):.1%}"]
        cells += map(str, comparison.mistakes(name) or ())
        table.add_row(name, *cells, f"{comparison.seconds[name]:.2f}")
    return table


def agreement_table(comparison: GradedFile) -> Table:
    """How often each pair of graders says the same."""
    names = [name for name in comparison.seconds if not _not_installed(comparison, name)]
    table = Table("same verdict", *names, title="Agreement")
    for one in names:
        table.add_row(one, *(f"{comparison.agreement(one, other):.1%}" for other in names))
    return table


def differences(comparison: GradedFile, shown: int) -> Iterator[str]:
    """A line on how many answers graders differ over, then two lines each for the first of them."""
    differing = [row for row in comparison.graded if row.differs]
    yield f"{len(differing)} answers over which they differ" + (f", the first {shown}:" * (len(differing) > shown))
    for row in differing[:shown]:
        says = {True: "right", False: "wrong"}
        verdicts = ", ".join(
            f"{name}: {says[one] if isinstance(one, bool) else one}" for name, one in row.outcomes.items()
        )
        yield f"{row.given.key}  known {_short(row.given.truth, 60)}; {verdicts}; our reason: {row.reason}"
        yield f"    {_short(row.given.text, _TAIL_CHARS)}"


def _short(value: object, chars: int) -> str:
    """The end of a value as ASCII, since a text may hold what a terminal obeys."""
    text = ascii(value[-2 * chars :] if isinstance(value, str | bytes) else value)
    return text if len(text) <= chars else "..." + text[-chars:]


def _not_installed(comparison: GradedFile, name: str) -> bool:
    return any(row.outcomes[name] == "not installed" for row in comparison.graded)


def as_json(comparison: GradedFile) -> dict:
    """Everything, for another program: totals, agreement, and each answer's verdicts."""
    names = list(comparison.seconds)
    return {
        "answers": len(comparison.graded),
        "right": {name: comparison.right(name) for name in names},
        "mistakes": {name: comparison.mistakes(name) for name in names},
        "seconds": comparison.seconds,
        "agreement": {one: {other: comparison.agreement(one, other) for other in names} for one in names},
        "graded": [
            {"id": row.given.key, "reason": row.reason, "extracted": row.extracted, "outcomes": row.outcomes}
            for row in comparison.graded
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="invoke grade", description="Grade answers with several graders.")
    parser.add_argument("file", type=Path, help="a run's name or folder, rollouts or answers as parquet or jsonl")
    parser.add_argument("--show", type=int, default=_SHOWN, metavar="N", help="differing answers to show")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything to this file as well")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code, 0 or 2."""
    args = _parser().parse_args(argv)
    console = Console()
    try:
        file = args.file if args.file.exists() else find_run(Settings.load().folder("runs"), str(args.file))
        answers = list(read_answers(file))
        if not answers:
            raise DataError(f"{file} holds no answers: give rollouts of a run or a file of answers")
        comparison = compare_graders(answers, console)
    except VerlAgsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console.print(totals_table(comparison), agreement_table(comparison))
    for name in comparison.seconds:
        if _not_installed(comparison, name):
            console.print(f"{name} is not installed and was not asked: invoke setup installs it.")
    for line in differences(comparison, args.show):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if args.json:
        try:
            args.json.write_text(json.dumps(as_json(comparison), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            sys.stderr.write(f"error: cannot write {args.json}: {error}. Give --json a file that you may write.\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
