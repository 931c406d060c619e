"""The sandboxes of an attempt that died, on a real server that outlived it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_ext import attempts, runs
from verl_ext.checkpoint.folder import CheckpointFolder, Found
from verl_ext.request import RunRequest
from verl_ext.resumption import Lost, Resumption
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.ledger import LEDGERS, RUN_LABEL, SandboxLedger
from verl_ext.sandbox.server.launch import start_server
from verl_ext.settings import Settings

pytestmark = pytest.mark.server


@pytest.fixture
def dead(tmp_path: Path) -> tuple[Resumption, DictConfig]:
    """A run that died before it had saved anything."""
    config = OmegaConf.create({"trainer": {"save_freq": 2}})
    for name in (runs.CONFIG, runs.MANIFEST, runs.REQUEST):
        (tmp_path / name).write_text("{}")
    OmegaConf.save(config, tmp_path / runs.CONFIG)
    found = Found(None, None, ())
    return Resumption(tmp_path, RunRequest(), CheckpointFolder(tmp_path), found, Lost(1, 0, 0, 0.0, 0.0)), config


def settings_for(url: str) -> Settings:
    return Settings.load(environ={"VERL_EXT_ENV_FILE": "/dev/null", "E2B_API_URL": url, "E2B_SANDBOX_URL": url})


async def make_two(settings: Settings, run_dir: Path) -> None:
    """One that the ledger knows, and one that the process could not even note before it was killed."""
    backend, ledger = E2BBackend.from_settings(settings), SandboxLedger(run_dir / LEDGERS)
    for note in (True, False):
        labels = {RUN_LABEL: run_dir.name}
        sandbox = await backend.create(labels=labels, ttl_s=60)
        if note:
            ledger.created(sandbox.sandbox_id, labels)
    await backend.aclose()
    ledger.close()


def leave(dead: tuple[Resumption, DictConfig], settings: Settings) -> list[str]:
    said: list[str] = []
    with ThreadPoolExecutor() as threads:  # asyncio.run here would take pytest's loop away
        threads.submit(attempts.leave_the_dead, *dead, settings, said.append).result()
    return said


def test_they_are_ended_and_their_ledgers_are_history(dead, tmp_path):
    with start_server(["--isolation", "none", "--warm", "0"]) as server, ThreadPoolExecutor() as threads:
        settings = settings_for(server.url)
        threads.submit(lambda: asyncio.run(make_two(settings, tmp_path))).result()
        assert server.stats(**{RUN_LABEL: tmp_path.name})["alive"] == 2
        said = leave(dead, settings)
        assert server.stats(**{RUN_LABEL: tmp_path.name})["alive"] == 0
    assert "sandboxes of the attempt that died: created 1, killed 0, swept 2, leaked 0" in said
    assert (tmp_path / "attempts" / "1" / LEDGERS).is_dir()
    assert not (tmp_path / LEDGERS).exists()


def test_a_service_that_does_not_answer_is_said_and_the_ledgers_stay(dead, tmp_path):
    SandboxLedger(tmp_path / LEDGERS).close()
    said = leave(dead, settings_for("http://127.0.0.1:9"))
    assert any("could not be ended, their time to live will end them" in line for line in said)
    assert (tmp_path / LEDGERS).is_dir()
