"""`python -m verl_ext.report RUN [RUN ...]`, called by `invoke report`: one HTML file of a run, or of runs compared.

Exit status: 0 written; 2 something of the user's is wrong, the message names it and the cure.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from verl_ext.errors import ConfigurationError, VerlAgsError
from verl_ext.report.page import write_comparison, write_report
from verl_ext.report.run_folder import Run, between, find_run, read_run
from verl_ext.settings import Settings

REPORT = "report.html"
DEFAULT_MAX_MB = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Write it; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        settings, _ = Settings.read(options.env_file or None)  # a key that is wrong is nothing to a report
        runs_dir = Path(options.data_root or settings.data_root).expanduser() / "runs"
        runs = [read_run(find_run(text, runs_dir)) for text in options.runs]
        out = _write(runs, options)
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for run in runs:
        for note in run.notes:
            sys.stderr.write(f"{run.name}: {note}\n")
    sys.stdout.write(f"{out}\n")
    return 0


def _write(runs: Sequence[Run], options: argparse.Namespace) -> Path:
    names = "-and-".join(run.name for run in runs[1:])
    name = f"report-with-{names}.html" if names else REPORT
    out = Path(options.out).expanduser() if options.out else runs[0].folder / name
    started_s = time.monotonic()
    console = Console(stderr=True)
    try:
        if len(runs) > 1:
            write_comparison(runs, out)
            said = f"{len(runs)} runs compared"
        else:
            said = _report(runs[0], out, options, console)
        size_mb = out.stat().st_size / 1e6
    except OSError as error:
        raise ConfigurationError(f"{out} cannot be written ({error}): give --out a file that you may write") from error
    console.print(f"{said}, {size_mb:.1f} MB, {time.monotonic() - started_s:.1f} s", highlight=False)
    return out


def _report(run: Run, out: Path, options: argparse.Namespace, console: Console) -> str:
    chosen = between(run.step_files, options.steps)
    if options.steps and not chosen:
        known = sorted({file.step for file in run.step_files})
        there = f"{known[0]} to {known[-1]}" if known else "none"
        raise ConfigurationError(f"{run.folder} has no trajectories of these --steps; it has those of steps {there}")
    columns = (TextColumn("trajectories"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(file.rows for file in chosen))
        index = write_report(
            run, out, step_files=chosen, max_bytes=options.max_mb * 1e6, done=lambda rows: progress.advance(task, rows)
        )
    said = f"{index.count:,} trajectories of {len(run.metrics)} steps"
    if index.left_out:
        said += (
            f"; the texts of {index.left_out:,} are left out to keep to {options.max_mb} MB, whole prompts at a time "
            "(--max-mb takes more, --steps FIRST-LAST takes fewer steps)"
        )
    return said


def _steps(text: str) -> tuple[int, int]:
    if not (match := re.fullmatch(r"(\d+)(?:-(\d+))?", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is no step and no FIRST-LAST")
    return int(match[1]), int(match[2] or match[1])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="invoke report", description="Write a run as one HTML file; compare runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder or its name; several are compared")
    parser.add_argument("--out", default="", help=f"the file; {REPORT} in the (first) run's folder if left out")
    parser.add_argument("--steps", type=_steps, help="trajectories of these steps only: FIRST-LAST, or one")
    parser.add_argument("--max-mb", type=int, default=DEFAULT_MAX_MB, help="of the trajectories' texts, in the file")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of ./.env")
    return parser


if __name__ == "__main__":
    sys.exit(main())
