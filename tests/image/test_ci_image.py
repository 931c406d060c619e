"""The built ci image: who it runs as, what it does without network or a disk to write to, what it never holds."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

CANARY = b"c0ffee" * 6
# Building the base and the image is the first test's; a busy machine takes minutes.
pytestmark = pytest.mark.timeout(1500)
WHO = "import os, getpass; print(os.getuid(), getpass.getuser(), *(os.access(p, os.W_OK) for p in {!r}))"
PLACES = ("/data", "/home/ags", "/opt/verl-ags", "/opt/venv", "/opt/constraints.txt")
SANDBOX = """
import os
from verl_ext.sandbox.server.launch import start_server
with start_server(["--warm", "1"]) as server:
    os.environ.update(E2B_API_URL=server.url, E2B_SANDBOX_URL=server.url, E2B_API_KEY="any")
    from e2b_code_interpreter import Sandbox
    sandbox = Sandbox.create(timeout=60)
    sandbox.run_code("x = 6")
    print(server.isolation, sandbox.run_code("x * 7").text)
    sandbox.kill()
"""
WRITABLE = ("--tmpfs=/tmp:mode=1777", "--tmpfs=/data:mode=1777", "--tmpfs=/home/ags:mode=1777")


@pytest.mark.parametrize("image", ["ci", "child"])
def test_it_runs_as_nobody_in_particular(engine, image: str):
    done = engine.call(
        "podman", "run", "--rm", "--network=none", engine.name(image), "python", "-c", WHO.format(PLACES)
    )
    assert done.stdout.split() == ["10001", "ags", "True", "True", "False", "False", "False"]


def test_any_user_can_be_given(engine):
    flags = ("--network=none", "--user", "4321:4321")
    done = engine.call("podman", "run", "--rm", *flags, engine.name(), "python", "-c", WHO.format(PLACES))
    assert done.stdout.split()[:4] == ["4321", "ags", "True", "True"]


@pytest.mark.parametrize("image", ["ci", "child"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("invoke", "--list"), "serve-sandbox"),
        (("invoke", "settings"), "VERL_EXT_DATA_ROOT=/data"),
        (("invoke", "manifest"), "Licences: "),
        (("invoke", "train", "--help"), "--dry-run"),
        ((), "Available tasks"),
    ],
)
def test_commands_need_no_network_and_no_disk(engine, image: str, command: tuple[str, ...], words: str):
    assert words in engine.run(*command, image=image).stdout


def test_the_doctor_is_honest_in_it(engine):
    found = {
        line["name"]: line for line in json.loads(engine.run("invoke", "doctor", "--json", status=1).stdout)["findings"]
    }
    assert found["stack"]["state"] == "red"  # the ci target has none
    assert found["data root"]["state"] == "red"  # read-only
    assert found["driver"]["state"] == "ok"
    assert found["import recipe"]["text"] == "/opt/verl-ags/recipe"
    done = engine.run("invoke", "doctor", "--json", flags=WRITABLE, status=1)
    assert [line["name"] for line in json.loads(done.stdout)["findings"] if line["state"] == "red"] == ["stack"]


def test_a_sandbox_runs_code_in_it(engine):
    isolation, answer = engine.run("python", "-c", SANDBOX, flags=WRITABLE).stdout.split()[-2:]
    assert answer == "42"
    assert isolation in ("bubblewrap", "landlock", "rlimits")


def test_cudas_library_is_decided_in_it(engine):
    quiet = engine.run("true")
    assert quiet.stderr == ""  # no GPU, nothing asked for, nothing to say
    forced = engine.run("sh", "-c", "echo $LD_LIBRARY_PATH", flags=("--env=CUDA_COMPAT=on",))
    assert forced.stdout == "/usr/local/cuda/compat\n"
    assert "set CUDA_COMPAT=auto" in forced.stderr  # the stand-in's library is empty
    inherited = engine.run(
        "sh", "-c", "echo [$LD_LIBRARY_PATH]", flags=("--env=LD_LIBRARY_PATH=/usr/local/cuda/compat",)
    )
    assert inherited.stdout == "[]\n"


def test_a_task_decides_where_the_entrypoint_is_gone_around(engine):
    flags = ("--entrypoint=invoke", "--env=LD_LIBRARY_PATH=/usr/local/cuda/compat", "--env=CUDA_COMPAT=off")
    assert "CUDA compatibility library off" in engine.run("settings", flags=flags).stderr


def test_a_signal_reaches_the_command(engine):
    script = "trap 'exit 42' TERM; touch /tmp/up; while :; do sleep 0.1; done"
    started = engine.call(
        "podman", "run", "--detach", "--network=none", engine.name(), "sh", "-c", script
    ).stdout.strip()
    until = time.monotonic() + 60
    while engine.call("podman", "exec", started, "test", "-e", "/tmp/up", status=None).returncode:
        assert time.monotonic() < until
        time.sleep(0.2)
    engine.call("podman", "stop", "--time", "120", started)
    assert engine.call("podman", "wait", started).stdout.strip() == "42"


def test_no_install_moves_a_pin(engine, tmp_path):
    wheel = tmp_path / "rich-99.0-py3-none-any.whl"
    make_wheel = (
        "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1], 'w');"
        "z.writestr('rich-99.0.dist-info/METADATA', 'Metadata-Version: 2.1\\nName: rich\\nVersion: 99.0\\n');"
        "z.writestr('rich-99.0.dist-info/WHEEL', 'Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n');"
        "z.writestr('rich-99.0.dist-info/RECORD', '')"
    )
    engine.call("python3", "-c", make_wheel, wheel)
    tmp_path.chmod(0o755)
    flags = ("run", "--rm", "--network=none", "--user=0", f"--volume={tmp_path}:/wheels:ro")
    offline = ("--no-index", "--find-links", "/wheels", "rich==99.0")
    for installer in (("pip", "install"), ("uv", "pip", "install")):
        refused = engine.call("podman", *flags, engine.name(), *installer, *offline, status=None)
        assert refused.returncode, installer
        assert "99.0" in refused.stderr
        # Without the constraints the same command goes through: it is they that refuse.
        engine.call(
            "podman", *flags, "--env=PIP_CONSTRAINT=", "--env=UV_CONSTRAINT=", engine.name(), *installer, *offline
        )


def test_it_says_what_it_is(engine):
    [image] = json.loads(engine.call("podman", "inspect", engine.name()).stdout)
    labels = image["Config"]["Labels"]
    assert labels["org.opencontainers.image.revision"] == "r-test"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    facts = json.loads(engine.run("cat", "/opt/verl-ags-manifest.json").stdout)
    now = json.loads(engine.run("invoke", "manifest", "--json").stdout)
    assert facts == now
    assert facts["revision"] == "r-test"
    assert facts["system_packages"]["tini"]
    assert facts["packages"]["e2b"]["version"] == "2.50.0"


def test_a_secret_beside_the_project_is_nowhere_in_it(engine, tmp_path):
    archive = engine.folder / "saved.tar"
    engine.call("podman", "save", "--format", "docker-archive", "-o", archive, engine.name())
    try:
        assert holds(archive, b"The table of contents: what one can do here")  # the layers are read, and not packed
        assert holds(archive, b"org.opencontainers.image.revision")  # labels and history are in it
        assert not holds(archive, CANARY)
    finally:
        archive.unlink()
    assert CANARY.decode() not in engine.build_log
    assert CANARY.decode() in (engine.folder / "context" / ".env").read_text()


def test_layers_have_sizes(engine):
    history = json.loads(engine.call("podman", "history", "--format", "json", engine.name()).stdout)
    sizes = [layer["size"] for layer in history]
    assert sum(sizes) < 2e9
    # What was downloaded is in a cache of the builder's, and in no layer.
    caches = "find /var/cache/uv /home/ags/.cache /root/.cache -mindepth 1 -maxdepth 1"
    assert engine.run("sh", "-c", caches, flags=("--user=0",), status=None).stdout == ""
    # The project is small, and is not in the layers of what it depends on.
    assert sum(size for size in sizes if size > 50e6) > 0.9 * sum(sizes)


def holds(path: Path, words: bytes) -> bool:
    """Whether a large file holds some bytes."""
    kept = b""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while block := file.read(1 << 24):
            if words in kept + block:
                return True
            kept = block[-len(words) :]
    return False
