"""`python -m verl_ext.cluster.facts`: what a node is, as one JSON object. Run on every node; imports nothing heavy."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_ext import cuda_compat
from verl_ext.doctor import machine
from verl_ext.doctor.findings import Finding
from verl_ext.gpus import visible_gpus
from verl_ext.installed import installed, locked, moved, stack_of
from verl_ext.manifest import sha256
from verl_ext.settings import Settings, foreign
from verl_ext.stack import LOCKS

PORTS = 64  # what verl, NCCL and Gloo open on a node of eight GPUs, several times over
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Facts:
    """What a node says of itself.

    Attributes:
        python: to the patch level, which Ray compares too.
        stack: cpu or gpu; "" if none is installed.
        versions: of every package that is installed.
        moved: what is not as the stack's lock has it; a platform's own image may well differ.
        lock: SHA-256 of the stack's lock file.
        code: SHA-256 over our package and the recipes.
        gpus: names.
        gpu_gib: memory of each.
        driver: version, "" without one.
        compat: what was decided about CUDA's compatibility library.
        settings: public, secrets as "set" or None.
        data_root: absolute.
        problems: what would fail here, each with its cure.
    """

    python: str
    stack: str
    versions: dict[str, str]
    moved: list[str]
    lock: str
    code: str
    gpus: list[str]
    gpu_gib: list[float]
    driver: str
    compat: str
    settings: dict[str, Any]
    data_root: str
    problems: list[str] = field(default_factory=list)


def facts(settings: Settings, wrong: Sequence[str], address: str, ray_gpus: int) -> Facts:
    """Look at this node.

    Args:
        settings: of this node, defaults where they are wrong.
        wrong: what is wrong with them.
        address: of this node in the cluster.
        ray_gpus: that Ray gives away here.
    """
    versions = installed()
    stack = stack_of(versions)
    gpus = visible_gpus()
    search_path = foreign(cuda_compat.SEARCH_PATH) or ""
    decision = cuda_compat.decide({cuda_compat.SEARCH_PATH: search_path}, settings.cuda_compat)
    subject = machine.subject_of(settings, on_gpu=stack == "gpu")
    wants_gpu = stack == "gpu" and ray_gpus > 0
    findings: list[Finding] = [
        *machine.driver(settings, wants_gpu=wants_gpu),
        *machine.gpus(subject, wants_gpu=wants_gpu),
        *(machine.cpp_compiler(subject) if stack == "cpu" else ()),
        *machine.limits(subject),
        *machine.disk(settings, subject),
        *machine.network(subject),
        *machine.clock(),
    ]
    problems = [*wrong, *(f"{found.text}: {found.cure}" for found in findings if found.state == "red")]
    problems += more_problems(stack, len(gpus), ray_gpus, address, decision, search_path)
    return Facts(
        python=platform.python_version(),
        stack=stack,
        versions=versions,
        moved=moved(locked(stack, beside=()), versions) if stack else [],
        lock=sha256(LOCKS / f"{stack}.txt") if stack else "",
        code=code_hash(ROOT),
        gpus=[gpu.name for gpu in gpus],
        gpu_gib=[round(gpu.memory_gib, 1) for gpu in gpus],
        driver=decision.driver,
        compat=f"{'on' if decision.on else 'off'}: {decision.reason}",
        settings=settings.public_dict(),
        data_root=str(settings.data_root.absolute()),
        problems=problems,
    )


def more_problems(
    stack: str,
    gpus: int,
    ray_gpus: int,
    address: str,
    decision: cuda_compat.Decision,
    search_path: str,
) -> Iterator[str]:
    """What the doctor does not ask, since it is about a node that Ray was started on."""
    if not stack:
        yield "no stack is installed: invoke setup --stack gpu (or cpu), or start the node from the image"
    if stack == "gpu" and ray_gpus > gpus > 0:
        yield f"Ray was told of {ray_gpus} GPUs, and {gpus} are to be seen here: start the node without --num-gpus"
    if decision.search_path != search_path:
        yield (
            f"Ray was started with {cuda_compat.SEARCH_PATH}={search_path or 'nothing'}, and this driver needs "
            f"{decision.search_path or 'nothing'} ({decision.reason}): start it with `invoke cluster-join`, or through "
            "`python verl_ext/cuda_compat.py exec ray start ...`"
        )
    if error := _port_error(address):
        yield f"{PORTS} ports cannot be had at {address} ({error}): end what holds them, look at ip_local_port_range"


def _port_error(address: str) -> str:
    """Why a run could not listen here, "" if it can."""
    held: list[socket.socket] = []
    try:
        for _ in range(PORTS):
            held.append(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
            held[-1].bind((address, 0))
    except OSError as error:
        return str(error)
    finally:
        for each in held:
            each.close()
    return ""


def code_hash(root: Path) -> str:
    """SHA-256 over names and bytes of what a run reads of the project: Python and YAML of verl_ext and recipe."""
    digest = hashlib.sha256()
    paths = (path for folder in ("verl_ext", "recipe") for path in (root / folder).rglob("*"))
    for path in sorted(path for path in paths if path.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Print the facts of this node."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.cluster.facts", description=__doc__)
    parser.add_argument("--address", required=True, help="of this node in the cluster")
    parser.add_argument("--ray-gpus", type=int, required=True, help="that Ray gives away here")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of VERL_EXT_ENV_FILE")
    options = parser.parse_args(arguments)
    settings, wrong = Settings.read(options.env_file or None, flags={"--data-root": options.data_root})
    told = facts(settings, [settings.redacted(text) for text in wrong], options.address, options.ray_gpus)
    sys.stdout.write(json.dumps(dataclasses.asdict(told)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
