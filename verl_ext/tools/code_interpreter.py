"""The code interpreter as verl sees it: create, execute, release, over one sandbox session.

Used as verl means it, once per trajectory: `create` opens a session, every `execute` of that instance runs in
it with its state kept, `release` ends it. verl 0.6.1's own loop makes an instance per call instead; the tool
then still works, without state between calls.

Model code failing is data: its traceback is the response. Our sandboxes failing is not: the third value of
`execute` says `infra_failed`, and the agent loop masks the trajectory. Nothing here raises, and no response
is None, because verl 0.6.1 lets either end the whole batch (`ToolAgentLoop._call_tool`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_ext.errors import ConfigurationError, SandboxError
from verl_ext.sandbox.interface import Execution
from verl_ext.tools.observation import observation_text

logger = logging.getLogger("verl_ext.sandbox.executions")

INFRA_FAILED_TEXT = "The code interpreter is not available. This is not an error of your code."


class Session(Protocol):
    """What the tool needs of a sandbox session; `verl_ext.sandbox.pool` has the real one."""

    @property
    def waited_s(self) -> float:
        """Seconds that went into getting a sandbox so far."""
        ...

    async def run(self, code: str, *, timeout_s: float | None = None) -> Execution:
        """Run code with the state of earlier calls."""
        ...


SessionOpener = Callable[[str], contextlib.AbstractAsyncContextManager[Session]]

_open_session: SessionOpener | None = None


def use_sessions(opener: SessionOpener | None) -> None:
    """Name where sessions come from in this process, normally `SessionPool.session`.

    The agent loop worker calls it once. It is not a constructor argument because verl builds tools in
    processes that never run code (each dataset does, on the driver).
    """
    global _open_session
    _open_session = opener


@dataclass(frozen=True)
class CodeInterpreterConfig:
    """The tool's `config:` block; unknown keys are refused.

    Attributes:
        call_timeout_s: seconds that one call may run.
        acquire_timeout_s: seconds to get a sandbox once it is its turn: creating, being refused, trying again.
        sandbox_ttl_s: seconds that one sandbox may live.
        max_output_chars: characters of output that the model sees of one call.
        type: verl's own key; always "native".
    """

    call_timeout_s: float = 30.0
    acquire_timeout_s: float = 600.0
    sandbox_ttl_s: int = 300
    max_output_chars: int = 4096
    type: str = "native"

    @classmethod
    def of(cls, block: dict[str, Any]) -> CodeInterpreterConfig:
        """The block as values.

        Raises:
            ConfigurationError: a key is unknown, or a value is no positive number.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(block) - known):
            names = ", ".join(sorted(known))
            raise ConfigurationError(f"tool config: unknown keys {', '.join(unknown)}; known: {names}")
        config = cls(**block)
        for name in ("call_timeout_s", "acquire_timeout_s", "sandbox_ttl_s", "max_output_chars"):
            value = getattr(config, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
                raise ConfigurationError(f"tool config: {name} is {value!r}; it must be a number above 0")
        return config


class CodeInterpreterTool(BaseTool):
    """Runs the model's Python in a sandbox session. Cheap to build; opens nothing before `create`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        # Not super().__init__: it prints the whole schema in every process that builds the tool.
        self.config = config
        self.settings = CodeInterpreterConfig.of(config)
        self.tool_schema = tool_schema
        self.name = tool_schema.function.name
        self._sessions: dict[str, tuple[Session, contextlib.AsyncExitStack]] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Open a session under `instance_id` (the trajectory's); its sandbox starts at the first call."""
        name = instance_id or uuid4().hex
        if _open_session is not None:
            stack = contextlib.AsyncExitStack()
            session = await stack.enter_async_context(_open_session(name))
            self._sessions[name] = (session, stack)
        return name, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run `parameters["code"]` in the session.

        Returns:
            The response, reward 0.0, and facts: `status` is one of ok, error, timeout, bad_arguments,
            infra_failed; `elapsed_s` seconds, `waited_s` of them for a sandbox; `png_count`; with infra_failed
            also `cause`, which is for the log and not for the model.
        """
        code = parameters.get("code") if isinstance(parameters, dict) else None
        if not isinstance(code, str) or not code.strip():
            text = f'{self.name} needs the argument "code": a string with Python source.'
            return ToolResponse(text=text), 0.0, _facts("bad_arguments")
        entry = self._sessions.get(instance_id)
        if entry is None:
            logger.error("%s: no session; call use_sessions() in this process and create() first", instance_id)
            return self._infra_failed("the tool has no session")
        session = entry[0]
        started_s, waited_s = time.monotonic(), session.waited_s
        try:
            execution = await session.run(code, timeout_s=self.settings.call_timeout_s)
        except SandboxError as error:
            logger.warning("%s: %s: %s", instance_id, type(error).__name__, error)
            cause = f"{type(error).__name__}: {error}"
            return self._infra_failed(cause, time.monotonic() - started_s, session.waited_s - waited_s)
        text = observation_text(execution, self.settings.max_output_chars)
        logger.debug("%s ran:\n%s\n--- gave:\n%s", instance_id, code, text)
        status = "ok"
        if execution.error is not None:
            status = "timeout" if execution.timed_out else "error"
        facts = _facts(status, time.monotonic() - started_s, session.waited_s - waited_s, execution.png_count)
        return ToolResponse(text=text), 0.0, facts

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End the session and its sandbox; harmless when there is none."""
        entry = self._sessions.pop(instance_id, None)
        if entry is None:
            return
        try:
            await entry[1].aclose()
        except SandboxError as error:
            # The pool's ledger and the sweep at the end find what is left.
            logger.warning("%s: closing failed: %s", instance_id, error)

    @staticmethod
    def _infra_failed(
        cause: str, elapsed_s: float = 0.0, waited_s: float = 0.0
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        facts = _facts("infra_failed", elapsed_s, waited_s) | {"cause": cause}
        return ToolResponse(text=INFRA_FAILED_TEXT), 0.0, facts


def _facts(status: str, elapsed_s: float = 0.0, waited_s: float = 0.0, png_count: int = 0) -> dict[str, Any]:
    return {"status": status, "elapsed_s": elapsed_s, "waited_s": waited_s, "png_count": png_count}
