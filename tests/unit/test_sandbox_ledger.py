from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext.errors import SandboxUnavailableError
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.ledger import RUN_LABEL, CleanReport, SandboxLedger, clean_run, read_left_ids, sweep

ROOT = Path(__file__).parents[2]


def test_the_file_names_what_is_left(tmp_path: Path):
    with_odd_name = SandboxLedger(tmp_path / "run", "worker/0 ä")
    with_odd_name.created("a", {"k": "v"})
    with_odd_name.created("b", {})
    with_odd_name.killed("a")
    with_odd_name.close()
    with_odd_name.close()
    with_odd_name.killed("b")  # after the end: dropped, not raised
    assert with_odd_name.path.name == f"sandboxes-worker_0__-{os.getpid()}.jsonl"
    assert read_left_ids(tmp_path / "run") == ["b"]
    assert read_left_ids(tmp_path) == ["b"]  # one folder up, as the run folder keeps it


def test_another_processs_kill_counts_and_torn_lines_do_not(tmp_path: Path):
    (tmp_path / "sandboxes-a-1.jsonl").write_text('{"event":"created","sandbox_id":"x"}\n{"event":"created","sandb')
    (tmp_path / "sandboxes-b-2.jsonl").write_text('{"event":"created","sandbox_id":"y"}\n[1]\n\n')
    (tmp_path / "sandboxes-c-3.jsonl").write_text('{"event":"killed","sandbox_id":"x"}\n')
    assert read_left_ids(tmp_path) == ["y"]


def test_it_survives_sigkill(tmp_path: Path):
    code = (
        "import os, signal, sys; from pathlib import Path; from verl_ext.sandbox.ledger import SandboxLedger\n"
        "ledger = SandboxLedger(Path(sys.argv[1])); ledger.created('x', {}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False)
    assert read_left_ids(tmp_path) == ["x"]


async def test_a_sweep_ends_the_run_and_nothing_else():
    backend = FakeBackend()
    for run in ("mine", "mine", "theirs"):
        await backend.create(labels={RUN_LABEL: run}, ttl_s=60)
    assert await sweep(backend, {RUN_LABEL: "mine"}) == CleanReport(found=2, killed=2)
    assert [sandbox.labels for sandbox in backend.alive.values()] == [{RUN_LABEL: "theirs"}]
    assert await sweep(backend, {RUN_LABEL: "mine"}) == CleanReport()


async def test_a_sweep_without_labels_is_refused():
    with pytest.raises(ValueError, match="every sandbox"):
        await sweep(FakeBackend(), {})
    with pytest.raises(ValueError, match="id of a run"):
        await clean_run(FakeBackend(), "")


async def test_a_kill_that_fails_is_reported_not_raised():
    backend = FakeBackend(FaultScript(kill_errors={1: SandboxUnavailableError("502")}))
    for _ in range(3):
        await backend.create(labels={RUN_LABEL: "r"}, ttl_s=60)
    report = await clean_run(backend, "r")
    assert (report.found, report.killed) == (3, 2)
    assert report.failed == tuple(backend.alive)


async def test_what_only_the_ledger_knows_is_ended_too(tmp_path: Path):
    backend = FakeBackend()
    forgotten = await backend.create(labels={}, ttl_s=60)  # the service lost the label
    ledger = SandboxLedger(tmp_path)
    ledger.created(forgotten.sandbox_id, {})
    ledger.created("gone-already", {})
    ledger.close()
    report = await clean_run(backend, "r", run_folder=tmp_path)
    assert report == CleanReport(found=2, killed=1, gone=1)
    assert (await clean_run(backend, "r", run_folder=tmp_path / "missing")).found == 0
