"""The machine or container: driver, GPUs, compiler, limits, disk, network, clock, other Ray clusters."""

from __future__ import annotations

import ctypes
import datetime
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from omegaconf import OmegaConf

from verl_ext import cuda_compat
from verl_ext.doctor.findings import Finding, note, ok, red
from verl_ext.gpus import visible_gpus
from verl_ext.lock import AS_OF
from verl_ext.network.interfaces import VARIABLES, interfaces, variable, wrong_choice
from verl_ext.preflight import compiler
from verl_ext.preflight import machine as preflight
from verl_ext.preflight.subject import Subject
from verl_ext.settings import Settings, foreign

# CUDA 12.x runs on it without the compatibility library (NVIDIA, CUDA Compatibility, "Minor Version Compatibility").
MIN_DRIVER_BRANCH = 525
NEEDED_DISK_GIB = 60  # a 4B model (8), two checkpoints with optimizer (2 x 24), data and records
RAY_PORTS = {6379: "Ray's head", 8265: "Ray's dashboard"}
_GIB = 2**30
_STA_UNSYNC = 0x40  # timex.h
_ROUTES = Path("/proc/net/route")
_INFINIBAND = Path("/sys/class/infiniband")


def subject_of(settings: Settings, *, on_gpu: bool) -> Subject:
    """What preflight's checks of the machine need to know of a run: that it takes all GPUs that are here."""
    config = {"verl_ext": {"device": "cuda" if on_gpu else "cpu"}, "trainer": {"n_gpus_per_node": 1}}
    subject = Subject(OmegaConf.create(config), settings)
    subject.config.trainer.n_gpus_per_node = max(1, len(subject.gpus))
    return subject


def driver(settings: Settings, *, wants_gpu: bool) -> Iterator[Finding]:
    """The driver, and what was decided about CUDA's compatibility library."""
    environment = {cuda_compat.SEARCH_PATH: foreign(cuda_compat.SEARCH_PATH) or ""}
    decision = cuda_compat.decide(environment, settings.cuda_compat)
    branch = int(decision.driver.partition(".")[0] or 0)
    if not branch and wants_gpu:
        yield red("driver", "no NVIDIA driver here, and the GPU stack is installed: in a container use --gpus all")
    elif not branch:
        yield ok("driver", "no NVIDIA driver here: this machine trains on its CPU")
    elif branch < MIN_DRIVER_BRANCH and not decision.on:
        yield red(
            "driver",
            f"{decision.driver} is too old for CUDA 12.8, which needs branch {MIN_DRIVER_BRANCH}, better 570: "
            "install a newer driver on the host",
        )
    else:
        yield ok("driver", decision.driver)
    said = cuda_compat.line(decision).splitlines()[0].removeprefix("CUDA compatibility library ")
    yield red("CUDA compatibility", decision.trouble) if decision.trouble else ok("CUDA compatibility", said)


def gpus(subject: Subject, *, wants_gpu: bool) -> Iterator[Finding]:
    """What nvidia-smi shows of those that CUDA_VISIBLE_DEVICES leaves."""
    found = visible_gpus()
    if not found and wants_gpu:
        yield red(
            "GPUs", "none is to be seen (nvidia-smi): in a container use --gpus all, and look at CUDA_VISIBLE_DEVICES"
        )
    elif not found:
        yield ok("GPUs", "none")
    for gpu in found:
        yield ok(f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, {gpu.used_gib:.1f} in use")
    yield from _of_preflight("GPU in use", preflight.gpu_busy, subject)


def cpp_compiler(subject: Subject) -> Iterator[Finding]:
    """What torch compiles with, where the CPU stack is installed."""
    yield from _of_preflight("C++ compiler", compiler.compiler, subject, compiler.used())


def limits(subject: Subject) -> Iterator[Finding]:
    """What a container may use."""
    shared = f"{preflight.shared_memory_gib():.1f} GiB"
    yield from _of_preflight("shared memory", preflight.shared_memory, subject, shared)
    yield from _of_preflight("open files", preflight.open_files, subject, "limit is high enough")
    yield from _of_preflight("processes", preflight.processes, subject, "limit is high enough")
    cores = len(os.sched_getaffinity(0))
    yield ok(
        "memory", f"{preflight.memory_available_gib():.0f} GiB are free, a container's limit counted; {cores} cores"
    )
    yield from _of_preflight("allocator", preflight.allocator, subject, "expandable segments are not forced on")


def disk(settings: Settings, subject: Subject) -> Iterator[Finding]:
    """Where data, models and runs go."""
    root = settings.data_root.absolute()
    place = preflight.existing_folder(root)
    free_gib = shutil.disk_usage(place).free / _GIB
    if not os.access(place, os.W_OK | os.X_OK):
        yield red("data root", f"{place} cannot be written by user {os.getuid()}: mount a folder of yours, or set "
                  "VERL_EXT_DATA_ROOT")  # fmt: skip
    elif in_container() and not any(os.path.ismount(folder) for folder in (root, *root.parents[:-1])):
        yield note(
            "data root",
            f"{root} is inside the container and goes with it",
            "mount a volume there: -v DATA:" + str(root),
        )
    elif free_gib < NEEDED_DISK_GIB:
        yield note("data root", f"{root} has {free_gib:.0f} GiB free, and the recipe on GPUs takes {NEEDED_DISK_GIB}",
                   "set VERL_EXT_DATA_ROOT to a larger disk")  # fmt: skip
    else:
        yield ok("data root", f"{root}, {free_gib:.0f} GiB free")
    yield from _of_preflight("disk of /tmp", preflight.tmp_disk, subject, "has room for Ray's session")


def network(subject: Subject) -> Iterator[Finding]:
    """Ports, and the interface that NCCL and Gloo take."""
    taken = [port for port in RAY_PORTS if preflight.port_error(port)]
    if not taken:
        yield ok("ports", ", ".join(f"{port} is free for {what}" for port, what in RAY_PORTS.items()))
    for port, what in RAY_PORTS.items():
        if port in taken:
            yield note(f"port {port}", f"is taken; {what} has it by default",
                       "a run on one machine does not need it; for a cluster: ray start --port N")  # fmt: skip
    yield from _of_preflight("sandbox server", preflight.sandbox_server, subject)
    for backend in VARIABLES:
        name = variable(backend)
        if wrong := wrong_choice(backend, foreign(name) or "", interfaces()):
            yield red(name, wrong)
    default = _default_interface()
    chosen = foreign("NCCL_SOCKET_IFNAME") or default or "none but loopback"
    infiniband = ", InfiniBand is here" if any(_INFINIBAND.glob("*")) else ""
    yield ok("NCCL interface", f"{chosen}{infiniband}")


def ray_clusters(subject: Subject) -> Iterator[Finding]:
    """Others that a run would meet."""
    if address := foreign("RAY_ADDRESS"):
        yield note(
            "RAY_ADDRESS", f"names a Ray cluster, {address}", "`invoke train` trains there, or here if it is unset"
        )
    yield from _of_preflight("Ray cluster", preflight.ray_running, subject, "none holds this machine's GPUs")


def clock(now: datetime.datetime | None = None) -> Iterator[Finding]:
    """Certificates and keys fail under a clock that is far off."""
    now = now or datetime.datetime.now(tz=datetime.UTC)
    if now.date() < datetime.date.fromisoformat(AS_OF):
        yield red("clock", f"it is {now:%Y-%m-%d} here, before the packages were made ({AS_OF}): set the host's clock")
        return
    state = ", not kept by a time service (or hidden by the container)" if _unsynchronised() else ""
    yield ok("clock", f"{now:%Y-%m-%d %H:%M:%S} UTC{state}")


def in_container() -> bool:
    """Docker's and Podman's own marks."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _of_preflight(
    name: str, check: Callable[[Subject], Iterator[str]], subject: Subject, otherwise: str = ""
) -> Iterator[Finding]:
    problems = list(check(subject))
    yield from (red(name, problem) for problem in problems)
    if otherwise and not problems:
        yield ok(name, otherwise)


def _default_interface() -> str:
    try:
        rows = [line.split() for line in _ROUTES.read_text(encoding="utf-8").splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), "")


def _unsynchronised() -> bool:
    buffer = (ctypes.c_int * 128)()  # struct timex, all zero: reads and sets nothing; status is at byte 40
    try:
        ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return False
    return bool(buffer[10] & _STA_UNSYNC)
