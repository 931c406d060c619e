"""The event stream of one execution, read as it comes and within a budget of memory.

The SDK keeps every event of an execution in a list, so code that prints in a loop would fill our memory, and
it cannot tell a stream that ended early from one that ended well. Here an HTTP transport stands below it:
`EventTransport` reads the answer to `/execute` itself, feeds `ExecutionEvents`, and leaves the SDK the
request, the routing and the errors.

Source: the events are those of e2b-dev/code-interpreter, template/server/messaging.py. That server announces
the start of the code (`number_of_executions`) but never sends `end_of_execution`; other servers do.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx

from verl_ext.errors import SandboxUnavailableError
from verl_ext.sandbox.output import OutputCollector

MAX_LINE_BYTES = 32 * 2**20
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Error events by which the server tells of its own faults. The model's code can raise an exception of the
# same name, but only with a traceback; without this test it could have its trajectory masked at will.
_SERVER_FAULTS = ("UnexpectedEndOfExecution", "WebSocketError")


class ExecutionEvents:
    """What the events of one execution said.

    Attributes:
        began: an event came that only running code causes.
        ended: the server said that the execution is over (not every server does).
        fault: the server's own words when it lost the execution, else None.
    """

    def __init__(self, output: OutputCollector) -> None:
        self.output = output
        self.began = False
        self.ended = False
        self.fault: str | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._skipping = False

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream, cut anywhere.

        Raises:
            SandboxUnavailableError: a line is not an event.
        """
        *whole, rest = data.split(b"\n")
        for piece in whole:
            self._add(piece)
            self._line_done()
        self._add(rest)

    def finish(self) -> None:
        """Take the last line, should it lack its line end."""
        if self._size:
            self._line_done()

    def _add(self, piece: bytes) -> None:
        self._size += len(piece)
        if self._size > MAX_LINE_BYTES:
            self._skipping = True
            self._parts.clear()
        elif piece:
            self._parts.append(piece)

    def _line_done(self) -> None:
        line, size, skipped = b"".join(self._parts), self._size, self._skipping
        self._parts.clear()
        self._size, self._skipping = 0, False
        if skipped:  # too long to hold; only output can be that long, so the code was running
            self.began = True
            self.output.drop(size)
        elif line.strip():
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if not isinstance(event, dict):
                raise SandboxUnavailableError(
                    f"the sandbox sent a line that is no event ({size} bytes): a proxy on the way may have answered"
                )
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "stdout":
                self.began = True
                self.output.stdout.add(_string(event.get("text")))
            case "stderr":
                self.began = True
                self.output.stderr.add(_string(event.get("text")))
            case "result":
                self.began = True
                self.output.png_count += bool(event.get("png")) + bool(event.get("jpeg"))
                text = event.get("text")
                self.output.add_result(None if text is None else _string(text))
            case "error":
                self._take_error(*(_string(event.get(key)) for key in ("name", "value", "traceback")))
            case "number_of_executions":
                self.began = True
            case "end_of_execution":
                self.ended = True
            case "unexpected_end_of_execution":
                self.fault = "UnexpectedEndOfExecution"

    def _take_error(self, name: str, value: str, traceback: str) -> None:
        if name in _SERVER_FAULTS and not traceback.strip():
            self.fault = f"{name}: {value}"
            return
        self.began = True
        if name == "ContextRestarting" and not traceback.strip():
            # The kernel died under the code: out of memory, a crash, os._exit. The sandbox goes on.
            value = f"{value}: the interpreter died (out of memory?); all variables and imports are lost"
        self.output.set_error(name, value, _ANSI.sub("", traceback))


def _string(value: object) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


class EventTransport(httpx.AsyncBaseTransport):
    """Feeds the body of a good answer to `events`; its reader gets an empty body."""

    def __init__(self, inner: httpx.AsyncBaseTransport, events: ExecutionEvents) -> None:
        self._inner = inner
        self._events = events

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx."""
        response = await self._inner.handle_async_request(request)
        if response.status_code != 200:
            return response
        return httpx.Response(200, stream=_Drain(response, self._events))


class _Drain(httpx.AsyncByteStream):
    def __init__(self, response: httpx.Response, events: ExecutionEvents) -> None:
        self._response = response
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for data in self._response.aiter_bytes():  # undoes a Content-Encoding
            self._events.feed(data)
        self._events.finish()
        for nothing in ():
            yield nothing

    async def aclose(self) -> None:
        await self._response.aclose()
