"""docker/offline: what is packed here is there after the restore, machine code for other GPUs aside."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType

OFFLINE = Path(__file__).parents[2] / "docker" / "offline"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, OFFLINE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """A container with entries of (kind, arch, payload)."""
    body = b""
    for kind, arch, payload in entries:
        head = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)).ljust(28, b"h") + struct.pack("<I", arch)
        body += head.ljust(64, b"h") + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_one_architecture_stays_and_nothing_moves() -> None:
    pack = load("pack")
    ptx, elf = pack.PTX, pack.ELF
    other = b"\x50\xed\x55\xba no container at all"
    before = other + fatbin((elf, 80, b"A" * 8), (elf, 90, b"B" * 8), (ptx, 90, b"C" * 8)) + other
    after = bytearray(before)
    assert pack.keep_one_arch(after, 90) == 16
    assert bytes(after) == before.replace(b"A" * 8, bytes(8)).replace(b"C" * 8, bytes(8))


def test_a_packed_environment_works_after_the_restore(tmp_path: Path) -> None:
    site = tmp_path / "venv" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    package, info = site / "greet", site / "greet-1.0.dist-info"
    (package / "tests").mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").write_text("class program:\n    run = staticmethod(lambda: print('hello') or 3)\n")
    (package / "tests" / "big.py").write_text("")
    (package / "extra.h").write_text("")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ngreet = greet:program.run\n")
    (tmp_path / "venv" / ".verl-ags-stack").write_text("gpu 1234")
    parts, there = tmp_path / "parts", tmp_path / "there"
    subprocess.run([sys.executable, OFFLINE / "pack.py", tmp_path / "venv", parts, "--jobs", "1"], check=True)
    subprocess.run([sys.executable, OFFLINE / "restore.py", parts, there], check=True)
    done = subprocess.run(["bash", "-c", f". {there}/activate-offline && greet"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (3, b"hello\n")
    assert (there / ".verl-ags-stack").read_text() == "gpu 1234"
    left = {path.name for path in (there / "lib").rglob("greet/**/*")}
    assert not left & {"big.py", "extra.h"}


def test_no_environment_and_no_parts_are_said(tmp_path: Path) -> None:
    for script, arguments in (("pack", ["nowhere", "out"]), ("restore", ["nowhere", "there"])):
        done = subprocess.run(
            [sys.executable, OFFLINE / f"{script}.py", *arguments], cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "nowhere" in done.stderr
        assert "Traceback" not in done.stderr
