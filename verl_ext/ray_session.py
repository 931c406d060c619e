"""Ray's session of a run on this machine: where it is, and what is left of it when the run's own process was killed.

After a SIGKILL of the driver Ray's own processes end with it, but for two agents of its node, and vLLM's engine, which
holds the GPU's memory. Nobody is left to end them, so the next attempt does.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from verl_ext.runs import LIVE, RAY_SESSION

_PREFIX = "/tmp/ags-"  # noqa: S108 - short, since Ray puts sockets below it and their paths have 107 bytes at most
_LOG_SUFFIXES = (".out", ".err", ".log")


def note(run_dir: Path, session: Path) -> None:
    """Write down where the session is, for whoever comes after this process."""
    content = {"session": str(session), "node": socket.gethostname()}
    (run_dir / RAY_SESSION).write_text(json.dumps(content) + "\n", encoding="utf-8")


def show_logs(session: Path, logs: Path) -> None:
    """Let the run folder lead to what the processes say, while they say it."""
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # a file system without links: the run goes on without
        (logs / LIVE).symlink_to(session / "session_latest" / "logs", target_is_directory=True)


def put_away(run_dir: Path, session: Path, logs: Path, pids: Iterable[int]) -> None:
    """Move what the processes said to `logs`, and remove the session and its engines' sockets.

    Args:
        run_dir: the run's folder.
        session: Ray's folder.
        logs: made if missing.
        pids: of the processes that had an engine's worker.
    """
    _keep_logs(session, logs)
    for pid in pids:
        _remove_engine_sockets(pid)
    shutil.rmtree(session, ignore_errors=True)
    (run_dir / RAY_SESSION).unlink(missing_ok=True)


def end_leftovers(run_dir: Path, logs: Path) -> int:
    """End what a killed attempt left on this machine; the number of processes.

    Args:
        run_dir: the run's folder. Nobody else runs this run: `attempts.held`.
        logs: where what the processes said is moved to.
    """
    try:
        content = json.loads((run_dir / RAY_SESSION).read_text(encoding="utf-8"))
        session, node = str(content["session"]), content["node"]
    except (OSError, ValueError, KeyError):
        return 0
    if node != socket.gethostname() or not session.startswith(_PREFIX):
        return 0
    found = list(_processes(session, run_dir))
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=10)
    put_away(run_dir, Path(session), logs, worker_pids(Path(session)))
    return len(found)


def _processes(session: str, run_dir: Path) -> Iterator[psutil.Process]:
    """Processes of this user that name the session in their command, or the run in their environment."""
    marks = (f"TENSORBOARD_DIR={run_dir / 'tensorboard'}\0".encode(), session.encode())
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            folder = Path(f"/proc/{process.pid}")
            if marks[0] in (folder / "environ").read_bytes() or marks[1] in (folder / "cmdline").read_bytes():
                yield process


def worker_pids(session: Path) -> set[int]:
    """As Ray has them in the names of its workers' logs: worker-<id>-<job>-<pid>.out."""
    names = [path.stem.rpartition("-")[2] for path in (session / "session_latest" / "logs").glob("worker-*")]
    return {int(name) for name in names if name.isdigit()}


def _keep_logs(session: Path, logs: Path) -> None:
    """Copy what is not empty."""
    logs.mkdir(parents=True, exist_ok=True)
    (logs / LIVE).unlink(missing_ok=True)
    for path in (session / "session_latest" / "logs").glob("*"):
        if path.is_file() and path.suffix in _LOG_SUFFIXES and path.stat().st_size:
            with contextlib.suppress(OSError):
                shutil.copy2(path, logs / path.name)


def _remove_engine_sockets(pid: int) -> None:
    """Remove the sockets that verl 0.6.1 leaves in /tmp, one for each process with an engine's worker."""
    for path in Path("/tmp").glob(f"verl_vllm_zmq_{pid}_*.ipc"):  # noqa: S108 - verl's place
        path.unlink(missing_ok=True)
