"""verl_ext.preflight: what is said before Ray starts, and that it is all said at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_ext import preflight
from verl_ext.compose import CONFIG_DIR, compose, resolve
from verl_ext.errors import ConfigurationError


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> DictConfig:
    """A configuration with nothing wrong."""
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("config.json", "train.parquet", "val.parquet"):
        (folder / name).touch()
    ours = {
        "verl_ext.run_id": "r",
        "verl_ext.run_dir": folder / "run",
        "verl_ext.config_dir": CONFIG_DIR,
        "actor_rollout_ref.model.path": folder,
        "data.train_files": folder / "train.parquet",
        "data.val_files": f"[{folder / 'val.parquet'}]",
        "data.train_batch_size": 16,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    }
    return resolve(compose("smoke", "cpu", [f"{key}={value}" for key, value in ours.items()]))


def problems(good: DictConfig, **changes: object) -> list[str]:
    config = good.copy()
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value)
    try:
        preflight.check(config)
    except ConfigurationError as error:
        first, *lines = str(error).split("\n  - ")
        assert first == f"{len(lines)} problem(s) before the start:"
        return lines
    return []


def test_a_good_configuration_passes(good: DictConfig):
    assert problems(good) == []


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_rollout_ref.model.path": "/no/such/model"}, "no model in /no/such/model"),
        ({"actor_rollout_ref.model.path": None}, "no model in None"),
        ({"data.train_files": "/no/such.parquet"}, "data.train_files: /no/such.parquet is not there"),
        ({"data.val_files": ["/a.parquet"]}, "data.val_files: /a.parquet is not there"),
        ({"data.val_files": []}, "data.val_files names no file"),
        ({"data.train_files": None}, "data.train_files names no file"),
        ({"custom_reward_function.path": "/no/reward.py"}, "custom_reward_function.path: /no/reward.py"),
        ({f"{ROLLOUT}.multi_turn.tool_config_path": "/no/tool.yaml"}, "tool_config_path: /no/tool.yaml"),
        ({f"{ROLLOUT}.agent.agent_loop_config_path": "/no/loops.yaml"}, "agent_loop_config_path: /no/loops.yaml"),
        ({f"{ROLLOUT}.agent.num_workers": 3}, "128 trajectories do not divide among 3 agent loop workers"),
        ({f"{ACTOR}.ppo_mini_batch_size": 5}, "is no multiple of ppo_mini_batch_size 5"),
        ({f"{ACTOR}.ppo_mini_batch_size": 32}, "is no multiple of ppo_mini_batch_size 32"),
        ({f"{ROLLOUT}.tensor_model_parallel_size": 2}, "tensor_model_parallel_size 2"),
        ({f"{ACTOR}.ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size 2"),
        ({"trainer.n_gpus_per_node": 3}, "do not divide among 3 GPUs"),
        ({"trainer.n_gpus_per_node": 0}, "trainer.n_gpus_per_node is 0"),
        ({f"{ROLLOUT}.agent.num_workers": 0}, "num_workers is 0"),
        ({f"{ROLLOUT}.n": None}, "rollout.n is None"),
        ({"data.train_batch_size": "many"}, "data.train_batch_size is 'many'"),
        ({"data.train_batch_size": 1.5}, "data.train_batch_size is 1.5"),
        ({"trainer.nnodes": True}, "trainer.nnodes is True"),
        ({f"{ROLLOUT}.free_cache_engine": False}, "free_cache_engine=False stops weight sync"),
        ({f"{ROLLOUT}.mode": "sync"}, "mode is 'sync'"),
        ({f"{ROLLOUT}.multi_turn.max_tool_response_length": 256}, "256 characters"),
        ({f"{ROLLOUT}.multi_turn.max_tool_response_length": None}, "256 characters"),
        ({"verl_ext.on_lost": "abort"}, "pause (wait for the sandbox service) or stop"),
        ({"verl_ext.max_lost_ratio": 20}, "share of a batch, 0 to 1"),
    ],
)
def test_each_problem_alone_is_named_with_its_cure(changes: dict[str, object], words: str, good: DictConfig):
    [*found] = problems(good, **changes)
    assert any(words in line for line in found)
    assert len(found) == 1


def test_all_problems_are_said_at_once(good: DictConfig):
    found = problems(
        good,
        **{
            "actor_rollout_ref.model.path": "/no",
            "data.train_files": "/no.parquet",
            "data.val_files": "/no.parquet",
            f"{ROLLOUT}.agent.num_workers": 3,
            f"{ACTOR}.ppo_mini_batch_size": 5,
            f"{ROLLOUT}.free_cache_engine": False,
            f"{ROLLOUT}.mode": "sync",
        },
    )
    assert len(found) == 7


def test_a_control_may_ask_for_stale_weights(good: DictConfig):
    assert problems(good, **{f"{ROLLOUT}.free_cache_engine": False, "verl_ext.allow_stale_weights": True}) == []


def test_a_run_may_do_without_tools_and_own_reward(good: DictConfig):
    changes = (
        f"{ROLLOUT}.multi_turn.tool_config_path",
        f"{ROLLOUT}.agent.agent_loop_config_path",
        "custom_reward_function.path",
    )
    assert problems(good, **dict.fromkeys(changes)) == []


def test_files_are_one_or_many():
    assert preflight.files("~/a.parquet") == [Path("~/a.parquet").expanduser()]
    assert preflight.files(OmegaConf.create(["/a", "/b"])) == [Path("/a"), Path("/b")]
