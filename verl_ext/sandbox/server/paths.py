"""Folders of the system and of Python that a sandbox may read."""

from __future__ import annotations

import sys
from pathlib import Path

SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
ETC_PATHS = (
    "/etc/alternatives",
    "/etc/fonts",
    "/etc/group",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/profile",
    "/etc/ssl/certs",
    "/etc/timezone",
)


def python_paths() -> list[Path]:
    """Folders of the Python installation and of the environment's packages.

    A folder that is on the path only because the project is developed in it is left out: it has no business in a
    sandbox, and its neighbour may be a file of secrets.
    """
    paths = [Path(sys.base_prefix), Path(sys.prefix)]
    paths += [Path(entry) for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    kept: list[Path] = []
    for path in sorted({path.resolve() for path in paths if path.is_dir()}):
        if not any(path.is_relative_to(other) for other in (*kept, *map(Path, SYSTEM_PATHS))):
            kept.append(path)
    return kept


def can_others_read(folder: Path) -> bool:
    """Whether any user can enter `folder`."""
    return all(one.stat().st_mode & 0o005 == 0o005 for one in (folder, *folder.parents))
