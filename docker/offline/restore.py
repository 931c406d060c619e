#!/usr/bin/env python3
"""Make a virtual environment from the parts of pack.py, on a machine that reaches no package index.

    python3.12 restore.py PARTS VENV        then: . VENV/activate-offline

Standard library only. The interpreter that runs this becomes the environment's; it must have the minor version of
the packed one. What the machine's own Python has installed stays out: the environment is made from the base
interpreter, without pip, and PYTHONPATH should be empty.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib.metadata
import io
import lzma
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

STUB = """#!{python}
import sys
from {module} import {first}
sys.exit({whole}())
"""


def unpack(member: Path, target: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(member.read_bytes()))) as tar:
        tar.extractall(target, filter="fully_trusted")  # noqa: S202 - what pack.py wrote


def restore(parts: Path, venv: Path) -> Path:
    """Unpack with every core; returns the environment's interpreter."""
    pieces = sorted(parts.glob("c[0-9][0-9]"))
    if not pieces:
        sys.exit(f"no parts in {parts}: pack.py writes c00, c01, ...")
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([base, "-m", "venv", "--without-pip", venv], check=True)
    python = venv / "bin" / "python"
    site = venv / "lib" / base.name / "site-packages"
    with tempfile.TemporaryDirectory(dir=venv) as scratch:
        whole = Path(scratch, "whole.tar")
        with whole.open("wb") as joined:
            for part in pieces:
                joined.write(part.read_bytes())
        with tarfile.open(whole) as outer:
            outer.extractall(scratch, filter="data")
        members = sorted(Path(scratch).glob("*.tar.xz"))
        with concurrent.futures.ProcessPoolExecutor() as pool:
            list(pool.map(unpack, members, [site] * len(members)))
    headers = site / "_include"
    if headers.is_dir():
        headers.rename(venv / "python-headers")
    stamp = site / ".verl-ags-stack"
    if stamp.is_file():
        stamp.rename(venv / stamp.name)
    return python


def write_scripts(venv: Path, python: Path) -> None:
    """The console scripts of the packages, and what to source before use."""
    site = next((venv / "lib").iterdir()) / "site-packages"
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for entry in distribution.entry_points.select(group="console_scripts"):
            if entry.attr:
                script = venv / "bin" / entry.name
                first = entry.attr.split(".")[0]
                text = STUB.format(python=python.absolute(), module=entry.module, first=first, whole=entry.attr)
                script.write_text(text)
                script.chmod(0o755)
    lines = [f"export PATH={venv.absolute() / 'bin'}:$PATH", "unset PYTHONPATH"]
    if (venv / "python-headers").is_dir():
        # Triton compiles its launchers when a model is first run, against the interpreter's headers.
        lines.append(f"export CPATH={venv.absolute() / 'python-headers'}")
    (venv / "activate-offline").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", type=Path)
    parser.add_argument("venv", type=Path)
    arguments = parser.parse_args()
    started_s = time.monotonic()
    python = restore(arguments.parts, arguments.venv.absolute())
    write_scripts(arguments.venv.absolute(), python)
    print(f"{arguments.venv} in {time.monotonic() - started_s:.0f} s; next: . {arguments.venv}/activate-offline")


if __name__ == "__main__":
    main()
