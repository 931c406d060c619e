"""The bare command that a dry run prints, given to verl itself: the same configuration comes out.

`--cfg job` makes Hydra print what it would run with, and run nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext import bare_command
from verl_ext.compose import CONFIG_DIR, compose, resolve

pytest.importorskip("verl", reason="verl is not installed here")


def test_verl_composes_the_same(tmp_path: Path):
    ours = [
        "verl_ext.run_id=r",
        f'verl_ext.run_dir="{tmp_path}/a run"',
        f"verl_ext.config_dir={CONFIG_DIR}",
        "actor_rollout_ref.model.path=/models/a b",
        'trainer.project_name="it\'s $HOME"',
    ]
    config = resolve(compose("retool", "h200x1", ours))
    # The command as it is printed, in a shell, with this interpreter for `python`.
    done = subprocess.run(
        ["bash", "-c", f"{bare_command.command(config)} --cfg job --resolve"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    alone = OmegaConf.create(done.stdout[done.stdout.index("actor_rollout_ref:") :])
    assert OmegaConf.to_container(alone) == OmegaConf.to_container(config)
