"""verl_ext.sandbox.connect: a worker's pool from settings, run folder and the tool's file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import ConfigurationError
from verl_ext.sandbox import connect, e2b
from verl_ext.sandbox.fake import FakeBackend
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, read_left_ids
from verl_ext.settings import Settings

TOOL = CONFIG_DIR / "tool" / "code_interpreter.yaml"


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    fake = FakeBackend()
    monkeypatch.setattr(e2b.E2BBackend, "from_settings", lambda settings: fake)
    return fake


def open_pool(tmp_path: Path, *, tool: str | None = str(TOOL), **environ: str):
    settings = Settings.load(environ={"VERL_EXT_ENV_FILE": "/dev/null", **environ})
    return connect.open_pool(settings, run_dir=tmp_path, run_id="run-1", worker="agent-7", tool_config_path=tool)


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


def limits(workers: int = 1, **environ: str):
    settings = Settings.load(environ={"VERL_EXT_ENV_FILE": "/dev/null", **environ})
    return connect.run_limits(settings, workers)


def test_a_run_takes_its_share_of_the_account():
    environ = {"VERL_EXT_SANDBOX_MAX_ALIVE": "10", "VERL_EXT_SANDBOX_CREATE_RATE_PER_S": "4"}
    whole = limits(**environ)
    assert (whole.max_alive, whole.max_starting, whole.create_rate_per_s, whole.reserved_for) == (10, 10, 4.0, 0)
    half = limits(VERL_EXT_SANDBOX_SHARE="0.5", **environ)
    assert (half.max_alive, half.max_starting, half.create_rate_per_s) == (5, 5, 2.0)
    assert 3 * limits(VERL_EXT_SANDBOX_SHARE="0.333", **environ).max_alive <= 10
    assert 10 * limits(VERL_EXT_SANDBOX_SHARE="0.1", **environ).max_alive == 10


@pytest.mark.parametrize("share", ["0.001", "1.5"])
def test_a_share_that_leaves_nothing_or_too_much_is_refused(share: str):
    with pytest.raises(ConfigurationError, match="SHARE"):
        limits(VERL_EXT_SANDBOX_SHARE=share, VERL_EXT_SANDBOX_MAX_ALIVE="10")


def test_in_mode_context_each_worker_has_a_sandbox_or_the_run_is_refused():
    assert limits(3, VERL_EXT_SANDBOX_MAX_ALIVE="3", VERL_EXT_SANDBOX_MODE="context").reserved_for == 3
    with pytest.raises(ConfigurationError, match="num_workers to 3 or fewer"):
        limits(4, VERL_EXT_SANDBOX_MAX_ALIVE="3", VERL_EXT_SANDBOX_MODE="context")
    assert limits(4, VERL_EXT_SANDBOX_MAX_ALIVE="3").max_alive == 3, "in mode sandbox they take turns"


async def test_the_mode_is_the_settings(backend: FakeBackend, tmp_path: Path):
    pool = open_pool(tmp_path, VERL_EXT_SANDBOX_MODE="context", VERL_EXT_SANDBOX_CONTEXTS="2")
    async with pool.session("a") as a, pool.session("b") as b, pool.session("c") as c:
        for session in (a, b, c):
            await session.run("1")
        assert (backend.creates, backend.peak_contexts) == (2, 2)
    await pool.aclose()
    assert not backend.alive


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
