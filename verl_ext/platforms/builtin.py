"""What an image that has verl, vLLM, torch and Ray still lacks, read from the lock of the GPU stack."""

from __future__ import annotations

import re
from pathlib import Path

from verl_ext.installed import normal
from verl_ext.stack import LOCKS

# What TI-ONE's built-in image is named after (verl0.6.1-vllm0.11.0-torch2.8-py312-cuda12.8-gpu; its documentation,
# cloud.tencent.com/document/product/851/128646), and Ray, which runs it.
BROUGHT = ("verl", "vllm", "torch", "ray")
_PACKAGE = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?==([^\s;\\]+)")


def missing_packages(brought: tuple[str, ...] = BROUGHT, lock: Path = LOCKS / "gpu.txt") -> list[str]:
    """NAME==VERSION of every package of the lock that does not come with those, directly or indirectly, and invoke.

    Args:
        brought: packages that are there with all that they need.
        lock: made by uv, with the parents of each package behind "# via".
    """
    versions, parents = _read(lock)
    there = set(brought)
    while more := {name for name in versions if name not in there and parents[name] & there}:
        there |= more
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in there]


def _read(lock: Path) -> tuple[dict[str, str], dict[str, set[str]]]:
    versions: dict[str, str] = {}
    parents: dict[str, set[str]] = {}
    name, within = "", False
    for line in lock.read_text(encoding="utf-8").splitlines():
        if match := _PACKAGE.match(line):
            name, within = normal(match[1]), False
            versions[name], parents[name] = match[2], set()
        elif name and line.strip().startswith("# via"):
            within = True
            parents[name] |= _names(line.strip().removeprefix("# via"))
        elif within and line.strip().startswith("#"):
            parents[name] |= _names(line.strip().removeprefix("#"))
    return versions, parents


def _names(text: str) -> set[str]:
    """The package of a comment; "-r common.in" is none."""
    words = text.strip()
    return set() if not words or words.startswith("-") else {normal(words)}
