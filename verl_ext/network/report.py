"""A check's figures as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from verl_ext.network.check import Finding


@dataclass(frozen=True)
class Pair:
    """One direction between two ranks.

    Attributes:
        latency_us: of one byte, one way, half of there and back.
        gbit_per_s: of the largest transfer.
    """

    sender: int
    receiver: int
    latency_us: float
    gbit_per_s: float


@dataclass(frozen=True)
class AllReduce:
    """A sum over all ranks of one size.

    Attributes:
        algorithm_gbit_per_s: size by time.
        bus_gbit_per_s: what each link carried: the same times 2 (n - 1) / n, so that it compares with a link's rate
            whatever the number of ranks. Source: nccl-tests, doc/PERFORMANCE.md.
    """

    size_bytes: int
    milliseconds: float
    algorithm_gbit_per_s: float
    bus_gbit_per_s: float


def pairs(finding: Finding) -> list[Pair]:
    """Every direction that was timed."""
    return [
        Pair(event["from"], event["to"], event["latency_s"] * 1e6, _gbit_per_s(event["bytes"], event["seconds"]))
        for event in _events(finding, "pair")
    ]


def all_reduces(finding: Finding) -> list[AllReduce]:
    """Every size that was timed."""
    world = len(finding.homes)
    found = []
    for event in _events(finding, "all_reduce"):
        rate = _gbit_per_s(event["bytes"], event["seconds"])
        found.append(AllReduce(event["bytes"], event["seconds"] * 1000, rate, rate * 2 * (world - 1) / world))
    return found


def to_json(finding: Finding) -> str:
    """Everything, for programs."""
    return json.dumps(
        {
            "backend": finding.backend,
            "nodes": [asdict(node) for node in finding.nodes],
            "connections_ms": finding.connections,
            "ranks": {str(rank): home for rank, home in finding.homes.items()},
            "pairs": [asdict(pair) for pair in pairs(finding)],
            "all_reduce": [asdict(entry) for entry in all_reduces(finding)],
            "problems": finding.problems,
        },
        indent=2,
    )


def show(finding: Finding, console: Console) -> None:
    """Print tables, and what is wrong below them."""
    tables: list[Table] = []
    if finding.connections:
        tables.append(_connection_table(finding))
    if timed := pairs(finding):
        tables.append(_pair_table(finding, timed))
    if summed := all_reduces(finding):
        tables.append(_all_reduce_table(finding, summed))
    console.print(Group(*tables))
    for problem in finding.problems:
        console.print(f"- {problem}", markup=False, highlight=False, soft_wrap=True)


def _connection_table(finding: Finding) -> Table:
    table = Table(title="TCP, there and back, ms")
    table.add_column("from \\ to")
    everyone = list(finding.connections)
    for address in everyone:
        table.add_column(address, justify="right")
    for one in everyone:
        cells = [finding.connections[one].get(other, "") for other in everyone]
        table.add_row(one, *(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
    return table


def _pair_table(finding: Finding, timed: list[Pair]) -> Table:
    table = Table(title=f"{finding.backend}, pair by pair")
    for name in ("from rank", "on", "to rank", "on"):
        table.add_column(name, justify="right" if "rank" in name else "left")
    table.add_column("latency, us", justify="right")
    table.add_column("Gbit/s", justify="right")
    for pair in timed:
        places = (str(pair.sender), finding.homes[pair.sender], str(pair.receiver), finding.homes[pair.receiver])
        table.add_row(*places, f"{pair.latency_us:,.0f}", f"{pair.gbit_per_s:,.3g}")
    return table


def _all_reduce_table(finding: Finding, summed: list[AllReduce]) -> Table:
    table = Table(title=f"{finding.backend}, all-reduce over {len(finding.homes)} ranks")
    for name in ("bytes", "ms", "Gbit/s", "Gbit/s of a link"):
        table.add_column(name, justify="right")
    for entry in summed:
        rates = (f"{entry.algorithm_gbit_per_s:,.3g}", f"{entry.bus_gbit_per_s:,.3g}")
        table.add_row(f"{entry.size_bytes:,}", f"{entry.milliseconds:,.2f}", *rates)
    return table


def _events(finding: Finding, kind: str) -> Iterator[dict[str, Any]]:
    for outcome in finding.outcomes:
        yield from (event for event in outcome.events if event["event"] == kind)


def _gbit_per_s(size_bytes: int, seconds: float) -> float:
    return size_bytes * 8 / max(seconds, 1e-9) / 1e9
