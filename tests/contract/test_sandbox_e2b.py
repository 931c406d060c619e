"""verl_ext.sandbox.e2b against a stub that answers with bytes of the test's choice, faults included.

The stub is a socket server, not a mock of the SDK: the real SDK and its HTTP stack run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import sys
import time
import traceback
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from verl_ext.errors import (
    ConfigurationError,
    SandboxAuthError,
    SandboxDiedError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox import e2b as under_test
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.interface import OutputLimits
from verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
KEY = "ark_canary-0123456789"
START = {"type": "number_of_executions", "execution_count": 1}
HTML = (500, b"<html>oops</html>")


@dataclass
class Call:
    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter


Answer = tuple[int, bytes]
Handler = Callable[[Call], Awaitable[Answer | None]]


@dataclass
class Stub:
    """A service with scripted answers; without one, it behaves."""

    url: str = ""
    alive: dict[str, dict[str, str]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    create: list[Answer | Handler] = field(default_factory=list)
    execute: list[Answer | Handler] = field(default_factory=list)
    kill: list[Answer | Handler] = field(default_factory=list)
    list: list[Answer | Handler] = field(default_factory=list)
    ignore_filter: bool = False
    executed: int = 0
    ttl_s: int = 0
    tasks: set[asyncio.Task] = field(default_factory=set)

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A task of ours, not the stream's: the stream reports a cancelled one as an error (Python 3.12).
        task = asyncio.create_task(self.serve(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                path, _, query = target.partition("?")
                call = Call(method, path, query, headers, body, writer)
                self.calls.append(call)
                answer = await self.answer(call)
                if answer is None:
                    break
                status, content = answer
                writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def scripted(self, script: list, call: Call) -> Answer | None:
        item = script.pop(0)
        return await item(call) if callable(item) else item

    async def answer(self, call: Call) -> Answer | None:
        match call.method, call.path:
            case "POST", "/sandboxes":
                return await self.scripted(self.create, call) if self.create else self.do_create(call)
            case "GET", "/v2/sandboxes":
                return await self.scripted(self.list, call) if self.list else self.do_list(call)
            case "DELETE", path:
                if self.kill:
                    return await self.scripted(self.kill, call)
                gone = self.alive.pop(path.rpartition("/")[2], None) is None
                return (404, b'{"code":404,"message":"gone"}') if gone else (204, b"")
            case "GET", "/health":
                return (204, b"") if call.headers.get("e2b-sandbox-id") in self.alive else (502, b"gone")
            case "POST", path if path.endswith("/timeout"):
                self.ttl_s = json.loads(call.body)["timeout"]
                return (204, b"") if path.split("/")[2] in self.alive else (404, b'{"code":404,"message":"gone"}')
            case "POST", "/execute":
                self.executed += 1
                if self.execute:
                    return await self.scripted(self.execute, call)
                return 200, events(START, {"type": "result", "text": "2", "is_main_result": True})
        return 404, b'{"code":404,"message":"no such path"}'

    def do_create(self, call: Call) -> Answer:
        request = json.loads(call.body)
        name = f"sb{len(self.calls)}"
        self.alive[name] = request["metadata"]
        reply = {"sandboxID": name, "templateID": request["templateID"], "clientID": "c", "envdVersion": "0.2.0"}
        return 201, json.dumps(reply).encode()

    def do_list(self, call: Call) -> Answer:
        wanted = urllib.parse.unquote(
            urllib.parse.unquote(dict(urllib.parse.parse_qsl(call.query)).get("metadata", ""))
        )
        pairs = {} if self.ignore_filter else dict(urllib.parse.parse_qsl(wanted))
        stamp = "2025-01-01T00:00:00Z"
        rows = [
            {
                "sandboxID": name, "templateID": "t", "clientID": "c", "cpuCount": 1, "memoryMB": 1, "diskSizeMB": 1,
                "startedAt": stamp, "endAt": stamp, "state": "running", "envdVersion": "0.2.0", "metadata": labels,
            }
            for name, labels in self.alive.items()
            if pairs.items() <= labels.items()
        ]  # fmt: skip
        return 200, json.dumps(rows).encode()


def events(*rows: dict) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def chunked(*rows: dict | float, end: bool = True) -> Handler:
    """Streams rows as they are, sleeping where a number stands; without `end` the connection breaks."""

    async def handler(call: Call) -> None:
        call.writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for row in rows:
            if isinstance(row, dict):
                data = json.dumps(row).encode() + b"\n"
                call.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await call.writer.drain()
            else:
                await asyncio.sleep(row)
        if end:
            call.writer.write(b"0\r\n\r\n")
            await call.writer.drain()

    return handler


def late(seconds: float, then: Handler | None = None) -> Handler:
    async def handler(call: Call) -> Answer | None:
        await asyncio.sleep(seconds)
        return await then(call) if then else None

    return handler


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    stub = Stub()
    server = await asyncio.start_server(stub.connected, "127.0.0.1", 0, limit=2**20)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield stub
    server.close()
    for task in list(stub.tasks):
        task.cancel()
    await asyncio.gather(*stub.tasks, return_exceptions=True)


@pytest.fixture
async def backend(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[E2BBackend]:
    monkeypatch.setattr(under_test, "_REAP_AFTER_S", (0.05, 0.1))
    backend = E2BBackend(
        api_key=KEY, api_url=stub.url, sandbox_url=stub.url, create_timeout_s=5.0, control_timeout_s=2.0
    )
    yield backend
    await backend.aclose()


async def test_an_ags_key_reaches_the_service_and_code_runs(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={"run": "r1"}, ttl_s=77)
    execution = await sandbox.run_code("1+1", timeout_s=5)
    assert execution.results == ("2",)
    assert stub.calls[0].headers["x-api-key"] == KEY
    assert json.loads(stub.calls[0].body)["timeout"] == 77
    assert await backend.list_ids(labels={"run": "r1"}) == [sandbox.sandbox_id]
    assert await backend.kill(sandbox.sandbox_id) is True
    assert await backend.kill(sandbox.sandbox_id) is False


async def test_the_sdk_debug_variable_does_not_turn_kill_into_nothing(
    backend: E2BBackend, stub: Stub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("E2B_DEBUG", "true")
    sandbox = await backend.create(labels={}, ttl_s=60)
    await backend.kill(sandbox.sandbox_id)
    assert not stub.alive


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, b'{"code":401,"message":"bad key"}'), SandboxAuthError),
        ((403, b'{"code":403,"message":"blocked"}'), SandboxAuthError),
        ((404, b'{"code":404,"message":"template not found"}'), SandboxRequestError),
        ((400, b'{"code":400,"message":"wrong field"}'), SandboxRequestError),
        ((400, b'{"code":400,"message":"[LimitExceeded.SandboxInstance] too many"}'), SandboxQuotaError),
        ((400, b"[LimitExceeded.SandboxInstance] not even JSON"), SandboxQuotaError),
        ((429, b'{"code":429,"message":"maximum number of concurrent sandboxes"}'), SandboxQuotaError),
        ((503, b'{"code":503,"message":"busy"}'), SandboxUnavailableError),
        ((502, b"<html>bad gateway</html>"), SandboxUnavailableError),
        (HTML, SandboxUnavailableError),
        ((200, b"{}"), SandboxUnavailableError),
        ((201, b"{}"), SandboxUnavailableError),
        ((201, b"[]"), SandboxUnavailableError),
        ((201, b"\xff\xfe"), SandboxUnavailableError),
    ],
)
async def test_create_maps_every_answer(backend: E2BBackend, stub: Stub, answer: Answer, expected: type[Exception]):
    stub.create = [answer]
    with pytest.raises(expected) as caught:
        await backend.create(labels={}, ttl_s=60)
    assert type(caught.value) is expected
    assert ": " in str(caught.value)


async def test_a_service_that_is_not_there_is_unavailable():
    backend = E2BBackend(api_key=KEY, api_url="http://127.0.0.1:9", sandbox_url="http://127.0.0.1:9")
    with pytest.raises(SandboxUnavailableError):
        await backend.create(labels={}, ttl_s=60)
    await backend.aclose()


async def test_the_key_is_never_in_an_error(backend: E2BBackend, stub: Stub, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG, logger="verl_ext")
    stub.create = [(400, json.dumps({"code": 400, "message": f"no such key {KEY}"}).encode())]
    with pytest.raises(SandboxRequestError) as caught:
        await backend.create(labels={}, ttl_s=60)
    assert KEY not in repr(caught.value)
    assert KEY.encode() not in pickle.dumps(caught.value)
    assert KEY not in "".join(traceback.format_exception(caught.value))
    assert KEY not in caplog.text


async def test_a_create_that_comes_late_is_ended(backend: E2BBackend, stub: Stub):
    async def create(call: Call) -> Answer:
        return stub.do_create(call)

    backend._create_timeout_s = 0.3
    stub.create = [late(0.45, create)]
    with pytest.raises(SandboxTimeoutError):
        await backend.create(labels={}, ttl_s=60)
    await asyncio.sleep(0.3)
    await backend.aclose()
    assert not stub.alive
    assert any(call.method == "DELETE" for call in stub.calls)


async def test_a_cancelled_create_leaves_nothing(backend: E2BBackend, stub: Stub):
    async def create(call: Call) -> Answer:
        return stub.do_create(call)

    stub.create = [late(0.2, create)]
    task = asyncio.create_task(backend.create(labels={}, ttl_s=60))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.3)
    await backend.aclose()
    assert not stub.alive


async def test_a_create_whose_answer_is_lost_is_found_by_its_label(backend: E2BBackend, stub: Stub):
    async def create(call: Call) -> Answer:
        stub.do_create(call)
        return HTML

    stub.create = [create]
    with pytest.raises(SandboxUnavailableError):
        await backend.create(labels={}, ttl_s=60)
    assert len(stub.alive) == 1
    await backend.aclose()
    assert not stub.alive


async def test_a_service_that_ignores_the_filter_does_not_make_us_list_strangers(backend: E2BBackend, stub: Stub):
    stub.ignore_filter = True
    stub.alive["stranger"] = {"run": "theirs"}
    mine = await backend.create(labels={"run": "mine"}, ttl_s=60)
    assert await backend.list_ids(labels={"run": "mine"}) == [mine.sandbox_id]


async def test_the_deadline_is_ours_though_keepalives_come(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    said = {"type": "stdout", "text": "so far"}
    stub.execute = [chunked(START, said, *([{"type": "keepalive"}, 0.05] * 40))]
    began_s = time.monotonic()
    execution = await sandbox.run_code("while True: pass", timeout_s=0.3)
    assert execution.timed_out
    assert execution.stdout == "so far"
    assert execution.error is not None
    assert "0.3 s" in execution.error.value
    assert time.monotonic() - began_s < 1.5


async def test_silence_until_the_deadline_is_the_services_fault(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.execute = [late(2.0), chunked({"type": "keepalive"}, 2.0)]
    for _ in range(2):
        with pytest.raises(SandboxTimeoutError) as caught:
            await sandbox.run_code("1", timeout_s=0.3)
        assert type(caught.value) is SandboxTimeoutError


async def test_output_is_joined_capped_and_made_safe(backend: E2BBackend, stub: Stub):
    backend.limits = OutputLimits(max_bytes=1000)
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.execute = [
        (200, events(START, *({"type": "stdout", "text": f"{n}\n", "timestamp": 0} for n in range(3)))),
        (200, events(START, {"type": "stdout", "text": "a" * 10_000_000 + "end"})),
        (200, b'{"type":"stdout","text":"\\ud83d\\ude00 \\ud800 \\u0000"}\n\n{"type":"stderr","text":null}'),
        (
            200,
            events(
                START,
                {"type": "result", "text": None, "png": "AAAA"},
                {"type": "result", "text": "first", "png": "AAAA"},
                {"type": "result", "text": "last", "is_main_result": True},
                {"type": "something new"},
            ),
        ),
    ]
    assert (await sandbox.run_code("", timeout_s=5)).stdout == "0\n1\n2\n"
    long = await sandbox.run_code("", timeout_s=5)
    assert len(long.stdout) < 1100
    assert long.stdout.endswith("end")
    assert "bytes dropped" in long.stdout
    assert long.dropped_bytes == 10_000_003 - 1000
    assert (
        await sandbox.run_code("", timeout_s=5)
    ).stdout == "\U0001f600 \N{REPLACEMENT CHARACTER} \N{REPLACEMENT CHARACTER}"
    shown = await sandbox.run_code("", timeout_s=5)
    assert shown.results == ("first", "last")
    assert shown.png_count == 2


async def test_a_traceback_is_data_and_loses_its_colours(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    raised = {"type": "error", "name": "ValueError", "value": "no", "traceback": "\x1b[0;31mValueError\x1b[0m: no"}
    stub.execute = [(200, events(START, raised))]
    execution = await sandbox.run_code("", timeout_s=5)
    assert execution.error is not None
    assert (execution.error.name, execution.error.traceback) == ("ValueError", "ValueError: no")


LOST = {"type": "error", "name": "UnexpectedEndOfExecution", "value": "closed", "traceback": ""}


async def test_a_lost_execution_is_infra_but_a_raised_namesake_is_data(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.execute = [(200, events(START, LOST)), (200, events(START, {**LOST, "traceback": "Traceback ..."}))]
    with pytest.raises(SandboxUnavailableError):
        await sandbox.run_code("", timeout_s=5)
    execution = await sandbox.run_code("", timeout_s=5)
    assert execution.error is not None
    assert execution.error.name == "UnexpectedEndOfExecution"


async def test_a_kernel_that_died_under_the_code_is_data(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    restart = {"type": "error", "name": "ContextRestarting", "value": "Context was restarted", "traceback": ""}
    stub.execute = [(200, events(START, restart))]
    execution = await sandbox.run_code("", timeout_s=5)
    assert execution.error is not None
    assert "variables" in execution.error.value


@pytest.mark.parametrize(
    "answer",
    [
        (502, b"The sandbox was not found"),
        (404, b"not found"),
        (200, events(START, LOST)),
        (200, b""),
        chunked(START, {"type": "stdout", "text": "x"}, end=False),
        late(0.0),
    ],
)
async def test_a_sandbox_that_went_away_has_died(backend: E2BBackend, stub: Stub, answer):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.alive.clear()
    stub.execute = [answer]
    with pytest.raises(SandboxDiedError):
        await sandbox.run_code("", timeout_s=5)


@pytest.mark.parametrize(
    "answer",
    [
        (502, b"bad gateway"),
        (500, b"<html>"),
        (200, events(START, LOST)),
        (200, b""),
        (200, b"<html>hello</html>"),
        chunked(START, {"type": "stdout", "text": "x"}, end=False),
    ],
)
async def test_a_fault_of_a_sandbox_that_lives_is_unavailable(backend: E2BBackend, stub: Stub, answer):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.execute = [answer]
    with pytest.raises(SandboxUnavailableError):
        await sandbox.run_code("", timeout_s=5)
    assert stub.executed == 1


@pytest.mark.parametrize(
    "refusal",
    [(429, b"slow down"), (503, b"busy"), (502, b'{"message":"The sandbox is running but port is not open"}')],
)
async def test_a_run_that_was_surely_not_acted_on_is_repeated(backend: E2BBackend, stub: Stub, refusal: Answer):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.execute = [refusal, refusal, (200, events(START))]
    await sandbox.run_code("", timeout_s=5)
    assert stub.executed == 3


async def test_an_early_end_shows_once_the_service_is_known_to_say_the_end(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    end = {"type": "end_of_execution"}
    stub.execute = [(200, events(START)), (200, events(START, end)), (200, events(START))]
    await sandbox.run_code("", timeout_s=5)
    await sandbox.run_code("", timeout_s=5)
    with pytest.raises(SandboxUnavailableError):
        await sandbox.run_code("", timeout_s=5)


async def test_kill_and_list_faults_are_ours(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    stub.kill = [HTML, late(5.0)]
    with pytest.raises(SandboxUnavailableError):
        await backend.kill(sandbox.sandbox_id)
    backend._control_timeout_s = 0.2
    with pytest.raises(SandboxTimeoutError):
        await backend.kill(sandbox.sandbox_id)
    stub.list = [HTML]
    with pytest.raises(SandboxUnavailableError):
        await backend.list_ids(labels={"a": "b"})


async def test_extend(backend: E2BBackend, stub: Stub):
    sandbox = await backend.create(labels={}, ttl_s=60)
    await sandbox.extend(ttl_s=123)
    assert stub.ttl_s == 123
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxDiedError):
        await sandbox.extend(ttl_s=123)


async def test_one_backend_serves_several_event_loops(backend: E2BBackend, stub: Stub):
    def elsewhere() -> list[str]:
        async def go() -> list[str]:
            sandbox = await backend.create(labels={"loop": "2"}, ttl_s=60)
            await sandbox.run_code("1", timeout_s=5)
            return await backend.list_ids(labels={"loop": "2"})

        return asyncio.run(go())

    await backend.create(labels={}, ttl_s=60)
    assert len(await asyncio.to_thread(elsewhere)) == 1


async def test_a_local_server_is_reached_though_a_proxy_is_set(stub: Stub):
    # In a process of its own: the SDK keeps its connections, and with them the proxy, for a process's life.
    code = (
        "import asyncio; from verl_ext.sandbox.e2b import E2BBackend; from verl_ext.settings import Settings\n"
        "backend = E2BBackend.from_settings(Settings.load())\n"
        "print(asyncio.run(backend.list_ids(labels={'a': 'b'})))"
    )
    dead = "http://127.0.0.1:9"
    environ = {**os.environ, "E2B_API_URL": stub.url, "HTTP_PROXY": dead, "http_proxy": dead, "ALL_PROXY": dead}
    environ.pop("E2B_API_KEY", None)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        env=environ,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await child.communicate()
    assert output.strip() == b"[]", errors.decode()


def test_from_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "")
    monkeypatch.setenv("no_proxy", "")
    with_key = Settings.load(environ={"E2B_API_KEY": KEY, "E2B_DOMAIN": "ap-guangzhou.tencentags.com"}, env_file=None)
    assert E2BBackend.from_settings(with_key)._options["domain"] == "ap-guangzhou.tencentags.com"
    without = Settings.load(environ={})
    with pytest.raises(ConfigurationError, match="serve-sandbox"):
        E2BBackend.from_settings(without)
    assert E2BBackend.from_settings(without, local_url="http://h:1")._options["sandbox_url"] == "http://h:1"
    running = Settings.load(environ={"E2B_API_URL": "http://h:2"})
    assert E2BBackend.from_settings(running)._options["sandbox_url"] == "http://h:2"
