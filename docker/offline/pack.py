#!/usr/bin/env python3
"""Pack an environment's site-packages into small parts, for a GPU machine that reaches no package index.

    python3.12 pack.py VENV OUT [--arch 90] [--part-mb 58]       then carry OUT there and run restore.py

The CUDA stack is about 10 GB installed, most of it machine code for GPUs other than the one at hand. In every shared
library over 1 MiB the fatbin containers (magic 0xBA55ED50) are walked, and the payload of each cubin of another
architecture, and of all PTX, is overwritten with zeros: headers stay, so the driver still finds the entry that it
wants, and zeros compress to nothing. VENV itself is not touched. The result runs on the one architecture only: it
is for trying the stack, never for an image. Standard library only.

Source: the fatbin layout as cuobjdump shows it for CUDA 12.8 libraries; measured 10 GB -> 1.6 GB for sm_90.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fnmatch
import io
import lzma
import os
import struct
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, ELF = 1, 2
# Headers are left out but for what is compiled against while a model runs: Triton's launchers, torch extensions.
HEADER_SUFFIXES = (".h", ".hpp", ".cuh", ".inl")
HEADERS_KEPT = ("triton/*", "torch/*")
# Installed by the lock, not needed to train; cuDNN's engines are for convolutions.
LEFT_OUT = (
    "*.a", "*.pyc", "*.pyi", "*/__pycache__/*", "*/tests/*", "*/test/*",
    "cupy*", "xformers*", "debugpy*", "pycountry*", "wandb*", "pyright*", "nodejs*", "ruff*",
    "nvidia/cuda_nvcc/*", "nvidia/cudnn/lib/libcudnn_engines_*", "nvidia/cudnn/lib/libcudnn_adv*",
    "nvidia/cudnn/lib/libcudnn_heuristic*",
    "triton/backends/nvidia/bin/cuobjdump", "triton/backends/nvidia/bin/nvdisasm",
)  # fmt: skip
ALONE_BYTES = 40 << 20
BATCH_BYTES = 150 << 20


def keep_one_arch(blob: bytearray, arch: int) -> int:
    """Zero every fatbin payload in `blob` that is not machine code for `arch`; returns bytes zeroed."""
    zeroed, at = 0, blob.find(MAGIC)
    while at != -1:
        version, header_size, size = struct.unpack_from("<HHQ", blob, at + 4)
        if version != 1 or header_size != 16 or at + 16 + size > len(blob):
            at = blob.find(MAGIC, at + 4)
            continue
        entry, end = at + 16, at + 16 + size
        while entry + 64 <= end:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", blob, entry)
            if kind not in (PTX, ELF) or entry_header < 32 or entry + entry_header + payload > end:
                break
            (entry_arch,) = struct.unpack_from("<I", blob, entry + 28)
            if kind == PTX or entry_arch != arch:
                blob[entry + entry_header : entry + entry_header + payload] = bytes(payload)
                zeroed += payload
            entry += entry_header + payload
        at = blob.find(MAGIC, end)
    return zeroed


def files_of(site: Path) -> Iterator[tuple[Path, str]]:
    """What is packed, with the name that it gets."""
    for folder, _, names in os.walk(site):
        for name in names:
            path = Path(folder, name)
            relative = str(path.relative_to(site))
            if any(fnmatch.fnmatch(relative, pattern) for pattern in LEFT_OUT):
                continue
            is_header = name.endswith(HEADER_SUFFIXES)
            if not is_header or any(fnmatch.fnmatch(relative, pattern) for pattern in HEADERS_KEPT):
                yield path, relative
    headers = Path(sysconfig.get_paths()["include"])
    for path in headers.rglob("*.h"):
        yield path, f"_include/{path.relative_to(headers)}"


def pack_batch(job: tuple[list[tuple[Path, str]], int]) -> bytes:
    items, arch = job
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for path, name in items:
            if path.is_symlink():
                tar.add(path, name, recursive=False)
                continue
            blob = bytearray(path.read_bytes())
            if ".so" in path.name and len(blob) > 1 << 20:
                keep_one_arch(blob, arch)
            info = tar.gettarinfo(path, name)
            info.type, info.linkname, info.size = tarfile.REGTYPE, "", len(blob)
            tar.addfile(info, io.BytesIO(blob))
    return lzma.compress(raw.getvalue(), preset=1)


def batches_of(venv: Path) -> list[list[tuple[Path, str]]]:
    """Files in groups of some 150 MB, large ones alone and first."""
    site = next((venv / "lib").glob("python3.*")) / "site-packages"
    batches: list[list[tuple[Path, str]]] = []
    current: list[tuple[Path, str]] = []
    size = 0
    stamp = venv / ".verl-ags-stack"
    if stamp.is_file():
        current.append((stamp, stamp.name))
    for path, name in files_of(site):
        bytes_ = path.lstat().st_size
        if bytes_ > ALONE_BYTES:
            batches.insert(0, [(path, name)])
            continue
        current.append((path, name))
        size += bytes_
        if size > BATCH_BYTES:
            batches.append(current)
            current, size = [], 0
    return [*batches, current]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", type=int, default=90, help="compute capability to keep; 90: H100, H200, H20")
    parser.add_argument("--part-mb", type=int, default=58)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not list((arguments.venv / "lib").glob("python3.*/site-packages")):
        sys.exit(f"{arguments.venv} is no virtual environment")
    jobs = [(batch, arguments.arch) for batch in batches_of(arguments.venv)]
    whole = arguments.out / "whole.tar"
    with tarfile.open(whole, "w") as outer, concurrent.futures.ProcessPoolExecutor(arguments.jobs) as pool:
        for index, data in enumerate(pool.map(pack_batch, jobs)):
            info = tarfile.TarInfo(f"j{index:03d}.tar.xz")
            info.size = len(data)
            outer.addfile(info, io.BytesIO(data))
            print(f"{index + 1}/{len(jobs)} {len(data) / 1e6:.0f} MB", flush=True)
    count = 0
    with whole.open("rb") as stream:
        while part := stream.read(arguments.part_mb * 1_000_000):
            (arguments.out / f"c{count:02d}").write_bytes(part)
            count += 1
    print(f"{count} parts, {whole.stat().st_size / 1e6:.0f} MB")
    whole.unlink()


if __name__ == "__main__":
    main()
