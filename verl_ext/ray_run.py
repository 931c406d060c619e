"""Ray for one run: started on this machine and ended with all its processes, or joined; and the run watched."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import ray
import ray._private.state as ray_state
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayError

from verl_ext import control_store, ray_session
from verl_ext.agent_loop import process as agent_loop_process
from verl_ext.control_store import Beside, ControlStore
from verl_ext.engine import process as engine_process
from verl_ext.errors import AlarmStopError, TrainingDiedError
from verl_ext.interrupts import deferred, rearm
from verl_ext.process_tree import adopt_orphans, end_descendants
from verl_ext.progress import Follower
from verl_ext.runs import LOGS
from verl_ext.settings import foreign

# What verl's own run_ppo gives its workers (verl 0.6.1 trainer/constants_ppo.py). It is kept here because
# importing it imports torch, 16 s in a process that only waits; a contract test holds the two equal.
PPO_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
}
POLL_S = 1.0
# A dead actor is given this long to be reported by verl itself, with a traceback, before we end the run.
GRACE_S = 10.0
# What Ray is given to be left when its control store is gone; seen on one machine and on two nodes: 1 to 4.
LEAVE_WITHIN_S = 10.0
# What ray.init takes when it starts a cluster and refuses when it joins one (ray 2.49.2 _private/worker.py init).
OF_A_NEW_CLUSTER = (
    "num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "dashboard_host", "dashboard_port",
    "include_dashboard", "_system_config", "_enable_object_reconstruction", "_node_name", "_temp_dir", "_memory",
    "_plasma_directory", "_object_spilling_directory", "_metrics_export_port",
)  # fmt: skip


class Runner(Protocol):
    """What a run's first process does.

    Attributes:
        engine_has_own_gpus: whether no trainer holds the GPUs that the engine runs on.
    """

    engine_has_own_gpus: ClassVar[bool]

    def run(self, config: DictConfig, agent_loops: list[Any], engine_servers: dict[str, list[Any]]) -> None:
        """All of it; returns when it is over."""
        ...


class RunnerProcess:
    """The TaskRunner's process. Heavy imports happen in it and not in the driver."""

    engine_has_own_gpus: ClassVar[bool] = False

    def run(self, config: DictConfig, agent_loops: list[Any], engine_servers: dict[str, list[Any]]) -> None:
        """Train; returns when training is over."""
        from verl_ext.trainer import AgsTaskRunner

        AgsTaskRunner(agent_loops, engine_servers).run(config)


@contextlib.contextmanager
def local_ray(config: DictConfig, environment: dict[str, str], run_dir: Path, spare: int = 0) -> Iterator[None]:
    """Ray on this machine for as long as the block runs; its logs are moved to the run folder.

    Args:
        config: `ray_kwargs.ray_init` goes to `ray.init`.
        environment: variables of every worker, in addition to those of this process. No secrets: Ray shows
            them.
        run_dir: the run's folder.
        spare: process id of a child that stays, the sandbox server's.
    """
    # Short, since Ray puts sockets below it and a socket's path has at most 107 bytes.
    session = Path(tempfile.mkdtemp(prefix="ags-", dir="/tmp"))
    ray_session.note(run_dir, session)
    adopt_orphans()
    try:
        with deferred():
            _start_ray(session, environment, _ray_init(config))
        ray_session.show_logs(session, run_dir / LOGS)
        yield
    finally:
        pids = _worker_pids(session)
        _leave_ray()
        end_descendants(spare)
        ray_session.put_away(run_dir, session, run_dir / LOGS, pids)


def _start_ray(session: Path, environment: dict[str, str], options: dict[str, Any]) -> None:
    ray.init(
        _temp_dir=str(session),
        log_to_driver=False,
        include_dashboard=False,
        # Ray's default of 15 would let any other process of the machine go first.
        _system_config={"worker_niceness": 0},
        runtime_env={"env_vars": {**PPO_ENVIRONMENT, **environment}},
        logging_level="warning",
        **options,
    )
    rearm()  # ray.init takes SIGTERM for itself


@contextlib.contextmanager
def cluster_ray(config: DictConfig, environment: dict[str, str], address: str) -> Iterator[None]:
    """A Ray cluster that is there already, joined for as long as the block runs; what it ran for us ends with it.

    Args:
        config: `ray_kwargs.ray_init` goes to `ray.init`, without what a cluster that runs refuses to be told.
        environment: as for `local_ray`. A variable that the job was submitted with keeps its value.
        address: of its control store.
    """
    options = {name: value for name, value in _ray_init(config).items() if name not in OF_A_NEW_CLUSTER}
    try:
        with deferred():
            ray.init(
                address=address,
                log_to_driver=False,
                runtime_env={"env_vars": without_the_jobs({**PPO_ENVIRONMENT, **environment})},
                logging_level="warning",
                **options,
            )
            rearm()
        yield
    finally:
        _leave_ray()


def without_the_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what the job's own runtime_env sets: ray.init refuses a second word on it."""
    said = json.loads(foreign("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}").get("runtime_env") or {}
    return {name: value for name, value in environment.items() if name not in (said.get("env_vars") or {})}


def _ray_init(config: DictConfig) -> dict[str, Any]:
    arguments = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    assert isinstance(arguments, dict)  # noqa: S101 - verl's schema
    return {str(name): value for name, value in arguments.items() if value is not None}


def _store_answers() -> bool:
    return control_store.answers(ray.get_runtime_context().gcs_address)


def _leave_ray() -> None:
    """Leave it while its control store is gone, too: from then on Ray no longer aborts this process for that."""
    if not ray.is_initialized() or _store_answers():
        ray.shutdown()
    else:
        Beside(ray.shutdown).answer(LEAVE_WITHIN_S)


def _worker_pids(session: Path) -> set[int]:
    if not ray.is_initialized():
        return set()
    if not _store_answers():  # asking it would end this process
        return ray_session.worker_pids(session)
    return {int(actor["Pid"]) for actor in ray_state.actors().values()}


def train(
    config: DictConfig, follower: Follower, stall_timeout_s: float, runner_class: type[Runner] = RunnerProcess
) -> None:
    """Run the training, or what another runner does in its place, to its end.

    Args:
        config: resolved.
        follower: asked for progress once a second.
        stall_timeout_s: seconds without any new phase or step after which the run is ended.
        runner_class: its process.

    Raises:
        TrainingDiedError: a process of the run died, training failed, nothing happened for too long, or Ray's
            control store is gone.
        AlarmStopError: an alarm ended it, as the user asked.
    """
    runner: Any = ray.remote(num_cpus=1)(runner_class).remote()
    own_gpus = runner_class.engine_has_own_gpus
    result = runner.run.remote(config, *_begin_early(config.actor_rollout_ref.rollout, config.trainer, own_gpus))
    patience_s = control_store.patience_s(foreign(control_store.RAYS_LIMIT))
    store = ControlStore(ray.get_runtime_context().gcs_address, follower.note, patience_s)
    # Without the store the question has no answer until Ray aborts the process that asks.
    job = ray.get_runtime_context().get_job_id()
    deaths = Beside(lambda: _dead_actor(job))
    first_death_s: float | None = None
    death = ""
    while True:
        with deferred():
            done, _ = ray.wait([result], timeout=POLL_S)
            follower.poll()
        if done:
            try:
                ray.get(result)
                return
            except RayError as error:
                if isinstance(cause := getattr(error, "cause", None), AlarmStopError):
                    raise AlarmStopError(str(cause)) from None  # no failure: the user asked for it
                raise TrainingDiedError(_cause(error, store.silence)) from error
        with deferred():
            if store.look():
                death = death or deaths.answer(POLL_S) or ""
        if death:
            first_death_s = first_death_s or time.monotonic()
            if time.monotonic() - first_death_s > GRACE_S:
                raise TrainingDiedError(f"{death}; verl itself would wait for it for ever")
        idle_s = time.monotonic() - follower.last_change_s
        if idle_s > stall_timeout_s:
            raise TrainingDiedError(
                f"nothing happened for {idle_s:.0f} s after: {follower.last_seen}. The processes' logs may say why; "
                "if the step is only slow, raise verl_ext.stall_timeout_s"
            )


def _begin_early(rollout: DictConfig, trainer: DictConfig, own_gpus: bool) -> tuple[list[Any], dict[str, list[Any]]]:
    """The processes of agent loops and engine servers, importing while the trainer does."""
    agent_loops = agent_loop_process.begin(rollout.agent.num_workers)
    if rollout.name != "vllm" or rollout.data_parallel_size != 1:
        return agent_loops, {}
    gpus_per_server = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    servers = trainer.nnodes * trainer.n_gpus_per_node // gpus_per_server
    return agent_loops, engine_process.begin(gpus_per_server, servers, own_gpus=own_gpus)


def _dead_actor(job: str) -> str:
    """Which actor of the run is dead and why, or ""."""
    # No public way shows actors without Ray's dashboard, which a run does not start.
    for actor in ray_state.actors(actor_state_name="DEAD").values():
        if actor["JobID"] != job:
            continue  # somebody else's on the same cluster
        cause = actor["DeathCause"].actor_died_error_context.error_message.strip()
        if not actor["ActorClassName"].endswith(RunnerProcess.__name__):
            first = cause.splitlines()[0] if cause else "no cause known"
            return f"process {actor['Pid']} ({actor['ActorClassName'].rsplit('.')[-1]}) died: {first}"
    return ""


def _cause(error: BaseException, silence: str) -> str:
    """The innermost message of what Ray wrapped, one paragraph; with the store's silence, which may be why."""
    cause: Any = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    said = f"training failed: {type(cause).__name__}: {lines[-1] if lines else 'no message'}"
    return f"{said}; {silence}: {control_store.CURE}" if silence else said


def open_files_limit() -> None:
    """Raise this process's limit of open files to what is allowed: Ray needs thousands."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536) if hard > 0 else 65_536, hard))


def cores() -> list[int]:
    """The cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0))
