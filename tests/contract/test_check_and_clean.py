"""`invoke check-sandbox` as a user runs it, on a server that behaves like a small account."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_ext.check.account import admit
from verl_ext.check.proof import LABEL, prove
from verl_ext.errors import ConfigurationError, SandboxError
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.ledger import RUN_LABEL
from verl_ext.sandbox.server.launch import RunningServer, start_server
from verl_ext.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.server
CHECK = [sys.executable, "-m", "verl_ext.check", "--max-probe", "8", "--max-rate", "30"]


@pytest.fixture(scope="module")
def account() -> Iterator[RunningServer]:
    flags = [
        "--max-alive",
        "5",
        "--limit-as-400",
        "--quota-release-s",
        "1",
        "--api-key",
        "canary-0123456789",
        "--faults",
    ]
    with start_server(flags) as server:
        yield server


def environment(server: RunningServer, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_EXT_", "E2B_"))}
    return {
        **kept, "PYTHONPATH": str(ROOT), "VERL_EXT_ENV_FILE": "/dev/null", "E2B_API_KEY": "canary-0123456789",
        "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, **more,
    }  # fmt: skip


def run(server: RunningServer, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CHECK, *flags], env=environment(server, **more), capture_output=True, text=True, timeout=200, cwd=ROOT
    )


def test_a_small_account_is_measured_and_told_how_to_be_used(account: RunningServer):
    done = run(account, "--json", "--trajectories", "256")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert not [name for name, finding in found.items() if finding["status"] == "failed"]
    assert found["sandboxes at once"]["numbers"] == {"max_alive": 5.0, "is_cap": 1.0}
    assert 0.0 < found["places come back"]["numbers"]["quota_release_s"] < 20
    assert found["cleaning"]["text"] == "nothing is left of this check"
    assert report["advice"]["mode"] == "context"
    assert report["advice"]["settings"]["VERL_EXT_SANDBOX_MAX_ALIVE"] == "5"
    assert "canary" not in done.stdout + done.stderr
    assert account.stats()["alive"] == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"E2B_API_KEY": "wrong-0123456789"}, "E2B_API_KEY"),
        ({"VERL_EXT_SANDBOX_TEMPLATE": "fault-404-template"}, "VERL_EXT_SANDBOX_TEMPLATE"),
        ({"E2B_API_URL": "http://127.0.0.1:9", "E2B_SANDBOX_URL": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_what_would_not_work_is_said_with_its_cure(more: dict[str, str], words: str, account: RunningServer):
    done = run(account, **more)
    assert done.returncode == 1
    assert "failed" in done.stdout
    assert words in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout + done.stderr


def test_an_interrupted_check_leaves_nothing(account: RunningServer):
    with subprocess.Popen(
        CHECK, env=environment(account), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        deadline_s = time.monotonic() + 100
        while account.stats()["alive"] == 0:
            assert time.monotonic() < deadline_s
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors
    assert account.stats()["alive"] == 0


def test_a_run_is_not_admitted_where_the_service_refuses_and_hears_what_lives_there(
    account: RunningServer, tmp_path: Path
):
    def settings(**more: str) -> Settings:
        return Settings.load(environ=environment(account, **more))

    said: list[str] = []

    async def leave() -> None:
        backend = E2BBackend.from_settings(settings())
        for run_id in ("run-1", "run-2"):
            await backend.create(labels={RUN_LABEL: run_id}, ttl_s=60)
        await backend.aclose()

    with concurrent.futures.ThreadPoolExecutor() as threads:  # asyncio.run here would take pytest's loop away
        threads.submit(admit, settings(), "run-1", said.append).result()
        assert said == []
        with pytest.raises(ConfigurationError, match=r"cannot be used: .*E2B_API_KEY"):
            threads.submit(admit, settings(E2B_API_KEY="wrong-0123456789"), "run-1", said.append).result()
        threads.submit(lambda: asyncio.run(leave())).result()
        threads.submit(admit, settings(), "run-1", said.append).result()
    assert "2 sandboxes are alive" in said[0]
    assert "--run run-1" in said[0]
    assert account.stats(**{RUN_LABEL: "run-1"})["alive"] == 0, "what an earlier run of this id left is ended"
    assert account.stats(**{RUN_LABEL: "run-2"})["alive"] == 1, "another run's is not touched"


@pytest.mark.parametrize(
    ("template", "words"), [("fault-404-template", "template"), ("fault-500-execute", "500"), ("fault-503", "503")]
)
def test_a_run_that_starts_learns_at_once_that_no_sandbox_works(template: str, words: str):
    # A server of its own: a full account would be no failure, and places there come free late.
    with start_server(["--isolation", "none", "--warm", "0", "--faults"]) as server:
        environ = {"VERL_EXT_ENV_FILE": "/dev/null", "E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url}
        prove(Settings.load(environ=environ), "works")
        with pytest.raises(SandboxError, match=words):
            prove(Settings.load(environ=environ | {"VERL_EXT_SANDBOX_TEMPLATE": template}), "does-not")
        assert server.stats(**{LABEL: "works"})["alive"] == server.stats(**{LABEL: "does-not"})["alive"] == 0
