"""The faults of a sandbox service, injected beneath verl's real `AgentLoopWorker.generate_sequences`.

Everything between that call and the server's socket is real: verl's worker, our loop and tool, the pool, the SDK.
For each fault: the batch completes or ends with its cause, no fault of ours is shown to the model as if it were its
own, and nothing is alive afterwards.

Not covered here: the broker's death (test_broker_actor.py), and a whole run whose processes die (tests/e2e).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    from verl.protocol import DataProto
    from verl_worker import ANSWER, PROMPT, ScriptedEngine, Worker, call, make_config, make_prompts

    from verl_ext.agent_loop.loop import RECORD_FIELD
    from verl_ext.tools import code_interpreter
    from verl_ext.trajectory import LoopRecord

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import SandboxAuthError, SandboxRequestError
from verl_ext.sandbox import e2b, lifecycle, limiter
from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend
from verl_ext.sandbox.ledger import RUN_LABEL, clean_run
from verl_ext.sandbox.metrics import PoolReport
from verl_ext.sandbox.pool import SessionPool
from verl_ext.sandbox.server.launch import RunningServer, start_server

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.server, pytest.mark.usefixtures("fresh_verl_loops")]
SCRIPT = [call("x = 20"), call("x + 22"), ANSWER]
SEEN = ["(no output)", "42"]  # what a trajectory that was not lost has been shown
COUNT = 6


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with start_server(["--faults", "--warm", "4"]) as running:
        yield running


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_BACKOFF_BASE_S", 0.02)
    monkeypatch.setattr(limiter, "REFUSED_BASE_S", 0.05)
    monkeypatch.setattr(limiter, "REFUSED_CAP_S", 0.2)
    monkeypatch.setattr(e2b, "_REAP_AFTER_S", (0.2, 0.5))


@dataclass
class Result:
    """A batch, and what is known of its sandboxes."""

    output: DataProto
    report: PoolReport
    totals: dict[str, float]

    @property
    def records(self) -> list[LoopRecord]:
        return [LoopRecord.from_json(text) for text in self.output.non_tensor_batch[RECORD_FIELD]]

    @property
    def lost(self) -> int:
        return sum(bool(record.infra_error) for record in self.records)

    def check(self, count: int = COUNT) -> None:
        """The contract of every batch, whatever was broken."""
        assert len(self.output) == count
        for row, record in enumerate(self.records):
            mask = self.output.batch["response_mask"][row]
            shown = [one.response for one in record.calls() if one.status != "infra_failed"]
            assert shown == SEEN[: len(shown)], "the model was shown something that its code did not do"
            assert bool(mask.any()) == (not record.infra_error)
            assert int(self.output.batch["attention_mask"][row, PROMPT:].sum()) > 0
            assert record.infra_error or shown == SEEN
            if record.infra_error:
                assert float(self.output.batch["rm_scores"][row].sum()) == 0.0
        assert self.totals["created"] == self.totals["killed"] + self.totals["kill_failed"]


class Rollouts:
    """Rolls out batches over one server, with sandboxes of one label."""

    def __init__(self, server: RunningServer, tokenizer: Any, mode: str, folder: Path) -> None:
        self.server, self.tokenizer, self.mode, self.folder = server, tokenizer, mode, folder
        self.run_id = f"faults-{uuid.uuid4().hex[:12]}"
        self.config = make_config()
        self.backend: E2BBackend | None = None
        self.pool: SessionPool | None = None

    def open(self, template: str = "code-interpreter-v1", **options: Any) -> SessionPool:
        timeouts = {"create_timeout_s": options.pop("create_timeout_s", 10.0), "control_timeout_s": 5.0}
        self.backend = E2BBackend(
            api_key=LOCAL_KEY, api_url=self.server.url, sandbox_url=self.server.url, template=template, **timeouts
        )
        given = {"max_alive": 3, "contexts": 2, "ttl_s": 60, "call_timeout_s": 5.0, "acquire_timeout_s": 20.0}
        labels = {RUN_LABEL: self.run_id}
        self.pool = SessionPool(self.backend, mode=self.mode, run_labels=labels, **{**given, **options})
        return self.pool

    async def generate(self, scripts: Sequence[Sequence[str]], timeout_s: float) -> DataProto:
        assert self.pool is not None
        code_interpreter.use_sessions(self.pool.session)
        engine = ScriptedEngine(self.tokenizer, scripts)
        worker = Worker(self.config, self.tokenizer, engine, self.pool)
        async with asyncio.timeout(timeout_s):
            return await worker.generate_sequences(make_prompts(len(scripts)))

    async def batch(self, template: str, count: int = COUNT, timeout_s: float = 60.0, **options: Any) -> Result:
        pool = self.open(template, **options)
        self._set_call_timeout(options.get("call_timeout_s", 5.0))
        try:
            output = await self.generate([SCRIPT] * count, timeout_s)
        finally:
            await self.close()
        return Result(output, pool.metrics.report(), pool.metrics.totals())

    def _set_call_timeout(self, seconds: float) -> None:
        """The tool states each call's deadline itself, from its file."""
        tool = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())
        tool["tools"][0]["config"]["call_timeout_s"] = seconds
        path = self.folder / "tool.yaml"
        path.write_text(yaml.safe_dump(tool))
        self.config.actor_rollout_ref.rollout.multi_turn.tool_config_path = str(path)

    async def close(self) -> None:
        code_interpreter.use_sessions(None)
        assert self.pool is not None
        assert self.backend is not None
        await self.pool.aclose()
        await self.backend.aclose()

    async def sweep(self) -> None:
        """What the end of a run does, and `invoke clean-sandboxes --run ID`; some seconds later here, on busy cores."""
        backend = E2BBackend(api_key=LOCAL_KEY, api_url=self.server.url, sandbox_url=self.server.url)
        try:
            await asyncio.sleep(2)
            await clean_run(backend, self.run_id)
        finally:
            await backend.aclose()

    async def alive(self) -> int:
        return int((await asyncio.to_thread(self.server.stats, **{RUN_LABEL: self.run_id}))["alive"])


@pytest.fixture(params=["sandbox", "context"])
async def rollouts(
    request: pytest.FixtureRequest, server: RunningServer, byte_tokenizer: Any, tmp_path: Path
) -> AsyncIterator[Rollouts]:
    made = Rollouts(server, byte_tokenizer, request.param, tmp_path)
    yield made
    assert await made.alive() == 0, "something was left"


# What may fail for a while and then works: nothing is lost, and the retries are counted by cause.
PASSING = {
    "429": "retries/SandboxQuotaError",
    "400-limit": "retries/SandboxQuotaError",
    "503": "retries/SandboxUnavailableError",
    "500-html": "retries/SandboxUnavailableError",
    "drop-before-create": "retries/SandboxUnavailableError",
    "drop-after-create": "retries/SandboxUnavailableError",
}


@pytest.mark.parametrize("fault", PASSING)
async def test_creates_that_fail_now_and_then_cost_nothing_but_time(fault: str, rollouts: Rollouts):
    # Refusals make everything pause, up to a minute: the budget must not be what fails on a busy machine.
    result = await rollouts.batch(f"fault-{fault}@0.4", timeout_s=240.0, acquire_timeout_s=200.0)
    result.check()
    assert result.lost == 0
    if rollouts.mode == "sandbox":  # in the other there may be no more than two creates
        assert result.totals[PASSING[fault]] > 0


async def test_a_create_that_is_accepted_and_never_answered_is_given_up_and_its_sandbox_ended(rollouts: Rollouts):
    result = await rollouts.batch("fault-hang-create@0.5", count=8, create_timeout_s=1.5)
    result.check(8)
    assert result.lost == 0
    if rollouts.mode == "sandbox":
        assert result.totals["retries/SandboxTimeoutError"] > 0


@pytest.mark.parametrize("fault", ["429", "400-limit", "503", "500-html", "drop-before-create", "hang-create"])
async def test_creates_that_never_work_cost_every_trajectory_and_end_in_time(fault: str, rollouts: Rollouts):
    began_s = time.monotonic()
    result = await rollouts.batch(f"fault-{fault}", acquire_timeout_s=1.0, create_timeout_s=0.4)
    result.check()
    assert result.lost == COUNT
    assert all("no sandbox within 1 s" in record.infra_error for record in result.records)
    assert time.monotonic() - began_s < 30
    if fault == "hang-create":
        await (
            rollouts.sweep()
        )  # as each run does at its end: the last create may not have been done when its pool closed


@pytest.mark.parametrize(("fault", "error"), [("401", SandboxAuthError), ("404-template", SandboxRequestError)])
async def test_what_no_retry_can_help_ends_the_rollout_at_once(fault: str, error: type[Exception], rollouts: Rollouts):
    # One trajectory is still being written when another meets the refusal; nobody waits for it.
    pool = rollouts.open(f"fault-{fault}")
    engine_waits = asyncio.Event()
    generate = ScriptedEngine.generate

    async def slow(self: ScriptedEngine, request_id: str, **rest: Any) -> Any:
        if len(self._script_of) > 1:
            await engine_waits.wait()
        return await generate(self, request_id, **rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ScriptedEngine, "generate", slow)
        with pytest.raises(error, match="check "):
            await rollouts.generate([SCRIPT] * COUNT, timeout_s=30)
    await rollouts.close()
    assert pool.metrics.totals()["created"] == 0


# What breaks under a call: those trajectories are lost, the others are as if nothing had been.
BREAKING = [
    "502-execute@0.3", "500-execute@0.3", "drop-before-execute@0.3", "drop-after-execute@0.3", "truncated-stream@0.3",
    "vanish:0.3@0.5", "hang-execute@0.2", "slow-execute:10@0.1",
]  # fmt: skip


@pytest.mark.parametrize("fault", BREAKING)
async def test_calls_that_break_are_masked_and_never_shown(fault: str, rollouts: Rollouts):
    result = await rollouts.batch(f"fault-{fault}", count=12, call_timeout_s=2.0)
    result.check(12)
    failures = sum(count for name, count in result.totals.items() if name.startswith("failures/"))
    assert failures == result.lost, "each lost trajectory has one counted cause"


@pytest.mark.parametrize("fault", ["429-execute@0.3", "503-execute@0.3"])
async def test_calls_that_were_surely_not_begun_are_made_again(fault: str, rollouts: Rollouts):
    result = await rollouts.batch(f"fault-{fault}", count=12)
    result.check(12)
    assert result.lost <= 3, "four tries each"


async def test_a_call_that_always_breaks_costs_the_batch_and_nothing_hangs(rollouts: Rollouts):
    result = await rollouts.batch("fault-hang-execute", call_timeout_s=1.0)
    result.check()
    assert result.lost == COUNT


async def test_kills_that_fail_are_tried_again_and_the_rest_is_swept_by_the_run(rollouts: Rollouts):
    # A sandbox that could not be killed keeps its place until its time to live is over.
    result = await rollouts.batch("fault-500-kill@0.7", count=12, ttl_s=3)
    result.check(12)
    assert result.lost == 0
    backend = rollouts.backend
    assert backend is not None
    for _ in range(20):
        report = await clean_run(backend, rollouts.run_id)
        if not report.failed:
            break
    assert await rollouts.alive() == 0


async def test_one_valid_member_is_enough_and_every_row_has_the_same_columns(rollouts: Rollouts):
    rollouts.open("fault-502-execute", max_alive=3)
    try:
        output = await rollouts.generate([*([SCRIPT] * 5), [ANSWER]], timeout_s=60)
    finally:
        await rollouts.close()
    masks = output.batch["response_mask"].bool().any(dim=-1).tolist()
    assert masks == [False] * 5 + [True]
    assert {len(column) for column in output.non_tensor_batch.values()} == {6}


async def test_a_clock_that_jumps_changes_nothing(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch):
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (86_400 if next(calls) % 2 else -86_400))
    result = await rollouts.batch("code-interpreter-v1")
    result.check()
    assert result.lost == 0


async def test_a_rollout_cancelled_in_the_middle_of_its_creates_leaves_nothing(rollouts: Rollouts):
    rollouts.open("fault-slow-create:1")
    task = asyncio.create_task(rollouts.generate([SCRIPT] * COUNT, timeout_s=60))
    await asyncio.sleep(0.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(1.0)  # the creates go on at the server
    await rollouts.close()


async def test_the_steps_deadline_masks_what_is_not_done_and_holds_against_a_server_that_hangs(rollouts: Rollouts):
    rollouts.config = make_config({"verl_ext.step_timeout_s": 2})
    began_s = time.monotonic()
    result = await rollouts.batch("fault-hang-execute", call_timeout_s=50.0)
    assert time.monotonic() - began_s < 25
    result.check()
    assert {record.infra_error for record in result.records} == {"the deadline of the step passed"}


async def test_the_trajectorys_deadline_does_not_count_the_wait_for_a_sandbox(rollouts: Rollouts):
    rollouts.config = make_config({"verl_ext.trajectory_timeout_s": 4})
    result = await rollouts.batch("fault-slow-create:1.5", count=8, max_alive=1, contexts=1)
    result.check(8)
    assert result.lost == 0, "the last ones waited for 10 s and more"
    if rollouts.mode == "sandbox":
        assert max(result.report.durations["wait_s"]) > 4


async def test_a_new_event_loop_finds_the_pool_as_good_as_new(
    server: RunningServer, byte_tokenizer: Any, tmp_path: Path
):
    rollouts = Rollouts(server, byte_tokenizer, "sandbox", tmp_path)
    pool = rollouts.open()
    for _ in range(2):
        # In a thread, for asyncio.run would take this test's loop away.
        output = await asyncio.to_thread(asyncio.run, rollouts.generate([SCRIPT] * COUNT, timeout_s=60))
        Result(output, pool.metrics.report(), pool.metrics.totals()).check()
        code_interpreter.use_sessions(None)
    await rollouts.close()
    assert await rollouts.alive() == 0


@pytest.mark.parametrize("mode", ["sandbox", "context"])
async def test_places_that_come_back_late_are_waited_for(mode: str, byte_tokenizer: Any, tmp_path: Path):
    late = ["--max-alive", "3", "--quota-release-s", "1.5", "--limit-as-400"]
    with start_server(late) as server:
        rollouts = Rollouts(server, byte_tokenizer, mode, tmp_path)
        began_s = time.monotonic()
        result = await rollouts.batch("code-interpreter-v1", count=9)
        elapsed_s = time.monotonic() - began_s
        result.check(9)
        assert result.lost == 0
        stats = server.stats()
        assert (stats["alive"], stats["created"]) == (0, stats["killed"])
        # One asks for all, every half cap (0.1 s) at most; six that each ask for themselves are refused 40 times/s.
        assert stats["refused"] < 20 * elapsed_s, (stats["refused"], elapsed_s)


async def test_a_place_that_comes_back_a_minute_late_costs_a_minute_and_nothing_else(
    byte_tokenizer: Any, tmp_path: Path
):
    with start_server(["--max-alive", "3", "--quota-release-s", "60", "--limit-as-400"]) as server:
        rollouts = Rollouts(server, byte_tokenizer, "sandbox", tmp_path)
        began_s = time.monotonic()
        result = await rollouts.batch("code-interpreter-v1", count=4, timeout_s=150, acquire_timeout_s=120.0)
        elapsed_s = time.monotonic() - began_s
        result.check(4)
        stats = server.stats()
        assert (result.lost, stats["alive"], stats["created"]) == (0, 0, stats["killed"])
        assert 60 < elapsed_s < 90


@pytest.mark.parametrize("mode", ["sandbox", "context"])
async def test_known_lateness_is_waited_for_without_one_refusal(mode: str, byte_tokenizer: Any, tmp_path: Path):
    late = ["--max-alive", "3", "--quota-release-s", "1.0", "--limit-as-400"]
    with start_server(late) as server:
        rollouts = Rollouts(server, byte_tokenizer, mode, tmp_path)
        limits = limiter.Limits(max_alive=3, max_starting=3, quota_release_s=1.2)
        result = await rollouts.batch("code-interpreter-v1", count=9, limiter=limiter.LocalLimiter(limits))
        result.check(9)
        assert (result.lost, server.stats()["refused"]) == (0, 0)


HELPLESS = """
import asyncio, sys
from verl_ext.sandbox.e2b import E2BBackend, LOCAL_KEY
from verl_ext.sandbox.ledger import RUN_LABEL, SandboxLedger
from verl_ext.sandbox.pool import SessionPool
from pathlib import Path

async def main(url, run_id, folder):
    backend = E2BBackend(api_key=LOCAL_KEY, api_url=url, sandbox_url=url)
    pool = SessionPool(backend, run_labels={RUN_LABEL: run_id}, ledger=SandboxLedger(Path(folder), "w"), ttl_s=300)
    async def one(number):
        async with pool.session(f"t{number}") as session:
            await session.run("1")
            print("up", flush=True)
            await asyncio.sleep(600)
    await asyncio.gather(*(one(number) for number in range(3)))

asyncio.run(main(*sys.argv[1:]))
"""


def test_what_a_killed_process_left_one_command_ends(server: RunningServer, tmp_path: Path):
    run_id = f"killed-{uuid.uuid4().hex[:8]}"
    ledgers = tmp_path / "runs" / run_id / "sandboxes"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_EXT_ENV_FILE": "/dev/null"}
    command = [sys.executable, "-c", HELPLESS, server.url, run_id, str(ledgers)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["up\n"] * 3
        process.send_signal(signal.SIGKILL)
    assert server.stats(**{RUN_LABEL: run_id})["alive"] == 3
    environment |= {
        "VERL_EXT_SANDBOX_BACKEND": "local", "E2B_API_URL": server.url, "VERL_EXT_DATA_ROOT": str(tmp_path),
    }  # fmt: skip
    clean = [sys.executable, "-m", "verl_ext.clean", "--run", run_id]
    done = subprocess.run(clean, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"sandboxes of {run_id}: created 3, killed 0, swept 3, leaked 0\n"
    assert server.stats(**{RUN_LABEL: run_id})["alive"] == 0
