"""What the rest of the project knows of a sandbox: two protocols and two values.

A backend makes sandboxes; a sandbox runs code and keeps its state between calls. Errors of the *model's*
code are data (`Execution.error`); failures of the service are exceptions (`verl_ext.errors.SandboxError`).
Every backend passes the same suite, tests/contract/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ExecutionError:
    """The exception that the model's code ended with, as the interpreter showed it."""

    name: str
    value: str
    traceback: str


@dataclass(frozen=True)
class Execution:
    """What one call of `run_code` gave.

    Attributes:
        stdout: text written to standard output, capped (see `OutputLimits`).
        stderr: text written to standard error, capped likewise.
        results: text of each displayed value, the last expression's value last.
        png_count: pictures shown; their bytes are dropped.
        error: the exception that ended the code, or None.
        dropped_bytes: bytes of output beyond the cap, not kept.
        elapsed_s: seconds from our side, from sending the code to the last event.
        timed_out: the code was seen running and had not ended at the deadline. `error` says so too, the
            output is what came until then, and the interpreter must not be used again.
    """

    stdout: str = ""
    stderr: str = ""
    results: tuple[str, ...] = ()
    png_count: int = 0
    error: ExecutionError | None = None
    dropped_bytes: int = 0
    elapsed_s: float = 0.0
    timed_out: bool = False


@dataclass(frozen=True)
class OutputLimits:
    """How much output of one call is kept: the first half of the budget and the last half of it."""

    max_bytes: int = 65_536


class Sandbox(Protocol):
    """One live sandbox. State (variables, files) is kept between calls of `run_code`."""

    @property
    def sandbox_id(self) -> str:
        """The service's name for it; what `SandboxBackend.kill` takes."""
        ...

    async def run_code(self, code: str, *, timeout_s: float, context_id: str | None = None) -> Execution:
        """Run `code` in an interpreter of the sandbox and wait for its end.

        Args:
            code: Python source; the value of a last expression is a result, as in a notebook.
            timeout_s: our deadline in seconds, enforced on our side whatever the server does.
            context_id: from `open_context`; None for the sandbox's first interpreter.

        Returns:
            The execution. Code that runs past the deadline is data as well: see `Execution.timed_out`.

        Raises:
            SandboxTimeoutError: the deadline passed and nothing said that the code had begun: the service is
                at fault, not the code. Kill the sandbox; never use it again.
            SandboxDiedError: the sandbox is gone.
            SandboxError: any other fault of the service.
        """
        ...

    async def open_context(self) -> str:
        """Start one more interpreter, with variables and a working directory of its own, and give its id.

        Files, processes, CPU and memory are the sandbox's and shared by all its contexts.

        Raises:
            SandboxDiedError: the sandbox is gone.
            SandboxError: any other fault of the service; a context may have been made all the same.
        """
        ...

    async def close_context(self, context_id: str) -> None:
        """End an interpreter and what runs in it. Harmless when it is gone already.

        Raises:
            SandboxError: it may go on; the sandbox should take no new contexts.
        """
        ...

    async def extend(self, *, ttl_s: int) -> None:
        """Let the sandbox end by itself `ttl_s` seconds from now, not earlier.

        Raises:
            SandboxDiedError: the sandbox is gone.
            SandboxError: any other fault of the service.
        """
        ...

    async def close(self) -> None:
        """End the sandbox. Harmless when it is gone already or closed twice."""
        ...


class SandboxBackend(Protocol):
    """A service that makes sandboxes."""

    async def create(self, *, labels: Mapping[str, str], ttl_s: int) -> Sandbox:
        """Start a sandbox that carries `labels` and ends by itself after `ttl_s` seconds.

        Raises:
            SandboxAuthError, SandboxRequestError: retrying cannot help.
            SandboxQuotaError, SandboxUnavailableError, SandboxTimeoutError: it may work later. After the
                last two, and after a cancellation, the backend ends what the service may have made.
        """
        ...

    async def list_ids(self, *, labels: Mapping[str, str]) -> list[str]:
        """Ids of the live sandboxes that carry all of `labels`."""
        ...

    async def list_labels(self, *, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """All labels of the live sandboxes that carry all of `labels`, by id; with {} of the whole account."""
        ...

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox by id; True if it was alive, False if it was gone already."""
        ...

    async def aclose(self) -> None:
        """Close connections that the backend holds. Live sandboxes are not ended."""
        ...


def deadline_error(timeout_s: float) -> ExecutionError:
    """The error of an execution that `timed_out`."""
    value = f"the code ran longer than {timeout_s:g} s and was stopped"
    return ExecutionError(name="TimeoutError", value=value, traceback=f"TimeoutError: {value}")
