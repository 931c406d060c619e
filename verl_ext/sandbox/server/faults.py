"""Faults that a client can ask for by the name of the template, for tests; off unless --faults was given.

`fault-NAME[:SECONDS][@SHARE]`, several joined by `+`: fault-429@0.02+slow-execute:50@0.05 refuses 2 % of the creates
and delays 5 % of the runs by 50 s, evenly spread. A new fault is a row of `FAULTS`.
"""

from __future__ import annotations

import asyncio
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PREFIX = "fault-"
_FOREVER_S = 86_400
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


class DropError(Exception):
    """Break the connection without an answer."""


@dataclass(frozen=True)
class FaultSpec:
    """One row: what happens at create, at execute, at kill and to each line of an answer.

    Attributes:
        create_error: answered to create, with no sandbox made.
        create_delay: the number in the name is a delay of create in seconds.
        create_hangs: create makes a sandbox and never answers.
        create_drops: "before" or "after" a sandbox is made the connection is broken.
        execute_error: answered to execute, which is not begun.
        execute_delay: the number in the name is a delay before the code begins, in seconds.
        execute_hangs: execute accepts the request and never answers.
        execute_drops: "before" the code begins or "after" it ended, with nothing said, the connection is broken.
        kill_error: answered to kill, and the sandbox lives on.
        vanishes: the number in the name is the seconds after which the sandbox is gone.
        change_line: maps (line, how many were sent) to what is sent; None breaks the stream.
    """

    create_error: Callable[[], InjectedError] | None = None
    create_delay: bool = False
    create_hangs: bool = False
    create_drops: str = ""
    execute_error: Callable[[], InjectedError] | None = None
    execute_delay: bool = False
    execute_hangs: bool = False
    execute_drops: str = ""
    kill_error: Callable[[], InjectedError] | None = None
    vanishes: bool = False
    change_line: Callable[[bytes, int], bytes | None] = _never_ends


_HTML = b"<html><body><h1>500 Internal Server Error</h1></body></html>"


def too_many() -> InjectedError:
    """What AGS is reported to answer when the account is full: not 429."""
    return _json_error(400, _LIMIT_BODY)


def _html() -> InjectedError:
    return InjectedError(500, _HTML, "text/html")


def _busy() -> InjectedError:
    return _json_error(503, {"code": 503, "message": "service busy"})


def _too_fast() -> InjectedError:
    return _json_error(429, {"code": 429, "message": "too many requests"})


FAULTS: dict[str, FaultSpec] = {
    "429": FaultSpec(create_error=_too_fast),
    "400-limit": FaultSpec(create_error=too_many),
    "401": FaultSpec(create_error=lambda: _json_error(401, {"code": 401, "message": "unauthorized"})),
    "404-template": FaultSpec(create_error=lambda: _json_error(404, {"code": 404, "message": "template not found"})),
    "503": FaultSpec(create_error=_busy),
    "500-html": FaultSpec(create_error=_html),
    "slow-create": FaultSpec(create_delay=True),
    "hang-create": FaultSpec(create_hangs=True),
    "drop-before-create": FaultSpec(create_drops="before"),
    "drop-after-create": FaultSpec(create_drops="after"),
    "429-execute": FaultSpec(execute_error=_too_fast),
    "503-execute": FaultSpec(execute_error=_busy),
    "502-execute": FaultSpec(execute_error=lambda: InjectedError(502, b"Bad Gateway", "text/plain")),
    "500-execute": FaultSpec(execute_error=_html),
    "slow-execute": FaultSpec(execute_delay=True),
    "hang-execute": FaultSpec(execute_hangs=True),
    "drop-before-execute": FaultSpec(execute_drops="before"),
    "drop-after-execute": FaultSpec(execute_drops="after"),
    "500-kill": FaultSpec(kill_error=_html),
    "vanish": FaultSpec(vanishes=True),
    "wrong-values": FaultSpec(change_line=_wrong_values),
    "truncated-stream": FaultSpec(change_line=_truncate),
}


@dataclass(frozen=True)
class _Asked:
    name: str
    spec: FaultSpec
    seconds: float
    share: float

    def strikes(self) -> bool:
        """True for exactly `share` of the calls, evenly spread, each name with a beginning of its own."""
        begun = _due.setdefault(self.name, zlib.crc32(self.name.encode()) % 997 / 997)
        due = begun + self.share
        _due[self.name] = due - 1.0 if due >= 1.0 else due
        return due >= 1.0


_due: dict[str, float] = {}  # over all sandboxes of the server


class Fault:
    """The faults at work in one sandbox; each decides anew at every request."""

    def __init__(self, asked: list[_Asked]) -> None:
        self._asked = asked
        lives = [one.seconds for one in asked if one.spec.vanishes and one.strikes()]
        self.lives_s = min(lives) if lives else None

    def _striking(self, wanted: Callable[[FaultSpec], object]) -> Iterator[_Asked]:
        return (one for one in self._asked if wanted(one.spec) and one.strikes())

    def _refuse(self, answer_of: Callable[[FaultSpec], Callable[[], InjectedError] | None]) -> None:
        for one in self._striking(answer_of):
            if (answer := answer_of(one.spec)) is not None:
                raise answer()

    async def before_create(self) -> None:
        """Delay, refuse or hang up."""
        self._refuse(lambda spec: spec.create_error)
        for one in self._striking(lambda spec: spec.create_delay):
            await asyncio.sleep(one.seconds)
        for _ in self._striking(lambda spec: spec.create_drops == "before"):
            raise DropError

    async def after_create(self) -> None:
        """Say nothing of the sandbox that was made."""
        for _ in self._striking(lambda spec: spec.create_drops == "after"):
            raise DropError
        for _ in self._striking(lambda spec: spec.create_hangs):
            await asyncio.sleep(_FOREVER_S)

    async def before_execute(self) -> None:
        """Refuse, delay, hang or hang up."""
        self._refuse(lambda spec: spec.execute_error)
        for one in self._striking(lambda spec: spec.execute_delay):
            await asyncio.sleep(one.seconds)
        for _ in self._striking(lambda spec: spec.execute_hangs):
            await asyncio.sleep(_FOREVER_S)
        for _ in self._striking(lambda spec: spec.execute_drops == "before"):
            raise DropError

    def drops_after_execute(self) -> bool:
        """Whether what the code gave is never said."""
        return any(True for _ in self._striking(lambda spec: spec.execute_drops == "after"))

    def before_kill(self) -> None:
        """Refuse."""
        self._refuse(lambda spec: spec.kill_error)

    def line_changer(self) -> Callable[[bytes], bytes | None]:
        """A function for the lines of one answer; None from it breaks the stream."""
        changes = [one.spec.change_line for one in self._striking(lambda spec: spec.change_line is not _never_ends)]
        sent = -1

        def change(line: bytes) -> bytes | None:
            nonlocal sent
            sent += 1
            changed: bytes | None = line
            for each in changes:
                changed = each(changed, sent) if changed is not None else None
            return changed

        return change


def find_fault(template: str) -> Fault | None:
    """The faults that a template's name asks for, None for an ordinary name.

    Raises:
        InjectedError: the name asks for a fault that does not exist.
    """
    if not template.startswith(PREFIX):
        return None
    asked = []
    for part in template.removeprefix(PREFIX).split("+"):
        name, _, share = part.partition("@")
        name, _, seconds = name.partition(":")
        if name not in FAULTS:
            message = f"template {template} asks for an unknown fault: one of {', '.join(sorted(FAULTS))}"
            raise _json_error(400, {"code": 400, "message": message})
        asked.append(_Asked(part, FAULTS[name], float(seconds or 1), float(share or 1)))
    return Fault(asked)
