"""The pages say what is there: every path in the README's tree, every test in the table of verl's faults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = ROOT / "verl_ext" / "README.md"


def tracked() -> set[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    files = set(done.stdout.splitlines())
    return files | {str(parent) for file in files for parent in Path(file).parents}


def tree() -> list[str]:
    """The paths that the README's tree names: the words before two blanks, by their indentation."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"## What is where\n+```\n(.*?)```", page, re.S)
    assert section, "README.md has no tree under '## What is where'"
    return [
        line.split()[0].rstrip("/") for line in section.group(1).splitlines() if line.strip() and not line[0].isspace()
    ]


def test_the_tree_names_what_is_there():
    known = tracked()
    assert [path for path in tree() if path not in known] == []


def test_every_top_level_name_is_in_the_tree():
    folders = {path.split("/")[0] for path in tracked() if "/" in path} - {".github", ".ci"}
    assert folders - {path.split("/")[0] for path in tree()} == set()


ROWS = [
    line for line in FAULTS.read_text(encoding="utf-8").splitlines() if line.startswith("| ") and "---" not in line
][1:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_each_fault_has_a_cure_and_a_test_that_exist(row: str):
    _, fault, upstream, cure, test, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
    assert fault
    assert upstream
    assert cure
    for path, name in re.findall(r"`([\w/]+\.(?:py|yaml))(?::([\w.]+))?`", cure + test):
        file = next((place / path for place in (ROOT / "verl_ext", ROOT) if (place / path).is_file()), None)
        assert file, f"{path} is not there"
        if name:
            assert name.rpartition(".")[2] in file.read_text(encoding="utf-8"), f"{path} has no {name}"
    assert re.search(r"`tests/[\w/]+\.py:test_\w+`", test), "no test is named"
