"""What it costs that a checkpoint is whole: `python tests/bench/bench_checkpoints.py --mib 256 1024 --folder FOLDER`.

Shards of made-up weights and moments, as verl writes them, one thread a rank. "verl" is verl's own way: torch.save and
nothing more, so that what is not on disk yet is not counted. "ours" writes the same out of sight, forces it to the
disk, hashes it and names it; both in turn, in one run. Reading back: every byte hashed before a run goes on, then
torch.load.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import on_path  # noqa: F401
import torch

from verl_ext.checkpoint.folder import CheckpointFolder, name_of
from verl_ext.checkpoint.marker import seal_shards
from verl_ext.checkpoint.saving import save


def write(root: Path, step: int, mib: int, ranks: int) -> None:
    """Weights and two moments in float32, a third each, split over the ranks."""
    actor = root / name_of(step) / "actor"
    actor.mkdir(parents=True)
    numbers = torch.randn(mib * 2**18 // 3 // ranks)

    def of_rank(rank: int) -> None:
        torch.save({"w": numbers}, actor / f"model_world_size_{ranks}_rank_{rank}.pt")
        torch.save({"m": numbers, "v": numbers.clone()}, actor / f"optim_world_size_{ranks}_rank_{rank}.pt")

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(of_rank, range(ranks)))


def seconds(action: Callable[[], object]) -> float:
    """How long it takes."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def measure(root: Path, mib: int, ranks: int, rounds: int) -> None:
    """Print one row."""
    rows: dict[str, list[float]] = {name: [] for name in ("verl", "write", "seal", "verify", "load")}
    theirs, folder = root / "verl", CheckpointFolder(root / "ours")
    for step in range(1, rounds + 1):
        rows["verl"].append(seconds(lambda step=step: write(theirs, step, mib, ranks)))
        shutil.rmtree(theirs / name_of(step))

        def seal(scratch: Path) -> list:
            with ThreadPoolExecutor(ranks) as threads:
                return list(threads.map(lambda rank: seal_shards(scratch, rank), range(ranks)))

        saved = save(
            step,
            folder,
            write=lambda scratch, step=step: write(scratch, step, mib, ranks),
            seal_ranks=seal,
            keep=1,
            expected_bytes=None,
        )
        rows["write"].append(saved.write_s)
        rows["seal"].append(saved.seal_s)
        rows["verify"].append(seconds(folder.find))
        shards = sorted((folder.root / name_of(step)).rglob("*.pt"))
        rows["load"].append(seconds(lambda shards=shards: [torch.load(path) for path in shards]))
    middle = {name: statistics.median(values) for name, values in rows.items()}
    numbers = [middle["verl"], middle["write"], middle["seal"], middle["verify"], middle["load"]]
    print(f"| {saved.bytes:,} | {ranks} | " + " | ".join(f"{value:.2f}" for value in numbers) + " |")


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description="What whole checkpoints cost.")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, default=None, help="on the disk that is meant; default: the temporary one"
    )
    options = parser.parse_args()
    print("| bytes | ranks | verl's save s | our write s | + seal s | verify s | torch.load s |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for mib in options.mib:
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.folder) as root:
            measure(Path(root), mib, options.ranks, options.rounds)


if __name__ == "__main__":
    main()
