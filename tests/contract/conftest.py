"""One backend for each service that is to behave alike.

Run against `fake` always, against the local `server` when it can start (marker `server`), and against the
service of E2B_API_KEY (AGS, E2B) when a key is set. Without a key the last is skipped, unless
VERL_EXT_REQUIRE_E2B=1, which CI sets so that a lost secret is a failure and not a silent gap.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import types
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend
from verl_ext.sandbox.fake import FakeBackend
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.sandbox.ledger import RUN_LABEL, sweep
from verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
READY_WITHIN_S = 60.0


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Address of a local server that ends with the test session."""
    command = [sys.executable, "-m", "verl_ext.sandbox.server", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(
        [*command, "--isolation", "auto"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the server ended with {process.poll()} before it was ready"
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(params=["fake", pytest.param("local", marks=pytest.mark.server), "e2b"])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[SandboxBackend]:
    """The service under test. At the end nothing with this test's label lives."""
    match request.param:
        case "fake":
            made: SandboxBackend = FakeBackend()
        case "local":
            # Started in a thread: the fixture waits for the server's first line.
            url = await asyncio.to_thread(request.getfixturevalue, "server_url")
            made = E2BBackend(api_key=LOCAL_KEY, api_url=url, sandbox_url=url)
        case _:
            settings = Settings.load()
            if settings.e2b_api_key is None:
                if settings.require_e2b:
                    pytest.fail("VERL_EXT_REQUIRE_E2B=1 but E2B_API_KEY is not set")
                pytest.skip("no E2B_API_KEY: the live service is not tried")
            made = E2BBackend.from_settings(settings)
    yield made
    await made.aclose()


@pytest.fixture
async def labels(backend: SandboxBackend) -> AsyncIterator[dict[str, str]]:
    """Labels of this test alone; whatever carries them at the end is ended."""
    mine = {RUN_LABEL: f"contract-{uuid.uuid4().hex}"}
    yield mine
    await sweep(backend, mine)


@pytest.fixture
def fresh_verl_loops(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our loops are registered, their class state to be built anew, and verl's own event loops are closed at the end.

    verl's initialize_tools_from_config makes an event loop and never closes it: we do, it would warn.
    """
    import yaml
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop as verl_agent_loop
    from verl.tools.utils import tool_registry

    from verl_ext.agent_loop.loop import CodeInterpreterLoop, ToollessLoop
    from verl_ext.compose import CONFIG_DIR

    made: list[asyncio.AbstractEventLoop] = []

    class Watched(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        def new_event_loop(self) -> asyncio.AbstractEventLoop:
            made.append(asyncio.new_event_loop())
            return made[-1]

    monkeypatch.setattr(tool_registry, "asyncio", Watched("asyncio"))
    for made_once in (CodeInterpreterLoop, ToollessLoop):
        monkeypatch.setattr(made_once, "_class_initialized", False)
    for entry in yaml.safe_load((CONFIG_DIR / "agent_loops.yaml").read_text()):
        monkeypatch.setitem(verl_agent_loop._agent_loop_registry, entry["name"], OmegaConf.create(entry))
    yield
    for each in made:
        while each.is_running():
            time.sleep(0.001)
        each.close()
