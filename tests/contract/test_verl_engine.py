"""verl_ext.engine against the sources of verl and vLLM: what it stands in for is still as it was.

That the engine serves, syncs and sleeps through it is shown by tests/e2e, which train with it.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import pickle
import re
import sys
import types
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from library_source import functions, source

pytest.importorskip("ray")
if find_spec("verl") is None or find_spec("vllm") is None:
    pytest.skip("verl or vLLM is not installed here", allow_module_level=True)

from verl_ext.engine.process import (
    ENGINE_MODULE,
    ENGINE_STARTER,
    SERVER_MODULE,
    EngineServerProcess,
    uses_cuda_itself,
)
from verl_ext.engine.worker_errors import WORKER_MODULE, answer_every_error, last_error
from verl_ext.errors import EngineDiedError

ROOT = Path(__file__).parents[2]


def test_vllm_makes_its_engine_by_the_context_that_we_replace():
    assert re.search(r"^\s+context = get_mp_context\(\)", source(ENGINE_STARTER), re.M)
    assert re.search(r"context\.Process\(\s*target=\w+,\s*name=.*?kwargs=", source(ENGINE_STARTER), re.S)
    assert "class EngineCoreProc" in source(ENGINE_MODULE)


def test_verl_starts_its_server_late_and_by_importing_it():
    """When this fails, verl starts its server early itself: take verl_ext/engine out."""
    launch = ast.unparse(functions(SERVER_MODULE, "vLLMReplica")["launch_servers"])
    assert "self.server_class.options(" in launch
    assert "self.server_class = vLLMHttpServer" in source(SERVER_MODULE)
    assert "if not hasattr(self, 'rollout_replica_class')" in source("verl.experimental.agent_loop.agent_loop").replace(
        '"', "'"
    )


def test_every_method_of_verls_server_is_ours_too():
    theirs = {name for name in functions(SERVER_MODULE, "vLLMHttpServerBase") if not name.startswith("_")}
    ours = {name for name, _ in inspect.getmembers(EngineServerProcess, inspect.isfunction)}
    # What only the server itself calls.
    assert theirs - ours == {"run_server", "run_headless"}


def test_without_a_trainer_vllm_holds_the_model_and_reads_it_from_its_folder():
    """What EarlyReplica.init_standalone relies on."""
    launch = ast.unparse(functions(SERVER_MODULE, "vLLMHttpServerBase")["launch_server"])
    assert "ExternalZeroMQDistributedExecutor if len(self.workers) > 0 else None" in launch
    made = ast.unparse(functions(SERVER_MODULE, "vLLMHttpServerBase")["__init__"])
    assert "if self.rollout_mode != RolloutMode.HYBRID and self.config.load_format == 'dummy':" in made
    assert "self.config.load_format = 'auto'" in made


def test_verl_asks_for_gpus_when_it_is_imported():
    """When this fails, an engine that holds its model on a GPU may be forked too: see uses_cuda_itself."""
    assert re.search(r"^is_cuda_available = torch\.cuda\.is_available\(\)", source("verl.utils.device"), re.M)


@pytest.mark.parametrize(
    ("workers", "cuda", "itself"), [([], True, True), ([], False, False), (["w"], True, False), (["w"], False, False)]
)
def test_an_engine_that_holds_its_model_on_a_gpu_is_not_forked(
    workers: list[str], cuda: bool, itself: bool, monkeypatch: pytest.MonkeyPatch
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert uses_cuda_itself(workers) is itself


def test_the_servers_arguments_are_those_that_we_give():
    taken = [argument.arg for argument in functions(SERVER_MODULE, "vLLMHttpServerBase")["__init__"].args.args[1:]]
    tree = ast.parse((ROOT / "verl_ext" / "engine" / "replica.py").read_text(encoding="utf-8"))
    given = next(
        [key.value for key in node.keys]
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict) and node.keys and isinstance(node.keys[0], ast.Constant)
    )
    assert sorted(given) == sorted(taken)


class SocketOfTheEngine:
    """Asks once, and keeps what it is answered."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []

    async def recv(self) -> bytes:
        return pickle.dumps(("execute_model", (), {}))

    async def send(self, answer: bytes) -> None:
        self.answers.append(answer)


def loop_of_the_worker(pickler: Any) -> Any:
    loop = functions("verl.workers.rollout.vllm_rollout.vllm_rollout_spmd", "vLLMAsyncRollout")["_loop_forever"]
    names: dict[str, Any] = {"pickle": pickler, "logger": logging.getLogger("verl")}
    exec(ast.unparse(loop), names)  # its module would import vLLM
    return names["_loop_forever"]


class FailingWorker:
    """Cannot compile: torch's error holds a frame."""

    def __init__(self) -> None:
        self.socket = SocketOfTheEngine()

    async def _execute_method(self, *_: Any) -> None:
        exc = pytest.importorskip("torch._dynamo.exc")
        raise exc.ShortenTraceback("no C++ compiler", first_useful_frame=inspect.currentframe())


async def test_verls_worker_leaves_the_engine_without_an_answer_if_an_error_does_not_pickle():
    """When this fails, such a run ends by itself: answer_every_error can go, and preflight's `compiler` saves time."""
    worker = FailingWorker()
    with pytest.raises(TypeError, match="cannot pickle 'frame' object"):
        await loop_of_the_worker(pickle)(worker)
    assert worker.socket.answers == []


async def test_an_error_that_does_not_pickle_reaches_the_engine_as_text(monkeypatch: pytest.MonkeyPatch):
    module = types.ModuleType(WORKER_MODULE)
    monkeypatch.setattr(module, "pickle", cloudpickle, raising=False)
    monkeypatch.setitem(sys.modules, WORKER_MODULE, module)
    answer_every_error(None)
    answer_every_error(None)  # of a worker that is asked twice
    worker = FailingWorker()
    await loop_of_the_worker(module.pickle)(worker)
    [answer] = worker.socket.answers
    said = pickle.loads(answer)
    assert isinstance(said, RuntimeError)
    assert "ShortenTraceback: no C++ compiler" in str(said)
    assert last_error(None) == "ShortenTraceback: no C++ compiler"


def test_a_worker_whose_engine_is_another_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, WORKER_MODULE, raising=False)
    answer_every_error(None)


class Worker:
    """A handle of Ray's."""

    def __init__(self, said: str, after_s: float = 0.0) -> None:
        self._said, self._after_s = said, after_s
        self.__ray_call__ = types.SimpleNamespace(remote=self._answer)

    async def _answer(self, _: Any) -> str:
        await asyncio.sleep(self._after_s)
        return self._said


class EngineDeadError(Exception):
    """vLLM's, by its name."""


@pytest.mark.parametrize(
    ("error", "workers", "told"),
    [
        (EngineDeadError("above"), [Worker(""), Worker("ValueError: no room")], "ValueError: no room"),
        (EngineDeadError("above"), [Worker("late", after_s=60)], "it does not answer"),
        (RuntimeError("Engine core initialization failed. See root cause above."), [Worker("")], "the processes' logs"),
    ],
)
async def test_a_dead_engine_is_told_with_its_workers_words(
    error: Exception, workers: list[Worker], told: str, monkeypatch: pytest.MonkeyPatch
):
    import verl_ext.engine.process as process

    async def generate(**_: Any) -> None:
        raise error

    monkeypatch.setattr(process, "WORDS_WITHIN_S", 0.2)
    server = process.EngineServerProcess.__new__(process.EngineServerProcess)
    server._server, server._workers, server._turns = types.SimpleNamespace(generate=generate), workers, count()
    server._under_way = set()
    with pytest.raises(EngineDiedError, match=told):
        await server.generate(request_id="one")


async def test_another_error_of_a_request_stays_what_it_is():
    import verl_ext.engine.process as process

    async def generate(**_: Any) -> None:
        raise ValueError("prompt too long")

    server = process.EngineServerProcess.__new__(process.EngineServerProcess)
    server._server, server._workers, server._turns = types.SimpleNamespace(generate=generate), [Worker("x")], count()
    server._under_way = set()
    with pytest.raises(ValueError, match="prompt too long"):
        await server.generate(request_id="one")


def test_vllm_names_a_dead_engine_so():
    assert "class EngineDeadError(Exception)" in source("vllm.v1.engine.exceptions")
    assert "Engine core initialization failed" in source("vllm.v1.engine.utils")
