"""The one seam to verl: the names and signatures that we rely on are there, and are ours once installed."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    import torch
    import verl.experimental.agent_loop
    import verl.trainer.main_ppo
    import verl.trainer.ppo.ray_trainer
    import verl.utils.tracking
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop as verl_agent_loop
    from verl.protocol import DataProto
    from verl.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV
    from verl.trainer.ppo.metric_utils import compute_data_metrics
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from verl_ext import ray_run, ray_session, trainer
    from verl_ext.agent_loop import worker
    from verl_ext.alarms import AlarmLog, read_events
    from verl_ext.engine.replica import spare_the_collector
    from verl_ext.errors import AlarmStopError
    from verl_ext.runs import LIVE

SEAM = [
    ("verl.trainer.main_ppo", "RayPPOTrainer", "AgsTrainer"),
    ("verl.trainer.main_ppo", "create_rl_sampler", "create_resumable_sampler"),
    ("verl.experimental.agent_loop", "AgentLoopManager", "AgsAgentLoopManager"),
    ("verl.trainer.ppo.ray_trainer", "compute_data_metrics", "data_metrics_without_lost"),
    ("verl.utils.tracking", "Tracking", "AgsTracking"),
]


def module(name: str) -> Any:
    found: Any = verl
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("place", "theirs", "ours"), SEAM)
def test_install_puts_ours_where_verl_looks(place: str, theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch):
    for name, replaced, _ in SEAM:
        monkeypatch.setattr(module(name), replaced, getattr(module(name), replaced))  # put back afterwards
    ray_trainer = verl.trainer.ppo.ray_trainer
    monkeypatch.setattr(ray_trainer, "process_validation_metrics", ray_trainer.process_validation_metrics)
    trainer.install()
    assert ray_trainer.process_validation_metrics.__qualname__.startswith("lost_left_out")
    assert getattr(module(place), theirs) is getattr(trainer, ours)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        # How verl reaches each name when it runs: late, through the module, so that ours is found.
        (verl.trainer.main_ppo.TaskRunner.run, "RayPPOTrainer("),
        (verl.trainer.main_ppo.TaskRunner.run, "create_rl_sampler("),
        (RayPPOTrainer.init_workers, "from verl.experimental.agent_loop import AgentLoopManager"),
        (RayPPOTrainer.init_workers, "self.async_rollout_manager = AgentLoopManager("),
        (RayPPOTrainer.fit, "compute_data_metrics(batch=batch, use_critic=self.use_critic)"),
        (RayPPOTrainer.fit, "from verl.utils.tracking import Tracking"),
        (RayPPOTrainer.fit, "logger.log(data=metrics, step=self.global_steps)"),
        (RayPPOTrainer.fit, "self.async_rollout_manager.generate_sequences("),
        (RayPPOTrainer._validate, "self.async_rollout_manager.generate_sequences("),
        (verl_agent_loop.AgentLoopManager.__init__, 'if not hasattr(self, "agent_loop_workers_class")'),
        (verl_agent_loop.AgentLoopManager.__init__, "self._init_agent_loop_workers()"),
        (verl_agent_loop.AgentLoopManager.__init__, "self._initialize_llm_servers()"),
        (verl_agent_loop.AgentLoopWorkerBase.__init__, "RewardManagerWorker.options("),
        (verl_agent_loop.AgentLoopWorkerBase._run_agent_loop, "await self.reward_manager_worker.compute_score.remote("),
        (verl.trainer.main_ppo.run_ppo, "task_runner_class"),
    ],
)
def test_verl_looks_the_name_up_when_it_needs_it(source: Any, call: str):
    assert call in inspect.getsource(inspect.unwrap(source))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (trainer.AgsAgentLoopManager.__init__, verl_agent_loop.AgentLoopManager.__init__),
        (trainer.AgsAgentLoopManager.generate_sequences, verl_agent_loop.AgentLoopManager.generate_sequences),
        (trainer.AgsTrainer.fit, RayPPOTrainer.fit),
        (trainer.AgsTrainer.init_workers, RayPPOTrainer.init_workers),
        (trainer.AgsTaskRunner.run, verl.trainer.main_ppo.TaskRunner.run),
        (trainer.data_metrics_without_lost, compute_data_metrics),
        (trainer.AgsTracking.log, verl.utils.tracking.Tracking.log),
        (worker.SandboxedAgentLoopWorker.__init__, verl_agent_loop.AgentLoopWorkerBase.__init__),
        (worker.SandboxedAgentLoopWorker._run_agent_loop, verl_agent_loop.AgentLoopWorkerBase._run_agent_loop),
        (worker.SandboxedAgentLoopWorker.generate_sequences, verl_agent_loop.AgentLoopWorkerBase.generate_sequences),
    ],
)
def test_what_we_override_takes_what_verls_takes(ours: Any, theirs: Any):
    def names(function: Any) -> list[str]:
        # Ray adds _ray_trace_ctx to methods of what becomes an actor.
        return [name for name in inspect.signature(inspect.unwrap(function)).parameters if name != "_ray_trace_ctx"]

    assert names(ours) == names(theirs)


def test_the_rows_that_we_record_by_are_what_survives_generation():
    source = inspect.getsource(RayPPOTrainer._get_gen_batch)
    keys = ast.literal_eval(source.split("set(")[1].split(")")[0])
    assert keys == {"data_source", "reward_model", "extra_info", "uid"}


def test_the_workers_environment_is_verls():
    assert PPO_RAY_RUNTIME_ENV["env_vars"] == ray_run.PPO_ENVIRONMENT


def test_the_run_folder_leads_to_the_logs_while_they_grow_and_has_them_afterwards(tmp_path: Path):
    said = tmp_path / "session" / "session_latest" / "logs"
    said.mkdir(parents=True)
    logs = tmp_path / "run" / "logs"
    ray_session.show_logs(tmp_path / "session", logs)
    (said / "worker-1.out").write_text("step 1")
    (said / "worker-1.err").write_text("")
    assert (logs / LIVE / "worker-1.out").read_text() == "step 1"
    ray_session._keep_logs(tmp_path / "session", logs)
    assert [path.name for path in logs.iterdir()] == ["worker-1.out"]


def test_the_reward_worker_that_verl_would_start_is_made_in_the_workers_process(monkeypatch: pytest.MonkeyPatch):
    # The fault: verl starts a Ray actor beside each agent loop worker. Fails when RewardManagerWorker is none.
    assert worker.RewardManagerWorker.__ray_metadata__.class_name == "RewardManagerWorker"
    assert inspect.iscoroutinefunction(worker.RewardManagerWorker.__ray_metadata__.modified_class.compute_score)
    monkeypatch.setattr(verl_agent_loop, "RewardManagerWorker", verl_agent_loop.RewardManagerWorker)
    worker.colocate_reward_worker()
    assert isinstance(verl_agent_loop.RewardManagerWorker, worker._Colocated)


# --- metrics


def data(lost: list[bool]) -> DataProto:
    count, prompt, response = len(lost), 3, 4
    mask = torch.ones(count, response, dtype=torch.long)
    rewards = torch.zeros(count, response)
    for row, gone in enumerate(lost):
        rewards[row, -1] = 99.0 if gone else float(row)
        mask[row] = 0 if gone else 1
    tensors = {
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "advantages": rewards.clone(),
        "returns": rewards.clone(),
        "responses": torch.ones(count, response, dtype=torch.long),
        "response_mask": mask,
        "attention_mask": torch.ones(count, prompt + response, dtype=torch.long),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors={"__num_turns__": np.array([2] * count, dtype=np.int32)})


def test_metrics_are_verls_when_nothing_is_lost():
    batch = data([False, False, False])
    assert trainer.data_metrics_without_lost(batch, use_critic=False) == compute_data_metrics(batch, use_critic=False)


def test_a_lost_trajectory_is_in_no_metric():
    numbers = trainer.data_metrics_without_lost(data([False, True, False]), use_critic=False)
    assert numbers["critic/score/max"] == 2.0
    assert numbers["critic/score/mean"] == 1.0
    assert compute_data_metrics(data([False, True, False]), use_critic=False)["critic/score/max"] == 99.0


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "_run_dir", tmp_path)
    monkeypatch.setattr(trainer, "_pending", {"agent/accuracy": 0.5})
    made = trainer.AgsTracking("p", "e", default_backend=["console"], config={})
    yield made
    made._metrics_file.close()


def lines(folder: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_line_of_json(tracking, tmp_path: Path):
    values = {
        "a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True), "d": float("nan"), "e": float("inf"),
        "f": np.float64("nan"), "g": None, "h": "text", "i": 7, "j": -float("inf"), "k": torch.tensor(3),
    }  # fmt: skip
    tracking.log(dict(values), step=np.int64(1))
    tracking.log({"loss": 0.25}, 2)
    first, second = lines(tmp_path)
    assert first["step"] == 1
    assert first["data"] == {
        "a": 0.5, "b": 3, "c": True, "d": None, "e": None, "f": None, "g": None, "h": "text", "i": 7, "j": None,
        "k": 3, "agent/accuracy": 0.5,
    }  # fmt: skip
    assert second["data"] == {"loss": 0.25}, "the rollout's numbers belong to one step"


def test_verls_loggers_get_the_rollouts_numbers_too(tracking, tmp_path: Path, capsys):
    tracking.log({"loss": 0.25}, 1)
    assert "agent/accuracy:0.5" in capsys.readouterr().out


# --- alarms


HIGH = {"training/rollout_probs_diff_mean": 0.02}


def test_an_alarm_of_stop_on_ends_the_log_call_when_the_step_is_logged(tracking, tmp_path: Path):
    tracking._alarms = AlarmLog(tmp_path, ["probability-difference"])
    tracking.log(dict(HIGH), 1)
    with pytest.raises(AlarmStopError, match="probability-difference at step 2"):
        tracking.log(dict(HIGH), 2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert [(event.step, event.alarm) for event in read_events(tmp_path)] == [(2, "probability-difference")]


def test_a_run_that_goes_on_in_its_folder_has_its_alarms_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer, "_run_dir", tmp_path)
    monkeypatch.setattr(trainer, "_pending", {})
    for steps in ((1, 2), (3, 4)):
        made = trainer.AgsTracking("p", "e", default_backend=[], config={})
        for step in steps:
            made.log(dict(HIGH), step)
        made._metrics_file.close()
    assert [event.step for event in read_events(tmp_path)] == [2]


class Stopped:
    """What AgsTrainer.fit needs of a trainer whose loop is ended by an alarm at step 7."""

    def __init__(self, folder: Path) -> None:
        self.trainer: Any = object.__new__(trainer.AgsTrainer)
        self.trainer.config = OmegaConf.create({"trainer": {"default_local_dir": str(folder / "checkpoints")}})
        self.trainer.global_steps = 7
        self.trainer.async_rollout_manager = self
        self.trainer._save_checkpoint = lambda: self.did.append("saved")
        self.did: list[str] = []

    def close_sandboxes(self) -> dict[str, float]:
        self.did.append("sandboxes ended")
        return {}


@pytest.mark.parametrize("verl_saved", [False, True])
def test_a_run_that_an_alarm_ends_has_the_checkpoint_of_its_last_step(
    verl_saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fit(self: Any) -> None:
        raise AlarmStopError("ALARM truncation at step 7")

    monkeypatch.setattr(RayPPOTrainer, "fit", fit)
    monkeypatch.setattr(trainer, "_run_dir", tmp_path)
    stopped, folder = Stopped(tmp_path), tmp_path / "checkpoints" / "global_step_7"
    if verl_saved:
        folder.mkdir(parents=True)
    with pytest.raises(AlarmStopError) as raised:
        stopped.trainer.fit()
    assert str(raised.value).splitlines()[0] == "ALARM truncation at step 7"
    assert str(folder) in str(raised.value)
    assert stopped.did == (["sandboxes ended"] if verl_saved else ["saved", "sandboxes ended"])


def test_verl_logs_a_step_when_it_has_saved_and_before_it_counts_on():
    # Why an alarm that ends the run from within the log call leaves a checkpoint of that very step.
    source = inspect.getsource(RayPPOTrainer.fit)
    log = source.index("logger.log(data=metrics, step=self.global_steps)")
    assert source.index("self._save_checkpoint()") < log < source.index("self.global_steps += 1", log)


def test_verls_timer_of_a_step_ends_before_a_validation_and_a_checkpoint():
    # Why tokens per second divide by it as it is, and the time left adds the two (verl_ext/progress.py).
    tree = ast.parse(textwrap.dedent(inspect.getsource(RayPPOTrainer.fit)))
    blocks = [block for block in ast.walk(tree) if isinstance(block, ast.With)]
    [step] = [block for block in blocks if "marked_timer('step'" in ast.unparse(block.items[0])]
    assert "marked_timer('update_actor'" in ast.unparse(step)
    for name in ("testing", "save_checkpoint"):
        assert f"marked_timer('{name}'" in ast.unparse(tree)
        assert f"marked_timer('{name}'" not in ast.unparse(step)


# --- settings that stand in for faults of verl; a test that fails here says that the setting may go


def test_verls_config_has_the_values_that_ours_must_change():
    folder = Path(verl.__file__).parent / "trainer" / "config"
    rollout = OmegaConf.load(folder / "rollout" / "rollout.yaml")
    assert rollout.mode == "sync"
    assert rollout.multi_turn.max_parallel_calls == 1
    assert rollout.multi_turn.max_tool_response_length == 256
    assert rollout.agent.default_agent_loop == "single_turn_agent"


def test_without_free_cache_engine_verl_syncs_no_weights():
    # The fault (verl PR 4248): the engine gets the trained weights in wake_up, which is called under this flag only.
    source = inspect.getsource(verl_agent_loop.AgentLoopManager.generate_sequences)
    assert "free_cache_engine:\n            self.wake_up()" in source
    assert source.count("self.wake_up()") == 1


def test_a_rollout_says_how_long_the_engines_took_to_wake_up_and_to_sleep(monkeypatch: pytest.MonkeyPatch):
    # verl counts both as generation and names neither.
    source = inspect.getsource(verl_agent_loop.AgentLoopManager.generate_sequences)
    assert source.index("self.wake_up()") < source.index("generate_sequences.remote(") < source.index("self.sleep()")
    manager: Any = object.__new__(trainer.AgsAgentLoopManager)
    manager._switch_s = {}
    for name, seconds in (("wake_up", 0.05), ("sleep", 0.02)):
        monkeypatch.setattr(verl_agent_loop.AgentLoopManager, name, lambda _, seconds=seconds: time.sleep(seconds))
        getattr(manager, name)()
    assert manager._switch_s["wake_up"] >= 0.05
    assert 0.02 <= manager._switch_s["sleep"] < manager._switch_s["wake_up"]


def test_verl_collects_garbage_at_each_switch_over_all_that_was_ever_imported():
    from verl.utils.memory_utils import aggressive_empty_cache

    # Where this is gone, spare_the_collector can go.
    assert "gc.collect()" in inspect.getsource(aggressive_empty_cache)
    workers = (Path(verl.__file__).parent / "workers" / "fsdp_workers.py").read_text(encoding="utf-8")
    for switch in ("rollout_mode", "trainer_mode"):
        body = workers.split(f"async def {switch}(self):")[1].split("async def ")[0]
        assert "aggressive_empty_cache(force_sync=True)" in body
    before = gc.get_freeze_count()
    try:
        spare_the_collector(None)
        assert gc.get_freeze_count() > before + 100_000
    finally:
        gc.unfreeze()


def test_verl_drops_options_that_are_false():
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    source = inspect.getsource(vllm_async_server)
    assert "if isinstance(v, bool):\n                if v:" in source


def test_verl_removes_the_old_checkpoint_before_the_new_one_is_written():
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    source = inspect.getsource(FSDPCheckpointManager.save_checkpoint)
    assert source.index("self.remove_previous_save_local_path(") < source.index("torch.save(")


def test_verls_file_logger_needs_a_variable_and_writes_numpy_badly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Why metrics.jsonl is ours: verl's own writes to a path of the environment, and NaN as no JSON.
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    logger = verl.utils.tracking.FileLogger("p", "e")
    logger.log({"a": float("nan")}, 1)
    logger.fp.close()
    assert "NaN" in (tmp_path / "log.jsonl").read_text()
