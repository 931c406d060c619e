"""The routes of envd, the daemon in an E2B sandbox: health, files, and the process and filesystem services."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from . import commands
from .commands import RpcError
from .registry import Registry
from .sandbox import Sandbox

_CHUNK_BYTES = 1 << 18
_MAX_LINE_BYTES = 16 << 20
_HTTP_STATUS = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "permission_denied": 403,
    "not_found": 404,
    "already_exists": 409,
    "unimplemented": 501,
    "unavailable": 503,
}
_CODES = {
    errno.ENOENT: "not_found",
    errno.EEXIST: "already_exists",
    errno.EACCES: "permission_denied",
    errno.EPERM: "permission_denied",
    errno.EROFS: "permission_denied",
}
_METHODS = {"Stat": "stat", "MakeDir": "make_dir", "Move": "move", "ListDir": "list", "Remove": "remove"}


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


class FileStream:
    """The stream of one file operation of the agent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, sandbox: Sandbox, message: dict[str, Any]) -> FileStream:
        """Begin an operation."""
        ours, theirs = socket.socketpair()
        try:
            await sandbox.ask({"op": "file", **message}, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(*await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES))

    async def answer(self) -> dict[str, Any]:
        """The line that ends the operation, or begins the bytes of a file.

        Raises:
            RpcError: the operation failed.
        """
        try:
            answer = json.loads(await self.reader.readline())
        except ValueError as exc:
            raise RpcError("unavailable", "the file operation ended without an answer") from exc
        if not isinstance(answer, dict):
            raise RpcError("unavailable", "the file operation gave no object")
        if "error" in answer:
            raise RpcError(_CODES.get(answer.get("errno") or 0, "invalid_argument"), str(answer["error"]))
        return answer

    async def chunks(self) -> AsyncIterator[bytes]:
        """The rest of the stream."""
        try:
            while chunk := await self.reader.read(_CHUNK_BYTES):
                yield chunk
        finally:
            self.writer.close()


class Envd:
    """All of envd for all sandboxes of a registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry

    async def health(self, request: Request) -> Response:
        """GET /health."""
        find_sandbox(self.registry, request)
        return Response(status_code=204)

    async def read_file(self, request: Request) -> Response:
        """GET /files?path=."""
        sandbox = find_sandbox(self.registry, request)
        stream = await FileStream.open(sandbox, {"action": "read", "path": request.query_params["path"]})
        try:
            await stream.answer()
        except RpcError as exc:
            stream.writer.close()
            raise EnvdError(_HTTP_STATUS.get(exc.code, 500), str(exc)) from exc
        return StreamingResponse(stream.chunks(), media_type="application/octet-stream")

    async def write_files(self, request: Request) -> Response:
        """POST /files, multipart (the SDK's way for this envd version) or octets."""
        sandbox = find_sandbox(self.registry, request)
        path = request.query_params.get("path")
        written = []
        if request.headers.get("content-type", "").startswith("multipart/"):
            async with request.form(max_files=1000) as form:
                for _, part in form.multi_items():
                    if isinstance(part, str):
                        continue
                    target = path or part.filename or ""
                    written.append(await self._write(sandbox, target, _parts_of(part)))
        else:
            written.append(await self._write(sandbox, path or "", request.stream()))
        return JSONResponse(written)

    async def _write(self, sandbox: Sandbox, path: str, chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        stream = await FileStream.open(sandbox, {"action": "write", "path": path})
        try:
            try:
                async for chunk in chunks:
                    stream.writer.write(chunk)
                    await stream.writer.drain()
                stream.writer.write_eof()
            except ConnectionError:
                pass  # the answer says why the other side stopped reading
            entry = (await stream.answer())["entry"]
        except RpcError as exc:
            raise EnvdError(_HTTP_STATUS.get(exc.code, 500), str(exc)) from exc
        finally:
            stream.writer.close()
        return {"name": entry["name"], "type": "file", "path": entry["path"]}

    async def filesystem(self, request: Request) -> Response:
        """POST /filesystem.Filesystem/{method}: unary calls."""
        method = request.path_params["method"]
        try:
            sandbox = find_sandbox(self.registry, request)
            if method not in _METHODS:
                raise RpcError("unimplemented", f"filesystem.Filesystem/{method} is not available on the local server")
            body = await request.json()
            message = {"action": _METHODS[method], "path": body.get("path") or body.get("source") or ""}
            message |= {"depth": body.get("depth"), "destination": body.get("destination")}
            stream = await FileStream.open(sandbox, message)
            try:
                answer = await stream.answer()
            finally:
                stream.writer.close()
        except RpcError as exc:
            return _refusal(exc)
        if "entries" in answer:
            return JSONResponse({"entries": [_entry(one) for one in answer["entries"]]})
        return JSONResponse({"entry": _entry(answer["entry"])} if "entry" in answer else {})

    async def process(self, request: Request) -> Response:
        """POST /process.Process/{method}."""
        method = request.path_params["method"]
        sandbox = find_sandbox(self.registry, request)
        try:
            if method not in ("Start", "Connect"):
                return JSONResponse(await commands.unary(sandbox, method, await request.json()))
            body = commands.open_envelope(await request.body())
            if method == "Start":
                command, queue = await commands.start(sandbox, body)
            else:
                command = commands.find(sandbox, body)
                queue = commands.listen(command)
        except RpcError as exc:
            if method in ("Start", "Connect"):
                body_bytes = commands.end_of_stream(exc.code, str(exc))
                return Response(body_bytes, media_type="application/connect+json")
            return _refusal(exc)
        timeout_ms = request.headers.get("connect-timeout-ms")
        chunks = commands.stream(sandbox, command, queue, int(timeout_ms) if timeout_ms else None)
        return StreamingResponse(chunks, media_type="application/connect+json")


def _refusal(exc: RpcError) -> Response:
    return JSONResponse({"code": exc.code, "message": str(exc)}, _HTTP_STATUS.get(exc.code, 500))


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    shown = dict(entry)
    moment = datetime.fromtimestamp(int(shown.pop("modified_ns", 0)) / 1e9, UTC)
    return shown | {"modifiedTime": moment.isoformat().replace("+00:00", "Z")}


async def _parts_of(part: Any) -> AsyncIterator[bytes]:
    while chunk := await part.read(_CHUNK_BYTES):
        yield chunk


def routes(registry: Registry) -> list[BaseRoute]:
    """The routes of this plane."""
    envd = Envd(registry)
    return [
        Route("/health", envd.health),
        Route("/files", envd.read_file, methods=["GET"]),
        Route("/files", envd.write_files, methods=["POST"]),
        Route("/filesystem.Filesystem/{method}", envd.filesystem, methods=["POST"]),
        Route("/process.Process/{method}", envd.process, methods=["POST"]),
    ]
