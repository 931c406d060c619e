"""The taking of samples in verl's own worker, with and without the tool, no Ray: interrupted, lost, gone on with.

The engine is a script that answers by what the prompt offers; sandboxes are the fake's. Not covered: the engine with
GPUs of its own and the manager around the workers (tests/e2e/test_evaluate.py does both).
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    from verl.protocol import DataProto
    from verl.workers.rollout.replica import TokenOutput
    from verl_worker import ANSWER, EOS, QUESTION, Worker, call, make_config

    from verl_ext.evaluation import rollout
    from verl_ext.tools import code_interpreter

from verl_ext.errors import SandboxUnavailableError
from verl_ext.evaluation.plan import Plan
from verl_ext.evaluation.results import read_parts, result
from verl_ext.sandbox import lifecycle
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.pool import SessionPool
from verl_ext.trajectory import read_records

PROBLEMS, N = 3, 2


class Engine:
    """With the tool in its prompt it computes and is right; without it, it guesses. Keeps what it was asked with."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.asked: list[tuple[bool, dict[str, Any]]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict, **_: Any) -> TokenOutput:
        prompt = self._tokenizer.decode(prompt_ids)
        has_tool = "code_interpreter" in prompt
        self.asked.append((has_tool, dict(sampling_params)))
        text = r"I guess \boxed{41}." if not has_tool else ANSWER if "<tool_response>" in prompt else call("6 * 7")
        return TokenOutput(token_ids=self._tokenizer.encode(text + EOS, add_special_tokens=False))


class Evaluation:
    """A folder with a plan, and one worker to take its samples with."""

    def __init__(self, folder: Path, tokenizer: Any, backend: FakeBackend, loop: asyncio.AbstractEventLoop) -> None:
        self.folder, self.backend, self.engine = folder, backend, Engine(tokenizer)
        self.config = make_config(
            {
                "verl_ext.run_dir": folder / "base",
                "verl_ext.on_lost": "stop",
                "actor_rollout_ref.rollout.calculate_log_probs": False,
                "actor_rollout_ref.rollout.val_kwargs.top_p": 0.6,
            }
        )
        (folder / "base").mkdir(parents=True)
        rows = [
            {
                "data_source": "math_dapo",
                "prompt": QUESTION,
                "reward_model": {"ground_truth": "42", "style": "rule"},
                "extra_info": {"index": f"p{number}", "split": "val"},
            }
            for number in range(PROBLEMS)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "problems.parquet")
        Plan(
            settings=("no_tools", "tools"), models={"base": "/b"}, data=str(folder / "problems.parquet"),
            content_sha256="", n=N, seed=1, subject={}, sampling={}, overrides=(),
        ).write(folder)  # fmt: skip
        self._loop = loop
        self.pool = SessionPool(backend, acquire_timeout_s=0.2)
        code_interpreter.use_sessions(self.pool.session)
        self.worker = asyncio.run_coroutine_threadsafe(self._make_worker(tokenizer), loop).result()

    async def _make_worker(self, tokenizer: Any) -> Worker:
        return Worker(self.config, tokenizer, self.engine, self.pool)  # pyright: ignore[reportArgumentType]

    def generate(self, prompts: DataProto) -> DataProto:
        """As a call of the worker's actor: from any thread, on its one loop."""
        return asyncio.run_coroutine_threadsafe(self.worker.generate_sequences(prompts), self._loop).result()

    def take(self, generate: Any = None) -> None:
        rollout.take(self.config, [generate or self.generate], probe=lambda: "", in_flight=2)

    @property
    def samples(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        return {(row["setting"], row["problem_id"], row["sample"]): row for row in read_parts(self.folder)}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def evaluation(
    backend: FakeBackend, byte_tokenizer: Any, tmp_path: Path, fresh_verl_loops: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Evaluation]:
    monkeypatch.setattr(lifecycle, "_BACKOFF_BASE_S", 0.01)
    monkeypatch.setattr("verl_ext.evaluation.plan.PART_SAMPLES", 2)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = Evaluation(tmp_path / "e", byte_tokenizer, backend, loop)
    try:
        yield made
    finally:
        code_interpreter.use_sessions(None)
        asyncio.run_coroutine_threadsafe(made.pool.aclose(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_every_sample_is_taken_with_and_without_the_tool(evaluation: Evaluation):
    evaluation.take()
    samples = evaluation.samples
    assert set(samples) == {
        (setting, f"p{problem}", sample)
        for setting in ("no_tools", "tools")
        for problem in range(PROBLEMS)
        for sample in range(N)
    }
    for setting, right, turns, calls in (("no_tools", 0.0, 1, 0), ("tools", 1.0, 2, 1)):
        found = result([row for row in samples.values() if row["setting"] == setting])
        assert (found["mean"], found["turns"], found["tool_calls"]) == (right, turns, calls)
    assert {has_tool for has_tool, _ in evaluation.engine.asked} == {True, False}
    records = {record["trajectory_id"]: record for record in read_records(evaluation.folder / "base", validation=True)}
    for (_, problem, _), row in samples.items():
        record = records[row["trajectory_id"]]
        assert (record["step"], record["problem_id"]) == (row["part"], problem)
    assert {record["group"] for record in records.values()} >= {"no_tools/math_dapo/p0", "tools/math_dapo/p0"}


def test_each_turn_is_sampled_as_the_recipe_says_with_a_seed_of_its_own(evaluation: Evaluation):
    evaluation.take()
    first = [row["seed"] for row in evaluation.samples.values()]
    second = [row["seed"] + 1 for row in evaluation.samples.values() if row["setting"] == "tools"]
    assert sorted(params["seed"] for _, params in evaluation.engine.asked) == sorted(first + second)
    assert {(params["top_p"], params["temperature"]) for _, params in evaluation.engine.asked} == {(0.6, 1.0)}


def test_what_was_interrupted_goes_on_and_nothing_is_taken_twice(evaluation: Evaluation):
    allowed = iter(range(2))

    def breaks_off(prompts: DataProto) -> DataProto:
        if next(allowed, None) is None:
            raise RuntimeError("the machine went away")
        return evaluation.generate(prompts)

    with pytest.raises(RuntimeError, match="the machine went away"):
        evaluation.take(breaks_off)
    kept = evaluation.samples
    assert len(kept) == 4
    before = len(evaluation.engine.asked)
    evaluation.take()
    assert {key: evaluation.samples[key] for key in kept} == kept
    assert len(evaluation.samples) == 2 * PROBLEMS * N
    assert before + len(evaluation.engine.asked[before:]) == PROBLEMS * N * 3  # one turn without the tool, two with it
    evaluation.take()
    assert len(evaluation.engine.asked) == PROBLEMS * N * 3


def test_lost_samples_are_in_no_number_and_are_taken_when_it_is_started_again(
    evaluation: Evaluation, backend: FakeBackend
):
    backend.script = FaultScript(create_errors=dict.fromkeys(range(1, 1000), SandboxUnavailableError("down")))
    evaluation.take()
    tools = result([row for row in evaluation.samples.values() if row["setting"] == "tools"])
    assert (tools["lost"], tools["n_valid"], tools["mean"]) == (PROBLEMS * N, 0, None)
    backend.script = FaultScript()
    evaluation.take()
    tools = result([row for row in evaluation.samples.values() if row["setting"] == "tools"])
    assert (tools["lost"], tools["n_valid"], tools["mean"]) == (0, PROBLEMS * N, 1.0)
