"""The one seam to verl: the names and signatures that we rely on are there, and are ours once installed."""

from __future__ import annotations

import ast
import inspect
import json
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

    from verl_ext import ray_run, trainer
    from verl_ext.agent_loop import worker

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
    trainer.install()
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
        "f": np.float64("nan"), "g": None, "h": "text", "i": 7, "j": -float("inf"),
    }  # fmt: skip
    tracking.log(dict(values), step=np.int64(1))
    tracking.log({"loss": 0.25}, 2)
    first, second = lines(tmp_path)
    assert first["step"] == 1
    assert first["data"] == {
        "a": 0.5, "b": 3, "c": True, "d": None, "e": None, "f": None, "g": None, "h": "text", "i": 7, "j": None,
        "agent/accuracy": 0.5,
    }  # fmt: skip
    assert second["data"] == {"loss": 0.25}, "the rollout's numbers belong to one step"


def test_verls_loggers_get_the_rollouts_numbers_too(tracking, tmp_path: Path, capsys):
    tracking.log({"loss": 0.25}, 1)
    assert "agent/accuracy:0.5" in capsys.readouterr().out


def test_counts_are_summed_over_workers_and_latencies_are_the_worst():
    workers = [{"created": 2.0, "wait_s/p95": 1.0, "waiting_share": 0.5}, {"created": 3.0, "wait_s/p95": 4.0}]
    assert trainer._merged(workers) == {"created": 5.0, "wait_s/p95": 4.0, "waiting_share": 0.5}
    assert trainer._merged([]) == {}


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
