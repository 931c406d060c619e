"""Every shipped configuration composes, resolves, knows its keys, and keeps to its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from verl_ext.compose import CONFIG_DIR, HARDWARE_DIR, compose, hardware_names, recipe_names, resolve, verl_config_dir

OURS = ("verl_ext.run_id=r", "verl_ext.run_dir=/r", f"verl_ext.config_dir={CONFIG_DIR}")
ALGORITHM = (
    "algorithm", "data.train_batch_size", "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high", "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.rollout.temperature", "data.max_response_length",
    "custom_reward_function", "actor_rollout_ref.rollout.multi_turn",
)  # fmt: skip


@pytest.mark.parametrize("hardware", hardware_names())
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_pair_composes_and_resolves(recipe: str, hardware: str):
    config = resolve(compose(recipe, hardware, OURS))
    rollout = config.actor_rollout_ref.rollout
    assert rollout.mode == "async"
    assert rollout.free_cache_engine is True
    assert rollout.calculate_log_probs is True
    assert rollout.multi_turn.enable is True
    assert rollout.agent.default_agent_loop == "tool_agent"
    assert config.algorithm.adv_estimator == "grpo_without_lost"
    assert config.trainer.max_actor_ckpt_to_keep != 1
    for path in (
        config.custom_reward_function.path,
        rollout.multi_turn.tool_config_path,
        rollout.agent.agent_loop_config_path,
    ):
        assert Path(path).is_file()


@pytest.mark.parametrize("hardware", hardware_names())
def test_hardware_files_hold_no_algorithm(hardware: str):
    path = HARDWARE_DIR / f"{hardware}.yaml"
    assert path.read_text().startswith("# @package _global_\n")
    file = OmegaConf.create(yaml.safe_load(path.read_text()))
    assert [key for key in ALGORITHM if OmegaConf.select(file, key) is not None] == []


def test_our_names_are_none_of_verls():
    # Hydra searches ours first, so a file of the same name would replace verl's.
    theirs = {path.name.removesuffix(".yaml") for path in verl_config_dir().iterdir()}
    assert {path.name.removesuffix(".yaml") for path in CONFIG_DIR.iterdir()} & theirs == set()


def test_a_recipe_puts_itself_last():
    for name in recipe_names():
        assert yaml.safe_load((CONFIG_DIR / f"{name}.yaml").read_text())["defaults"][-1] == "_self_"


def test_the_agent_loop_takes_the_name_that_data_sets_ask_for():
    [entry, _] = yaml.safe_load((CONFIG_DIR / "agent_loops.yaml").read_text())
    assert entry == {"name": "tool_agent", "_target_": "verl_ext.agent_loop.loop.CodeInterpreterLoop"}
