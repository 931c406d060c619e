"""Removing the temporary folder, and nothing that somebody mounted into it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)
PREFIX = "verl-sbx-"


def remove_tree(folder: Path) -> None:
    """Remove a folder below one that this server made; one with a mount in it is left, and said so.

    Removing a tree walks through mounts: a bind mount of a real folder would be emptied for everybody.

    Raises:
        ValueError: the folder is not one of this server's.
    """
    if not any(part.startswith(PREFIX) for part in folder.parts):
        raise ValueError(f"{folder} was not made by this server and is not removed")
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [mount for mount in mounts if mount == str(folder) or mount.startswith(f"{folder}/")]
    if inside:
        log.error("%s is left behind because %s is mounted in it: unmount it, then remove the folder", folder, inside)
        return
    shutil.rmtree(folder, ignore_errors=True)
