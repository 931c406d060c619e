"""Prepares training and validation data: `python -m recipe.retool.prepare_data --train .. --val .. --out ..`.

Reads DAPO-Math-17k and AIME 2024 as the hub has them, keeps each question once, drops what cannot be
trusted, counts every row that is left out by its cause, and writes train.parquet, val.parquet and
report.json. Same input, same output.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from recipe.retool.data_files import find_files
from recipe.retool.deduplicate import Deduplicator, Problem
from recipe.retool.prepared import FORMAT, build_rows, content_hash, hash_rows, load_report, write_prepared
from recipe.retool.questions import INSTRUCTION, answer_kind, build_prompt, language_of, same_answer_key
from recipe.retool.sources import AIME_SOURCE, SourceFile, open_file
from verl_ext.compose import hub_ids
from verl_ext.data_root import prepared_data
from verl_ext.errors import DataError, VerlAgsError
from verl_ext.settings import Settings

__all__ = ["content_hash", "load_report", "main", "prepare"]

SAMPLES = Path(__file__).with_name("samples")
"""Small real data that the project ships; see its README.md."""
AIME_KEYS = SAMPLES / "aime_2024_keys.json"
"""Id, answer and text hash of the 30 problems of AIME 2024; the texts are (c) MAA and not shipped."""
_CONFLICTS_LISTED = 50
_QUESTION_CHARS_LISTED = 160
_LINE_ROWS = 250_000


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user asked to leave out."""

    max_rows: int | None = None
    """Rows kept per file at most, the first ones."""
    language: str = "all"
    """"en", "zh" or "all"; for training questions only, since a validation set is judged whole."""


@dataclass(slots=True)
class _Split:
    """One side of the data on its way to the output."""

    name: str
    files: list[SourceFile]
    rows: int
    empty_rows: int
    problems: list[Problem]


def prepare(
    train: str,
    val: str,
    out_dir: str | Path,
    *,
    limits: Limits | None = None,
    data_root: Path | None = None,
    console: Console | None = None,
) -> dict:
    """Prepare both files and return the report, which is also written beside them.

    Args:
        train: Training data: file, folder, hub cache folder or hub id, see `find_files`.
        val: Validation data, likewise.
        out_dir: Folder for train.parquet, val.parquet and report.json.
        limits: What to leave out.
        data_root: Where hub ids are looked up.
        console: Where progress goes; None is silent.

    Raises:
        DataError: the input cannot be used, or an AIME answer differs from the known one.
        ConfigurationError: out_dir cannot be written.
    """
    limits = limits or Limits()
    console = console or Console(quiet=True)
    val_split = _read("val", find_files(val, "val", data_root), console)
    train_split = _read("train", find_files(train, "train", data_root), console)
    report: dict = {"format": FORMAT, "instruction": INSTRUCTION}
    rows = {}
    held_out = {problem.key for problem in val_split.problems}
    for split, reserved in ((train_split, held_out), (val_split, frozenset())):
        kept, causes, conflicts = _select(split, limits, reserved)
        rows[split.name] = build_rows(kept, split.name)
        report[split.name] = _report_split(split, kept, causes, conflicts, hash_rows(rows[split.name]))
        if not kept:
            raise DataError(f"no row of {_paths(split)} is left: {_causes_text(causes)}. Give other data or limits.")
    report["val"]["aime_checked"] = _check_aime(val_split)
    write_prepared(Path(out_dir), rows, report)
    return report


def _read(name: str, paths: list[Path], console: Console) -> _Split:
    files = [open_file(path) for path in paths]
    deduplicator = Deduplicator()
    total = sum(file.num_rows or 0 for file in files) or None
    with _progress(console, f"reading {name}", total) as advance:
        for file in files:
            for batch in file.batches():
                deduplicator.add(batch)
                advance(len(batch.prompt))
    if not deduplicator.rows:
        raise DataError(f"no rows in {', '.join(map(str, paths))}: give a file with at least one.")
    return _Split(name, files, deduplicator.rows, deduplicator.empty_rows, deduplicator.problems())


@contextmanager
def _progress(console: Console, title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; elsewhere one plain line per quarter million rows, so that logs stay short."""
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda rows: bar.advance(task, rows)
        return
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        before, done = done, done + rows
        if before // _LINE_ROWS != done // _LINE_ROWS:
            console.print(f"{title}: {done} of {total or 'unknown'} rows")

    yield advance


def _select(split: _Split, limits: Limits, reserved: Set[str]) -> tuple[list[Problem], Counter[str], list[Problem]]:
    """Problems to keep, rows left out by cause, and the conflicting problems."""
    kept: list[Problem] = []
    causes: Counter[str] = Counter({"empty": split.empty_rows})
    conflicts: list[Problem] = []
    for problem in split.problems:
        if not problem.question.text:
            causes["empty"] += problem.rows
        elif len(problem.answers) > 1:
            causes["conflicting"] += problem.rows
            conflicts.append(problem)
        elif problem.key in reserved:
            causes["in validation"] += problem.rows
        elif split.name == "train" and limits.language not in ("all", language_of(problem.question.text)):
            causes["language"] += problem.rows
        elif limits.max_rows is not None and len(kept) >= limits.max_rows:
            causes["beyond max rows"] += problem.rows
        else:
            causes["duplicate"] += problem.rows - 1
            kept.append(problem)
    _name_problems(kept)
    return kept, Counter({cause: rows for cause, rows in causes.items() if rows}), conflicts


def _name_problems(problems: list[Problem]) -> None:
    """Every problem gets an id of its own: where the data gives none or one twice, from its question."""
    seen: set[str] = set()
    for problem in problems:
        if not problem.problem_id or problem.problem_id in seen:
            problem.problem_id = f"sha256-{problem.key[:16]}"
        seen.add(problem.problem_id)


def _report_split(
    split: _Split, kept: list[Problem], causes: Counter[str], conflicts: list[Problem], content_sha256: str
) -> dict:
    lengths = sorted(len(build_prompt(problem.question.text)) for problem in kept) or [0]
    return {
        "files": [{"name": file.path.name, "schema": file.schema.name} for file in split.files],
        "rows_raw": split.rows,
        "rows_kept": len(kept),
        "rows_left_out": dict(sorted(causes.items())),
        "questions": len(split.problems),
        "questions_conflicting": len(conflicts),
        "conflicts": [
            {
                "index": problem.problem_id,
                "answers": dict(sorted(problem.answers.items())),
                "question": problem.question.text[:_QUESTION_CHARS_LISTED],
            }
            for problem in conflicts[:_CONFLICTS_LISTED]
        ],
        "control_characters": {
            "repaired": sum(problem.question.repaired for problem in kept),
            "dropped": sum(problem.question.dropped for problem in kept),
            "questions": sum(problem.question.repaired + problem.question.dropped > 0 for problem in kept),
        },
        "languages": _counts(language_of(problem.question.text) for problem in kept),
        "answer_kinds": _counts(answer_kind(problem.answer) for problem in kept),
        "prompt_chars": {
            "median": lengths[len(lengths) // 2],
            "p99": lengths[len(lengths) * 99 // 100],
            "max": lengths[-1],
        },
        "content_sha256": content_sha256,
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _check_aime(split: _Split) -> dict[str, int]:
    """Compare AIME 2024 answers with the known ones; public copies differ, and one has a wrong key.

    Raises:
        DataError: an answer differs.
    """
    keys = {entry["id"]: entry for entry in json.loads(AIME_KEYS.read_text(encoding="utf-8"))["problems"]}
    known = [problem for problem in split.problems if problem.data_source == AIME_SOURCE and problem.problem_id in keys]
    wrong = [
        f"{problem.problem_id} has {' and '.join(problem.answers)}, known is {keys[problem.problem_id]['answer']}"
        for problem in known
        if set(problem.answers) != {same_answer_key(keys[problem.problem_id]["answer"])}
    ]
    if wrong:
        raise DataError(f"wrong AIME 2024 answers in {_paths(split)}: {'; '.join(wrong)}. Use another copy.")
    same_text = sum(problem.key == keys[problem.problem_id]["sha256"] for problem in known)
    return {"answers_right": len(known), "texts_known": same_text, "of": len(keys)}


def _paths(split: _Split) -> str:
    return ", ".join(str(file.path) for file in split.files)


def _causes_text(causes: Counter[str]) -> str:
    return ", ".join(f"{rows} {cause}" for cause, rows in causes.most_common()) or "none were there"


def report_table(report: dict) -> Table:
    """The report as a table for people: one column a file, one row a count."""
    table = Table("", "train", "val", title="Prepared data")
    table.columns[1].justify = table.columns[2].justify = "right"
    sides = [report["train"], report["val"]]

    def add(title: str, values: Sequence[object]) -> None:
        table.add_row(title, *(f"{value:,}" if isinstance(value, int) else str(value) for value in values))

    add("schema", [", ".join(sorted({file["schema"] for file in side["files"]})) for side in sides])
    add("rows read", [side["rows_raw"] for side in sides])
    for group, prefix in (("rows_left_out", "- "), ("languages", "language "), ("answer_kinds", "")):
        if group == "languages":
            add("rows kept", [side["rows_kept"] for side in sides])
        for name in sorted({name for side in sides for name in side[group]}):
            add(prefix + name, [side[group].get(name, 0) for side in sides])
    add("questions with conflicting answers", [side["questions_conflicting"] for side in sides])
    for name in ("repaired", "dropped"):
        add(f"control characters {name}", [side["control_characters"][name] for side in sides])
    for name in ("median", "p99", "max"):
        add(f"prompt characters {name}", [side["prompt_chars"][name] for side in sides])
    add("content sha256", [side["content_sha256"][:12] for side in sides])
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.retool.prepare_data", description="Prepare training and validation data for verl."
    )
    source = "parquet or jsonl file, folder of them, hub cache folder, or hub id kept under the data root"
    hub = hub_ids()
    parser.add_argument("--train", default=hub["train"], metavar="PATH", help=f"DAPO-Math-17k: {source}")
    parser.add_argument("--val", default=hub["val"], metavar="PATH", help=f"AIME 2024: {source}")
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for the files; default: <data root>/data/retool"
    )
    parser.add_argument("--max-rows", type=_positive, metavar="N", help="keep the first N questions of each file")
    parser.add_argument("--language", choices=("en", "zh", "all"), default="all", help="training questions to keep")
    parser.add_argument(
        "--data-root", metavar="DIR", type=Path, help="where hub ids are looked up; as set, if left out"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code, 0 or 2."""
    args = _parser().parse_args(argv)
    console = Console()
    try:
        data_root = args.data_root or Settings.load().data_root
        out = args.out or prepared_data(data_root)[0].parent
        report = prepare(
            args.train,
            args.val,
            out,
            limits=Limits(args.max_rows, args.language),
            data_root=data_root,
            console=console,
        )
    except VerlAgsError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    console.print(report_table(report))
    for conflict in report["train"]["conflicts"]:
        console.print(f"conflict {conflict['index']}: answers {conflict['answers']}", markup=False, soft_wrap=True)
    console.print(f"written to {out}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
