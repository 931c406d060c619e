"""Calls of one function in processes that can be killed: each with a limit on its time and on its memory.

Why not `concurrent.futures`: it cannot end one call. Why not a signal: `signal.alarm` works in the main thread only,
and verl 0.6.1 grades in others. Why processes: one sympy expression can hold the interpreter's lock for minutes.

The kernel keeps the limits, not Python: the process is ended by SIGALRM, SIGPROF or a failing allocation, whatever
it is doing, even when the process that asked is gone. Nothing is started before the first call. Safe to call from
any number of threads; after a fork the child starts processes of its own.
"""

import atexit
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from verl_ext.errors import GraderError

_ROOT = Path(__file__).resolve().parents[3]
_START_TIMEOUT_S = 120.0
"""For importing sympy on a machine whose cores are all busy; 0.5 s when they are not."""
_GRACE_S = 2.0
"""How much later than the kernel this side gives up."""
_STARTS = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use."""

    cpu_s: float = 2.0
    """Decides as a rule: unlike wall time it does not depend on who else uses the machine."""
    wall_s: float = 10.0
    memory_mib: int = 1024
    """Address space of the process, interpreter and sympy (about 150 MiB) included."""
    calls: int = 2_000
    """After so many calls a process is replaced, so that what it keeps cannot grow without end."""


class LimitReached(Exception):
    """A call used up its time or memory, or its function failed over the arguments."""


class _Killed(LimitReached):
    """The process was ended from outside, for example for the machine's memory: the arguments may be innocent."""


class KillablePool:
    """At most `size` processes, each running `function` for one call at a time.

    Args:
        function: "module:name" of a function that takes and returns what JSON can hold.
        limits: of each call.
        size: processes at most; they are started when needed.
        folder: where they stand; None is where this process does.
    """

    def __init__(self, function: str, limits: Limits | None = None, size: int = 2, folder: str | None = None) -> None:
        self.limits = limits or Limits()
        self._folder = folder
        self._function = function
        self._size = size
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._free = threading.Semaphore(self._size)
        self._idle: list[_Process] = []
        self._closes_at_exit = False

    def call(self, *arguments: Any) -> Any:
        """What the function returns for these arguments.

        Raises:
            LimitReached: the call was ended; the next one gets a new process.
            GraderError: no process can be started, which is a fault of the installation.
        """
        if self._owner != os.getpid():
            self._reset()  # forked: the processes and the lock's state belong to the parent
        with self._free:
            try:
                reply = self._ask(arguments)
            except _Killed:
                reply = self._ask(arguments)
        if "failed" in reply:
            raise LimitReached(reply["failed"])
        return reply["value"]

    def _ask(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
            if not self._closes_at_exit:
                atexit.register(self.close)
                self._closes_at_exit = True
        process = process or _start(self._function, self.limits, self._folder)
        try:
            reply = process.call(arguments, self.limits.wall_s + _GRACE_S)
        except BaseException:
            process.kill()
            raise
        if process.calls >= self.limits.calls or reply.get("failed") == "MemoryError":
            process.kill()
        else:
            with self._lock:
                self._idle.append(process)
        return reply

    def close(self) -> None:
        """End the processes; calls in flight end theirs. A later call starts anew."""
        if self._owner != os.getpid():
            return
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.kill()


def _start(function: str, limits: Limits, folder: str | None) -> "_Process":
    reason = ""
    for _ in range(_STARTS):
        process = _Process(function, limits, folder)
        try:
            reply = process.read(_START_TIMEOUT_S)
        except LimitReached as error:
            reason = str(error)
        else:
            if "ready" in reply:
                return process
            reason = reply["error"]
        process.kill()
    raise GraderError(
        f"the process that compares answers does not start: {reason}. See what `{sys.executable} -c 'import "
        f"{function.partition(':')[0]}'` says; invoke setup repairs the installation."
    )


class _Process:
    def __init__(self, function: str, limits: Limits, folder: str | None) -> None:
        command = [sys.executable, "-P", "-m", __name__, function, str(limits.cpu_s), str(limits.wall_s)]
        # A small environment: no key of the user's reaches a process that reads what a model wrote.
        environment = {"PYTHONPATH": str(_ROOT), "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [*command, str(limits.memory_mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for whoever asked
        )
        self._stdin, self._stdout = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        self._buffer = b""
        self.calls = 0

    def call(self, arguments: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        self.calls += 1
        try:
            self._stdin.write(json.dumps(arguments).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise _Killed(f"its process is gone ({error})") from error
        return self.read(timeout_s)

    def read(self, timeout_s: float) -> dict[str, Any]:
        descriptor, until_s = self._stdout.fileno(), time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not poll.poll(left_s * 1000):
                raise LimitReached(f"no reply within {timeout_s:g} s")
            chunk = os.read(descriptor, 65_536)
            if not chunk:
                words = self._last_words()
                raise (_Killed if -self._process.returncode in (signal.SIGKILL, signal.SIGTERM) else LimitReached)(
                    words
                )
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _last_words(self) -> str:
        status = self._process.wait()
        names = {-signal.SIGALRM: "wall time", -signal.SIGPROF: "processor time"}
        return names.get(status, f"its process ended with status {status}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            try:
                pipe.close()
            except OSError:  # a request that was not read to its end
                continue


def _serve(function: str, cpu_s: float, wall_s: float, memory_mib: int) -> None:
    """The process's side: answers lines on stdin until it is closed."""
    for limit, value in ((resource.RLIMIT_AS, memory_mib << 20), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    for number in (signal.SIGALRM, signal.SIGPROF):  # whatever was inherited
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM, signal.SIGPROF])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a print of a library is no reply

    def reply(**message: Any) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    module, _, name = function.partition(":")
    try:
        target = getattr(import_module(module), name)
    except (ImportError, AttributeError, MemoryError) as error:
        reply(error=repr(error))
        return
    reply(ready=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            reply(value=target(*json.loads(line)))
        except Exception as error:  # noqa: BLE001 - whatever a library raises over an answer, it did not compare it
            reply(failed=type(error).__name__)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
