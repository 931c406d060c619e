"""Real training runs, each a subprocess of the command that a user types; minutes each, on two cores."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
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


# One secret of each kind, in the `.env` of every run of the session.
CANARIES = {
    name: f"{prefix}canary{name.lower().replace('_', '')}0123"
    for name, prefix in (
        ("E2B_API_KEY", "ark_"),
        ("HF_TOKEN", "hf_"),
        ("WANDB_API_KEY", "wb_"),
        ("SWANLAB_API_KEY", "sl_"),
        ("MLFLOW_TRACKING_TOKEN", "ml_"),
    )
}


@dataclass(frozen=True)
class Finished:
    """A run that ended: how, with what words, its folder, and what was seen while it ran."""

    status: int
    output: str
    run_dir: Path
    watched: Watch

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One data root for the session, so that the tiny model is made once; AGS_TEST_DATA_ROOT goes on with another's."""
    return Path(os.environ.get("AGS_TEST_DATA_ROOT") or tmp_path_factory.mktemp("data-root"))


@pytest.fixture(scope="session")
def environment(data_root: Path, leftovers: Callable[[], list[str]]) -> dict[str, str]:
    # `leftovers` first, so that it has looked around before anything runs.
    ours = ("VERL_EXT_", "E2B_", *CANARIES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env_file = data_root / "secrets.env"
    lines = [f"{name}={value}" for name, value in CANARIES.items()]
    # With a key a run would go to the service; these stay on this machine.
    env_file.write_text("\n".join([*lines, "VERL_EXT_SANDBOX_BACKEND=local"]) + "\n")
    return {**kept, "VERL_EXT_DATA_ROOT": str(data_root), "VERL_EXT_ENV_FILE": str(env_file)}


@pytest.fixture(scope="session")
def canaries() -> dict[str, str]:
    """The secrets of every run's `.env`, by name."""
    return CANARIES


@pytest.fixture(scope="session")
def smoke(environment: dict[str, str], data_root: Path) -> Callable[..., Finished]:
    """`invoke smoke` without the installation, which the session already has."""

    def run(run_id: str, *arguments: str) -> Finished:
        command = [sys.executable, "-m", "recipe.smoke.run", "--run-id", run_id, *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        with Watch(process.pid) as watched:
            output, _ = process.communicate(timeout=1500)
        return Finished(process.returncode, output, data_root / "runs" / run_id, watched)

    return run


@pytest.fixture(scope="session")
def smoke_run(smoke: Callable[..., Finished]) -> Finished:
    """The whole smoke run, which several modules look at."""
    return smoke("smoke")


class Watch:
    """Looks for the canaries while a run goes on, in what is gone when it has ended.

    Attributes:
        found: where one was seen.
        looked: how many command lines, session files and answers of Ray were looked at. A run starts no dashboard;
            what the dashboard's API would show is asked of Ray's control store, where it has it from.
    """

    def __init__(self, pid: int) -> None:
        self.found: set[str] = set()
        self.looked = {"command lines": 0, "session files": 0, "control store": 0, "metrics pages": 0}
        self._asked_s = -60.0
        self._root = pid
        self._before = set(Path("/tmp").glob("ags-*"))
        self._seen: dict[Path, tuple[int, int]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._ended.wait(5):
            processes = self._processes()
            self._look_at_processes(processes)
            self._look_at_sessions()
            self._look_at_metrics(processes)
            if time.monotonic() - self._asked_s > 60:  # each is a process that imports Ray
                self._look_at_control_store(processes)

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._root)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _look_at_processes(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            for kind in ("cmdline", "environ"):
                # Of a process that is ending neither can be read.
                with contextlib.suppress(OSError):
                    content = Path(f"/proc/{process.pid}/{kind}").read_bytes()
                    self.looked["command lines"] += bool(content)
                    self._search(content, f"{kind} of {process.pid}")

    def _look_at_sessions(self) -> None:
        """Ray's session folders, of which only the logs are kept; of a run of another test too, which is no harm."""
        for session in set(Path("/tmp").glob("ags-*")) - self._before:
            for path in session.rglob("*"):
                with contextlib.suppress(OSError):
                    if path.is_symlink() or not path.is_file():
                        continue
                    state = (path.stat().st_size, path.stat().st_mtime_ns)
                    if self._seen.get(path) != state:
                        self._seen[path] = state
                        self.looked["session files"] += 1
                        self._search(path.read_bytes(), str(path))

    def _look_at_control_store(self, processes: list[psutil.Process]) -> None:
        """Jobs with their runtime_env, and nodes, as /api/jobs and /nodes have them."""
        words = [word for process in processes for word in _words(process) if word.startswith("--gcs-address=")]
        for address in {word.partition("=")[2] for word in words}:
            # In a process of its own: Ray's client ends the process that it is in when the store goes.
            with contextlib.suppress(subprocess.SubprocessError):
                command = [sys.executable, "-c", ASK_CONTROL_STORE, address]
                answer = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
                # Our own variables are in what a job says of itself: so it was a job's answer.
                if b"VERL_EXT_ENV_FILE" in answer:
                    self.looked["control store"] += 1
                    self._asked_s = time.monotonic()
                self._search(answer, "Ray's control store")

    def _look_at_metrics(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            try:
                if "ray/dashboard" not in " ".join(process.cmdline()):
                    continue
                ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
            except psutil.Error:
                continue
            for port in ports:
                with (
                    contextlib.suppress(OSError, ValueError, http.client.HTTPException),
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as answer,
                ):
                    self._search(answer.read(), f"{process.pid}'s page")
                    self.looked["metrics pages"] += 1

    def _search(self, content: bytes, where: str) -> None:
        self.found |= {f"{name} in {where}" for name, value in CANARIES.items() if value.encode() in content}


ASK_CONTROL_STORE = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print(client.get_all_job_info(), client.get_all_node_info())
"""


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


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
