"""verl_ext.gpu_watch, with a program of the test's in nvidia-smi's place."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from verl_ext.gpu_memory import GpuMemory, Phase
from verl_ext.gpu_watch import compared, watch_memory
from verl_ext.gpus import Gpu

TWO = [Gpu(0, "H200", 140.4, 0.0), Gpu(3, "H200", 140.4, 0.0)]
COMPUTED = GpuMemory(
    card_gib=139.8,
    resident_gib=16.3,
    engine_gib=70.0,
    cache_tokens=1,
    context_tokens=1,
    fsdp1_alone=False,
    phases=(Phase("generation", (("engine", 118.2),)), Phase("update", (("weights", 83.9),))),
)


def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program, seen = tmp_path / "nvidia-smi", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "$@" > {seen}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return seen


def until(what) -> None:
    for _ in range(1000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("nothing came")


def test_the_highest_of_each_gpu_is_kept_and_the_watch_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = (
        "echo '0, 1024'; echo '3, 2048'; echo '0, 115098'; echo '[N/A]'; echo '0, 512'; echo '3, 4096'; exec sleep 60"
    )
    seen = nvidia_smi(tmp_path, monkeypatch, script)
    with watch_memory(TWO) as highest:
        until(lambda: highest.get(3) == 4.0)
        assert highest == {0: pytest.approx(112.4, abs=0.01), 3: 4.0}
        [child] = [c for c in psutil.Process().children() if c.name() == "sleep"]
    assert not child.is_running()
    assert seen.read_text().split()[:2] == ["--id=0,3", "--query-gpu=index,memory.used"]
    assert compared(highest, COMPUTED) == (
        "GPU memory: 112.4 GiB at the highest, on GPU 0; 118.2 of 139.8 were computed, for generation"
    )
    assert compared(highest, None) == "GPU memory: 112.4 GiB at the highest, on GPU 0"


def test_a_watch_that_ends_early_ends_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nvidia_smi(tmp_path, monkeypatch, "exit 9")
    with watch_memory(TWO) as highest:
        time.sleep(0.05)
    assert highest == {}
    assert compared(highest, COMPUTED) == ""


def test_without_gpus_or_a_driver_nothing_is_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with watch_memory(TWO) as highest:
        assert highest == {}
    monkeypatch.setattr(subprocess, "Popen", None)
    with watch_memory([]) as highest:
        assert highest == {}
