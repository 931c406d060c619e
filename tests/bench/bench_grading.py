"""Graders beside each other, in one run: how often they are right, how fast they are, and what a hostile text costs.

    PYTHONPATH=. python tests/bench/bench_grading.py --cases CASES.jsonl [--math-500 FILE] [--dapo FILE]

`CASES.jsonl` has lines with id, category, text, ground_truth, correct. Ours is measured as in training: in a thread,
with its pool of processes. The others run in a process of their own that is ended after 5 s of processor time (they
have no limit that works outside of the main thread); what they use up counts. prime_math runs the text of some answers
as code: it gets a folder of its own to do that in.

With --math-500, every answer of MATH-500 is graded against every other one, which counts false positives.
With --dapo, the questions are counted whose text holds an expression of the answer's value.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import on_path  # noqa: F401
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from recipe.retool.answers import normalise, parse_integer
from recipe.retool.grading import grade
from recipe.retool.other_graders import OtherGrader
from recipe.retool.questions import clean_question
from recipe.retool.symbolic.equality import MAX_OPERATIONS, POOL, operations, rational_or_none, same_value
from recipe.retool.symbolic.exact import TooLarge
from recipe.retool.symbolic.expressions import parse
from recipe.retool.symbolic.tree import Unreadable

HOSTILE = ("dos", "inj")
CONSOLE = Console(width=120)


def ours(text: object, truth: object) -> bool:
    return grade(text, truth, fallback=same_value).correct  # type: ignore[arg-type]


def in_a_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def measure(grader: Callable[[object, object], object], cases: list[dict]) -> tuple[list[object], list[float]]:
    outcomes: list[object] = []
    seconds: list[float] = []

    def run() -> None:
        for case in cases:
            started_s = time.perf_counter()
            outcomes.append(grader(case["text"], case["ground_truth"]))
            seconds.append(time.perf_counter() - started_s)

    in_a_thread(run)
    return outcomes, seconds


def row(name: str, cases: list[dict], outcomes: list[object], seconds: list[float]) -> list[str]:
    false_positives = sum(one is True and not case["correct"] for one, case in zip(outcomes, cases, strict=True))
    false_negatives = sum(one is not True and case["correct"] for one, case in zip(outcomes, cases, strict=True))
    no_verdict = sum(not isinstance(one, bool) for one in outcomes)
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return [
        name, str(false_positives + false_negatives), str(false_positives), str(false_negatives), str(no_verdict),
        f"{len(seconds) / sum(seconds):,.0f}", f"{ordered[len(ordered) // 2] * 1e3:.3f}", f"{p99 * 1e3:.1f}",
        f"{ordered[-1] * 1e3:,.0f}",
    ]  # fmt: skip


def table(title: str) -> Table:
    columns = ("grader", "wrong", "false +", "false -", "no verdict", "grades/s", "p50 ms", "p99 ms", "worst ms")
    made = Table(*columns, title=title)
    for column in made.columns[1:]:
        column.justify = "right"
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--math-500", type=Path)
    parser.add_argument("--dapo", type=Path)
    options = parser.parse_args()
    cases = [json.loads(line) for line in options.cases.read_text(encoding="utf-8").splitlines()]
    compare(cases)
    if options.math_500:
        every_pair(options.math_500)
    if options.dapo:
        restated(options.dapo)
    POOL.close()
    CONSOLE.print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")


def compare(cases: list[dict]) -> None:
    tame = [case for case in cases if case["category"] not in HOSTILE]
    everything, fair = (
        table(f"{len(cases)} cases, hostile ones among them"),
        table(f"the {len(tame)} that are not hostile"),
    )
    for name, grader in (
        ("ours", ours),
        ("ours, without symbolic", lambda text, truth: grade(text, truth).correct),
        ("strict box (verl)", OtherGrader("strict_box", "verl")),
        ("math-verify", OtherGrader("math_verify", "math_verify")),
        ("prime_math (verl)", OtherGrader("prime_math", "verl")),
    ):
        grader("\\boxed{x+x}", "2x")  # its process and its imports
        outcomes, seconds = measure(grader, cases)
        everything.add_row(*row(name, cases, outcomes, seconds))
        same_value.cache_clear()
        outcomes, seconds = measure(grader, tame)
        fair.add_row(*row(name, tame, outcomes, seconds))
        if isinstance(grader, OtherGrader):
            grader.close()
    CONSOLE.print(everything, fair)
    many = tame * 50
    outcomes, seconds = measure(ours, many)
    CONSOLE.print(f"ours, the tame cases 50 times over, pairs remembered: {len(many) / sum(seconds):,.0f} grades/s")


def every_pair(path: Path) -> None:
    answers = sorted({json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()})
    started_s = time.perf_counter()
    not_itself = [one for one in answers if not ours(rf"\boxed{{{one}}}", one)]
    same = [(one, other) for one in answers for other in answers if one != other and ours(rf"\boxed{{{one}}}", other)]
    pairs = len(answers) * (len(answers) - 1)
    CONSOLE.print(
        f"MATH-500: {len(not_itself)} of {len(answers)} answers are not themselves; of {pairs:,} pairs of two, equal:"
    )
    for one, other in same:
        CONSOLE.print(f"  {one}   {other}", markup=False, highlight=False)
    CONSOLE.print(f"  {time.perf_counter() - started_s:.0f} s")


_MATHS = re.compile(r"\$+([^$]{1,300})\$+|\\\((.{1,300}?)\\\)|\\\[(.{1,300}?)\\\]", re.DOTALL)


def restated(path: Path) -> None:
    rows = {}
    for one in pq.read_table(path, columns=["prompt", "reward_model"]).to_pylist():
        rows[clean_question(one["prompt"][0]["content"]).text] = int(one["reward_model"]["ground_truth"])
    counts: Counter[str] = Counter()
    for question, answer in rows.items():
        fewest = min(
            (
                count
                for match in _MATHS.finditer(question)
                if (count := operations_if_equal(next(filter(None, match.groups()), ""), answer)) is not None
            ),
            default=None,
        )
        if fewest is not None:
            counts["any"] += 1
            counts["few"] += fewest <= MAX_OPERATIONS
    CONSOLE.print(
        f"{len(rows):,} questions; an expression in the text has the answer's value in {counts['any']}, "
        f"with at most {MAX_OPERATIONS} operations in {counts['few']}"
    )


def operations_if_equal(expression: str, answer: int) -> int | None:
    """How many operations an expression has, if it has the answer's value and is no plain number."""
    text = normalise(expression)
    if parse_integer(text) is not None:
        return None
    try:
        node = parse(text)
        return operations(node) if rational_or_none(node) == answer else None
    except (Unreadable, TooLarge):
        return None


if __name__ == "__main__":
    main()
