"""Before anything is created: the form of key and domain, and whether the service can be reached."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from verl_ext.check.findings import FAILED, OK, WARNING, Finding
from verl_ext.errors import ConfigurationError, SandboxError
from verl_ext.sandbox.interface import SandboxBackend
from verl_ext.sandbox.ledger import RUN_LABEL, clean_run
from verl_ext.setting_values import doubt_of_key
from verl_ext.settings import Settings

_CONNECT_TIMEOUT_S = 10.0


def check_forms(settings: Settings) -> Finding:
    """Which service the key is for, and a doubt about its shape; no part of the key is shown.

    What cannot be right (a region that there is not, one service's key at the other) `Settings.load` has refused.
    """
    if settings.backend == "local":
        return Finding("settings", OK, "no key: sandboxes run on this machine")
    if settings.e2b_api_url:
        return Finding("settings", OK, f"E2B_API_URL {settings.e2b_api_url} stands in for the domain")
    if doubt := doubt_of_key(settings.e2b_api_key, settings.e2b_domain):
        return Finding("settings", WARNING, f"{doubt}: see below what the service says")
    return Finding("settings", OK, f"a key for {settings.e2b_domain}")


async def check_reach(settings: Settings, local_url: str | None) -> Finding:
    """Whether a connection to the control plane can be made, and what is in the way."""
    url = local_url or settings.e2b_api_url or f"https://api.{settings.e2b_domain}"
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    loop, began_s = asyncio.get_running_loop(), time.monotonic()
    try:
        await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        cure = "check E2B_DOMAIN (the region too) and this machine's DNS"
        return Finding("reach", FAILED, f"{host} has no address ({error.strerror or error}): {cure}")
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            tls = parts.scheme == "https"
            _, writer = await asyncio.open_connection(host, port, ssl=tls, server_hostname=host if tls else None)
    except (OSError, TimeoutError) as error:
        cure = "a firewall or a proxy may be in the way (HTTPS_PROXY), or the service is down"
        return Finding("reach", FAILED, f"{host}:{port} does not answer ({type(error).__name__}: {error}): {cure}")
    elapsed_s = time.monotonic() - began_s
    writer.close()
    return Finding("reach", OK, f"{host}:{port} in {elapsed_s * 1e3:.0f} ms", {"connect_s": elapsed_s})


async def check_key(backend: SandboxBackend) -> Finding:
    """Whether the service takes the key, and what lives on the account already."""
    try:
        listed = await backend.list_labels(labels={})
    except SandboxError as error:
        return Finding("key", FAILED, str(error))
    numbers = {"alive": float(len(listed))}
    if not listed:
        return Finding("key", OK, "accepted; nothing is alive on the account", numbers)
    runs = sorted({labels[RUN_LABEL] for labels in listed.values() if RUN_LABEL in labels})
    text = f"accepted; {len(listed)} sandboxes are alive and take places"
    if runs:
        text += f", of runs {', '.join(runs[:5])}: if one is over, `invoke clean-sandboxes --run {runs[0]}`"
    return Finding("key", WARNING, text, numbers)


def admit(settings: Settings, run_id: str, say: Callable[[str], None]) -> None:
    """Before a run starts anything: see that the service takes the key, and end what an earlier run of this id left.

    Args:
        settings: the service; a server of the run's own is not asked, it is not there yet.
        run_id: the run.
        say: told of what lives on the account already.

    Raises:
        ConfigurationError: the service cannot be reached or refuses the key.
    """
    from verl_ext.sandbox.e2b import E2BBackend

    async def look() -> None:
        backend = E2BBackend.from_settings(settings)
        try:
            found = await check_key(backend)
            if found.status == FAILED:
                raise ConfigurationError(f"the sandbox service cannot be used: {found.text}")
            if found.status != OK:
                say(f"sandbox service: {found.text}")
            await clean_run(backend, run_id)
        finally:
            await backend.aclose()

    if not settings.needs_own_server:
        asyncio.run(look())
