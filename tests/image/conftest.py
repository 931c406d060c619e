"""The ci target, built for real with buildah and run with podman, over a base made on the spot.

NVIDIA's base cannot be had everywhere, so a stand-in takes its place: a minimal Debian or Ubuntu of this machine's
kind, this machine's Python 3.12, and a folder that looks like CUDA's compatibility library. Not covered by it: the
true base, the cpu and gpu targets (8 GB each), and anything that needs a GPU.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap")
BASE = "localhost/cuda-standin:12.8"
CANARY = "e2b_" + "c0ffee" * 6 + "beef"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# An ordinary file system is needed below, and /tmp may be a small one in memory.
PLACE = "/var/tmp"
STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{0}/images"\nrunroot = "{0}/run"\n'
# crun refuses hybrid cgroups; runc refuses limits above its own.
CONTAINERS = """
[containers]
netns = "host"
default_ulimits = ["nofile=20000:20000", "nproc=30000:30000"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""


@dataclass(frozen=True)
class Engine:
    """buildah and podman with a storage of their own, so that nothing of this machine's is touched.

    Attributes:
        folder: everything is below it.
        build_log: what the build said.
    """

    folder: Path
    build_log: str = ""

    def call(self, *command: str | Path, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command with that storage; its exit status must be `status` unless that is None."""
        environment = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "CONTAINERS_CONF": str(self.folder / "containers.conf"),
            "TMPDIR": str(self.folder),  # where buildah keeps cache mounts, for ever
        }
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
        assert status is None or done.returncode == status, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def name(self, image: str = "ci") -> str:
        """Full name of a target, or of `child`, which is made from `ci`."""
        return f"localhost/verl-ags:{image}"

    def run(self, *command: str, flags: tuple[str, ...] = (), image: str = "ci", status: int | None = 0):
        """Run a command in a container as a cautious user would: no network, no capability, nothing to write to."""
        cautious = ("--network=none", "--read-only", "--cap-drop=all", "--security-opt=no-new-privileges")
        return self.call("podman", "run", "--rm", *cautious, *flags, self.name(image), *command, status=status)

    def build(self, context: Path, target: str = "ci") -> str:
        """Build a target; what was said."""
        arguments = {"BASE_IMAGE": BASE, "DEVEL_IMAGE": BASE, "PYTHON_PACKAGES": "", "REVISION": "r-test"}
        flags = [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        done = self.call(
            *["buildah", "bud", "--isolation", "chroot", "--format", "docker", "--pull-never", "--layers"],
            *["--target", target, *flags, "-f", context / "docker" / "Dockerfile", "-t", self.name(target), context],
        )
        return done.stdout + done.stderr


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The images, built once."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"no image is built here: it takes root and {', '.join(PROGRAMS)}; missing: {missing or 'root'}")
    if Path(sys.base_prefix) == Path("/usr"):
        pytest.skip("this machine's Python is the system's own and cannot be copied into a base")
    with own_storage() as bare:
        folder = bare.folder
        import_base(bare)
        context = copy_with_secrets(folder / "context")
        log = bare.build(context)
        (folder / "child").write_text(f"FROM {bare.name()}\nRUN id > /tmp/of-the-child\n")
        bare.call("buildah", "bud", "--isolation", "chroot", "--format", "docker", "--pull-never",
                  "-f", folder / "child", "-t", bare.name("child"), context)  # fmt: skip
        yield Engine(folder, log)


@contextlib.contextmanager
def own_storage() -> Iterator[Engine]:
    """An engine without images, and nothing left of it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="verl-ags-image-", dir=PLACE))
    (folder / "storage.conf").write_text(STORAGE.format(folder))
    (folder / "containers.conf").write_text(CONTAINERS)
    bare = Engine(folder)
    try:
        yield bare
    finally:
        bare.call("podman", "rm", "--all", "--force", "--time", "0", status=None)
        bare.call("podman", "rmi", "--all", "--force", status=None)
        shutil.rmtree(folder, ignore_errors=True)


def import_base(engine: Engine) -> None:
    """Make the stand-in for NVIDIA's base."""
    codename = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    system = engine.folder / "system.tar"
    # libpython3-stdlib for what it depends on: the libraries that a Python's modules are linked with, SQLite's say.
    packages = "--include=ca-certificates,libpython3-stdlib"
    made = engine.call("mmdebstrap", "--variant=minbase", packages, codename, system, status=None)
    if made.returncode:
        pytest.skip(f"no base can be made here: {made.stderr.strip().splitlines()[-1]}")
    root = engine.folder / "root"
    root.mkdir()
    engine.call("tar", "-xf", system, "-C", root, "--exclude=./dev/*")
    left_out = shutil.ignore_patterns("site-packages", "test", "__pycache__", "idlelib", "*.a")
    for name in ("bin", "include", "lib"):
        shutil.copytree(
            Path(sys.base_prefix, name), root / "usr/local" / name, symlinks=True, dirs_exist_ok=True, ignore=left_out
        )
    (root / "usr/local/lib/python3.12/site-packages").mkdir(exist_ok=True)
    if CERTIFICATES.is_file():
        shutil.copy(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
    library = root / "usr/local/cuda/compat/libcuda.so.570.124.06"
    library.parent.mkdir(parents=True)
    library.touch()
    (library.parent / "libcuda.so.1").symlink_to(library.name)
    archive = engine.folder / "base.tar"
    engine.call("tar", "-cf", archive, "-C", root, ".")
    shutil.rmtree(root)
    trust = [part for name in ("SSL_CERT_FILE", "PIP_CERT") for part in ("--change", f"ENV {name}={CERTIFICATES}")]
    engine.call("podman", "import", "-q", *trust, archive, BASE)
    archive.unlink()
    system.unlink()


def copy_with_secrets(context: Path) -> Path:
    """What git knows of the project, and a user's secrets where users leave them."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    for name in listing.stdout.splitlines():
        if (ROOT / name).is_file():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, context / name)
    for place in (".env", "docker/.env", "recipe/retool/.env", "secrets.txt"):
        (context / place).write_text(f"E2B_API_KEY={CANARY}\n")
    return context
