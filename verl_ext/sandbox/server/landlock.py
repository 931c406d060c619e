"""Landlock rules for one sandbox, by the three system calls (they have the same numbers everywhere).

Covered: reading and running only what a Python program needs of the system; writing only in one folder; TCP from
ABI 4; signals and abstract Unix sockets beyond the sandbox from ABI 6; tracing and /proc/PID/environ of others.
Not covered: metadata (stat works on any path), chdir, and pathname Unix sockets: seccomp refuses connect().
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from .paths import ETC_PATHS, SYSTEM_PATHS, python_paths

ABI_WITH_SCOPES = 6
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_BASE_ACCESS = (1 << 13) - 1
_NET_BIND_AND_CONNECT = 3
_SCOPE_ABSTRACT_UNIX_AND_SIGNAL = 3
_READ = _READ_FILE | _READ_DIR
_FILE_ACCESS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV

_PROC_PATHS = ("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/uptime", "/proc/loadavg", "/proc/filesystems")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The version of Landlock that the kernel speaks, 0 if none."""
    return max(0, _libc.syscall(_CREATE, None, 0, _VERSION_FLAG))


def restrict(folder: Path) -> None:
    """Confine this process to `folder` for writing; no_new_privs must be set.

    Raises:
        OSError: the kernel refused.
    """
    version = abi()
    access = _BASE_ACCESS
    access |= _REFER if version >= 2 else 0
    access |= _TRUNCATE if version >= 3 else 0
    access |= _IOCTL_DEV if version >= 5 else 0
    attributes = struct.pack("Q", access)
    if version >= 4:
        attributes += struct.pack("Q", _NET_BIND_AND_CONNECT)
    if version >= ABI_WITH_SCOPES:
        attributes += struct.pack("Q", _SCOPE_ABSTRACT_UNIX_AND_SIGNAL)
    ruleset = _checked(_libc.syscall(_CREATE, attributes, len(attributes), 0))
    readable = [*SYSTEM_PATHS, *ETC_PATHS, *_PROC_PATHS, *map(str, python_paths())]
    for path in readable:
        _allow(ruleset, path, access & (_READ | _EXECUTE))
    for path in _DEVICES:
        _allow(ruleset, path, access & (_READ_FILE | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV))
    _allow(ruleset, str(folder), access)
    _checked(_libc.syscall(_RESTRICT, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not Path(path).is_dir():
            access &= _FILE_ACCESS
        rule = struct.pack("=Qi", access, fd)
        _checked(_libc.syscall(_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(fd)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock refused a rule")
    return result
