"""verl_ext.engine.async_scheduling: the same tokens as without it, through preemptions too, answers in their order."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from library_source import functions, source

pytest.importorskip("ray")
if find_spec("verl") is None or find_spec("vllm") is None:
    pytest.skip("verl or vLLM is not installed here", allow_module_level=True)

import verl_ext.cpu  # noqa: F401 - before vLLM is imported

zmq = pytest.importorskip("zmq")

from verl_ext.engine.process import SERVER_MODULE, EngineServerProcess  # noqa: E402

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of importing vLLM and Ray's libraries
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
GENERATE = Path(__file__).with_name("generate_ahead.py")
WITHIN_S = 240


def test_verls_executor_is_still_asked_for_one_step_at_a_time():
    """When this fails, verl's executor can be asked ahead: take verl_ext/engine/async_scheduling.py out."""
    text = source(SERVER_MODULE)
    assert "socket(zmq.REQ)" in text
    assert "max_concurrent_batches" not in functions(SERVER_MODULE, "ExternalZeroMQDistributedExecutor")


def test_verl_still_gives_every_turn_the_same_id():
    """When this fails, EngineServerProcess.generate need not make them differ."""
    asked = ast.unparse(functions("verl.experimental.agent_loop.agent_loop", "AsyncLLMServerManager")["generate"])
    assert "server.generate.remote(request_id=request_id," in asked


def test_vllm_makes_its_scheduler_after_its_executor_and_from_the_same_configuration():
    text = source("vllm.v1.engine.core")
    assert text.index("self.model_executor = executor_class(vllm_config)") < text.index(
        "resolve_obj_by_qualname(\n                vllm_config.scheduler_config.scheduler_cls)"
    )
    assert "self.batch_queue_size = self.model_executor.max_concurrent_batches" in text


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine's server process that begins nothing; what it asks of verl's server before sleep is in `.asked`."""
    import verl_ext.engine.process as process

    monkeypatch.setattr(process, "start_the_fork_server", lambda: None)
    monkeypatch.setattr(process, "import_unhurriedly", lambda _: None)
    asked: list[str] = []

    async def drain() -> None:
        asked.append("drain")

    async def collective_rpc(method: str) -> None:
        asked.append(method)

    made: Any = EngineServerProcess()
    made.asked = asked
    made._server = SimpleNamespace(
        wait_for_requests_to_drain=drain, engine=SimpleNamespace(collective_rpc=collective_rpc)
    )
    return made


async def test_turns_of_a_trajectory_reach_the_engine_under_different_ids(server: Any):
    asked: list[str] = []

    async def generate(*, request_id: str, **_: Any) -> None:
        asked.append(request_id)

    server._server.generate = generate
    for _ in range(2):
        await server.generate(request_id="trajectory", prompt_ids=[1], sampling_params={})
    assert len(set(asked)) == 2
    assert all(one.startswith("trajectory") for one in asked)


async def test_going_to_sleep_waits_for_the_step_that_was_planned_ahead(server: Any):
    await server.wait_for_requests_to_drain()
    assert server.asked == ["drain", "check_health"]


async def test_a_request_that_was_given_up_is_ended_before_the_workers_sleep(server: Any):
    """vLLM waits for nothing there: `dp_engines_running` is about engines that share their data."""
    assert "if self.is_dp:\n            self.engines_running = True" in source("vllm.v1.engine.core_client")
    known: dict[str, asyncio.Event] = {}

    async def generate(*, request_id: str) -> None:
        await asyncio.sleep(0.05)  # vLLM does not know it at once
        known[request_id] = asyncio.Event()
        await known[request_id].wait()

    async def abort(ids: list[str]) -> None:
        for one in ids:
            if one in known:
                known[one].set()

    server._server.generate, server._server.engine.abort = generate, abort
    asked = [asyncio.create_task(server.generate(request_id=f"{number}")) for number in range(3)]
    await asyncio.sleep(0)
    await asyncio.wait_for(server.wait_for_requests_to_drain(), 10)
    assert server.asked == ["drain", "check_health"]
    assert all(one.done() for one in asked)


_executors: list[Any] = []  # of a test


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., list[threading.Event]]]:
    """Start workers that answer as verl's do: a REP socket, one message after the other, each when it may."""
    context = zmq.Context()
    threads: list[threading.Thread] = []
    stop = threading.Event()

    def serve(socket: Any, may_answer: threading.Event, name: int) -> None:
        while not stop.is_set():
            if not socket.poll(20):
                continue
            method, args, _ = pickle.loads(socket.recv())
            while not (may_answer.wait(0.02) or stop.is_set()):
                pass
            if method == "fail":
                socket.send(pickle.dumps(ValueError("worker's own")))
                break
            socket.send(pickle.dumps((name, method, args)))
        socket.close(linger=0)

    def start(count: int) -> list[threading.Event]:
        events, addresses = [], []
        for name in range(count):
            socket = context.socket(zmq.REP)
            addresses.append(f"ipc://{tmp_path}/{name}")
            socket.bind(addresses[-1])
            events.append(threading.Event())
            threads.append(threading.Thread(target=serve, args=(socket, events[-1], name), daemon=True))
            threads[-1].start()
        monkeypatch.setenv("VERL_VLLM_ZMQ_ADDRESSES", ",".join(addresses))
        return events

    yield start
    while _executors:
        _executors.pop().shutdown()
    stop.set()
    for thread in threads:
        thread.join(5)
    context.term()


def executor(tensor_parallel: int = 1, speculative: Any = None) -> Any:
    """One without an engine: made, and connected, by verl's own _init_executor."""
    from verl_ext.engine.async_scheduling import AsyncSchedulingExecutor

    parallel = SimpleNamespace(
        data_parallel_rank_local=0, tensor_parallel_size=tensor_parallel, pipeline_parallel_size=1
    )
    made = AsyncSchedulingExecutor.__new__(AsyncSchedulingExecutor)
    made.vllm_config = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        parallel_config=parallel,
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(scheduler_cls="stock"),
    )
    made._init_executor()
    _executors.append(made)
    return made


def test_a_second_step_is_sent_before_the_first_is_answered(workers: Callable[..., list[threading.Event]]):
    may_answer = workers(2)
    for one in may_answer:
        one.set()
    asked = executor(tensor_parallel=2)
    assert asked.max_concurrent_batches == 2
    assert asked.vllm_config.scheduler_config.scheduler_cls.endswith("AsyncScheduler")
    for one in may_answer:
        one.clear()
    first = asked.execute_model("step 1", non_block=True)
    second = asked.execute_model("step 2", non_block=True)
    assert not first.done()
    may_answer[0].set()
    assert not first.done()  # one of two workers
    may_answer[1].set()
    # Asked last, it has both behind it.
    assert asked.collective_rpc("check_health") == [(0, "check_health", ()), (1, "check_health", ())]
    assert first.done()
    assert first.result() == (0, "execute_model", ("step 1",))
    assert second.result() == (0, "execute_model", ("step 2",))


def test_a_function_of_this_process_is_carried_too(workers: Callable[..., list[threading.Event]]):
    workers(1)[0].set()
    name, method, _ = executor().collective_rpc(lambda worker: worker)[0]
    assert name == 0
    assert pickle.loads(method)("as it was") == "as it was"


def test_with_speculative_decoding_there_is_one_step_at_a_time(workers: Callable[..., list[threading.Event]]):
    workers(1)[0].set()
    made = executor(speculative="ngram")
    assert made.max_concurrent_batches == 1
    assert made.vllm_config.scheduler_config.scheduler_cls == "stock"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine says with each executor, greedily, with room for a third of what it is asked at a time."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("ahead")
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=320, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=False,
        initializer_range=0.3,  # so that the best token is the best by far
        eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).float().save_pretrained(folder / "model")
    found = {}
    for name in ("verl", "ahead"):
        done = subprocess.run(
            [sys.executable, str(GENERATE), name, str(folder / "model")],
            cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_tokens_are_the_same_through_preemptions(generated: dict[str, Any]):
    assert generated["ahead"]["preempted"] > 0
    assert generated["verl"]["preempted"] > 0
    assert generated["ahead"]["tokens"] == generated["verl"]["tokens"]


def test_the_log_probs_are_those_of_the_tokens(generated: dict[str, Any]):
    for ours, verls in zip(generated["ahead"]["log_probs"], generated["verl"]["log_probs"], strict=True):
        assert ours == pytest.approx(verls, abs=1e-3)


def test_steps_were_planned_ahead(generated: dict[str, Any]):
    assert generated["ahead"]["most_under_way"] == 2
    assert generated["verl"]["most_under_way"] == 1


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scheduled_ahead import write_configuration

    folder = tmp_path_factory.mktemp("shape")
    write_configuration(folder)
    return folder


def test_each_token_follows_from_what_the_cache_holds_with_prefix_caching_and_chunked_prefill(shape: Path):
    from scheduled_ahead import Engine
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    counts = sum((Engine(AsyncScheduler, shape, seed).run() for seed in range(40)), start=Counter())
    assert counts["preempted"] > 50
    assert counts["aborted"] > 10
    assert counts["turns"] > 100


def test_a_scheduler_that_plans_too_far_ahead_is_seen_by_that_test(shape: Path):
    """It takes a prompt's part for a token, so it plans a step for one that nobody has made."""
    from scheduled_ahead import Engine
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    class TooFar(AsyncScheduler):
        def _update_after_schedule(self, scheduler_output: Any) -> None:
            Scheduler._update_after_schedule(self, scheduler_output)
            for name in scheduler_output.num_scheduled_tokens:
                self.requests[name].num_output_placeholders += 1

    with pytest.raises(AssertionError, match="not there yet"):
        [Engine(TooFar, shape, seed).run() for seed in range(10)]


def test_after_a_workers_error_nothing_is_waited_for(workers: Callable[..., list[threading.Event]]):
    """verl's worker ends its loop with its first error, and answers nothing that it was sent since."""
    [may_answer] = workers(1)
    may_answer.set()
    asked = executor()
    may_answer.clear()
    failing = asked.collective_rpc("fail", non_block=True)[0]
    following = asked.execute_model("step 2", non_block=True)
    threading.Timer(0.1, may_answer.set).start()
    for answer in (failing, following, asked.execute_model("step 3", non_block=True)):
        with pytest.raises(ValueError, match="worker's own"):
            answer.result()
    with pytest.raises(ValueError, match="worker's own"):
        asked.collective_rpc("check_health")
    asked.shutdown()
    assert all(socket.closed for socket in asked.sockets)
