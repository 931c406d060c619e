"""What can be known to fail before Ray starts, said all at once, each with its cure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.errors import ConfigurationError


def check(config: DictConfig) -> None:
    """Refuse a resolved configuration that verl 0.6.1 would fail on later.

    Raises:
        ConfigurationError: with every problem found.
    """
    sizes = list(_sizes(config))
    problems = [*_paths(config), *(sizes or _divisions(config)), *_broken_settings(config)]
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigurationError(f"{len(problems)} problem(s) before the start:{lines}")


def _paths(config: DictConfig) -> Iterator[str]:
    model = Path(str(config.actor_rollout_ref.model.path)).expanduser()
    if not (model / "config.json").is_file():
        yield f"no model in {model} (no config.json): give its folder with --model"
    for name in ("train_files", "val_files"):
        paths = files(config.data[name])
        if not paths:
            yield f"data.{name} names no file: make one with `invoke prepare-data`"
        for path in paths:
            if not path.is_file():
                yield f"data.{name}: {path} is not there: make it with `invoke prepare-data`"
    for key, value in (
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("rollout.multi_turn.tool_config_path", config.actor_rollout_ref.rollout.multi_turn.tool_config_path),
        ("rollout.agent.agent_loop_config_path", config.actor_rollout_ref.rollout.agent.agent_loop_config_path),
    ):
        if value and not Path(str(value)).is_file():
            yield f"{key}: {value} is not there"


_SIZES = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.val_kwargs.n",
    "actor_rollout_ref.rollout.agent.num_workers",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)


def _sizes(config: DictConfig) -> Iterator[str]:
    for key in _SIZES:
        value = OmegaConf.select(config, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield f"{key} is {value!r}: it must be a whole number of at least 1"


def _divisions(config: DictConfig) -> Iterator[str]:
    rollout, data, trainer = config.actor_rollout_ref.rollout, config.data, config.trainer
    actor = config.actor_rollout_ref.actor
    rollouts, workers = data.train_batch_size * rollout.n, rollout.agent.num_workers
    gpus = trainer.n_gpus_per_node * trainer.nnodes
    if rollouts % workers:
        yield (
            f"train_batch_size x n = {rollouts} trajectories do not divide among {workers} agent loop workers: "
            "change rollout.agent.num_workers"
        )
    if data.train_batch_size % actor.ppo_mini_batch_size:
        yield (
            f"train_batch_size {data.train_batch_size} is no multiple of ppo_mini_batch_size "
            f"{actor.ppo_mini_batch_size}: change one of them"
        )
    if gpus % rollout.tensor_model_parallel_size:
        size = rollout.tensor_model_parallel_size
        yield f"{gpus} GPUs do not divide into engines of tensor_model_parallel_size {size}"
    if gpus % actor.ulysses_sequence_parallel_size:
        yield (
            f"{gpus} GPUs do not divide into groups of ulysses_sequence_parallel_size "
            f"{actor.ulysses_sequence_parallel_size}"
        )
    if rollouts % gpus:
        yield f"train_batch_size x n = {rollouts} trajectories do not divide among {gpus} GPUs"


def _broken_settings(config: DictConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.free_cache_engine and not config.verl_ext.get("allow_stale_weights", False):
        yield (
            "rollout.free_cache_engine=False stops weight sync in verl 0.6.1 (verl PR 4248), so the policy that "
            "generates is never the one that is trained: leave it True"
        )
    if rollout.mode != "async":
        yield f"rollout.mode is {rollout.mode!r}: the agent loop runs in mode async only"
    ours = config.verl_ext
    if ours.get("on_lost", "pause") not in ("pause", "stop"):
        yield f"verl_ext.on_lost is {ours.on_lost!r}: pause (wait for the sandbox service) or stop"
    if not 0 <= float(ours.get("max_lost_ratio", 0.2)) <= 1:
        yield f"verl_ext.max_lost_ratio is {ours.max_lost_ratio}: it is a share of a batch, 0 to 1"
    longest = rollout.multi_turn.max_tool_response_length
    if not isinstance(longest, int) or longest <= 256:
        yield "rollout.multi_turn.max_tool_response_length is verl's 256 characters: a traceback needs more, say 4096"


def files(value: Any) -> list[Path]:
    """verl's train_files and val_files: one path or a list of them."""
    return [Path(str(item)).expanduser() for item in ([value] if isinstance(value, str) else value or [])]
