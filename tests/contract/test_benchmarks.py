"""The benchmarks of tests/bench start as their docstrings say: from the project's folder, with nothing on a path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "tests" / "bench").rglob("*.py") if "__main__" in path.read_text("utf-8"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_starts_from_the_projects_folder(script: Path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(script.relative_to(ROOT)), "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith("usage:")
    assert str(script.relative_to(ROOT)) in script.read_text("utf-8"), "its docstring says how it is called"


@pytest.mark.parametrize("targets", [[], ["--targets", "ci"]])
def test_the_image_that_smoke_trains_in_must_be_built(targets: list[str]):
    command = [sys.executable, "tests/bench/bench_image.py", "--smoke", *targets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("--smoke trains in the cpu target, and that is not built: add it with --targets cpu\n")
