"""Our agent loop and tool in verl's own worker: its `_run_agent_loop`, reward loop and `_postprocess`, no Ray.

The engine is a script of what the model says; sandboxes are the fake's. What verl's own loop does wrong is
shown here as well, so that the cure can go when the fault does (verl_ext/README.md).

Not covered: the Ray actor around the worker and a real engine (tests/e2e does both).
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of verl's own imports
    pytest.importorskip("verl", reason="verl is not installed here")
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop import agent_loop as verl_agent_loop
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.experimental.agent_loop.tool_parser import HermesToolParser
    from verl.protocol import DataProto
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl_worker import (
        ANSWER,
        EOS,
        PROMPT,
        QUESTION,
        RESPONSE,
        ScriptedEngine,
        Worker,
        call,
        make_config,
        make_prompts,
    )

    from verl_ext.agent_loop import loop as our_loop
    from verl_ext.rollout import LOOP_FIELDS, take_records
    from verl_ext.tools import code_interpreter

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import DataError, SandboxUnavailableError
from verl_ext.sandbox import lifecycle
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.pool import SessionPool
from verl_ext.trajectory import read_records

TOOL_FILE = CONFIG_DIR / "tool" / "code_interpreter.yaml"


@pytest.fixture(scope="module")
def config() -> Any:
    return make_config()


@pytest.fixture(autouse=True)
def _fresh(fresh_verl_loops: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_BACKOFF_BASE_S", 0.01)


class Rollout:
    """Runs scripted trajectories; what came out, as verl sees it and as it is recorded."""

    def __init__(self, config: Any, tokenizer: Any, run_dir: Path) -> None:
        self.config = config.copy()
        self.tokenizer = tokenizer
        self.run_dir = run_dir
        self.backend = FakeBackend()
        self.pool_options: dict[str, Any] = {}
        self.make_prompts = make_prompts
        self.engine = ScriptedEngine(tokenizer, [[]])

    def set(self, key: str, value: Any) -> None:
        OmegaConf.update(self.config, key, value)

    async def batch(self, *scripts: Sequence[str | list[int]]) -> DataProto:
        self.engine = ScriptedEngine(self.tokenizer, scripts)
        pool = SessionPool(self.backend, **{"acquire_timeout_s": 0.2, **self.pool_options})
        code_interpreter.use_sessions(pool.session)
        worker = Worker(self.config, self.tokenizer, self.engine, pool)
        try:
            return await worker.generate_sequences(self.make_prompts(len(scripts)))
        finally:
            code_interpreter.use_sessions(None)
            await pool.aclose()
            assert not self.backend.alive

    async def one(self, *script: str | list[int]) -> Trajectory:
        return Trajectory(self.tokenizer, await self.batch(script), 0)

    def take(self, output: DataProto) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """The numbers, and the records read back from disk."""
        taken = take_records(make_prompts(len(output)), output, run_dir=self.run_dir, run_id="r", copies=2)
        return taken.numbers, list(read_records(self.run_dir))


class Trajectory:
    """One row of verl's batch."""

    def __init__(self, tokenizer: Any, output: DataProto, row: int) -> None:
        batch = output.batch
        self.length = int(batch["attention_mask"][row, PROMPT:].sum())
        self.ids = batch["responses"][row, : self.length].tolist()
        self.mask = batch["response_mask"][row].tolist()
        self.log_probs = batch["rollout_log_probs"][row].tolist()
        self.reward = float(batch["rm_scores"][row].sum())
        self.prompt = batch["prompts"][row][batch["attention_mask"][row, :PROMPT].bool()].tolist()
        self.extra = {name: column[row] for name, column in output.non_tensor_batch.items()}
        self.record = our_loop.LoopRecord.from_json(self.extra[our_loop.RECORD_FIELD])
        self.text = tokenizer.decode(self.ids)
        self.said = tokenizer.decode([token for token, mask in zip(self.ids, self.mask, strict=False) if mask])

    @property
    def responses(self) -> list[str]:
        return [record.response for record in self.record.calls()]

    @property
    def statuses(self) -> list[str]:
        return [record.status for record in self.record.calls()]


@pytest.fixture
def rollout(config: Any, byte_tokenizer: Any, tmp_path: Path) -> Rollout:
    return Rollout(config, byte_tokenizer, tmp_path)


# --- what a good trajectory is


async def test_an_answer_without_a_tool(rollout: Rollout):
    one = await rollout.one(ANSWER)
    assert one.text == ANSWER + EOS
    assert one.mask == [1] * one.length + [0] * (RESPONSE - one.length)
    assert one.reward == 1.0
    assert one.extra["__num_turns__"] == 2
    assert one.record.stop_reason == "answered"
    assert rollout.backend.creates == 0


@pytest.mark.parametrize("name", ["byte_tokenizer", "qwen3"])
async def test_ids_mask_and_log_probs_of_a_conversation(name: str, config, tmp_path, request):
    tokenizer = request.getfixturevalue(name)
    rollout = Rollout(config, tokenizer, tmp_path)
    turns = [f"Let me see.\n{call('x = 6')}", f"{call('print(x * 7)')}\n{call('x')}", ANSWER]
    one = await rollout.one(*turns)
    assert one.responses == ["(no output)", "42", "6"]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": turns[0]},
        {"role": "tool", "content": "(no output)"},
        {"role": "assistant", "content": turns[1]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": turns[2]},
    ]
    tools = [tool["tool_schema"] for tool in yaml.safe_load(TOOL_FILE.read_text())["tools"]]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False).removesuffix("\n")
    assert one.prompt + one.ids == tokenizer.encode(whole, add_special_tokens=False)
    assert one.said == "".join(turn + EOS for turn in turns)
    assert [value == -0.5 for value in one.log_probs] == [bool(mask) for mask in one.mask]
    # What the engine was asked to go on from is what is trained on.
    assert rollout.engine.prompts[-1] == (one.prompt + one.ids)[: len(rollout.engine.prompts[-1])]
    numbers, [record] = rollout.take(await rollout.batch(turns))
    assert record["response_ids"] == one.ids
    assert record["response_mask"] == one.mask[: one.length]
    assert [len(turn["calls"]) for turn in record["turns"]] == [1, 2, 0]
    assert sum(turn["tokens"] for turn in record["turns"]) == sum(one.mask)
    assert numbers["tool_calls"] == 3
    assert numbers["accuracy"] == 1.0


async def test_state_is_kept_between_calls_and_shared_with_nobody(rollout: Rollout):
    output = await rollout.batch(
        [call("x = 1"), call("x + 1"), ANSWER], [call("x = 10"), call("x + 1"), ANSWER], [call("x"), ANSWER]
    )
    rows = [Trajectory(rollout.tokenizer, output, row) for row in range(3)]
    assert rows[0].responses[1] == "2"
    assert rows[1].responses[1] == "11"
    assert "NameError" in rows[2].responses[0]
    assert rollout.backend.creates == 3


async def test_the_codes_own_errors_are_data(rollout: Rollout):
    one = await rollout.one(call("1 / 0"), call("raise TimeoutError('mine')"), call("import sys; sys.exit(3)"), ANSWER)
    assert "ZeroDivisionError: division by zero" in one.responses[0]
    assert one.statuses == ["error"] * 3
    assert one.extra["tool_errors"] == 3
    assert one.reward == 1.0
    assert sum(one.mask) > 0


async def test_code_past_its_deadline_is_told_and_the_trajectory_goes_on(rollout: Rollout, tmp_path: Path):
    tool = yaml.safe_load(TOOL_FILE.read_text())
    tool["tools"][0]["config"]["call_timeout_s"] = 0.2
    (tmp_path / "tool.yaml").write_text(yaml.safe_dump(tool))
    rollout.set("actor_rollout_ref.rollout.multi_turn.tool_config_path", str(tmp_path / "tool.yaml"))
    one = await rollout.one(call("x = 1"), call("while True: pass"), call("x"), ANSWER)
    assert one.statuses == ["ok", "timeout", "error"]
    assert "longer than 0.2 s" in one.responses[1]
    assert "NameError" in one.responses[2]
    assert one.reward == 1.0


async def test_a_call_that_cannot_be_read_is_answered_and_may_be_repaired(rollout: Rollout):
    one = await rollout.one(
        '<tool_call>\n{"name": "code_interpreter", "arguments": }\n</tool_call>', call("42"), ANSWER
    )
    assert one.statuses == ["malformed", "ok"]
    assert "could not be read: it is not valid JSON" in one.responses[0]
    assert one.extra["parse_failures"] == 1
    assert one.extra["tool_calls"] == 1
    assert one.reward == 1.0


@pytest.mark.parametrize("name", ["python", "\ud800", "x" * 500])
async def test_an_unknown_tool_is_answered_with_the_known_ones(name: str, rollout: Rollout):
    output = await rollout.batch([call("1", name), ANSWER])
    one = Trajectory(rollout.tokenizer, output, 0)
    assert one.statuses == ["unknown_tool"]
    assert "Tools: code_interpreter." in one.responses[0]
    assert len(one.responses[0]) < 200
    _, [record] = rollout.take(output)  # can be stored
    assert record["turns"][0]["calls"][0]["status"] == "unknown_tool"


@pytest.mark.parametrize("arguments", ["{}", '{"code": 3}', '{"code": ""}', '{"source": "1"}', '{"code": null}'])
async def test_arguments_that_are_wrong_are_answered(arguments: str, rollout: Rollout):
    text = '<tool_call>{"name": "code_interpreter", "arguments": ' + arguments + "}</tool_call>"
    one = await rollout.one(text, ANSWER)
    assert one.statuses == ["bad_arguments"]
    assert "needs the argument" in one.responses[0]


async def test_calls_of_one_turn_run_in_order_up_to_the_limit(rollout: Rollout):
    turn = "".join(call(f"log = [*globals().get('log', []), {number}]; log") for number in range(6))
    one = await rollout.one(turn, ANSWER)
    assert one.statuses == ["ok"] * 4 + ["not_run"] * 2
    assert one.responses[3] == "[0, 1, 2, 3]"
    assert "at most 4 calls" in one.responses[4]


async def test_code_that_is_no_text_for_anyone_is_survived(rollout: Rollout):
    output = await rollout.batch([call("print('\ud800')"), call("\x00"), ANSWER])
    one = Trajectory(rollout.tokenizer, output, 0)
    assert set(one.statuses) <= {"ok", "error"}
    rollout.take(output)


async def test_the_engine_gets_fresh_sampling_parameters(rollout: Rollout, monkeypatch):
    seen: list[dict] = []
    generate = ScriptedEngine.generate

    async def watching(self, request_id, *, sampling_params, **rest):
        seen.append(dict(sampling_params))
        return await generate(self, request_id, sampling_params=sampling_params, **rest)

    monkeypatch.setattr(ScriptedEngine, "generate", watching)
    await rollout.batch([call("1"), ANSWER], [ANSWER])
    assert len(seen) == 3
    assert all(parameters == seen[0] and "changed" not in parameters for parameters in seen)


async def test_the_engine_is_asked_for_ids_once_a_request(rollout: Rollout, monkeypatch):
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    seen: list[dict] = []
    generate = ScriptedEngine.generate

    async def watching(self, request_id, *, sampling_params, **rest):
        seen.append({name: value for name, value in sampling_params.items() if name != "logprobs"})
        return await generate(self, request_id, sampling_params=sampling_params, **rest)

    monkeypatch.setattr(ScriptedEngine, "generate", watching)
    await rollout.one(ANSWER)
    asked = SamplingParams(max_tokens=1, logprobs=0, **seen[0])  # as verl's server makes them
    assert asked.output_kind == RequestOutputKind.FINAL_ONLY
    assert not asked.detokenize


def test_verl_still_leaves_vllms_defaults() -> None:
    """When this fails, verl asks for ids itself: take `final_ids_only` out."""
    import verl

    server = Path(verl.__file__).parent / "workers" / "rollout" / "vllm_rollout" / "vllm_async_server.py"
    assert "SamplingParams(max_tokens=max_tokens, **sampling_params)" in server.read_text(encoding="utf-8")
    assert "output_kind" not in server.read_text(encoding="utf-8")


# --- where a trajectory ends


async def test_the_last_turn_runs_no_tool(rollout: Rollout):
    one = await rollout.one(*[call(str(number)) for number in range(5)])
    assert one.record.stop_reason == "turns"
    assert one.responses == ["0", "1", "2", "3"]
    assert one.said.endswith("</tool_call>" + EOS)
    assert one.mask[one.length - 1] == 1


async def test_user_turns_are_limited_as_well(rollout: Rollout):
    rollout.set("actor_rollout_ref.rollout.multi_turn.max_user_turns", 1)
    one = await rollout.one(call("1"), call("2"))
    assert one.record.stop_reason == "turns"
    assert one.responses == ["1"]


@pytest.mark.parametrize("over", [0, 1, 500])
async def test_a_turn_is_cut_exactly_at_the_budget(over: int, rollout: Rollout):
    ids = rollout.tokenizer.encode("x" * (RESPONSE + over), add_special_tokens=False)
    one = await rollout.one(ids)
    assert one.record.stop_reason == "length"
    assert one.ids == ids[:RESPONSE]
    assert one.mask == [1] * RESPONSE
    assert one.log_probs == [-0.5] * RESPONSE
    assert one.reward == -1.0


async def test_a_second_turn_is_cut_at_what_is_left(rollout: Rollout):
    one = await rollout.one(call("1"), rollout.tokenizer.encode("y" * RESPONSE, add_special_tokens=False))
    assert one.length == RESPONSE
    assert one.record.stop_reason == "length"
    assert sum(turn.tokens for turn in one.record.turns) == sum(one.mask)
    assert one.text.endswith("yyy")


@pytest.mark.parametrize("spare", [-1, 0, 1])
async def test_a_segment_that_leaves_no_room_to_answer_is_left_out(spare: int, rollout: Rollout):
    segment = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    code = "'z' * {}"

    def size(text: str) -> int:
        return len(rollout.tokenizer.encode(text, add_special_tokens=False))

    left = RESPONSE - size(call(code.format("000")) + EOS) - size(segment.format("''"))
    one = await rollout.one(call(code.format(left - spare)), [rollout.tokenizer.encode("w")[0]] * 5)
    if spare == 1:
        assert one.length == RESPONSE
        assert one.mask[-1] == 1
        assert one.text.endswith("assistant\nw")
    else:
        assert one.record.stop_reason == "length"
        assert one.text.endswith("</tool_call>" + EOS)
        assert 0 not in one.mask[: one.length]


async def test_a_turn_that_the_engine_left_open_is_closed_for_the_model(rollout: Rollout):
    ids = rollout.tokenizer.encode(call("42"), add_special_tokens=False)
    one = await rollout.one(ids, ANSWER)
    assert one.text.startswith(call("42") + EOS + "\n<|im_start|>user")
    assert one.mask[: len(ids) + 1] == [1] * len(ids) + [0]


async def test_a_prompt_that_is_too_long_names_the_cure(rollout: Rollout):
    def overlong(count: int) -> DataProto:
        made = make_prompts(count)
        for row in range(count):
            made.non_tensor_batch["raw_prompt"][row] = [{"role": "user", "content": "q" * PROMPT}]
        return made

    rollout.make_prompts = overlong
    with pytest.raises(DataError, match="filter_overlong_prompts"):
        await rollout.batch([ANSWER])


# --- our own infrastructure fails: masked, never fatal, never mixed with the model's mistakes


def lost(trajectory: Trajectory) -> None:
    assert trajectory.mask == [0] * RESPONSE
    assert trajectory.length >= 1
    assert len(trajectory.log_probs) == RESPONSE
    assert trajectory.reward == 0.0
    assert trajectory.extra["infra_failed"] is True
    assert trajectory.extra["verdict"] == "infra_failed"
    assert trajectory.record.infra_error


FAULTS = {
    "no sandbox can be made": FaultScript(create_errors=dict.fromkeys(range(1, 100), SandboxUnavailableError("down"))),
    "a run is not answered": FaultScript(run_errors={1: SandboxUnavailableError("502")}),
    "the sandbox dies": FaultScript(die_after_runs=0),
    "an error that nobody mapped": FaultScript(run_errors={1: OSError(28, "No space left on device")}),
    "a create that nobody mapped": FaultScript(create_errors={1: UnicodeEncodeError("utf-8", "x", 0, 1, "no")}),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_trajectory_without_a_sandbox_is_masked_and_the_others_go_on(fault: str, rollout: Rollout):
    rollout.backend = FakeBackend(FAULTS[fault])
    output = await rollout.batch([call("1"), ANSWER], [ANSWER], [ANSWER])
    rows = [Trajectory(rollout.tokenizer, output, row) for row in range(3)]
    lost(rows[0])
    assert rows[0].said == ""
    assert all(set(row.extra) == set(rows[0].extra) for row in rows)
    assert [row.reward for row in rows[1:]] == [1.0, 1.0]
    numbers, records = rollout.take(output)
    assert numbers["infra_failed"] == 1
    assert numbers["accuracy"] == 1.0
    assert [record["infra_failed"] for record in records] == [True, False, False]


async def test_what_was_sampled_before_the_failure_is_recorded_but_not_trained_on(rollout: Rollout):
    rollout.backend = FakeBackend(FaultScript(run_errors={2: SandboxUnavailableError("502")}))
    output = await rollout.batch([call("1"), call("2"), ANSWER], [ANSWER])
    one = Trajectory(rollout.tokenizer, output, 0)
    lost(one)
    assert one.statuses == ["ok", "infra_failed"]
    assert one.text.count("<tool_call>") == 2


@pytest.mark.parametrize("before", [[], [call("1")]])
async def test_an_engine_that_gives_no_token_is_our_failure(before: list[str], rollout: Rollout):
    output = await rollout.batch([*before, []], [ANSWER])
    one = Trajectory(rollout.tokenizer, output, 0)
    lost(one)
    assert one.record.stop_reason == "aborted"
    rollout.take(output)


async def test_one_valid_member_is_enough_for_a_batch(rollout: Rollout):
    rollout.backend = FakeBackend(FaultScript(run_errors=dict.fromkeys(range(1, 9), SandboxUnavailableError("502"))))
    output = await rollout.batch(*([[call("1")]] * 7), [ANSWER])
    numbers, records = rollout.take(output)
    assert (numbers["trajectories"], numbers["infra_failed"], numbers["accuracy"]) == (8, 7, 1.0)
    assert len(records) == 8
    assert not set(LOOP_FIELDS) & set(output.non_tensor_batch)


async def test_a_batch_that_is_all_lost_is_on_disk_with_its_cause(rollout: Rollout):
    rollout.backend = FakeBackend(
        FaultScript(run_errors={1: SandboxUnavailableError("x"), 2: SandboxUnavailableError("x")})
    )
    output = await rollout.batch([call("1")], [call("1")])
    numbers, records = rollout.take(output)
    assert (numbers["infra_failed"], numbers["n_valid"]) == (2, 0)
    assert {record["infra_error"] for record in records} == {"SandboxUnavailableError: x"}


class BrokenTool(BaseTool):
    """A tool of someone else's; `faults` says what each method does."""

    faults: ClassVar[dict[str, Any]] = {}
    released: ClassVar[list[str]] = []

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema) -> None:
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name

    def _answer(self, method: str, good: Any) -> Any:
        fault = self.faults.get(method, good)
        if isinstance(fault, Exception):
            raise fault
        return fault

    async def create(self, instance_id: str | None = None, **_: Any) -> Any:
        return self._answer("create", (f"their-{instance_id}", ToolResponse()))

    async def execute(self, instance_id: str, parameters: dict, **_: Any) -> Any:
        assert instance_id.startswith("their-train-3-")
        return self._answer("execute", (ToolResponse(text="42"), 0.0, {}))

    async def release(self, instance_id: str, **_: Any) -> Any:
        self.released.append(instance_id)
        return self._answer("release", None)


@pytest.fixture
def broken(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    faults: dict[str, Any] = {}
    monkeypatch.setattr(BrokenTool, "faults", faults)
    monkeypatch.setattr(BrokenTool, "released", [])
    schema = OpenAIFunctionToolSchema.model_validate(yaml.safe_load(TOOL_FILE.read_text())["tools"][0]["tool_schema"])
    monkeypatch.setattr(our_loop, "initialize_tools_from_config", lambda path: [BrokenTool({}, schema)])
    return faults


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        ("create", RuntimeError("no")),
        ("create", None),
        ("create", "an id alone"),
        ("execute", RuntimeError("no")),
        ("execute", None),
        ("execute", (None, 0.0, {})),
        ("execute", (b"bytes", 0.0, {})),
        ("execute", "text"),
    ],
)
async def test_a_tool_that_breaks_costs_one_trajectory(method: str, fault: Any, rollout: Rollout, broken):
    broken[method] = fault
    one = await rollout.one(call("1"), ANSWER)
    lost(one)
    assert len(BrokenTool.released) == (method == "execute")


@pytest.mark.parametrize("fault", [RuntimeError("no"), "anything"])
async def test_a_release_that_breaks_costs_nothing(fault: Any, rollout: Rollout, broken):
    broken["release"] = fault
    one = await rollout.one(call("1"), ANSWER)
    assert one.responses == ["42"]
    assert one.reward == 1.0


@pytest.mark.parametrize("facts", [None, [], {"status": "error"}])
async def test_a_tools_facts_may_be_missing(facts: Any, rollout: Rollout, broken):
    broken["execute"] = (ToolResponse(text=None), None, facts)
    one = await rollout.one(call("1"), ANSWER)
    assert one.responses == [""]
    assert one.reward == 1.0


async def test_ten_megabytes_are_cut_before_they_are_tokens(rollout: Rollout, broken):
    broken["execute"] = (ToolResponse(text="\ud800" + "x" * 10_000_000), 0.0, {})
    rollout.set("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", 300)
    one = await rollout.one(call("1"), ANSWER)
    assert len(one.responses[0]) == 300
    assert one.responses[0].startswith("?xx")
    assert one.reward == 1.0


async def test_ten_megabytes_of_the_models_own_output_are_cut(rollout: Rollout):
    rollout.set("actor_rollout_ref.rollout.multi_turn.max_tool_response_length", 300)
    one = await rollout.one(call("print('y' * 10_000_000)"), ANSWER)
    assert len(one.responses[0]) == 300
    assert one.reward == 1.0


async def test_a_cancelled_rollout_leaves_no_sandbox(rollout: Rollout):
    rollout.backend = FakeBackend(FaultScript(run_delay_s=30))
    task = asyncio.create_task(rollout.batch([call("1")], [call("1")]))
    while rollout.backend.runs < 2:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not rollout.backend.alive


async def test_the_worker_tells_the_loop_step_and_validation(rollout: Rollout):
    engine = ScriptedEngine(rollout.tokenizer, [[ANSWER]])
    worker = Worker(rollout.config, rollout.tokenizer, engine, SessionPool(rollout.backend))
    prompts = make_prompts(1)
    prompts.meta_info = {"global_steps": 12, "validate": True}
    output = await worker.generate_sequences(prompts)
    assert Trajectory(rollout.tokenizer, output, 0).record.trajectory_id.startswith("val-12-p-0-")


# --- verl's padding of a validation batch


async def test_rows_that_verl_added_as_padding_are_not_recorded(rollout: Rollout):
    output = await rollout.batch(*([[ANSWER]] * 4))
    prompts = make_prompts(4)
    prompts.meta_info["validate"] = True
    prompts.non_tensor_batch["uid"][:] = ["a", "b", "c", "a"]
    taken = take_records(prompts, output, run_dir=rollout.run_dir, run_id="r", copies=1)
    assert taken.numbers["trajectories"] == taken.numbers["n_valid"] == 3
    assert taken.lost == [False] * 3
    records = list(read_records(rollout.run_dir, validation=True))
    assert [record["group"] for record in records] == ["a", "b", "c"]
    assert [record["prompt"] for record in records] == [QUESTION] * 3


# --- the faults of verl 0.6.1 that all this is for; a test that fails here says that a cure may go


def verls_loop(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolAgentLoop, "_class_initialized", False)
    target = f"{ToolAgentLoop.__module__}.{ToolAgentLoop.__qualname__}"
    monkeypatch.setitem(verl_agent_loop._agent_loop_registry, "tool_agent", OmegaConf.create({"_target_": target}))


async def verls(rollout: Rollout, *script: str) -> tuple[str, DataProto]:
    output = await rollout.batch(script)
    length = int(output.batch["attention_mask"][0, PROMPT:].sum())
    return rollout.tokenizer.decode(output.batch["responses"][0, :length].tolist()), output


async def test_verl_drops_the_newline_after_a_turn(rollout: Rollout, monkeypatch):
    verls_loop(rollout, monkeypatch)
    text, _ = await verls(rollout, call("1"), ANSWER)
    assert f"</tool_call>{EOS}<|im_start|>user" in text


async def test_verl_makes_an_instance_per_call(rollout: Rollout, monkeypatch):
    verls_loop(rollout, monkeypatch)
    text, _ = await verls(rollout, call("x = 1"), call("x"), ANSWER)
    assert "NameError" in text


async def test_verl_drops_a_call_that_cannot_be_read(rollout: Rollout, monkeypatch, caplog):
    verls_loop(rollout, monkeypatch)
    text, output = await verls(rollout, '<tool_call>\n{"name": "code_interpreter", }\n</tool_call>', ANSWER)
    assert "tool_response" not in text
    assert output.non_tensor_batch["__num_turns__"].tolist() == [2]


async def test_verl_runs_one_call_of_a_turn_by_default_and_ignores_the_rest(rollout: Rollout, monkeypatch):
    default = OmegaConf.load(verl_file("trainer/config/rollout/rollout.yaml"))
    assert default.multi_turn.max_parallel_calls == 1
    verls_loop(rollout, monkeypatch)
    rollout.set("actor_rollout_ref.rollout.multi_turn.max_parallel_calls", 1)
    text, _ = await verls(rollout, call("1") + call("2"), ANSWER)
    assert text.count("<tool_response>") == 1


async def test_verl_lets_a_tool_without_response_end_the_batch(rollout: Rollout, monkeypatch, broken):
    verls_loop(rollout, monkeypatch)
    monkeypatch.setattr(
        "verl.experimental.agent_loop.tool_agent_loop.initialize_tools_from_config",
        our_loop.initialize_tools_from_config,
    )
    monkeypatch.setattr(BrokenTool, "create", _plain_create)
    broken["execute"] = (None, 0.0, {})
    monkeypatch.setattr(BrokenTool, "execute", _plain_execute)
    with pytest.raises(AttributeError, match="text"):
        await rollout.batch([call("1"), ANSWER], [ANSWER])


async def _plain_create(self: BrokenTool, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
    return "one", ToolResponse()


async def _plain_execute(self: BrokenTool, instance_id: str, parameters: dict, **_: Any) -> Any:
    return self._answer("execute", None)


def test_verls_default_cuts_at_256_characters():
    assert OmegaConf.load(verl_file("trainer/config/rollout/rollout.yaml")).multi_turn.max_tool_response_length == 256


def test_verls_default_agent_loop_is_single_turn():
    assert (
        OmegaConf.load(verl_file("trainer/config/rollout/rollout.yaml")).agent.default_agent_loop == "single_turn_agent"
    )


@pytest.mark.parametrize("code", ["a\nb", r"\pi", "</tool_call>"])
async def test_verls_parser_drops_what_ours_repairs(code: str, byte_tokenizer, caplog):
    text = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "' + code + '"}}\n</tool_call>'
    ids = byte_tokenizer.encode(text)
    _, calls = await HermesToolParser(byte_tokenizer).extract_tool_calls(ids)
    assert calls == []


def verl_file(name: str) -> Path:
    import verl

    return Path(verl.__file__).parent / name


def test_verl_waits_for_a_tool_for_ever():
    # The fault: one call that is never answered stalls the step. When this fails, verl has a deadline of its own.
    source = inspect.getsource(ToolAgentLoop._call_tool)
    assert "await tool.execute(" in source
    assert not any(word in source for word in ("wait_for", "timeout"))
