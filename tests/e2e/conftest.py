"""Real training runs, each a subprocess of the command that a user types; minutes each, on two cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(item.fspath).is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.e2e)
            # Of the whole test, the run that its fixture makes included.
            item.add_marker(pytest.mark.timeout(1800))


@dataclass(frozen=True)
class Finished:
    """A run that ended: how, with what words, and its folder."""

    status: int
    output: str
    run_dir: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data root for the session, so that the tiny model is made once."""
    return tmp_path_factory.mktemp("data-root")


@pytest.fixture(scope="session")
def environment(data_root: Path, leftovers: Callable[[], list[str]]) -> dict[str, str]:
    # `leftovers` first, so that it has looked around before anything runs.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_EXT_", "E2B_"))}
    return {**kept, "VERL_EXT_DATA_ROOT": str(data_root)}


@pytest.fixture(scope="session")
def smoke(environment: dict[str, str], data_root: Path) -> Callable[..., Finished]:
    """`invoke smoke` without the installation, which the session already has."""

    def run(run_id: str, *arguments: str) -> Finished:
        command = [sys.executable, "-m", "recipe.smoke.run", "--run-id", run_id, *arguments]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1500,
        )
        return Finished(done.returncode, done.stdout, data_root / "runs" / run_id)

    return run


@pytest.fixture(scope="session")
def leftovers() -> Callable[[], list[str]]:
    """Processes and files of runs that should be gone; what was there before the first run does not count."""
    names = ("ray::", "raylet", "gcs_server", "VLLM::", "multiprocessing.forkserver", "verl_ext.sandbox.server")
    patterns = ("ags-*", "verl-sbx-*", "verl_vllm_zmq_*.ipc")

    def look() -> dict[str, str]:
        found = {str(path): str(path) for pattern in patterns for path in Path("/tmp").glob(pattern)}
        for process in psutil.process_iter(["cmdline", "create_time"]):
            line = " ".join(process.info["cmdline"] or ())
            if any(name in line[:250] for name in names):
                found[f"{process.pid} {process.info['create_time']}"] = line
        return found

    def grown_since_the_start() -> list[str]:
        now = look()
        parents = {pid.split()[0] for pid in before}
        return [
            line
            for key, line in now.items()
            if key not in before and not (key[0] != "/" and _has_ancestor(int(key.split()[0]), parents))
        ]

    before = look()
    return grown_since_the_start


def _has_ancestor(pid: int, pids: set[str]) -> bool:
    """Whether a process belongs to one that was there before: a server of other tests goes on making sandboxes."""
    try:
        return any(str(parent.pid) in pids for parent in psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return True
