"""What every sandbox service must do, the fake included: tests above the backend rely on it.

Not covered: egress and isolation (tests of the local server; on AGS and E2B they are the service's), files,
memory limits, and output beyond 1 MiB, of which the local server keeps the beginning only.
"""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Awaitable, Callable

import pytest

from verl_ext.errors import SandboxDiedError
from verl_ext.sandbox.interface import Execution, Sandbox, SandboxBackend
from verl_ext.sandbox.ledger import RUN_LABEL, clean_run
from verl_ext.sandbox.pool import SessionPool

MAX_BYTES = 65_536
TIMEOUT_S = 20.0


@pytest.fixture
async def sandbox(backend: SandboxBackend, labels: dict[str, str]) -> Sandbox:
    return await backend.create(labels=labels, ttl_s=120)


@pytest.fixture
def run(sandbox: Sandbox) -> Callable[[str], Awaitable[Execution]]:
    async def run_dedented(code: str) -> Execution:
        return await sandbox.run_code(textwrap.dedent(code), timeout_s=TIMEOUT_S)

    return run_dedented


async def test_state_is_kept_between_calls(run):
    await run("import math\nx = 20")
    await run("def double(n):\n    return 2 * n")
    assert (await run("double(x) + math.floor(2.5)")).results == ("42",)


async def test_state_is_not_shared_between_sandboxes(backend: SandboxBackend, labels: dict[str, str]):
    first, second = [await backend.create(labels=labels, ttl_s=120) for _ in range(2)]
    await first.run_code("secret = 1", timeout_s=TIMEOUT_S)
    seen = await second.run_code("secret", timeout_s=TIMEOUT_S)
    assert seen.error is not None
    assert seen.error.name == "NameError"


@pytest.mark.parametrize(
    ("code", "results"),
    [
        ("1 + 1", ("2",)),
        ("x = 3", ()),
        ("None", ()),
        ("print('a')", ()),
        ("for i in range(3):\n    i", ()),
        ("5\n# comment at the end", ("5",)),
        ("[\n  1,\n  2,\n]", ("[1, 2]",)),
        ("", ()),
        ("# only a comment", ()),
    ],
)
async def test_the_value_of_the_last_expression_is_the_result(run, code: str, results: tuple[str, ...]):
    execution = await run(code)
    assert execution.results == results
    assert execution.error is None


async def test_output_and_errors_are_kept_apart(run):
    execution = await run("""
        import sys
        print("out", end="")
        print("err", file=sys.stderr, end="")
        sys.stdout.write("|more\\n")
        7
    """)
    assert execution.stdout == "out|more\n"
    assert execution.stderr == "err"
    assert execution.results == ("7",)
    assert execution.dropped_bytes == 0
    assert execution.elapsed_s > 0


async def test_output_in_pieces_is_joined(run):
    execution = await run("import time\nfor i in range(3):\n    print(i)\n    time.sleep(0.05)")
    assert execution.stdout == "0\n1\n2\n"


async def test_an_exception_is_data(run):
    execution = await run("def f():\n    raise ValueError('no such thing')\nprint('before')\nf()")
    assert execution.stdout == "before\n"
    assert execution.error is not None
    assert execution.error.name == "ValueError"
    assert execution.error.value == "no such thing"
    assert "raise ValueError" in execution.error.traceback
    assert "\x1b" not in execution.error.traceback
    assert (await run("1")).results == ("1",)


async def test_a_syntax_error_is_data(run):
    execution = await run("print('never')\nif True print(1)")
    assert execution.error is not None
    assert execution.error.name == "SyntaxError"
    assert execution.stdout == ""


async def test_sys_exit_is_data(run):
    await run("x = 5")
    execution = await run("import sys\nsys.exit(3)")
    assert execution.error is not None
    assert execution.error.name == "SystemExit"
    assert (await run("x")).results == ("5",)


async def test_input_is_data(run):
    execution = await run("input('name? ')")
    assert execution.error is not None
    assert not execution.timed_out


@pytest.mark.parametrize("code", ["while True:\n    pass", "import time\ntime.sleep(30)"])
async def test_the_deadline_is_enforced(sandbox: Sandbox, code: str):
    await sandbox.run_code("1", timeout_s=TIMEOUT_S)
    began_s = time.monotonic()
    execution = await sandbox.run_code(f"print('so far', flush=True)\n{code}", timeout_s=1.0)
    assert 0.9 < time.monotonic() - began_s < 5.0
    assert execution.timed_out
    assert execution.stdout == "so far\n"
    assert execution.error is not None
    assert execution.error.name == "TimeoutError"


async def test_much_output_is_cut_in_the_middle_and_says_so(run):
    execution = await run("print('begin')\nprint('x' * 600_000)\nprint('end')")
    assert execution.error is None
    assert execution.stdout.startswith("begin\nxxx")
    assert execution.stdout.endswith("xxx\nend\n")
    assert "dropped" in execution.stdout
    assert len(execution.stdout.encode()) < MAX_BYTES + 200
    assert execution.dropped_bytes > 500_000


async def test_many_small_writes_are_cut_as_well(run):
    execution = await run("for i in range(60_000):\n    print(i)")
    assert execution.stdout.startswith("0\n1\n")
    assert execution.stdout.endswith("59998\n59999\n")
    assert execution.dropped_bytes > 0


async def test_unicode_is_kept(run):
    text = "数学 Ω≈ \U0001f600 e\u0301"
    execution = await run(f"print({text!r})\n{text!r}")
    assert execution.stdout == text + "\n"
    assert execution.results[0].strip("'") == text


async def test_what_cannot_be_encoded_comes_back_readable(run):
    execution = await run("print('a\\ud800b')\nprint('c\\x00d')")
    assert "\x00" not in execution.stdout
    execution.stdout.encode()


async def test_a_killed_sandbox_has_died(backend: SandboxBackend, sandbox: Sandbox):
    await sandbox.run_code("1", timeout_s=TIMEOUT_S)
    assert await backend.kill(sandbox.sandbox_id) is True
    with pytest.raises(SandboxDiedError):
        await sandbox.run_code("1", timeout_s=TIMEOUT_S)


async def test_a_sandbox_killed_under_a_run_has_died(backend: SandboxBackend, sandbox: Sandbox):
    await sandbox.run_code("1", timeout_s=TIMEOUT_S)
    running = asyncio.create_task(sandbox.run_code("import time\ntime.sleep(3)", timeout_s=TIMEOUT_S))
    await asyncio.sleep(0.5)
    await backend.kill(sandbox.sandbox_id)
    with pytest.raises(SandboxDiedError):
        await running


async def test_closing_twice_is_harmless(backend: SandboxBackend, sandbox: Sandbox):
    await sandbox.close()
    await sandbox.close()
    assert await backend.kill(sandbox.sandbox_id) is False


async def test_killing_an_unknown_sandbox_is_false(backend: SandboxBackend):
    assert await backend.kill("inosuchsandbox0000") is False


async def test_a_sandbox_can_be_extended(sandbox: Sandbox):
    await sandbox.extend(ttl_s=200)
    await sandbox.close()
    with pytest.raises(SandboxDiedError):
        await sandbox.extend(ttl_s=200)


async def test_several_run_at_once(backend: SandboxBackend, labels: dict[str, str]):
    async def one(number: int) -> str:
        sandbox = await backend.create(labels=labels, ttl_s=120)
        await sandbox.run_code(f"n = {number}", timeout_s=TIMEOUT_S)
        execution = await sandbox.run_code("print(n * n)", timeout_s=TIMEOUT_S)
        await sandbox.close()
        return execution.stdout

    assert await asyncio.gather(*(one(number) for number in range(5))) == [f"{n * n}\n" for n in range(5)]


async def test_sandboxes_are_listed_by_label(backend: SandboxBackend, labels: dict[str, str]):
    odd = {**labels, "note": "a/b &=%+ ä?", "worker": "0"}
    plain = await backend.create(labels=labels, ttl_s=120)
    marked = await backend.create(labels=odd, ttl_s=120)
    assert sorted(await backend.list_ids(labels=labels)) == sorted([plain.sandbox_id, marked.sandbox_id])
    assert await backend.list_ids(labels=odd) == [marked.sandbox_id]
    assert await backend.list_ids(labels={RUN_LABEL: "no such run"}) == []
    await plain.close()
    assert await backend.list_ids(labels=labels) == [marked.sandbox_id]


async def test_a_pool_leaves_nothing_behind(backend: SandboxBackend, labels: dict[str, str]):
    pool = SessionPool(backend, max_alive=2, ttl_s=120, call_timeout_s=TIMEOUT_S, run_labels=labels)

    async def trajectory(number: int) -> tuple[str, ...]:
        async with pool.session(f"t{number}") as session:
            await session.run(f"n = {number}")
            timed_out = await session.run("while True:\n    pass", timeout_s=0.5) if number == 0 else None
            assert timed_out is None or timed_out.timed_out
            return (await session.run("n" if number else "'fresh'")).results

    results = await asyncio.gather(*(trajectory(number) for number in range(4)))
    assert [result[0].strip("'") for result in results] == ["fresh", "1", "2", "3"]
    await pool.aclose()
    assert await backend.list_ids(labels=labels) == []
    totals = pool.metrics.totals()
    assert (totals["created"], totals["killed"], totals["left"]) == (5, 5, 0)


async def test_what_a_killed_process_left_is_cleaned_by_the_run(backend: SandboxBackend, labels: dict[str, str]):
    left = [await backend.create(labels=labels, ttl_s=120) for _ in range(3)]
    report = await clean_run(backend, labels[RUN_LABEL])
    assert (report.found, report.killed, report.failed) == (3, 3, ())
    with pytest.raises(SandboxDiedError):
        await left[0].run_code("1", timeout_s=TIMEOUT_S)
