"""Many calls under every fault at once: `python tests/bench/soak.py` prints what came of each, and the memory.

A local server with real kernels strikes with `--share` of each fault of creates, runs and kills. Every call must be
accounted for (right, or its trajectory masked), none may show the model a fault of ours, memory must stay flat, and
nothing may be alive at the end. Exit status 1 if one of these does not hold. Outside CI: it takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter

import on_path  # noqa: F401
import psutil

from verl_ext.errors import SandboxError
from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend
from verl_ext.sandbox.ledger import RUN_LABEL, clean_run, still_listed
from verl_ext.sandbox.pool import SessionPool
from verl_ext.sandbox.server.launch import RunningServer, start_server

CALLS = 4
CALL_TIMEOUT_S = 3.0
FAULTS = (
    "429", "400-limit", "503", "500-html", "hang-create", "drop-before-create", "drop-after-create", "slow-create:1",
    "429-execute", "503-execute", "502-execute", "500-execute", "hang-execute", "slow-execute:15",
    "drop-before-execute", "drop-after-execute", "truncated-stream", "vanish:1", "500-kill",
)  # fmt: skip


class Soak:
    """Counts of a soak under way."""

    def __init__(self, pool: SessionPool, calls: int) -> None:
        self.pool = pool
        self.left = calls
        self.outcomes: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()
        self.number = 0

    async def worker(self) -> None:
        while self.left > 0:
            self.number += 1
            await self.trajectory(self.number)

    async def trajectory(self, number: int) -> None:
        async with self.pool.session(f"t{number}") as session:
            for call in range(CALLS):
                self.left -= 1
                code = f"x = {number}" if call == 0 else "x += 1\nx"
                try:
                    execution = await session.run(code)
                except SandboxError as error:
                    self.outcomes["masked"] += 1
                    self.causes[type(error).__name__] += 1
                    return
                wanted = () if call == 0 else (str(number + call),)
                right = execution.error is None and execution.results == wanted
                self.outcomes["right" if right else "wrong"] += 1
                if not right:
                    self.causes[f"WRONG: {execution.error or execution.results}"[:80]] += 1


async def soak(server: RunningServer, options: argparse.Namespace) -> bool:
    template = "fault-" + "+".join(f"{fault}@{options.share}" for fault in FAULTS)
    backend = E2BBackend(
        api_key=LOCAL_KEY, api_url=server.url, sandbox_url=server.url, template=template,
        create_timeout_s=4.0, control_timeout_s=5.0,
    )  # fmt: skip
    labels = {RUN_LABEL: "soak"}
    pool = SessionPool(
        backend, mode=options.mode, contexts=options.contexts, max_alive=options.max_alive, ttl_s=30,
        call_timeout_s=CALL_TIMEOUT_S, acquire_timeout_s=300, run_labels=labels,
    )  # fmt: skip
    run = Soak(pool, options.calls)
    began_s, memory = time.monotonic(), []
    workers = [asyncio.create_task(run.worker()) for _ in range(options.in_flight)]
    print("| calls | s | right | masked | wrong | client MiB | server's kernels |\n|---|---|---|---|---|---|---|")
    shown = 0
    while not all(worker.done() for worker in workers):
        await asyncio.sleep(0.5)
        done = options.calls - run.left
        if done >= shown + options.calls // 10:
            shown = done
            memory.append(psutil.Process().memory_info().rss / 2**20)
            alive = (await asyncio.to_thread(server.stats))["alive"]
            counts = " | ".join(str(run.outcomes[name]) for name in ("right", "masked", "wrong"))
            print(f"| {done} | {time.monotonic() - began_s:.0f} | {counts} | {memory[-1]:.0f} | {alive} |", flush=True)
    await asyncio.gather(*workers)
    await pool.aclose()
    await backend.aclose()
    asked, accounted = options.calls - run.left, sum(run.outcomes.values())
    for _ in range(20):  # the sweep's kills meet the faults as well
        if not (await clean_run(backend, "soak")).failed:
            break
    leaked = len(await still_listed(backend, labels))
    await backend.aclose()
    totals = pool.metrics.totals()
    print(f"\n{time.monotonic() - began_s:.0f} s; calls {asked}, accounted for {accounted}; {dict(run.outcomes)}")
    print(f"causes: {dict(run.causes)}")
    print("retries: " + str({name: int(count) for name, count in totals.items() if name.startswith("retries/")}))
    print(f"sandboxes: created {totals['created']:.0f}, killed {totals['killed']:.0f}, leaked {leaked}")
    grown = memory[-1] - memory[len(memory) // 3] if len(memory) > 3 else 0.0
    print(f"client memory: {memory[-1]:.0f} MiB, {grown:+.0f} since a third of the way")
    return asked == accounted and not run.outcomes["wrong"] and leaked == 0 and grown < options.grow_mib


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--share", type=float, default=0.02, help="of requests, for each fault")
    parser.add_argument("--mode", default="context", choices=["sandbox", "context"])
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--max-alive", type=int, default=10)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--grow-mib", type=float, default=30.0)
    options = parser.parse_args()
    print(f"{options}\nfaults: {', '.join(FAULTS)}\n")
    with start_server(["--faults", "--warm", "4", "--log-level", "error"]) as server:
        held = asyncio.run(soak(server, options))
    print("\nall of it holds" if held else "\nNOT all of it holds")
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
