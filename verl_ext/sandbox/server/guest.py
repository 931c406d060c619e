"""One sandbox as the fork server sees it: its processes, from the first to the last."""

# ruff: noqa: TID251 - the environment here is the sandbox's own, not the project's settings
from __future__ import annotations

import contextlib
import os
import signal
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bubblewrap, confine, limits
from .folders import remove_tree
from .processes import Usage, descendants, measure
from .tiers import Tier
from .wire import send_message

_FIRST_UID = 61_000
_UID_COUNT = 4_000


@dataclass(frozen=True)
class Place:
    """Where sandboxes live.

    Attributes:
        tier: their isolation.
        has_own_users: each gets a user of its own; needs root.
    """

    tier: Tier
    has_own_users: bool = False

    def user_id(self, number: int) -> int | None:
        """The user of the sandbox with this number, None for the server's own."""
        return _FIRST_UID + number % _UID_COUNT if self.has_own_users else None


@dataclass(frozen=True)
class GuestSpec:
    """What the fork server needs to know of a sandbox."""

    sandbox_id: str
    number: int
    folder: Path
    limits: limits.Limits
    env: dict[str, str]
    is_debugged: bool = False

    @classmethod
    def from_message(cls, message: dict[str, Any], settings: dict[str, Any]) -> GuestSpec:
        """Read a spawn request."""
        folder = Path(settings["folder"], f"s{message['number']}")
        bounds = limits.Limits(**settings["limits"])
        return cls(message["id"], message["number"], folder, bounds, settings["env"], settings["is_debugged"])

    def excess(self, used: Sequence[Usage], *, shared_kib: int) -> str | None:
        """Why the sandbox must end, or None: too many processes, or too much memory beyond what forks share."""
        if len(used) > self.limits.max_processes:
            return f"it had {len(used)} processes, the limit is {self.limits.max_processes}"
        resident_mib = sum(max(0, one.resident_kib - shared_kib) for one in used) // 1024
        if resident_mib > 2 * self.limits.memory_mib:
            return f"it used {resident_mib} MiB of memory, the limit is {2 * self.limits.memory_mib} MiB"
        return None


class Guest:
    """The processes of one sandbox."""

    def __init__(self, spec: GuestSpec, place: Place, channel_fd: int) -> None:
        self.spec = spec
        self.place = place
        self.tier = place.tier
        self.uid = place.user_id(spec.number)
        self.channel_fd = channel_fd
        self.pids: set[int] = set()
        self.is_ending = False
        self.reason: str | None = None
        self.ready_fd = -1
        self._wrap: bubblewrap.Wrap | None = None
        self._agent_pid = 0

    def open(self) -> bool:
        """Begin; True if `ready_fd` must become readable before `enter`."""
        if self.tier is Tier.BUBBLEWRAP:
            self._wrap = bubblewrap.start(self.spec.limits, self.uid)
            self.ready_fd = self._wrap.ready_fd
            self.pids.add(self._wrap.pid)
            return True
        for name in ("home", "tmp"):
            folder = self.spec.folder / name
            folder.mkdir(parents=True)
            if self.uid is not None:
                os.chown(folder, self.uid, self.uid)
            folder.chmod(0o700)
        return False

    def enter(self, shell: Any) -> None:
        """Fork the agent behind the isolation.

        Raises:
            OSError: the namespaces could not be made or entered.
        """
        if self._wrap is not None:
            self._agent_pid = bubblewrap.fork_into(self._wrap, self.uid, lambda: self._become_agent(shell))
        else:
            self._agent_pid = os.fork()
            if not self._agent_pid:
                self._become_agent(shell)
        self.pids.add(self._agent_pid)
        os.close(self.channel_fd)
        self.channel_fd = -1

    def _become_agent(self, shell: Any) -> None:
        from . import agent  # loads IPython, which the probe need not wait for; the fork server has loaded it

        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            keep = {self.channel_fd} | ({self._wrap.life_fd} if self._wrap else set())
            agent.close_others(keep | {2})
            agent.scrub_streams(keep_stderr=self.spec.is_debugged)
            os.setsid()
            channel = socket.socket(fileno=self.channel_fd)
            try:
                home = self._isolate()
            except OSError as exc:
                send_message(channel, {"event": "failed", "message": f"isolation {self.tier} failed: {exc}"})
                os._exit(1)
            agent.Agent(channel, shell, home, keep).serve_forever()
        except BaseException:  # noqa: BLE001 - a child must never return into its parent's loop
            traceback.print_exc()
        finally:
            os._exit(1)

    def _isolate(self) -> str:
        """Put this process behind the tier; returns the home folder."""
        if self._wrap is not None:
            home, tmp = "/home/user", "/tmp"  # noqa: S108 - the sandbox's own
        else:
            confine.die_with_parent()
            home, tmp = str(self.spec.folder / "home"), str(self.spec.folder / "tmp")
            if self.uid is not None:
                confine.become_user(self.uid)
        confine.become_subreaper()
        os.environ.clear()
        os.environ.update(self.spec.env | {"HOME": home, "TMPDIR": tmp, "PWD": home, "MPLCONFIGDIR": tmp})
        os.chdir(home)
        if self.tier is not Tier.NONE:
            own_user = self.uid is not None or (self._wrap is not None and os.getuid() != 0)
            limits.apply(self.spec.limits, count_processes=own_user)
        confine.apply(self.tier, self.spec.folder)
        return home

    def kill(self) -> None:
        """Send SIGKILL to every process of the sandbox."""
        self.is_ending = True
        if self._wrap is None and self._agent_pid:
            self._kill_tree()
        inner = {self._wrap.inner_pid} - {0} if self._wrap else set()
        for pid in self.pids | inner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_tree(self) -> None:
        """Stop all first, so that none can fork away, then kill."""
        stopped: set[int] = set()
        for _ in range(50):
            fresh = descendants(measure(), self._agent_pid) - stopped
            if not fresh:
                break
            for pid in fresh:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= fresh
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def forget(self, dead: set[int]) -> None:
        """Take collected processes off; a dead agent or bubblewrap ends the sandbox."""
        lost = self.pids & dead
        if not lost:
            return
        self.pids -= lost
        if not self.is_ending:
            self.reason = self.reason or "its first process ended"
            self.kill()

    def close(self) -> None:
        """Close descriptors and remove the folder."""
        if self.channel_fd >= 0:
            os.close(self.channel_fd)
        if self._wrap is not None:
            self._wrap.close()
        remove_tree(self.spec.folder)
