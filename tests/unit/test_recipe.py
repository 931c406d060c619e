"""The recipe is the tutorial's, key by key; every key in which it is not is in recipe/retool/README.md.

The tutorial: verl v0.6.1 recipe/retool/run_qwen2_7b_dapo.sh with the figures for Qwen3-4B on four H20.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from verl_ext import compose as composition
from verl_ext.compose import CONFIG_DIR, compose, hardware_names, recipe_values, resolve
from verl_ext.settings import Settings

README = CONFIG_DIR.parent / "README.md"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TUTORIAL = {
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_ctrl.kl_coef": 0.0,
    "data.return_raw_chat": True,
    "data.train_batch_size": 128,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 16384,
    "data.filter_overlong_prompts": True,
    "data.truncation": "error",
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.0,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.28,
    f"{ACTOR}.clip_ratio_c": 10.0,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_mini_batch_size": 32,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 2048 + 16384,
    f"{ACTOR}.ulysses_sequence_parallel_size": 4,
    f"{ACTOR}.fsdp_config.param_offload": True,
    f"{ACTOR}.fsdp_config.optimizer_offload": True,
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 4 * (2048 + 16384),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 4 * (2048 + 16384),
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.multi_turn.enable": True,
    f"{ROLLOUT}.multi_turn.max_user_turns": 8,
    f"{ROLLOUT}.multi_turn.max_assistant_turns": 8,
    f"{ROLLOUT}.multi_turn.format": "hermes",
    f"{ROLLOUT}.gpu_memory_utilization": 0.9,
    f"{ROLLOUT}.n": 8,
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.val_kwargs.top_p": 0.6,
    f"{ROLLOUT}.val_kwargs.temperature": 1.0,
    f"{ROLLOUT}.val_kwargs.n": 30,
    "trainer.logger": ["console", "tensorboard"],
    "trainer.n_gpus_per_node": 4,
    "trainer.nnodes": 1,
    "trainer.val_before_train": True,
    "trainer.log_val_generations": 100,
    "trainer.save_freq": 30,
    "trainer.test_freq": 5,
    "trainer.total_epochs": 1,
}
# Keys of the recipe that are the project's own machinery and no choice about training.
MACHINERY = {
    "actor_rollout_ref.hybrid_engine", f"{ROLLOUT}.load_format", f"{ROLLOUT}.agent.agent_loop_config_path",
    f"{ROLLOUT}.multi_turn.tool_config_path", f"{ROLLOUT}.multi_turn.tool_response_truncate_side", "critic.enable",
    "custom_reward_function.path", "custom_reward_function.name", "reward_model.reward_manager", "data.val_batch_size",
    "trainer.default_local_dir", "trainer.experiment_name", "custom_reward_function.reward_kwargs.shaping",
}  # fmt: skip


@pytest.fixture(scope="module")
def config() -> DictConfig:
    ours = ["verl_ext.run_id=r", "verl_ext.run_dir=/r", f"verl_ext.config_dir={CONFIG_DIR}"]
    return resolve(compose("retool", "h20x4", ours))


@pytest.mark.parametrize("key", TUTORIAL)
def test_each_figure_is_the_tutorials(key: str, config: DictConfig):
    value = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(value) if OmegaConf.is_config(value) else value) == TUTORIAL[key]


def test_sandboxes_are_the_tutorials():
    settings = Settings.load(environ={})
    assert settings.e2b_domain == "ap-shanghai.tencentags.com"
    assert settings.sandbox_template == "code-interpreter-v1"
    tool = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"][0]["config"]
    assert (tool["sandbox_ttl_s"], tool["call_timeout_s"]) == (300, 30)


def test_what_differs_from_the_tutorial_is_listed_with_its_reason():
    page = README.read_text(encoding="utf-8").partition("## Where the tutorial is not the papers")[0]
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    others = {key for key in recipe_values("retool") if not key.startswith("verl_ext.")} - set(TUTORIAL) - MACHINERY
    unlisted = [key for key in others if not any(f"{key.split('.')[-1]}`" in row for row in rows)]
    assert unlisted == []
    assert all(row.count("|") >= 5 and row.split("|")[4].strip() for row in rows if "experiment_name" not in row)


@pytest.mark.parametrize("hardware", sorted(set(hardware_names()) - {"h20x4", "cpu"}))
def test_what_differs_between_machines_is_listed(hardware: str):
    page = README.read_text(encoding="utf-8")
    base, other = composition.hardware_values("h20x4"), composition.hardware_values(hardware)
    named = {
        f"{ACTOR}.ulysses_sequence_parallel_size": "sequence parallel",
        f"{ACTOR}.strategy": "FSDP",
        f"{ROLLOUT}.gpu_memory_utilization": "`gpu_memory_utilization`",
        f"{ROLLOUT}.agent.num_workers": "agent loop workers",
        "actor_rollout_ref.model.use_liger": "liger kernels",
        f"{ACTOR}.ppo_max_token_len_per_gpu": "tokens a micro-batch",
    }
    for key in {key for key in base.keys() | other.keys() if base.get(key) != other.get(key)}:
        if key in ("trainer.n_gpus_per_node", "verl_ext.gpu_memory_gib"):
            continue  # what the machine is
        assert f"| {named[key]} |" in page, key
    assert f" {hardware} |" in page


def test_pages_that_the_readme_names_are_there():
    for name in ("LOG.md", "samples/README.md", "config/retool.yaml", "reward.py", "prepare_data.py"):
        assert (README.parent / name).is_file()
    assert Path(composition.__file__).with_name("gpu_memory.py").is_file()
