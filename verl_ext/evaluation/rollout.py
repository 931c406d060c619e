"""Takes samples through what a training validates with: verl's agent loop manager and workers, our loop, tool,
sandboxes and reward. What differs is that no trainer is there: the engine has the GPUs, and its weights from a folder.

A validation is one batch, which waits for its slowest answer. Here parts of it are under way side by side, and the
next begins when one is done, so that the engine stays full and an interruption costs little.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import ray
from verl.protocol import DataProto

from verl_ext.evaluation.plan import PART_SAMPLES, SETTINGS, Part, Plan, parts
from verl_ext.evaluation.results import key_of, next_part, read_parts, sample_row, write_part
from verl_ext.lost import LostPolicy, roll_out, wait_until_it_works
from verl_ext.rollout import take_records
from verl_ext.runs import note_phase
from verl_ext.trainer import AgsAgentLoopManager, AgsTaskRunner

PROGRESS_S = 10.0
Generate = Callable[[DataProto], DataProto]


class Evaluator(AgsTaskRunner):
    """Takes an evaluation's samples from one model, in a Ray process of its own."""

    def run(self, config: Any) -> None:
        """Returns when every sample is kept."""
        self.begin(config)
        manager = AgsAgentLoopManager(config)
        try:
            rollout = config.actor_rollout_ref.rollout
            take(
                config,
                [_remote(worker) for worker in manager.agent_loop_workers],
                probe=manager.probe,
                in_flight=rollout.max_num_seqs * len(manager.rollout_replicas),
            )
        finally:
            manager.close_sandboxes()


def _remote(worker: Any) -> Generate:
    return lambda prompts: ray.get(worker.generate_sequences.remote(prompts))


def take(config: Any, workers: Sequence[Generate], *, probe: Callable[[], str], in_flight: int) -> None:
    """Take what is left of an evaluation from the model of `config`, and keep it part by part.

    Args:
        config: `verl_ext.run_dir` is the model's folder inside the evaluation's.
        workers: each rolls out a batch of rows; called from several threads.
        probe: "" if a sandbox works, else what is wrong.
        in_flight: samples that are under way at once.
    """
    model_dir = Path(config.verl_ext.run_dir)
    folder, plan = model_dir.parent, Plan.read(model_dir.parent)
    rows = pq.read_table(plan.data).to_pylist()
    kept = read_parts(folder)
    done = {key_of(row) for row in kept if not row["infra_failed"]}
    left = parts(plan, model_dir.name, rows, done, next_part(folder))
    progress = _Progress(model_dir, sum(len(part.samples) for part in left))
    one = _PartTaker(config, folder, probe, progress)
    pool = ThreadPoolExecutor(max(len(workers), in_flight // PART_SAMPLES))
    futures = [pool.submit(one.take, part, workers[part.number % len(workers)]) for part in left]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class _PartTaker:
    def __init__(self, config: Any, folder: Path, probe: Callable[[], str], progress: _Progress) -> None:
        self._config = config
        self._folder = folder
        self._model_dir = Path(config.verl_ext.run_dir)
        self._policy = LostPolicy.of(config.verl_ext)
        self._probe = probe
        self._progress = progress
        self._pausing = threading.Lock()

    def take(self, part: Part, generate: Generate) -> None:
        """Roll one part out, by the rule of verl_ext.lost for validations, and keep it."""
        prompts = prompts_of(part)
        output, _, _ = roll_out(
            prompts, generate, policy=self._policy, workers=1, wait_for_service=self._wait_for_service
        )
        taken = take_records(
            prompts,
            output,
            run_dir=self._model_dir,
            run_id=self._config.verl_ext.run_id,
            copies=len(part.samples),
        )
        rows = [
            sample_row(sample.setting, sample.number, sample.seed, part.number, row)
            for sample, row in zip(part.samples, taken.rows, strict=True)
        ]
        write_part(self._folder, part.number, rows)
        self._progress.add(rows)

    def _wait_for_service(self, cause: str) -> bool:
        with self._pausing:  # one part asks, the others wait with it
            return wait_until_it_works(
                self._probe,
                lambda what: note_phase(self._model_dir, what),
                cause=cause,
                timeout_s=self._policy.pause_timeout_s,
            )


def prompts_of(part: Part) -> DataProto:
    """The batch that verl's validation would make of these rows, with a seed for each."""
    columns: dict[str, list[Any]] = {
        "raw_prompt": [sample.row["prompt"] for sample in part.samples],
        "data_source": [sample.row["data_source"] for sample in part.samples],
        "reward_model": [sample.row["reward_model"] for sample in part.samples],
        "extra_info": [sample.row["extra_info"] for sample in part.samples],
        "agent_name": [SETTINGS[sample.setting][1] for sample in part.samples],
        "uid": ["/".join(sample.key[:3]) for sample in part.samples],
        "sampling_seed": [sample.seed for sample in part.samples],
    }
    arrays = {name: np.empty(len(part.samples), dtype=object) for name in columns}
    for name, values in columns.items():
        arrays[name][:] = values
    # The part is the step, so that each has a file of trajectories.
    return DataProto(non_tensor_batch=arrays, meta_info={"validate": True, "global_steps": part.number})


class _Progress:
    """Says now and then how far the samples of a model are; called by several threads."""

    def __init__(self, model_dir: Path, total: int) -> None:
        self._model_dir = model_dir
        self._total = total
        self._done = self._valid = self._right = 0
        self._started_s = self._said_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        with self._lock:
            valid = [row for row in rows if not row["infra_failed"]]
            self._done += len(rows)
            self._valid += len(valid)
            self._right += sum(row["right"] for row in valid)
            now_s = time.monotonic()
            if now_s - self._said_s < PROGRESS_S and self._done < self._total:
                return
            self._said_s = now_s
            left_s = (now_s - self._started_s) / self._done * (self._total - self._done)
            note_phase(
                self._model_dir,
                f"{self._done} of {self._total} samples of the {self._model_dir.name} model, "
                f"{self._right / max(1, self._valid):.3f} right, {self._done - self._valid} lost, "
                f"about {left_s // 60:.0f}:{left_s % 60:02.0f} left",
            )
