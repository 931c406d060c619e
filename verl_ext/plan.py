"""A run in a dozen numbers before it starts: how much of everything, derived from the configuration alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omegaconf import DictConfig

from verl_ext.gpu_memory import GpuMemory, checkpoint_gib, gpu_memory, host_memory_gib
from verl_ext.model_shape import ModelShape
from verl_ext.parquet_files import total_rows

# Id, mask, log-prob and text of one recorded token. Source: tests/bench/bench_records.py, 8.1 in one turn, rounded up.
RECORD_BYTES_A_TOKEN = 9


@dataclass(frozen=True)
class Plan:
    """What a run will do and take. A field is None where its input is missing (no data yet, no model yet).

    Attributes:
        prompts, rollouts: of one step.
        mini_batches: optimiser steps of one step.
        longest_tokens: of one trajectory, prompt and response.
        turns, calls_per_turn: at most, of one trajectory.
        train_rows, val_rows: of the files.
        steps: of the whole run.
        validations: how often; each is val_rollouts trajectories.
        sandboxes_wanted: trajectories of one step, each with a sandbox of its own.
        sandboxes_alive: how many the settings allow at once; the others wait.
        checkpoints: how many are written.
        checkpoints_kept: how many of them are on disk at once, at most: while one is saved, one more than are kept.
        checkpoint_gib: one of them.
        disk_gib: the run folder at its largest, if every trajectory were as long as it may be.
        memory: of one GPU.
        host_gib: a node's own memory, for FSDP alone.
    """

    prompts: int
    rollouts: int
    mini_batches: int
    longest_tokens: int
    turns: int
    calls_per_turn: int
    train_rows: int | None
    val_rows: int | None
    steps: int | None
    validations: int | None
    val_rollouts: int | None
    sandboxes_wanted: int
    sandboxes_alive: int
    checkpoints: int | None
    checkpoints_kept: int | None
    checkpoint_gib: float | None
    disk_gib: float | None
    memory: GpuMemory | None
    host_gib: float | None


def make_plan(config: DictConfig, shape: ModelShape | None, *, sandboxes_alive: int, card_gib: float | None) -> Plan:
    """The plan of a resolved configuration that preflight found no fault in.

    Args:
        config: resolved.
        shape: of the model, None if it is not there.
        sandboxes_alive: how many the settings allow at once.
        card_gib: memory of one GPU, None on a CPU.
    """
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, config.trainer
    train_rows, val_rows = total_rows(data.train_files), total_rows(data.val_files)
    steps = _steps(config, train_rows)
    checkpoints = None if steps is None else _times(steps, trainer.save_freq)
    validations = None if steps is None else _times(steps, trainer.test_freq) + int(trainer.val_before_train)
    kept = trainer.max_actor_ckpt_to_keep
    counted = shape if shape and shape.parameters else None
    size_gib = checkpoint_gib(config, counted) if counted else None
    rollouts = data.train_batch_size * rollout.n
    val_rollouts = None if val_rows is None else val_rows * rollout.val_kwargs.n
    longest = data.max_prompt_length + data.max_response_length
    plan = Plan(
        prompts=data.train_batch_size,
        rollouts=rollouts,
        mini_batches=data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size,
        longest_tokens=longest,
        turns=rollout.multi_turn.max_assistant_turns or 0,
        calls_per_turn=rollout.multi_turn.max_parallel_calls,
        train_rows=train_rows,
        val_rows=val_rows,
        steps=steps,
        validations=validations,
        val_rollouts=val_rollouts,
        sandboxes_wanted=rollouts,
        sandboxes_alive=sandboxes_alive,
        checkpoints=checkpoints,
        checkpoints_kept=None if checkpoints is None else min(checkpoints, kept + 1 if kept else checkpoints),
        checkpoint_gib=size_gib,
        disk_gib=None,
        memory=gpu_memory(config, counted, card_gib) if counted and card_gib else None,
        host_gib=host_memory_gib(config, counted) if counted else None,
    )
    return _with_disk(plan)


def _with_disk(plan: Plan) -> Plan:
    if plan.checkpoint_gib is None or plan.steps is None:
        return plan
    trajectories = plan.rollouts * plan.steps + (plan.val_rollouts or 0) * (plan.validations or 0)
    records_gib = trajectories * plan.longest_tokens * RECORD_BYTES_A_TOKEN / 2**30
    disk_gib = (plan.checkpoints_kept or 0) * plan.checkpoint_gib + records_gib
    return replace(plan, disk_gib=disk_gib)


def _steps(config: DictConfig, train_rows: int | None) -> int | None:
    """verl drops the last, incomplete batch of an epoch, and ends with the epochs whatever was asked."""
    asked = config.trainer.total_training_steps
    if train_rows is None:
        return asked
    in_epochs = train_rows // config.data.train_batch_size * config.trainer.total_epochs
    return in_epochs if asked is None else min(asked, in_epochs)


def _times(steps: int, every: int) -> int:
    """How often something happens that happens every N steps and at the last; never if N is not above 0."""
    return 0 if every <= 0 else steps // every + int(steps % every > 0)
