"""The first tier: one bubblewrap per sandbox makes the namespaces, a fork of the fork server enters them.

bubblewrap runs a placeholder (`cat`) that lives as long as the agent holds the other end of its input. The
fork then joins with setns(2), as `flatpak enter` does, so the loaded modules stay shared memory.
The chain of deaths: server -> fork server -> bubblewrap (--die-with-parent) -> the namespace's first process ->
everything in the namespace.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import confine
from .limits import MIB, Limits
from .paths import ETC_PATHS, SYSTEM_PATHS, python_paths

_PLACEHOLDER = ("/bin/sh", "-c", "echo ready; exec cat >/dev/null")


@dataclass
class Wrap:
    """One bubblewrap that is starting or stands."""

    pid: int
    ready_fd: int
    info_fd: int
    life_fd: int
    errors_fd: int
    process: subprocess.Popen[Any]
    inner_pid: int = 0

    def close(self) -> None:
        """Close the descriptors that are still open here."""
        for name in ("ready_fd", "info_fd", "life_fd", "errors_fd"):
            fd = getattr(self, name)
            if fd >= 0:
                os.close(fd)
                setattr(self, name, -1)
        self.process.returncode = 0


def arguments(limits: Limits) -> list[str]:
    """The options of bubblewrap."""
    size = str(limits.file_mib * MIB)
    args = ["--unshare-user", "--unshare-net", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    args += ["--cap-drop", "ALL", "--die-with-parent", "--hostname", "sandbox", "--clearenv"]
    args += ["--setenv", "PATH", "/usr/bin:/bin"]
    for path in SYSTEM_PATHS:
        if Path(path).is_symlink():
            args += ["--symlink", str(Path(path).readlink()), path]
        elif Path(path).is_dir():
            args += ["--ro-bind", path, path]
    for path in ETC_PATHS:
        args += ["--ro-bind-try", path, path]
    args += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/home/user", "/run", "/var/tmp"):  # noqa: S108 - inside the sandbox
        args += ["--perms", "0755" if folder != "/tmp" else "1777", "--size", size, "--tmpfs", folder]  # noqa: S108
    for path in python_paths():  # after those: an environment may lie in one of them
        args += ["--ro-bind", str(path), str(path)]
    return [*args, "--remount-ro", "/", "--chdir", "/home/user"]


def start(limits: Limits, uid: int | None) -> Wrap:
    """Start bubblewrap; `ready_fd` becomes readable when the namespaces stand, or closes if they never will.

    Raises:
        OSError: the program could not be started.
    """
    ready_r, ready_w = os.pipe()
    info_r, info_w = os.pipe()
    life_r, life_w = os.pipe()
    errors_r, errors_w = os.pipe()
    try:
        args = ["bwrap", *arguments(limits), "--info-fd", str(info_w), "--", *_PLACEHOLDER]
        user: Any = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
        process = subprocess.Popen(
            args,
            stdin=life_r,
            stdout=ready_w,
            stderr=errors_w,
            pass_fds=(info_w,),
            **user,
        )
    except OSError:
        for fd in (ready_r, info_r, life_w, errors_r):
            os.close(fd)
        raise
    finally:
        for fd in (ready_w, info_w, life_r, errors_w):
            os.close(fd)
    return Wrap(process.pid, ready_r, info_r, life_w, errors_r, process)


def fork_into(wrap: Wrap, uid: int | None, become: Callable[[], Any]) -> int:
    """Fork a process into the namespaces of `wrap`; `become` runs in it and must not return.

    Returns:
        The process id as seen from here.

    Raises:
        OSError: bubblewrap failed, or the namespaces could not be entered.
    """
    if not os.read(wrap.ready_fd, 16):
        reason = os.read(wrap.errors_fd, 4096).decode(errors="replace").strip()
        raise OSError(f"bubblewrap ended before the sandbox stood ({reason})")
    wrap.inner_pid = int(json.loads(os.read(wrap.info_fd, 4096))["child-pid"])
    result_r, result_w = os.pipe()
    joiner = os.fork()
    if not joiner:
        try:
            if uid is not None:
                confine.become_user(uid)
            confine.enter_namespaces(wrap.inner_pid)
            pid = os.fork()
            if not pid:
                become()
            os.write(result_w, str(pid).encode())
        except OSError as exc:
            os.write(result_w, f"! {exc}".encode())
        finally:
            os._exit(0)
    os.close(result_w)
    os.waitpid(joiner, 0)
    answer = os.read(result_r, 4096).decode()
    os.close(result_r)
    os.close(wrap.life_fd)
    wrap.life_fd = -1
    if not answer.isdigit():
        raise OSError(f"the namespaces could not be entered: {answer.lstrip('! ')}")
    return int(answer)


def probe(limits: Limits, uid: int | None) -> str | None:
    """Make one sandbox and look around in it; None if all is as promised, otherwise why not and the cure."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: install the package bubblewrap"
    try:
        wrap = start(limits, uid)
    except OSError as exc:
        return f"bubblewrap did not start: {exc}"
    try:
        pid = fork_into(wrap, uid, _probe_inside)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except OSError as exc:
        return f"{exc}: {cure()}"
    finally:
        os.kill(wrap.pid, signal.SIGKILL)
        wrap.process.wait()
        wrap.close()
    return None if code == 0 else f"the sandbox was not closed (step {code}): report this with the kernel's version"


def _probe_inside() -> None:
    code = 9
    try:
        confine.drop_capabilities()
        visible = {entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        links = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
        if len(visible) > 6:
            code = 2
        elif links - {"lo"}:
            code = 3
        elif Path("/etc/shadow").exists():
            code = 4
        else:
            code = 0
    finally:
        os._exit(code)


def cure() -> str:
    """What to do where bubblewrap is installed and does not work."""
    restriction = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
    if restriction.exists() and restriction.read_text().strip() == "1":
        return (
            "this kernel's AppArmor forbids user namespaces: sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0, or give bwrap an AppArmor profile with userns"
        )
    if Path("/.dockerenv").exists():
        return "Docker's seccomp profile forbids it: docker run --security-opt seccomp=unconfined"
    limit = Path("/proc/sys/user/max_user_namespaces")
    if limit.exists() and limit.read_text().strip() == "0":
        return "user namespaces are off: sysctl -w user.max_user_namespaces=15000"
    return "allow unprivileged user namespaces, or use --isolation auto"
