"""What our client costs over the raw SDK: `python tests/bench/bench_client.py` prints tables.

Both talk to a stub in another process that answers an execution after `--execute-s` with three events and runs
nothing, so that the client is what is measured. Raw: `AsyncSandbox.run_code`. Ours: `SandboxSession.run`, with pool,
deadline and capped output. The two take turns within one run, block by block, so that other load hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

import on_path  # noqa: F401
import psutil
from e2b_code_interpreter import AsyncSandbox

from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend
from verl_ext.sandbox.metrics import percentile
from verl_ext.sandbox.pool import SandboxSession, SessionPool

STUB = """
import asyncio, itertools, sys, uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
numbers = itertools.count()
events = (b'{"type":"number_of_executions","execution_count":1}\\n'
          b'{"type":"result","text":"2","is_main_result":true}\\n{"type":"end_of_execution"}\\n')
async def create(request):
    return JSONResponse({"sandboxID": f"s{next(numbers)}", "templateID": "t", "clientID": "c", "envdVersion": "0.5.2",
                         "envdAccessToken": "a", "trafficAccessToken": "a"}, 201)
async def execute(request):
    await request.body()
    await asyncio.sleep(float(sys.argv[1]))
    return Response(events, media_type="application/x-ndjson")
async def gone(request):
    return Response(status_code=204)
routes = [Route("/sandboxes", create, methods=["POST"]), Route("/sandboxes/{id}", gone, methods=["DELETE"]),
          Route("/execute", execute, methods=["POST"])]
uvicorn.run(Starlette(routes=routes), port=int(sys.argv[2]), log_level="error", timeout_keep_alive=300)
"""


async def block(calls: Sequence[Callable[[], Awaitable[object]]], rounds: int) -> tuple[list[float], float]:
    """Latencies of `rounds` calls of each, all at once, and CPU seconds of one call."""
    times: list[float] = []

    async def one(call: Callable[[], Awaitable[object]]) -> None:
        for _ in range(rounds):
            began_s = time.perf_counter()
            await call()
            times.append(time.perf_counter() - began_s)

    cpu_s = time.process_time()
    await asyncio.gather(*(one(call) for call in calls))
    return times, (time.process_time() - cpu_s) / len(times)


async def compare(url: str, options: argparse.Namespace) -> None:
    where = {"api_url": url, "sandbox_url": url, "api_key": "x", "timeout": 3600, "validate_api_key": False}
    most = max(options.in_flight)
    raw = await asyncio.gather(*(AsyncSandbox.create(**where) for _ in range(most)))
    backend = E2BBackend(api_key=LOCAL_KEY, api_url=url, sandbox_url=url)
    pool = SessionPool(backend, max_alive=most, ttl_s=3600)
    async with contextlib.AsyncExitStack() as stack:
        sessions: list[SandboxSession] = [await stack.enter_async_context(pool.session(f"t{n}")) for n in range(most)]
        await asyncio.gather(*(session.run("1") for session in sessions))
        print("\n| in flight | raw p50 ms | ours | | raw p99 ms | ours | raw CPU ms a call | ours |")
        print("|---|---|---|---|---|---|---|---|")
        for width in options.in_flight:
            theirs = [lambda box=box: box.run_code("1 + 1") for box in raw[:width]]
            mine = [lambda one=one: one.run("1 + 1") for one in sessions[:width]]
            found: dict[str, list[float]] = {"raw": [], "ours": []}
            cpu: dict[str, list[float]] = {"raw": [], "ours": []}
            rounds = max(1, options.calls // width // options.blocks)
            for number in range(2 * options.blocks):
                name, calls = (("raw", theirs), ("ours", mine))[number % 2]
                times, cpu_s = await block(calls, rounds)
                if number > 1:  # the first block of each warms up
                    found[name] += times
                    cpu[name].append(cpu_s)
            p50, p99 = ([percentile(found[name], share) * 1e3 for name in ("raw", "ours")] for share in (0.5, 0.99))
            spent = [percentile(cpu[name], 0.5) * 1e3 for name in ("raw", "ours")]
            print(
                f"| {width} | {p50[0]:.1f} | {p50[1]:.1f} | {100 * (p50[1] / p50[0] - 1):+.1f} % | {p99[0]:.1f} | "
                f"{p99[1]:.1f} | {spent[0]:.2f} | {spent[1]:.2f} |",
                flush=True,
            )
    await pool.aclose()
    await asyncio.gather(*(box.kill() for box in raw))
    await backend.aclose()


async def memory(url: str, counts: Sequence[int]) -> None:
    """Memory of this process by live sessions, each with its sandbox and one run."""
    backend = E2BBackend(api_key=LOCAL_KEY, api_url=url, sandbox_url=url)
    pool = SessionPool(backend, max_alive=max(counts), ttl_s=3600)
    gc.collect()
    before = psutil.Process().memory_info().rss
    print("| sessions | MiB more | KiB a session |\n|---|---|---|")
    async with contextlib.AsyncExitStack() as stack:
        alive = 0
        for count in counts:
            fresh = [await stack.enter_async_context(pool.session(f"m{n}")) for n in range(alive, count)]
            for start in range(0, len(fresh), 100):
                await asyncio.gather(*(session.run("1") for session in fresh[start : start + 100]))
            alive = count
            gc.collect()
            more = psutil.Process().memory_info().rss - before
            print(f"| {count} | {more / 2**20:.1f} | {more / 1024 / count:.1f} |", flush=True)
    await pool.aclose()
    await backend.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--in-flight", type=int, nargs="*", default=[1, 16, 64, 256])
    parser.add_argument("--calls", type=int, default=2000, help="of each contender at each width")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--execute-s", type=float, default=0.05)
    parser.add_argument("--port", type=int, default=18923)
    options = parser.parse_args()
    url = f"http://127.0.0.1:{options.port}"
    with subprocess.Popen([sys.executable, "-c", STUB, str(options.execute_s), str(options.port)]) as stub:
        try:
            time.sleep(3)
            print(json.dumps({"execute_s": options.execute_s, "calls": options.calls}) + "\n")
            asyncio.run(memory(url, [1, 10, 100, 1000]))
            asyncio.run(compare(url, options))
        finally:
            stub.terminate()


if __name__ == "__main__":
    main()
