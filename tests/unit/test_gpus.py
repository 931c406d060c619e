"""verl_ext.gpus: what nvidia-smi says, and what a process started here would see of it."""

from __future__ import annotations

import subprocess

import pytest

from verl_ext import gpus as under_test
from verl_ext.gpus import Gpu, visible_gpus

TWO = "0, GPU-aa, NVIDIA H200, 143771, 0\n1, GPU-bb, NVIDIA H200, 143771, 2048\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """Answers for nvidia-smi; an exception is raised."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def say(answer: str | Exception) -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
            assert command[0] == "nvidia-smi"
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess(command, 0, answer)

        monkeypatch.setattr(under_test.subprocess, "run", run)

    return say


def test_each_gpu_is_read(driver):
    driver(TWO)
    assert visible_gpus() == [
        Gpu(0, "NVIDIA H200", 143771 / 1024, 0.0),
        Gpu(1, "NVIDIA H200", 143771 / 1024, 2.0),
    ]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("1", [1]), ("1,0", [1, 0]), ("GPU-bb", [1]), ("", []), ("-1", []), ("0,7,1", [0]), (" 0 , 1 ", [0, 1])],
)
def test_only_what_cuda_would_see_counts(visible: str, expected: list[int], driver, monkeypatch):
    driver(TWO)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in visible_gpus()] == expected


@pytest.mark.parametrize(
    "answer",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
        "",
        "No devices were found\n",
        "0, GPU-aa, NVIDIA H200, [N/A], [N/A]\n",
    ],
)
def test_without_a_driver_that_answers_there_are_none(answer, driver):
    driver(answer)
    assert visible_gpus() == []
