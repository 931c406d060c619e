"""envd's process service: commands of a sandbox, streamed by the Connect protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from .sandbox import Sandbox

_READ_BYTES = 32_768
_END_STREAM = 2
_MAX_ENVELOPE_BYTES = 64 << 20


class RpcError(Exception):
    """A refusal with a Connect code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Command:
    """One process started through envd; it outlives the stream that started it."""

    pid: int
    config: dict[str, Any]
    tag: str | None
    stdin_fd: int
    exit: asyncio.Future[int]
    listeners: set[asyncio.Queue[dict[str, Any] | None]] = field(default_factory=set)
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def close_stdin(self) -> None:
        """End the input; harmless when there is none."""
        if self.stdin_fd >= 0:
            os.close(self.stdin_fd)
            self.stdin_fd = -1

    async def tell(self, event: dict[str, Any] | None) -> None:
        """Give an event to everybody who listens."""
        for queue in list(self.listeners):
            await queue.put(event)


async def start(sandbox: Sandbox, request: dict[str, Any]) -> tuple[Command, asyncio.Queue[dict[str, Any] | None]]:
    """Start a command; the queue has its events from the first byte on."""
    config = request.get("process") or {}
    out_r, out_w = os.pipe()
    err_r, err_w = os.pipe()
    in_r, in_w = os.pipe() if request.get("stdin") else (os.open(os.devnull, os.O_RDONLY), -1)
    message = {
        "op": "command",
        "cmd": config.get("cmd") or "/bin/bash",
        "args": config.get("args") or [],
        "env": config.get("envs") or {},
        "cwd": config.get("cwd"),
    }
    try:
        reply = await sandbox.ask(message, [in_r, out_w, err_w])
    except BaseException:
        for fd in (out_r, err_r, in_w):
            if fd >= 0:
                os.close(fd)
        raise
    finally:
        for fd in (in_r, out_w, err_w):
            os.close(fd)
    command = Command(reply["pid"], config, request.get("tag"), in_w, reply["exit"])
    sandbox.commands[command.pid] = command
    queue = listen(command)
    readers = [await _reader(out_r), await _reader(err_r)]
    command.pumps = [
        asyncio.create_task(_pump(command, name, *reader))
        for name, reader in zip(("stdout", "stderr"), readers, strict=True)
    ]
    command.pumps.append(asyncio.create_task(_finish(sandbox, command)))
    return command, queue


async def _reader(fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(fd, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


async def _pump(command: Command, name: str, reader: asyncio.StreamReader, transport: asyncio.BaseTransport) -> None:
    while chunk := await reader.read(_READ_BYTES):
        await command.tell({"event": {"data": {name: base64.b64encode(chunk).decode()}}})
    transport.close()


async def _finish(sandbox: Sandbox, command: Command) -> None:
    """Tell the end: when the process has ended and its output was read, which a child may hold open."""
    try:
        code: int | None = await command.exit
    except Exception:  # noqa: BLE001 - the sandbox ended; listeners are told that there is no more
        code = None
    await asyncio.wait(command.pumps[:2], timeout=0.5 if code is not None else 0.05)
    command.close_stdin()
    sandbox.commands.pop(command.pid, None)
    if code is not None:
        end: dict[str, Any] = {"exitCode": code, "exited": code >= 0, "status": f"exit status {code}"}
        if code < 0:
            name = (signal.strsignal(-code) or str(-code)).lower()
            end |= {"exitCode": -1, "status": f"signal: {name}", "error": f"signal: {name}"}
        await command.tell({"event": {"end": end}})
    await command.tell(None)


def listen(command: Command) -> asyncio.Queue[dict[str, Any] | None]:
    """A queue that gets the events from here on."""
    queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(maxsize=64)
    command.listeners.add(queue)
    return queue


async def stream(
    sandbox: Sandbox, command: Command, queue: asyncio.Queue[dict[str, Any] | None], timeout_ms: int | None
) -> AsyncIterator[bytes]:
    """The envelopes of one answer. A deadline of the client ends the command, as in envd."""
    loop = asyncio.get_running_loop()
    until = None if timeout_ms is None else loop.time() + timeout_ms / 1000
    try:
        yield envelope({"event": {"start": {"pid": command.pid}}})
        while True:
            left = None if until is None else max(0.0, until - loop.time())
            try:
                event = await asyncio.wait_for(queue.get(), left)
            except TimeoutError:
                await sandbox.signal(command.pid, signal.SIGKILL)
                yield end_of_stream("deadline_exceeded", "the command ran into its deadline and was killed")
                return
            if event is None:
                break
            yield envelope(event)
            if "end" in event["event"]:
                yield end_of_stream()
                return
        yield end_of_stream("unavailable", f"the sandbox was not found: {sandbox.gone_reason or 'it ended'}")
    finally:
        command.listeners.discard(queue)
        while not queue.empty():
            queue.get_nowait()


def find(sandbox: Sandbox, request: dict[str, Any]) -> Command:
    """The command that a selector names.

    Raises:
        RpcError: there is none.
    """
    selector = request.get("process") or {}
    for command in sandbox.commands.values():
        if command.pid == selector.get("pid") or (selector.get("tag") and command.tag == selector["tag"]):
            return command
    raise RpcError("not_found", f"process {selector.get('pid') or selector.get('tag')} not found")


async def unary(sandbox: Sandbox, method: str, request: dict[str, Any]) -> dict[str, Any]:
    """List, SendSignal, SendInput and CloseStdin."""
    if method == "List":
        return {"processes": [_describe(command) for command in sandbox.commands.values()]}
    command = find(sandbox, request)
    if method == "SendSignal":
        number = {"SIGNAL_SIGKILL": signal.SIGKILL, "SIGNAL_SIGTERM": signal.SIGTERM}.get(str(request.get("signal")))
        if number is None:
            raise RpcError("invalid_argument", f"unknown signal {request.get('signal')}")
        await sandbox.signal(command.pid, number)
    elif method == "SendInput":
        data = base64.b64decode((request.get("input") or {}).get("stdin") or "")
        if command.stdin_fd < 0:
            raise RpcError("failed_precondition", "the command was started without stdin=True")
        await asyncio.to_thread(os.write, command.stdin_fd, data)
    elif method == "CloseStdin":
        command.close_stdin()
    else:
        raise RpcError("unimplemented", f"process.Process/{method} is not available on the local server")
    return {}


def _describe(command: Command) -> dict[str, Any]:
    answer: dict[str, Any] = {"pid": command.pid, "config": command.config}
    return answer | ({"tag": command.tag} if command.tag else {})


def envelope(message: dict[str, Any], flags: int = 0) -> bytes:
    """One message of a Connect stream."""
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def end_of_stream(code: str | None = None, message: str = "") -> bytes:
    """The trailer of a Connect stream, with an error if `code` is given."""
    return envelope({} if code is None else {"error": {"code": code, "message": message}}, _END_STREAM)


def open_envelope(body: bytes) -> dict[str, Any]:
    """The one message of a streaming request.

    Raises:
        RpcError: the body is not an envelope with a JSON object.
    """
    if len(body) < 5 or len(body) > _MAX_ENVELOPE_BYTES:
        raise RpcError("invalid_argument", "the request is not a Connect envelope")
    flags, size = struct.unpack(">BI", body[:5])
    if flags & 1:
        raise RpcError("unimplemented", "compressed requests are not available on the local server")
    message = json.loads(body[5 : 5 + size] or b"{}")
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "the request is not a JSON object")
    return message
