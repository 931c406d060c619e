"""verl_ext.runs: names of runs, and files that grow while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_ext.errors import ConfigurationError
from verl_ext.runs import PHASES, check_run_id, new_run_id, note_phase, read_jsonl


@pytest.mark.parametrize("run_id", ["a", "retool-20251130-141502-1a2b", "A.b_c-9", "x" * 100])
def test_a_name_that_can_be_a_folder_and_a_label_is_taken(run_id: str):
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id", ["", ".", "..", "-x", "_x", "a/b", "../a", "a b", "a\n", "é", "a:b", "x" * 101, "a\\b", "$HOME", "a\x00"]
)
def test_any_other_name_is_refused_and_shown(run_id: str):
    with pytest.raises(ConfigurationError, match="use letters, digits"):
        check_run_id(run_id)


def test_new_names_are_valid_and_differ():
    names = {new_run_id("retool") for _ in range(50)}
    assert len(names) == 50
    assert all(check_run_id(name).startswith("retool-") for name in names)


def test_phases_are_appended(tmp_path: Path):
    note_phase(tmp_path, "start")
    note_phase(tmp_path, "Ray is up")
    assert [entry["phase"] for entry in read_jsonl(tmp_path / PHASES)] == ["start", "Ray is up"]


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", []),
        (b'{"a": 1}\n', [{"a": 1}]),
        (b'{"a": 1}\n\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        (b'{"a": 1}\n{"a": 2', [{"a": 1}]),
        (b'{"a": 1}\n{"a": "\xc3', [{"a": 1}]),
        (b'{"a": 1}', []),
        (b'{"a": "\xe2\x80\xa8 \xc2\x85"}\r\n', [{"a": "\u2028 \x85"}]),
    ],
)
def test_only_complete_lines_are_read(data: bytes, found: list, tmp_path: Path):
    (tmp_path / "x.jsonl").write_bytes(data)
    assert read_jsonl(tmp_path / "x.jsonl") == found


def test_a_file_that_is_not_there_yet_has_no_lines(tmp_path: Path):
    assert read_jsonl(tmp_path / "x.jsonl") == []
