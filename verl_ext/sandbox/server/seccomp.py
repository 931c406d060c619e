"""A seccomp filter as a classic BPF program: everything is allowed but a list of system calls.

Covered: tracing and memory of other processes, mounts, namespaces, modules, keyrings, BPF, io_uring, clocks,
system calls of another architecture; with `alone` also all sockets but Unix ones and connecting or sending those.
Not covered: anything that is not a system call of the list; files (Landlock or the mount namespace do that).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
from dataclasses import dataclass, field

_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGS = 0, 4, 16
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_NEW_NAMESPACES = 0x7E020080
_X32_BIT = 0x40000000

# name: (x86_64, aarch64); None where the architecture lacks it.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "clone": (56, 220), "clone3": (435, 435),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "syslog": (103, 116), "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58),
    "iopl": (172, None), "ioperm": (173, None), "prlimit64": (302, 261),
}  # fmt: skip
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_SPECIAL = {"socket", "connect", "clone", "clone3", "kill", "prlimit64"}
_SIGNALS = ("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")


@dataclass(frozen=True)
class Rules:
    """What a filter refuses.

    Attributes:
        denied: names of system calls that fail with EPERM.
        only_unix_sockets: refuse all other sockets, Unix datagrams, and connect().
        allow_kill: leave kill() alone; otherwise only the own process group can be signalled.
    """

    denied: tuple[str, ...] = field(default_factory=lambda: tuple(n for n in _NUMBERS if n not in _SPECIAL))
    only_unix_sockets: bool = False
    allow_kill: bool = True


def in_namespaces() -> Rules:
    """For a process behind bubblewrap, whose network and processes are its own."""
    return Rules(denied=tuple(name for name in Rules().denied if name not in _SIGNALS))


def alone(*, allow_kill: bool) -> Rules:
    """For a process that shares the network and the process table with the machine."""
    denied = tuple(name for name in Rules().denied if name not in _SIGNALS or not allow_kill)
    return Rules(denied=denied, only_unix_sockets=True, allow_kill=allow_kill)


def install(rules: Rules) -> None:
    """Filter this process and all that it starts; no_new_privs must be set.

    Raises:
        OSError: the architecture is unknown to this file, or the kernel refused.
    """
    code = program(rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    prog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.c_char_p(prog), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refused the seccomp filter")


def program(rules: Rules) -> bytes:
    """The BPF program for `rules` on this machine."""
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no seccomp filter is known for {machine}: use x86_64 or aarch64")
    column, arch = _ARCHITECTURES[machine]
    eperm, enosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [_op(_LD, _OFFSET_ARCH), _op(_JEQ, arch, 1, 0), _op(_RET, _KILL), _op(_LD, _OFFSET_NUMBER)]
    if machine == "x86_64":
        code += [_op(_JGE, _X32_BIT, 0, 1), _op(_RET, eperm)]

    def number(name: str) -> int | None:
        return _NUMBERS[name][column]

    def on_call(name: str, body: list[bytes]) -> None:
        nonlocal code
        value = number(name)
        if value is not None:
            body = [*body, _op(_RET, _ALLOW)]
            code += [_op(_JEQ, value, 0, len(body)), *body]

    for name in rules.denied:
        on_call(name, [_op(_RET, eperm)])
    on_call("clone3", [_op(_RET, enosys)])
    on_call("clone", [_load(0), _op(_JSET, _NEW_NAMESPACES, 0, 1), _op(_RET, eperm)])
    on_call("prlimit64", [_load(0), _op(_JEQ, 0, 1, 0), _op(_RET, eperm)])
    if rules.only_unix_sockets:
        stream_only = [
            _load(0), _op(_JEQ, socket.AF_UNIX, 1, 0), _op(_RET, eperm),
            _load(1), _op(_JSET, 0xF & ~socket.SOCK_STREAM, 0, 1), _op(_RET, eperm),
        ]  # fmt: skip
        on_call("socket", stream_only)
        on_call("connect", [_op(_RET, eperm)])
    if not rules.allow_kill:
        on_call("kill", [_load(0), _op(_JEQ, 0, 2, 0), _op(_JEQ, os.getpid(), 1, 0), _op(_RET, eperm)])
    code.append(_op(_RET, _ALLOW))
    return b"".join(code)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value & 0xFFFFFFFF)


def _load(argument: int) -> bytes:
    return _op(_LD, _OFFSET_ARGS + 8 * argument)
