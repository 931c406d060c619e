"""A training run under way, to be hurt at a known moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

# What the README states: ten seconds of grace for verl's own error, and the time to put things away.
STATED_S = 60
Wanted = Callable[[psutil.Process], bool]


class Live:
    """One attempt of a run.

    Args:
        data_root: where its folder is.
        run_id: of the run.
        begin: starts the command; takes the options of Popen.
    """

    def __init__(self, data_root: Path, run_id: str, begin: Callable[..., subprocess.Popen[Any]]) -> None:
        self.run_dir = data_root / "runs" / run_id
        self.log = data_root / f"{run_id}-{time.monotonic_ns()}.log"
        self.started_s = time.monotonic()
        with self.log.open("wb") as log:
            self.process = begin(stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, timeout_s: float = 400) -> None:
        """Until the command has said so."""
        self.wait_until(lambda: words in self.said(), timeout_s)

    def wait_for_file(self, name: str, timeout_s: float = 400) -> None:
        """Until a file of the run folder is there; looks as often as it can, to act at that very moment."""
        path = self.run_dir / name
        self.wait_until(path.exists, timeout_s, every_s=0.001)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float, every_s: float = 0.5) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(every_s)

    def child(self, wanted: Wanted) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [process for process in children if wanted(process)]
        assert found, [line(process) for process in children]
        return found[0]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.end(STATED_S)

    def steps(self) -> list[int]:
        """Those that have ended."""
        return [int(step) for step in re.findall(r"^step (\d+)", self.said(), re.M)]

    def end(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has ended meanwhile
        return ""


def is_trainer(process: psutil.Process) -> bool:
    return line(process).startswith("ray::WorkerDict")


def is_agent_loop(process: psutil.Process) -> bool:
    return line(process).startswith("ray::AgentLoopProcess")


def is_engine(process: psutil.Process) -> bool:
    """A child of the fork server that vLLM's engine comes from (verl_ext/engine/process.py)."""
    parent = process.parent()
    return parent is not None and all("multiprocessing.forkserver" in line(each) for each in (process, parent))
