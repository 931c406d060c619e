"""Figures of the local server: `python tests/bench/bench_server.py [--isolation ...]` prints a table.

Creates are measured warm (from the pool) and cold (a fork); run_code with 1, 16 and 64 calls in flight, each in
a sandbox of its own. Memory is PSS, so what forks share is counted once, divided among the sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path

import on_path  # noqa: F401
from e2b_code_interpreter import AsyncSandbox

from verl_ext.sandbox.server.launch import RunningServer, start_server


def row(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(f"| {name:<38} | {statistics.median(ordered) * 1e3:8.1f} | {p95 * 1e3:8.1f} | {len(ordered):5} |")


def pss_kib(pids: set[int]) -> int:
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total


def below(root: int) -> set[int]:
    from verl_ext.sandbox.server.processes import descendants, measure

    return descendants(measure(), root)


async def measure(server: RunningServer, alive: int) -> None:
    where = {"api_url": server.url, "sandbox_url": server.url, "api_key": "x", "timeout": 300}
    print(f"\nisolation {server.isolation}, {os.cpu_count()} cores\n")
    print(f"| {'':<38} | {'p50 ms':>8} | {'p95 ms':>8} | {'n':>5} |\n|{'-' * 40}|---------:|---------:|------:|")
    while True:
        await asyncio.sleep(0.5)
        probe = await AsyncSandbox.create(**where)
        await probe.kill()
        if len(below(server.pid)) > 4:  # the pool is filled, so the modules are loaded
            break
    await asyncio.sleep(2)
    warm = []
    for _ in range(20):
        started = time.perf_counter()
        one = await AsyncSandbox.create(**where)
        warm.append(time.perf_counter() - started)
        await one.kill()
        await asyncio.sleep(0.3)
    row("create, warm", warm)
    before = pss_kib(below(server.pid))
    cold, boxes = [], []

    async def create() -> None:
        started = time.perf_counter()
        boxes.append(await AsyncSandbox.create(**where))
        cold.append(time.perf_counter() - started)

    for _ in range(8):
        await create()
    row("create, one after another, cold mostly", cold[-6:])
    started = time.perf_counter()
    cold.clear()
    await asyncio.gather(*(create() for _ in range(alive - 8)))
    row(f"create, {alive - 8} at once, cold", cold)
    print(f"| {'... all of them after':<38} | {(time.perf_counter() - started) * 1e3:8.0f} |          |       |")

    async def call(box: AsyncSandbox, times: list[float]) -> None:
        started = time.perf_counter()
        execution = await box.run_code("1 + 1")
        assert execution.text == "2", execution
        times.append(time.perf_counter() - started)

    for width in (1, 16, 64):
        times: list[float] = []
        chosen = boxes[:width]
        began = time.perf_counter()
        for _ in range(max(4, 200 // width)):
            await asyncio.gather(*(call(box, times) for box in chosen))
        row(f"run_code('1 + 1'), {width} in flight", times)
        print(
            f"| {'... calls per second':<38} | {len(times) / (time.perf_counter() - began):8.0f} |          |       |"
        )
    after = pss_kib(below(server.pid))
    print(f"\nmemory: {(after - before) / 1024 / len(boxes):.1f} MiB PSS a sandbox, {len(boxes)} alive, all processes")
    await asyncio.gather(*(box.kill() for box in boxes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--alive", type=int, default=64)
    arguments = parser.parse_args()
    with start_server(("--isolation", arguments.isolation, "--log-level", "error")) as server:
        asyncio.run(measure(server, arguments.alive))


if __name__ == "__main__":
    main()
