"""From one line to a training run on this machine: `python -m verl_ext.launch`, called by `invoke train`.

    settings + recipe + hardware + overrides -> preflight -> run folder -> sandbox server -> Ray -> training

This process imports neither torch nor verl: it waits, shows progress, watches the others, and cleans up.

Exit status: 0 done; 2 something of the user's is wrong; 70 the run died, with the cause; 130 and 143 ended
by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext import compose as composition
from verl_ext import preflight, resume, runs
from verl_ext.check.account import admit
from verl_ext.clean import clean
from verl_ext.errors import ConfigurationError, SandboxError, TrainingDiedError, VerlAgsError
from verl_ext.interrupts import Interrupted, interruptible
from verl_ext.manifest import manifest
from verl_ext.sandbox.connect import LEDGERS, run_limits
from verl_ext.sandbox.ledger import RUN_LABEL, read_left_ids
from verl_ext.sandbox.server.launch import RunningServer, start_server
from verl_ext.settings import Settings

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROOT = Path(__file__).resolve().parent.parent
EXIT_USER, EXIT_DIED = 2, 70
# Sandboxes of the local server: about 10 MiB each, so 64 fit anywhere; creates are bounded by its CPU alone.
LOCAL_MAX_ALIVE, LOCAL_CREATE_RATE_PER_S = 64, 1000


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for.

    Attributes:
        recipe, hardware: names of files in recipe/retool/config.
        model: a Hugging Face folder.
        train, val: parquet files made by `invoke prepare-data`.
        overrides: KEY=VALUE, last and strongest.
        run_id: made from the recipe's name and the time if "".
        server_options: further options for the local sandbox server.
        environment: further variables of every process of the run; no secrets.
    """

    recipe: str
    hardware: str
    model: Path
    train: Path
    val: Path
    overrides: tuple[str, ...] = ()
    run_id: str = ""
    server_options: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunResult:
    """What is left of a run.

    Attributes:
        run_dir: its folder.
        server_stats: the local server's counts for this run, {} with a remote service.
        swept: sandboxes that had to be ended from outside, since their own process did not.
        left: sandboxes that are still alive.
        seconds: from request to end.
    """

    run_dir: Path
    server_stats: dict[str, float]
    swept: int
    left: int
    seconds: float


def configure(request: RunRequest, settings: Settings) -> tuple[DictConfig, Path]:
    """The resolved and checked configuration of a request, and the run folder (not made yet).

    Raises:
        ConfigurationError: with every problem found.
    """
    composition.check_names(request.recipe, request.hardware)
    run_id = runs.check_run_id(request.run_id or runs.new_run_id(request.recipe))
    run_dir = (settings.folder("runs") / run_id).absolute()
    config = composition.compose(
        request.recipe,
        request.hardware,
        [
            f"verl_ext.run_id={run_id}",
            f"verl_ext.run_dir={_quoted(run_dir)}",
            f"verl_ext.config_dir={_quoted(composition.CONFIG_DIR)}",
            f"actor_rollout_ref.model.path={_quoted(request.model.absolute())}",
            f"data.train_files={_quoted(request.train.absolute())}",
            f"data.val_files={_quoted(request.val.absolute())}",
            *request.overrides,
        ],
    )
    resolved = composition.resolve(config)
    preflight.check(resolved)
    resume.check(resolved)
    run_limits(settings, int(resolved.actor_rollout_ref.rollout.agent.num_workers))
    return resolved, run_dir


def _quoted(path: Path) -> str:
    """The path as a value of an override, whatever characters it holds."""
    return json.dumps(str(path))


def run(request: RunRequest, settings: Settings, say: Callable[[str], None]) -> RunResult:
    """Train, and leave nothing behind but the run folder.

    Raises:
        ConfigurationError: before anything was started.
        TrainingDiedError: the run died; the cause is in the message, the logs are in the run folder.
        SandboxError: the local sandbox server did not start.
    """
    from omegaconf import OmegaConf

    started_s = time.monotonic()
    config, run_dir = configure(request, settings)
    train_data = resume.train_data(config)
    admit(settings, config.verl_ext.run_id, say)
    try:
        run_dir.mkdir(parents=True)
    except FileExistsError as error:
        raise ConfigurationError(f"{run_dir} is there already: choose another --run-id or delete the folder") from error
    except OSError as error:
        raise ConfigurationError(
            f"{run_dir} cannot be made ({error}): set VERL_EXT_DATA_ROOT to a folder of yours"
        ) from error
    (run_dir / runs.CONFIG).write_text(OmegaConf.to_yaml(config), encoding="utf-8")
    data_files = [*preflight.files(config.data.train_files), *preflight.files(config.data.val_files)]
    facts = manifest(data_files, settings.public_dict()) | {"train_data": train_data}
    (run_dir / runs.MANIFEST).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    say(f"run {config.verl_ext.run_id}: {run_dir}")
    runs.note_phase(run_dir, "start")
    with _sandbox_service(request, settings, run_dir) as server:
        try:
            if server:
                say(f"local sandbox server at {server.url}, isolation: {server.isolation}")
            cpu = config.verl_ext.get("device") == "cpu"
            environment = _environment(request, settings, run_dir, server, cpu=cpu)
            _train(config, environment, run_dir, server, say)
        finally:
            ended = _put_away(settings, server, config.verl_ext.run_id, run_dir, say)
    return RunResult(run_dir, *ended, time.monotonic() - started_s)


def _put_away(
    settings: Settings, server: RunningServer | None, run_id: str, run_dir: Path, say: Callable[[str], None]
) -> tuple[dict[str, float], int, int]:
    """End what is left of the run's sandboxes; the server's counts, how many were swept, how many are left.

    A service that does not answer is said, not raised: it must not hide why the run ended.
    """
    try:
        cleaned = asyncio.run(clean(settings, run_id, run_dir, local_url=server.url if server else None))
        stats = server.stats(**{RUN_LABEL: run_id}) if server else {}
    except SandboxError as error:
        say(f"the sandboxes of {run_id} could not be counted or ended, their time to live will end them: {error}")
        return {}, 0, len(read_left_ids(run_dir / LEDGERS))
    say(f"sandboxes: {cleaned}")
    return stats, cleaned.swept, cleaned.leaked


def _train(
    config: DictConfig,
    environment: dict[str, str],
    run_dir: Path,
    server: RunningServer | None,
    say: Callable[[str], None],
) -> None:
    from verl_ext.progress import Follower
    from verl_ext.ray_run import local_ray, open_files_limit, train

    open_files_limit()
    follower = Follower(run_dir, say, config.trainer.total_training_steps)
    with local_ray(config, environment, run_dir, spare=server.pid if server else 0):
        runs.note_phase(run_dir, "Ray is up")
        try:
            train(config, follower, float(config.verl_ext.get("stall_timeout_s", 3600)))
        finally:
            follower.poll()


def _environment(
    request: RunRequest, settings: Settings, run_dir: Path, server: RunningServer | None, *, cpu: bool
) -> dict[str, str]:
    """Variables of every process of the run. Nothing secret: Ray shows them."""
    import_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # noqa: TID251 - passed on
    values = {
        "PYTHONPATH": import_path,
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
    }
    if settings.env_file:
        values["VERL_EXT_ENV_FILE"] = str(settings.env_file)
    if server:
        values |= {
            "VERL_EXT_SANDBOX_BACKEND": "local",
            "E2B_API_URL": server.url,
            "E2B_SANDBOX_URL": server.url,
        }
        # The defaults are an AGS account's; a server of our own has no quota, only this machine's memory.
        if settings.is_default("sandbox_max_alive"):
            values["VERL_EXT_SANDBOX_MAX_ALIVE"] = str(LOCAL_MAX_ALIVE)
        if settings.is_default("sandbox_max_starting"):
            values["VERL_EXT_SANDBOX_MAX_STARTING"] = str(LOCAL_MAX_ALIVE)
        if settings.is_default("sandbox_create_rate_per_s"):
            values["VERL_EXT_SANDBOX_CREATE_RATE_PER_S"] = str(LOCAL_CREATE_RATE_PER_S)
    if cpu:
        values |= _cpu_environment()
    return values | request.environment


def _cpu_environment() -> dict[str, str]:
    from verl_ext.ray_run import cores

    return {
        "VERL_USE_EXTERNAL_MODULES": "verl_ext.cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores())),
        # Ray would set 1 for each process; passive, since the processes take turns on the same cores.
        "OMP_NUM_THREADS": str(len(cores())),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


@contextlib.contextmanager
def _sandbox_service(request: RunRequest, settings: Settings, run_dir: Path) -> Iterator[RunningServer | None]:
    if settings.backend != "local" or settings.e2b_api_url:
        yield None
        return
    options = ["--host", "127.0.0.1", "--port", "0", "--isolation", settings.sandbox_isolation]
    log_path = run_dir / runs.LOGS / "sandbox-server.log"
    with start_server([*options, *request.server_options], log_path=log_path) as server:
        yield server


def child_environment(**values: str) -> dict[str, str]:
    """This process's environment with `values` in it, for a child process."""
    return {**os.environ, **values}  # noqa: TID251 - handed on, not read


def say_line(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Parse, run, and turn every expected failure into a message and an exit status."""
    parser = argparse.ArgumentParser(prog="invoke train", description="Train a model with a code interpreter.")
    parser.add_argument("--recipe", default="retool", help=f"one of {', '.join(composition.recipe_names())}")
    parser.add_argument("--hardware", required=True, help=f"one of {', '.join(composition.hardware_names())}")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--train", type=Path, required=True, help="parquet made by prepare-data")
    parser.add_argument("--val", type=Path, required=True, help="parquet made by prepare-data")
    parser.add_argument("--run-id", default="", help="name of the run; made from recipe and time if left out")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="verl's own keys, last and strongest")
    options = parser.parse_intermixed_args(arguments)
    request = RunRequest(
        options.recipe,
        options.hardware,
        options.model,
        options.train,
        options.val,
        tuple(options.overrides),
        options.run_id,
    )
    return guarded(lambda: run(request, Settings.load(), say_line))


def guarded(action: Callable[[], object]) -> int:
    """Run `action`; its failure becomes a message on standard error and an exit status."""
    try:
        with interruptible():
            action()
    except Interrupted as interrupted:
        sys.stderr.write(f"ended by {signal.Signals(interrupted.signum).name}\n")
        return 128 + interrupted.signum
    except (TrainingDiedError, SandboxError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_DIED
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
