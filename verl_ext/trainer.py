"""The one seam to verl: a TaskRunner that puts our classes in verl 0.6.1's late-bound names.

    AgsTaskRunner.run
      ├── registers the advantage estimator            (verl_ext.advantage)
      ├── starts and holds the run's sandbox broker     (verl_ext.agent_loop.broker_process)
      ├── verl.trainer.main_ppo.RayPPOTrainer           -> AgsTrainer: whole checkpoints (verl_ext.checkpoint)
      ├── verl.experimental.agent_loop.AgentLoopManager -> AgsAgentLoopManager -> AgentLoopProcess, EarlyReplica
      ├── verl.trainer.main_ppo.create_rl_sampler       -> one that a resumed run can go on with
      ├── verl.trainer.ppo.ray_trainer.compute_data_metrics -> without lost trajectories
      ├── verl.trainer.ppo.ray_trainer.process_validation_metrics -> without lost trajectories
      └── verl.utils.tracking.Tracking                  -> AgsTracking: metrics.jsonl, our numbers, alarms

Everything else of verl is untouched.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.utils.data
import verl.experimental.agent_loop
import verl.trainer.main_ppo
import verl.trainer.ppo.ray_trainer
import verl.utils.tracking
from ray.exceptions import RayError
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl.experimental.agent_loop.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.trainer.main_ppo import TaskRunner, create_rl_sampler
from verl.trainer.ppo.metric_utils import compute_data_metrics, process_validation_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.utils.tracking import Tracking

import verl_ext.advantage  # noqa: F401 - registers the estimator
from verl_ext.agent_loop import broker_process
from verl_ext.agent_loop.broker_process import RayBroker
from verl_ext.alarms import AlarmLog, names_of
from verl_ext.checkpoint.ranks import check_shared, save_whole
from verl_ext.engine.replica import EarlyReplica, offer, spare_the_collector
from verl_ext.engine.worker_errors import answer_every_error
from verl_ext.errors import AlarmStopError
from verl_ext.lost import LostPolicy, check_not_too_many, lost_left_out, roll_out, wait_until_it_works
from verl_ext.rollout import take_records
from verl_ext.runs import METRICS, note_phase, read_jsonl, without_nan
from verl_ext.sandbox.metrics import PoolReport
from verl_ext.settings import Settings

# Filled by the rollout, emptied by the next log call: verl has no other way from one to the other.
_pending: dict[str, float] = {}
_run_dir = Path()
_stop_on: list[str] = []
_agent_loop_processes: list[Any] = []
_broker: RayBroker | None = None  # an actor dies with the process that made it, so the trainer's holds it
_lost_in_validation: list[bool] = []


class AgsAgentLoopManager(AgentLoopManager):
    """verl's manager, with our workers; records each batch and ends the sandboxes at the end."""

    def __init__(self, config: Any, worker_group: Any = None, rm_wg: Any = None) -> None:
        rollout = config.actor_rollout_ref.rollout
        if rollout.name == "vllm" and rollout.data_parallel_size == 1:
            ahead = bool(config.verl_ext.get("async_scheduling", False))
            # verl takes its own where there is none
            self.rollout_replica_class = functools.partial(EarlyReplica, async_scheduling=ahead)
        self._switch_s: dict[str, float] = {}
        super().__init__(config, worker_group, rm_wg)

    def _initialize_llm_servers(self) -> None:
        if self.worker_group:
            note_phase(_run_dir, "trainer's model is built")
            ray.get([worker.__ray_call__.remote(answer_every_error) for worker in self.worker_group.workers])
        super()._initialize_llm_servers()
        if self.worker_group and self.config.verl_ext.get("device") != "cpu":  # verl collects nothing there
            ray.get([worker.__ray_call__.remote(spare_the_collector) for worker in self.worker_group.workers])
        note_phase(_run_dir, "engine is ready")

    def _init_agent_loop_workers(self) -> None:
        self.agent_loop_workers = _agent_loop_processes
        starting = (self.config, self.server_handles, self.reward_router_address, _broker)
        # verl would wait for them in the first step, where it looks like slow generation.
        ray.get([worker.start.remote(*starting) for worker in self.agent_loop_workers])
        note_phase(_run_dir, "agent loop workers are ready")

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """verl's; lost trajectories by the rule of verl_ext.lost, records and numbers of all.

        Raises:
            SandboxUnavailableError: too much of a training batch was lost.
        """
        rollout = self.config.actor_rollout_ref.rollout
        policy = LostPolicy.of(self.config.verl_ext)
        validation = bool(prompts.meta_info.get("validate", False))
        step = int(prompts.meta_info.get("global_steps", -1))
        output, lost, retried = roll_out(
            prompts,
            super().generate_sequences,
            policy=policy,
            workers=len(self.agent_loop_workers),
            wait_for_service=lambda cause: wait_until_it_works(
                self.probe, lambda what: note_phase(_run_dir, what), cause=cause, timeout_s=policy.pause_timeout_s
            ),
        )
        # Of the last call alone: a batch whose lost trajectories were rolled out again has had more than one.
        switches = {f"{name}_s": seconds for name, seconds in self._switch_s.items()}
        started_s = time.monotonic()
        taken = take_records(
            prompts,
            output,
            run_dir=Path(self.config.verl_ext.run_dir),
            run_id=self.config.verl_ext.run_id,
            copies=rollout.val_kwargs.n if validation else rollout.n,
        )
        recorded_s = time.monotonic() - started_s
        numbers = {**taken.numbers, **switches, "retried": float(retried), "record_s": recorded_s}
        prefix = "val-" if validation else ""  # a step may log both
        _pending.update({f"{prefix}agent/{name}": value for name, value in numbers.items()})
        _pending.update({f"{prefix}sandbox/{name}": value for name, value in self._sandbox_numbers().items()})
        if validation:
            _lost_in_validation.extend(taken.lost)
        else:
            check_not_too_many(lost, step, policy)
        return output

    def wake_up(self) -> None:
        """Give the memory to the engines and the trainer's weights with it; how long it took is logged."""
        started_s = time.monotonic()
        super().wake_up()
        self._switch_s["wake_up"] = time.monotonic() - started_s

    def sleep(self) -> None:
        """Give the memory back to the trainer; how long it took is logged."""
        started_s = time.monotonic()
        super().sleep()
        self._switch_s["sleep"] = time.monotonic() - started_s

    def _sandbox_numbers(self) -> dict[str, float]:
        """What all workers' sandboxes did since the last call, and what the broker counts now."""
        workers = ray.get([worker.sandbox_report.remote() for worker in self.agent_loop_workers])
        numbers = PoolReport.merged(workers).summary()
        if _broker is not None:
            with contextlib.suppress(RayError):  # started anew this moment; the next step has them
                now: Any = ray.get(_broker.handle.numbers.remote(), timeout=10)
                numbers |= {f"{name}/now": value for name, value in now.items()}
        return numbers

    def probe(self) -> str:
        """What is wrong with the service; "" if it gives a sandbox that runs code."""
        return ray.get(self.agent_loop_workers[0].probe_sandbox.remote())

    def close_sandboxes(self) -> dict[str, float]:
        """End every sandbox of every worker; the counts, also written to sandboxes.json.

        A worker that died is left to the sweep.
        """
        closing = [worker.close_sandboxes.remote() for worker in self.agent_loop_workers]
        done, _ = ray.wait(closing, num_returns=len(closing), timeout=60)
        results: list[dict[str, float]] = []
        for reference in done:
            try:
                results.append(ray.get(reference))
            except RayError:
                continue
        names = {key for one in results for key in one}
        numbers = {name: sum(one.get(name, 0.0) for one in results) for name in names}
        (_run_dir / "sandboxes.json").write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        return numbers


class AgsTrainer(RayPPOTrainer):
    """verl's trainer: whole checkpoints; an alarm may end it; ends the sandboxes whatever ends the training."""

    async_rollout_manager: AgsAgentLoopManager

    def init_workers(self) -> None:
        """verl's, with the moment noted.

        Raises:
            CheckpointError: the folder of checkpoints is not one folder on all nodes.
        """
        note_phase(_run_dir, "data is loaded")
        super().init_workers()
        check_shared(self)

    def _save_checkpoint(self) -> None:
        saved = save_whole(self, super()._save_checkpoint)
        _pending.update({"checkpoint/bytes": float(saved.bytes), "checkpoint/seal_s": saved.seal_s})
        seconds, size = saved.write_s + saved.seal_s, saved.bytes / 2**20
        note_phase(_run_dir, f"checkpoint of step {self.global_steps} is whole, {size:,.1f} MiB in {seconds:.1f} s")

    def _load_checkpoint(self) -> None:
        started_s = time.monotonic()
        super()._load_checkpoint()
        if self.global_steps:
            seconds = time.monotonic() - started_s
            note_phase(_run_dir, f"checkpoint of step {self.global_steps} is loaded, in {seconds:.1f} s")

    def fit(self) -> None:
        """verl's training loop.

        Raises:
            AlarmStopError: an alarm ended it; the step's checkpoint is there.
        """
        try:
            super().fit()
        except AlarmStopError as stop:
            raise AlarmStopError(f"{stop}\nThe run was ended, as verl_ext.stop_on asks. {self._saved()}") from stop
        finally:
            self.async_rollout_manager.close_sandboxes()

    def _saved(self) -> str:
        """Where the checkpoint of the step that just ended is; it is written if verl has not."""
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if not folder.is_dir():
            note_phase(_run_dir, "saving a checkpoint, since an alarm ends the run")
            self._save_checkpoint()
        return f"Its checkpoint is {folder}"


class AgsTracking(Tracking):
    """verl's loggers, with the rollout's numbers added; one JSON line a step in the run folder; the alarms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        path = _run_dir / METRICS
        self._alarms = AlarmLog(_run_dir, _stop_on, before=read_jsonl(path))
        # Line-buffered: the driver follows the file, and a killed run keeps what it logged.
        self._metrics_file = path.open("a", buffering=1, encoding="utf-8")

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        """Log one step to every backend.

        Raises:
            AlarmStopError: an alarm started that `verl_ext.stop_on` names. The step is logged.
        """
        data = {name: _plain(value) for name, value in {**data, **_pending}.items()}
        _pending.clear()
        super().log(data, step, backend)
        events = self._alarms.step(int(step), data)  # before the step's line: who has seen the step sees its alarms
        line = {"step": int(step), "time_s": round(time.time(), 3), "data": without_nan(data)}
        self._metrics_file.write(json.dumps(line, allow_nan=False) + "\n")
        self._alarms.heed(events)


class AgsTaskRunner(TaskRunner):
    """Runs the training, in a Ray process of its own.

    Args:
        agent_loops: from `verl_ext.agent_loop.process.begin`.
        engine_servers: from `verl_ext.engine.process.begin`.
    """

    def __init__(self, agent_loops: list[Any], engine_servers: dict[str, list[Any]]) -> None:
        super().__init__()
        _agent_loop_processes[:] = agent_loops
        offer(engine_servers)

    def run(self, config: Any) -> None:
        """verl's `run` with our classes in place."""
        self.begin(config)
        install()
        super().run(config)

    def begin(self, config: Any) -> None:
        """What every run needs in this process before anything rolls out."""
        global _run_dir, _broker
        _run_dir = Path(config.verl_ext.run_dir)
        _stop_on[:] = names_of(config.verl_ext.stop_on)
        note_phase(_run_dir, "trainer is imported")
        Settings.load().export_foreign()  # a tracker's key from `.env`
        workers = config.actor_rollout_ref.rollout.agent.num_workers
        _broker = broker_process.start(_run_dir, config.verl_ext.run_id, workers)


def install() -> None:
    """Put our classes in the names that verl looks up when it uses them."""
    verl.trainer.main_ppo.RayPPOTrainer = AgsTrainer  # type: ignore[misc]
    verl.experimental.agent_loop.AgentLoopManager = AgsAgentLoopManager  # type: ignore[misc]
    verl.trainer.ppo.ray_trainer.compute_data_metrics = data_metrics_without_lost  # pyright: ignore[reportPrivateImportUsage]
    verl.trainer.ppo.ray_trainer.process_validation_metrics = lost_left_out(  # pyright: ignore[reportPrivateImportUsage]
        _lost_in_validation, process_validation_metrics
    )
    verl.utils.tracking.Tracking = AgsTracking  # type: ignore[misc]
    verl.trainer.main_ppo.create_rl_sampler = create_resumable_sampler


def create_resumable_sampler(data_config: Any, dataset: Any) -> Any:
    """verl's sampler, with torch's RandomSampler as torchdata's: the same first epoch, but a place that can be stored.

    Of torch's a checkpoint keeps the place alone and not the order, so that a run which resumes in its second epoch
    goes on in the order of the first.
    """
    sampler = create_rl_sampler(data_config, dataset)
    if type(sampler) is not torch.utils.data.RandomSampler:
        return sampler
    return RandomSampler(sampler.data_source, generator=sampler.generator)


def data_metrics_without_lost(batch: DataProto, use_critic: bool = True) -> dict[str, Any]:
    """verl's data metrics over the trajectories that were not lost to our infrastructure."""
    kept = batch.batch["response_mask"].bool().any(dim=-1)
    return compute_data_metrics(batch if bool(kept.all()) else batch.select_idxs(kept), use_critic)


def _plain(value: Any) -> Any:
    """The value as a plain number, which every tracker takes; verl logs numpy's and torch's among them."""
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0):
        value = value.item()
    return value if isinstance(value, int | float | str | bool) or value is None else str(value)
