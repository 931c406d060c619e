"""Sandboxes of any service that speaks the E2B protocol: AGS, E2B, or the local server. Imports the SDK, alone.

Every deadline is ours: the SDK's own never reach the server, and e2b 2.50.0 makes one whole-request deadline
of the sum of the read and write time-outs, twice what one asked for (pyqwest.httpx, convert_timeout).

Not covered: files, commands, other languages than Python, pausing. A sandbox may reach the internet where
the service's template lets it.
"""

# ruff: noqa: TID251 - this is the file that the ban on the SDK points to

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextvars import ContextVar
from typing import Any

import e2b
import httpx
from e2b.api.client_async import get_transport
from e2b_code_interpreter import AsyncSandbox, Context

from verl_ext.errors import (
    ConfigurationError,
    SandboxAuthError,
    SandboxDiedError,
    SandboxError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox.bounded import BoundedCalls
from verl_ext.sandbox.e2b_errors import map_error, status_of, was_surely_not_acted_on
from verl_ext.sandbox.events import EventTransport, ExecutionEvents
from verl_ext.sandbox.interface import Execution, OutputLimits, deadline_error
from verl_ext.sandbox.native_threads import wait_before_the_interpreter_ends
from verl_ext.sandbox.output import OutputCollector
from verl_ext.settings import Settings, exempt_from_proxy

logger = logging.getLogger(__name__)
wait_before_the_interpreter_ends()

CREATE_LABEL = "verl-ags-create"
LOCAL_KEY = "local"
_HEALTH_TIMEOUT_S = 5.0
_REAP_AFTER_S = (1.0, 10.0)
_RUN_TRIES = 4
_MAX_PAGES = 200
_OWN_FOLDER = "__import__('os').chdir(__import__('tempfile').mkdtemp(prefix='work-'))"
_REFUSED = (SandboxAuthError, SandboxRequestError, SandboxQuotaError)  # surely no sandbox was made

_events: ContextVar[ExecutionEvents | None] = ContextVar("verl_ags_events", default=None)


class _SdkSandbox(AsyncSandbox):
    """The SDK's sandbox, with our reader below `run_code` where one is set."""

    @property
    def _client(self) -> httpx.AsyncClient:
        events = _events.get()
        transport = get_transport(self.connection_config, http2=False)
        return httpx.AsyncClient(transport=EventTransport(transport, events) if events else transport)


class E2BBackend:
    """A `SandboxBackend` over the E2B SDK. Cheap to build; calls may come from any event loop.

    Args:
        api_key: key of the service; its form is the service's business (`e2b_...`, `ark_...`).
        domain: the service, for example ap-shanghai.tencentags.com; ignored where both URLs are given.
        api_url: control plane, in place of https://api.<domain>.
        sandbox_url: sandboxes, in place of one host name for each; `api_url` for the local server.
        template: what sandboxes are made from.
        limits: cap on the output of one run.
        create_timeout_s: seconds for one create.
        control_timeout_s: seconds for one list or kill.
    """

    def __init__(
        self,
        *,
        api_key: str,
        domain: str | None = None,
        api_url: str | None = None,
        sandbox_url: str | None = None,
        template: str = "code-interpreter-v1",
        limits: OutputLimits | None = None,
        create_timeout_s: float = 60.0,
        control_timeout_s: float = 20.0,
    ) -> None:
        self._key = api_key
        self._options: dict[str, Any] = {
            "api_key": api_key,
            "domain": domain,
            "api_url": api_url,
            "sandbox_url": sandbox_url,
            "validate_api_key": False,  # AGS keys have another form
            "debug": False,  # E2B_DEBUG in the environment would make kill do nothing
            "retries": 0,  # the pool retries, knowing the limits
        }
        self.template = template
        self.limits = limits or OutputLimits()
        self._create_timeout_s = create_timeout_s
        self.control_timeout_s = control_timeout_s
        self.calls = BoundedCalls()
        self._closing = asyncio.Event()
        # Learned from the first execution: whether this service says when an execution is over.
        self.says_end = False

    @classmethod
    def from_settings(cls, settings: Settings, *, local_url: str | None = None) -> E2BBackend:
        """The backend that the settings ask for. A local server is exempted from the proxy, if one is set.

        Args:
            settings: as loaded.
            local_url: address of a local server that the caller started; else `E2B_API_URL` must name one when
                the backend is `local`.

        Raises:
            ConfigurationError: the backend is `local` and no address is known.
        """
        if settings.backend == "e2b":
            if settings.e2b_api_key is None:
                raise ConfigurationError("VERL_EXT_SANDBOX_BACKEND is e2b but E2B_API_KEY is not set: set it")
            return cls(
                api_key=settings.e2b_api_key.reveal(),
                domain=settings.e2b_domain,
                api_url=settings.e2b_api_url,
                sandbox_url=settings.e2b_sandbox_url,
                template=settings.sandbox_template,
            )
        url = local_url or settings.e2b_api_url
        if url is None:
            raise ConfigurationError("no local sandbox server: run `invoke serve-sandbox` and set E2B_API_URL to it")
        exempt_from_proxy(url)
        sandbox_url = url if local_url else settings.e2b_sandbox_url or url
        return cls(api_key=LOCAL_KEY, api_url=url, sandbox_url=sandbox_url, template=settings.sandbox_template)

    async def create(self, *, labels: Mapping[str, str], ttl_s: int) -> E2BSandbox:
        """Start a sandbox; see `SandboxBackend.create`.

        When it fails or is cancelled and the service may have made a sandbox all the same, one that turns up
        is ended in the background: by the late answer, and by a label of its own.
        """
        marker = uuid.uuid4().hex
        call = _SdkSandbox.create(
            template=self.template,
            timeout=ttl_s,
            metadata={**labels, CREATE_LABEL: marker},
            request_timeout=self._create_timeout_s,
            **self._options,
        )
        task = self.calls.start(call)
        try:
            await asyncio.wait({task}, timeout=self._create_timeout_s)
        except asyncio.CancelledError:
            self.calls.start(self._reap(marker, task))
            raise
        if not task.done():
            self.calls.start(self._reap(marker, task))
            raise SandboxTimeoutError(
                f"no answer to create within {self._create_timeout_s:g} s (template {self.template}): "
                "the service is slow or unreachable; a sandbox that comes late is ended"
            )
        try:
            return E2BSandbox(self, task.result())
        except Exception as error:  # the SDK's boundary: whatever it raises becomes one of ours
            ours = self._mapped(error, f"create a sandbox from template {self.template}")
            if not isinstance(ours, _REFUSED) and not isinstance(error, httpx.ConnectError):
                self.calls.start(self._reap(marker, None))
            raise ours from error

    async def list_ids(self, *, labels: Mapping[str, str]) -> list[str]:
        """Ids of the live sandboxes that carry all of `labels`.

        The labels are compared here too: a service that ignores the filter lists the whole account.
        """
        return list(await self.list_labels(labels=labels))

    async def list_labels(self, *, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """All labels of the live sandboxes that carry all of `labels`, by id; with {} of the whole account."""
        query = e2b.SandboxQuery(metadata=dict(labels)) if labels else None
        paginator = AsyncSandbox.list(query=query, **self._options)
        found: dict[str, dict[str, str]] = {}
        for _ in range(_MAX_PAGES):
            for info in await self.control(paginator.next_items(), "list sandboxes"):
                theirs = dict(info.metadata or {})
                if labels.items() <= theirs.items():
                    found[info.sandbox_id] = theirs
            if not paginator.has_next:
                break
        return found

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox by id; False if it was gone already."""
        options = {**self._options, "request_timeout": self.control_timeout_s}
        return await self.control(AsyncSandbox.kill(sandbox_id, **options), f"end sandbox {sandbox_id}")

    async def aclose(self) -> None:
        """Wait for the sandboxes that failed creates may have left, and for calls given up."""
        self._closing.set()
        await self.calls.settle(self.control_timeout_s)

    async def control(self, call: Coroutine[Any, Any, Any], doing: str) -> Any:
        """Result of a call of the control plane, within its deadline, with its errors as ours."""
        try:
            return await self.calls.within(call, self.control_timeout_s)
        except TimeoutError:
            raise SandboxTimeoutError(
                f"could not {doing} within {self.control_timeout_s:g} s: the service is slow or unreachable"
            ) from None
        except Exception as error:  # the SDK's boundary: whatever it raises becomes one of ours
            raise self._mapped(error, doing) from error

    def _mapped(self, error: Exception, doing: str) -> SandboxError:
        key = self._key if self._key != LOCAL_KEY else None
        if key and key in str(error):  # it will be the cause of ours, and a traceback prints causes
            error.args = (str(error).replace(key, "***"),)
        return map_error(error, doing=doing, hide=key)

    async def _reap(self, marker: str, create: asyncio.Task[AsyncSandbox] | None) -> None:
        """End what a failed create may have left; faults are logged, the time to live is the last resort."""
        if create is not None:
            await asyncio.wait({create}, timeout=self._create_timeout_s)
            if create.done() and not create.cancelled() and create.exception() is None:
                await self._end_late(create.result().sandbox_id)
                return
            create.cancel()
        for delay_s in _REAP_AFTER_S:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), delay_s)
            try:
                late = await self.list_ids(labels={CREATE_LABEL: marker})
            except SandboxError as error:
                logger.warning("cannot see whether a failed create left a sandbox: %s", error)
                continue
            for sandbox_id in late:
                await self._end_late(sandbox_id)
            if self._closing.is_set():
                return

    async def _end_late(self, sandbox_id: str) -> None:
        try:
            await self.kill(sandbox_id)
            logger.info("ended sandbox %s, which a create given up had left", sandbox_id)
        except SandboxError as error:
            logger.warning("sandbox %s of a create given up is left to its time to live: %s", sandbox_id, error)


class E2BSandbox:
    """A live sandbox of `E2BBackend`."""

    def __init__(self, backend: E2BBackend, sdk_sandbox: AsyncSandbox) -> None:
        self._backend = backend
        self._sdk = sdk_sandbox

    @property
    def sandbox_id(self) -> str:
        """The service's name for it."""
        return self._sdk.sandbox_id

    async def run_code(self, code: str, *, timeout_s: float, context_id: str | None = None) -> Execution:
        """Run code and wait for its end; see `Sandbox.run_code`.

        A request that the service surely did not act on (no connection, port not open yet, 429, 503) is
        repeated within the deadline; no other.
        """
        began_s = time.monotonic()
        events = ExecutionEvents(OutputCollector(self._backend.limits))
        try:
            await self._backend.calls.within(self._execute(code, context_id, events), timeout_s)
        except TimeoutError:
            if events.began:
                return self._execution(events, began_s, timeout_s)
            raise SandboxTimeoutError(
                f"sandbox {self.sandbox_id} did not begin the code within {timeout_s:g} s: the service hangs"
            ) from None
        if events.fault:
            raise await self._fault(f"lost the execution ({events.fault})")
        self._backend.says_end |= events.ended
        error = events.output.error
        if (not events.began and error is None) or (self._backend.says_end and not events.ended and error is None):
            raise await self._fault("ended the stream before the execution was over")
        logger.debug("sandbox %s ran %d characters of code: error %s", self.sandbox_id, len(code), error and error.name)
        return self._execution(events, began_s)

    def _execution(self, events: ExecutionEvents, began_s: float, timed_out_s: float | None = None) -> Execution:
        output = events.output
        return Execution(
            stdout=output.stdout.text(),
            stderr=output.stderr.text(),
            results=output.results,
            png_count=output.png_count,
            error=output.error if timed_out_s is None else deadline_error(timed_out_s),
            dropped_bytes=output.dropped_bytes,
            elapsed_s=time.monotonic() - began_s,
            timed_out=timed_out_s is not None,
        )

    async def open_context(self) -> str:
        """One more interpreter, in a new folder below the temporary one; see `Sandbox.open_context`."""
        doing = f"open a context in sandbox {self.sandbox_id}"
        context = await self._backend.control(self._sdk.create_code_context(), doing)
        # The services start every context in one and the same folder, and refuse one that is not there.
        moved = await self.run_code(_OWN_FOLDER, timeout_s=self._backend.control_timeout_s, context_id=context.id)
        if moved.error is not None:
            raise SandboxUnavailableError(f"could not {doing}: no folder for it: {moved.error.value}")
        return context.id

    async def close_context(self, context_id: str) -> None:
        """End an interpreter; see `Sandbox.close_context`."""
        try:
            call = self._sdk.remove_code_context(context_id)
            await self._backend.control(call, f"end a context of sandbox {self.sandbox_id}")
        except SandboxRequestError as error:
            logger.debug("context %s was gone: %s", context_id, error)  # 404: what was asked for is so

    async def extend(self, *, ttl_s: int) -> None:
        """Put off the sandbox's own end; see `Sandbox.extend`."""
        await self._backend.control(self._sdk.set_timeout(ttl_s), f"extend sandbox {self.sandbox_id}")

    async def close(self) -> None:
        """End the sandbox; harmless when it is gone."""
        await self._backend.kill(self.sandbox_id)

    async def _execute(self, code: str, context_id: str | None, events: ExecutionEvents) -> None:
        _events.set(events)  # this runs in a task of its own, so the value is this execution's alone
        context = None if context_id is None else Context(context_id, "python", "")
        for left in reversed(range(_RUN_TRIES)):
            try:
                # timeout=0 switches the SDK's deadline off.
                await self._sdk.run_code(_sendable(code), context=context, timeout=0)
            except Exception as error:  # the SDK's boundary: whatever it raises becomes one of ours
                if left and not events.began and was_surely_not_acted_on(error):
                    logger.info(
                        "sandbox %s did not take the code, trying again: %s", self.sandbox_id, type(error).__name__
                    )
                    await asyncio.sleep(random.uniform(0.05, 0.5))
                    continue
                raise await self._run_error(error, context_id) from error
            return

    async def _run_error(self, error: Exception, context_id: str | None) -> SandboxError:
        ours = self._backend._mapped(error, f"run code in sandbox {self.sandbox_id}")
        if isinstance(error, e2b.NotFoundException):
            if context_id is not None:
                return await self._fault(f"has no context {context_id} any more")
            return SandboxDiedError(f"sandbox {self.sandbox_id} is gone and its state with it: {ours}")
        # A 502 reads as TimeoutException; a connection cut short as a transport error.
        if isinstance(error, e2b.TimeoutException | httpx.TransportError) or (status_of(error) or 0) >= 500:
            return await self._fault(f"failed during a run ({type(error).__name__}: {str(ours)[:300]})")
        return ours

    async def _fault(self, what: str) -> SandboxError:
        """SandboxDiedError if the sandbox is surely gone, else SandboxUnavailableError."""
        try:
            running = await self._backend.calls.within(self._sdk.is_running(), _HEALTH_TIMEOUT_S)
        except Exception:  # noqa: BLE001 - the SDK's boundary: any failure means that the state is unknown
            running = None
        if running is False:
            return SandboxDiedError(f"sandbox {self.sandbox_id} is gone; it {what}: its state is lost")
        return SandboxUnavailableError(f"sandbox {self.sandbox_id} {what}: the service is at fault, not the code")


def _sendable(code: str) -> str:
    # A lone surrogate cannot be sent as UTF-8; the model cannot have meant anything by it.
    return code.encode("utf-8", errors="replace").decode("utf-8")
