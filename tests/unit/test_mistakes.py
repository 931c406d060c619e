"""Forty things that a person mistypes: each ends in exit status 2, words and a cure, and never in a traceback.

Each is what is typed, or written in `.env`, and a part of the cure. The commands run in this process, as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipe.retool import prepare_data
from verl_ext import download, export, launch, settings

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": launch.main,
    "download": download.main,
    "prepare-data": prepare_data.main,
    "export": export.main,
    "settings": settings._main,
}

# what is typed behind `invoke`, and a part of the answer
TYPED = [
    ("train --hardware h200x3", "did you mean h200x"),
    ("train --hardware H200X1", "There are: cpu, h200x1"),
    ("train --hardware h200x1.yaml", "did you mean h200x1?"),
    ("train --recipe retol --hardware cpu", "did you mean retool?"),
    ("train --recipe recipe/retool/config/retool.yaml --hardware cpu", "There are: retool, smoke"),
    ("train --hardware cpu --model Qwen3-4B", "no model in"),
    ("train --hardware cpu --model Qwen/Qwen3-4B-Instuct-2507", "invoke download --model Qwen/Qwen3-4B-Instuct-2507"),
    ("train --hardware cpu --train data/retool", "is not there"),
    ("train --hardware cpu --train root/data/retool", "is a folder: name the file in it"),
    ("train --hardware cpu --val .env", "is no parquet file"),
    ("train --hardware cpu --run-id my/run", "use letters, digits"),
    ("train --hardware cpu --sandbox ags", "- --sandbox must be one of auto, e2b, local"),
    ("train --hardware cpu --sandbox e2b", "- --sandbox is e2b but E2B_API_KEY is not set"),
    ("train --hardware cpu --data-root .env", "- --data-root is no folder"),
    ("train --hardware cpu --dry-run --json", "leave one of them away"),
    ("train --hardware cpu --stop-on entropy", "which is no alarm: did you mean entropy-collapse?"),
    ("train --hardware cpu --stop-on truncation,", "names '', which is no alarm"),
    ("train --hardware cpu trainer.resume_mode=resume_path", "give trainer.resume_from_path a folder"),
    ("train --hardware cpu --env-file no.env", "no.env cannot be read"),
    ("train --hardware cpu --hardwear cpu", "unrecognized arguments: --hardwear"),
    ("train --hardware cpu trainer.save_freq", "write KEY=VALUE"),
    ("train --hardware cpu trainer.save_freq 10", "write KEY=VALUE"),
    ("train --hardware cpu trainer.save_freq:10", "write KEY=VALUE"),
    ("train --hardware cpu save_freq=10", "did you mean trainer.save_freq?"),
    ("train --hardware cpu trainer.save-freq=10", "did you mean trainer.save_freq?"),
    ("train --hardware cpu Trainer.save_freq=10", "did you mean trainer.save_freq?"),
    ("train --hardware cpu data.batch_size=64", "did you mean data.train_batch_size or"),
    ("train --hardware cpu actor.optim.lr=1e-6", "did you mean actor_rollout_ref.actor.optim.lr"),
    ("train --hardware cpu actor_rollout_ref.actor.optim.lr=1e-6e", "write a number"),
    ("train --hardware cpu actor_rollout_ref.actor.optim.lr=1", "for example 1e-6"),
    ("train --hardware cpu actor_rollout_ref.rollout.gpu_memory_utilization=90%", "write a number"),
    ("train --hardware cpu trainer.val_before_train=no", "write true or false"),
    ("train --hardware cpu trainer.logger=[console,wand]", "did you mean wandb?"),
    ("train --hardware cpu trainer.logger=[console", "cannot be read"),
    ("train --hardware cpu trainer.nnodes=two", "write a whole number"),
    ("train --hardware cpu trainer=10", "is a group of keys"),
    ("train --hardware cpu data.train_batch_size=100", "is no multiple of"),
    ("train --hardware cpu data.train_batch_size=0", "at least 1"),
    ("train --hardware cpu actor_rollout_ref.rollout.n=1", "it needs 2 or more"),
    ("train --hardware cpu verl_ext.waive=[gpu-memroy]", "did you mean gpu-memory?"),
    ("train --hardware cpu E2B_API_KEY=ark_0123456789", "put it into .env"),
    ("download --model Qwen3-4B", "write it like Qwen/"),
    ("download --data-root .env", "--data-root is no folder"),
    ("prepare-data --data-root .env", "--data-root is no folder"),
    ("download --source hugginface", "there are huggingface, modelscope"),
    ("prepare-data --train no/such.parquet", "no such file or folder"),
    ("prepare-data --train root/models --val root/models", "no .parquet and no .jsonl file"),
    ("prepare-data --max-rows -1", "must be at least 1"),
    ("export root/runs/no", "root/runs/no"),
]


@pytest.mark.parametrize(("typed", "words"), TYPED, ids=[typed for typed, _ in TYPED])
def test_what_is_mistyped_has_a_cure(
    typed: str, words: str, full_root: Path, no_complaint_of_this_machine: None, capsys: pytest.CaptureFixture[str]
):
    Path(".env").write_text("")
    command, *arguments = typed.split()
    try:
        status = COMMANDS[command](arguments)
    except SystemExit as stopped:  # argparse
        status = stopped.code
    told = capsys.readouterr()
    assert status == 2, told.err
    assert words in told.err
    assert "Traceback" not in told.err + told.out
    assert not (full_root / "runs").exists()


# a line of `.env`, and a part of the answer of `invoke settings`
WRITTEN = [
    ("E2B_APIKEY=ark_0123456789", "did you mean E2B_API_KEY"),
    ("VERL_EXT_SANDBOX_MAX_ALIV=5", "did you mean VERL_EXT_SANDBOX_MAX_ALIVE?"),
    ("E2B_API_KEY=your-key-here", "placeholder"),
    ("E2B_API_KEY=", "empty"),
    ("E2B_API_KEY=“ark_0123456789”", "ASCII"),
    ("export E2B_API_KEY=ark_0123456789", "export"),
    ("E2B_API_KEY ark_0123456789", ".env line 1: E2B_API_KEY has no ="),
    ("ark_0123456789", ".env line 1: has no =: write NAME=value"),
    ("VERL_EXT_SANDBOX_SHARE=1.5", "from 0.001 to 1"),
    ("VERL_EXT_DATA_ROOT=/etc/passwd", "is no folder"),
    ("E2B_DOMAIN=shanghai.tencentags.com", "did you mean ap-shanghai"),
    ("E2B_DOMAIN=https://ap-shanghai.tencentags.com/", "without https"),
    ("VERL_EXT_SANDBOX_MAX_ALIVE=ten", "whole number"),
    ("VERL_EXT_DATA_ROOT=/my data", "blank"),
    ("HF_ENDPOINT=hf-mirror.com", "is no address"),
]


@pytest.mark.parametrize(("line", "words"), WRITTEN)
def test_what_is_written_wrong_in_the_env_file_has_a_cure(
    line: str, words: str | None, full_root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("VERL_EXT_DATA_ROOT")
    Path(".env").write_text(f"{line}\n")
    status = COMMANDS["settings"]([])
    told = capsys.readouterr()
    assert status == (2 if words else 0)
    assert (words or "") in told.err
    assert "ark_0123456789" not in told.err + told.out


def test_there_are_forty_and_more():
    assert len(TYPED) + len([line for line, words in WRITTEN if words]) >= 40
    assert len({typed for typed, _ in TYPED}) == len(TYPED)
