"""The report on prepared data: what was read, kept and left out, as numbers and as a table for people."""

import io
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from recipe.retool.questions import answer_kind, build_prompt, language_of
from recipe.retool.selection import Selection, Split

_CONFLICTS_LISTED = 50
_QUESTION_CHARS_LISTED = 160
_WIDTH = 100
# Upper ends of the picture's classes.
_CHAR_CLASSES = (100, 200, 300, 400, 500, 600, 800, 1_000, 1_500, 2_000, 4_000)
_TOKEN_CLASSES = (150, 200, 250, 300, 350, 400, 500, 600, 800, 1_000, 1_500, 2_048)


def report_split(split: Split, selection: Selection, content_sha256: str) -> dict:
    """One side's numbers, in what JSON can hold."""
    kept = selection.kept
    return {
        "files": [{"name": file.path.name, "schema": file.schema.name} for file in split.files],
        "rows_raw": split.rows,
        "rows_kept": len(kept),
        "rows_left_out": dict(sorted(selection.causes.items())),
        "questions": len(split.problems),
        "questions_conflicting": len(selection.conflicts),
        "conflicts": [
            {
                "index": problem.problem_id,
                "answers": dict(sorted(problem.answers.items())),
                "question": problem.question.text[:_QUESTION_CHARS_LISTED],
            }
            for problem in selection.conflicts[:_CONFLICTS_LISTED]
        ],
        "control_characters": {
            "repaired": sum(problem.question.repaired for problem in kept),
            "dropped": sum(problem.question.dropped for problem in kept),
            "questions": sum(problem.question.repaired + problem.question.dropped > 0 for problem in kept),
        },
        "data_sources": _counts(problem.data_source for problem in kept),
        "languages": _counts(language_of(problem.question.text) for problem in kept),
        "answer_kinds": _counts(answer_kind(problem.answer) for problem in kept),
        "prompt_chars": _lengths([len(build_prompt(problem.question.text)) for problem in kept], _CHAR_CLASSES),
        # With the chat template and the tool's schema; None where no model was given to count with.
        "prompt_tokens": None if selection.tokens is None else _lengths(selection.tokens, _TOKEN_CLASSES),
        "aime_checked": None if split.aime is None else asdict(split.aime),
        "content_sha256": content_sha256,
    }


def _counts(values: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(values).items()))


def _lengths(lengths: Sequence[int], classes: tuple[int, ...]) -> dict:
    ordered = sorted(lengths) or [0]
    ends = [*classes, None]
    counts = dict.fromkeys(ends, 0)
    for length in lengths:
        counts[next((end for end in classes if length <= end), None)] += 1
    return {
        "median": ordered[len(ordered) // 2],
        "p99": ordered[len(ordered) * 99 // 100],
        "max": ordered[-1],
        "up_to": [[end, counts[end]] for end in ends],
    }


def report_table(report: dict) -> Table:
    """The report as a table for people: one column a file, one row a count."""
    table = Table("", "train", "val", title="Prepared data")
    table.columns[1].justify = table.columns[2].justify = "right"
    sides = [report["train"], report["val"]]

    def add(title: str, values: Sequence[object]) -> None:
        table.add_row(title, *(f"{value:,}" if isinstance(value, int) else str(value) for value in values))

    add("schema", [", ".join(sorted({file["schema"] for file in side["files"]})) for side in sides])
    add("rows read", [side["rows_raw"] for side in sides])
    add("different questions", [side["questions"] for side in sides])
    for group, prefix in (
        ("rows_left_out", "- "),
        ("data_sources", "of "),
        ("languages", "language "),
        ("answer_kinds", ""),
    ):
        if group == "data_sources":
            add("rows kept", [side["rows_kept"] for side in sides])
        for name in sorted({name for side in sides for name in side[group]}):
            add(prefix + name, [side[group].get(name, 0) for side in sides])
    add("questions with conflicting answers", [side["questions_conflicting"] for side in sides])
    for name in ("repaired", "dropped"):
        add(f"control characters {name}", [side["control_characters"][name] for side in sides])
    for name in ("median", "p99", "max"):
        add(f"prompt characters {name}", [side["prompt_chars"][name] for side in sides])
    for name in ("median", "p99", "max"):
        add(f"prompt tokens {name}", [(side["prompt_tokens"] or {}).get(name, "not counted") for side in sides])
    add("AIME answers checked", [_aime_cell(side["aime_checked"]) for side in sides])
    add("content sha256", [side["content_sha256"][:12] for side in sides])
    return table


def _aime_cell(checked: dict | None) -> str:
    if checked is None:
        return "none"
    return f"{checked['answers_right']} right" + f", {checked['not_known']} of unknown text" * bool(
        checked["not_known"]
    )


def report_text(report: dict) -> str:
    """The table and the list of conflicts as plain text."""
    console = Console(file=io.StringIO(), width=_WIDTH, force_terminal=False, color_system=None)
    console.print(report_table(report))
    for name in ("train", "val"):
        for conflict in report[name]["conflicts"]:
            line = f"conflict in {name}, {conflict['index']}: answers {conflict['answers']}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    note = f"Instruction under every question: {report['instruction']}"
    console.print(note, markup=False, highlight=False, soft_wrap=True)
    file = console.file
    assert isinstance(file, io.StringIO)  # noqa: S101 - made above
    return file.getvalue()
