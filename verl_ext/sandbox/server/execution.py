"""Running one cell: the lock of its context, the cap on its output, its end by deadline or by hang-up."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from .outputs import clean_text
from .sandbox import Context, RefusedError, Sandbox, SandboxGoneError

log = logging.getLogger(__name__)
INTERRUPT_GRACE_S = 3.0
_TEXT_EVENTS = ("stdout", "stderr")
_FIELDS = {
    "stdout": ("text", "timestamp"),
    "stderr": ("text", "timestamp"),
    "error": ("name", "value", "traceback"),
    "number_of_executions": ("execution_count",),
}


class Execution:
    """One cell in one context. A task of its own runs it, so that a hang-up of the client cannot tear it apart."""

    def __init__(self, sandbox: Sandbox, context: Context, code: str, env: dict[str, str], options: Any) -> None:
        self._sandbox = sandbox
        self._context = context
        self._request = {"code": code, "env": env, "cap_bytes": options.max_output_bytes}
        self._options = options
        self._left = options.max_output_bytes
        self._dropped_bytes = 0
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)
        self._stop = asyncio.Event()
        self._is_heard = True
        self.task = asyncio.create_task(self._run())

    async def lines(self) -> AsyncIterator[bytes]:
        """The events as they come, each one line, never an empty one."""
        while (line := await self._lines.get()) is not None:
            yield line

    def hang_up(self) -> None:
        """The client is gone: interrupt the cell and let the context recover."""
        self._is_heard = False
        self._stop.set()
        while not self._lines.empty():
            self._lines.get_nowait()
        self._lines.put_nowait(None)

    async def _put(self, event: dict[str, Any]) -> None:
        if self._is_heard:
            await self._lines.put(json.dumps(event).encode() + b"\n")

    async def _run(self) -> None:
        try:
            async with self._context.lock:
                if self._is_heard:
                    await self._run_locked()
        except (SandboxGoneError, RefusedError, OSError) as exc:
            await self._put(unexpected_end(f"{self._sandbox.gone_reason or exc}"))
        finally:
            if self._is_heard:
                await self._lines.put(None)

    async def _run_locked(self) -> None:
        context, sandbox = self._context, self._sandbox
        if context.writer is None:
            await sandbox.start_kernel(context)
        assert context.writer is not None  # noqa: S101 - start_kernel sets it or raises
        request = dict(self._request)
        if not context.has_env:
            request["base_env"], context.has_env = sandbox.env, True
        context.writer.write(json.dumps(request).encode() + b"\n")
        pump = asyncio.create_task(self._pump())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({pump, stop}, timeout=self._options.max_execution_s, return_when="FIRST_COMPLETED")
            if not pump.done():
                await self._interrupt(pump)
            await pump
        finally:
            stop.cancel()
            pump.cancel()

    async def _interrupt(self, pump: asyncio.Task[bool]) -> None:
        """SIGINT by way of the agent; a kernel that is not idle in time is killed and started anew."""
        await self._sandbox.signal(self._context.pid, signal.SIGINT)
        await asyncio.wait({pump}, timeout=INTERRUPT_GRACE_S)
        if pump.done():
            return
        log.info("an interpreter of sandbox %s ignored its interrupt and is killed", self._sandbox.id)
        await self._sandbox.kill_kernel(self._context)
        await asyncio.wait({pump})

    async def _pump(self) -> bool:
        """Pass events on until the kernel is idle; False if it died instead."""
        context = self._context
        while (event := await context.read_event()) is not None:
            kind = event.get("type")
            if kind == "idle":
                await self._say_what_was_cut(int(event.get("dropped_bytes") or 0))
                await self._put({"type": "end_of_execution"})
                return True
            checked = self._checked(event)
            if checked is not None:
                await self._put(checked)
        context.drop_stream()
        await self._say_what_was_cut(0)
        await self._put(unexpected_end(await self._why()))
        return False

    async def _why(self) -> str:
        try:
            await asyncio.wait_for(self._sandbox.gone.wait(), 0.2)
        except TimeoutError:
            return "the interpreter died (out of memory, a crash, or os._exit); its variables are lost"
        return f"the sandbox ended: {self._sandbox.gone_reason or 'it was killed'}"

    def _checked(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """An event as the SDK can read it, within the cap; None to drop it. The kernel is not to be trusted."""
        kind = event.get("type")
        if kind in _TEXT_EVENTS:
            text = clean_text(str(event.get("text", "")))
            size = len(text.encode())
            if size > self._left:
                self._dropped_bytes += size - self._left
                text = text.encode()[: self._left].decode("utf-8", "ignore")
            self._left -= min(size, self._left)
            return {"type": kind, "text": text, "timestamp": time.time_ns()} if text else None
        if kind == "result":
            size = len(json.dumps(event))
            if size > self._left + 1024:
                self._dropped_bytes += size
                return None
            self._left -= min(size, self._left)
            return event
        if kind == "error":
            return {"type": "error"} | {name: clean_text(str(event.get(name, ""))) for name in _FIELDS["error"]}
        if kind == "number_of_executions" and isinstance(event.get("execution_count"), int):
            return {"type": kind, "execution_count": event["execution_count"]}
        return None

    async def _say_what_was_cut(self, dropped_by_kernel: int) -> None:
        dropped = self._dropped_bytes + dropped_by_kernel
        if dropped:
            limit = self._options.max_output_bytes
            text = f"\n[output cut: {dropped} bytes beyond the limit of {limit} bytes were dropped]\n"
            await self._put({"type": "stderr", "text": text, "timestamp": time.time_ns()})


def unexpected_end(reason: str) -> dict[str, Any]:
    """The event by which E2B tells that an execution did not end by itself."""
    return {
        "type": "error",
        "name": "UnexpectedEndOfExecution",
        "value": f"Connection to the execution was closed before the execution was finished: {reason}",
        "traceback": "",
    }
