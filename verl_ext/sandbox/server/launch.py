"""Starting the local server from Python and stopping it again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from verl_ext.errors import ConfigurationError

_STOP_TIMEOUT_S = 20.0


@dataclass
class RunningServer:
    """A server in a process of its own; it ends with this process, or with `stop`.

    Attributes:
        url: for E2B_API_URL and E2B_SANDBOX_URL.
        isolation: the tier in force.
        pid: of the server.
    """

    url: str
    isolation: str
    pid: int
    process: subprocess.Popen[str]

    def stop(self) -> int:
        """End the server and every sandbox of it; returns its exit status."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)  # a wrapper would not pass it on
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.wait()

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def start_server(
    flags: Sequence[str] = (),
    *,
    wrapper: Sequence[str] = (),
    stderr: IO[Any] | int | None = None,
    env: dict[str, str] | None = None,
) -> RunningServer:
    """Start a server and wait until it listens.

    Args:
        flags: of `python -m verl_ext.sandbox.server`.
        wrapper: a command in front of it, for example one that changes the user.
        stderr: where its log goes, as for subprocess.
        env: its environment, this process's by default.

    Raises:
        ConfigurationError: it ended instead; its log says why.
    """
    command = [*wrapper, sys.executable, "-m", "verl_ext.sandbox.server", *flags, "--parent-pid", str(os.getpid())]
    root = Path(__file__).resolve().parents[3]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=root)
    assert process.stdout is not None  # noqa: S101 - asked for above
    line = process.stdout.readline()
    if not line:
        process.stdout.close()
        raise ConfigurationError(f"the local sandbox server did not start (status {process.wait()}): see its log")
    ready = json.loads(line)
    return RunningServer(ready["url"], ready["isolation"], ready["pid"], process)
