"""Checks of this machine: what Ray, vLLM and NCCL would fail on, and who else is there."""

from __future__ import annotations

import re
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from verl_ext import cuda_compat
from verl_ext.gpu_memory import host_loading_gib
from verl_ext.installed import installed
from verl_ext.preflight.subject import Subject
from verl_ext.settings import foreign

# Ray advises it when it finds fewer than 4,096 (ray 2.49 _private/worker.py).
MIN_OPEN_FILES = 8192
MIN_PROCESSES = 4096
# What verl's own docs give a container with several GPUs is 10 GB (docs/start/install.rst).
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what is measured
MIN_SHARED_MEMORY_GIB = 8
# Beyond it Ray makes no objects any more (local_fs_capacity_threshold).
MAX_TMP_SHARE = 0.95
BUSY_GIB = 1.0
_ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
# Source: verl v0.6.1 docs/faq/faq.rst, which names these cards.
_WRONG_IN_CASCADE = re.compile(r"\b(A100|L20|B200)\b")
_KERNELS = {"use_remove_padding": "flash-attn", "use_liger": "liger-kernel"}
_GIB = 2**30
CGROUP = Path("/sys/fs/cgroup")
# Version 2, and version 1.
_CGROUP_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def gpus(subject: Subject) -> Iterator[str]:
    """Enough of them."""
    if not subject.on_gpu or len(subject.gpus) >= subject.gpus_wanted:
        return
    if not subject.gpus:
        yield (
            f"no GPU is to be seen here (nvidia-smi), and the run wants {subject.gpus_wanted}: in a container use "
            "--gpus all; without a GPU --hardware cpu trains a small model"
        )
        return
    names = ", ".join(sorted({gpu.name for gpu in subject.gpus}))
    yield (
        f"the run wants {subject.gpus_wanted} GPUs, and {len(subject.gpus)} are to be seen here ({names}): choose "
        "another --hardware, or look at CUDA_VISIBLE_DEVICES"
    )


def cuda_library(subject: Subject) -> Iterator[str]:
    """A compatibility library that does not go with the driver fails in every process that uses CUDA."""
    if subject.on_gpu:
        environment = {cuda_compat.SEARCH_PATH: foreign(cuda_compat.SEARCH_PATH) or ""}
        trouble = cuda_compat.decide(environment, subject.settings.cuda_compat).trouble
        if trouble:
            yield trouble


def gpu_busy(subject: Subject) -> Iterator[str]:
    """Somebody else's memory is not there for the engine."""
    for gpu in subject.gpus[: subject.gpus_wanted]:
        if gpu.used_gib > BUSY_GIB:
            yield (
                f"GPU {gpu.index} ({gpu.name}) has {gpu.used_gib:.1f} GiB in use already: end that process "
                "(nvidia-smi names it), or hide the GPU with CUDA_VISIBLE_DEVICES"
            )


def cascade_attention(subject: Subject) -> Iterator[str]:
    """On some cards vLLM's attention over a shared prefix computes other probabilities than the trainer."""
    names = {gpu.name for gpu in subject.gpus[: subject.gpus_wanted] if _WRONG_IN_CASCADE.search(gpu.name)}
    if names and not subject.get(f"{_ENGINE}.disable_cascade_attn"):
        yield (
            f"on {', '.join(sorted(names))} vLLM's cascade attention gives probabilities that the trainer does not "
            f"share: --set {_ENGINE}.disable_cascade_attn=true"
        )


def kernels(subject: Subject) -> Iterator[str]:
    """verl imports them when its worker builds the model, a minute after the start."""
    if not subject.on_gpu:
        return
    here = installed()
    for option, package in _KERNELS.items():
        if subject.get(f"actor_rollout_ref.model.{option}") and package not in here:
            how = "docker/locks/flash-attn.txt" if package == "flash-attn" else "`invoke setup --stack gpu`"
            yield (
                f"actor_rollout_ref.model.{option} needs {package}, which is not installed: install it ({how}), or set "
                "the option to false"
            )


def ray_address(subject: Subject) -> Iterator[str]:
    """ray.init would join that cluster, and refuse what the run tells it."""
    address = foreign("RAY_ADDRESS")
    if address:
        yield (
            f"RAY_ADDRESS names another Ray cluster ({address}), and this run starts its own: unset RAY_ADDRESS; "
            "`invoke launch` trains there"
        )


def ray_running(subject: Subject) -> Iterator[str]:
    """A cluster that was left running holds GPUs and cores; on a CPU several runs may share a machine."""
    if not subject.on_gpu:
        return
    for process in psutil.process_iter(["name", "username"]):
        if process.info["name"] == "raylet":
            yield (
                f"a Ray node runs on this machine already (process {process.pid}, user {process.info['username']}): "
                "its workers may hold the GPUs. If it is yours: ray stop"
            )


def open_files(subject: Subject) -> Iterator[str]:
    """Ray keeps thousands of files and sockets open."""
    if (hard := _limit_below(resource.RLIMIT_NOFILE, MIN_OPEN_FILES)) is not None:
        yield (
            f"at most {hard} files may be open here, and Ray needs {MIN_OPEN_FILES}: ulimit -n 65536 before the "
            "start; in a container --ulimit nofile=65536:65536"
        )


def processes(subject: Subject) -> Iterator[str]:
    """Ray, vLLM and the sandboxes make hundreds of processes and threads, which count alike."""
    if (hard := _limit_below(resource.RLIMIT_NPROC, MIN_PROCESSES)) is not None:
        yield (
            f"at most {hard} processes may run here, and a run needs {MIN_PROCESSES}: ulimit -u 65536 before the "
            "start; in a container --ulimit nproc=65536:65536"
        )


def _limit_below(limit: int, needed: int) -> int | None:
    """The hard limit, which nobody here can raise, if it is below what is needed."""
    _, hard = resource.getrlimit(limit)
    return hard if hard != resource.RLIM_INFINITY and hard < needed else None


def shared_memory(subject: Subject) -> Iterator[str]:
    """NCCL and Ray's store use /dev/shm; Docker gives 64 MB."""
    if not subject.on_gpu or subject.gpus_wanted < 2:
        return
    total_gib = shared_memory_gib()
    if total_gib < MIN_SHARED_MEMORY_GIB:
        yield (
            f"{SHARED_MEMORY} has {total_gib:.1f} GiB, and {subject.gpus_wanted} GPUs need {MIN_SHARED_MEMORY_GIB}: "
            "in a container use --shm-size=10g or --ipc=host"
        )


def shared_memory_gib() -> float:
    """Size of /dev/shm, 0 where there is none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).total / _GIB
    except OSError:
        return 0.0


def host_memory(subject: Subject) -> Iterator[str]:
    """FSDP loads and offloads to the machine's own memory."""
    needed_gib = subject.plan.host_gib
    if not subject.on_gpu or needed_gib is None or subject.shape is None:
        return
    has_gib = memory_available_gib()
    if needed_gib <= has_gib:
        return
    if host_loading_gib(subject.config, subject.shape) > has_gib:
        doing = f"load the model, once for each of {subject.gpus_wanted} processes"
        cure = "use a machine with more, or fewer of its GPUs"
    else:
        doing = "hold what is offloaded"
        cure = "use a machine with more, or set actor.fsdp_config.param_offload and optimizer_offload to false"
    yield (
        f"the trainer needs {needed_gib:.0f} GiB of this machine's memory to {doing}, and {has_gib:.0f} are free: "
        f"{cure}"
    )


def memory_available_gib() -> float:
    """What is free here, a container's limit counted."""
    available = psutil.virtual_memory().available
    for limit, used in _CGROUP_FILES:
        try:
            available = min(available, int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()))
        except (OSError, ValueError):
            continue  # no such limit, or "max"
    return available / _GIB


def disk(subject: Subject) -> Iterator[str]:
    """Checkpoints are large, and a full disk ends the run while it writes one."""
    plan = subject.plan
    if plan.checkpoint_gib is None or not plan.checkpoints_kept:
        return
    folder = existing_folder(Path(str(subject.get("trainer.default_local_dir"))))
    free_gib, needed_gib = shutil.disk_usage(folder).free / _GIB, plan.checkpoints_kept * plan.checkpoint_gib + 1
    if needed_gib > free_gib:
        yield (
            f"{plan.checkpoints_kept} checkpoints of {plan.checkpoint_gib:.1f} GiB need {needed_gib:.0f} GiB, and "
            f"{folder} has {free_gib:.0f} free: set VERL_EXT_DATA_ROOT to a larger disk, or "
            "actor_rollout_ref.actor.checkpoint.save_contents=[model] (no resuming)"
        )


def tmp_disk(subject: Subject) -> Iterator[str]:
    """Ray's session is below /tmp."""
    usage = shutil.disk_usage("/tmp")  # noqa: S108 - Ray's place
    full = 1 - usage.free / usage.total
    if full >= MAX_TMP_SHARE:
        yield f"the disk of /tmp is {full:.0%} full, and Ray stops at {MAX_TMP_SHARE:.0%}: free some of it"


def existing_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that is there: whose disk it would be on."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def allocator(subject: Subject) -> Iterator[str]:
    """vLLM's sleep mode asserts that it is off (vllm 0.11.0 device_allocator/cumem.py)."""
    setting = foreign("PYTORCH_CUDA_ALLOC_CONF") or ""
    if subject.on_gpu and "expandable_segments:true" in setting.lower().replace(" ", ""):
        yield (
            "PYTORCH_CUDA_ALLOC_CONF asks for expandable segments, which vLLM's sleep mode refuses: take it out of "
            "the environment; verl switches them on itself where it can"
        )


def ports(subject: Subject) -> Iterator[str]:
    """Ports that the configuration fixes; all others are chosen free."""
    fixed = {f"ray_kwargs.ray_init.{name}": value for name, value in (subject.get("ray_kwargs.ray_init") or {}).items()}
    fixed = {key: value for key, value in fixed.items() if key.endswith("port") and isinstance(value, int)}
    prometheus = subject.get("actor_rollout_ref.rollout.prometheus")
    if prometheus.enable:
        fixed["actor_rollout_ref.rollout.prometheus.port"] = prometheus.port
    for key, port in fixed.items():
        if error := port_error(port):
            yield f"{key} is {port}, which cannot be had ({error}): choose another, or leave it to the run"


def port_error(port: int) -> OSError | OverflowError | None:
    """Why nobody could listen on the port here, None if one could."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - asks, and lets go at once
        except (OSError, OverflowError) as error:
            return error
    return None


def sandbox_server(subject: Subject) -> Iterator[str]:
    """A server of the user's own on this machine must be there; a run starts one only if none is named."""
    url = urlsplit(subject.settings.e2b_api_url or "")
    if url.hostname not in ("127.0.0.1", "localhost", "::1"):
        return
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname, port), timeout=5).close()
    except (OSError, ValueError) as error:
        yield (
            f"E2B_API_URL is {url.geturl()}, where nobody answers ({error}): start one there with `invoke "
            "serve-sandbox --port N`, or remove the variable and the run starts its own"
        )
