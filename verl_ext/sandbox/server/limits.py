"""What one sandbox may use, and how the process puts the limits on itself."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of one sandbox.

    Attributes:
        memory_mib: address space that one process may add to what it starts with (RLIMIT_AS). The sum over the
            processes of a sandbox is measured every second and the sandbox ended beyond twice this.
        cpu_s: CPU seconds of one process (RLIMIT_CPU), then it is killed.
        file_mib: size of one file (RLIMIT_FSIZE) and, under bubblewrap, of /tmp and of home (tmpfs).
        max_processes: processes of one sandbox: RLIMIT_NPROC where the kernel counts per sandbox, and a count
            every second in any case.
        max_open_files: descriptors of one process (RLIMIT_NOFILE).
    """

    memory_mib: int = 1024
    cpu_s: int = 600
    file_mib: int = 256
    max_processes: int = 64
    max_open_files: int = 1024

    def as_dict(self) -> dict[str, Any]:
        """The limits as JSON carries them."""
        return asdict(self)


def apply(limits: Limits, *, count_processes: bool) -> None:
    """Put `limits` on this process and all it starts.

    Args:
        limits: what to apply.
        count_processes: set RLIMIT_NPROC. It counts per user, so only a user of the sandbox's own makes sense.
    """
    address_space = _address_space_bytes() + limits.memory_mib * MIB
    values = {
        resource.RLIMIT_AS: address_space,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_mib * MIB,
        resource.RLIMIT_NOFILE: limits.max_open_files,
        resource.RLIMIT_CORE: 0,
    }
    if count_processes:
        values[resource.RLIMIT_NPROC] = limits.max_processes
    for kind, value in values.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    os.nice(5)


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
