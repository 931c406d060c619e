"""The checkpoints that a run keeps: found by name and step, and looked through without torch."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_ext.checkpoint.kept import find_checkpoint, kept_steps, problems
from verl_ext.checkpoint.model_card import model_card
from verl_ext.errors import ConfigurationError
from verl_ext.export import main
from verl_ext.runs import find_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root's runs, with one of two checkpoints of two ranks each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERL_EXT_DATA_ROOT", str(tmp_path / "root"))
    monkeypatch.delenv("VERL_EXT_ENV_FILE", raising=False)
    run = tmp_path / "root" / "runs" / "mine"
    for step in (9, 10):
        actor = run / "checkpoints" / f"global_step_{step}" / "actor"
        (actor / "huggingface").mkdir(parents=True)
        (actor / "huggingface" / "config.json").write_text("{}")
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 2}))
        for rank in range(2):
            with zipfile.ZipFile(actor / f"model_world_size_2_rank_{rank}.pt", "w") as archive:
                archive.writestr("archive/data/0", bytes(range(256)) * 40)
    (run / "config.yaml").write_text("trainer: {}\n")
    return run.parent


def test_the_newest_is_taken_and_any_kept_one_can_be_named(runs: Path):
    assert kept_steps(runs / "mine") == [9, 10]
    assert find_checkpoint(runs, "mine").step == 10
    assert find_checkpoint(runs, "mine", 9).step == 9
    assert find_checkpoint(runs, str(runs / "mine")).run_dir == runs / "mine"
    for folder in ("global_step_9", "global_step_9/actor"):
        assert find_checkpoint(runs, str(runs / "mine" / "checkpoints" / folder)).step == 9


def test_a_step_that_is_not_kept_is_told_with_those_that_are(runs: Path):
    with pytest.raises(ConfigurationError, match="keeps no checkpoint of step 7: there are 9, 10"):
        find_checkpoint(runs, "mine", 7)


def test_a_run_is_found_by_name_and_a_slip_in_it_is_told(runs: Path):
    assert find_run(runs, "mine") == runs / "mine"
    Path("mine").mkdir()  # in the user's own folder, and no run
    assert find_run(runs, "mine") == runs / "mine"
    with pytest.raises(ConfigurationError, match=r"no run 'mime'.*did you mean mine\?"):
        find_run(runs, "mime")
    with pytest.raises(ConfigurationError, match=r"is no run folder: it has no config.yaml"):
        find_run(runs, str(runs))


def test_a_whole_checkpoint_has_no_problems(runs: Path):
    assert list(problems(find_checkpoint(runs, "mine"))) == []


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model_world_size_2_rank_1.pt", "missing", "is missing"),
        ("model_world_size_2_rank_1.pt", "cut", "is damaged (File is not a zip file)"),
        ("model_world_size_2_rank_0.pt", "flipped", "is damaged (archive/data/0 does not match its checksum)"),
        ("model_world_size_2_rank_0.pt", "empty", "is damaged (File is not a zip file)"),
        ("huggingface/config.json", "missing", "is missing"),
    ],
)
def test_what_is_missing_or_damaged_is_refused_by_name(
    name: str, damage: str, words: str, runs: Path, capsys: pytest.CaptureFixture
):
    path = runs / "mine" / "checkpoints" / "global_step_10" / "actor" / name
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    assert main(["mine"]) == 2
    said = capsys.readouterr().err
    assert f"{path} {words}: copy it again" in said
    assert not (runs / "mine" / "export").exists()


def test_without_the_number_of_ranks_nothing_is_guessed(runs: Path, capsys: pytest.CaptureFixture):
    (runs / "mine" / "checkpoints" / "global_step_10" / "actor" / "fsdp_config.json").write_text("{")
    assert main(["mine"]) == 2
    assert "how many shards there are is not known" in capsys.readouterr().err


def test_an_export_that_is_there_is_not_overwritten(runs: Path, capsys: pytest.CaptureFixture):
    (runs / "mine" / "export" / "global_step_10").mkdir(parents=True)
    assert main(["mine"]) == 2
    assert "is there already: delete it or choose another --out" in capsys.readouterr().err


def test_the_card_of_a_run_that_left_nothing_is_still_a_card(runs: Path, tmp_path: Path):
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": "/m/org--base"},
                "rollout": {"multi_turn": {"tool_config_path": "/gone.yaml"}},
            },
            "data": {"train_files": "/d/train.parquet", "val_files": "/d/val.parquet"},
        }
    )
    (runs / "mine" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    (tmp_path / "out").mkdir()
    card = model_card(find_checkpoint(runs, "mine"), tmp_path / "out")
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# mine, step 10" in card
    assert "/d/" not in card
