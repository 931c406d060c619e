"""The HTTP routes of the control plane and the code interpreter, as the E2B SDK calls them.

One port serves all planes: a sandbox is found by the header E2b-Sandbox-Id, else by its access token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import envd
from .execution import Execution
from .faults import DropError, Fault, InjectedError, find_fault, too_many
from .registry import LimitedError, Registry
from .sandbox import RefusedError, Sandbox, SandboxGoneError

ENVD_VERSION = "0.5.2"
_DROP = "verl-ags.drop"


class HttpError(Exception):
    """Answer with this status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ControlPlane:
    """Sandboxes: create, list, look, prolong, kill, count."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    def check_key(self, request: Request) -> None:
        """Refuse a request without the right key, and one too many."""
        if not self.registry.may_request():
            raise HttpError(429, f"more than {self.registry.options.request_rate:g} requests per second")
        key, wanted = request.headers.get("x-api-key"), self.registry.options.api_key
        if not key or (wanted is not None and key != wanted):
            raise HttpError(401, "X-API-KEY is missing or wrong: set E2B_API_KEY")

    def find(self, request: Request) -> Sandbox:
        """The live sandbox of the path."""
        self.check_key(request)
        sandbox = self.registry.live.get(request.path_params["id"])
        if sandbox is None:
            raise HttpError(404, f"sandbox {request.path_params['id']} was not found")
        return sandbox

    async def create(self, request: Request) -> Response:
        """POST /sandboxes."""
        self.check_key(request)
        body = await request.json()
        template = str(body.get("templateID") or "code-interpreter-v1")
        fault = find_fault(template) if self.registry.options.has_faults else None
        if fault is not None:
            await fault.before_create()
        try:
            sandbox = await self.registry.create(
                template=template,
                metadata={str(k): str(v) for k, v in (body.get("metadata") or {}).items()},
                env={str(k): str(v) for k, v in (body.get("envVars") or {}).items()},
                ttl_s=int(body.get("timeout") or self.registry.options.default_ttl_s),
            )
        except LimitedError as exc:
            raise too_many() if self.registry.options.limit_as_400 else HttpError(429, str(exc)) from exc
        except (RefusedError, SandboxGoneError, ConnectionError) as exc:
            raise HttpError(500, f"the sandbox could not be started: {exc}") from exc
        sandbox.faults = fault
        if fault is not None and fault.lives_s is not None:
            sandbox.vanish_task = asyncio.create_task(self._vanish(sandbox, fault.lives_s))
        if fault is not None:
            await fault.after_create()
        return JSONResponse(self.describe_access(sandbox), 201)

    async def _vanish(self, sandbox: Sandbox, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.registry.kill(sandbox.id, cause="died", reason="it vanished (injected fault)")

    def describe_access(self, sandbox: Sandbox) -> dict[str, Any]:
        """What create and connect answer."""
        return {
            "sandboxID": sandbox.id,
            "templateID": sandbox.template,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": sandbox.access_token,
            "trafficAccessToken": sandbox.access_token,
        }

    def describe(self, sandbox: Sandbox) -> dict[str, Any]:
        """What info and list answer."""
        return {
            "sandboxID": sandbox.id,
            "templateID": sandbox.template,
            "alias": sandbox.template,
            "clientID": "local",
            "envdVersion": ENVD_VERSION,
            "metadata": sandbox.metadata,
            "state": "running",
            "startedAt": sandbox.started_at.isoformat(),
            "endAt": datetime.fromtimestamp(sandbox.end_at, UTC).isoformat(),
            "cpuCount": 1,
            "memoryMB": self.registry.options.limits.memory_mib,
            "diskSizeMB": self.registry.options.limits.file_mib,
        }

    async def info(self, request: Request) -> Response:
        """GET /sandboxes/{id}."""
        return JSONResponse(self.describe(self.find(request)))

    async def kill(self, request: Request) -> Response:
        """DELETE /sandboxes/{id}."""
        sandbox = self.find(request)
        if sandbox.faults is not None:
            sandbox.faults.before_kill()
        await self.registry.kill(sandbox.id)
        return Response(status_code=204)

    async def set_timeout(self, request: Request) -> Response:
        """POST /sandboxes/{id}/timeout."""
        sandbox = self.find(request)
        ttl_s = int((await request.json())["timeout"])
        sandbox.end_at = datetime.now(UTC).timestamp() + ttl_s
        return Response(status_code=204)

    async def connect(self, request: Request) -> Response:
        """POST /sandboxes/{id}/connect: prolongs, never shortens."""
        sandbox = self.find(request)
        ttl_s = int((await request.json()).get("timeout") or self.registry.options.default_ttl_s)
        sandbox.end_at = max(sandbox.end_at, datetime.now(UTC).timestamp() + ttl_s)
        return JSONResponse(self.describe_access(sandbox))

    async def list_sandboxes(self, request: Request) -> Response:
        """GET /v2/sandboxes."""
        self.check_key(request)
        query = request.query_params
        # Quoted twice by the SDK; Starlette took the first layer off.
        labels = {unquote(k): unquote(v) for k, v in parse_qsl(query.get("metadata", ""))}
        states = {one for value in query.getlist("state") for one in value.split(",")}
        found = [
            one
            for one in self.registry.live.values()
            if all(one.metadata.get(name) == value for name, value in labels.items())
            and (not states or "running" in states)
            and query.get("template") in (None, one.template)
        ]
        found.sort(key=lambda one: (one.started_at, one.id), reverse=query.get("order") != "asc")
        limit = max(1, min(int(query.get("limit", 100)), 100))
        start = int(query.get("nextToken") or 0)
        headers = {"x-next-token": str(start + limit)} if start + limit < len(found) else {}
        return JSONResponse([self.describe(one) for one in found[start : start + limit]], headers=headers)

    async def stats(self, request: Request) -> Response:
        """GET /stats, GET /stats?metadata=name=value."""
        label = next(iter(parse_qsl(request.query_params.get("metadata", ""))), None)
        return JSONResponse(self.registry.stats(label))


class Interpreter:
    """Code and contexts of one sandbox."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def execute(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /execute, as a bare ASGI application so that hang-ups are seen and streams can be broken."""
        request = Request(scope, receive)
        sandbox = envd.find_sandbox(self.registry, request)
        body = await request.json()
        fault: Fault | None = sandbox.faults
        if fault is not None:
            await fault.before_execute()
        if self.registry.options.execute_delay_s:
            await asyncio.sleep(self.registry.options.execute_delay_s)
        language = body.get("language") or "python"
        if language not in ("python", "python3"):
            raise HttpError(400, f"language {language} is not available on the local server: use python")
        context = self._context(sandbox, body.get("context_id") or "default")
        env = {str(k): str(v) for k, v in (body.get("env_vars") or {}).items()}
        self.registry.count_execution(sandbox)
        execution = Execution(sandbox, context, str(body.get("code") or ""), env, self.registry.options)
        if fault is not None and fault.drops_after_execute():
            async for _ in execution.lines():
                continue
            raise DropError
        watcher = asyncio.create_task(_hang_up_on_disconnect(receive, execution))
        try:
            headers = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            change = fault.line_changer() if fault is not None else _as_it_is
            async for line in execution.lines():
                out = change(line)
                if out is None:
                    execution.hang_up()
                    raise ConnectionResetError("stream broken (injected fault)")
                await send({"type": "http.response.body", "body": out, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            if not execution.task.done():
                execution.hang_up()

    def _context(self, sandbox: Sandbox, context_id: str) -> Any:
        if context_id in ("default", "python"):
            return sandbox.default_context
        context = sandbox.contexts.get(context_id)
        if context is None:
            raise HttpError(404, f"Context {context_id} not found")
        return context

    async def list_contexts(self, request: Request) -> Response:
        """GET /contexts."""
        sandbox = envd.find_sandbox(self.registry, request)
        return JSONResponse([_describe_context(one) for one in sandbox.contexts.values()])

    async def create_context(self, request: Request) -> Response:
        """POST /contexts."""
        sandbox = envd.find_sandbox(self.registry, request)
        body = await request.json()
        language = body.get("language") or "python"
        if language not in ("python", "python3"):
            raise HttpError(400, f"language {language} is not available on the local server: use python")
        return JSONResponse(_describe_context(await sandbox.add_context(body.get("cwd"))))

    async def remove_context(self, request: Request) -> Response:
        """DELETE /contexts/{id}."""
        sandbox = envd.find_sandbox(self.registry, request)
        context = self._context(sandbox, request.path_params["id"])
        if context is sandbox.default_context:
            await sandbox.kill_kernel(context)
        else:
            del sandbox.contexts[context.id]
            await sandbox.kill_kernel(context)
        return Response(status_code=204)

    async def restart_context(self, request: Request) -> Response:
        """POST /contexts/{id}/restart: whatever runs in it ends with an error event."""
        sandbox = envd.find_sandbox(self.registry, request)
        context = self._context(sandbox, request.path_params["id"])
        await sandbox.kill_kernel(context)
        async with context.lock:
            if context.writer is None:
                await sandbox.start_kernel(context)
        return Response(status_code=204)


class Execute:
    """Makes Starlette treat the method as an ASGI application."""

    def __init__(self, interpreter: Interpreter) -> None:
        self._interpreter = interpreter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._interpreter.execute(scope, receive, send)


async def _hang_up_on_disconnect(receive: Receive, execution: Execution) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            continue
        execution.hang_up()


def _as_it_is(line: bytes) -> bytes | None:
    return line


def _describe_context(context: Any) -> dict[str, str]:
    return {"id": context.id, "language": context.language, "cwd": context.cwd}


async def _health(_request: Request) -> Response:
    return JSONResponse({"status": "ok"})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status)


async def _on_error(request: Request, exc: Exception) -> Response:
    if isinstance(exc, DropError):
        request.scope[_DROP]()
        return Response(status_code=500)  # nobody hears it
    if isinstance(exc, InjectedError):
        return Response(exc.body, exc.status, headers=exc.headers, media_type=exc.media_type)
    if isinstance(exc, HttpError | envd.EnvdError):
        return _error(exc.status, str(exc))
    if isinstance(exc, SandboxGoneError):
        return _error(502, f"The sandbox was not found: {exc}")
    if isinstance(exc, RefusedError):
        return _error(400, str(exc))
    return _error(400, f"the request is malformed: {exc}")


def build_app(registry: Registry) -> ASGIApp:
    """The server's application."""
    plane, interpreter = ControlPlane(registry), Interpreter(registry)
    routes = [
        Route("/sandboxes", plane.create, methods=["POST"]),
        Route("/v2/sandboxes", plane.create, methods=["POST"]),
        Route("/v2/sandboxes", plane.list_sandboxes, methods=["GET"]),
        Route("/sandboxes", plane.list_sandboxes, methods=["GET"]),
        Route("/sandboxes/{id}", plane.info, methods=["GET"]),
        Route("/sandboxes/{id}", plane.kill, methods=["DELETE"]),
        Route("/sandboxes/{id}/timeout", plane.set_timeout, methods=["POST"]),
        Route("/sandboxes/{id}/connect", plane.connect, methods=["POST"]),
        Route("/v2/sandboxes/{id}/connect", plane.connect, methods=["POST"]),
        Route("/stats", plane.stats),
        Route("/execute", Execute(interpreter), methods=["POST"]),
        Route("/contexts", interpreter.list_contexts, methods=["GET"]),
        Route("/contexts", interpreter.create_context, methods=["POST"]),
        Route("/contexts/{id}", interpreter.remove_context, methods=["DELETE"]),
        Route("/contexts/{id}/restart", interpreter.restart_context, methods=["POST"]),
        *envd.routes(registry),
    ]
    kinds: list[Any] = [InjectedError, DropError, HttpError, envd.EnvdError, SandboxGoneError, RefusedError]
    kinds += [json.JSONDecodeError, KeyError, ValueError, TypeError]
    return _Droppable(Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, _on_error)))


class _Droppable:
    """Gives each request a way to break its connection, for which ASGI has no word."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle: Any = getattr(send, "__self__", None)  # uvicorn's
        scope[_DROP] = lambda: cycle.transport.abort()
        await self._app(scope, receive, send)
