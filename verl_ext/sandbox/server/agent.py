"""The first process inside a sandbox: starts kernels and commands, touches files, on the server's word.

It is forked from the fork server and has put itself behind the isolation before it reads its first message, so
whatever it does for the server, it does with no more rights than the model's code has. The model's code may
attack it (same user): the worst that follows is the end of that sandbox.
"""

# ruff: noqa: TID251 - the environment here is the sandbox's own, not the project's settings
from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import traceback
from collections.abc import Callable
from typing import Any

from . import confine, files
from .kernel import Kernel, KernelShell, reseed
from .wire import close_fds, receive_message, send_message

_libc = ctypes.CDLL(None, use_errno=True)
_CLOSE_RANGE = 436  # the same on every architecture
_LAST_FD = 2**31 - 1


class Agent:
    """Serves one sandbox until the server closes the channel."""

    def __init__(self, channel: socket.socket, shell: KernelShell, home: str, keep_fds: set[int]) -> None:
        self.channel = channel
        self.shell = shell
        self.home = home
        self.keep_fds = keep_fds
        self._children: set[int] = set()

    def serve_forever(self) -> None:
        """Answer messages; returns when the channel closes."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self.channel, selectors.EVENT_READ)
        selector.register(wake_r, selectors.EVENT_READ)
        send_message(self.channel, {"event": "ready", "pid": os.getpid()})
        while True:
            for key, _ in selector.select():
                if key.fileobj == wake_r:
                    os.read(wake_r, 512)
                    self._reap()
                    continue
                message, fds = receive_message(self.channel)
                if message is None:
                    return
                self._answer(message, fds)

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        reply: dict[str, Any] = {"event": "reply", "req": message.get("req")}
        try:
            operation = getattr(self, f"_do_{message['op']}")
            reply |= operation(message, fds) or {}
        except (OSError, ValueError, KeyError, AttributeError) as exc:
            reply |= {"error": str(exc), "errno": getattr(exc, "errno", None)}
        finally:
            close_fds(fds)
        send_message(self.channel, reply)

    def _do_kernel(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        cwd = files.resolve(message.get("cwd") or self.home, self.home)
        if not os.path.isdir(cwd):  # noqa: PTH112 - no pathlib object is needed for one question
            raise FileNotFoundError(f"working directory {cwd} does not exist: create it before the context")

        def run() -> None:
            os.chdir(cwd)
            reseed()
            Kernel(self.shell, socket.socket(fileno=fds[0])).run_forever()

        return {"pid": self._fork(fds, run)}

    def _do_file(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        return {"pid": self._fork(fds, lambda: files.serve(message, socket.socket(fileno=fds[0]), self.home))}

    def _do_command(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        cwd = files.resolve(message.get("cwd") or self.home, self.home)
        if not os.path.isdir(cwd):  # noqa: PTH112 - no pathlib object is needed for one question
            raise FileNotFoundError(f"working directory {cwd} does not exist")
        env = dict(os.environ) | {str(k): str(v) for k, v in (message.get("env") or {}).items()}

        def run() -> None:
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            os.chdir(cwd)
            os.setpgid(0, 0)
            try:
                os.execvpe(message["cmd"], [message["cmd"], *message["args"]], env)  # noqa: S606 - what was asked for
            except OSError as exc:
                os.write(2, f"{message['cmd']}: {exc}\n".encode())
                os._exit(127)

        return {"pid": self._fork(fds, run)}

    def _do_signal(self, message: dict[str, Any], _fds: list[int]) -> dict[str, Any]:
        pid = message["pid"]
        if pid not in self._children:
            return {"found": False}
        os.kill(pid, message["signal"])
        return {"found": True}

    def _do_env(self, message: dict[str, Any], _fds: list[int]) -> None:
        os.environ.update(message["env"])

    def _fork(self, fds: list[int], run: Callable[[], object]) -> int:
        """Fork a child that does `run` with only the standard streams and `fds` open, and then ends."""
        pid = os.fork()
        if pid:
            self._children.add(pid)
            return pid
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            close_others({0, 1, 2, *fds})
            confine.die_with_parent()
            run()
            os._exit(0)
        except BaseException:  # noqa: BLE001 - a child must never return into its parent's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid in self._children:
                    self._children.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    with contextlib.suppress(OSError):
                        send_message(self.channel, {"event": "exit", "pid": pid, "code": code})


def close_others(keep: set[int]) -> None:
    """Close every descriptor that is not in `keep`.

    By close_range(2) itself: a Python built without it calls close(2) for every number of a range, 12 ms for 65,536
    of them. Not by a look into /proc, which Landlock hides.
    """
    start = 0
    for fd in sorted(keep):
        if start < fd:
            _close_range(start, fd - 1)
        start = fd + 1
    _close_range(start, _LAST_FD)


def _close_range(first: int, last: int) -> None:
    if _libc.syscall(_CLOSE_RANGE, first, last, 0) < 0:  # a kernel before 5.9
        os.closerange(first, min(last, 65_535) + 1)


def scrub_streams(*, keep_stderr: bool) -> None:
    """Standard streams of the agent itself lead nowhere; its errors to the server's when debugging."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1) if keep_stderr else (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)
