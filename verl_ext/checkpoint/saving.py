"""One save: room looked for, written out of sight, sealed by every rank, named, and the oldest one retired."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_ext.checkpoint.folder import CheckpointFolder, name_of
from verl_ext.checkpoint.marker import Marker, SealedFile, seal_rest
from verl_ext.errors import CheckpointError

# Of what the arithmetic or the last checkpoint says: file headers, a tokenizer, blocks of the file system.
_ROOM = 1.02
_FULL_BYTES = 2**20  # a disk with less is called full, whatever the library said that met it
_FULL_WORDS = ("no space left", "quota exceeded")


@dataclass(frozen=True)
class Saved:
    """What a save came to.

    Attributes:
        bytes: of the checkpoint.
        write_s, seal_s: seconds for verl's own saving, and for forcing it to the disk and hashing it.
        retired: steps whose checkpoints are gone.
    """

    bytes: int
    write_s: float
    seal_s: float
    retired: tuple[int, ...]


def save(
    step: int,
    folder: CheckpointFolder,
    *,
    write: Callable[[Path], None],
    seal_ranks: Callable[[Path], Sequence[Sequence[SealedFile]]],
    keep: int | None,
    expected_bytes: int | None,
) -> Saved:
    """Save one checkpoint; it is whole when this returns, and nothing of it is there if this raises.

    Args:
        step: its step.
        folder: of the run's checkpoints.
        write: verl's own saving, below the folder that it is given.
        seal_ranks: what each rank wrote below the checkpoint's folder, sealed on its own node.
        keep: whole checkpoints to keep, None for all.
        expected_bytes: its size, as far as known.

    Raises:
        CheckpointError: the disk is full, or a rank's files are not to be seen here.
    """
    folder.begin()
    folder.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.root).free
    if expected_bytes is not None and free < expected_bytes * _ROOM:
        raise CheckpointError(_no_room(step, folder, int(expected_bytes * _ROOM), free))
    started_s = time.monotonic()
    try:
        write(folder.saving)
        written_s = time.monotonic()
        marker = _sealed(step, folder.saving / name_of(step), seal_ranks)
    except Exception as error:
        free, written = shutil.disk_usage(folder.root).free, _bytes_in(folder.saving)
        folder.begin()
        if free < _FULL_BYTES or any(word in str(error).lower() for word in _FULL_WORDS):
            need = max(expected_bytes or 0, written + 1)
            raise CheckpointError(_no_room(step, folder, need, free + written)) from error
        raise
    folder.publish(marker)
    retired = folder.retire(keep)
    return Saved(marker.bytes, written_s - started_s, time.monotonic() - written_s, tuple(retired))


def _sealed(step: int, scratch: Path, seal_ranks: Callable[[Path], Sequence[Sequence[SealedFile]]]) -> Marker:
    ranks = seal_ranks(scratch)
    here = socket.gethostname()
    for rank, files in enumerate(ranks):
        if not files:
            raise CheckpointError(f"rank {rank} wrote no file of the checkpoint of step {step} to {scratch}")
        for file in files:
            if not (scratch / file.name).is_file():
                raise CheckpointError(
                    f"{file.name} of step {step} was written on {file.node} and is not to be seen on {here}, where "
                    f"checkpoints are made whole: {scratch.parents[1]} is not shared between the nodes. {SHARE}"
                )
    shards = [file for files in ranks for file in files]
    return Marker(step, time.time(), (*shards, *seal_rest(scratch, shards)))


SHARE = (
    "Put VERL_EXT_DATA_ROOT (or trainer.default_local_dir) on storage that all nodes share, or train without "
    "checkpoints: trainer.save_freq=-1"
)


def _no_room(step: int, folder: CheckpointFolder, need: int, free: int) -> str:
    whole = folder.newest_whole()
    kept = f"the checkpoint of step {whole[1].step} is whole" if whole else "no older checkpoint is there"
    return (
        f"the disk is full: the checkpoint of step {step} needs {_size(need)}, and {folder.root} has {_size(free)} "
        f"free; {kept}. Free {_size(max(1, need - free))} there, or give a larger disk with VERL_EXT_DATA_ROOT or "
        "trainer.default_local_dir, then go on with `invoke train --resume`"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def _bytes_in(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
