"""One run over two nodes: it trains, bears a slow cable, loses a node, goes on, is cut off, and loses its head."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from live_run import Live

from verl_ext.checkpoint.folder import CheckpointFolder
from verl_ext.checkpoint.marker import Marker

pytestmark = pytest.mark.timeout(1500)
# Ray declares a silent node dead after 5 missed health checks, 10 s of waiting and 3 s apart (ray_config_def.h).
NOTICED_S = 180


def report(what: str, **numbers: float) -> None:
    print(json.dumps({"what": what, **{name: round(value, 1) for name, value in numbers.items()}}))


def died(run: Live, since_s: float) -> float:
    assert run.end(NOTICED_S) == 70, run.said()
    assert re.search(r"died|failed|lost|dead", run.said().splitlines()[-1], re.I), run.said()
    return time.monotonic() - since_s


def problems(folder: Path, step: int) -> list[str]:
    table = pq.read_table(folder / "rollouts" / f"train-{step:06d}.parquet", columns=["problem_id"])
    return table.column("problem_id").to_pylist()


def back_at_a_new_step(run: Live) -> int:
    """Wait for the first step after the checkpoint that the run goes on from; which one it is."""
    run.wait_for("two goes on from step ", 120)
    found = CheckpointFolder(run.run_dir / "checkpoints").find().marker
    assert found is not None
    run.wait_for(f"step {found.step + 1}/", 900)
    report("after it", back_at_a_new_step_s=time.monotonic() - run.started_s)
    return found.step + 1


# What the smoke recipe's sizes for one rank come to for two, and time for a start on shared cores.
SIZES = (
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.agent.num_workers=2",
    "trainer.total_training_steps=200",
    "trainer.save_freq=2",
    "trainer.val_before_train=false",
    "verl_ext.stall_timeout_s=900",
)


def test_a_run_on_two_nodes_bears_a_slow_cable_and_ends_when_a_node_is_lost(two_nodes):
    other = two_nodes.network.nodes[1]
    with two_nodes.start("two", *SIZES) as run:
        run.wait_for("step 1/", 900)
        report("two nodes, first step", submit_to_first_step_s=time.monotonic() - run.started_s)
        run.wait_for("checkpoint of step 2 is whole", 300)
        marker = Marker.read(run.run_dir / "checkpoints" / "global_step_2")
        assert isinstance(marker, Marker)
        shards = {file.name for file in marker.files if "model_world_size" in file.name}
        assert shards == {f"actor/model_world_size_2_rank_{rank}.pt" for rank in (0, 1)}
        run.wait_for("step 2/", 300)

        two_nodes.network.slow(other, rate_mbit=10)
        run.wait_for("step 3/", 600)
        two_nodes.network.mend(other)
        seconds = [entry["data"]["timing_s/step"] for entry in run.metrics() if "timing_s/step" in entry["data"]]
        report("a step, and one over a cable of 10 Mbit/s", usual_s=seconds[1], slow_s=seconds[2])

        two_nodes.network.kill(other, silently=True)
        report("a node without power", noticed_s=died(run, time.monotonic()))
    assert "leaked 0" in run.said()


def test_it_goes_on_on_two_nodes_and_ends_when_a_cable_is_cut(two_nodes):
    if not (two_nodes.data_root / "runs" / "two").is_dir():
        pytest.skip("the run that goes on was not begun")
    two_nodes.join_again(1)
    with two_nodes.start("two", again=True) as run:
        new = back_at_a_new_step(run)
        aside = run.run_dir / "attempts" / "1"
        assert problems(run.run_dir, new) == problems(aside, new)
        lost = json.loads((aside / "lost.json").read_text())
        report("lost with it", work_s=lost["work_s"], steps=lost["last_step"] - lost["first_step"] + 1)

        two_nodes.network.cut(two_nodes.network.nodes[1])
        report("a cut cable", noticed_s=died(run, time.monotonic()))
    assert "leaked 0" in run.said()
    two_nodes.join_again(1)


def test_a_run_ends_with_the_head_and_goes_on_when_it_is_back(two_nodes):
    if not (two_nodes.data_root / "runs" / "two" / "attempts" / "1").is_dir():
        pytest.skip("the run that goes on was not begun")
    head = two_nodes.network.nodes[0]
    with two_nodes.start("two", again=True) as run:
        run.wait_for("agent loop workers are ready", 900)
        store = next(pid for pid in two_nodes.network.pids(head) if psutil.Process(pid).name() == "gcs_server")
        psutil.Process(store).kill()
        since_s = time.monotonic()
        # Ray itself would abort the run's process after 60 s (gcs_rpc_server_reconnect_timeout_s), with nothing said.
        run.wait_for("the run waits for it, and ends after 40 s", 30)
        report("the head's control store killed", said_s=time.monotonic() - since_s)
        noticed_s = died(run, since_s)
        report("the head's control store killed", noticed_s=noticed_s)
        assert 40 <= noticed_s < 60
        last = run.said().splitlines()[-1]
        assert last.startswith(f"Ray's control store at {two_nodes.address} has not answered for 4")
        assert "cluster-head" in last
        assert "--resume" in last
        assert "Failed to connect to GCS" not in run.said()
    assert "leaked 0" in run.said()

    two_nodes.restart()
    with two_nodes.start("two", again=True) as run:
        back_at_a_new_step(run)


def test_a_folder_that_is_not_shared_is_told_before_the_first_step(two_nodes):
    own = two_nodes.network.own_folder / "checkpoints"
    with two_nodes.start("apart", *SIZES, f"trainer.default_local_dir={own}") as run:
        assert run.end(900) == 70, run.said()
    assert "each node would keep its own shards" in run.said()
    assert not run.steps()
