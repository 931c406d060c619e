"""Process tables read from /proc: who descends from whom, and what it uses."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024


@dataclass(frozen=True)
class Usage:
    """One line of the process table."""

    parent_pid: int
    resident_kib: int
    threads: int


def measure() -> dict[int, Usage]:
    """All processes that can be seen, by id."""
    table: dict[int, Usage] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
            table[int(entry.name)] = Usage(int(fields[1]), int(fields[21]) * _PAGE_KIB, int(fields[17]))
    return table


def birth(pid: int) -> int | None:
    """When a process began, in ticks; None when there is none or it has ended and was not collected.

    Two answers that differ are two processes. A pidfd would say less: it is silent while a dead parent waits to
    be collected, which in a container without an init may be for ever.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def descendants(table: dict[int, Usage], root: int) -> set[int]:
    """`root` and all that came from it, as far as the table knows them."""
    children: dict[int, list[int]] = {}
    for pid, usage in table.items():
        children.setdefault(usage.parent_pid, []).append(pid)
    found, pending = set(), [root] if root in table else []
    while pending:
        pid = pending.pop()
        found.add(pid)
        pending.extend(child for child in children.get(pid, ()) if child not in found)
    return found


def kill_unknown_children(known: set[int]) -> int:
    """Send SIGKILL to every child of this process that is not in `known`; returns how many there were.

    A child that nobody knows is an orphan of a sandbox whose first process died: this process is the reaper of
    all of them. To be repeated until it returns 0, because each death may bring new orphans. It never waits:
    the first process of a pid namespace ends only after the others in it were collected.
    """
    me = os.getpid()
    unknown = [pid for pid, usage in measure().items() if usage.parent_pid == me and pid not in known]
    for pid in unknown:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return len(unknown)


def collect_children() -> set[int]:
    """The ids of children that have ended, collected now."""
    dead: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            dead.add(pid)
    return dead


def end_all_children(timeout_s: float = 5.0) -> None:
    """Kill and collect every child, and what they leave behind."""
    until = time.monotonic() + timeout_s
    while kill_unknown_children(set()) and time.monotonic() < until:
        collect_children()
        time.sleep(0.002)
