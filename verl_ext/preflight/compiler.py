"""What torch compiles with on a CPU, where vLLM's engine compiles its sampling at the first request.

Without it a training dies at its first request, a minute after its start, and stood still where verl was left alone
(verl_ext/README.md, "does not pickle").
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from verl_ext.preflight.subject import Subject
from verl_ext.settings import foreign

_ANSWER_S = 30
_NEEDED = "torch needs it on a CPU to compile vLLM's sampling, and a training would die at its first request"


def compiler(subject: Subject) -> Iterator[str]:
    """A compiler that torch takes, and Python's header, which all that it compiles includes.

    Source: torch 2.8 _inductor/cpp_builder.py (cpp_compiler_search, _get_python_include_dirs), config.py (cpp.cxx).
    """
    if subject.on_gpu:
        return
    name, given = program(), foreign("CXX") is not None
    if (why := fault(name)) and not conda_brings_one():
        if given:
            what = f"CXX is {name!r}, which cannot be run"
            cure = "set it to a compiler that is here, without options, or unset it and apt-get install g++"
        else:
            what, cure = f"{name} cannot be run", "apt-get install g++, or set CXX to a compiler that is here"
        yield f"{what} ({why}); {_NEEDED}: {cure}"
    if not header().exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        yield (
            f"{header()} is not there; {_NEEDED}: apt-get install python{version}-dev, or use a Python that brings its "
            "headers"
        )


def program() -> str:
    """What torch runs."""
    name = foreign("CXX")
    return "g++" if name is None else name


def fault(name: str) -> str:
    """Why torch would not take the program, "" if it would: it asks for its version, with nothing else in `name`."""
    quiet = subprocess.DEVNULL
    try:
        done = subprocess.run(
            [name, "--version"], stdin=quiet, stdout=quiet, stderr=quiet, check=False, timeout=_ANSWER_S
        )
    except OSError as error:
        return error.strerror or str(error)
    except subprocess.TimeoutExpired:
        return f"no answer to --version in {_ANSWER_S} s"
    return f"--version ends with status {done.returncode}" if done.returncode else ""


def conda_brings_one() -> bool:
    """Whether torch was told to have conda install a compiler, and can."""
    conda = foreign("CONDA_EXE")
    return bool(foreign("TORCH_INDUCTOR_INSTALL_GXX")) and shutil.which("conda" if conda is None else conda) is not None


def header() -> Path:
    """Python's, where torch looks for it."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def used() -> str:
    """Which compiler torch takes, for people."""
    if conda_brings_one():
        return "conda's g++, since TORCH_INDUCTOR_INSTALL_GXX is set"
    return f"{program()} ({shutil.which(program()) or 'not found'})"
