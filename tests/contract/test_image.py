"""What the image checks and says of itself, and what its files must hold; tests/image builds it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from email.message import Message
from pathlib import Path

import pytest
import yaml

from verl_ext.image import finish, manifest
from verl_ext.installed import flash_attn_pin, installed

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def facts() -> dict:
    """Of this environment."""
    return manifest.manifest("abc123")


@pytest.mark.parametrize("target", finish.TARGETS)
def test_an_image_as_locked_has_no_problem(target: str):
    pins = finish.pins_of(target)
    assert finish.problems(pins, {**pins, "pip": "25.0"}, None if target == "ci" else dict(finish.TORCH)) == []


@pytest.mark.parametrize(
    ("versions", "torch", "words"),
    [
        ({"numpy": "2.3.5"}, {}, "numpy is 2.3.5, locked is 1.26.4"),
        ({"transformers": "5.0.0"}, {}, "transformers is 5.0.0"),
        ({"flash-attn": "2.7.4"}, {}, "flash-attn is 2.7.4"),
        ({"stowaway": "1"}, {}, "stowaway 1 is in no lock"),
        ({}, {"version": "2.8.0+cpu"}, "torch's version is 2.8.0+cpu"),
        ({}, {"CUDA": "12.6"}, "torch's CUDA is 12.6, not 12.8"),
        ({}, {"cxx11abi": False}, "torch's cxx11abi is False"),
        ({}, {"cuDNN": 90100}, "torch's cuDNN is 90100"),
        ({}, {"NCCL": [2, 26, 2]}, "torch's NCCL is [2, 26, 2]"),
    ],
)
def test_a_difference_is_named(versions: dict, torch: dict, words: str):
    pins = finish.pins_of("gpu")
    [problem] = finish.problems(pins, pins | versions, {**finish.TORCH, **torch})
    assert problem.startswith(words)


def test_a_missing_package_is_named():
    pins = finish.pins_of("ci")
    assert finish.problems(pins, {name: pins[name] for name in pins if name != "e2b"}, None) == [
        "e2b 2.50.0 is missing"
    ]


def test_what_is_expected_of_torch_is_what_the_lock_brings():
    pins = finish.pins_of("gpu")
    major, minor, patch, _ = map(int, pins["nvidia-cudnn-cu12"].split("."))
    assert finish.TORCH["version"] == f"{pins['torch']}+cu128"
    assert finish.TORCH["cuDNN"] == major * 10_000 + minor * 100 + patch
    assert finish.TORCH["NCCL"] == [*map(int, pins["nvidia-nccl-cu12"].split("."))]
    assert pins["nvidia-cuda-runtime-cu12"].startswith(finish.TORCH["CUDA"])


def test_torch_of_the_lock_is_what_is_expected():
    if "torch" not in installed():
        pytest.skip("torch is not installed here")
    assert finish.ask_torch() == finish.TORCH


def test_a_build_with_problems_leaves_nothing_behind(monkeypatch, tmp_path, capsys):
    for name in ("CONSTRAINTS", "MANIFEST", "SBOM"):
        monkeypatch.setattr(finish, name, tmp_path / name)
    monkeypatch.setattr(finish, "remove_strays", lambda folder: [])
    monkeypatch.setattr(finish, "installed", dict)
    monkeypatch.setattr(finish, "compiler_problems", list)
    assert finish.main(["ci", "--revision", "r"]) == 1
    assert "e2b 2.50.0 is missing" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_build_leaves_pins_manifest_and_sbom(monkeypatch, tmp_path, capsys):
    for name in ("CONSTRAINTS", "MANIFEST", "SBOM"):
        monkeypatch.setattr(finish, name, tmp_path / name)
    monkeypatch.setattr(finish, "remove_strays", lambda folder: [])
    monkeypatch.setattr(finish, "installed", lambda: {**finish.pins_of("ci"), "pip": "25"})
    monkeypatch.setattr(finish, "compiler_problems", list)
    monkeypatch.setattr(finish.compileall, "compile_dir", lambda *_, **__: True)
    assert finish.main(["ci", "--revision", "r1"]) == 0
    lines = (tmp_path / "CONSTRAINTS").read_text().splitlines()
    assert "e2b==2.50.0" in lines
    assert not any(line.startswith("pip==") for line in lines)
    assert json.loads((tmp_path / "MANIFEST").read_text())["revision"] == "r1"
    assert json.loads((tmp_path / "SBOM").read_text())["metadata"]["component"]["version"] == "r1"


def test_the_manifest_says_what_is_here(facts: dict):
    assert facts["revision"] == "abc123"
    assert facts["packages"]["rich"] == {"version": installed()["rich"], "licence": "MIT"}
    assert len(facts["locks"]["gpu.txt"]) == 64
    if shutil.which("dpkg-query"):
        assert "libc6" in facts["system_packages"]
    page = manifest.to_text(facts)
    assert re.search(r"^rich +\S+ +MIT", page, re.MULTILINE)
    assert "Licences: " in page


def test_a_second_manifest_is_the_same(facts: dict):
    assert manifest.manifest("abc123") == facts


def test_the_sbom_holds_cyclonedxs_schema(facts: dict):
    validation = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed here")
    from cyclonedx.schema import SchemaVersion

    document = manifest.sbom(facts)
    assert len(document["components"]) > len(facts["packages"]) - 1
    validator = validation.JsonStrictValidator(SchemaVersion.V1_5)
    assert validator.validate_str(json.dumps(document)) is None
    document["components"][0]["type"] = "no such type"
    assert validator.validate_str(json.dumps(document)) is not None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ([("License-Expression", "Apache-2.0"), ("License", "x")], "Apache-2.0"),
        ([("License", "BSD")], "BSD"),
        ([("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: MIT License")], "MIT License"),
        ([("License", "Copyright of somebody\n" + "words " * 99)], "Copyright of somebody"),
        ([("Classifier", "Topic :: Software")], "not said"),
    ],
)
def test_a_licence_as_it_is_said(fields: list[tuple[str, str]], expected: str):
    message = Message()
    for name, value in fields:
        message[name] = value
    assert manifest.licence(message) == expected


# ---- The files ----


def test_bases_are_pinned_by_digest():
    for name in ("BASE_IMAGE", "DEVEL_IMAGE"):
        assert re.search(rf"^ARG {name}=\S+:12\.8\.1-\w+-ubuntu24\.04@sha256:[0-9a-f]{{64}}$", DOCKERFILE, re.MULTILINE)


def test_every_package_comes_by_hash():
    commands = re.sub(r"\\\n", " ", DOCKERFILE)
    for command in re.findall(r"(?:uv |/)?pip (?:install|sync|download|wheel)[^&\n]*", commands):
        # The wheel that the stage before downloaded or built by hash.
        assert "--require-hashes" in command or command.endswith("--no-deps /wheels/*.whl"), command


def test_every_target_is_checked_and_runs_as_nobody_in_particular():
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    targets = [stage for stage in stages if re.match(r"\S+ AS (ci|cpu|gpu)\n", stage)]
    assert len(targets) == 3
    for stage in targets:
        name = stage.split()[2]
        assert f"RUN python -m verl_ext.image.finish {name} " in stage
        assert re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["10001:10001"]
        assert "org.opencontainers.image.revision" in stage
    assert re.search(r"AS gpu$", stages[-1].splitlines()[0])  # what is built when no target is named


def test_no_secret_is_asked_for_and_no_search_path_is_set():
    from verl_ext.settings import VARIABLES

    secrets = [row.name for row in VARIABLES if row.secret]
    for text in (DOCKERFILE, (DOCKER / "compose.yaml").read_text()):
        assert [name for name in secrets if name in text] == []
    assert not re.search(r"^(ENV|\s+)\s*LD_LIBRARY_PATH", DOCKERFILE, re.MULTILINE)


def test_the_context_holds_only_what_is_named():
    assert next(line for line in IGNORED if line and not line.startswith("#")) == "*"
    named = {line[1:] for line in IGNORED if line.startswith("!")}
    copied = set(re.findall(r"^COPY ([^-].*) /opt", DOCKERFILE, re.MULTILINE))
    wanted = {name for line in copied for name in line.split()}
    assert wanted == named
    assert all((ROOT / name).exists() for name in named)
    assert IGNORED.index("**/.env") > IGNORED.index("!docker")


def test_flash_attn_is_one_wheel_with_one_hash():
    text = (DOCKER / "locks" / "flash-attn.txt").read_text()
    [wheel] = re.findall(r"^flash-attn @ (\S+)", text, re.MULTILINE)
    assert wheel.endswith(f"flash_attn-{flash_attn_pin()}+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl")
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)) == 1


def test_the_composed_sandbox_has_no_way_out():
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    sandbox, trainer = services["services"]["sandbox"], services["services"]["trainer"]
    assert services["networks"]["sandboxes"] == {"internal": True}
    assert sandbox["networks"] == ["sandboxes"]
    assert "env_file" not in sandbox
    assert sandbox["read_only"] is True
    assert sandbox["cap_drop"] == ["ALL"]
    assert "ports" not in sandbox
    assert set(trainer["networks"]) == {"sandboxes", "default"}
    port = sandbox["command"][sandbox["command"].index("--port") + 1]
    assert trainer["environment"]["E2B_API_URL"] == f"http://sandbox:{port}"
    assert trainer["shm_size"]
    from verl_ext.settings import Settings

    given = {name: str(value) for name, value in trainer["environment"].items()}
    assert Settings.load(environ=given).backend == "local"


def linter(name: str) -> str:
    """The linter's program, beside this Python."""
    program = Path(sys.executable).with_name(name)
    if not program.is_file():
        pytest.skip(f"{name} is not installed here: invoke setup")
    return str(program)


def test_hadolint_finds_nothing():
    done = subprocess.run([linter("hadolint"), DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_shell_script_is_clean():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    scripts = [path for path in files if path.read_bytes()[:40].partition(b"\n")[0].endswith((b"bash", b"/sh"))]
    assert ROOT / ".ci" / "run" in scripts
    done = subprocess.run([linter("shellcheck"), *scripts], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
