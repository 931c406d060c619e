"""Where a run's lines go: plain lines, a terminal with a bar below them, or one JSON object a step.

| | standard output | standard error |
|---|---|---|
| a pipe or a file | every line | why a run ended |
| a terminal | every line, alarms in colour, below them a bar with the steps and the time left | why a run ended |
| `--json` | one object a step (`verl_ext.progress.step_object`), nothing else | every line; why a run ended |
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from verl_ext.progress import clock


class Display(NamedTuple):
    """What a run is shown with.

    Attributes:
        say: takes a line.
        tell: takes a step as an object.
        begin: called when the training starts, with the number of steps if it is known.
    """

    say: Callable[[str], None]
    tell: Callable[[dict[str, Any]], None] = lambda step: None
    begin: Callable[[int | None], None] = lambda steps: None


@contextlib.contextmanager
def display(*, as_json: bool = False) -> Iterator[Display]:
    """The display that fits: by the flag, and by whether standard output is a terminal."""
    if as_json:
        yield Display(writer(sys.stderr), lambda step: writer(sys.stdout)(json.dumps(step, allow_nan=False)))
    elif sys.stdout.isatty():
        with on_terminal(Console(highlight=False)) as shown:
            yield shown
    else:
        yield Display(writer(sys.stdout))


def writer(stream: TextIO) -> Callable[[str], None]:
    """Writes one line at once."""

    def write(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return write


@contextlib.contextmanager
def on_terminal(console: Console) -> Iterator[Display]:
    """Lines, above a bar from the training's start on; at the end it is gone."""
    left = TextColumn("{task.fields[left]}")
    bar = Progress(
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        left,
        console=console,
        transient=True,
    )

    def begin(steps: int | None) -> None:
        # Not before: what is said until then may come from other programs too, which know of no bar.
        bar.add_task("", total=steps, left="")
        bar.start()

    def tell(step: dict[str, Any]) -> None:
        words = f"{clock(step['left_s'])} left" if step["left_s"] else ""
        for task in bar.task_ids:
            bar.update(task, completed=step["step"], left=words)

    def say(line: str) -> None:
        # A line is a line: no markup, and no wrapping where somebody copies it from.
        console.print(Text(line, _style(line)), soft_wrap=True)

    try:
        yield Display(say, tell, begin)
    finally:
        bar.stop()


def _style(line: str) -> str:
    if line.startswith("ALARM "):
        return "bold red"
    return "green" if line.startswith("alarm ") else ""
