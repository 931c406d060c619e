"""`python -m verl_ext.cluster.launch`, called by `invoke launch`: a run as a job of a Ray cluster that is there.

    look at every node (a job) -> submit the run (a job: `verl_ext.launch` there) -> its log -> its exit status

Nothing of this machine goes along but the command: the run's settings and secrets are those of the nodes.

Exit status: that of the run; 2 something is wrong with the cluster or the request, and nothing was submitted; 70 the
run died without one, or the cluster answers no more; 130 left to itself by Ctrl-C; 143 stopped, or left by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from verl_ext import compose, runs
from verl_ext.cluster.look import RESULT
from verl_ext.errors import ClusterSilentError, ConfigurationError, TrainingDiedError, VerlAgsError
from verl_ext.gpus import Gpu
from verl_ext.interrupts import Interrupted, interruptible
from verl_ext.request import fitting_hardware
from verl_ext.settings import Settings, foreign, variable_named

if TYPE_CHECKING:
    from verl_ext.cluster.jobs import Jobs

ROOT = Path(__file__).resolve().parents[2]
EXIT_USER, EXIT_DIED = 2, 70
DASHBOARD = "http://127.0.0.1:8265"
# Statuses of a run that has said itself what became of its sandboxes (verl_ext.launch).
_CLEANED_UP = (0, EXIT_USER, EXIT_DIED)


class Launcher:
    """One launch: what is submitted where, and what a person sees of it.

    Args:
        jobs: of the cluster.
        project: where the project lies on the nodes, "" if it is sent along.
        console: standard output, with one line of progress below it if a person looks at it.
    """

    def __init__(self, jobs: Jobs, project: str, console: Console) -> None:
        self.jobs = jobs
        self.project = project
        self._console = console

    def command(self, module: str, *words: str) -> str:
        """The shell command that runs a module of the project on a node."""
        path = f'env PYTHONPATH={shlex.quote(self.project)}"${{PYTHONPATH:+:$PYTHONPATH}}" ' if self.project else ""
        return f"exec {path}python -m {module} {shlex.join(words)}".strip()

    def submit(self, job: str, run: str, kind: str, module: str, *words: str) -> None:
        """Submit a module of the project as a job.

        Raises:
            ConfigurationError: the cluster refuses it, or the command would show a secret.
        """
        command = self.command(module, *words)
        settings, _ = Settings.read()
        if name := settings.reveals(command):
            raise ConfigurationError(
                f"the value of {name} is in the command, which the cluster shows to all: put it into the nodes' "
                "environment or env file instead"
            )
        upload = None if self.project else ROOT
        self.jobs.submit(job, command, run=run, kind=kind, upload=upload)

    def say(self, line: str) -> None:
        """One line, above the progress."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def to_the_end(self, job: str, *, ask: bool) -> int:
        """Follow a job until it ends; its exit status.

        Args:
            job: its id.
            ask: whether Ctrl-C asks what is to be done, which it does where somebody can answer. Without, and at
                SIGTERM, the job is left to itself.

        Raises:
            Interrupted: the job is left to itself.
        """
        from verl_ext.cluster.jobs import Log

        began_s, last_step = time.monotonic(), ""

        def line(text: str) -> None:
            nonlocal last_step
            if not text.startswith(RESULT):
                self.say(text)
            last_step = text if text.startswith("step ") else last_step

        log = Log(line)
        while True:
            try:
                with self._console.status(job) as shown:

                    def tick(status: str, shown: Status = shown) -> None:
                        minutes, seconds = divmod(int(time.monotonic() - began_s), 60)
                        progress = f"{job}  {status.lower()}  {minutes}:{seconds:02d}  {last_step}".rstrip()
                        shown.update(escape(progress))

                    self.jobs.follow(job, log, tick)
                return self.jobs.exit_status(job)
            except Interrupted as interrupted:
                wish = self._asked(job) if ask and interrupted.signum == signal.SIGINT else "detach"
                if wish == "stop":
                    self.say(f"stopping {job}")
                    self.jobs.stop(job)
                    return self.jobs.exit_status(job)
                if wish == "detach":
                    self.say(f"{job} goes on by itself; {_later(job)}")
                    raise

    def _asked(self, job: str) -> str:
        """What is to become of the job: stop, detach or go on."""
        if not (sys.stdin.isatty() and self._console.is_terminal):
            return "detach"
        try:
            answer = input(f"\n{job}: [s]top it, [d]etach and let it run, or go on following [enter]? ").strip().lower()
        except (EOFError, Interrupted):
            return "detach"
        return {"s": "stop", "d": "detach"}.get(answer[:1], "go on")

    def sweep(self, run: str, flags: Sequence[str] = ()) -> None:
        """End what is left of a run's sandboxes, on the cluster, whose nodes have the key.

        A job that is stopped is killed after seconds, so it is done from outside and afterwards.
        """
        job = _numbered(f"{run}-clean")
        self.submit(job, run, "clean", "verl_ext.clean", "--run", run, *flags)
        if self.to_the_end(job, ask=False) == 1:
            self.say(f"sandboxes of {run} may be left: `invoke clean-sandboxes --run {run}` with the account's key")


def launch(options: argparse.Namespace, launcher: Launcher) -> int:
    """Look at the nodes, submit the run, follow it; the exit status.

    Raises:
        ConfigurationError: the cluster or the request is wrong.
        Interrupted: the run is left to itself.
    """
    _refuse_settings(options.overrides)
    run = runs.check_run_id(options.run_id or _resumed(options.resume) or runs.new_run_id(options.recipe))
    found = _look(options, launcher, run)
    hardware = options.hardware or _hardware(found)
    flags = {
        "--recipe": options.recipe, "--hardware": hardware, "--model": options.model, "--train": options.train,
        "--val": options.val, "--data-root": options.data_root, "--env-file": options.env_file,
        "--sandbox": options.sandbox, "--nodes": options.nodes or str(found["nodes"]),
        "--run-id": "" if options.resume else run, "--resume": options.resume,
    }  # fmt: skip
    words = [f"{flag}={value}" for flag, value in flags.items() if value]
    job = _numbered(f"{run}-resumed") if options.resume else run
    launcher.submit(job, run, "train", "verl_ext.launch", *words, *options.overrides)
    size = f"{found['nodes']} node(s), {found['gpus_per_node']} GPU(s) each"
    launcher.say(f"submitted {job}: {size}, hardware {hardware}")
    launcher.say(_later(job))
    if options.no_wait:
        return 0
    status = launcher.to_the_end(job, ask=True)
    if status not in _CLEANED_UP:
        launcher.sweep(run, _clean_flags(options))
    return status


def _refuse_settings(overrides: Sequence[str]) -> None:
    """A setting among verl's keys, which may be a secret, would be on the cluster before the run refused it."""
    for key in (override.partition("=")[0].strip().lstrip("+") for override in overrides):
        if variable_named(key):
            raise ConfigurationError(f"{key} is a setting and no key of verl's: put it into the nodes' env file")


def _look(options: argparse.Namespace, launcher: Launcher, run: str) -> dict[str, Any]:
    """Have every node examined; what the run needs to know of them.

    Raises:
        ConfigurationError: something is wrong with a node; what, was said.
    """
    job = _numbered(f"{run}-look")
    flags = {"--nodes": options.nodes, "--wait-s": options.wait_s, "--data-root": options.data_root,
             "--env-file": options.env_file}  # fmt: skip
    words = [f"{flag}={value}" for flag, value in flags.items() if value]
    launcher.submit(job, run, "look", "verl_ext.cluster.look", *words)
    try:
        status = launcher.to_the_end(job, ask=False)
    except Interrupted:
        launcher.jobs.stop(job)  # it may be waiting for nodes, and nobody else wants to know
        raise
    log = launcher.jobs.log(job)
    results = [line.removeprefix(RESULT) for line in log.splitlines() if line.startswith(RESULT)]
    if status == 0 and results:
        return json.loads(results[-1])
    if "No module named" in log:
        raise ConfigurationError(
            f"the head has no project in {launcher.project or 'what was sent along'}: start the nodes from the image "
            "or a checkout and say where with --project, or send this one along with --upload"
        )
    why = "what is wrong was said above" if status == EXIT_USER else launcher.jobs.why(job)
    raise ConfigurationError(f"nothing was started, since the nodes did not pass ({why})")


def _hardware(found: dict[str, Any]) -> str:
    """The hardware file for the GPUs that were found."""
    gpus = [
        Gpu(index, found["gpu_name"], found["gpu_gib"], 0.0)
        for index in range(found["gpus_per_node"] if found["gpu_name"] else 0)
    ]
    return fitting_hardware(gpus)


def _clean_flags(options: argparse.Namespace) -> list[str]:
    return [f"{flag}={value}" for flag, value in (("--data-root", options.data_root), ("--env-file", options.env_file))
            if value]  # fmt: skip


def _resumed(run: str) -> str:
    """Id of a run that is named by its id or its folder."""
    if run == "latest":
        raise ConfigurationError("--resume takes a run's name here: its folder's below runs/ in the nodes' data root")
    return Path(run).name


def _numbered(name: str) -> str:
    """A job's id that was not there before: Ray keeps those of jobs that ended."""
    return f"{name}-{time.strftime('%H%M%S')}"


def _later(job: str) -> str:
    return f"later: invoke launch --status {job}, --logs {job}, --stop {job}"


def main(arguments: Sequence[str]) -> int:
    """Launch, or look after what was launched."""
    options = _parser().parse_intermixed_args(arguments)
    console = Console()
    try:
        with interruptible():
            return _main(options, console)
    except Interrupted as interrupted:
        return 128 + interrupted.signum
    except (TrainingDiedError, ClusterSilentError) as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_DIED
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER


def _main(options: argparse.Namespace, console: Console) -> int:
    if not (options.status or options.logs or options.stop) and options.hardware:
        compose.check_names(options.recipe, options.hardware)
    from verl_ext.cluster.jobs import Jobs, as_lines

    jobs = Jobs(options.address or foreign("RAY_API_SERVER_ADDRESS") or foreign("RAY_ADDRESS") or DASHBOARD)
    launcher = Launcher(jobs, "" if options.upload else options.project or str(ROOT), console)
    if options.status:
        for line in as_lines(jobs.described(options.status)):
            launcher.say(line)
        return 0
    if options.logs:
        jobs.status(options.logs)
        return launcher.to_the_end(options.logs, ask=True)
    if options.stop:
        was_running = jobs.stop(options.stop)
        launcher.say(f"{options.stop} {'is stopped' if was_running else 'had ended before'}")
        if run := jobs.run_of(options.stop):
            launcher.sweep(run, _clean_flags(options))
        return 0
    return launch(options, launcher)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="invoke launch", description="Train on a Ray cluster that is there.", allow_abbrev=False
    )
    add: Callable[..., Any] = parser.add_argument
    add("--address", default="", help=f"http://HEAD:8265 or HEAD:6379; default: RAY_ADDRESS, else {DASHBOARD}")
    add("--nodes", default="", help="wait for so many nodes with GPUs, or for these (a,b,c); all there are taken")
    add("--wait-s", default="600", help="how long nodes are waited for")
    add("--project", default="", help="where the project is on the nodes; default: where it is here")
    add("--upload", action="store_true", help="send the project along, to nodes that have only the packages")
    add("--no-wait", action="store_true", help="return when the job is submitted")
    add("--status", default="", metavar="ID", help="say where a job is")
    add("--logs", default="", metavar="ID", help="follow a job; its exit status")
    add("--stop", default="", metavar="ID", help="stop a job and end what is left of its sandboxes")
    add("--resume", default="", metavar="RUN", help="go on with a run that died: its name")
    add("--recipe", default="retool", help="as for train")
    for name in ("hardware", "model", "train", "val", "run-id", "data-root", "env-file", "sandbox"):
        add(f"--{name}", default="", help="as for train; folders and files are those of the nodes")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="verl's own keys, last and strongest")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
