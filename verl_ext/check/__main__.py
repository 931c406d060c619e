"""`python -m verl_ext.check`, called by `invoke check-sandbox`.

Exit status: 0 a run would work; 1 it would not, the table says why; 2 a setting is wrong; 130, 143 interrupted.
Whatever happens, the sandboxes that the check made are ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import asdict

from verl_ext.check import account, limits
from verl_ext.check import sandbox as one
from verl_ext.check.advice import Advice, Load, advise
from verl_ext.check.findings import FAILED, OK, SKIPPED, WARNING, Finding
from verl_ext.errors import SandboxError, VerlAgsError
from verl_ext.interrupts import Interrupted, interruptible, until_signal
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.ledger import RUN_LABEL, sweep
from verl_ext.sandbox.server.launch import start_server
from verl_ext.settings import Settings

MAX_PROBE, MAX_RATE = 12, 60
_MARKS = {OK: "[green]ok[/]", WARNING: "[yellow]warning[/]", FAILED: "[red]failed[/]", SKIPPED: "[dim]skipped[/]"}


async def findings(
    backend: E2BBackend,
    settings: Settings,
    local_url: str | None,
    labels: dict[str, str],
    max_probe: int,
    max_rate: int,
) -> AsyncGenerator[Finding]:
    """One after another; ends at the first failure after which the rest would fail alike."""
    forms = account.check_forms(settings)
    yield forms
    if forms.status == FAILED:
        return
    for part in (lambda: account.check_reach(settings, local_url), lambda: account.check_key(backend)):
        found = await part()
        yield found
        if found.status == FAILED:
            return
    filled = await limits.fill(backend, labels, max_probe)
    found = limits.check_concurrency(filled)
    yield found
    if found.status == FAILED:
        return
    async for found in _look(filled):
        yield found
    yield await limits.check_release(backend, labels, filled)
    yield await one.check_kills(backend, filled.alive)
    yield await limits.check_rate(backend, labels, max_rate)


async def _look(filled: limits.Filled) -> AsyncGenerator[Finding]:
    """At the sandboxes that are there; what a deadline leaves behind comes last, for it uses one up."""
    yield await one.check_latency(filled.alive, filled.create_s)
    first, last = filled.alive[0], filled.alive[-1]
    for name, look in (
        ("packages", one.check_packages(first)),
        ("size", one.check_size(first)),
        ("behaviour", one.check_behaviour(last)),
    ):
        try:
            found = await look
        except SandboxError as error:
            found = Finding(name, FAILED, str(error))
        for each in found if isinstance(found, list) else [found]:
            yield each


async def _check(options: argparse.Namespace, settings: Settings, local_url: str | None) -> list[Finding]:
    backend = E2BBackend.from_settings(settings, local_url=local_url)
    labels = {RUN_LABEL: f"check-{uuid.uuid4().hex[:12]}"}
    found = []
    try:
        async with contextlib.aclosing(
            findings(backend, settings, local_url, labels, options.max_probe, options.max_rate)
        ) as parts:
            async for finding in parts:
                found.append(finding)
                _tell(f"{finding.name}: {finding.status}", quiet=options.json)
    finally:
        found.append(await asyncio.shield(_clean(backend, labels)))
        await backend.aclose()
    return found


async def _clean(backend: E2BBackend, labels: dict[str, str]) -> Finding:
    try:
        report = await sweep(backend, labels)
    except SandboxError as error:
        return Finding("cleaning", WARNING, f"what the check made could not be seen; it ends by itself: {error}")
    if report.failed:
        return Finding(
            "cleaning", WARNING, f"{len(report.failed)} sandboxes could not be ended; they end by themselves"
        )
    return Finding("cleaning", OK, "nothing is left of this check")


def _load(options: argparse.Namespace) -> Load:
    return Load(options.trajectories, options.calls, options.code_s, options.think_s)


def report(found: list[Finding], advice: Advice | None, seconds: float) -> None:
    """The table, and the settings to use."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="check-sandbox", title_justify="left", show_lines=False)
    for column in ("part", "", "found"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(finding.name, _MARKS[finding.status], finding.text)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table)
    if advice is None:
        console.print("A run would not work on this account: see what failed.")
    else:
        console.print(f"{advice.text}. {'Put into .env:' if advice.settings else ''}\n", markup=False)
        console.print("\n".join(f"{name}={value}" for name, value in advice.settings.items()), markup=False)
    console.print(f"\n{seconds:.0f} s")


def _tell(line: str, *, quiet: bool) -> None:
    if not quiet:
        sys.stderr.write(f"{line}\n")


@contextlib.contextmanager
def _service(settings: Settings) -> Iterator[str | None]:
    """Address of a server of our own where no other is named."""
    if not settings.needs_own_server:
        yield None
        return
    with start_server(["--isolation", settings.sandbox_isolation]) as server:
        yield server.url


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="invoke check-sandbox", description="Measure the sandbox service.")
    add = parser.add_argument
    add("--json", action="store_true", help="findings and advice as JSON on standard output")
    add("--max-probe", type=int, default=MAX_PROBE, help="sandboxes to have at once at most; each lives seconds")
    add("--max-rate", type=int, default=MAX_RATE, help="requests per second to try at most, for 2 s; none creates")
    add("--trajectories", type=int, default=1024, help="that a step rolls out: train_batch_size x rollout.n")
    add("--calls", type=int, default=4, help="tool calls of one trajectory")
    add("--code-s", type=float, default=0.5, help="seconds that the code of a call runs")
    add("--think-s", type=float, default=10.0, help="seconds that the model writes between two calls")
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    try:
        with interruptible():
            settings = Settings.load()
            with _service(settings) as local_url:
                found = asyncio.run(until_signal(_check(options, settings, local_url)))
    except Interrupted as interrupted:
        sys.stderr.write(f"ended by {signal.Signals(interrupted.signum).name}; what the check made has been ended\n")
        return 128 + interrupted.signum
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    advice = advise(found, _load(options), is_local=settings.needs_own_server)
    seconds = time.monotonic() - began_s
    if options.json:
        whole = {
            "findings": [asdict(finding) for finding in found],
            "advice": advice.to_dict() if advice else None,
            "seconds": round(seconds, 1),
        }
        sys.stdout.write(json.dumps(whole, indent=2) + "\n")
    else:
        report(found, advice, seconds)
    return 0 if advice else 1


if __name__ == "__main__":
    sys.exit(main())
