"""Which sandboxes this run made, on disk, and how to end those that are left.

Two independent records: the service's own list by label (`sweep`), and a file per process in the run folder
that survives SIGKILL and names even what the service forgot to list (`SandboxLedger`, `read_left_ids`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_ext.errors import SandboxError
from verl_ext.sandbox.interface import SandboxBackend

LEDGERS = "sandboxes"  # the folder of them in a run's folder
RUN_LABEL = "verl-ags-run"
WORKER_LABEL = "verl-ags-worker"
TRAJECTORY_LABEL = "verl-ags-trajectory"
ATTEMPT_LABEL = "verl-ags-attempt"

_FSYNC_INTERVAL_S = 1.0
_KILLS_AT_ONCE = 8


class SandboxLedger:
    """An append-only JSONL file of what one process created and killed.

    Each line is written with one system call, so it survives the death of the process; it is forced to the
    disk at most once a second, so a power cut may cost the last second.

    Args:
        run_folder: made if missing; the file is `sandboxes-<worker>-<pid>.jsonl` in it.
        worker: name of the process within the run.
    """

    def __init__(self, run_folder: Path, worker: str = "main") -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        safe_worker = re.sub(r"[^A-Za-z0-9_.-]", "_", worker)
        self.path = run_folder / f"sandboxes-{safe_worker}-{os.getpid()}.jsonl"
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced_s = 0.0

    def created(self, sandbox_id: str, labels: Mapping[str, str]) -> None:
        """Note a sandbox that lives from now on."""
        self._write({"event": "created", "sandbox_id": sandbox_id, "labels": dict(labels)})

    def killed(self, sandbox_id: str) -> None:
        """Note a sandbox that is surely gone."""
        self._write({"event": "killed", "sandbox_id": sandbox_id})

    def kill_failed(self, sandbox_id: str, reason: str) -> None:
        """Note a sandbox that may live on; `reason` is the error's text."""
        self._write({"event": "kill_failed", "sandbox_id": sandbox_id, "reason": reason})

    def _write(self, entry: dict[str, object]) -> None:
        if self._fd < 0:
            return
        line = json.dumps({"time_s": round(time.time(), 3), **entry}, ensure_ascii=True) + "\n"
        os.write(self._fd, line.encode())
        now_s = time.monotonic()
        if now_s - self._synced_s >= _FSYNC_INTERVAL_S:
            os.fsync(self._fd)
            self._synced_s = now_s

    def close(self) -> None:
        """Force the file to the disk and close it. Harmless when repeated; later notes are dropped."""
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1


def read_left_ids(run_folder: Path) -> list[str]:
    """Ids that some ledger in `run_folder` or a folder in it says were created and none says were killed, oldest first.

    A torn last line (the process died while writing) is skipped.
    """
    created: dict[str, None] = {}
    killed: set[str] = set()
    for event, sandbox_id in _entries(run_folder):
        if event == "created":
            created[sandbox_id] = None
        elif event == "killed":
            killed.add(sandbox_id)
    return [sandbox_id for sandbox_id in created if sandbox_id not in killed]


def count_events(run_folder: Path) -> Counter[str]:
    """How many sandboxes the ledgers in `run_folder` say were `created`, `killed`, and `kill_failed`."""
    return Counter(event for event, _ in _entries(run_folder))


def _entries(run_folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted([*run_folder.glob("sandboxes-*.jsonl"), *run_folder.glob("*/sandboxes-*.jsonl")]):
        for line in path.read_bytes().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and "sandbox_id" in entry:
                yield str(entry.get("event")), str(entry["sandbox_id"])


@dataclass(frozen=True)
class CleanReport:
    """What a sweep found and did.

    Attributes:
        found: sandboxes listed by the service or left open in a ledger.
        killed: alive and ended by this sweep.
        gone: ended by themselves before we came.
        failed: ids that could not be ended; they end with their time to live.
    """

    found: int = 0
    killed: int = 0
    gone: int = 0
    failed: tuple[str, ...] = ()


async def sweep(backend: SandboxBackend, labels: Mapping[str, str], *, extra_ids: Iterable[str] = ()) -> CleanReport:
    """End every sandbox that the service lists with all of `labels`, and `extra_ids` with them.

    Lists again until nothing new turns up, since a create may land while the sweep runs.

    Raises:
        ValueError: `labels` is empty, which would end every sandbox of the account.
        SandboxError: the service cannot list. A kill that fails is in the report instead.
    """
    if not labels:
        raise ValueError("a sweep without labels would end every sandbox of the account: give the run's label")
    seen: set[str] = set()
    outcomes: dict[str, bool | SandboxError] = {}
    gate = asyncio.Semaphore(_KILLS_AT_ONCE)

    async def end(sandbox_id: str) -> None:
        async with gate:
            try:
                outcomes[sandbox_id] = await backend.kill(sandbox_id)
            except SandboxError as error:
                outcomes[sandbox_id] = error

    waiting = list(dict.fromkeys([*await backend.list_ids(labels=labels), *extra_ids]))
    while waiting:
        seen.update(waiting)
        await asyncio.gather(*(end(sandbox_id) for sandbox_id in waiting))
        waiting = [name for name in await backend.list_ids(labels=labels) if name not in seen]
    return CleanReport(
        found=len(seen),
        killed=sum(outcome is True for outcome in outcomes.values()),
        gone=sum(outcome is False for outcome in outcomes.values()),
        failed=tuple(name for name, outcome in outcomes.items() if isinstance(outcome, SandboxError)),
    )


async def clean_run(backend: SandboxBackend, run_id: str, *, run_folder: Path | None = None) -> CleanReport:
    """End everything that is left of a run: by its label, and by its ledgers where `run_folder` is given."""
    if not run_id:
        raise ValueError("clean_run needs the id of a run: `runs/` under the data root lists them")
    left = read_left_ids(run_folder) if run_folder is not None and run_folder.is_dir() else []
    return await sweep(backend, {RUN_LABEL: run_id}, extra_ids=left)


async def still_listed(
    backend: SandboxBackend, labels: Mapping[str, str], *, within_s: float = 10.0, every_s: float = 0.5
) -> list[str]:
    """Ids that the service lists after a sweep; waits a little, since AGS is reported to end sandboxes at leisure.

    Raises:
        SandboxError: the service cannot list.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        listed = await backend.list_ids(labels=labels)
        if not listed or time.monotonic() + every_s > deadline_s:
            return listed
        await asyncio.sleep(every_s)
