"""A disk that fills up while torch writes a shard: a real one, of 32 MiB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
ON_A_SMALL_DISK = """
import sys
from pathlib import Path
import torch
from verl_ext.checkpoint.folder import CheckpointFolder
from verl_ext.checkpoint.marker import seal_shards
from verl_ext.checkpoint.saving import save
root = Path(sys.argv[1])

def write(scratch, step, mib):
    folder = scratch / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    torch.save(torch.zeros(mib, 2**18), folder / "model_world_size_1_rank_0.pt")

def save_step(step, mib, expected):
    save(step, CheckpointFolder(root), write=lambda scratch: write(scratch, step, mib),
         seal_ranks=lambda scratch: [seal_shards(scratch, 0)], keep=2, expected_bytes=expected)

save_step(1, 10, None)
try:
    save_step(2, 30, None)
except Exception as error:
    print(type(error).__name__, error)
print(CheckpointFolder(root).find().folder, sorted(path.name for path in root.iterdir()))
"""


def test_a_disk_that_fills_up_in_a_save_costs_that_save_alone(tmp_path):
    mount = f"mount -t tmpfs -o size=32m none {tmp_path}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no small disk can be mounted here (unshare -rm, tmpfs)")
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'{mount} && exec "$@"',
        "sh",
        sys.executable,
        "-c",
        ON_A_SMALL_DISK,
        str(tmp_path),
    ]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.startswith("CheckpointError the disk is full: the checkpoint of step 2 needs "), said
    for words in ("MiB free; the checkpoint of step 1 is whole. Free", "VERL_EXT_DATA_ROOT", "train --resume"):
        assert words in said
    assert "global_step_1 [" in said
    assert "global_step_2" not in said
