"""The folder of a run's checkpoints: what is in it is whole, or has a name that nobody takes for a checkpoint.

checkpoints/
    global_step_30/                     whole: it was renamed to this when its marker was on disk
    global_step_60/
    latest_checkpointed_iteration.txt   verl's pointer; names a whole one, replaced in one step
    .saving/global_step_90/             being written, or left by a run that died in it
    damaged-global_step_60/             was whole once; a run that resumed found it damaged

The rule of what is kept: the newest `trainer.max_actor_ckpt_to_keep` whole ones (2; null for all). An older one goes
when the new one is whole and the pointer names it, so while one is saved there is one more on disk.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl_ext.checkpoint.marker import Marker, damages
from verl_ext.runs import sync_folder, write_whole

POINTER = "latest_checkpointed_iteration.txt"  # verl 0.6.1 utils/checkpoint/checkpoint_manager.py
_SAVING = ".saving"
_DAMAGED = "damaged-"
_NAME = re.compile(r"global_step_(\d+)")


def name_of(step: int) -> str:
    """verl's name of the checkpoint of a step."""
    return f"global_step_{step}"


@dataclass(frozen=True)
class Passed:
    """A checkpoint that cannot be resumed from.

    Attributes:
        step: its step.
        folder: where it is.
        why: what is missing or damaged, with the names of the files.
    """

    step: int
    folder: Path
    why: tuple[str, ...]

    def __str__(self) -> str:
        shown = "; ".join(self.why[:3]) + (f"; and {len(self.why) - 3} more" if len(self.why) > 3 else "")
        return f"step {self.step} ({self.folder}): {shown}"


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint, and the newer ones that were passed over."""

    folder: Path | None
    marker: Marker | None
    passed: tuple[Passed, ...]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        root: `trainer.default_local_dir`. On several nodes it must be storage that all of them share.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def saving(self) -> Path:
        """What verl is given in place of `trainer.default_local_dir` while it saves."""
        return self.root / _SAVING

    def begin(self) -> None:
        """Remove what a save that did not end has left."""
        shutil.rmtree(self.saving, ignore_errors=True)

    def publish(self, marker: Marker) -> Path:
        """Give the finished save its name and point to it; the marker goes last into its folder."""
        scratch, folder = self.saving / name_of(marker.step), self.root / name_of(marker.step)
        marker.write(scratch)
        if folder.exists():  # not whole, or from before a run went back
            self._remove(folder)
        scratch.rename(folder)
        sync_folder(self.root)
        write_whole(self.root / POINTER, f"{marker.step}")
        self.begin()
        return folder

    def retire(self, keep: int | None) -> list[int]:
        """Remove the oldest whole checkpoints until `keep` are left (None: none goes); their steps."""
        steps = [step for step, _, marker in self._newest_first() if isinstance(marker, Marker)]
        old = steps[keep:] if keep else []
        for step in reversed(old):
            self._remove(self.root / name_of(step))
        return old

    def _remove(self, folder: Path) -> None:
        """Out of sight in one step, then from the disk: never a checkpoint with half of its files."""
        self.saving.mkdir(parents=True, exist_ok=True)
        gone = self.saving / f"old-{folder.name}"
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty: a save goes on
            self.saving.rmdir()

    def newest_whole(self) -> tuple[Path, Marker] | None:
        """The newest checkpoint with a marker; its bytes are not looked at."""
        return next(
            ((folder, marker) for _, folder, marker in self._newest_first() if isinstance(marker, Marker)), None
        )

    def find(self, say: Callable[[str], None] = lambda _: None) -> Found:
        """The newest checkpoint whose every byte is as it was written."""
        passed = [Passed(step, folder, ("its saving did not end",)) for step, folder in self._unfinished()]
        for step, folder, marker in self._newest_first():
            wrong = [marker] if isinstance(marker, str) else damages(folder, marker, say)
            if not wrong and isinstance(marker, Marker):
                newer = sorted((one for one in passed if one.step > step), key=lambda one: -one.step)
                return Found(folder, marker, tuple(newer))
            passed.append(Passed(step, folder, tuple(wrong)))
        return Found(None, None, tuple(sorted(passed, key=lambda one: -one.step)))

    def put_aside(self, passed: Passed) -> Path:
        """Rename a damaged checkpoint, so that it neither counts as kept nor is taken for whole; its new name."""
        if passed.folder.parent == self.saving:
            self.begin()
            return passed.folder
        aside = self.root / f"{_DAMAGED}{passed.folder.name}"
        shutil.rmtree(aside, ignore_errors=True)
        passed.folder.rename(aside)
        return aside

    def point_to(self, step: int) -> None:
        """Let verl's pointer name a whole checkpoint."""
        write_whole(self.root / POINTER, f"{step}")

    def _newest_first(self) -> list[tuple[int, Path, Marker | str]]:
        return [(step, folder, Marker.read(folder)) for step, folder in _steps(self.root)]

    def _unfinished(self) -> list[tuple[int, Path]]:
        return _steps(self.saving)


def _steps(root: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in root.glob("global_step_*") if (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in found if path.is_dir()), reverse=True)
