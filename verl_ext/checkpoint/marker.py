"""What makes a checkpoint whole: `complete.json` in it, with size and hash of each of its files.

The marker is written when every other byte is on disk, so a checkpoint without one was never finished. Each rank
hashes the shards that it wrote, on the node where they are still in memory; the process that leads the training hashes
the rest and writes the marker, on its own node.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl_ext.runs import sync_folder, write_whole

MARKER = "complete.json"
_FORMAT = 1
# hashlib lets other threads run; more of them than this wait for the disk.
_HASHED_AT_ONCE = 8


@dataclass(frozen=True)
class SealedFile:
    """One file of a checkpoint as it was written.

    Attributes:
        name: below the checkpoint's folder, with forward slashes.
        bytes: its size.
        sha256: of its bytes, hexadecimal.
        node: name of the machine that wrote it.
    """

    name: str
    bytes: int
    sha256: str
    node: str


@dataclass(frozen=True)
class Marker:
    """The content of `complete.json`.

    Attributes:
        step: the checkpoint's.
        created_s: when it became whole, in seconds since 1970.
        files: all but the marker itself, by name.
    """

    step: int
    created_s: float
    files: tuple[SealedFile, ...]

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.bytes for file in self.files)

    def write(self, folder: Path) -> None:
        """Put the marker into a checkpoint's folder; there, and on disk, or not at all."""
        content = {"format": _FORMAT, "step": self.step, "created_s": self.created_s, "bytes": self.bytes}
        text = json.dumps(content | {"files": [asdict(file) for file in self.files]}, indent=1) + "\n"
        write_whole(folder / MARKER, text)

    @classmethod
    def read(cls, folder: Path) -> Marker | str:
        """The marker of a checkpoint, or why it has none that counts."""
        try:
            content: Any = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            if content["format"] != _FORMAT:
                return f"{MARKER} has format {content['format']!r}, and this version reads {_FORMAT}"
            files = tuple(SealedFile(**file) for file in content["files"])
            return cls(int(content["step"]), float(content["created_s"]), files)
        except FileNotFoundError:
            return f"no {MARKER}: its saving did not end"
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"{MARKER} cannot be read ({error!r})"


def seal_shards(folder: Path, rank: int) -> list[SealedFile]:
    """Size and hash of what one rank wrote (verl names it `..._rank_N.pt`), each forced to the disk first."""
    return seal_files(folder, sorted(folder.glob(f"*/*_rank_{rank}.pt")))


def seal_rest(folder: Path, sealed: Iterable[SealedFile]) -> list[SealedFile]:
    """The same of every file that is not among `sealed`."""
    known = {file.name for file in sealed}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return seal_files(folder, [path for path in paths if path.relative_to(folder).as_posix() not in known])


def seal_files(folder: Path, paths: list[Path]) -> list[SealedFile]:
    """The same of these files, and of the names in their folders."""
    node = socket.gethostname()

    def seal(path: Path) -> SealedFile:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            size = os.fstat(file.fileno()).st_size
            return SealedFile(path.relative_to(folder).as_posix(), size, _sha256(file), node)

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        sealed = list(threads.map(seal, paths))
    for parent in {path.parent for path in paths}:
        sync_folder(parent)
    return sealed


def _sha256(file: Any) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def damages(folder: Path, marker: Marker, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """What is wrong with the files that a marker names, each with its name; reads all of them.

    Args:
        folder: the checkpoint's.
        marker: its marker.
        say: told how far it is, every few seconds.
    """
    done, told_s = 0, time.monotonic()
    found: list[str] = []
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as threads:
        for file, wrong in zip(
            marker.files, threads.map(lambda file: _damage(folder, file), marker.files), strict=True
        ):
            found += [f"{file.name} {wrong}"] if wrong else []
            done += file.bytes
            if time.monotonic() - told_s > 5:
                told_s = time.monotonic()
                say(f"reading {folder.name}: {done / 2**30:.1f} of {marker.bytes / 2**30:.1f} GiB")
    return found


def _damage(folder: Path, file: SealedFile) -> str:
    try:
        with (folder / file.name).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.bytes:
                return f"has {size:,} bytes of the {file.bytes:,} that were written"
            return "" if _sha256(stream) == file.sha256 else "holds other bytes than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error})"
