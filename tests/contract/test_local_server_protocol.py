"""The unmodified E2B SDK, sync and async, against the local server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import e2b
import pytest
from e2b_code_interpreter import AsyncSandbox, Sandbox

from verl_ext.sandbox.server.launch import RunningServer, start_server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(("--warm", "1", "--faults", "--max-output-bytes", "50000")) as one:
        yield one


@pytest.fixture(autouse=True)
def _point_the_sdk_at_it(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.setenv("E2B_API_KEY", "any")


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    one = Sandbox.create(timeout=60, metadata={"test": "protocol a/b&c"}, envs={"GIVEN": "yes"})
    try:
        yield one
    finally:
        one.kill()


def stats(server: RunningServer, query: str = "") -> dict[str, Any]:
    with urllib.request.urlopen(f"{server.url}/stats{query}") as response:
        return json.load(response)


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


def test_state_is_kept_and_the_last_expression_is_the_result(sandbox: Sandbox) -> None:
    assert sandbox.run_code("x = 41").text is None
    execution = sandbox.run_code("x + 1")
    assert execution.text == "42"
    assert execution.results[0].is_main_result
    assert execution.execution_count == 2
    assert sandbox.run_code("'text'").text == "text"
    assert sandbox.run_code("x = 5;  # nothing\nfor i in range(2):\n    print(i)").logs.stdout == ["0\n1\n"]


def test_streams_are_apart_and_children_are_heard(sandbox: Sandbox) -> None:
    execution = sandbox.run_code(
        "import os, subprocess, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.system('echo c')\n"
        "subprocess.run('echo d >&2', shell=True)\n!echo e"
    )
    assert "".join(execution.logs.stdout).split() == ["a", "c", "e"]
    assert "".join(execution.logs.stderr).split() == ["b", "d"]


def test_callbacks_come_while_the_code_runs(sandbox: Sandbox) -> None:
    seen: list[tuple[str, float]] = []
    sandbox.run_code(
        "import time\nfor i in range(3):\n    print(i)\n    time.sleep(0.3)",
        on_stdout=lambda message: seen.append((message.line, time.monotonic())),
    )
    assert [line for line, _ in seen] == ["0\n", "1\n", "2\n"]
    assert seen[2][1] - seen[0][1] > 0.3


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("1/0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("input()", "StdinNotImplementedError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E"),
        ("import os; os._exit(1)", "UnexpectedEndOfExecution"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "UnexpectedEndOfExecution"),
    ],
)
def test_errors_are_data_and_the_next_call_works(sandbox: Sandbox, code: str, name: str) -> None:
    error = sandbox.run_code(code).error
    assert error is not None
    assert error.name == name
    assert sandbox.run_code("1 + 1").text == "2"


def test_traceback(sandbox: Sandbox) -> None:
    error = sandbox.run_code("def f():\n    return 1/0\nf()").error
    assert error is not None
    assert error.value == "division by zero"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", error.traceback)  # E2B colours it too
    assert "return 1/0" in plain
    assert "in f()" in plain


@pytest.mark.parametrize(
    "code",
    [
        "print('\\udc80 \\x00 \\U0001f600')",
        "'\\udc80'",
        "raise ValueError('\\udc80')",
        "import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\n')",
        "print()",
        "print('\\n\\n\\n')",
        "print('x' * 3_000_000)",
        "'y' * 3_000_000",
        "raise ValueError('z' * 3_000_000)",
        "",
        "   \n\n",
        "# only a comment",
        "print('\\u2028 \\x85 \\x1c')",
        "from IPython.display import display, HTML\ndisplay(HTML('<b>x</b>'))",
        "await __import__('asyncio').sleep(0.01)",
        "\r\nx = 1\r\nprint(x)\r\n",
    ],
)
def test_odd_output_never_breaks_the_sdk(sandbox: Sandbox, code: str) -> None:
    execution = sandbox.run_code(code)
    texts = [*execution.logs.stdout, *execution.logs.stderr, *(result.text or "" for result in execution.results)]
    if execution.error is not None:
        texts += [execution.error.value, execution.error.traceback]
    "".join(texts).encode("utf-8")
    assert sum(map(len, texts)) < 300_000
    assert sandbox.run_code("1 + 1").text == "2"


def test_the_cut_is_stated(sandbox: Sandbox) -> None:
    execution = sandbox.run_code("print('x' * 60_000)")
    assert len("".join(execution.logs.stdout)) == 50_000
    assert "output cut: 10001 bytes" in "".join(execution.logs.stderr)


def test_a_picture(sandbox: Sandbox) -> None:
    execution = sandbox.run_code(
        "import matplotlib.pyplot as plt\nfig = plt.figure(figsize=(1, 1), dpi=40)\nplt.plot([1, 2]);"
    )
    assert any(result.png for result in execution.results)


def test_random_numbers_differ_between_sandboxes(sandbox: Sandbox) -> None:
    code = "import random, numpy as np; (random.random(), np.random.rand())"
    other = Sandbox.create(timeout=30)
    try:
        assert sandbox.run_code(code).text != other.run_code(code).text
    finally:
        other.kill()


def test_contexts_share_files_and_isolate_variables(sandbox: Sandbox) -> None:
    context = sandbox.create_code_context(cwd="/tmp")
    sandbox.run_code("x = 1")
    assert context.cwd == "/tmp"
    assert sandbox.run_code("import os; x = 2; open(os.path.expanduser('~/f'), 'w').write('s')", context=context)
    assert sandbox.run_code("x, open('f').read()").text == "(1, 's')"
    assert [one.id for one in sandbox.list_code_contexts()][1:] == [context.id]
    sandbox.restart_code_context(context)
    error = sandbox.run_code("x", context=context).error
    assert error is not None
    assert error.name == "NameError"
    sandbox.remove_code_context(context)
    with pytest.raises(e2b.NotFoundException):
        sandbox.run_code("x", context=context)
    with pytest.raises(e2b.SandboxException):
        sandbox.create_code_context(cwd="/does/not/exist")


def test_environment(sandbox: Sandbox) -> None:
    assert sandbox.run_code("import os; os.environ['GIVEN']").text == "yes"
    assert sandbox.run_code("os.environ['ONCE']", envs={"ONCE": "1"}).text == "1"
    assert sandbox.run_code("os.environ.get('ONCE')").text is None
    assert sandbox.commands.run("echo $GIVEN").stdout == "yes\n"


def test_files(sandbox: Sandbox) -> None:
    assert sandbox.files.write("d/a.txt", "héllo").path == "/home/user/d/a.txt"
    assert sandbox.files.read("/home/user/d/a.txt") == "héllo"
    sandbox.files.write_files([{"path": "b", "data": bytes(2_000_000)}, {"path": "c", "data": "x"}])
    assert len(sandbox.files.read("b", format="bytes")) == 2_000_000
    assert [one.name for one in sandbox.files.list("/home/user")] == ["b", "c", "d"]
    assert sandbox.files.exists("d/a.txt")
    assert not sandbox.files.make_dir("d")
    assert sandbox.files.rename("d/a.txt", "e/a.txt").path == "/home/user/e/a.txt"
    assert sandbox.files.get_info("e/a.txt").size == 6
    sandbox.files.remove("e")
    assert not sandbox.files.exists("e/a.txt")
    with pytest.raises(e2b.NotFoundException):
        sandbox.files.read("nope")
    with pytest.raises(e2b.SandboxException):
        sandbox.files.watch_dir("d")


def test_commands(sandbox: Sandbox) -> None:
    done = sandbox.commands.run("echo out; echo err >&2; pwd", cwd="/tmp")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\n/tmp\n", "err\n", 0)
    with pytest.raises(e2b.CommandExitException) as failed:
        sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3
    handle = sandbox.commands.run("cat; echo done", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "hi\n")
    assert [one.pid for one in sandbox.commands.list()] == [handle.pid]
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hi\ndone\n"
    assert not sandbox.commands.kill(handle.pid)
    sleeper = sandbox.commands.run("sleep 60", background=True)
    again = sandbox.commands.connect(sleeper.pid)
    assert sandbox.commands.kill(sleeper.pid)
    with pytest.raises(e2b.CommandExitException):
        again.wait()
    with pytest.raises(e2b.TimeoutException):
        sandbox.commands.run("sleep 60", timeout=0.5)


def test_life(server: RunningServer) -> None:
    one = Sandbox.create(timeout=60, metadata={"who": "me"})
    assert one.is_running()
    assert one.get_info().metadata == {"who": "me"}
    assert Sandbox.connect(one.sandbox_id).run_code("2 + 2").text == "4"
    one.set_timeout(1)
    assert eventually(lambda: not one.is_running())
    assert not one.kill()
    with pytest.raises(e2b.NotFoundException):
        one.set_timeout(5)
    with pytest.raises(e2b.TimeoutException):
        one.run_code("1")
    assert stats(server, "?metadata=who%3Dme") == {
        "created": 1, "killed": 0, "expired": 1, "died": 0, "executions": 1, "alive": 0,
    }  # fmt: skip


def test_list_by_label_in_pages(sandbox: Sandbox) -> None:
    others = [Sandbox.create(timeout=30, metadata={"run": "r 1/&=é"}) for _ in range(3)]
    try:
        pages = Sandbox.list(query=e2b.SandboxQuery(metadata={"run": "r 1/&=é"}), limit=2)
        found = []
        while pages.has_next:
            page = pages.next_items()
            assert len(page) <= 2
            found += [one.sandbox_id for one in page]
        assert sorted(found) == sorted(one.sandbox_id for one in others)
    finally:
        assert [one.kill() for one in others] == [True] * 3


def test_a_kill_during_an_execution_is_not_success(sandbox: Sandbox) -> None:
    import threading

    threading.Timer(0.5, sandbox.kill).start()
    error = sandbox.run_code("import time; time.sleep(30)").error
    assert error is not None
    assert error.name == "UnexpectedEndOfExecution"


async def test_async_hang_up_interrupts_and_keeps_the_state() -> None:
    one = await AsyncSandbox.create(timeout=60)
    try:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.run_code("import time; x = 1; time.sleep(60)"), 0.7)
        started = time.monotonic()
        assert (await one.run_code("x")).text == "1"
        assert time.monotonic() - started < 3
        stubborn = "while True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.run_code(stubborn), 0.7)
        assert (await one.run_code("1 + 1")).text == "2"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.run_code("import asyncio; await asyncio.sleep(60)"), 0.7)
        assert (await one.run_code("2 + 2")).text == "4"
    finally:
        assert await one.kill()


async def test_async_many_at_once(server: RunningServer) -> None:
    async def one(number: int) -> str | None:
        box = await AsyncSandbox.create(timeout=60, metadata={"many": "1"})
        try:
            await box.run_code(f"x = {number}")
            await box.files.write("n", str(number))
            result = await box.commands.run("cat n")
            return f"{(await box.run_code('x')).text} {result.stdout}"
        finally:
            await box.kill()

    assert await asyncio.gather(*(one(n) for n in range(8))) == [f"{n} {n}" for n in range(8)]
    counts = stats(server, "?metadata=many%3D1")
    assert (counts["created"], counts["killed"], counts["alive"]) == (8, 8, 0)


FAULT_ERRORS = [
    ("fault-429", e2b.RateLimitException),
    ("fault-400-limit", e2b.SandboxException),
    ("fault-401", e2b.AuthenticationException),
    ("fault-500-html", json.JSONDecodeError),
    ("fault-503", e2b.exceptions.ServiceBusyException),
    ("fault-unheard-of", e2b.SandboxException),
]


@pytest.mark.parametrize(("template", "kind"), FAULT_ERRORS)
def test_faults_of_create(template: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Sandbox.create(template=template, timeout=30)


def test_faults_of_execute() -> None:
    with Sandbox.create(template="fault-502-execute", timeout=30) as one, pytest.raises(e2b.TimeoutException):
        one.run_code("1")
    with Sandbox.create(template="fault-truncated-stream", timeout=30) as one, pytest.raises(Exception):  # noqa: B017, PT011
        one.run_code("print(1)")
    with Sandbox.create(template="fault-hang-execute", timeout=30) as one, pytest.raises(e2b.TimeoutException):
        one.run_code("1", timeout=1)
    with Sandbox.create(template="fault-wrong-values", timeout=30) as one:
        execution = one.run_code("print(6 * 7); 43")
        assert execution.logs.stdout == ["307\n"]
        assert execution.text == "314"
    with Sandbox.create(template="fault-vanish:1", timeout=30) as one:
        error = one.run_code("import time; time.sleep(20)").error
        assert error is not None
        assert error.name == "UnexpectedEndOfExecution"
    started = time.monotonic()
    Sandbox.create(template="fault-slow-create:1", timeout=30).kill()
    assert time.monotonic() - started >= 1


def test_bounds_and_key() -> None:
    flags = ("--isolation", "none", "--warm", "0", "--max-alive", "1", "--quota-release-s", "1.5", "--api-key", "right")
    with start_server(flags) as one:
        where = {"api_url": one.url, "sandbox_url": one.url, "api_key": "right"}
        with pytest.raises(e2b.AuthenticationException):
            Sandbox.create(api_url=one.url, sandbox_url=one.url, api_key="wrong")
        first = Sandbox.create(timeout=30, **where)
        with pytest.raises(e2b.RateLimitException):
            Sandbox.create(timeout=30, **where)
        first.kill()
        with pytest.raises(e2b.RateLimitException):  # its quota is released later
            Sandbox.create(timeout=30, **where)
        time.sleep(1.6)
        Sandbox.create(timeout=30, **where).kill()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{one.url}/v2/sandboxes")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": str(tmp_path)}
    one = start_server(("--warm", "1"), env=env)
    mark = f"{os.getpid()}{time.time_ns() % 10**9}"
    box = Sandbox.create(timeout=60, api_url=one.url, sandbox_url=one.url)
    box.run_code(f"import subprocess; subprocess.Popen(['setsid', 'sleep', '{mark}'])")
    assert list(tmp_path.iterdir())
    os.kill(one.pid, number)
    one.process.wait(20)
    one.stop()

    def is_clean() -> bool:
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return mark not in lines and str(tmp_path) not in lines and not list(tmp_path.iterdir())

    assert eventually(is_clean, 15)


def test_ends_with_its_parent() -> None:
    code = (
        "from verl_ext.sandbox.server.launch import start_server; import os\n"
        "one = start_server(('--isolation', 'none', '--warm', '0')); print(one.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert eventually(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def test_the_folder_is_in_the_system_temporary_folder() -> None:
    from verl_ext.sandbox.server.folders import PREFIX

    assert list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
