"""What `invoke evaluate` takes for its subject, data and settings, and the tables that it ends with."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from recipe.retool.evaluate import SETS, main, problems_file
from recipe.retool.evaluation_table import LABELS, tables
from verl_ext.compose import CONFIG_DIR, compose, resolve
from verl_ext.data_hash import content_hash
from verl_ext.errors import ConfigurationError
from verl_ext.evaluation.plan import SETTINGS
from verl_ext.evaluation.run import TRAINING_CHECKS
from verl_ext.evaluation.subject import find_subject, wanted_settings
from verl_ext.preflight import CHECKS
from verl_ext.settings import Settings

DAPO = Path(__file__).parents[2] / "recipe" / "retool" / "samples" / "dapo_sample.parquet"


@pytest.fixture(scope="module")
def config() -> str:
    """Of a run that validates in its own way."""
    values = {
        "actor_rollout_ref.model.path": "/base",
        "data.max_response_length": 77,
        "actor_rollout_ref.rollout.val_kwargs.n": 3,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 5,
        "custom_reward_function.reward_kwargs.symbolic": False,
        "data.val_files": "val.parquet",
        "verl_ext.run_id": "mine",
        "verl_ext.run_dir": "/runs/mine",
        "verl_ext.config_dir": str(CONFIG_DIR),
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    return OmegaConf.to_yaml(resolve(compose("retool", "cpu", overrides)))


@pytest.fixture
def settings(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """A data root with that run and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_EXT_DATA_ROOT", str(tmp_path))
    monkeypatch.delenv("VERL_EXT_ENV_FILE", raising=False)
    (tmp_path / "val.parquet").write_bytes(b"")
    (tmp_path / "runs" / "mine" / "checkpoints" / "global_step_4" / "actor").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.yaml").write_text(config)
    (tmp_path / "models" / "org--m").mkdir(parents=True)
    (tmp_path / "models" / "org--m" / "config.json").write_text("{}")
    return Settings.load()


def test_a_run_is_asked_as_it_validates_beside_its_base(settings: Settings, tmp_path: Path):
    subject = find_subject("mine", None, settings)
    assert subject.checkpoint is not None
    assert (subject.checkpoint.step, subject.base, subject.on_cpu) == (4, Path("/base"), True)
    assert subject.data == ("val.parquet",)
    assert wanted_settings(subject, []) == ("no_tools", "tools", "trained")
    asked = resolve(
        compose("smoke", "cpu", [*subject.overrides, "verl_ext.run_id=e", "verl_ext.run_dir=/e", "data.val_files=v",
                                 f"verl_ext.config_dir={CONFIG_DIR}", "actor_rollout_ref.model.path=/base"])
    )  # fmt: skip
    rollout = asked.actor_rollout_ref.rollout
    assert (asked.data.max_response_length, rollout.response_length, rollout.val_kwargs.n) == (77, 77, 3)
    assert (rollout.val_kwargs.top_p, rollout.multi_turn.max_assistant_turns) == (0.6, 5)
    assert asked.custom_reward_function.reward_kwargs.symbolic is False


@pytest.mark.parametrize("text", ["org/m", "models/org--m"])
def test_a_model_is_found_by_its_folder_or_hub_id(text: str, settings: Settings, tmp_path: Path):
    subject = find_subject(text, None, settings)
    assert (subject.base, subject.checkpoint) == (tmp_path / "models" / "org--m", None)
    assert wanted_settings(subject, []) == ("no_tools", "tools")
    with pytest.raises(ConfigurationError, match="is a model, so there is no 'trained'"):
        wanted_settings(subject, ["trained"])


def test_a_slip_is_told_with_what_there_is(settings: Settings):
    with pytest.raises(ConfigurationError, match=r"no run 'mime'.*did you mean mine\?"):
        find_subject("mime", None, settings)
    with pytest.raises(ConfigurationError, match="no setting named 'toolz': there are no_tools, tools, trained"):
        wanted_settings(find_subject("mine", None, settings), ["toolz"])


def test_the_checks_that_are_passed_by_are_checks(settings: Settings):
    assert {check.name for check in CHECKS} >= TRAINING_CHECKS


def test_problems_come_as_prepare_data_has_them(tmp_path: Path):
    path, sha256 = problems_file([str(DAPO)], tmp_path, 4)
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == 4
    assert content_hash(path) == sha256
    assert path.parent == tmp_path / "data" / "evaluate"
    assert "boxed" in rows[0]["prompt"][0]["content"]
    # What was prepared is a source too, and comes out as it went in.
    assert problems_file([str(path)], tmp_path, None) == (path, sha256)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mime"], "no run 'mime'"),
        (["mine", "--step", "7"], "keeps no checkpoint of step 7: there are 4"),
        (["mine", "--n", "0"], "-n is 0: give at least 1"),
        (["mine", "--data", str(DAPO)], "is not at /base: say with --base where it is"),
        (["org/m", "--data", "aime-2025"], f"fetch it with `invoke download --data {SETS['aime-2025']}`"),
        (["org/m", "--data", str(DAPO), "--hardware", "cpu", "--settings", "trained"], "is a model"),
        (["org/m", "--data", str(DAPO), "--hardware", "cpu"], "or give its folder with --model"),
        (["org/m", "--data", str(DAPO), "--hardware", "cpu", "data.no_such=1"], "verl 0.6.1 has no key"),
    ],
)
def test_a_users_mistake_ends_with_2_and_the_cure_and_starts_nothing(
    words: list[str], message: str, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def entry(setting: str, mean: float) -> dict[str, Any]:
    ratios = ("tool_use_ratio", "tool_error_ratio", "parse_failure_ratio", "truncated_ratio", "no_answer_ratio")
    return {
        "setting": setting, "data_source": "aime_2024", "problems": 30, "samples": 900, "lost": 2, "mean": mean,
        "low": mean - 0.1, "high": mean + 0.1, "k": 29, "pass_at_k": {"29": 0.8}, "majority_at_k": {"29": 0.5},
        "turns": 3.0, "tool_calls": 2.0, **dict.fromkeys(ratios, 0.1),
        "response_tokens": {"mean": 5000.0, "p95": 16000.0},
    }  # fmt: skip


def test_the_settings_stand_side_by_side_in_their_order():
    summary = {
        "complete": False,
        "subject": {"name": "mine"},
        "statistics": {"confidence": 0.95},
        "results": [entry("trained", 0.6), entry("no_tools", 0.4), entry("tools", 0.2)],
        "differences": [
            {"data_source": "aime_2024", "from": "no_tools", "to": "tools", "difference": -0.2, "low": -0.3,
             "high": -0.1}
        ],
    }  # fmt: skip
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(*tables(summary))
    shown = console.export_text()
    assert "aime_2024: mine, unfinished" in shown
    heads = next(line for line in shown.splitlines() if "after training" in line)
    assert [heads.index(label) for label in LABELS.values()] == sorted(heads.index(label) for label in LABELS.values())
    means = next(line for line in shown.splitlines() if "mean@29" in line)
    assert means.index("0.400") < means.index("0.200") < means.index("0.600")
    assert "0.300 to 0.500" in shown
    assert "-0.200" in shown
    assert "-0.300 to -0.100" in shown


def test_every_setting_has_a_label():
    assert list(LABELS) == list(SETTINGS)
