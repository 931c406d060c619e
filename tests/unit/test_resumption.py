"""A run that died is found again, goes on from its last whole checkpoint, and says what was lost."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext import attempts, launch, ray_session, resumption, runs
from verl_ext.checkpoint.folder import CheckpointFolder
from verl_ext.checkpoint.marker import MARKER, Marker, seal_rest
from verl_ext.display import Display
from verl_ext.errors import ConfigurationError
from verl_ext.request import RunRequest, configure
from verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
BEGAN_S = 1_000_000.0


def write_checkpoint(run_dir: Path, step: int) -> Path:
    folder = run_dir / runs.CHECKPOINTS / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"place")
    (folder / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"weights" * step)
    Marker(step, BEGAN_S + 10 * step, tuple(seal_rest(folder, []))).write(folder)
    return folder


def lines(*entries: dict) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture
def dead(full_root: Path, no_complaint_of_this_machine: None) -> Path:
    """A run of seven steps, checkpoints of 2 and 4, that died in its eighth."""
    request = RunRequest(
        hardware="h200x1", run_id="dead", overrides=("trainer.save_freq=2", "trainer.total_training_steps=9")
    )
    settings = Settings.load()
    configured = configure(request, settings)
    run_dir = configured.run_dir
    run_dir.mkdir(parents=True)
    launch._write_facts(configured, settings, launch.resume.train_data(configured.config))
    resumption.write_request(run_dir, request, configured.resolved)
    for step in (2, 4):
        write_checkpoint(run_dir, step)
    (run_dir / runs.PHASES).write_text(lines({"phase": "start", "time_s": BEGAN_S}))
    steps = [{"step": step, "time_s": BEGAN_S + 10 * step, "data": {"x": step}} for step in range(1, 8)]
    (run_dir / runs.METRICS).write_text(lines(*steps) + '{"step": 8, "ti')
    (run_dir / runs.ALARMS).write_text(lines({"step": 3, "alarm": "x"}, {"step": 6, "alarm": "y"}))
    (run_dir / "rollouts").mkdir()
    for step in range(1, 9):
        path = run_dir / "rollouts" / f"train-{step:06d}.parquet"
        pq.write_table(pa.table({"id": list(range(32))}), path)
        os.utime(path, (BEGAN_S, BEGAN_S + 10 * step + 3))
    pq.write_table(pa.table({"id": [1]}), run_dir / "rollouts" / "val-000005.parquet")
    os.utime(run_dir / "rollouts" / "val-000005.parquet", (BEGAN_S, BEGAN_S))
    for name in ("logs", "sandboxes"):
        (run_dir / name).mkdir()
        (run_dir / name / "x.log").write_text(name)
    return run_dir


def find(run_dir: Path, said: list[str] | None = None, **now) -> resumption.Resumption:
    return resumption.find(RunRequest(**now), run_dir, (said if said is not None else []).append)


def test_it_goes_on_from_the_last_whole_checkpoint_and_says_what_was_lost(dead):
    said: list[str] = []
    found = find(dead, said)
    assert found.step == 4
    assert found.request.resume_from == dead / "checkpoints" / "global_step_4"
    assert found.lost.first_step == 5
    assert found.lost.last_step == 8
    assert found.lost.trajectories == 4 * 32
    assert found.lost.work_s == 83 - 40
    assert found.lost.still_s == pytest.approx(time.time() - BEGAN_S - 83, abs=60)
    assert said[0].startswith("dead goes on from step 4: ")
    assert said[1].startswith("lost: steps 5 to 8 (128 trajectories), 43 s of work; the run stood still for ")


def test_a_damaged_one_is_named_and_the_older_one_taken(dead):
    (dead / "checkpoints" / "global_step_4" / "actor" / "model_world_size_1_rank_0.pt").write_bytes(b"x")
    (dead / "checkpoints" / ".saving" / "global_step_6").mkdir(parents=True)
    said: list[str] = []
    found = find(dead, said)
    assert found.step == 2
    assert found.lost.first_step == 3
    assert "passed over: step 6" in said[0]
    assert "passed over: step 4" in said[1]
    assert "actor/model_world_size_1_rank_0.pt has 1 bytes of the 28" in said[1]
    attempts.put_aside(found, swept=True)
    names = {path.name for path in (dead / "checkpoints").iterdir()}
    assert names == {"global_step_2", "damaged-global_step_4", "latest_checkpointed_iteration.txt"}
    assert CheckpointFolder(dead / "checkpoints").find().passed == ()


def test_none_whole_is_refused_and_none_saved_begins_again(dead):
    for step in (2, 4):
        (dead / "checkpoints" / f"global_step_{step}" / MARKER).unlink()
    with pytest.raises(ConfigurationError, match=r"dead has no whole checkpoint.*\n.*step 4 .*\n.*step 2 "):
        find(dead)
    for step in (2, 4):
        (dead / "checkpoints" / f"global_step_{step}").rename(dead / f"gone{step}")
    said: list[str] = []
    found = find(dead, said)
    assert said[0] == "dead begins again: it died before it had saved a checkpoint"
    assert (found.step, found.request.resume_from, found.lost.last_step) == (0, None, 8)
    attempts.put_aside(found, swept=True)
    assert runs.read_jsonl(dead / runs.METRICS) == []


def test_what_came_after_is_put_aside_and_nothing_is_gone(dead):
    found = find(dead)
    before = {path.name for path in (dead / "rollouts").iterdir()}
    aside = attempts.put_aside(found, swept=True)
    assert aside == dead / "attempts" / "1"
    assert [line["step"] for line in runs.read_jsonl(dead / runs.METRICS)] == [1, 2, 3, 4]
    assert [line["step"] for line in runs.read_jsonl(aside / runs.METRICS)] == [5, 6, 7]
    assert [line["step"] for line in runs.read_jsonl(dead / runs.ALARMS)] == [3]
    assert [line["step"] for line in runs.read_jsonl(aside / runs.ALARMS)] == [6]
    kept = {path.name for path in (dead / "rollouts").iterdir()}
    moved = {path.name for path in (aside / "rollouts").iterdir()}
    assert kept == {f"train-{step:06d}.parquet" for step in (1, 2, 3, 4)}
    assert kept | moved == before
    assert {"logs", "sandboxes", runs.PHASES, runs.CONFIG, runs.MANIFEST, "lost.json"} <= {
        p.name for p in aside.iterdir()
    }
    assert not (dead / "sandboxes").exists()
    assert json.loads((aside / "lost.json").read_text())["trajectories"] == 128
    assert (dead / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    again = find(dead)
    assert (again.step, again.lost.last_step, again.lost.trajectories) == (4, 4, 0)
    assert "no whole step" in str(again.lost)
    assert attempts.put_aside(again, swept=False).name == "2"


def test_what_a_run_stood_still_between_two_attempts_is_no_work(dead):
    aside = attempts.put_aside(find(dead), swept=True)
    (aside / "lost.json").write_text(json.dumps({"still_s": 7.0}))
    (dead / "checkpoints" / "global_step_4" / MARKER).unlink()  # so the next one goes back further
    lost = find(dead).lost
    assert (lost.first_step, lost.last_step) == (3, 4)
    assert lost.work_s == 43 - 20 - 7


def test_ledgers_of_sandboxes_that_may_live_stay_where_the_sweep_finds_them(dead):
    attempts.put_aside(find(dead), swept=False)
    assert (dead / "sandboxes").is_dir()


def test_the_same_is_asked_for_again_with_what_is_added(dead):
    request = find(dead, overrides=("trainer.save_freq=3",)).request
    assert request.hardware == "h200x1"
    assert request.run_id == "dead"
    assert request.overrides == ("trainer.save_freq=2", "trainer.total_training_steps=9", "trainer.save_freq=3")
    configured = configure(request, Settings.load())
    configured.refuse_problems()
    trainer = configured.config.trainer
    assert trainer.resume_mode == "resume_path"
    assert trainer.resume_from_path == str(dead / "checkpoints" / "global_step_4")
    assert trainer.save_freq == 3
    assert trainer.val_before_train is False
    assert configured.run_dir == dead
    said = attempts._changed(dead, configured.config, Settings.load())
    assert said == ["trainer.save_freq was 2 and is 3"]


def test_a_dry_run_shows_how_it_would_go_on_and_moves_nothing(dead, capsys):
    before = sorted(path for path in dead.rglob("*"))
    assert launch.main(["--resume=latest", "--dry-run", "trainer.total_training_steps=20"]) == 0
    said = capsys.readouterr().out
    assert "dead goes on from step 4" in said
    assert f"trainer.resume_from_path={dead}/checkpoints/global_step_4" in said
    assert "trainer.total_training_steps=20" in said
    assert sorted(path for path in dead.rglob("*")) == before


def test_other_rows_are_refused(dead, full_root, make_data):
    make_data(full_root / "data" / "retool" / "train.parquet", 511)
    problems = configure(find(dead).request, Settings.load()).problems
    assert [problem.check for problem in problems] == ["resume"]
    assert "holds other rows" in problems[0].text


def test_a_finished_run_has_nothing_to_go_on_with(dead):
    found = find(dead)
    resumption.refuse_finished(found, 5)
    resumption.refuse_finished(found, None)
    with pytest.raises(ConfigurationError, match=r"all of its 4 steps.*total_training_steps=N"):
        resumption.refuse_finished(found, 4)


def test_a_run_is_found_by_name_by_path_or_as_the_last(dead, tmp_path):
    assert resumption.find_run(dead.parent, "dead") == dead
    assert resumption.find_run(dead.parent, f"{dead}/") == dead
    older = dead.parent / "zz-older"
    older.mkdir()
    (older / runs.REQUEST).write_text("{}")
    os.utime(older / runs.REQUEST, (1, 1))
    assert resumption.find_run(dead.parent, "latest") == dead
    with pytest.raises(ConfigurationError, match=r"nope is not there: give --resume one of dead, zz-older"):
        resumption.find_run(dead.parent, "nope")
    (older / runs.REQUEST).unlink()
    with pytest.raises(ConfigurationError, match=r"has no request\.json.*resume_from_path="):
        resumption.find_run(dead.parent, "zz-older")
    with pytest.raises(ConfigurationError, match="holds no run to go on with"):
        resumption.find_run(tmp_path, "latest")


@pytest.mark.parametrize("name", [runs.REQUEST, runs.CONFIG])
def test_a_torn_file_of_the_run_is_said(dead, name):
    (dead / name).write_text('{"recipe": ["')
    with pytest.raises(ConfigurationError, match=rf"{name} cannot be read"):
        find(dead)


HOLD = "import sys, time; from pathlib import Path; from verl_ext.attempts import held\n"
HOLD += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"


def test_two_processes_never_write_one_run(dead):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(dead)], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(
            ConfigurationError, match=rf"dead is being written by process {other.pid} on .*stop it first"
        ):
            launch.run(RunRequest(), Settings.load(), Display(print), go_on_with="dead")
        other.kill()  # gives it back without a word
        other.wait()
    with attempts.held(dead):
        pass


@pytest.fixture
def session() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ags-", dir="/tmp"))
    (folder / "session_latest" / "logs").mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_what_a_killed_driver_left_is_ended_and_nothing_else(tmp_path, session):
    logs = session / "session_latest" / "logs"
    (logs / "worker-0a1b-01000000-99999999.err").write_text("its last words")
    socket_left = Path("/tmp/verl_vllm_zmq_99999999_x.ipc")  # no process has such a number
    socket_left.touch()
    ray_session.note(tmp_path, session)
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    env = {"TENSORBOARD_DIR": f"{tmp_path}/tensorboard"}
    engine, other = subprocess.Popen(sleep, env=env), subprocess.Popen(sleep, env={"TENSORBOARD_DIR": f"{tmp_path}2"})
    agent = subprocess.Popen([*sleep, f"--session-dir={session}/session_1"], env={})
    try:
        assert ray_session.end_leftovers(tmp_path, tmp_path / "logs") == 2
        assert engine.poll() is not None
        assert agent.poll() is not None
        assert other.poll() is None
    finally:
        for process in (engine, other, agent):
            process.kill()
            process.wait()
        socket_left.unlink(missing_ok=True)
    assert (tmp_path / "logs" / "worker-0a1b-01000000-99999999.err").read_text() == "its last words"
    assert not session.exists()
    assert ray_session.end_leftovers(tmp_path, tmp_path / "logs") == 0


@pytest.mark.parametrize(
    "content", ['{"session": "/home", "node": "NODE"}', '{"session": "/tmp/ags-x", "node": "b"}', "{"]
)
def test_nothing_is_ended_on_another_node_or_in_another_folder(tmp_path, content):
    (tmp_path / runs.RAY_SESSION).write_text(content.replace("NODE", socket.gethostname()))
    assert ray_session.end_leftovers(tmp_path, tmp_path / "logs") == 0
    assert (tmp_path / runs.RAY_SESSION).exists()
