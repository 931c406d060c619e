"""Resolves docker/locks/*.in into hash-pinned *.txt files, as the world was on one date: `invoke lock`.

The files name no index, so they install from whichever one a machine is set up for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "docker" / "locks"
AS_OF = "2025-12-15"
# The pair of E2B packages that works with AGS, with local servers and in any event loop is younger than the
# rest; only these may be.
YOUNGER_AS_OF = "2026-11-01"
YOUNGER = (
    "e2b",
    "e2b-code-interpreter",
    "pyqwest",
    "protobuf-py",
    "protobuf-py-ext",
    "h2",
    "hpack",
    "hyperframe",
    "connectrpc",
)
# Order matters: dev, ci and flash-attn-build are constrained by what cpu and gpu came to.
NAMES = ("cpu", "gpu", "dev", "bootstrap", "ci", "flash-attn-build")


def command(uv: str, name: str) -> list[str]:
    """The uv command that makes one lock."""
    younger = [part for package in YOUNGER for part in ("--exclude-newer-package", f"{package}={YOUNGER_AS_OF}")]
    override = ["--override", "overrides.txt"] if name in ("cpu", "gpu") else []
    flags = ["--python", "3.12", "--generate-hashes", "--no-emit-index-url", "--quiet", "--exclude-newer", AS_OF]
    said = ["--custom-compile-command", "invoke lock"]
    return [uv, "pip", "compile", *flags, *younger, *override, *said, f"{name}.in", "-o", f"{name}.txt"]


def main(arguments: Sequence[str]) -> int:
    """Resolve the locks named, or all of them."""
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        sys.stderr.write("uv is missing: python -m pip install --require-hashes -r docker/locks/bootstrap.txt\n")
        return 2
    for name in arguments or NAMES:
        status = subprocess.run(command(uv, name), cwd=LOCKS, check=False).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
