"""The environment of a run's processes: what Ray's workers get, and what a child of this process gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext import cuda_compat
from verl_ext.request import RunRequest
from verl_ext.sandbox.server.launch import RunningServer
from verl_ext.settings import LOCAL_CREATE_RATE_PER_S, Settings, sandboxes_alive

if TYPE_CHECKING:
    from verl_ext.cluster.shape import Cluster

ROOT = Path(__file__).resolve().parent.parent


def run_environment(
    request: RunRequest, settings: Settings, run_dir: Path, server: RunningServer | None, *, cpu: bool
) -> dict[str, str]:
    """Variables of every process of the run. Nothing secret: Ray shows them."""
    import_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # noqa: TID251 - passed on
    values = {
        "PYTHONPATH": import_path,
        **tracker_files(settings, run_dir),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    if settings.env_file and not request.cluster:  # there each node has its own, see verl_ext.cluster.start
        values["VERL_EXT_ENV_FILE"] = str(settings.env_file)
    if server:
        values |= {
            "VERL_EXT_SANDBOX_BACKEND": "local",
            "E2B_API_URL": server.url,
            "E2B_SANDBOX_URL": server.url,
        }
        # The defaults are an AGS account's; a server of our own has no quota, only this machine's memory.
        if settings.is_default("sandbox_max_alive"):
            values["VERL_EXT_SANDBOX_MAX_ALIVE"] = str(sandboxes_alive(settings))
        if settings.is_default("sandbox_max_starting"):
            values["VERL_EXT_SANDBOX_MAX_STARTING"] = str(sandboxes_alive(settings))
        if settings.is_default("sandbox_create_rate_per_s"):
            values["VERL_EXT_SANDBOX_CREATE_RATE_PER_S"] = str(LOCAL_CREATE_RATE_PER_S)
    if cpu:
        values |= _cpu_environment(request.cluster)
    elif not request.cluster:  # there it is decided on each node, by what starts Ray
        # Ray's workers are new processes on this machine, and CUDA_COMPAT may stand in a file that no shell read.
        decision = cuda_compat.decide(os.environ, settings.cuda_compat)  # noqa: TID251 - handed on
        values |= {"CUDA_COMPAT": decision.mode, cuda_compat.SEARCH_PATH: decision.search_path}
    if not request.cluster:  # a folder that nodes share is no place for what several compile at once
        values |= caches(settings)
    return {**values, **request.environment}


def caches(settings: Settings) -> dict[str, str]:
    """Where libraries keep what they make: below the data root, which outlives a container, and not in the home folder.

    That of vLLM, torch.compile and Triton is what they compile: on one H200 the engine of a 0.6 M model starts in 51 s
    without it and in 25 s with it (recipe/retool/LOG.md). That of datasets, by which verl reads its rows, are copies of
    them; a home folder that cannot be written to would end the run. A variable that the user has set stays.
    """
    folder = settings.folder("cache").absolute()
    places = {
        "VLLM_CACHE_ROOT": "compiled/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "compiled/inductor",
        "TRITON_CACHE_DIR": "compiled/triton",
        "HF_DATASETS_CACHE": "datasets",
    }
    return {name: str(folder / place) for name, place in places.items() if name not in os.environ}  # noqa: TID251


def tracker_files(settings: Settings, run_dir: Path) -> dict[str, str]:
    """Where trackers put their files: into the run folder, not where the user happens to stand."""
    files = {
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "WANDB_DIR": str(run_dir),  # W&B makes wandb/ in it
        "SWANLAB_LOG_DIR": str(run_dir / "swanlab"),
    }
    return files if settings.mlflow_tracking_uri else {**files, "MLFLOW_TRACKING_URI": f"sqlite:///{run_dir}/mlflow.db"}


def _cpu_environment(cluster: Cluster | None) -> dict[str, str]:
    from verl_ext.ray_run import cores

    ranks = cluster.nodes * cluster.gpus_per_node if cluster else 1
    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext.cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        # A list for each of verl's ranks, see verl_ext.cpu; nodes without a GPU are alike in small clusters.
        "VLLM_CPU_OMP_THREADS_BIND": "|".join([",".join(map(str, cores()))] * ranks),
        # Ray would set 1 for each process; passive, since the processes take turns on the same cores.
        "OMP_NUM_THREADS": str(len(cores())),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def child_environment(**values: str) -> dict[str, str]:
    """This process's environment with `values` in it, for a child process."""
    return {**os.environ, **values}  # noqa: TID251 - handed on, not read
