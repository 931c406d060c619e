"""What a run took of this machine's GPUs, held against what was computed before it: one nvidia-smi beside the run.

verl's own perf/max_memory_* is no measure of it: torch counts what the sleeping engine has given back (0.6.1 with vLLM
0.11.0 says 186 GB on a card of 150, recipe/retool/LOG.md).
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Iterator, Sequence

from verl_ext.gpu_memory import GpuMemory
from verl_ext.gpus import Gpu

_LOOK_EVERY_MS = 500


@contextlib.contextmanager
def watch_memory(gpus: Sequence[Gpu]) -> Iterator[dict[int, float]]:
    """Inside, the highest use so far of each GPU in GiB, by its index; {} while nvidia-smi has said nothing.

    Another program's use is in it. A peak shorter than half a second may be missed.
    """
    highest: dict[int, float] = {}
    if not gpus:
        yield highest
        return
    command = ["nvidia-smi", f"--id={','.join(str(gpu.index) for gpu in gpus)}", "--query-gpu=index,memory.used",
               "--format=csv,noheader,nounits", f"--loop-ms={_LOOK_EVERY_MS}"]  # fmt: skip
    try:
        watching = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    except OSError:
        yield highest
        return
    with watching:
        lines = watching.stdout or ()
        reader = threading.Thread(target=_follow, args=(lines, highest), name="GPU memory", daemon=True)
        reader.start()
        try:
            yield highest
        finally:
            watching.kill()
            reader.join()


def _follow(lines: Iterable[str], highest: dict[int, float]) -> None:
    for line in lines:
        try:
            index, used_mib = line.split(",")
            highest[int(index)] = max(highest.get(int(index), 0.0), float(used_mib) / 1024)
        except ValueError:
            continue  # "[N/A]" where MIG is on, or a driver that failed


def compared(highest: dict[int, float], computed: GpuMemory | None) -> str:
    """One line for the user; "" if nothing was measured."""
    if not highest:
        return ""
    index, gib = max(highest.items(), key=lambda item: item[1])
    text = f"GPU memory: {gib:.1f} GiB at the highest, on GPU {index}"
    if computed is None:
        return text
    phase = max(computed.phases, key=lambda phase: phase.total_gib)
    return f"{text}; {phase.total_gib:.1f} of {computed.card_gib:.1f} were computed, for {phase.name}"
