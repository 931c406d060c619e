"""Ray's own Jobs API, for `invoke launch`: a job submitted, followed, asked about, stopped.

Source: ray 2.49.2 dashboard/modules/job: the client retries nothing, a log is sent from its first line on, and a job
that is stopped gets SIGTERM and, after RAY_JOB_STOP_WAIT_TIME_S (3 s if nothing is said), SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobStatus, JobSubmissionClient

from verl_ext.errors import ClusterSilentError, ConfigurationError, TrainingDiedError
from verl_ext.interrupts import until_signal
from verl_ext.settings import exempt_from_proxy

ADDRESS_FIRST = "RAY_API_SERVER_ADDRESS"
RUN, KIND = "verl-ags-run", "verl-ags-kind"
POLL_S = 1.0
# The dashboard's own restart, or a proxy's, is no reason to leave a run of days.
SILENCE_S = 300.0
REQUEST_TIMEOUT_S = 30.0
# A dashboard answers before the agent that starts jobs has told it of itself (ray 2.49.2 job_head.py).
AGENT_WITHIN_S = 90.0
_NO_AGENT = "No available agent to submit job"
# SIGTERM, our own cleaning up, SIGKILL; on a cluster of ours the wait is 60 s (verl_ext.cluster.start).
STOP_TIMEOUT_S = 120.0
EXIT_DIED, EXIT_STOPPED = 70, 143
# Not in .gitignore, which Ray heeds too, or too important to leave to it.
NEVER_SENT = (".env", ".env.*", "*.env", ".git", ".venv", "verl-ags-data", "tests", "**/__pycache__")

_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)


class _Client(JobSubmissionClient):
    """Ray's client, which would wait for ever for an answer that a network swallowed."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        return super()._do_request(method, endpoint, **{"timeout": REQUEST_TIMEOUT_S, **options})


class Jobs:
    """The jobs of one cluster.

    Args:
        address: of the dashboard (http://HOST:8265) or of the cluster (HOST:6379, auto).

    Raises:
        ConfigurationError: nobody answers there.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        # Else Ray's client takes RAY_ADDRESS over what it is told (ray 2.49.2 get_address_for_submission_client).
        os.environ[ADDRESS_FIRST] = address  # noqa: TID251 - of this process alone
        if "://" in address:
            exempt_from_proxy(address)
        try:
            self._client = _Client(address)
        except (ConnectionError, RuntimeError, ValueError, requests.RequestException) as error:
            first = str(error).strip().partition("\n")[0]
            raise ConfigurationError(
                f"no Ray dashboard answers at {address} ({first}): give --address http://HEAD:8265 or set RAY_ADDRESS; "
                "from outside the cluster first `ssh -L 8265:127.0.0.1:8265 HEAD` and then --address "
                "http://127.0.0.1:8265; `invoke cluster-head` starts a cluster"
            ) from error

    def submit(self, job: str, command: str, *, run: str, kind: str, upload: Path | None = None) -> None:
        """Submit a command; it gets its environment from the node that it runs on, and nothing from here.

        Args:
            job: its id.
            command: for a shell.
            run: id of the run that it is for.
            kind: train, look or clean.
            upload: a folder to send along, as the job's working directory on every node.

        Raises:
            ConfigurationError: the cluster refuses it.
        """
        environment: dict[str, Any] = {}
        if upload:
            environment = {"working_dir": str(upload), "excludes": list(NEVER_SENT)}
        until_s = time.monotonic() + AGENT_WITHIN_S
        with self._told("cannot submit"):
            while True:
                try:
                    self._client.submit_job(
                        entrypoint=command, submission_id=job, metadata={RUN: run, KIND: kind}, runtime_env=environment
                    )
                    return
                except RuntimeError as error:
                    if _NO_AGENT not in str(error) or time.monotonic() > until_s:
                        raise
                time.sleep(POLL_S)

    def status(self, job: str) -> JobStatus:
        """Where a job is.

        Raises:
            ConfigurationError: there is none of that id.
        """
        with self._told(f"no job {job} is known"):
            return self._client.get_job_status(job)

    def described(self, job: str) -> dict[str, str]:
        """What is known of a job, for people.

        Raises:
            ConfigurationError: there is none of that id.
        """
        with self._told(f"no job {job} is known"):
            info = self._client.get_job_info(job)
        times = {"started": info.start_time, "ended": info.end_time}
        shown = {
            name: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ms / 1000)) for name, ms in times.items() if ms
        }
        status = info.driver_exit_code
        return {
            "job": job,
            "status": str(info.status.value),
            **shown,
            **({} if status is None else {"exit status": str(status)}),
            "said": (info.message or "").strip(),
            "command": info.entrypoint,
        }

    def run_of(self, job: str) -> str:
        """Id of the run that a job is for, "" if it is none of ours.

        Raises:
            ConfigurationError: there is none of that id.
        """
        with self._told(f"no job {job} is known"):
            return (self._client.get_job_info(job).metadata or {}).get(RUN, "")

    def exit_status(self, job: str) -> int:
        """What a job that has ended comes to: its own exit status, 70 if it has none, 143 if it was stopped."""
        with self._told(f"no job {job} is known"):
            info = self._client.get_job_info(job)
        if info.status == JobStatus.SUCCEEDED:
            return 0
        if info.status == JobStatus.STOPPED:
            return EXIT_STOPPED
        code = info.driver_exit_code
        return EXIT_DIED if not code else code if code > 0 else 128 - code

    def why(self, job: str) -> str:
        """Ray's word on why a job failed."""
        with self._told(f"no job {job} is known"):
            return (self._client.get_job_info(job).message or "").strip()

    def log(self, job: str) -> str:
        """What a job has said so far."""
        with self._told(f"no job {job} is known"):
            return self._client.get_job_logs(job)

    def stop(self, job: str) -> bool:
        """Stop a job and wait until it has ended; whether it was running.

        Raises:
            ConfigurationError: there is none of that id.
            TrainingDiedError: it does not end.
        """
        if self.status(job) in _ENDED:
            return False
        with self._told(f"{job} cannot be stopped"):
            self._client.stop_job(job)
        until_s = time.monotonic() + STOP_TIMEOUT_S
        while self.status(job) not in _ENDED:
            if time.monotonic() > until_s:
                raise TrainingDiedError(
                    f"{job} was asked to stop and has not ended in {STOP_TIMEOUT_S:.0f} s: look at the node of its "
                    "driver in the dashboard"
                )
            time.sleep(POLL_S)
        return True

    def follow(self, job: str, log: Log, tick: Callable[[str], None]) -> None:
        """Hand on a job's log until the job has ended.

        Args:
            job: its id.
            log: says each line; what it said before is not said again.
            tick: called with the job's status once a second.

        Raises:
            ClusterSilentError: nobody has answered for `SILENCE_S`; the job may well go on.
            Interrupted: SIGTERM or Ctrl-C arrived; the job goes on.
        """
        asyncio.run(until_signal(self._follow(job, log, tick)))
        log.end()

    async def _follow(self, job: str, log: Log, tick: Callable[[str], None]) -> None:
        heard_s, ended_s = time.monotonic(), None
        reading = asyncio.create_task(self._read(job, log))
        try:
            while True:
                try:
                    status = await asyncio.to_thread(self.status, job)
                    heard_s = time.monotonic()
                    tick(str(status.value))
                    ended_s = ended_s or (heard_s if status in _ENDED else None)
                except ClusterSilentError as error:
                    if time.monotonic() - heard_s > SILENCE_S:
                        raise ClusterSilentError(
                            f"{error}; nor has it for {SILENCE_S:.0f} s, and the run may go on: `invoke launch --logs "
                            f"{job}` comes back to it"
                        ) from error
                await asyncio.wait([reading], timeout=POLL_S)
                if ended_s and (reading.done() or time.monotonic() - ended_s > REQUEST_TIMEOUT_S):
                    break
                if reading.done():
                    _ = reading.exception()  # whatever broke it off: the log is asked for again
                    reading = asyncio.create_task(self._read(job, log))
        finally:
            reading.cancel()
        # The whole of it once more, of which only what did not arrive is said.
        log.begin()
        log.add(await asyncio.to_thread(self.log, job))

    async def _read(self, job: str, log: Log) -> None:
        log.begin()
        async for text in self._client.tail_job_logs(job):
            log.add(text)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except requests.RequestException as error:
            raise ClusterSilentError(f"the dashboard at {self.address} does not answer: {_last_line(error)}") from error
        except RuntimeError as error:
            raise ConfigurationError(
                f"{what} at {self.address} ({_last_line(error)}): the dashboard's page Jobs lists all that there are"
            ) from error


def _last_line(error: Exception) -> str:
    return ([line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__])[-1]


class Log:
    """A job's log as lines, each said once, though it is sent from its beginning whenever a connection is made.

    Args:
        say: called with each line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seen = self._skip = 0  # characters
        self._line = ""

    def begin(self) -> None:
        """What comes next is the log from its first character."""
        self._skip = self._seen

    def add(self, text: str) -> None:
        """The next piece of it."""
        new = text[self._skip :]
        self._skip -= len(text) - len(new)
        self._seen += len(new)
        *whole, self._line = (self._line + new).split("\n")
        for line in whole:
            self._say(line)

    def end(self) -> None:
        """Nothing more will come."""
        if self._line:
            self._say(self._line)
            self._line = ""


def as_lines(told: Mapping[str, str]) -> list[str]:
    """One line for each thing that is known."""
    width = max(map(len, told))
    return [f"{name:<{width}}  {value}" for name, value in told.items() if value]
