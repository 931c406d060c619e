"""One sandbox as the server sees it: its agent, its contexts, its time to live."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from .wire import packet_pair, receive_message, send_message

log = logging.getLogger(__name__)
MAX_LINE_BYTES = 64 << 20
_REPLY_TIMEOUT_S = 30.0


class SandboxGoneError(Exception):
    """The sandbox ended; nothing can be asked of it."""


class RefusedError(Exception):
    """The agent could not do what was asked; the message says why."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


@dataclass
class Context:
    """One interpreter of a sandbox."""

    id: str
    cwd: str
    language: str = "python"
    pid: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    has_env: bool = False
    is_closed: bool = False

    async def read_event(self) -> dict[str, Any] | None:
        """The next line of the kernel; None when it is dead or sends what is no event."""
        assert self.reader is not None  # noqa: S101 - only started contexts are read
        try:
            line = await self.reader.readline()
            event = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, OSError, RecursionError):
            return None
        return event if isinstance(event, dict) else None

    def drop_stream(self) -> None:
        """Forget the kernel's stream."""
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


class Sandbox:
    """A live sandbox, claimed by a client or waiting in the warm pool."""

    def __init__(self, sandbox_id: str) -> None:
        self.id = sandbox_id
        self.template = "code-interpreter-v1"
        self.metadata: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.access_token = secrets.token_hex(16)
        self.started_at = datetime.now(UTC)
        self.end_at = time.time()
        self.contexts: dict[str, Context] = {}
        self.faults: Any = None
        self.vanish_task: asyncio.Task[None] | None = None
        self.executions = 0
        self.gone = asyncio.Event()
        self.gone_reason: str | None = None
        self.commands: dict[int, Any] = {}
        self.exit_codes: dict[int, asyncio.Future[int]] = {}
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_request = 0
        self._channel, self.agent_end = packet_pair()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel.setblocking(False)

    @property
    def default_context(self) -> Context:
        """The context that runs code for which none is named."""
        return next(iter(self.contexts.values()))

    async def open(self) -> None:
        """Wait for the agent and start the default context.

        Raises:
            RefusedError, SandboxGoneError: it could not be started.
        """
        self.agent_end.close()
        asyncio.get_running_loop().add_reader(self._channel, self._hear)
        await asyncio.wait_for(self._ready, _REPLY_TIMEOUT_S)
        await self.add_context(None)

    async def add_context(self, cwd: str | None) -> Context:
        """Start one more interpreter."""
        context = Context(secrets.token_hex(8), cwd or "/home/user")
        await self.start_kernel(context)
        self.contexts[context.id] = context
        return context

    async def start_kernel(self, context: Context) -> None:
        """Give `context` a fresh interpreter."""
        ours, theirs = socket.socketpair()
        try:
            reply = await self.ask({"op": "kernel", "cwd": context.cwd}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        context.pid = reply["pid"]
        context.reader, context.writer = await asyncio.open_unix_connection(sock=ours, limit=MAX_LINE_BYTES)
        context.has_env = False
        if await context.read_event() is None:
            context.drop_stream()
            raise RefusedError("the interpreter ended before it was ready")

    async def kill_kernel(self, context: Context) -> None:
        """End the interpreter of `context`."""
        context.drop_stream()
        await self.signal(context.pid, signal.SIGKILL)

    async def signal(self, pid: int, number: int) -> bool:
        """Signal a process that the agent started; False if there is none."""
        return (await self.ask({"op": "signal", "pid": pid, "signal": int(number)}))["found"]

    async def ask(self, message: dict[str, Any], fds: list[int] | None = None) -> dict[str, Any]:
        """Send one request to the agent and wait for the reply.

        Raises:
            RefusedError: it could not be done.
            SandboxGoneError: the sandbox ended.
        """
        if self.gone.is_set():
            raise SandboxGoneError(self.id)
        self._next_request += 1
        number = self._next_request
        future = asyncio.get_running_loop().create_future()
        self._requests[number] = future
        try:
            send_message(self._channel, message | {"req": number}, fds or [])
            reply = await asyncio.wait_for(future, _REPLY_TIMEOUT_S)
        except (OSError, TimeoutError) as exc:
            raise SandboxGoneError(self.id) from exc
        finally:
            self._requests.pop(number, None)
        if "error" in reply:
            raise RefusedError(str(reply["error"]), reply.get("errno"))
        return reply

    def _hear(self) -> None:
        try:
            message, _ = receive_message(self._channel)
        except BlockingIOError:
            return
        if message is None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self.mark_gone("its first process ended")
            return
        event = message.get("event")
        if event == "reply":
            future = self._requests.get(message.get("req", -1))
            if isinstance(message.get("pid"), int):
                # Made here because the exit may be told before whoever asked has woken up.
                message["exit"] = self.exit_codes[message["pid"]] = asyncio.get_running_loop().create_future()
            if future is not None and not future.done():
                future.set_result(message)
        elif event == "exit":
            exit_code = self.exit_codes.pop(message.get("pid", -1), None)
            if exit_code is not None and not exit_code.done():
                exit_code.set_result(int(message.get("code", -1)))
        elif not self._ready.done():
            if event == "ready":
                self._ready.set_result(None)
            else:
                self._ready.set_exception(RefusedError(str(message.get("message"))))

    def mark_gone(self, reason: str | None) -> None:
        """The sandbox has ended: wake everybody who waits for it."""
        if self.gone_reason is None:
            self.gone_reason = reason
        if self.gone.is_set():
            return
        self.gone.set()
        waiting = [*self._requests.values(), self._ready, *self.exit_codes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxGoneError(f"{self.id}: {self.gone_reason}"))
                future.exception()
        for context in self.contexts.values():
            context.drop_stream()

    def close(self) -> None:
        """Close the channel; the sandbox must be gone."""
        self.mark_gone(None)
        if self._channel.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._channel)
        self._channel.close()
        self.agent_end.close()
