"""`invoke train --dry-run`: the plan in numbers, the layers, and a bare command that means the same.

That verl itself composes the bare command so is in tests/contract/test_bare_command.py.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from verl_ext import bare_command, launch
from verl_ext.compose import verl_config_dir
from verl_ext.plan import Plan, make_plan
from verl_ext.request import RunRequest, configure
from verl_ext.settings import Settings

ROOT = Path(launch.__file__).parents[1]
EXTERNAL = {True: "verl_ext.cpu,verl_ext.advantage", False: "verl_ext.advantage"}


def dry(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = launch.main(["--dry-run", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def plan_of(full_root: Path, no_complaint_of_this_machine: None, make_data):
    make_data(full_root / "data" / "retool" / "train.parquet", 17_290)

    def make(hardware: str = "h20x4", *overrides: str) -> Plan:
        return configure(RunRequest(hardware=hardware, overrides=overrides), Settings.load()).subject.plan

    return make


def test_everything_is_shown_and_nothing_is_written(full_root, no_complaint_of_this_machine, capsys):
    before = sorted(full_root.rglob("*"))
    status, out, err = dry(capsys, "--hardware=h200x1", "trainer.save_freq=7", "trainer.logger=[console,file]")
    assert (status, err) == (0, "")
    for words in (
        "verl 0.6.1", "recipe retool", "hardware h200x1", "trainer.save_freq", "[console,file]",
        "128 prompts, 1,024 trajectories, 4 optimiser steps", "18,874,368", "960 wait for their turn",
        "GPU of 139.8 GiB", "log-probs", "python -m verl.trainer.main_ppo \\\n", "No problem was found.",
    ):  # fmt: skip
        assert words in out, words
    assert sorted(full_root.rglob("*")) == before


def test_a_wrong_configuration_is_planned_and_then_refused(full_root, no_complaint_of_this_machine, capsys):
    status, out, err = dry(capsys, "--hardware=h200x1", "trainer.save_frq=7", "actor_rollout_ref.rollout.mode=sync")
    assert status == 2
    assert "optimiser steps" in out
    assert err.startswith("2 problem(s) before the start")


def test_without_model_and_data_the_plan_says_what_it_does_not_know(full_root, capsys, monkeypatch):
    monkeypatch.setenv("VERL_EXT_DATA_ROOT", "elsewhere")
    status, out, err = dry(capsys, "--hardware=h20x4")
    assert status == 2
    assert out.count("not known without the data") == 2
    assert "not known without the model's config.json" in out
    assert "invoke download --model Qwen/Qwen3-4B-Instruct-2507" in err


def test_another_machines_run_can_be_planned_here(full_root, no_complaint_of_this_machine, capsys, monkeypatch):
    monkeypatch.setattr("verl_ext.preflight.subject.visible_gpus", list)
    status, out, err = dry(capsys, "--hardware=h200x8")
    assert (status, err) == (0, "")
    assert "On this machine it would not start" in out
    assert "the run wants 8" in out


def test_sizes_that_are_none_are_not_planned_with(full_root, no_complaint_of_this_machine, capsys):
    status, out, err = dry(capsys, "--hardware=h20x4", "data.train_batch_size=0", "trainer.nnodes=two")
    assert status == 2
    assert "optimiser steps" not in out
    assert err.startswith("2 problem(s)")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.project_name=hf_canary0123456789", "trainer.project_name holds HF_TOKEN"),
        ("trainer.save_freq=hf_canary0123456789", "trainer.save_freq is '***'"),
        ("hf_canary0123456789", "write KEY=VALUE"),
        ("HF_TOKEN=hf_canary9876543210", "HF_TOKEN is a setting"),
    ],
)
def test_a_secret_in_an_override_is_not_shown(
    override, words, full_root, no_complaint_of_this_machine, capsys, monkeypatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_canary0123456789")
    status, out, err = dry(capsys, "--hardware=h20x4", override)
    assert status == 2
    assert "canary" not in out + err
    assert words in err


def test_the_recipes_plan(plan_of):
    plan = plan_of("h20x4")
    assert (plan.prompts, plan.rollouts, plan.mini_batches, plan.longest_tokens) == (128, 1024, 4, 18432)
    assert plan.steps == 17_290 // 128 == 135
    assert plan.checkpoints == 5  # 30, 60, 90, 120, and the last
    assert plan.checkpoints_kept == 3  # two kept, and the one that is being saved
    assert plan.validations == 28  # before, every 5 steps, which meets the last
    assert plan.val_rollouts == 900
    assert plan.checkpoint_gib == pytest.approx(44.95, abs=0.01)
    records_gib = (135 * 1024 + 28 * 900) * 18432 * 9 / 2**30
    assert plan.disk_gib == pytest.approx(3 * plan.checkpoint_gib + records_gib)
    assert (plan.sandboxes_wanted, plan.sandboxes_alive) == (1024, 64)


@pytest.mark.parametrize(
    ("overrides", "steps", "checkpoints", "validations"),
    [
        (["trainer.total_training_steps=3"], 3, 1, 2),
        (["trainer.total_training_steps=1000"], 135, 5, 28),
        (["trainer.total_epochs=2"], 270, 9, 55),
        (["trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false"], 135, 0, 0),
    ],
)
def test_a_run_is_counted_as_verl_counts(overrides, steps, checkpoints, validations, plan_of):
    plan = plan_of("h20x4", *overrides)
    assert (plan.steps, plan.checkpoints, plan.validations) == (steps, checkpoints, validations)


def test_an_accounts_limit_is_the_plans(full_root, no_complaint_of_this_machine, monkeypatch):
    monkeypatch.setenv("E2B_API_KEY", "ark_" + "0a" * 8)
    found = configure(RunRequest(hardware="h20x4"), Settings.load())
    assert found.subject.plan.sandboxes_alive == 10


def test_on_a_cpu_there_is_no_card(plan_of):
    assert plan_of("cpu").memory is None


def test_a_plan_without_anything_is_a_plan(plan_of, full_root):
    config = configure(RunRequest(hardware="cpu", train="/no", val="/no"), Settings.load()).config
    plan = make_plan(config, None, sandboxes_alive=1, card_gib=None)
    assert (plan.train_rows, plan.steps, plan.disk_gib, plan.host_gib) == (None, None, None, None)


# --- the bare command


@pytest.mark.parametrize(("recipe", "hardware"), [("retool", "h20x4"), ("retool", "cpu"), ("smoke", "h200x1")])
def test_the_bare_command_composes_to_the_same(recipe: str, hardware: str, full_root, no_complaint_of_this_machine):
    odd = [
        "trainer.project_name=\"it's: a 'name' \\\\\"",
        "data.prompt_key='1e3'",
        "data.image_key='null'",
        "data.video_key=''",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config={level: 3, sizes: [1, 2]}",
        "actor_rollout_ref.actor.optim.lr=2e-7",
        "trainer.rollout_data_dir=/a b",
    ]
    found = configure(RunRequest(recipe=recipe, hardware=hardware, overrides=tuple(odd)), Settings.load())
    words = shlex.split(bare_command.command(found.config).replace("\\\n", " "))
    assert words[:2] == [f"PYTHONPATH={ROOT}", f"VERL_USE_EXTERNAL_MODULES={EXTERNAL[hardware == 'cpu']}"]
    assert words[2:5] == ["python", "-m", "verl.trainer.main_ppo"]
    with initialize_config_dir(str(verl_config_dir()), version_base=None):
        alone = hydra_compose("ppo_trainer", overrides=words[5:])
    assert OmegaConf.to_container(alone, resolve=True) == OmegaConf.to_container(found.config)


def test_the_bare_command_says_only_what_differs(full_root, no_complaint_of_this_machine):
    found = configure(RunRequest(hardware="h20x4"), Settings.load())
    keys = [override.partition("=")[0] for override in bare_command.overrides(found.config)]
    assert len(keys) == len(set(keys)) < 80
    assert "actor_rollout_ref.rollout.prompt_length" not in keys  # it follows data.max_prompt_length by itself
    assert "data.truncation" not in keys  # verl's own default


def test_a_dry_run_loads_nothing_heavy(full_root):
    heavy = ("torch", "ray", "vllm", "verl", "transformers", "tensordict", "e2b")
    code = (
        "import sys; from verl_ext import launch; launch.main(['--dry-run', '--hardware=h20x4']); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.endswith("[]\n"), done.stdout[-300:] + done.stderr
    assert "Memory of one GPU" in done.stdout
