"""Prepares training and validation data: `python -m recipe.retool.prepare_data --train .. --val .. --out ..`.

Reads DAPO-Math-17k, AIME 2024 and 2025, MATH-500 as the hub has them, and anything that a YAML file describes; keeps
each question once, drops what cannot be trusted, counts every row that is left out by its cause, and writes
train.parquet, val.parquet and a report (report.json, report.txt, report.png). Same input, same output.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from recipe.retool.data_report import report_split, report_table
from recipe.retool.prepared import FORMAT, build_rows, write_prepared
from recipe.retool.prompt_tokens import PromptCounter
from recipe.retool.questions import INSTRUCTION
from recipe.retool.selection import CountTokens, Limits, Split, open_source, paths, read_split, select
from verl_ext.compose import hub_ids
from verl_ext.data_hash import hash_rows
from verl_ext.data_root import prepared_data
from verl_ext.errors import DataError, VerlAgsError
from verl_ext.settings import Settings

_LINE_ROWS = 250_000


def prepare(
    train: str | Sequence[str],
    val: str | Sequence[str],
    out_dir: str | Path,
    *,
    limits: Limits | None = None,
    model: Path | None = None,
    data_root: Path | None = None,
    console: Console | None = None,
    picture: bool = True,
) -> dict:
    """Prepare both sides and return the report, which is also written beside them.

    Args:
        train: Training data: file, folder, hub cache folder, hub id or YAML file, or several of them.
        val: Validation data, likewise.
        out_dir: Folder for train.parquet, val.parquet and the report.
        limits: What to leave out.
        model: Hugging Face folder whose tokenizer counts prompts; None counts no tokens.
        data_root: Where hub ids are looked up.
        console: Where progress goes; None is silent.
        picture: Whether to draw the report as well, which costs more than small data's preparation.

    Raises:
        DataError: the input cannot be used, or an AIME answer differs from the known one.
        ConfigurationError: out_dir cannot be written, or model has no tokenizer.
    """
    limits = limits or Limits()
    console = console or Console(quiet=True)
    val_split = _read("val", val, data_root, console)
    train_split = _read("train", train, data_root, console)
    report: dict = {"format": FORMAT, "instruction": INSTRUCTION, "max_prompt_tokens": limits.max_prompt_tokens}
    rows = {}
    held_out = {problem.key for problem in val_split.problems}
    for split, reserved in ((train_split, held_out), (val_split, frozenset[str]())):
        with _progress(console, f"counting tokens of {split.name}", len(split.problems)) as advance:
            count_tokens: CountTokens | None = PromptCounter(model, advance=advance) if model else None
            selection = select(split, limits, reserved, count_tokens)
        rows[split.name] = build_rows(selection.kept, split.name)
        report[split.name] = report_split(split, selection, hash_rows(rows[split.name]))
        if not selection.kept:
            causes = ", ".join(f"{rows} {cause}" for cause, rows in selection.causes.most_common()) or "none were there"
            raise DataError(f"no row of {paths(split.files)} is left: {causes}. Give other data or limits.")
    write_prepared(Path(out_dir), rows, report, picture=picture)
    return report


def _read(name: str, sources: str | Sequence[str], data_root: Path | None, console: Console) -> Split:
    opened = [open_source(one, name, data_root) for one in ([sources] if isinstance(sources, str) else sources)]
    total = sum(file.num_rows or 0 for files in opened for file in files) or None
    with _progress(console, f"reading {name}", total) as advance:
        return read_split(name, opened, advance)


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invoke prepare-data", description="Prepare training and validation data for verl."
    )
    source = (
        "parquet or jsonl file, folder of them, hub cache folder, hub id kept under the data root, or YAML description"
    )
    hub = hub_ids()
    for side in ("train", "val"):
        text = f"{source}; repeatable; {hub[side]} if left out"
        parser.add_argument(f"--{side}", action="append", metavar="PATH", help=text)
    parser.add_argument(
        "--out", metavar="DIR", type=Path, help="folder for the files; default: <data root>/data/retool"
    )
    parser.add_argument("--max-rows", type=_positive, metavar="N", help="keep the first N questions of each side")
    parser.add_argument("--language", choices=("en", "zh", "all"), default="all", help="training questions to keep")
    parser.add_argument("--model", metavar="DIR", type=Path, help="count prompts with this model's tokenizer")
    parser.add_argument(
        "--max-prompt-tokens", type=_positive, metavar="N", help="leave out longer training prompts; needs --model"
    )
    parser.add_argument(
        "--data-root", metavar="DIR", default="", help="where hub ids are looked up; as set, if left out"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit code, 0 or 2."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.max_prompt_tokens and not args.model:
        parser.error("--max-prompt-tokens needs --model, whose tokenizer counts")
    console = Console()
    try:
        data_root = Settings.load(flags={"--data-root": args.data_root}).data_root
        out = args.out or prepared_data(data_root)[0].parent
        report = prepare(
            args.train or hub_ids()["train"],
            args.val or hub_ids()["val"],
            out,
            limits=Limits(args.max_rows, args.language, args.max_prompt_tokens),
            model=args.model,
            data_root=data_root,
            console=console,
        )
    except VerlAgsError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False)
        return 2
    console.print(report_table(report))
    for conflict in report["train"]["conflicts"]:
        console.print(f"conflict {conflict['index']}: answers {conflict['answers']}", markup=False, soft_wrap=True)
    console.print(f"written to {out}, with report.txt, report.png and report.json", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
