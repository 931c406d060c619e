"""The routes of envd, the daemon in an E2B sandbox: health, files, and the process and filesystem services."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .registry import Registry
from .sandbox import Sandbox


class EnvdError(Exception):
    """Answer with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def find_sandbox(registry: Registry, request: Request) -> Sandbox:
    """The live sandbox that the headers name; a wrong token is refused.

    Raises:
        EnvdError: 502 for a sandbox that is not there, as E2B's edge answers; 401 for a wrong token.
    """
    headers = request.headers
    token = headers.get("x-access-token") or headers.get("e2b-traffic-access-token")
    sandbox_id = headers.get("e2b-sandbox-id")
    if sandbox_id is None:
        found = next((one for one in registry.live.values() if token and one.access_token == token), None)
    else:
        found = registry.live.get(sandbox_id)
    if found is None or found.gone.is_set():
        raise EnvdError(502, f"The sandbox was not found: {sandbox_id or 'no such token'}")
    if token is not None and token != found.access_token:
        raise EnvdError(401, "the access token belongs to another sandbox")
    return found


def routes(registry: Registry) -> list[BaseRoute]:
    """The routes of this plane."""

    async def health(request: Request) -> Response:
        find_sandbox(registry, request)
        return Response(status_code=204)

    return [Route("/health", health)]


__all__: list[Any] = ["EnvdError", "find_sandbox", "routes"]
