"""verl_ext.manifest: what a run was made from, and no secret in it."""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from verl_ext import manifest as under_test
from verl_ext.data_root import DATA_REPORT, RECORD
from verl_ext.manifest import data_report, manifest, sha256
from verl_ext.settings import Settings

CANARY = "e2b_0123456789abcdefcanary"


@pytest.fixture
def facts(tmp_path: Path, model: Path) -> dict:
    data = tmp_path / "train.parquet"
    data.write_bytes(b"rows")
    settings = Settings.load(environ={"E2B_API_KEY": CANARY, "VERL_EXT_ENV_FILE": "/dev/null"})
    return manifest(model, [data], settings.public_dict())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_the_model_is_named_with_where_it_came_from(facts: dict, model: Path):
    assert facts["model"] == {
        "folder": str(model),
        "download": None,
        "config_sha256": hashlib.sha256(b"{}").hexdigest(),
    }
    record = {"hub": "huggingface", "id": "a/b", "revision": "0" * 40, "files": {"config.json": {"size": 2}}}
    (model / RECORD).write_text(json.dumps(record))
    assert manifest(model, [], {})["model"]["download"] == record


def test_data_and_locks_are_hashed(facts: dict, tmp_path: Path):
    assert facts["data"] == {str(tmp_path / "train.parquet"): hashlib.sha256(b"rows").hexdigest()}
    assert {"cpu.txt", "gpu.txt"} <= set(facts["locks"])
    assert facts["locks"]["cpu.txt"] == sha256(under_test.ROOT / "docker" / "locks" / "cpu.txt")


def test_versions_are_those_installed(facts: dict):
    assert facts["versions"]["numpy"] == version("numpy")
    assert "e2b-code-interpreter" in facts["versions"]
    assert facts["python"].startswith("3.12")
    assert facts["command"] == sys.argv


def test_it_is_json_and_holds_no_secret(facts: dict):
    text = json.dumps(facts)
    assert CANARY not in text
    assert facts["settings"]["E2B_API_KEY"] == "set"


def test_without_git_the_revision_is_null(monkeypatch: pytest.MonkeyPatch, model: Path):
    monkeypatch.setenv("PATH", "/nowhere")
    assert manifest(model, [], {})["git_revision"] is None


def test_a_folder_that_is_no_repository_has_no_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path):
    monkeypatch.setattr(under_test, "ROOT", tmp_path)
    assert manifest(model, [], {})["git_revision"] is None


def test_what_is_not_installed_is_not_named(monkeypatch: pytest.MonkeyPatch, model: Path):
    monkeypatch.setattr(under_test, "PACKAGES", ("no-such-package",))
    assert "no-such-package" not in manifest(model, [], {})["versions"]


def test_the_data_report_is_taken_where_it_speaks_of_the_rows(tmp_path: Path):
    train_data = [{"path": str(tmp_path / "train.parquet"), "content_sha256": "ab"}]
    assert data_report(train_data) is None
    for text, expected in (('{"train": {"content_sha256": "ab"}}', "ab"), ('{"train": []}', None), ("{", None)):
        (tmp_path / DATA_REPORT).write_text(text)
        report = data_report(train_data)
        assert (report and report["train"]["content_sha256"]) == expected
    (tmp_path / DATA_REPORT).write_text('{"train": {"content_sha256": "of other rows"}}')
    assert data_report(train_data) is None
