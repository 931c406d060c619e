"""One sandbox made, used and ended while a run starts: what would fail at the first tool call is said at once."""

from __future__ import annotations

import asyncio
import contextlib

from verl_ext.errors import SandboxError, SandboxQuotaError, SandboxUnavailableError
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.settings import Settings

LABEL = "verl-ags-proof"
_TTL_S, _RUN_TIMEOUT_S = 60, 30.0


def prove(settings: Settings, run_id: str, *, local_url: str | None = None) -> None:
    """See that code runs in a sandbox of the configured service.

    Args:
        settings: the service and its key.
        run_id: of the run that starts; the sandbox carries it under a label of its own and is none of the run's.
        local_url: of a local server that the caller started.

    Raises:
        SandboxError: it does not; the message has the cause.
    """
    from verl_ext.sandbox.e2b import E2BBackend  # and with it the SDK, a second of imports

    async def look() -> None:
        backend = E2BBackend.from_settings(settings, local_url=local_url)
        try:
            await run_one(backend, run_id)
        finally:
            await backend.aclose()

    asyncio.run(look())


async def run_one(backend: SandboxBackend, run_id: str) -> None:
    """Make a sandbox, run a line in it, end it. A full account is no failure: places come free.

    Raises:
        SandboxError: the service refuses or fails, or the line is an error.
    """
    try:
        sandbox = await backend.create(labels={LABEL: run_id}, ttl_s=_TTL_S)
    except SandboxQuotaError:
        return
    try:
        execution = await sandbox.run_code("1", timeout_s=_RUN_TIMEOUT_S)
    finally:
        with contextlib.suppress(SandboxError):
            await backend.kill(sandbox.sandbox_id)
    if execution.error is not None:
        cause = f"{execution.error.name}: {execution.error.value}"
        raise SandboxUnavailableError(f"the code 1 ended with {cause}: is the template a code interpreter?")
