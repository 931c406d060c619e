"""The last step of the image's build: check what was installed, and leave pins, stamp, manifest and SBOM behind.

`python -m verl_ext.image.finish gpu --revision REVISION`; any difference to the locks ends the build.
"""

from __future__ import annotations

import argparse
import compileall
import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_ext import stack as stacks
from verl_ext.image.manifest import MANIFEST, ROOT, SBOM, manifest, sbom
from verl_ext.installed import flash_attn_pin, installed, locked, moved, remove_strays

TARGETS = ("ci", *stacks.STACKS)
CONSTRAINTS = Path("/opt/constraints.txt")
# What torch 2.8.0's wheel on the index is built with, and the nvidia-* wheels of the lock.
TORCH = {"version": "2.8.0+cu128", "CUDA": "12.8", "cxx11abi": True, "cuDNN": 91002, "NCCL": [2, 27, 3]}
# Put there by venv itself.
UNLOCKED = {"pip"}
_ASK_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "CUDA": torch.version.cuda, "cxx11abi": torch.compiled_with_cxx11_abi(),
                  "cuDNN": torch.backends.cudnn.version(), "NCCL": torch.cuda.nccl.version()}))
"""


def pins_of(target: str) -> dict[str, str]:
    """What the target's locks install."""
    if target == "ci":
        return locked("ci", ())
    return locked("cpu") if target == "cpu" else {**locked("gpu", ("bootstrap.txt",)), "flash-attn": flash_attn_pin()}


def problems(pins: dict[str, str], versions: dict[str, str], torch: dict[str, Any] | None) -> list[str]:
    """How an installation differs from what was meant.

    Args:
        pins: `pins_of` the target.
        versions: `installed()`.
        torch: what torch says of itself, None in a target without it.
    """
    found = moved(pins, versions)
    found += [f"{name} {versions[name]} is in no lock" for name in sorted(versions.keys() - pins.keys() - UNLOCKED)]
    if torch is not None:
        found += [
            f"torch's {name} is {torch.get(name)}, not {wanted}"
            for name, wanted in TORCH.items()
            if torch.get(name) != wanted
        ]
    return found


def compiler_problems() -> list[str]:
    """Triton compiles a launcher when a model first runs."""
    found = [] if shutil.which("cc") else ["there is no C compiler"]
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return found if header.is_file() else [*found, f"{header} is missing"]


def ask_torch() -> dict[str, Any]:
    """What torch says of itself, asked in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def finish(target: str, revision: str) -> list[str]:
    """Do it; the problems found, in which case nothing is written."""
    for folder in remove_strays(Path(sysconfig.get_paths()["purelib"])):
        sys.stdout.write(f"removed {folder}, which verl's wheel brings\n")
    versions = installed()
    found = problems(pins_of(target), versions, None if target == "ci" else ask_torch()) + compiler_problems()
    if found:
        return found
    pins = {name: version for name, version in versions.items() if name not in UNLOCKED}
    CONSTRAINTS.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8")
    if target == "cpu":
        stacks.name_the_cpu_twin(Path(sysconfig.get_paths()["purelib"]))
    if target != "ci":
        stacks.STAMP.write_text(stacks.fingerprint(target) + "\n", encoding="utf-8")
    facts = manifest(revision)
    MANIFEST.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    SBOM.write_text(json.dumps(sbom(facts), indent=2) + "\n", encoding="utf-8")
    for name in ("recipe", "verl_ext"):
        compileall.compile_dir(ROOT / name, quiet=1)
    sys.stdout.write(f"{target}: {len(pins)} packages, all as locked\n")
    return []


def main(arguments: Sequence[str]) -> int:
    """Finish, or say why the image is not what it should be."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.image.finish")
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--revision", required=True)
    options = parser.parse_args(arguments)
    found = finish(options.target, options.revision)
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
