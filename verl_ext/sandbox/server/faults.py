"""Faults that a client can ask for by the name of the template, for tests; off unless --faults was given.

`fault-NAME` or `fault-NAME:SECONDS`. A new fault is a row of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PREFIX = "fault-"
_LIMIT_BODY = {
    "code": 400,
    "message": "[LimitExceeded.SandboxInstance] the number of sandbox instances exceeds the quota of this account",
}


class InjectedError(Exception):
    """Answer with exactly this."""

    def __init__(self, status: int, body: bytes, media_type: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"injected HTTP {status}")
        self.status, self.body, self.media_type, self.headers = status, body, media_type, headers or {}


def _json_error(status: int, body: dict[str, Any]) -> InjectedError:
    return InjectedError(status, json.dumps(body).encode(), "application/json")


def _wrong_numbers(text: str) -> str:
    return re.sub(r"\d+", lambda match: str(int(match[0][-9:]) * 7 + 13), text)


def _wrong_values(line: bytes, _count: int) -> bytes | None:
    event = json.loads(line)
    if event["type"] in ("stdout", "result") and isinstance(event.get("text"), str):
        event["text"] = _wrong_numbers(event["text"])
        for name in ("html", "latex", "markdown"):
            event.pop(name, None)
    return json.dumps(event).encode() + b"\n"


def _truncate(line: bytes, count: int) -> bytes | None:
    return line if count == 0 else None


def _never_ends(line: bytes, _count: int) -> bytes | None:
    return line


@dataclass(frozen=True)
class FaultSpec:
    """One row: what happens at create, at execute and to each line of the answer.

    Attributes:
        create_error: answered to create, with no sandbox made.
        execute_error: answered to every execute.
        create_delay: the number in the name is a delay of create in seconds.
        execute_hangs: execute accepts the request and never answers.
        vanishes: the number in the name is the seconds after which the sandbox is gone.
        change_line: maps (line, how many were sent) to what is sent; None breaks the stream.
    """

    create_error: Callable[[], InjectedError] | None = None
    execute_error: Callable[[], InjectedError] | None = None
    create_delay: bool = False
    execute_hangs: bool = False
    vanishes: bool = False
    change_line: Callable[[bytes, int], bytes | None] = _never_ends


_HTML = b"<html><body><h1>500 Internal Server Error</h1></body></html>"

FAULTS: dict[str, FaultSpec] = {
    "429": FaultSpec(create_error=lambda: _json_error(429, {"code": 429, "message": "too many requests"})),
    "400-limit": FaultSpec(create_error=lambda: _json_error(400, _LIMIT_BODY)),
    "401": FaultSpec(create_error=lambda: _json_error(401, {"code": 401, "message": "unauthorized"})),
    "404-template": FaultSpec(create_error=lambda: _json_error(404, {"code": 404, "message": "template not found"})),
    "503": FaultSpec(create_error=lambda: _json_error(503, {"code": 503, "message": "service busy"})),
    "500-html": FaultSpec(create_error=lambda: InjectedError(500, _HTML, "text/html")),
    "502-execute": FaultSpec(execute_error=lambda: InjectedError(502, b"Bad Gateway", "text/plain")),
    "500-execute": FaultSpec(execute_error=lambda: InjectedError(500, _HTML, "text/html")),
    "slow-create": FaultSpec(create_delay=True),
    "hang-execute": FaultSpec(execute_hangs=True),
    "vanish": FaultSpec(vanishes=True),
    "wrong-values": FaultSpec(change_line=_wrong_values),
    "truncated-stream": FaultSpec(change_line=_truncate),
}


class Fault:
    """A fault at work in one sandbox."""

    def __init__(self, spec: FaultSpec, seconds: float) -> None:
        self._spec = spec
        self._seconds = seconds
        self.lives_s = seconds if spec.vanishes else None

    async def on_create(self) -> None:
        """Delay or refuse."""
        if self._spec.create_error is not None:
            raise self._spec.create_error()
        if self._spec.create_delay:
            await asyncio.sleep(self._seconds)

    async def on_execute(self) -> None:
        """Hang or refuse."""
        if self._spec.execute_error is not None:
            raise self._spec.execute_error()
        if self._spec.execute_hangs:
            await asyncio.sleep(86_400)

    def line_changer(self) -> Callable[[bytes], bytes | None]:
        """A function for the lines of one answer; None from it breaks the stream."""
        sent = -1

        def change(line: bytes) -> bytes | None:
            nonlocal sent
            sent += 1
            return self._spec.change_line(line, sent)

        return change


def find_fault(template: str) -> Fault | None:
    """The fault that a template's name asks for, None for an ordinary name.

    Raises:
        InjectedError: the name asks for a fault that does not exist.
    """
    if not template.startswith(PREFIX):
        return None
    name, _, seconds = template.removeprefix(PREFIX).partition(":")
    if name not in FAULTS:
        message = f"template {template} asks for an unknown fault: one of {', '.join(sorted(FAULTS))}"
        raise _json_error(400, {"code": 400, "message": message})
    return Fault(FAULTS[name], float(seconds or 1))
