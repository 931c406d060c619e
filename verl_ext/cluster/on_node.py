"""What is run on each node as a Ray task. Sent there as code, so it needs nothing of ours to be installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def examine(project: str, arguments: list[str], timeout_s: float) -> tuple[int, str, str]:
    """Run `verl_ext.cluster.facts` in a process of its own: status, standard output, standard error.

    In a process of its own because Ray hides the GPUs from a task that asked for none, and has imported what the
    facts are about.
    """
    hidden = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}  # noqa: TID251
    inherited = os.environ.get("PYTHONPATH")  # noqa: TID251 - handed on
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [project, inherited]))
    command = [sys.executable, "-m", "verl_ext.cluster.facts", *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer in {timeout_s:g} s"
    return done.returncode, done.stdout, done.stderr


def leave_mark(folder: str, name: str) -> str:
    """Write an empty file on what should be shared; "" or why it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, name).touch()
    except OSError as error:
        return str(error)
    return ""


def read_marks(folder: str) -> list[str]:
    """Which of those files are seen from here."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - asks a network file system anew, as iterdir does
    except OSError:
        return []


def clock() -> float:
    """Seconds since the epoch, by this node."""
    return time.time()


def remove_marks(folder: str) -> None:
    """Delete the folder of marks; another node may have done so already."""
    shutil.rmtree(folder, ignore_errors=True)
