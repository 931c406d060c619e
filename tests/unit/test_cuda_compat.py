"""verl_ext.cuda_compat: the decision on every kind of host, and that a command becomes what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import cuda_compat
from verl_ext.cuda_compat import Host, decide

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc 12\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U22)  Tue\n"
LIBRARY = "570.124.06"
H200, GEFORCE = "NVIDIA H200", "NVIDIA GeForce RTX 4090"
PROGRAM = Path(cuda_compat.__file__)


class FakeHost(Host):
    """A host below a folder; remembers under which search paths cuInit was tried."""

    def __init__(self, root: Path, answer: int | str = 0, smi: dict[str, list[str]] | None = None) -> None:
        self.path = root
        self.tried: list[str] = []
        super().__init__(str(root), lambda query: (smi or {}).get(query, []), lambda path: self._try(path, answer))

    def _try(self, path: str, answer: int | str) -> int | str:
        self.tried.append(path)
        return answer

    def with_driver(self, text: str, *gpus: str) -> FakeHost:
        folder = self.path / "proc/driver/nvidia"
        for index, name in enumerate(gpus):
            page = folder / f"gpus/0000:{index:02x}:00.0/information"
            page.parent.mkdir(parents=True)
            page.write_text(f"Model: \t\t {name}\nIRQ:   \t\t 16\n")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(text)
        return self

    def with_library(self, version: str = LIBRARY, folder: str = "usr/local/cuda/compat") -> FakeHost:
        place = self.path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / f"libcuda.so.{version}").touch()
        (place / "libcuda.so.1").unlink(missing_ok=True)
        (place / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
        return self

    def compat(self, folder: str = "usr/local/cuda/compat") -> str:
        return str(self.path / folder)


@pytest.mark.parametrize(
    ("driver", "gpu", "answer", "on", "why"),
    [
        (PROPRIETARY.format("535.129.03"), H200, 0, True, "is older"),
        (OPEN.format("550.54.15"), H200, 0, True, "is older"),
        (OPEN.format("570.86.15"), H200, 0, False, "as new as"),
        (OPEN.format("570.124.06"), H200, 0, False, "as new as"),
        (PROPRIETARY.format("570.211.01"), H200, 0, False, "as new as"),
        (OPEN.format("580.159.04"), H200, 0, False, "newer than"),
        (PROPRIETARY.format("1000.1"), H200, 0, False, "newer than"),
        (PROPRIETARY.format("535.129.03"), GEFORCE, 0, False, "consumer"),
        (PROPRIETARY.format("535.129.03"), "NVIDIA TITAN RTX", 0, False, "consumer"),
        (PROPRIETARY.format("450.80.02"), H200, 803, False, "error 803"),
        (PROPRIETARY.format("535.129.03"), "NVIDIA RTX 6000 Ada Generation", 804, False, "error 804"),
        (PROPRIETARY.format("535.129.03"), "NVIDIA RTX 6000 Ada Generation", 0, True, "is older"),
        (PROPRIETARY.format("535.129.03"), H200, "cannot open libcuda.so.1", False, "cannot open"),
    ],
)
def test_auto_by_driver_gpu_and_probe(tmp_path, driver: str, gpu: str, answer: int | str, on: bool, why: str):
    host = FakeHost(tmp_path, answer).with_driver(driver, gpu).with_library()
    decision = decide({}, host=host)
    assert decision.on is on
    assert why in decision.reason
    assert decision.search_path == (host.compat() if on else "")
    # It is tried before it is kept, and never where it is not wanted.
    assert host.tried == ([host.compat()] if on or answer else [])


def test_a_driver_that_is_too_old_for_the_library_has_a_cure(tmp_path):
    decision = decide({}, host=FakeHost(tmp_path, 803).with_driver(OPEN.format("450.80.02"), H200).with_library())
    assert "install a driver of branch 570 or newer" in decision.trouble


def test_one_consumer_among_others_is_enough(tmp_path):
    host = FakeHost(tmp_path).with_driver(PROPRIETARY.format("535.129.03"), H200, GEFORCE).with_library()
    assert not decide({}, host=host).on


def test_without_a_driver(tmp_path):
    decision = decide({}, host=FakeHost(tmp_path).with_library())
    assert (decision.on, decision.driver, decision.trouble) == (False, "", "")
    assert "no NVIDIA driver" in decision.reason


def test_without_a_library(tmp_path):
    host = FakeHost(tmp_path).with_driver(OPEN.format("535.129.03"), H200)
    (tmp_path / "usr/local/cuda/compat").mkdir(parents=True)  # there, but empty
    decision = decide({}, host=host)
    assert (decision.on, decision.library, host.tried) == (False, "", [])


def test_nvidia_smi_is_asked_where_proc_is_hidden(tmp_path):
    answers = {"driver_version": ["535.129.03", "535.129.03"], "name": [H200, H200]}
    host = FakeHost(tmp_path, smi=answers).with_library()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert decide({}, host=host).on


@pytest.mark.parametrize("answer", [{}, {"driver_version": ["[N/A]"]}])
def test_a_version_that_cannot_be_read_leaves_it_off(tmp_path, answer: dict):
    host = FakeHost(tmp_path, smi=answer).with_library()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    decision = decide({}, host=host)
    assert not decision.on
    assert "cannot be read" in decision.reason


def test_on_wsl_it_stays_off(tmp_path):
    host = FakeHost(tmp_path, smi={"driver_version": ["535.1"], "name": [H200]}).with_library()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert "WSL" in decide({}, host=host).reason


def test_the_newest_of_several_folders(tmp_path):
    host = FakeHost(tmp_path).with_driver(OPEN.format("550.54.15"), H200)
    host.with_library("550.54.15", "usr/local/cuda-12.4/compat").with_library("575.51.03", "usr/local/cuda-12.9/compat")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-12.4")
    decision = decide({}, host=host)
    assert (decision.on, decision.library) == (True, "575.51.03")
    assert decision.search_path == host.compat("usr/local/cuda-12.9/compat")


def test_one_folder_with_two_names_is_called_by_the_shorter(tmp_path):
    host = (
        FakeHost(tmp_path).with_driver(OPEN.format("550.54.15"), H200).with_library(folder="usr/local/cuda-12.8/compat")
    )
    (tmp_path / "usr/local/cuda").symlink_to("cuda-12.8")
    assert decide({}, host=host).search_path == host.compat()


def test_of_several_libraries_the_one_that_is_loaded_counts(tmp_path):
    host = (
        FakeHost(tmp_path)
        .with_driver(OPEN.format("560.28.03"), H200)
        .with_library("575.51.03")
        .with_library("550.54.15")
    )
    assert decide({}, host=host).library == "550.54.15"
    (tmp_path / "usr/local/cuda/compat/libcuda.so.1").unlink()
    assert decide({}, host=host).library == "575.51.03"


INHERITED = "/usr/local/nvidia/lib:/usr/local/cuda/compat:/opt/mine::/usr/local/cuda-12.8/compat/lib.real:/srv/compat"


@pytest.mark.parametrize(("mode", "driver", "first"), [("auto", "580.1", False), ("auto", "535.1", True),
                                                       ("off", "535.1", False), ("on", "580.1", True)])  # fmt: skip
def test_only_inherited_compat_entries_go(tmp_path, mode: str, driver: str, first: bool):
    host = FakeHost(tmp_path).with_driver(OPEN.format(driver), H200).with_library()
    decision = decide({"LD_LIBRARY_PATH": INHERITED, "CUDA_COMPAT": mode}, host=host)
    rest = "/usr/local/nvidia/lib:/opt/mine:/srv/compat"
    assert decision.search_path == (f"{host.compat()}:{rest}" if first else rest)
    assert ("taken out" in decision.reason) is not first
    assert decide({"LD_LIBRARY_PATH": decision.search_path, "CUDA_COMPAT": mode}, host=host)[1:4:2] == decision[1:4:2]


def test_forced_on_stays_on_and_says_what_will_fail(tmp_path):
    host = FakeHost(tmp_path, 803).with_driver(OPEN.format("580.159.04"), H200).with_library("580.95.05")
    decision = decide({"CUDA_COMPAT": "on"}, host=host)
    assert decision.on
    assert "error 803, system has unsupported display driver" in decision.trouble
    assert "set CUDA_COMPAT=auto" in cuda_compat.line(decision)


def test_forced_on_without_a_library_says_so(tmp_path):
    decision = decide({"CUDA_COMPAT": "on"}, host=FakeHost(tmp_path).with_driver(OPEN.format("535.1"), H200))
    assert not decision.on
    assert "set CUDA_COMPAT=auto" in decision.trouble


def test_off_asks_nothing(tmp_path):
    host = FakeHost(tmp_path).with_driver(OPEN.format("535.1"), H200).with_library()
    assert not decide({"CUDA_COMPAT": "off"}, host=host).on
    assert host.tried == []


@pytest.mark.parametrize(("text", "mode"), [("ON", "on"), ("'off'", "off"), (" auto ", "auto"), ("", "auto")])
def test_a_mode_may_be_written_carelessly(tmp_path, text: str, mode: str):
    decision = decide({"CUDA_COMPAT": text}, host=FakeHost(tmp_path))
    assert decision.mode == mode
    assert bool(decision.trouble) is (mode == "on")  # there is no library


def test_an_unknown_mode_is_told(tmp_path):
    assert "none of auto, on, off" in decide({"CUDA_COMPAT": "yes"}, host=FakeHost(tmp_path)).trouble


def test_a_task_hears_of_changes_only(tmp_path, capsys):
    host = FakeHost(tmp_path).with_driver(OPEN.format("535.1"), H200).with_library()
    changed = cuda_compat.apply({"A": "b"}, host)
    assert changed == {"A": "b", "LD_LIBRARY_PATH": host.compat()}
    assert capsys.readouterr().err.count("\n") == 1
    assert cuda_compat.apply(changed, host) == changed
    assert capsys.readouterr().err == ""


def test_an_empty_search_path_is_taken_away(tmp_path):
    assert cuda_compat.apply({"LD_LIBRARY_PATH": "/usr/local/cuda/compat"}, FakeHost(tmp_path)) == {}


def become(*words: str, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-I", "-S", str(PROGRAM), *words]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"], **environ})


def test_it_becomes_a_command_and_the_path_is_clean():
    done = become("exec", "sh", "-c", 'echo "$LD_LIBRARY_PATH:$1"; exit 7', "sh", "a b", LD_LIBRARY_PATH=INHERITED)
    assert done.stdout == "/usr/local/nvidia/lib:/opt/mine:/srv/compat:a b\n"
    assert done.returncode == 7


def test_a_signal_reaches_the_command():
    command = [
        sys.executable,
        "-I",
        "-S",
        str(PROGRAM),
        "exec",
        "sh",
        "-c",
        "trap 'exit 42' TERM; echo up; while :; do sleep 0.05; done",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(30) == 42


@pytest.mark.parametrize(("words", "status", "said"), [((), 0, ""), (("run",), 2, "usage"), (("exec",), 2, "usage"),
                                                       (("exec", "/no/such"), 127, "/no/such cannot be run"),
                                                       (("exec", "/"), 126, "cannot be run")])  # fmt: skip
def test_what_else_is_said(words: tuple[str, ...], status: int, said: str):
    done = become(*words)
    assert done.returncode == status
    assert said in done.stderr
    assert words or done.stdout.startswith("CUDA compatibility library o")


def test_the_probe_calls_cuinit_under_the_path(tmp_path):
    if subprocess.run(["cc", "--version"], capture_output=True).returncode:
        pytest.skip("no C compiler here")
    source = tmp_path / "cuda.c"
    source.write_text("int cuInit(unsigned flags) { return 803 + (int)flags; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True)
    assert cuda_compat.probe_cuda(str(tmp_path)) == 803
    (tmp_path / "libcuda.so.1").write_text("no library")
    assert "libcuda.so.1" in str(cuda_compat.probe_cuda(str(tmp_path)))


def test_nothing_heavy_is_imported():
    code = f"import sys; sys.argv=['x']; exec(open({str(PROGRAM)!r}).read()); print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code.replace("sys.exit(main", "print(main")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in ("subprocess", "dataclasses", "argparse", "pathlib", "inspect", "typing"):
        assert f"'{name}'" not in done.stdout
