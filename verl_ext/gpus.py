"""The GPUs of this machine, as nvidia-smi names them: no torch, no CUDA context, a tenth of a second."""

from __future__ import annotations

import csv
import subprocess
from dataclasses import dataclass

from verl_ext.settings import foreign

_QUERY = ("index", "uuid", "name", "memory.total", "memory.used")


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        memory_gib: as the driver counts it, about half a GiB more than CUDA does.
        used_gib: taken by anybody's processes.
    """

    index: int
    name: str
    memory_gib: float
    used_gib: float


def visible_gpus() -> list[Gpu]:
    """The GPUs that a process started here would see, [] without a driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = {}
    for row in csv.reader(answer.splitlines(), skipinitialspace=True):
        try:
            index, uuid, name, total_mib, used_mib = row
            rows[index] = rows[uuid] = Gpu(int(index), name, float(total_mib) / 1024, float(used_mib) / 1024)
        except ValueError:
            continue  # "[N/A]" where MIG is on, or a driver that failed
    wanted = foreign("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return sorted(set(rows.values()), key=lambda gpu: gpu.index)
    found: list[Gpu] = []
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if name not in rows:
            break  # as CUDA does: what comes after a device that there is not is not seen
        found.append(rows[name])
    return found
