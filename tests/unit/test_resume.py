"""Resuming with other rows, or in another order, is refused before anything starts."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl_ext import resume, runs
from verl_ext.checkpoint.marker import MARKER, Marker, seal_rest
from verl_ext.errors import ConfigurationError, DataError


def write(path: Path, numbers: range, **options) -> Path:
    pq.write_table(pa.table({"prompt": [str(number) for number in numbers]}), path, **options)
    return path


@pytest.fixture
def old_run(tmp_path):
    """A run with one checkpoint, and the configuration that would go on from it."""
    run_dir = tmp_path / "runs" / "old"
    checkpoint = run_dir / runs.CHECKPOINTS / "global_step_7"
    (checkpoint / "actor").mkdir(parents=True)
    (checkpoint / "data.pt").write_bytes(b"place")
    Marker(7, 0.0, tuple(seal_rest(checkpoint, []))).write(checkpoint)
    config = OmegaConf.create(
        {
            "data": {
                "train_files": str(write(tmp_path / "train.parquet", range(20))),
                "seed": 1,
                "train_batch_size": 4,
            },
            "trainer": {"resume_mode": "disable", "default_local_dir": str(tmp_path / "new" / "checkpoints")},
            "verl_ext": {"allow_changed_data": False, "allow_unsealed_checkpoint": False},
        }
    )
    (run_dir / runs.CONFIG).write_text(OmegaConf.to_yaml(config))
    (run_dir / runs.MANIFEST).write_text(json.dumps({"train_data": resume.train_data(config)}))
    config.trainer.resume_mode = "resume_path"
    config.trainer.resume_from_path = str(checkpoint)
    return config


def test_the_same_rows_in_the_same_order_go_on(old_run, tmp_path):
    resume.check(old_run)
    # Another path, another writer: the rows count.
    old_run.data.train_files = [str(write(tmp_path / "moved.parquet", range(20), compression="none", row_group_size=3))]
    resume.check(old_run)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("data.seed", 2, "data.seed was 1 and is 2"),
        ("data.train_batch_size", 8, "data.train_batch_size was 4 and is 8"),
        ("data.train_max_samples", 9, "data.train_max_samples was None and is 9"),
        ("data.train_files", "other.parquet", r"other\.parquet holds other rows"),
        ("data.train_files", ["train.parquet", "other.parquet"], "names 2"),
    ],
)
def test_what_would_change_the_rows_or_their_order_is_refused(old_run, tmp_path, monkeypatch, key, value, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "other.parquet", range(1, 21))
    OmegaConf.update(old_run, key, value, force_add=True)
    with pytest.raises(ConfigurationError, match=message):
        resume.check(old_run)
    old_run.verl_ext.allow_changed_data = True
    resume.check(old_run)


def test_everything_that_differs_is_said_at_once(old_run):
    old_run.data.seed, old_run.data.train_batch_size = 2, 8
    with pytest.raises(ConfigurationError, match=r"seed was.*\n.*train_batch_size was.*\n.*allow_changed_data=true"):
        resume.check(old_run)


@pytest.mark.parametrize(
    ("missing", "message"),
    [("data.pt", "data.pt is missing"), (runs.MANIFEST, "no manifest.json above"), (runs.CONFIG, "cannot be read")],
)
def test_what_is_not_known_is_refused(old_run, missing, message):
    checkpoint = Path(old_run.trainer.resume_from_path)
    [path] = [folder / missing for folder in (checkpoint, *checkpoint.parents[:2]) if (folder / missing).exists()]
    path.unlink()
    with pytest.raises(ConfigurationError, match=message):
        resume.check(old_run)


def test_a_checkpoint_of_verls_alone_is_taken_when_told(old_run):
    checkpoint = Path(old_run.trainer.resume_from_path)
    (checkpoint / MARKER).unlink()
    with pytest.raises(ConfigurationError, match=r"not known to be whole.*allow_unsealed_checkpoint=true"):
        resume.check(old_run)
    old_run.verl_ext.allow_unsealed_checkpoint = True
    resume.check(old_run)
    (checkpoint / "data.pt").unlink()
    with pytest.raises(ConfigurationError, match="its place in the order is not known"):
        resume.check(old_run)


def test_another_number_of_ranks_is_refused(old_run):
    checkpoint = Path(old_run.trainer.resume_from_path)
    (checkpoint / "actor" / "model_world_size_4_rank_0.pt").touch()
    old_run.trainer.nnodes, old_run.trainer.n_gpus_per_node = 2, 2
    resume.check(old_run)
    old_run.trainer.nnodes = 1
    with pytest.raises(ConfigurationError, match=r"was saved by 4 ranks, and this run has 2 .*invoke export"):
        resume.check(old_run)


def test_damage_is_refused_whatever_is_allowed(old_run):
    checkpoint = Path(old_run.trainer.resume_from_path)
    (checkpoint / "data.pt").write_bytes(b"plaXe")
    old_run.verl_ext.allow_changed_data = old_run.verl_ext.allow_unsealed_checkpoint = True
    with pytest.raises(ConfigurationError, match=r"damaged.*\n.*data\.pt holds other bytes"):
        resume.check(old_run)
    resume.check(old_run, verified=checkpoint)


def test_a_path_that_is_no_checkpoint_is_said(old_run):
    for path in (str(Path(old_run.trainer.resume_from_path).parent), "/no/global_step_7", None):
        old_run.trainer.resume_from_path = path
        with pytest.raises(ConfigurationError, match="it is no checkpoint"):
            resume.check(old_run)


def test_auto_goes_on_from_the_latest_checkpoint_of_the_folder(old_run):
    checkpoint = Path(old_run.trainer.resume_from_path)
    old_run.trainer.resume_mode = "auto"
    old_run.data.seed = 2
    resume.check(old_run)  # its own folder holds none: a run from the start
    old_run.trainer.default_local_dir = str(checkpoint.parent)
    (checkpoint.parent / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(ConfigurationError, match=r"data\.seed was 1"):
        resume.check(old_run)


def test_a_file_that_cannot_be_read_is_said_before_the_start(old_run, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="Run prepare-data again"):
        resume.train_data(old_run)
