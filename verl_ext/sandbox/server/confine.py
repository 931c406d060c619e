"""Steps by which a process gives up rights for good, and the probe of the tiers made of them."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from . import landlock, seccomp
from .tiers import Tier

_PIDFD_OPEN = 434
_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000  # mnt uts ipc user pid net
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Adopt the orphans of all descendants."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def pidfd_open(pid: int) -> int:
    """A descriptor for a process; `os.pidfd_open` is missing from Pythons built on old systems.

    Raises:
        ProcessLookupError: there is no such process.
        OSError: the kernel is older than 5.3.
    """
    fd = _libc.syscall(_PIDFD_OPEN, pid, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


def enter_namespaces(pid: int) -> None:
    """Enter all namespaces that bubblewrap made around the process `pid`; the next fork is in its pid namespace.

    Raises:
        OSError: the kernel refused, or is older than 5.8.
    """
    pidfd = pidfd_open(pid)
    if _libc.setns(pidfd, _NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")
    os.close(pidfd)


def become_user(uid: int) -> None:
    """Become the user and group `uid`, for good; files in /proc stay this user's own."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up every capability and the way to regain one.

    Raises:
        OSError: the kernel refused.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    if _libc.capset(header, data) != 0:
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")


def forbid_new_privileges() -> None:
    """From now on no program started gains rights (setuid bits are without effect).

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs could not be set")


def apply(tier: Tier, folder: Path) -> None:
    """Confine this process and all that it starts; whatever fails is raised, never passed over.

    Args:
        tier: what to apply. Namespaces of bubblewrap are entered already.
        folder: the sandbox's own folder, the only one to write to under landlock.

    Raises:
        OSError: a step failed.
    """
    if tier is Tier.NONE:
        return
    drop_capabilities()
    forbid_new_privileges()
    if tier is Tier.BUBBLEWRAP:
        seccomp.install(seccomp.in_namespaces())
    elif tier is Tier.LANDLOCK:
        landlock.restrict(folder)
        seccomp.install(seccomp.alone(allow_kill=landlock.abi() >= landlock.ABI_WITH_SCOPES))


def probe(tier: Tier) -> str | None:
    """Try a tier (not bubblewrap) in a child; None if it works, otherwise why not and the cure."""
    if tier is Tier.LANDLOCK and landlock.abi() < 1:
        return "the kernel has no Landlock (Linux 5.13 or newer with lsm=landlock): use a newer kernel"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            apply(tier, Path("/nonexistent"))
            code = 0 if tier is not Tier.LANDLOCK or _is_confined() else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == 0:
        return None
    return "the kernel accepted the rules but they had no effect" if code == 2 else "the kernel refused the rules"


def _is_confined() -> bool:
    try:
        list(Path("/proc/1").iterdir())
    except PermissionError:
        pass
    else:
        return False
    import socket

    try:
        socket.socket(socket.AF_INET).close()
    except PermissionError:
        return True
    return False
