"""verl_ext.compose: what a user can write, what is refused, and with which words."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext import compose as under_test
from verl_ext.compose import compose, known_keys, resolve, unknown_keys
from verl_ext.errors import ConfigurationError

OURS = ("verl_ext.run_id=r", "verl_ext.run_dir=/r", "verl_ext.config_dir=/c")


def refused(*overrides: str, recipe: str = "smoke", hardware: str = "cpu") -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(compose(recipe, hardware, overrides))
    return str(caught.value)


@pytest.fixture(scope="module")
def many():
    """One composition with one override of every form."""
    forms = {
        "trainer.save_freq": "-1",
        "actor_rollout_ref.actor.optim.lr": "1e-6",
        "actor_rollout_ref.actor.clip_ratio": "2.5E-1",
        "actor_rollout_ref.actor.entropy_coeff": ".5",
        "trainer.logger": "[console, file]",
        "data.train_files": "[/a.parquet, '/b c.parquet']",
        "trainer.project_name": "a=b=c",
        "trainer.experiment_name": "2025-01-01",
        "data.prompt_key": "'quoted: text'",
        "data.image_key": "on",
        "data.video_key": "",
        "data.reward_fn_key": "${data.prompt_key}",
        "trainer.total_training_steps": "null",
        "trainer.val_before_train": "False",
        "+data.apply_chat_template_kwargs.enable_thinking": "true",
        "++actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space": "2",
        "actor_rollout_ref.model.override_config.rope_scaling": "{rope_type: yarn, factor: 2e0}",
        "ray_kwargs.ray_init.object_store_memory": "1000",
    }
    config = resolve(compose("smoke", "cpu", [*OURS, *(f"{key}={value}" for key, value in forms.items())]))
    return config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.save_freq", -1),
        ("actor_rollout_ref.actor.optim.lr", 1e-6),
        ("actor_rollout_ref.actor.clip_ratio", 0.25),
        ("actor_rollout_ref.actor.entropy_coeff", 0.5),
        ("trainer.logger", ["console", "file"]),
        ("data.train_files", ["/a.parquet", "/b c.parquet"]),
        ("trainer.project_name", "a=b=c"),
        ("trainer.experiment_name", "2025-01-01"),
        ("data.prompt_key", "quoted: text"),
        ("data.image_key", "on"),
        ("data.video_key", ""),
        ("data.reward_fn_key", "quoted: text"),
        ("trainer.total_training_steps", None),
        ("trainer.val_before_train", False),
        ("data.apply_chat_template_kwargs.enable_thinking", True),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space", 2),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.enable_sleep_mode", False),
        ("actor_rollout_ref.model.override_config.rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("actor_rollout_ref.model.override_config.attn_implementation", "sdpa"),
        ("ray_kwargs.ray_init.object_store_memory", 1000),
        ("ray_kwargs.ray_init.num_cpus", 8),
    ],
)
def test_an_override_is_read_as_hydra_reads_it(key: str, value: object, many):
    found = OmegaConf.to_container(many)
    for name in key.split("."):
        found = found[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1E3", 1000.0), ("1.5e3", 1500.0), (".5e3", 500.0), ("-1.", -1.0), ("+3", 3), ("0", 0),
        ("010", "010"), ("1:30", "1:30"), ("0x10", "0x10"), ("1_000", "1_000"), ("1e", "1e"), ("1e5x", "1e5x"),
        ("off", "off"), ("yes", "yes"), ("TRUE", True), ("nothing", "nothing"), ("~", None), ("[]", []), ("{}", {}),
        ("[1e-6, on, [2]]", [1e-6, "on", [2]]), ("é", "é"),
        ("/a/b", "/a/b"), ("\"1e-6\"", "1e-6"), ("a\nb", "a b"),
    ],
)  # fmt: skip
def test_a_value_is_what_it_looks_like(text: str, value: object):
    found = under_test._split(f"key={text}")[1]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.save_frq=1", "did you mean trainer.save_freq?"),
        ("actor_rollout_ref.actor.use_kl_los=true", "did you mean actor_rollout_ref.actor.use_kl_loss?"),
        ("actor_rollout_ref.rolout.n=2", "did you mean actor_rollout_ref.rollout"),
        ("trainer.save_freq.x=1", "did you mean trainer.save_freq?"),
        ("verl_ext.stal_timeout_s=1", "did you mean verl_ext.stall_timeout_s?"),
        ("nothing_like_it=1", "no key of this name"),
        ("+trainer.save_frq=1", "did you mean trainer.save_freq?"),
        ("trainer.save_freq", "write KEY=VALUE"),
        ("=1", "write KEY=VALUE"),
        ("--flag=1", "write KEY=VALUE"),
        ("~trainer.save_freq=1", "write KEY=VALUE"),
        ("trainer.logger[0]=console", "write KEY=VALUE"),
        ("trainer.logger=[console", "cannot be read"),
        ("trainer.project_name=a: b: c", "cannot be read"),
        ("trainer.project_name=!!python/object:os.system x", "cannot be read"),
        ("trainer.project_name=${oops", "override trainer.project_name"),
        ("trainer.project_name=${no.such.key}", "does not resolve"),
        ("trainer.project_name=???", "trainer.project_name has no value"),
    ],
)
def test_a_wrong_override_is_refused_with_its_cure(override: str, words: str):
    message = refused(*OURS, override)
    assert words in message
    assert len(message) < 400


def test_all_unknown_keys_are_named_at_once():
    message = refused("trainer.save_frq=1", "data.see=2", "verl_ext.rund_id=x")
    assert message.startswith("3 problem(s)")
    for key in ("trainer.save_frq", "data.see", "verl_ext.rund_id"):
        assert f"  - {key}: " in message


def test_every_missing_value_is_named():
    message = refused()
    for key in ("verl_ext.run_id", "verl_ext.run_dir", "verl_ext.config_dir"):
        assert key in message


@pytest.mark.parametrize(
    ("recipe", "hardware", "words"),
    [
        ("retol", "cpu", "no recipe named 'retol': did you mean retool?"),
        ("agent_loops", "cpu", "no recipe named 'agent_loops'"),
        ("", "cpu", "no recipe named ''"),
        ("../retool", "cpu", "no recipe named '../retool'"),
        ("smoke", "cpus", "no hardware named 'cpus': did you mean cpu?"),
        ("smoke", "h300", "There are: "),
    ],
)
def test_a_wrong_name_lists_the_right_ones(recipe: str, hardware: str, words: str):
    assert words in refused(recipe=recipe, hardware=hardware)


@pytest.fixture
def config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recipe's configuration that a test may spoil."""
    copied = tmp_path / "config"
    shutil.copytree(under_test.CONFIG_DIR, copied)
    monkeypatch.setattr(under_test, "CONFIG_DIR", copied)
    monkeypatch.setattr(under_test, "HARDWARE_DIR", copied / "hardware")
    return copied


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("mine.yaml", "defaults: [smoke, _self_]\ntrainer: {save_frq: 1}\n", "did you mean trainer.save_freq?"),
        ("mine.yaml", "defaults: [smoke, _self_]\nverl_ext: {stal_timeout_s: 1}\n", "did you mean verl_ext.stall"),
        ("mine.yaml", "defaults: [no_such, _self_]\n", "does not compose"),
        (
            "hardware/mine.yaml",
            "# @package _global_\ntrainer: {n_gpu_per_node: 1}\n",
            "did you mean trainer.n_gpus_per_node?",
        ),
        ("hardware/mine.yaml", "trainer: {nnodes: 1}\n", "hardware"),
    ],
)
def test_a_typo_in_a_file_is_refused_too(file: str, text: str, words: str, config_dir: Path):
    (config_dir / file).write_text(text)
    names = {"hardware": "mine"} if file.startswith("hardware") else {"recipe": "mine"}
    assert words in refused(*OURS, **names)


def test_a_new_file_is_a_new_name(config_dir: Path):
    (config_dir / "mine.yaml").write_text("defaults: [smoke, _self_]\ntrainer: {save_freq: 7}\n")
    assert under_test.recipe_names() == ["mine", "retool", "smoke"]
    assert compose("mine", "cpu").trainer.save_freq == 7


def test_hardware_wins_over_the_recipe_and_an_override_over_both():
    assert compose("smoke", "cpu").actor_rollout_ref.rollout.agent.num_workers == 1
    changed = compose("smoke", "cpu", ["actor_rollout_ref.rollout.agent.num_workers=4"])
    assert changed.actor_rollout_ref.rollout.agent.num_workers == 4


def test_what_verl_has_is_known_and_what_it_has_not_is_not():
    keys = known_keys()
    assert {"actor_rollout_ref.rollout.n", "trainer", "verl_ext.run_id"} <= keys
    assert unknown_keys(OmegaConf.create({"trainer": {"nnodes": 1}})) == []
    [(_, told)] = unknown_keys(OmegaConf.create({"a": {"b": {"c": 1}}}))
    assert told == "a.b.c: verl 0.6.1 has no key of this name or a similar one"


def test_without_verl_the_cure_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(under_test, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="invoke setup"):
        under_test.verl_config_dir()
