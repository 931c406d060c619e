"""The interpreter of one context: IPython's shell behind a stream of JSON lines.

Runs inside the sandbox, in a process forked from the agent, so that IPython, numpy and friends are loaded
already. IPython's core is used without ipykernel: no ports, no threads at rest, no files shared across the
border of the sandbox. The cell semantics (last expression, magics, top-level await, traceback) are those of
IPython and so those of a notebook.

In: `{"code", "env", "cap_bytes"}`. Out: the events of the E2B protocol, then `{"type": "idle"}`.

Not covered: comms, widgets, the debugger, `input()` (raises, as in E2B).
"""

# ruff: noqa: TID251 - the environment here is the sandbox's own, not the project's settings
from __future__ import annotations

import asyncio
import builtins
import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from typing import Any, NoReturn

from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from .outputs import CapturedText, EventWriter, result_event

_DRAIN_S = 0.2


class _ResultHook(DisplayHook):
    def write_output_prompt(self) -> None:
        """A notebook shows no prompt."""

    def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
        self.shell.writer.event(result_event(format_dict, is_main_result=True))  # type: ignore[union-attr]

    def finish_displayhook(self) -> None:
        """Nothing was printed, so nothing is to be ended."""


class _EventPublisher(DisplayPublisher):
    def publish(self, data: Any, metadata: Any = None, source: Any = None, **_: Any) -> None:
        self.shell.writer.event(result_event(data, is_main_result=False))  # type: ignore[union-attr]

    def clear_output(self, wait: bool = False) -> None:
        """A stream cannot be cleared."""


class KernelShell(InteractiveShell):
    """IPython's shell, with errors sent as events."""

    writer: EventWriter
    displayhook_class = Type(_ResultHook)
    display_pub_class = Type(_EventPublisher)

    # The default runs `!command` on a terminal, of which a sandbox has none.
    system = InteractiveShell.system_raw

    def enable_gui(self, gui: Any = None) -> None:
        """No event loop of a window system exists here; `%matplotlib inline` asks for none."""

    def init_io(self) -> None:
        """Streams are replaced per kernel, after the fork."""

    def _showtraceback(self, etype: Any, evalue: Any, stb: Any) -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        name = getattr(etype, "__name__", str(etype))
        try:
            value = str(evalue)
        except Exception as exc:  # noqa: BLE001 - str() of a foreign exception may raise anything
            value = f"<unprintable: {type(exc).__name__}>"
        self.writer.error(name, value, "\n".join(str(part) for part in stb))


def build_shell() -> KernelShell:
    """The shell that every kernel inherits by fork; made once in the fork server."""
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.banner1 = ""
    config.InteractiveShell.enable_tip = False
    shell = KernelShell.instance(config=config)
    shell.autoawait = True
    # The first traceback loads a dozen modules; load them once, here.
    shell.writer = _Silence()  # type: ignore[assignment]
    shell.run_cell("1/0", store_history=False, silent=True)
    return shell


class _Silence:
    def error(self, *_: str) -> None:
        """Say nothing."""


def enable_inline_plots(shell: InteractiveShell) -> None:
    """Show pyplot's open figures as PNG at the end of a cell, as a notebook does."""
    from IPython.core.pylabtools import select_figure_formats
    from matplotlib_inline import backend_inline

    select_figure_formats(shell, {"png"})
    shell.events.register("post_execute", backend_inline.flush_figures)


class Kernel:
    """Runs cells of one context until its stream closes."""

    def __init__(self, shell: KernelShell, channel: socket.socket) -> None:
        self.shell = shell
        self.channel = channel
        self.writer = EventWriter(channel)
        self.shell.writer = self.writer
        self._captures: list[CapturedText] = []
        self._task: asyncio.Task[Any] | None = None

    def run_forever(self) -> NoReturn:
        """Serve cells; ends the process when the server closes the stream."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._take_streams()
        builtins.input = _no_input  # type: ignore[assignment]
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        self.writer.raw({"type": "idle"})
        loop.run_until_complete(self._serve(loop))
        os._exit(0)

    def _take_streams(self) -> None:
        for fd, name in ((1, "stdout"), (2, "stderr")):
            read_fd, write_fd = os.pipe()
            os.dup2(write_fd, fd)
            os.close(write_fd)
            capture = CapturedText(read_fd, name, self.writer)
            self._captures.append(capture)
        sys.stdout = self.writer.text_stream("stdout", 1)
        sys.stderr = self.writer.text_stream("stderr", 2)
        threading.Thread(target=self._pump, name="output", daemon=True).start()

    def _pump(self) -> None:
        by_fd = {capture.fd: capture for capture in self._captures}
        poll = select.poll()
        for fd in (*by_fd, self.writer.wake_fd):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self.writer.pump_timeout_ms()):
                if fd == self.writer.wake_fd:
                    os.read(fd, 64)
                else:
                    by_fd[fd].pump()
            self.writer.flush_if_old()

    async def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        reader, _ = await asyncio.open_connection(sock=self.channel.dup(), limit=2**27)
        while line := await reader.readline():
            request = json.loads(line)
            try:
                await self._run(request, loop)
            except KeyboardInterrupt:
                self.writer.error("KeyboardInterrupt", "", "KeyboardInterrupt")
            self._drain()
            self.writer.raw({"type": "idle", "dropped_bytes": self.writer.take_dropped_bytes()})

    async def _run(self, request: dict[str, Any], loop: asyncio.AbstractEventLoop) -> None:
        shell, code = self.shell, request["code"]
        self.writer.start(request.get("cap_bytes", 2**20))
        if request.get("base_env"):
            os.environ.update(request["base_env"])
        old_env = {name: os.environ.get(name) for name in request.get("env") or {}}
        os.environ.update(request.get("env") or {})
        self.writer.raw({"type": "number_of_executions", "execution_count": shell.execution_count})
        problem = None
        try:
            transformed = shell.transform_cell(code)
        except Exception:  # noqa: BLE001 - IPython shows whatever its own transformer raised
            transformed, problem = code, sys.exc_info()
        try:
            if shell.should_run_async(code, transformed_cell=transformed, preprocessing_exc_tuple=problem):
                task = self._task = asyncio.ensure_future(
                    shell.run_cell_async(
                        code, store_history=True, transformed_cell=transformed, preprocessing_exc_tuple=problem
                    )
                )
                signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                shell.events.trigger("post_execute")
            else:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                shell.run_cell(code, store_history=True)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._task = None
            for name, value in old_env.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _drain(self) -> None:
        """Let what child processes and C code wrote arrive before the end is told."""
        ctypes.CDLL(None).fflush(None)
        until = time.monotonic() + _DRAIN_S
        for capture in self._captures:
            while time.monotonic() < until:
                waiting = struct.unpack("i", fcntl.ioctl(capture.fd, termios.FIONREAD, b"\0" * 4))[0]
                if not waiting and not capture.is_busy:
                    break
                time.sleep(0.001)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        self.writer.flush()


def _no_input(prompt: object = "") -> str:
    from IPython.core.error import StdinNotImplementedError

    raise StdinNotImplementedError("raw_input was called, but this frontend does not support input requests.")


def reseed() -> None:
    """Forks inherit the state of random generators; give each kernel its own."""
    random.seed()
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
