"""File operations of the envd API, done inside the sandbox by a fork of the agent.

The server never opens a path of a sandbox itself: a link made by the model's code is followed with the
sandbox's rights, in the sandbox's view of the disk.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import pwd
import shutil
import socket
import stat
from pathlib import Path
from typing import Any

API_HOME = "/home/user"
_CHUNK_BYTES = 1 << 18


def resolve(path: str, home: str) -> str:
    """The real path for one of the API: relative ones start at home, and E2B's home is ours."""
    if path == API_HOME or path.startswith(API_HOME + "/"):
        path = home + path[len(API_HOME) :]
    elif path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.normpath(Path(home, path))


def serve(request: dict[str, Any], stream: socket.socket, home: str) -> None:
    """Do one operation; the answer is one line of JSON, then the file's bytes if they were asked for."""
    try:
        path = resolve(request["path"], home)
        if request["action"] == "read":
            _read(path, stream)
            return
        answer = _ACTIONS[request["action"]](path, request, stream, home)
    except OSError as exc:
        answer = {"errno": exc.errno or errno.EIO, "error": f"{exc.strerror or exc}: {request.get('path')}"}
    stream.sendall(json.dumps(answer).encode() + b"\n")


def _read(path: str, stream: socket.socket) -> None:
    if Path(path).is_dir():
        raise IsADirectoryError(errno.EISDIR, "path is a directory")
    with Path(path).open("rb") as file:
        stream.sendall(b"{}\n")
        while chunk := file.read(_CHUNK_BYTES):
            stream.sendall(chunk)


def _write(path: str, _request: dict[str, Any], stream: socket.socket, home: str) -> dict[str, Any]:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        while chunk := stream.recv(_CHUNK_BYTES):
            file.write(chunk)
    return {"entry": _entry(path, home)}


def _stat(path: str, _request: dict[str, Any], _stream: socket.socket, home: str) -> dict[str, Any]:
    return {"entry": _entry(path, home)}


def _list(path: str, request: dict[str, Any], _stream: socket.socket, home: str) -> dict[str, Any]:
    depth = max(1, int(request.get("depth") or 1))
    entries: list[dict[str, Any]] = []
    pending = [(path, 1)]
    while pending:
        folder, level = pending.pop()
        for name in sorted(os.listdir(folder)):  # noqa: PTH208 - strings in, strings out
            child = os.path.join(folder, name)  # noqa: PTH118 - strings in, strings out
            entries.append(_entry(child, home))
            if level < depth and os.path.isdir(child) and not os.path.islink(child):  # noqa: PTH112, PTH114
                pending.append((child, level + 1))
    return {"entries": entries}


def _make_dir(path: str, _request: dict[str, Any], _stream: socket.socket, home: str) -> dict[str, Any]:
    Path(path).mkdir(parents=True)
    return {"entry": _entry(path, home)}


def _remove(path: str, _request: dict[str, Any], _stream: socket.socket, _home: str) -> dict[str, Any]:
    target = Path(path)
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    else:
        target.unlink()
    return {}


def _move(path: str, request: dict[str, Any], _stream: socket.socket, home: str) -> dict[str, Any]:
    destination = resolve(request["destination"], home)
    Path(destination).parent.mkdir(parents=True, exist_ok=True)
    Path(path).rename(destination)
    return {"entry": _entry(destination, home)}


_ACTIONS = {
    "write": _write,
    "stat": _stat,
    "list": _list,
    "make_dir": _make_dir,
    "remove": _remove,
    "move": _move,
}


def _entry(path: str, home: str) -> dict[str, Any]:
    info = os.lstat(path)
    kind = "FILE_TYPE_FILE"
    if stat.S_ISDIR(info.st_mode):
        kind = "FILE_TYPE_DIRECTORY"
    elif stat.S_ISLNK(info.st_mode):
        kind = "FILE_TYPE_SYMLINK"
    shown = API_HOME + path[len(home) :] if path == home or path.startswith(home + "/") else path
    entry = {
        "name": Path(path).name,
        "type": kind,
        "path": shown,
        "size": str(info.st_size),
        "mode": stat.S_IMODE(info.st_mode),
        "permissions": stat.filemode(info.st_mode),
        "owner": _name(pwd.getpwuid, info.st_uid),
        "group": _name(grp.getgrgid, info.st_gid),
        "modified_ns": info.st_mtime_ns,
    }
    if kind == "FILE_TYPE_SYMLINK":
        entry["symlinkTarget"] = str(Path(path).readlink())
    return entry


def _name(look_up: Any, number: int) -> str:
    try:
        return look_up(number)[0]
    except KeyError:
        return str(number)
