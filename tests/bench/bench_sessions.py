"""Trajectories per minute on one small account: ours in both modes, and verl's own tool loop, in one run.

`python tests/bench/bench_sessions.py` starts a local server that behaves as AGS is reported to: 10 sandboxes, a
create takes 4 s, an execution 50 ms more than its code, a killed sandbox counts for `--quota-release-s` more, 50
requests per second to the control plane, and a full account is answered 400. The kernels are real, so CPU and memory
are charged as they are.

256 trajectories are in flight at any time, 4 calls each, no time between two calls; what is counted are calls that
gave what the code gives, divided by 4. verl's own is `ToolAgentLoop._call_tool` of verl 0.6.1, with a tool that makes
a sandbox for each call and lets N calls run at once (`rate_limit`, as in verl's SandboxFusionTool), for several N;
the best N counts. A refused call holds its place for a second, in favour of that tool: else refusals storm, the kills
are refused with them, and it makes nothing at all. Each contender runs
alone, for `--seconds`, after a start of `--warm-up-s`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import on_path  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from e2b_code_interpreter import AsyncSandbox
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import FunctionCall
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

    from verl_ext.tools import code_interpreter
    from verl_ext.tools.code_interpreter import CodeInterpreterTool

import yaml

from verl_ext.compose import CONFIG_DIR
from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend
from verl_ext.sandbox.limiter import Limits, LocalLimiter
from verl_ext.sandbox.metrics import percentile
from verl_ext.sandbox.pool import SessionPool
from verl_ext.sandbox.server.launch import start_server

ENTRY = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"][0]
SCHEMA = OpenAIFunctionToolSchema.model_validate(ENTRY["tool_schema"])
CALLS = 4


@dataclass
class Tally:
    """What one contender did in its window."""

    name: str
    good: int = 0
    shown: Counter[str] = field(default_factory=Counter)  # faults of the service that the model was shown
    masked: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0
    created: int = 0

    @property
    def per_minute(self) -> float:
        return self.good / CALLS / self.seconds * 60


class PlainTool(BaseTool):
    """A sandbox for each call, at most `rate_limit` at once: the SDK's own way."""

    def __init__(self, url: str, rate_limit: int) -> None:
        self.config, self.tool_schema, self.name = {}, SCHEMA, SCHEMA.function.name
        self._where = {"api_url": url, "sandbox_url": url, "api_key": "x", "timeout": 120, "validate_api_key": False}
        self._gate = asyncio.Semaphore(rate_limit)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        return "one", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict]:
        async with self._gate:
            try:
                sandbox = await AsyncSandbox.create(**self._where)
            except Exception:
                await asyncio.sleep(1)  # in its favour: it asks no more than N times a second
                raise
            try:
                execution = await sandbox.run_code(parameters["code"])
            finally:
                await sandbox.kill()
        return ToolResponse(text=execution.text or ""), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        return


Trajectory = Callable[[Tally, Callable[[], bool]], Awaitable[None]]


async def measure(tally: Tally, one: Trajectory, options: argparse.Namespace, stats: Callable[[], dict]) -> Tally:
    """Keep `in_flight` trajectories going; count what falls into the window."""
    counting = False
    stop = asyncio.Event()

    async def again_and_again() -> None:
        while not stop.is_set():
            await one(tally, lambda: counting)

    tasks = [asyncio.create_task(again_and_again()) for _ in range(options.in_flight)]
    await asyncio.sleep(options.warm_up_s)
    before, began_s, counting = await asyncio.to_thread(stats), time.monotonic(), True
    await asyncio.sleep(options.seconds)
    counting, tally.seconds = False, time.monotonic() - began_s
    after = await asyncio.to_thread(stats)
    tally.refused, tally.created = after["refused"] - before["refused"], after["created"] - before["created"]
    stop.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return tally


async def verls_own(url: str, rate_limit: int, options: argparse.Namespace, stats: Callable[[], dict]) -> Tally:
    loop = ToolAgentLoop.__new__(ToolAgentLoop)
    tool = PlainTool(url, rate_limit)
    loop.tools, loop.max_tool_response_length, loop.tool_response_truncate_side = {tool.name: tool}, 4096, "middle"

    async def one(tally: Tally, counting: Callable[[], bool]) -> None:
        for number in range(CALLS):
            began_s = time.monotonic()
            arguments = json.dumps({"code": f"x = {number}\nx * 2"})
            response, _, _ = await loop._call_tool(FunctionCall(name=tool.name, arguments=arguments), {})
            if counting():
                if response.text == str(number * 2):
                    tally.good += 1
                    tally.latencies_s.append(time.monotonic() - began_s)
                else:
                    tally.shown[(response.text or "")[:60]] += 1

    return await measure(Tally(f"verl's own, {rate_limit} at once"), one, options, stats)


async def ours(url: str, mode: str, options: argparse.Namespace, stats: Callable[[], dict]) -> Tally:
    backend = E2BBackend(api_key=LOCAL_KEY, api_url=url, sandbox_url=url)
    # What check-sandbox finds out about such an account, and recommends.
    limits = Limits(10, 10, create_rate_per_s=20, quota_release_s=options.quota_release_s + 0.5)
    pool = SessionPool(
        backend,
        mode=mode,
        contexts=options.contexts,
        ahead=2,
        limiter=LocalLimiter(limits),
        ttl_s=300,
        acquire_timeout_s=600,
    )
    code_interpreter.use_sessions(pool.session)
    tool = CodeInterpreterTool(ENTRY["config"], SCHEMA)

    async def one(tally: Tally, counting: Callable[[], bool]) -> None:
        name, _ = await tool.create()
        try:
            for number in range(CALLS):
                began_s = time.monotonic()
                code = f"x = {number}\nx * 2" if number == 0 else "x += 1\nx * 2"
                response, _, facts = await tool.execute(name, {"code": code})
                if not counting():
                    pass
                elif facts["status"] == "infra_failed":
                    tally.masked += 1
                elif response.text == str(number * 2):
                    tally.good += 1
                    tally.latencies_s.append(time.monotonic() - began_s - facts["waited_s"])
                else:
                    tally.shown[(response.text or "")[:60]] += 1
                if facts["status"] == "infra_failed":
                    return
        finally:
            await tool.release(name)

    try:
        return await measure(Tally(f"ours, mode {mode}"), one, options, stats)
    finally:
        await pool.aclose()
        await backend.aclose()
        assert await asyncio.to_thread(lambda: stats()["alive"]) == 0, "something was left"


def row(tally: Tally) -> str:
    p50, p95 = (percentile(tally.latencies_s, share) for share in (0.5, 0.95))
    cells = [
        f"{tally.per_minute:.1f}", str(sum(tally.shown.values())), str(tally.masked), str(tally.refused),
        str(tally.created), f"{p50:.2f} / {p95:.2f}",
    ]  # fmt: skip
    return f"| {tally.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--warm-up-s", type=float, default=20)
    parser.add_argument("--quota-release-s", type=float, default=5)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--rate-limits", type=int, nargs="*", default=[10, 5, 4, 3])
    options = parser.parse_args()
    server_flags = [
        "--max-alive", "10", "--create-delay-s", "4", "--execute-delay-s", "0.05", "--limit-as-400", "--warm", "10",
        "--request-rate", "50", "--quota-release-s", str(options.quota_release_s), "--log-level", "error",
    ]  # fmt: skip
    print(
        f"server: {' '.join(server_flags)}\n{options.in_flight} in flight, {CALLS} calls each, {options.seconds:g} s\n"
    )
    print("| | trajectories / min | faults shown | masked | refused creates | sandboxes | call p50 / p95 s |")
    print("|---|---|---|---|---|---|---|")
    best, found = 0.0, {}
    contenders: list[Callable[[str, Callable[[], dict]], Awaitable[Tally]]] = [
        *[lambda url, stats, n=n: verls_own(url, n, options, stats) for n in options.rate_limits],
        lambda url, stats: ours(url, "sandbox", options, stats),
        lambda url, stats: ours(url, "context", options, stats),
    ]
    for contender in contenders:
        with start_server(server_flags) as server:
            time.sleep(8)  # the warm pool fills
            tally = asyncio.run(contender(server.url, server.stats))
        print(row(tally), flush=True)
        for text, count in tally.shown.most_common(2):
            print(f"  shown {count} times: {text!r}", file=sys.stderr)
        if tally.name.startswith("verl"):
            best = max(best, tally.per_minute)
        else:
            found[tally.name] = tally.per_minute
    for name, value in found.items():
        print(f"\n{name}: {value / max(best, 1e-9):.1f} x verl's own at its best")


if __name__ == "__main__":
    main()
