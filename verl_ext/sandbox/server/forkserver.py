"""The server's side of the fork server: starts it, asks it for sandboxes, hears of their ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_ext.errors import ConfigurationError

from .folders import PREFIX, remove_tree
from .options import Options
from .tiers import Tier
from .wire import packet_pair, receive_message, send_message

log = logging.getLogger(__name__)
PRELOAD = (
    "numpy",
    "sympy",
    "scipy.optimize",
    "matplotlib.pyplot",
    "matplotlib_inline.backend_inline",
    "pandas",
    "scipy.stats",
)
_PROBE_TIMEOUT_S = 60.0
_THREADS_OFF = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class ForkServer:
    """One fork server process and the temporary folder that holds all files of its sandboxes."""

    def __init__(self, options: Options, on_gone: Callable[[str, str | None], None]) -> None:
        self.options = options
        self.tier = Tier.NONE
        self.passed_over: list[str] = []
        self.loaded = asyncio.Event()
        self.is_alive = False
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._on_gone = on_gone
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = "the fork server ended"
        self._control: socket.socket | None = None
        self._number = 0

    async def start(self) -> None:
        """Start the process and wait until it knows which tier works.

        Raises:
            ConfigurationError: the isolation that was asked for does not work here.
        """
        self._control, theirs = packet_pair()
        self.folder.chmod(0o711)
        env, cache = sandbox_env(), str(self.folder / "cache")
        Path(cache).mkdir()
        package_root = str(Path(__file__).resolve().parents[3])
        settings = {
            "isolation": self.options.isolation,
            "folder": str(self.folder / "sandboxes"),
            "limits": self.options.limits.as_dict(),
            "drop_root": self.options.drop_root,
            "env": env,
            "preload": PRELOAD,
            "code_folder": package_root,
            "is_debugged": log.isEnabledFor(logging.DEBUG),
        }
        code = (
            f"import sys; sys.path.insert(0, {package_root!r}); from verl_ext.sandbox.server.zygote import main; "
            f"main({theirs.fileno()}, {json.dumps(settings)!r})"
        )
        self._process = subprocess.Popen(  # noqa: ASYNC220 - a fork of some milliseconds, once
            [sys.executable, "-I", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=env | {"HOME": str(self.folder), "MPLCONFIGDIR": cache, "IPYTHONDIR": cache, "TMPDIR": cache},
            start_new_session=True,
        )
        theirs.close()
        message, _ = await asyncio.wait_for(asyncio.to_thread(receive_message, self._control), _PROBE_TIMEOUT_S)
        if message is None or message["event"] != "probed":
            reason = "the fork server ended at once: see its lines above" if message is None else message["message"]
            raise ConfigurationError(reason)
        self.tier, self.passed_over = Tier(message["tier"]), message["reasons"]
        self.is_alive = True
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._hear)

    def spawn(self, sandbox_id: str, channel: socket.socket) -> None:
        """Ask for a sandbox whose agent answers on `channel`."""
        self._number += 1
        self._send({"op": "spawn", "id": sandbox_id, "number": self._number}, [channel.fileno()])

    def kill(self, sandbox_id: str) -> None:
        """Ask for the end of every process of a sandbox; `on_gone` follows."""
        self._send({"op": "kill", "id": sandbox_id})

    def _send(self, message: dict[str, Any], fds: list[int] | None = None) -> None:
        if self._control is None or not self.is_alive:
            raise ConnectionError(self._ended)
        send_message(self._control, message, fds or [])

    def _hear(self) -> None:
        assert self._control is not None  # noqa: S101 - a reader exists only with a socket
        try:
            message, _ = receive_message(self._control)
        except BlockingIOError:
            return
        if message is None:
            self.is_alive = False
            asyncio.get_running_loop().remove_reader(self._control)
            log.error("%s; no sandbox can be created any more: restart the server", self._ended)
            self._on_gone("*", self._ended)
        elif message["event"] == "failed":
            self._ended = f"the fork server ended ({message['message']})"
        elif message["event"] == "loaded":
            self.loaded.set()
        elif message["event"] == "gone":
            self._on_gone(message["id"], message["reason"])

    async def close(self) -> None:
        """End the process, and with it every sandbox and the folder."""
        if self._control is not None:
            if self.is_alive:
                asyncio.get_running_loop().remove_reader(self._control)
            self.is_alive = False
            self._control.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, 15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        remove_tree(self.folder)


def sandbox_env() -> dict[str, str]:
    """The environment of every sandbox: nothing of the server's but where programs are found."""
    paths = dict.fromkeys([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    env = {"PATH": os.pathsep.join(paths), "LANG": "C.UTF-8", "USER": "user", "MPLBACKEND": _INLINE}
    return env | dict.fromkeys(_THREADS_OFF, "1") | {"PYTHONUNBUFFERED": "1", "E2B_SANDBOX": "true"}


_INLINE = "module://matplotlib_inline.backend_inline"
