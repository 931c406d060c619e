"""A run that is hurt ends within a stated time, says why, leaves nothing behind, and goes on from where it was."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from live_run import STATED_S, Live, is_agent_loop, is_engine, is_trainer

from verl_ext.checkpoint.folder import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Live]


@pytest.fixture
def start(environment: dict[str, str], data_root: Path) -> Start:
    """`invoke smoke`, and `invoke train --resume` for what goes on."""

    def begin(run_id: str, *overrides: str, again: bool = False) -> Live:
        what = ["verl_ext.launch", f"--resume={run_id}"] if again else ["recipe.smoke.run", "--run-id", run_id]
        steps = [] if again else ["trainer.total_training_steps=200"]
        command = [sys.executable, "-m", *what, *steps, *overrides]
        return Live(data_root, run_id, lambda **how: subprocess.Popen(command, cwd=ROOT, env=environment, **how))

    return begin


def kill_and_see(run: Live, victim: psutil.Process) -> None:
    victim.kill()
    assert run.end(STATED_S) == 70, run.said()
    last = run.said().strip().splitlines()[-1]
    assert any(word in last for word in ("died", "failed", "Died", "Dead")), run.said()


def test_a_dead_engine_ends_the_run_with_the_cause(start: Start, leftovers: Callable[[], list[str]]):
    with start("kill-engine") as run:
        run.wait_for("step 1/")
        assert list((run.run_dir / "logs" / "live").glob("worker-*.out"))
        kill_and_see(run, run.child(is_engine))
    assert not (run.run_dir / "logs" / "live").is_symlink()
    assert list((run.run_dir / "logs").glob("worker-*.out"))
    assert leftovers() == []


def test_a_lost_control_store_ends_the_run_in_order(start: Start, leftovers: Callable[[], list[str]]):
    with start("kill-store") as run:
        run.wait_for("step 1/")
        run.child(lambda process: process.name() == "gcs_server").kill()
        # Ray would abort the run's own process after 60 s, with nothing put away.
        assert run.end(STATED_S) == 70, run.said()
        last = run.said().strip().splitlines()[-1]
        assert last.startswith("Ray's control store at "), run.said()
        assert "invoke train --resume" in last
    assert "leaked 0" in run.said()
    assert not (run.run_dir / "logs" / "live").is_symlink()
    assert list((run.run_dir / "logs").glob("worker-*.out"))
    assert leftovers() == []


# --- one run, hurt again and again: each test goes on with what the one before it left


def problems_of(folder: Path, step: int) -> list[str]:
    table = pq.read_table(folder / "rollouts" / f"train-{step:06d}.parquet", columns=["problem_id"])
    return table.column("problem_id").to_pylist()


@pytest.fixture
def newest_whole(data_root: Path) -> Callable[[], int]:
    """The step to go on from."""

    def look() -> int:
        marker = CheckpointFolder(data_root / "runs" / "hurt" / "checkpoints").find().marker
        assert marker is not None
        return marker.step

    return look


@pytest.fixture
def go_on(start: Start, data_root: Path) -> Callable[[], Live]:
    def begin() -> Live:
        if not (data_root / "runs" / "hurt").is_dir():
            pytest.skip("the first test of the story did not run")
        return start("hurt", again=True)

    return begin


def visible_steps(run: Live) -> list[int]:
    names = [path.name for path in (run.run_dir / "checkpoints").glob("global_step_*")]
    return sorted(int(name.removeprefix("global_step_")) for name in names)


def test_killed_in_a_checkpoint(start: Start, newest_whole: Callable[[], int]):
    with start("hurt", "trainer.save_freq=2") as run:
        run.wait_for("step 3/")
        trainer = run.child(is_trainer)  # looked for before, since a save takes a tenth of a second
        run.wait_for_file("checkpoints/.saving/global_step_4/actor")
        kill_and_see(run, trainer)
    step = newest_whole()
    assert step in (2, 4)  # 4 if the kill came when its last byte was on disk
    assert visible_steps(run) == list(range(2, step + 1, 2))


def test_killed_in_a_rollout(go_on: Callable[[], Live], newest_whole: Callable[[], int]):
    step = newest_whole()
    with go_on() as run:
        run.wait_for(f"hurt goes on from step {step}: ")
        assert re.search(rf"lost: (steps {step + 1} to 4 \(\d+ trajectories\)|no whole step)", run.said()), run.said()
        run.wait_for("checkpoint of step 6 is whole")
        kill_and_see(run, run.child(is_agent_loop))
    assert f"checkpoint of step {step} is loaded" in run.said()
    for each in range(step + 1, 4):
        before = problems_of(run.run_dir / "attempts" / "1", each)
        assert problems_of(run.run_dir, each) == before, "the rows come in the order that they had"
    assert visible_steps(run) == [newest_whole() - 2, newest_whole()], "two are kept"
    steps = [entry["step"] for entry in run.metrics()]
    assert steps == sorted(set(steps)), "the folder tells one story"


def test_killed_in_an_update(go_on: Callable[[], Live], newest_whole: Callable[[], int]):
    step = newest_whole()
    with go_on() as run:
        run.wait_for("agent loop workers are ready")
        trainer = run.child(is_trainer)
        run.wait_for_file(f"rollouts/train-{step + 1:06d}.parquet")
        kill_and_see(run, trainer)  # rolled out, not yet trained on
    assert newest_whole() == step


def test_a_damaged_checkpoint_is_passed_over_and_the_driver_killed(
    go_on: Callable[[], Live], newest_whole: Callable[[], int], data_root: Path
):
    step = newest_whole()
    checkpoint = data_root / "runs" / "hurt" / "checkpoints" / f"global_step_{step}"
    shard = checkpoint / "actor" / "optim_world_size_1_rank_0.pt"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with go_on() as run:
        run.wait_for(f"hurt goes on from step {step - 2}: ")
        assert f"actor/{shard.name} holds other bytes than were written" in run.said()
        run.wait_for(f"step {step - 1}/")
        run.process.kill()
        run.process.wait()
    assert newest_whole() == step - 2


def test_what_a_killed_driver_left_is_ended_and_sigterm_ends_the_rest(
    go_on: Callable[[], Live], newest_whole: Callable[[], int], leftovers: Callable[[], list[str]]
):
    step = newest_whole()
    with go_on() as run:
        run.wait_for(f"hurt goes on from step {step}: ")
        assert "processes that the attempt that was killed had left" in run.said()
        run.wait_for(f"step {step + 1}/")
        run.process.send_signal(signal.SIGTERM)
        assert run.end(STATED_S) == 128 + signal.SIGTERM, run.said()
    assert run.said().strip().splitlines()[-1] == "ended by SIGTERM"
    assert "leaked 0" in run.said()
    assert leftovers() == []
    lost = [json.loads((run.run_dir / "attempts" / f"{number}" / "lost.json").read_text()) for number in range(1, 5)]
    assert all(one["work_s"] > 0 for one in lost)


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "local sandbox server at"), (signal.SIGTERM, "trainer is imported")],
    ids=["ctrl-c-while-ray-starts", "sigterm-while-workers-start"],
)
def test_a_signal_ends_the_run_and_everything_in_it(
    number: signal.Signals, moment: str, start: Start, leftovers: Callable[[], list[str]]
):
    with start(f"signal-{number.name.lower()}-{moment.split()[0]}") as run:
        run.wait_for(moment)
        run.process.send_signal(number)
        assert run.end(STATED_S) == 128 + number, run.said()
    assert run.said().strip().splitlines()[-1] == f"ended by {number.name}"
    assert "leaked 0" in run.said()
    assert leftovers() == []
