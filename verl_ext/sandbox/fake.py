"""An in-process double of a sandbox service, for unit tests of everything above the backend.

Covered: passes tests/contract/ (state per sandbox, value of a last expression, tracebacks, standard output
and error apart, deadlines, death, labels), and breaks on command (`FaultScript`).
Not covered: isolation of any kind. Code runs in a thread of the calling process, so `os._exit` ends the
tests; output of child processes and of modules that keep their own `sys.stdout` is not captured; a deadline
stops Python code at once but a blocking C call only when it returns (its thread is left behind).
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import ctypes
import itertools
import linecache
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_ext.errors import SandboxDiedError, SandboxQuotaError, SandboxTimeoutError, SandboxUnavailableError
from verl_ext.sandbox.interface import Execution, OutputLimits, deadline_error
from verl_ext.sandbox.output import CappedText, OutputCollector


@dataclass
class FaultScript:
    """What goes wrong, and when. Counts start at 1 and run over the whole backend.

    Attributes:
        create_errors: n-th create raises this.
        create_hangs: numbers of the creates that never answer.
        create_delay_s: seconds that every create takes.
        run_errors: n-th run raises this; the code is not run.
        run_hangs: numbers of the runs during which the service says nothing until the deadline.
        run_delay_s: seconds that every run takes before the code starts.
        die_after_runs: each sandbox is dead from its K+1-th run on.
        context_errors: n-th open_context raises this.
        kill_errors: n-th kill raises this; the sandbox stays alive.
        max_alive: creates beyond this many live sandboxes raise SandboxQuotaError.
        answer: given the code, an Execution to return instead of running it, or None to run it.
    """

    create_errors: Mapping[int, Exception] = field(default_factory=dict)
    create_hangs: frozenset[int] = frozenset()
    create_delay_s: float = 0.0
    run_errors: Mapping[int, Exception] = field(default_factory=dict)
    run_hangs: frozenset[int] = frozenset()
    run_delay_s: float = 0.0
    die_after_runs: int | None = None
    context_errors: Mapping[int, Exception] = field(default_factory=dict)
    kill_errors: Mapping[int, Exception] = field(default_factory=dict)
    max_alive: int | None = None
    answer: Callable[[str], Execution | None] | None = None


class FakeBackend:
    """A `SandboxBackend` that needs no service.

    Args:
        script: what goes wrong; nothing by default.
        limits: cap on the output of one run.

    Attributes:
        alive: live sandboxes by id.
        created_labels: labels of every create that succeeded, in order.
        peak_alive: most sandboxes alive at once.
        peak_contexts: most contexts open at once in one sandbox.
        creates, contexts, runs, kills: how often each was asked for.
    """

    def __init__(self, script: FaultScript | None = None, *, limits: OutputLimits | None = None) -> None:
        self.script = script or FaultScript()
        self.limits = limits or OutputLimits()
        self.alive: dict[str, FakeSandbox] = {}
        self.created_labels: list[dict[str, str]] = []
        self.peak_alive = 0
        self.peak_contexts = 0
        self.creates = 0
        self.contexts = 0
        self.runs = 0
        self.kills = 0
        self._ids = itertools.count(1)

    async def create(self, *, labels: Mapping[str, str], ttl_s: int) -> FakeSandbox:
        """Start a sandbox; see `SandboxBackend.create`. `ttl_s` is kept, not enforced."""
        self.creates += 1
        number = self.creates
        if number in self.script.create_hangs:
            await asyncio.Event().wait()
        if self.script.create_delay_s:
            await asyncio.sleep(self.script.create_delay_s)
        if error := self.script.create_errors.get(number):
            raise error
        if self.script.max_alive is not None and len(self.alive) >= self.script.max_alive:
            raise SandboxQuotaError(f"fake service: {len(self.alive)} sandboxes alive: the script allows no more")
        sandbox = FakeSandbox(self, f"fake-{next(self._ids)}", dict(labels), ttl_s)
        self.alive[sandbox.sandbox_id] = sandbox
        self.created_labels.append(dict(labels))
        self.peak_alive = max(self.peak_alive, len(self.alive))
        return sandbox

    async def list_ids(self, *, labels: Mapping[str, str]) -> list[str]:
        """Ids of the live sandboxes that carry all of `labels`."""
        return list(await self.list_labels(labels=labels))

    async def list_labels(self, *, labels: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """All labels of the live sandboxes that carry all of `labels`, by id."""
        return {name: one.labels for name, one in self.alive.items() if labels.items() <= one.labels.items()}

    async def kill(self, sandbox_id: str) -> bool:
        """End a sandbox; False if it was gone."""
        self.kills += 1
        if error := self.script.kill_errors.get(self.kills):
            raise error
        return self.alive.pop(sandbox_id, None) is not None

    async def aclose(self) -> None:
        """Nothing is held."""


class FakeSandbox:
    """A live sandbox of `FakeBackend`. `labels` and `ttl_s` are what create was given."""

    def __init__(self, backend: FakeBackend, sandbox_id: str, labels: dict[str, str], ttl_s: int) -> None:
        self._backend = backend
        self._sandbox_id = sandbox_id
        self.labels = labels
        self.ttl_s = ttl_s
        self.extended = 0
        self._interpreters: dict[str | None, _Interpreter] = {None: _Interpreter(sandbox_id)}
        self._context_numbers = itertools.count(1)
        self._runs = 0

    @property
    def sandbox_id(self) -> str:
        """Name of the sandbox."""
        return self._sandbox_id

    async def run_code(self, code: str, *, timeout_s: float, context_id: str | None = None) -> Execution:
        """Run code in a thread; see `Sandbox.run_code`."""
        script = self._backend.script
        self._backend.runs += 1
        number = self._backend.runs
        self._runs += 1
        if script.die_after_runs is not None and self._runs > script.die_after_runs:
            self._backend.alive.pop(self._sandbox_id, None)
        self._check_alive()
        if number in script.run_hangs:
            await asyncio.sleep(timeout_s)
            raise SandboxTimeoutError(f"sandbox {self._sandbox_id} said nothing for {timeout_s:g} s")
        if script.run_delay_s:
            await asyncio.sleep(script.run_delay_s)
        if error := script.run_errors.get(number):
            raise error
        if script.answer and (answer := script.answer(code)) is not None:
            return answer
        interpreter = self._interpreters.get(context_id)
        if interpreter is None:
            raise SandboxUnavailableError(f"sandbox {self._sandbox_id} has no context {context_id}")
        execution = await interpreter.run(code, timeout_s=timeout_s, limits=self._backend.limits)
        self._check_alive()
        return execution

    @property
    def contexts(self) -> int:
        """Contexts open now, the first interpreter not counted."""
        return len(self._interpreters) - 1

    async def open_context(self) -> str:
        """One more namespace; the working directory is the process's."""
        self._backend.contexts += 1
        if error := self._backend.script.context_errors.get(self._backend.contexts):
            raise error
        await asyncio.sleep(0)
        self._check_alive()
        context_id = f"context-{next(self._context_numbers)}"
        self._interpreters[context_id] = _Interpreter(f"{self._sandbox_id}/{context_id}")
        self._backend.peak_contexts = max(self._backend.peak_contexts, self.contexts)
        return context_id

    async def close_context(self, context_id: str) -> None:
        """Forget the namespace."""
        await asyncio.sleep(0)
        self._interpreters.pop(context_id, None)

    def _check_alive(self) -> None:
        if self._sandbox_id not in self._backend.alive:
            raise SandboxDiedError(f"sandbox {self._sandbox_id} is gone: its state is lost")

    async def extend(self, *, ttl_s: int) -> None:
        """Counted in `extended`, not enforced."""
        self._check_alive()
        self.extended += 1

    async def close(self) -> None:
        """End the sandbox; harmless when it is gone."""
        await self._backend.kill(self._sandbox_id)


class _DeadlinePassed(BaseException):
    """Thrown into the thread of code that ran too long; no `except Exception` of the code stops it."""


class _Stream:
    """The part of a text stream that code uses, writing into a CappedText."""

    encoding = "utf-8"

    def __init__(self, sink: CappedText) -> None:
        self._sink = sink

    def write(self, text: str) -> int:
        self._sink.add(text)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


class StdinNotImplementedError(RuntimeError):
    """What a Jupyter kernel raises from input(); same name here."""


def _no_input(prompt: object = "") -> str:
    raise StdinNotImplementedError("raw_input was called, but this frontend does not support input requests.")


class _Interpreter:
    """One namespace; runs cells as a notebook does, one at a time, each in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._cells = 0
        self._sys: Any = types.ModuleType("sys")
        self._sys.__getattr__ = lambda attribute: getattr(sys, attribute)
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._namespace["__builtins__"] = {**vars(builtins), "input": _no_input, "__import__": self._import}

    def _import(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._sys if name == "sys" else builtins.__import__(name, *args, **kwargs)

    async def run(self, code: str, *, timeout_s: float, limits: OutputLimits) -> Execution:
        output = OutputCollector(limits)
        self._sys.stdout = stdout = _Stream(output.stdout)
        self._sys.stderr = _Stream(output.stderr)

        def print_(*values: object, **options: Any) -> None:
            print(*values, **{"file": stdout, **options})  # noqa: T201 - the code's print, into our stream

        self._namespace["__builtins__"]["print"] = print_
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        started_s = time.monotonic()
        timed_out = False

        def work() -> None:
            try:
                self._cell(code, output)
            except _DeadlinePassed:
                return
            finally:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(done.set)

        thread = threading.Thread(target=_swallow_deadline(work), daemon=True, name=self._name)
        thread.start()
        try:
            await asyncio.wait_for(done.wait(), timeout_s)
        except TimeoutError:
            timed_out = True
        finally:
            if thread.is_alive() and not done.is_set():
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_DeadlinePassed)
                )
        return Execution(
            stdout=output.stdout.text(),
            stderr=output.stderr.text(),
            results=output.results,
            error=deadline_error(timeout_s) if timed_out else output.error,
            timed_out=timed_out,
            dropped_bytes=output.dropped_bytes,
            elapsed_s=time.monotonic() - started_s,
        )

    def _cell(self, code: str, output: OutputCollector) -> None:
        self._cells += 1
        filename = f"<cell {self._cells} of {self._name}>"
        linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
        try:
            tree = ast.parse(code, filename)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, filename, "exec"), self._namespace)  # noqa: S102 - this is an interpreter
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), filename, "eval"), self._namespace)  # noqa: S307
                if value is not None:
                    output.add_result(repr(value))
        except _DeadlinePassed:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever the code raises, SystemExit included, is its result
            frames = error.__traceback__.tb_next if error.__traceback__ else None
            text = "".join(traceback.format_exception(type(error), error, frames))
            output.set_error(type(error).__name__, str(error), text)
        finally:
            linecache.cache.pop(filename, None)


def _swallow_deadline(work: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except _DeadlinePassed:  # delivered a moment late, when the code had ended already
            return

    return run
