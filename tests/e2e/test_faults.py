"""A run that is hurt ends within a stated time, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
# What the README states: ten seconds of grace for verl's own error, and the time to put things away.
STATED_S = 60


class Live:
    """A smoke run under way."""

    def __init__(self, environment: dict[str, str], data_root: Path, run_id: str) -> None:
        self.run_dir = data_root / "runs" / run_id
        self.log = data_root / f"{run_id}.log"
        command = [sys.executable, "-m", "recipe.smoke.run", "--run-id", run_id, "trainer.total_training_steps=200"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, timeout_s: float = 400) -> None:
        deadline_s = time.monotonic() + timeout_s
        while words not in self.said():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.5)

    def child(self, wanted: Callable[[psutil.Process], bool]) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        found = [process for process in children if wanted(process)]
        assert found, [line(process) for process in children]
        return found[0]

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.end(STATED_S)

    def end(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def line(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def is_trainer(process: psutil.Process) -> bool:
    return line(process).startswith("ray::WorkerDict")


def is_engine(process: psutil.Process) -> bool:
    """A child of the fork server that vLLM's engine comes from (verl_ext/cpu.py)."""
    parent = process.parent()
    return parent is not None and all("multiprocessing.forkserver" in line(each) for each in (process, parent))


@pytest.mark.parametrize("victim", [is_trainer, is_engine])
def test_a_dead_process_ends_the_run_with_the_cause(
    victim: Callable[[psutil.Process], bool],
    environment: dict[str, str],
    data_root: Path,
    leftovers: Callable[[], list[str]],
):
    with Live(environment, data_root, f"kill-{victim.__name__}") as run:
        run.wait_for("step 1/200")
        assert list((run.run_dir / "logs" / "live").glob("worker-*.out"))
        run.child(victim).kill()
        assert run.end(STATED_S) == 70
    assert not (run.run_dir / "logs" / "live").is_symlink()
    assert list((run.run_dir / "logs").glob("worker-*.out"))
    last = run.said().strip().splitlines()[-1]
    assert any(word in last for word in ("died", "failed", "Died", "Dead")), run.said()
    assert leftovers() == []


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "local sandbox server at"),
        (signal.SIGTERM, "trainer is imported"),
        (signal.SIGTERM, "step 2/200"),
    ],
    ids=["ctrl-c-while-ray-starts", "sigterm-while-workers-start", "sigterm-in-a-step"],
)
def test_a_signal_ends_the_run_and_everything_in_it(
    number: signal.Signals,
    moment: str,
    environment: dict[str, str],
    data_root: Path,
    leftovers: Callable[[], list[str]],
):
    with Live(environment, data_root, f"signal-{number.name.lower()}-{moment.split()[0]}") as run:
        run.wait_for(moment)
        run.process.send_signal(number)
        assert run.end(STATED_S) == 128 + number, run.said()
    assert run.said().strip().splitlines()[-1] == f"ended by {number.name}"
    assert "leaked 0" in run.said()
    assert leftovers() == []
