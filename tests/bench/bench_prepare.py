"""Preparing data of any size: this project's command beside `datasets`, in one run.

    python tests/bench/bench_prepare.py --source DAPO.parquet --val AIME.parquet [--rows 10000 100000 1791700]

The input is made from real rows: repeated, in a fixed random order, each with an id of its own, as in the hub's file.
Each measurement is a process of its own; what it used is the kernel's count for it and its children. On a machine
that others use, compare processor seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
# What a user would write: load, one map that strips the wrapper, and a set to find duplicates.
WITH_DATASETS = """
import sys
import datasets
datasets.disable_progress_bars()
rows = datasets.load_dataset("parquet", data_files=sys.argv[1], split="train", cache_dir=sys.argv[2])

def strip(row):
    text = row["prompt"][0]["content"]
    start, end = text.find("\\n\\n") + 2, text.rfind("\\n\\n")
    return {"question": " ".join(text[start:end].split()), "answer": row["reward_model"]["ground_truth"]}

rows = rows.map(strip, num_proc=2)
seen = set()
keep = []
for at, question in enumerate(rows["question"]):
    if question not in seen:
        seen.add(question)
        keep.append(at)
rows.select(keep).to_parquet(sys.argv[3])
print(len(keep))
"""


@dataclass(frozen=True)
class Cost:
    """What a process and its children used."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    kept: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="DAPO-Math-17k rows, any number of them")
    parser.add_argument("--val", type=Path, required=True, help="AIME 2024")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_791_700])
    parser.add_argument("--datasets-rows", type=int, nargs="*", help="sizes for `datasets`; default: the same")
    options = parser.parse_args()
    table = Table("rows", "file MB", "", "wall s", "processor s", "peak MiB", "kept", title="Preparing DAPO-Math-17k")
    for column in table.columns[3:]:
        column.justify = "right"
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as scratch:
        folder = Path(scratch)
        for rows in options.rows:
            file = folder / f"{rows}.parquet"
            repeat(options.source, rows, file)
            size = f"{file.stat().st_size / 1e6:.0f}"
            out = str(folder / "out")
            command = [
                "-m",
                "recipe.retool.prepare_data",
                "--train",
                str(file),
                "--val",
                str(options.val),
                "--out",
                out,
            ]
            add(table, rows, size, "prepare-data", measured(command, kept="rows kept"))
            if rows in (options.rows if options.datasets_rows is None else options.datasets_rows):
                cache = folder / f"cache-{rows}"
                command = ["-c", WITH_DATASETS, str(file), str(cache), str(folder / "datasets.parquet")]
                add(table, rows, size, "datasets", measured(command))
            file.unlink()
    Console(width=110).print(table)
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} at the end")


def repeat(source: Path, rows: int, to: Path) -> None:
    """`rows` rows in a fixed random order, in pieces, so that making the file needs no more memory than reading it."""
    original = pq.read_table(source)
    order = np.random.default_rng(1).permutation(rows) % original.num_rows
    with pq.ParquetWriter(to, original.schema) as writer:
        for start in range(0, rows, 100_000):
            piece = original.take(pa.array(order[start : start + 100_000]))
            ids = pa.array([f"{number:08x}-0000-4000-8000-000000000000" for number in range(start, start + len(piece))])
            place = piece.schema.get_field_index("extra_info")
            piece = piece.set_column(place, "extra_info", pa.StructArray.from_arrays([ids], ["index"]))
            writer.write_table(piece.cast(original.schema))


def measured(command: list[str], kept: str = "") -> Cost:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    peak = Peak(process.pid)
    output = peak.follow(process)
    wall_s = time.monotonic() - started_s
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise SystemExit(f"{command[:2]} ended with {process.returncode}:\n{output}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    last = output.strip().splitlines()[-1]
    if kept:
        last = next(line for line in output.splitlines() if kept in line).split("│")[2].strip()
    return Cost(wall_s, cpu_s, peak.mib, last)


class Peak:
    """The most memory that a process and its children had at once (PSS: shared pages counted once)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.mib = 0.0

    def follow(self, process: subprocess.Popen[str]) -> str:
        while True:
            try:
                return process.communicate(timeout=0.2)[0]
            except subprocess.TimeoutExpired:
                self.mib = max(self.mib, sum(self._pss_kib(pid) for pid in self._tree(self._pid)) / 1024)

    def _tree(self, pid: int) -> list[int]:
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return []
        return [pid, *(one for child in children for one in self._tree(int(child)))]

    def _pss_kib(self, pid: int) -> int:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)


def add(table: Table, rows: int, size: str, name: str, cost: Cost) -> None:
    table.add_row(f"{rows:,}", size, name, f"{cost.wall_s:.1f}", f"{cost.cpu_s:.1f}", f"{cost.peak_mib:.0f}", cost.kept)


if __name__ == "__main__":
    main()
