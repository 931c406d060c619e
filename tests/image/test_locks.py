"""The gpu layer can be installed: the index has, under the same hashes, every file that its lock names.

8 GB are not fetched to see it: the lock is resolved again from nothing, and uv writes the hashes that the index gives.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import lock

UNREACHABLE = ("error sending request", "Failed to fetch", "dns error", "Connection refused")


def test_the_gpu_lock_is_what_the_index_gives_today(tmp_path: Path):
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed here: invoke setup")
    locks = tmp_path / "locks"
    shutil.copytree(lock.LOCKS, locks)
    (locks / "gpu.txt").unlink()
    done = subprocess.run(lock.command(uv, "gpu"), cwd=locks, capture_output=True, text=True)
    if done.returncode and any(words in done.stderr for words in UNREACHABLE):
        pytest.skip(f"no index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (locks / "gpu.txt").read_text() == (lock.LOCKS / "gpu.txt").read_text()
