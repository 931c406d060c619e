"""The local sandbox server as a child process: started when no key is set, stopped with the run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.errors import SandboxUnavailableError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class LocalServer:
    """A server that runs.

    Attributes:
        url: control plane and sandboxes, for E2B_API_URL and E2B_SANDBOX_URL.
        isolation: the tier that it found to work here.
        pid: its process.
    """

    url: str
    isolation: str
    pid: int

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


@contextlib.contextmanager
def running_server(log_path: Path, options: Sequence[str] = ()) -> Iterator[LocalServer]:
    """Start the server, wait until it is ready, stop it at the end with all its sandboxes.

    Args:
        log_path: where its standard error goes.
        options: further options of `python -m verl_ext.sandbox.server`.

    Raises:
        SandboxUnavailableError: it did not start; the message has its last words.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--parent-pid", str(os.getpid()), *options]
    with log_path.open("wb") as log:
        # A session of its own: Ctrl-C must reach the run first, which ends the sandboxes and then the server.
        # Unbuffered: `select` sees the pipe only, not what a buffer has taken out of it.
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True, bufsize=0)
    try:
        yield _wait_until_ready(process, log_path)
    finally:
        _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log_path: Path) -> LocalServer:
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        readable, _, _ = select.select([process.stdout], [], [], 0.5)
        if readable:
            line = process.stdout.readline()
            with contextlib.suppress(ValueError):
                ready = json.loads(line)
                if isinstance(ready, dict) and ready.get("event") == "ready":
                    return LocalServer(ready["url"], ready["isolation"], ready["pid"])
        if process.poll() is not None:
            break
    words = log_path.read_text(encoding="utf-8", errors="replace").strip()[-800:]
    raise SandboxUnavailableError(f"the local sandbox server did not start within {START_TIMEOUT_S:g} s: {words}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
