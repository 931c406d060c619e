"""What the image's entrypoint and the doctor cost: `python tests/bench/bench_start.py` prints a table.

The entrypoint is compared with the bare command, turn by turn, so that a busy machine burdens both.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = [sys.executable, "-I", "-S", str(ROOT / "verl_ext" / "cuda_compat.py"), "exec"]
COMMANDS = {
    "true": (["true"], 40),
    "entrypoint true": ([*ENTRYPOINT, "true"], 40),
    "doctor": ([sys.executable, "-m", "verl_ext.doctor"], 5),
}


def once(command: list[str]) -> float:
    started_s = time.perf_counter()
    subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    return time.perf_counter() - started_s


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for turn in range(max(count for _, count in COMMANDS.values())):
        for name, (command, count) in COMMANDS.items():
            if turn < count:
                times[name].append(once(command))
    print("| command         | median ms | p95 ms |")
    for name, seconds in times.items():
        p95 = sorted(seconds)[int(0.95 * (len(seconds) - 1))]
        print(f"| {name:<15} | {statistics.median(seconds) * 1e3:9.0f} | {p95 * 1e3:6.0f} |")
    added = statistics.median(times["entrypoint true"]) - statistics.median(times["true"])
    print(f"the entrypoint adds {added * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
