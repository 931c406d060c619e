"""The run folder: what is in it and what it is called.

runs/<run id>/
    config.yaml        resolved configuration, as verl got it
    request.json       what was asked for; `invoke train --resume` asks for it again
    manifest.json      versions, hashes of lock and data, git revision, the command
    data-report.json   what became of the raw rows, by prepare-data, if that made the data
    phases.jsonl       when each phase of the start began
    gpu-memory.json    the highest use of each of this machine's GPUs, in GiB
    metrics.jsonl      one line a step
    alarms.jsonl       one line for each alarm that started or ended (verl_ext.alarms); not there without any
    rollouts/          one parquet file a step (verl_ext.trajectory)
    sandboxes/         ledgers: what was created and killed
    sandboxes.json     the last counts
    logs/              what the processes said; logs/live/ while they say it
    checkpoints/       verl's, each whole or not there (verl_ext.checkpoint)
    attempts/          what an attempt that died left behind its last checkpoint (verl_ext.attempts)
    lock               held while the run runs
    ray-session.json   where Ray's session is; gone when the run ended by itself
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

CONFIG = "config.yaml"
MANIFEST = "manifest.json"
REQUEST = "request.json"
ATTEMPTS = "attempts"
LOCK = "lock"
RAY_SESSION = "ray-session.json"
DATA_REPORT = "data-report.json"
PHASES = "phases.jsonl"
GPU_MEMORY = "gpu-memory.json"
METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
LIVE = "live"  # in logs: leads to Ray's own while the run goes on


def new_run_id(name: str) -> str:
    """A run id that sorts by time: `retool-20251130-141502-1a2b`."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"


def check_run_id(run_id: str) -> str:
    """The id if it can name a folder and label a sandbox.

    Raises:
        ConfigurationError: it holds something else than letters, digits, dot, dash and underscore.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run_id):
        raise ConfigurationError(f"run id {run_id!r}: use letters, digits, '.', '_' and '-', at most 100 of them")
    return run_id


def find_run(runs_folder: Path, text: str) -> Path:
    """The folder of the run that a user means by a path or by its name; a path to a run wins.

    Args:
        runs_folder: where runs are, below the data root.
        text: what the user wrote.

    Raises:
        ConfigurationError: there is no such run, or the folder is none.
    """
    folder = Path(text).expanduser()
    if not (folder / CONFIG).is_file() and (runs_folder / text / CONFIG).is_file():
        folder = runs_folder / text
    if not (folder / CONFIG).is_file():
        if folder.is_dir():
            inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))  # an evaluation holds some
            cure = f"; it holds runs: give {' or '.join(str(folder / name) for name in inner)}" if inner else ""
            raise ConfigurationError(f"{folder} is no run folder: it has no {CONFIG}{cure}")
        names = sorted(path.parent.name for path in runs_folder.glob(f"*/{CONFIG}"))
        near = difflib.get_close_matches(text, names, n=1) or names[-1:]
        hint = f"did you mean {near[0]}?" if near else "there is none yet"
        raise ConfigurationError(f"no run {text!r}, neither a folder nor a name in {runs_folder}: {hint}")
    return folder.absolute()


def note_phase(run_dir: Path, name: str) -> None:
    """Append a moment of the start to `phases.jsonl`."""
    with (run_dir / PHASES).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"phase": name, "time_s": round(time.time(), 3)}) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSONL file that may still be growing; empty if it is not there yet."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line]


def without_nan(value: Any) -> Any:
    """The value with every NaN and infinity replaced by None, since JSON has no word for them."""
    if isinstance(value, dict):
        return {key: without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_whole(path: Path, text: str) -> None:
    """Replace a file by `text` in one step, forced to the disk."""
    scratch = path.with_name(f".{path.name}.part")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
