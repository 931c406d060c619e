"""verl_ext.sandbox.connect: a worker's pool from settings, run folder and the tool's file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import ConfigurationError
from verl_ext.sandbox import connect
from verl_ext.sandbox.fake import FakeBackend
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, read_left_ids
from verl_ext.settings import Settings

TOOL = CONFIG_DIR / "tool" / "code_interpreter.yaml"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr(connect.E2BBackend, "from_settings", lambda settings: fake)
    return fake


def open_pool(tmp_path: Path, *, share: int = 1, tool: str | None = str(TOOL), **environ: str):
    settings = Settings.load(environ={"VERL_EXT_ENV_FILE": "/dev/null", **environ})
    return connect.open_pool(
        settings, run_dir=tmp_path, run_id="run-1", worker="agent-7", share=share, tool_config_path=tool
    )


async def test_sandboxes_carry_the_run_and_are_in_its_ledger(backend: FakeBackend, tmp_path: Path):
    pool = open_pool(tmp_path)
    async with pool.session("t") as session:
        assert (await session.run("6 * 7")).results == ("42",)
        [labels] = backend.created_labels
        assert (labels[RUN_LABEL], labels[WORKER_LABEL]) == ("run-1", "agent-7")
        assert read_left_ids(tmp_path) == list(backend.alive)
    assert read_left_ids(tmp_path) == []
    assert not backend.alive


async def test_the_tools_file_decides_the_life_of_a_sandbox(backend: FakeBackend, tmp_path: Path):
    tool = tmp_path / "tool.yaml"
    tool.write_text("tools: [{config: {sandbox_ttl_s: 77, call_timeout_s: 0.05}}]")
    pool = open_pool(tmp_path, tool=str(tool))
    async with pool.session("t") as session:
        execution = await session.run("while True: pass")
        assert execution.timed_out
        await session.run("1")
        assert {sandbox.ttl_s for sandbox in backend.alive.values()} == {77}


async def test_workers_divide_the_account(backend: FakeBackend, tmp_path: Path):
    pool = open_pool(tmp_path, share=2, VERL_EXT_SANDBOX_MAX_ALIVE="5")
    async with pool.session("a") as a, pool.session("b") as b:
        await a.run("1")
        await b.run("1")
        assert backend.peak_alive == 2
        assert pool._limiter._alive._limit == 2


def test_more_workers_than_sandboxes_are_refused(backend: FakeBackend, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="num_workers to 3 or fewer"):
        open_pool(tmp_path, share=4, VERL_EXT_SANDBOX_MAX_ALIVE="3")


def test_the_log_level_is_the_settings(backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logger = logging.getLogger("verl_ext.sandbox")
    monkeypatch.setattr(logger, "level", logger.level)
    open_pool(tmp_path, VERL_EXT_SANDBOX_LOG_LEVEL="debug")
    assert logger.level == logging.DEBUG


@pytest.mark.parametrize(
    "text", ["", "tools: []", "tools: [{}]", "tools: 3", "- a", "tools: [{config: 3}]", "a: [", "tools"]
)
def test_a_file_that_is_no_tool_file_is_refused_by_name(text: str, tmp_path: Path):
    path = tmp_path / "tool.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"tool\.yaml is no tool file"):
        connect.tool_block(path)


def test_a_tool_file_that_is_not_there_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"gone\.yaml is no tool file"):
        connect.tool_block(tmp_path / "gone.yaml")
