"""What each session mode isolates and what it does not, held to a real service; `seats.py` has the table.

The local server shares between the contexts of a sandbox exactly what E2B's does: all but variables and the
working directory. A test here that finds more isolation than the table says is a failure as well, since users
would rely on what another service does not give.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from verl_ext.errors import SandboxDiedError, SandboxError
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.sandbox.pool import SandboxSession, SessionPool

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def _a_service(request: pytest.FixtureRequest) -> None:
    """The fake has no machine to share."""
    if "fake" in request.node.callspec.params.values():
        pytest.skip("the fake runs in this process: it isolates nothing")


@contextlib.asynccontextmanager
async def two(backend: SandboxBackend, labels: dict[str, str], mode: str) -> AsyncIterator[list[SandboxSession]]:
    """Two sessions that both have their interpreter."""
    pool = SessionPool(backend, mode=mode, contexts=2, ttl_s=120, call_timeout_s=TIMEOUT_S, run_labels=labels)
    try:
        async with pool.session("a") as a, pool.session("b") as b:
            await a.run("name = 1")
            await b.run("name = 2")
            assert (a.sandbox_id == b.sandbox_id) == (mode == "context")
            yield [a, b]
    finally:
        await pool.aclose()


async def value(session: SandboxSession, code: str) -> Any:
    execution = await session.run(code)
    assert execution.error is None, execution.error
    return execution.results[-1] if execution.results else None


@pytest.mark.parametrize("mode", ["sandbox", "context"])
async def test_variables_imports_and_working_directory_are_ones_own(backend, labels, mode: str):
    async with two(backend, labels, mode) as (a, b):
        assert (await value(a, "name"), await value(b, "name")) == ("1", "2")
        await a.run("import os, math\nopen('mine.txt', 'w').write('a')\nmath.tau = 0")
        assert await value(b, "import os, math\nos.path.exists('mine.txt'), math.tau > 6") == "(False, True)"
        await a.run("os.chdir('/')")
        assert await value(b, "os.getcwd() != '/'") == "True"


@pytest.mark.parametrize(("mode", "shared"), [("sandbox", "False"), ("context", "True")])
async def test_files_are_the_sandboxs(backend, labels, mode: str, shared: str):
    async with two(backend, labels, mode) as (a, b):
        await a.run("import tempfile, os\npath = '/tmp/of-a-trajectory'\nopen(path, 'w').write('x')")
        assert await value(b, "import os\nos.path.exists('/tmp/of-a-trajectory')") == shared


@pytest.mark.parametrize(("mode", "shared"), [("sandbox", False), ("context", True)])
async def test_processes_are_the_sandboxs(backend, labels, mode: str, shared: bool):
    async with two(backend, labels, mode) as (a, b):
        pid = await value(a, "import os\nos.getpid()")
        marked = await value(a, "open('/proc/self/cmdline').read() and os.stat('/proc/self').st_uid")
        seen = await value(b, f"import os\nos.path.exists('/proc/{pid}') and os.stat('/proc/{pid}').st_uid == {marked}")
        if shared:
            assert seen == "True"
        else:
            # Another pid namespace may have a process of that number too: what counts is that a's is not reached.
            await b.run(f"import os, signal\ntry:\n    os.kill({pid}, 0)\nexcept OSError:\n    pass")
            assert await value(a, "name") == "1"


async def test_in_context_one_can_end_the_others_interpreter_and_only_that_is_masked(backend, labels):
    async with two(backend, labels, "context") as (a, b):
        pid = await value(a, "import os\nos.getpid()")
        await b.run(f"import os, signal\nos.kill({pid}, signal.SIGKILL)")
        with contextlib.suppress(SandboxError):  # masked, or told that its state is lost: never another's state
            execution = await a.run("name")
            assert execution.error is not None
        assert await value(b, "name") == "2"


@pytest.mark.parametrize("mode", ["sandbox", "context"])
async def test_the_end_of_a_sandbox_costs_those_in_it(backend, labels, mode: str):
    async with two(backend, labels, mode) as (a, b):
        await backend.kill(a.sandbox_id)
        with pytest.raises(SandboxDiedError):
            await a.run("name")
        if mode == "context":
            with pytest.raises(SandboxDiedError):
                await b.run("name")
        else:
            assert await value(b, "name") == "2"


async def test_in_context_one_that_eats_memory_costs_at_most_its_neighbours(backend, labels):
    pool = SessionPool(backend, mode="context", contexts=4, max_alive=2, ttl_s=120, run_labels=labels)
    outcomes: dict[int, str] = {}

    async def one(number: int) -> None:
        async with pool.session(f"t{number}") as session:
            try:
                await session.run("x = 1")
                code = "x = [bytearray(2**24) for _ in range(2**10)]" if number == 0 else "x + 1"
                execution = await session.run(code, timeout_s=TIMEOUT_S)
                outcomes[number] = "told" if execution.error else "done"
            except SandboxError:
                outcomes[number] = "masked"

    try:
        await asyncio.gather(*(one(number) for number in range(8)))
        assert outcomes[0] in ("told", "masked")
        assert list(outcomes.values()).count("done") >= 4, "the other sandbox's are untouched"
        assert "told" not in [outcomes[number] for number in range(1, 8)], "no fault of ours as if it were theirs"
    finally:
        await pool.aclose()
    assert await backend.list_ids(labels=labels) == []


async def test_code_past_its_deadline_in_context_stops_and_leaves_the_others_alone(backend, labels):
    async with two(backend, labels, "context") as (a, b):
        home = a.sandbox_id
        execution = await a.run("import time\nwhile True:\n    time.sleep(0.01)", timeout_s=1.0)
        assert execution.timed_out
        assert await value(b, "name") == "2"
        again = await a.run("name")
        assert again.error is not None
        assert again.error.name == "NameError"
        assert a.sandbox_id == home
