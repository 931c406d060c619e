"""The local server as a child process: started, waited for, asked for its counts, stopped with its sandboxes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from verl_ext.errors import SandboxUnavailableError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LAST_WORDS_CHARS = 800


@dataclass
class RunningServer:
    """A server in a process of its own; it ends with this process, or with `stop`.

    Attributes:
        url: control plane and sandboxes, for E2B_API_URL and E2B_SANDBOX_URL.
        isolation: the tier in force.
        pid: of the server.
        process: what was started: the server, or a wrapper around it.
    """

    url: str
    isolation: str
    pid: int
    process: subprocess.Popen[bytes]

    def stats(self, **labels: str) -> dict[str, Any]:
        """The server's counts of sandboxes, only those that carry `labels` if given.

        Raises:
            SandboxUnavailableError: it does not answer.
        """
        query = "&".join(f"metadata={key}%3D{value}" for key, value in labels.items())
        try:
            with urllib.request.urlopen(f"{self.url}/stats?{query}", timeout=10) as answer:  # noqa: S310 - our own URL
                return json.load(answer)
        except (OSError, ValueError) as error:
            raise SandboxUnavailableError(f"the local sandbox server at {self.url} does not answer: {error}") from error

    def stop(self) -> int:
        """End the server and every sandbox of it; returns its exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # a wrapper would not pass it on
        return _wait_for_end(self.process)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def start_server(
    flags: Sequence[str] = (),
    *,
    log_path: Path | None = None,
    wrapper: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> RunningServer:
    """Start a server and wait until it is ready.

    Args:
        flags: of `python -m verl_ext.sandbox.server`.
        log_path: where its standard error goes; nowhere by default.
        wrapper: a command in front of it, for example one that changes the user.
        env: its environment, this process's by default.

    Raises:
        SandboxUnavailableError: it did not start in `START_TIMEOUT_S`; the message has its last words.
    """
    command = [*wrapper, sys.executable, "-m", "verl_ext.sandbox.server", *flags, "--parent-pid", str(os.getpid())]
    root = Path(__file__).resolve().parents[3]
    log_path = log_path or Path(os.devnull)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C must reach the run first, which ends the sandboxes and then the server.
        # Unbuffered: `select` sees the pipe only, not what a buffer has taken out of it.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, start_new_session=True, bufsize=0, env=env, cwd=root
        )
    try:
        ready = _read_ready(process)
        if ready is None:
            words = log_path.read_text(encoding="utf-8", errors="replace").strip()[-_LAST_WORDS_CHARS:]
            status = process.poll()
            what = f"it ended with status {status}" if status is not None else f"not ready after {START_TIMEOUT_S:g} s"
            raise SandboxUnavailableError(f"the local sandbox server did not start, {what}: {words or 'no words'}")
        return RunningServer(ready["url"], ready["isolation"], ready["pid"], process)
    except BaseException:  # also an interrupt: whoever asked has nothing yet to stop it by
        process.terminate()
        _wait_for_end(process)
        raise


def _read_ready(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        readable, _, _ = select.select([process.stdout], [], [], 0.5)
        if not readable:
            continue
        line = process.stdout.readline()
        if not line:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            return None
        with contextlib.suppress(ValueError):
            ready = json.loads(line)
            if isinstance(ready, dict) and ready.get("event") == "ready":
                return ready
    return None


def _wait_for_end(process: subprocess.Popen[bytes]) -> int:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()
    return process.wait()
