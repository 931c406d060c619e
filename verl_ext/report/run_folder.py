"""A run folder as it is now: whole, growing, or damaged. What cannot be read is left out and said."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from verl_ext import runs
from verl_ext.errors import ConfigurationError
from verl_ext.trajectory import ROLLOUTS

EVALUATION_SUMMARY = "summary.json"
COLUMNS = (
    "problem_id", "data_source", "group", "trajectory_id", "ground_truth", "prompt_ids", "response_mask", "turns",
    "reward", "accuracy", "verdict", "extracted", "stop_reason", "infra_failed", "infra_error",
)  # fmt: skip
"""Of verl_ext.trajectory.SCHEMA, what is shown of a trajectory. `prompt` too, where a file has it."""


@dataclass(frozen=True)
class StepFile:
    """The trajectories of one step on disk.

    Attributes:
        path: the parquet file.
        step: of the training.
        validation: whether these are a validation's.
        rows: trajectories in it.
    """

    path: Path
    step: int
    validation: bool
    rows: int


@dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        folder: where it is.
        metrics: numbers by name, by step; a step that was logged again (a resumed run) has the later ones.
        logged_s: when the last line of the metrics was written, in seconds since the epoch; None without one.
        config: as resolved, {} if it cannot be read.
        manifest: versions and hashes, {} if it cannot be read.
        data_report: of prepare-data, None if there is none.
        phases: moments of the start, each with `phase` and `time_s`.
        alarms: in order, each with `step`, `alarm`, `state`, `value`, `threshold`, `cause`, `cure`.
        evaluations: summaries of those beside it whose subject is a checkpoint of this run, oldest first.
        step_files: trajectories, in order of step, a validation before the training of its step.
        notes: what could not be read, with the cure.
    """

    folder: Path
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    logged_s: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    data_report: dict[str, Any] | None = None
    phases: list[dict[str, Any]] = field(default_factory=list)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    step_files: list[StepFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The run's id: its folder's name."""
        return self.folder.name

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps at which a number was logged, and the number."""
        points = [(step, numbers[key]) for step, numbers in sorted(self.metrics.items()) if key in numbers]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        """The newest value of a number."""
        values = self.series(key)[1]
        return values[-1] if values else None


def find_run(text: str, runs_dir: Path) -> Path:
    """The folder that a user means by a path or by the name of a run.

    Args:
        text: what was given.
        runs_dir: where runs are below the data root.

    Raises:
        ConfigurationError: it is not there, or is no run.
    """
    folders = [path for path in (Path(text).expanduser(), runs_dir / text) if path.is_dir()]
    if not folders:
        names = sorted(path.parent.name for path in runs_dir.glob(f"*/{runs.MANIFEST}"))
        known = f"; runs there: {', '.join(names[-8:])}" if names else ", which holds no run"
        raise ConfigurationError(
            f"no run {text!r}: it is neither a folder nor a run in {runs_dir}{known}. Give the run's folder, or set "
            "VERL_EXT_DATA_ROOT (--data-root) to where it was trained"
        )
    folder = next((path for path in folders if _is_run(path)), folders[0])
    inner = sorted(path.parent.name for path in folder.glob(f"*/{runs.MANIFEST}"))
    if (folder / EVALUATION_SUMMARY).is_file() and inner:
        raise ConfigurationError(
            f"{folder} is an evaluation, whose numbers are in {EVALUATION_SUMMARY} and in the report of the run that "
            f"was evaluated; for its trajectories give {' or '.join(str(folder / name) for name in inner)}"
        )
    if not _is_run(folder):
        raise ConfigurationError(
            f"{folder} is no run: it has neither {runs.CONFIG} nor {runs.METRICS}. Give a folder below {runs_dir}"
        )
    return folder.absolute()


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (runs.CONFIG, runs.MANIFEST, runs.METRICS, ROLLOUTS))


def read_run(folder: Path) -> Run:
    """Everything of a run folder that a report shows, but for the trajectories themselves.

    Raises:
        ConfigurationError: nothing was measured yet.
    """
    notes: list[str] = []
    lines = list(_lines(folder / runs.METRICS, notes, "step", "time_s", "data"))
    metrics: dict[int, dict[str, float]] = {}
    for line in lines:
        numbers = {key: float(value) for key, value in line["data"].items() if _is_number(value)}
        metrics.setdefault(int(line["step"]), {}).update(numbers)
    step_files = list(_step_files(folder, notes))
    phases = list(_lines(folder / runs.PHASES, notes, "phase", "time_s"))
    if not metrics and not step_files:
        reached = f"it has come to {phases[-1]['phase']!r}" if phases else "it has not begun"
        raise ConfigurationError(
            f"{folder} has no step yet, {reached}: write the report again when the first step is logged; if the run "
            f"is over, {folder / runs.LOGS} says why"
        )
    return Run(
        folder=folder,
        metrics=metrics,
        logged_s=max((float(line["time_s"]) for line in lines), default=None),
        config=_document(folder / runs.CONFIG, notes) or {},
        manifest=_document(folder / runs.MANIFEST, notes) or {},
        data_report=_document(folder / runs.DATA_REPORT, []),
        phases=phases,
        alarms=list(_lines(folder / runs.ALARMS, notes, "step", "alarm")),
        evaluations=_evaluations(folder),
        step_files=step_files,
        notes=notes,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _lines(path: Path, notes: list[str], *keys: str) -> Iterator[dict[str, Any]]:
    """The lines of a JSONL file that are whole and have these keys; the last one may still be growing."""
    try:
        pieces = path.read_bytes().split(b"\n")[:-1]
    except OSError:
        return  # not written yet, or never: alarms that nothing set off
    bad = 0
    for piece in filter(None, pieces):
        try:
            value = json.loads(piece)
        except ValueError:
            value = None
        if isinstance(value, dict) and all(key in value for key in keys):
            yield value
        else:
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} damaged line(s) are left out. Copy the file again if this is a copy.")


def _document(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """A YAML or JSON file that holds a mapping; None if not."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=yaml.CSafeLoader)
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} holds no mapping, so what it says is left out. Copy it again if this is a copy.")
    except (OSError, ValueError, yaml.YAMLError):
        notes.append(f"{path.name} cannot be read, so what it says is left out. Copy it again if this is a copy.")
    return None


def _evaluations(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.parent.glob(f"*/{EVALUATION_SUMMARY}"):
        summary = _document(path, [])  # another folder's fault is no note on this one
        if summary and summary.get("kind") == "evaluation":
            subject = summary.get("subject")
            if isinstance(subject, dict) and subject.get("run_id") == folder.name:
                found.append(summary)
    return sorted(found, key=lambda summary: str(summary.get("created")))


def _step_files(folder: Path, notes: list[str]) -> Iterator[StepFile]:
    """The rollout files whose footers can be read: a parquet file that is cut off has none."""
    found = []
    for path in (folder / ROLLOUTS).glob("*-*.parquet"):
        kind, _, number = path.stem.partition("-")
        if kind not in ("train", "val") or not number.isdigit():
            continue
        try:
            with pq.ParquetFile(path) as parquet:
                known, rows = set(parquet.schema_arrow.names), parquet.metadata.num_rows
        except (OSError, pa.ArrowException):
            notes.append(
                f"{path.name} is cut off or damaged and is left out. While the run goes on, write the report again "
                "when the step is over; if this is a copy, copy the file again."
            )
            continue
        if missing := [name for name in COLUMNS if name not in known]:
            notes.append(f"{path.name} is no file of trajectories, and is left out: it has no {', '.join(missing)}.")
        else:
            found.append(StepFile(path, int(number), kind == "val", rows))
    yield from sorted(found, key=lambda file: (file.step, not file.validation))


def between(files: Sequence[StepFile], steps: tuple[int, int] | None) -> list[StepFile]:
    """The files of the steps from the first to the last, both included; all if None."""
    return [file for file in files if steps is None or steps[0] <= file.step <= steps[1]]
