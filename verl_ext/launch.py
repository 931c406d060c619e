"""From one line to a training run: `python -m verl_ext.launch`, called by `invoke train`, and as a job by `launch`.

    settings + recipe + hardware + overrides -> preflight -> run folder -> sandbox server -> Ray -> training

Ray is started on this machine, unless RAY_ADDRESS names a cluster (Ray sets it for a job): then the run is on that
cluster, with as many nodes and GPUs as it has, and this process may be on any of its nodes.

This process imports neither torch nor verl: it waits, shows progress, watches the others, and cleans up.

Exit status: 0 done; 2 something of the user's is wrong; 3 an alarm of `--stop-on` ended the run, with a
checkpoint; 70 the run died, with the cause; 130 and 143 ended by Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from verl_ext import alarms, attempts, ray_session, resume, resumption, runs
from verl_ext import compose as composition
from verl_ext.check.account import admit
from verl_ext.check.proof import prove
from verl_ext.clean import clean
from verl_ext.display import Display, display, writer
from verl_ext.errors import AlarmStopError, ConfigurationError, SandboxError, TrainingDiedError, VerlAgsError
from verl_ext.gpu_watch import compared, watch_memory
from verl_ext.interrupts import Interrupted, interruptible
from verl_ext.manifest import data_report, manifest
from verl_ext.parquet_files import files
from verl_ext.request import Configured, RunRequest, configure
from verl_ext.resumption import Resumption
from verl_ext.run_environment import run_environment
from verl_ext.sandbox.ledger import LEDGERS, RUN_LABEL, read_left_ids
from verl_ext.sandbox.server.launch import RunningServer, start_server
from verl_ext.setting_values import masked
from verl_ext.settings import FLAGS, Settings, foreign

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_ext.cluster.shape import Cluster
    from verl_ext.ray_run import Runner

EXIT_USER, EXIT_ALARM, EXIT_DIED = 2, 3, 70


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


def run(
    request: RunRequest, settings: Settings, show: Display, wrong_settings: Sequence[str] = (), go_on_with: str = ""
) -> RunResult:
    """Train, and leave nothing behind but the run folder.

    Args:
        request: what is asked for.
        settings: from `Settings.read`.
        show: takes lines and steps for the user.
        wrong_settings: from `Settings.read`.
        go_on_with: a run that died, see `resumption.find_run`; "" for a new one.

    Raises:
        ConfigurationError: before anything was started.
        AlarmStopError: an alarm of `verl_ext.stop_on` ended the run; its checkpoint is named.
        TrainingDiedError: the run died; the cause is in the message, the logs are in the run folder.
        SandboxError: the local sandbox server did not start.
    """
    if not go_on_with:
        return carry_out(_without_problems(request, settings, wrong_settings), request, settings, show)
    run_dir = resumption.find_run(settings.folder("runs"), go_on_with)
    with attempts.held(run_dir):
        if ended := ray_session.end_leftovers(run_dir, run_dir / runs.LOGS):
            show.say(f"ended {ended} processes that the attempt that was killed had left")
        back = resumption.find(request, run_dir, show.say)
        configured = _without_problems(back.request, settings, wrong_settings)
        resumption.refuse_finished(back, configured.subject.plan.steps)
        return carry_out(configured, back.request, settings, show, back=back)


def _without_problems(request: RunRequest, settings: Settings, wrong_settings: Sequence[str]) -> Configured:
    configured = configure(request, settings, wrong_settings)
    configured.refuse_problems()
    return configured


def carry_out(
    configured: Configured,
    request: RunRequest,
    settings: Settings,
    show: Display,
    *,
    runner_class: type[Runner] | None = None,
    back: Resumption | None = None,
) -> RunResult:
    """Do what was configured: `run` without the looking.

    Args:
        configured: without problems.
        request: what it was made of.
        settings: from `Settings.read`.
        show: takes lines and steps for the user.
        runner_class: the process that does it; trains if None.
        back: how a run goes on whose folder this process holds; None for a new one.

    Raises:
        As `run`.
    """
    started_s, say = time.monotonic(), show.say
    config, run_dir = configured.config, configured.run_dir
    train_data = resume.train_data(config)
    with contextlib.ExitStack() as held:
        if back:
            attempts.leave_the_dead(back, config, settings, say)  # before the account's sandboxes are counted
        admit(settings, config.verl_ext.run_id, say)
        if not back:
            _make_folder(run_dir, may_be_there=request.run_dir is not None)
            held.enter_context(attempts.held(run_dir))
        _write_facts(configured, settings, train_data)
        if runner_class is None:
            resumption.write_request(run_dir, request, configured.resolved)
        say(f"run {config.verl_ext.run_id}: {run_dir}")
        runs.note_phase(run_dir, "start")
        ended = _serve_and_train(configured, request, settings, show, runner_class)
    return RunResult(run_dir, *ended, time.monotonic() - started_s)


def _make_folder(run_dir: Path, *, may_be_there: bool) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=may_be_there)
    except OSError as error:
        raise ConfigurationError(
            f"{run_dir} cannot be made ({error}): set VERL_EXT_DATA_ROOT to a folder of yours"
        ) from error


def _write_facts(configured: Configured, settings: Settings, train_data: list[dict[str, str]]) -> None:
    from omegaconf import OmegaConf

    config, run_dir = configured.config, configured.run_dir
    runs.write_whole(run_dir / runs.CONFIG, OmegaConf.to_yaml(config))
    data_files = [*files(config.data.train_files), *files(config.data.val_files)]
    facts = manifest(configured.subject.model, data_files, settings.public_dict()) | {"train_data": train_data}
    runs.write_whole(run_dir / runs.MANIFEST, json.dumps(facts, indent=2) + "\n")
    if report := data_report(train_data):
        runs.write_whole(run_dir / runs.DATA_REPORT, json.dumps(report, indent=2) + "\n")


def _serve_and_train(
    configured: Configured,
    request: RunRequest,
    settings: Settings,
    show: Display,
    runner_class: type[Runner] | None,
) -> tuple[dict[str, float], int, int]:
    config, run_dir, say = configured.config, configured.run_dir, show.say
    plan, gpus = configured.subject.plan, configured.subject.gpus
    with _sandbox_service(request, settings, run_dir) as server, watch_memory(gpus) as highest_gib:
        try:
            if server:
                say(f"local sandbox server at {server.url}, isolation: {server.isolation}")
            cpu = config.verl_ext.get("device") == "cpu"
            environment = run_environment(request, settings, run_dir, server, cpu=cpu)
            with ThreadPoolExecutor(1) as beside:
                local_url = server.url if server else None
                proof = beside.submit(prove, settings, config.verl_ext.run_id, local_url=local_url)
                steps = plan.steps if runner_class is None else None
                _train(config, environment, run_dir, server, proof, show, steps, request.cluster, runner_class)
        finally:
            if runner_class is None:
                say(alarms.overview(alarms.read_events(run_dir)))
            if text := compared(highest_gib, plan.memory):
                say(text)
                runs.write_whole(run_dir / runs.GPU_MEMORY, json.dumps({"highest_gib": highest_gib}) + "\n")
            ended = _put_away(settings, server, config.verl_ext.run_id, run_dir, say)
    return ended


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
    proof: Future[None],
    show: Display,
    steps: int | None,
    cluster: Cluster | None,
    runner_class: type[Runner] | None,
) -> None:
    from verl_ext.progress import Follower
    from verl_ext.ray_run import RunnerProcess, cluster_ray, local_ray, open_files_limit, train

    open_files_limit()
    show.begin(steps)
    follower = Follower(run_dir, show.say, steps, show.tell, resumed=(run_dir / runs.ATTEMPTS).is_dir())
    if cluster:
        begun = cluster_ray(config, environment, cluster.address)
    else:
        begun = local_ray(config, environment, run_dir, spare=server.pid if server else 0)
    with begun:
        runs.note_phase(run_dir, "Ray is up")
        _heed(proof)
        try:
            stall_timeout_s = float(config.verl_ext.get("stall_timeout_s", 3600))
            train(config, follower, stall_timeout_s, runner_class or RunnerProcess)
        finally:
            follower.poll()


def _heed(proof: Future[None]) -> None:
    """Go on if a sandbox works. It was tried while Ray started."""
    try:
        proof.result()
    except SandboxError as error:
        raise type(error)(f"no sandbox works, so no trajectory would: {error}") from error


@contextlib.contextmanager
def _sandbox_service(request: RunRequest, settings: Settings, run_dir: Path) -> Iterator[RunningServer | None]:
    if not settings.needs_own_server:
        yield None
        return
    # Any node may ask for a sandbox; whoever reaches this address can give Ray itself code to run.
    host = request.cluster.driver if request.cluster else "127.0.0.1"
    options = ["--host", host, "--port", "0", "--isolation", settings.sandbox_isolation]
    log_path = run_dir / runs.LOGS / "sandbox-server.log"
    with start_server([*options, *request.server_options], log_path=log_path) as server:
        yield server


def main(arguments: Sequence[str]) -> int:
    """Parse, run, and turn every expected failure into a message and an exit status."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.json and options.dry_run:
        parser.error("--json shows steps, and --dry-run makes none: leave one of them away")
    given = {"--sandbox": options.sandbox, "--data-root": options.data_root}
    environment = {FLAGS[flag]: value for flag, value in given.items() if value}
    if options.env_file:
        environment["VERL_EXT_ENV_FILE"] = str(Path(options.env_file).expanduser().absolute())
    stop_on = [f"verl_ext.stop_on={json.dumps(alarms.names_of(options.stop_on))}"] if options.stop_on else []
    request = RunRequest(
        recipe=options.recipe,
        hardware=options.hardware,
        model=options.model,
        train=options.train,
        val=options.val,
        overrides=(*options.overrides, *stop_on),
        run_id=options.run_id,
        environment=environment,
    )
    settings, wrong = Settings.read(options.env_file or None, flags=given)
    if options.dry_run:
        return guarded(lambda: _dry_run(request, settings, wrong, options.resume))

    def train() -> None:
        with display(as_json=options.json) as show:
            placed = _placed(request, options.nodes, options.wait_s, show.say)
            run(placed, settings, show, wrong, options.resume)

    return guarded(train)


def _dry_run(request: RunRequest, settings: Settings, wrong: Sequence[str], go_on_with: str) -> None:
    from verl_ext.dry_run import dry_run

    say = writer(sys.stdout)
    if go_on_with:
        run_dir = resumption.find_run(settings.folder("runs"), go_on_with)
        request = resumption.find(request, run_dir, say).request
    dry_run(request, settings, wrong, say)


def _placed(request: RunRequest, nodes: str, wait_s: float, say: Callable[[str], None]) -> RunRequest:
    """The request on the cluster that RAY_ADDRESS names, if it names one."""
    address = foreign("RAY_ADDRESS")
    if not address:
        return request
    from verl_ext.cluster.nodes import cluster_of

    return replace(request, cluster=cluster_of(address, nodes, wait_s, say))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invoke train", description="Train a model with a code interpreter.", allow_abbrev=False
    )
    recipes, machines = ", ".join(composition.recipe_names()), ", ".join(composition.hardware_names())
    parser.add_argument("--recipe", default="retool", help=f"one of {recipes}")
    parser.add_argument("--hardware", default="", help=f"one of {machines}; by this machine's GPUs if left out")
    parser.add_argument("--model", default="", help="a Hugging Face folder or a hub id; the recipe's if left out")
    parser.add_argument("--train", default="", help="parquet made by prepare-data; the data root's if left out")
    parser.add_argument("--val", default="", help="parquet made by prepare-data; the data root's if left out")
    parser.add_argument("--run-id", default="", help="name of the run; made from recipe and time if left out")
    parser.add_argument("--resume", default="", metavar="RUN", help="go on with a run that died; latest: the last one")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of ./.env")
    parser.add_argument("--sandbox", default="", help="auto, e2b or local, in place of VERL_EXT_SANDBOX_BACKEND")
    parser.add_argument("--stop-on", default="", metavar="NAME,NAME", help="alarms that end the run, with a checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object a step on standard output, nothing else")
    parser.add_argument("--nodes", default="", help="on a cluster: wait for so many nodes, or for these")
    parser.add_argument("--wait-s", type=float, default=600, help="on a cluster: how long nodes are waited for")
    parser.add_argument("--dry-run", action="store_true", help="show the plan and all problems, start nothing")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="verl's own keys, last and strongest")
    return parser


def guarded(action: Callable[[], object]) -> int:
    """Run `action`; its failure becomes a message on standard error and an exit status."""
    try:
        with interruptible():
            action()
    except Interrupted as interrupted:
        sys.stderr.write(f"ended by {signal.Signals(interrupted.signum).name}\n")
        return 128 + interrupted.signum
    except VerlAgsError as error:
        sys.stderr.write(f"{masked(str(error))}\n")
        if isinstance(error, AlarmStopError):
            return EXIT_ALARM
        return EXIT_DIED if isinstance(error, TrainingDiedError | SandboxError) else EXIT_USER
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
