"""What each crash of a run cost: `python tests/bench/bench_faults.py RUN`, RUN being its folder.

From what the attempts of the run left. tests/e2e/test_faults.py and tests/cluster make such runs: the folder `hurt`
below pytest's data root was killed in a checkpoint, in a rollout, in an update, and with its driver, in this order.
`work` is what was done after the last whole checkpoint, and so at most the time between two; `back` is from the next
attempt's start to its first new step, of which `start` went by before the checkpoint was loaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import on_path  # noqa: F401

from verl_ext.resumption import LOST
from verl_ext.runs import ATTEMPTS, METRICS, PHASES, read_jsonl


def row(run_dir: Path, number: int) -> str:
    """One crash."""
    lost = json.loads((run_dir / ATTEMPTS / str(number) / LOST).read_text())
    after = run_dir / ATTEMPTS / str(number + 1)
    after = after if after.is_dir() else run_dir
    phases = read_jsonl(after / PHASES)
    began_s = phases[0]["time_s"]
    loaded = next((entry["time_s"] - began_s for entry in phases if "is loaded" in entry["phase"]), float("nan"))
    ends = [entry["time_s"] for folder in (run_dir, after) for entry in read_jsonl(folder / METRICS)]
    back = min((time_s - began_s for time_s in ends if time_s > began_s), default=float("nan"))
    steps = max(0, lost["last_step"] - lost["first_step"] + 1)
    numbers = f"{lost['from_step']} | {steps} | {lost['trajectories']} | {lost['work_s']:.0f}"
    return f"| {number} | {numbers} | {loaded:.0f} | {back:.0f} | {lost['work_s'] + back:.0f} |"


def main() -> None:
    """Print one line a crash."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the run's folder")
    run_dir = parser.parse_args().run
    print("| crash | goes on from step | steps | trajectories | work s | start s | back s | lost s |")
    print("|---|---|---|---|---|---|---|---|")
    for number in sorted(int(path.name) for path in (run_dir / ATTEMPTS).iterdir()):
        print(row(run_dir, number))


if __name__ == "__main__":
    main()
