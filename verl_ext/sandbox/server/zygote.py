"""The fork server: loads Python's heavy modules once and forks a sandbox's first process from itself.

A process of its own, with a scrubbed environment and without the server's descriptors, so that a fork of it
holds nothing of the server's. It also outlives a server that is killed with -9 for as long as it takes to end
every sandbox and to remove the temporary folder.

One bubblewrap per sandbox makes the namespaces (it is the audited tool for that); a fork of this process then
enters them with setns(2) and drops what it held. So the memory of the loaded modules is shared by all
sandboxes, while no sandbox shares a namespace with another.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from . import bubblewrap, confine
from .folders import remove_tree
from .guest import Guest, GuestSpec, Place
from .limits import Limits
from .paths import can_others_read, python_paths
from .processes import Usage, collect_children, descendants, end_all_children, kill_unknown_children, measure
from .tiers import AUTO_ORDER, Tier
from .wire import close_fds, receive_message, send_message

_MEASURE_EVERY_S = 1.0
_SWEEP_EVERY_S = 0.01


class Zygote:
    """Serves the server's requests until the control socket closes."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        self.control = control
        self.settings = settings
        self.guests: dict[str, Guest] = {}
        self.preload = list(settings["preload"])
        self.shell: Any = None
        self.place = Place(Tier.NONE)
        self._measured_at = 0.0
        self._has_orphans = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Probe, load, serve, and clean up in the end."""
        try:
            self.place, reasons = choose_place(self.settings)
        except RuntimeError as exc:
            send_message(self.control, {"event": "failed", "message": str(exc)})
            return
        send_message(self.control, {"event": "probed", "tier": self.place.tier, "reasons": reasons})
        try:
            self._serve()
        except BrokenPipeError:
            return  # the server is gone
        except Exception as exc:
            with contextlib.suppress(OSError):
                send_message(self.control, {"event": "failed", "message": f"{type(exc).__name__}: {exc}"})
            raise
        finally:
            for guest in self.guests.values():
                guest.kill()
            end_all_children()
            remove_tree(Path(self.settings["folder"]).parent)

    def _serve(self) -> None:
        from . import agent  # noqa: F401 - loaded before any fork: a sandbox does not see this code
        from .kernel import build_shell

        self.shell = build_shell()
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self.control, selectors.EVENT_READ)
        self._selector.register(wake_r, selectors.EVENT_READ)
        while True:
            timeout_s = _MEASURE_EVERY_S if self.guests else None
            timeout_s = 0.0 if self.preload else _SWEEP_EVERY_S if self._has_orphans else timeout_s
            for key, _ in self._selector.select(timeout_s):
                if key.fileobj == wake_r:
                    os.read(wake_r, 4096)
                elif key.fileobj is self.control:
                    message, fds = receive_message(self.control)
                    if message is None:
                        return
                    self._answer(message, fds)
                else:
                    self._finish(key.data)
            self._reap()
            self._end_orphans()
            self._measure()
            if self.preload:
                self._preload_next()

    def _preload_next(self) -> None:
        name = self.preload.pop(0)
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if name == "matplotlib_inline.backend_inline" and name in sys.modules:
            from .kernel import enable_inline_plots

            enable_inline_plots(self.shell)
        if not self.preload:
            gc.collect()
            gc.freeze()
            send_message(self.control, {"event": "loaded"})

    def _answer(self, message: dict[str, Any], fds: list[int]) -> None:
        guest = self.guests.get(message["id"])
        if message["op"] == "spawn":
            spec = GuestSpec.from_message(message, self.settings)
            guest = Guest(spec, self.place, fds[0])
            self.guests[spec.sandbox_id] = guest
            try:
                if guest.open():
                    self._selector.register(guest.ready_fd, selectors.EVENT_READ, guest)
                else:
                    self._finish(guest)
            except OSError as exc:
                self._lost(guest, f"could not start: {exc}")
        elif message["op"] == "kill":
            close_fds(fds)
            if guest is not None:
                guest.kill()
                self._reap()

    def _finish(self, guest: Guest) -> None:
        """The namespaces stand (or none are needed): fork the agent into them."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.ready_fd)
        try:
            guest.enter(self.shell)
        except OSError as exc:
            self._lost(guest, f"could not start: {exc}")

    def _lost(self, guest: Guest, reason: str) -> None:
        guest.reason = guest.reason or reason
        guest.kill()

    def _reap(self) -> None:
        dead = collect_children()
        for guest in list(self.guests.values()):
            guest.forget(dead)
            if guest.is_ending and not guest.pids:
                self._remove(guest)

    def _remove(self, guest: Guest) -> None:
        self._has_orphans = True
        self._end_orphans()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(guest.ready_fd)
        guest.close()
        del self.guests[guest.spec.sandbox_id]
        send_message(self.control, {"event": "gone", "id": guest.spec.sandbox_id, "reason": guest.reason})

    def _end_orphans(self) -> None:
        if self._has_orphans:
            known = {pid for guest in self.guests.values() for pid in guest.pids}
            self._has_orphans = kill_unknown_children(known) > 0

    def _measure(self) -> None:
        now = time.monotonic()
        if now - self._measured_at < _MEASURE_EVERY_S or not self.guests or self.place.tier is Tier.NONE:
            return
        self._measured_at = now
        table = measure()
        own = table.get(os.getpid(), Usage(0, 0, 0))
        for guest in self.guests.values():
            pids = {pid for root in guest.pids for pid in descendants(table, root)}
            excess = guest.spec.excess([table[pid] for pid in pids], shared_kib=own.resident_kib)
            if excess and not guest.is_ending:
                self._lost(guest, excess)


def choose_place(settings: dict[str, Any]) -> tuple[Place, list[str]]:
    """The strongest tier that works and was allowed, and why stronger ones were passed over.

    Raises:
        RuntimeError: what was asked for does not work here; the message holds the cure.
    """
    wanted = settings["isolation"]
    if wanted == Tier.NONE:
        return Place(Tier.NONE), []
    order = {"auto": AUTO_ORDER, "required": AUTO_ORDER[:1]}.get(wanted) or (Tier(wanted),)
    reasons: list[str] = []
    for tier in order:
        place, reason = try_tier(tier, settings)
        if reason is None:
            return place, reasons
        reasons.append(f"{tier}: {reason}")
    hint = "" if wanted == "auto" else "; or use --isolation auto, which takes the strongest that works"
    raise RuntimeError(f"isolation '{wanted}' does not work here. " + "; ".join(reasons) + hint)


def try_tier(tier: Tier, settings: dict[str, Any]) -> tuple[Place, str | None]:
    """How sandboxes would be placed in `tier`, and why that does not work, or None."""
    can_have_users = os.getuid() == 0 and settings["drop_root"]
    place = Place(tier, has_own_users=can_have_users and all(map(can_others_read, python_paths())))
    if tier is Tier.BUBBLEWRAP:
        return place, bubblewrap.probe(Limits(**settings["limits"]), place.user_id(0))
    return place, confine.probe(tier)


def main(control_fd: int, settings_json: str) -> None:
    """Entry point of the process; ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    confine.become_subreaper()
    control = socket.socket(fileno=control_fd)
    settings = json.loads(settings_json)
    os.chdir("/")
    # Not imported by pandas, it starts threads, and a process with threads cannot be forked safely.
    sys.modules["pyarrow"] = None  # type: ignore[assignment]
    sys.path[:] = [entry for entry in sys.path if entry != settings["code_folder"]]
    Path(settings["folder"]).mkdir(mode=0o711, exist_ok=True)
    Zygote(control, settings).run()
    os._exit(0)
