"""One trajectory: the model speaks, its tool calls run in one sandbox session, until it answers.

Differences from verl 0.6.1's ToolAgentLoop, each a row of the table in verl_ext/README.md: one session per
trajectory; calls that cannot be read are answered instead of dropped; environment segments equal the full
template's; a failing sandbox masks the trajectory; the trajectory is recorded.

Deadlines, and who pays for each:

- a call's (the tool's `call_timeout_s`): code that was seen running is told that it timed out and goes on with
  a fresh interpreter; a service that said nothing costs the trajectory, masked.
- the trajectory's (`verl_ext.trajectory_timeout_s`, without the time spent waiting for a sandbox) and the
  step's (`verl_ext.step_timeout_s`, with it): the trajectory is masked, whatever it was doing. It may have been
  the model's slowness or ours; a wrong verdict would teach, a missing one does not.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.tools.utils.tool_registry import initialize_tools_from_config

from verl_ext.agent_loop.chat import ChatSegments, Message
from verl_ext.agent_loop.deadline import Deadline
from verl_ext.agent_loop.tool_calls import MalformedCall, ToolCall, parse_tool_calls
from verl_ext.errors import DataError
from verl_ext.tools.observation import printable, shorten
from verl_ext.trajectory import CallRecord, LoopRecord, TurnRecord

logger = logging.getLogger(__name__)

RECORD_FIELD = "trajectory_record"
RELEASE_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class TrajectoryContext:
    """What verl tells an agent loop worker about a row but not the loop: set by our worker.

    Attributes:
        step: of the training.
        validation: whether the row is a validation's.
        step_ends_s: `time.monotonic` at which the step's deadline passes.
    """

    step: int
    validation: bool
    step_ends_s: float = float("inf")


CONTEXT: ContextVar[TrajectoryContext | None] = ContextVar("verl_ext_trajectory", default=None)


class CodeInterpreterLoop(AgentLoopBase):
    """verl's agent loop `tool_agent`, over the tools of `multi_turn.tool_config_path`."""

    tokenizer: Any
    tools: dict[str, BaseTool]
    chat: ChatSegments
    engine_params: dict[str, Any]
    uses_tools = True

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Build what all trajectories of this process share; verl calls it for each of them."""
        if cls._class_initialized:
            return
        rollout = config.actor_rollout_ref.rollout
        path = rollout.multi_turn.tool_config_path if cls.uses_tools else None
        cls.tools = {tool.name: tool for tool in (initialize_tools_from_config(path) if path else [])}
        schemas = [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in cls.tools.values()]
        cls.chat = ChatSegments(tokenizer, schemas, config.data.get("apply_chat_template_kwargs") or {})
        cls.prompt_length = rollout.prompt_length
        cls.response_length = rollout.response_length
        cls.max_assistant_turns = rollout.multi_turn.max_assistant_turns or 1_000_000
        cls.max_user_turns = rollout.multi_turn.max_user_turns or 1_000_000
        cls.max_calls_per_turn = rollout.multi_turn.max_parallel_calls
        cls.max_response_chars = rollout.multi_turn.max_tool_response_length
        cls.engine_params = final_ids_only() if rollout.name == "vllm" else {}
        cls.trajectory_timeout_s = float(config.verl_ext.get("trajectory_timeout_s") or "inf")
        cls._class_initialized = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Roll out one trajectory.

        Args:
            sampling_params: verl's, passed on to the server.
            kwargs: the data row; `raw_prompt` is the list of messages, `sampling_seed` where there is one the seed of
                the first turn, of which each further one's is one more.

        Returns:
            verl's output; `extra_fields` always has the same keys: `final_text`, `assistant_text`,
            `tool_calls`, `tool_errors`, `parse_failures`, `num_turns`, `infra_failed`, and the record as JSON.

        Raises:
            DataError: the prompt, tools included, is longer than `prompt_length` tokens.
        """
        trajectory_id = _trajectory_id(kwargs)
        prompt_ids = self.chat.prompt(list(kwargs["raw_prompt"]))
        if len(prompt_ids) > self.prompt_length:
            raise DataError(
                f"the prompt of {trajectory_id} has {len(prompt_ids)} tokens with the tool's schema, more than "
                f"{self.prompt_length}: set data.filter_overlong_prompts=True or raise data.max_prompt_length"
            )
        context = CONTEXT.get()
        deadline = Deadline(self.trajectory_timeout_s, context.step_ends_s if context else float("inf"))
        state = _State(prompt_ids, LoopRecord(trajectory_id), deadline, seed=kwargs.get("sampling_seed"))
        try:
            async with deadline:
                if await self._open_tools(state):
                    await self._converse(state, sampling_params)
        except TimeoutError:
            if not deadline.expired:
                raise
            state.fail("deadline", f"the deadline of {deadline.passed} passed")
        finally:
            # Within bounds too: what ends a sandbox goes on by itself if nobody waits for it.
            releases = [
                self._release(name, instance_id, trajectory_id) for name, instance_id in state.instances.items()
            ]
            await asyncio.gather(*releases)
        return self._output(state)

    async def _release(self, name: str, instance_id: str, trajectory_id: str) -> None:
        action = asyncio.wait_for(self.tools[name].release(instance_id), RELEASE_TIMEOUT_S)
        await _attempt(action, f"release of {name} for {trajectory_id}")

    async def _open_tools(self, state: _State) -> bool:
        """Whether every tool has an instance for this trajectory; if not, the trajectory is lost."""
        trajectory_id = state.record.trajectory_id
        for name, tool in self.tools.items():
            made = await _attempt(tool.create(instance_id=trajectory_id), f"create of {name} for {trajectory_id}")
            match made:
                case (str() as instance_id, _):
                    state.instances[name] = instance_id
                case _:
                    state.fail("infra_failed", f"the tool {name} could not be opened; the worker's log has the cause")
                    return False
        return True

    async def _converse(self, state: _State, sampling_params: dict[str, Any]) -> None:
        assistant_turns = user_turns = 0
        while True:
            ids = await self._generate(state, sampling_params)
            assistant_turns += 1
            if not ids:
                # The engine aborted the request; nothing was sampled that could be trained on.
                return state.fail("aborted", "the engine returned no token")
            if state.left(self.response_length) <= 0:
                return state.stop("length")
            calls = self._calls(ids)
            if not calls:
                return state.stop("answered")
            if assistant_turns >= self.max_assistant_turns or user_turns >= self.max_user_turns:
                return state.stop("turns")
            records = await self._run_calls(calls, state)
            state.record.turns[-1].calls.extend(records)
            if any(record.status == "infra_failed" for record in records):
                return state.fail("infra_failed", state.cause or "the tool failed; the worker's log has the cause")
            messages: list[Message] = [{"role": "tool", "content": record.response} for record in records]
            segment = self.chat.segment(messages, turn_is_closed=ids[-1] == self.chat.turn_end_id)
            if len(segment) >= state.left(self.response_length):
                return state.stop("length")
            state.append(segment, mask=0)
            user_turns += 1

    def _calls(self, ids: list[int]) -> list[ToolCall | MalformedCall]:
        if not self.tools:
            return []
        said = ids[:-1] if ids[-1] == self.chat.turn_end_id else ids
        return parse_tool_calls(self.tokenizer.decode(said, skip_special_tokens=False))

    async def _generate(self, state: _State, sampling_params: dict[str, Any]) -> list[int]:
        started_s = time.monotonic()
        output = await self.server_manager.generate(
            request_id=state.request_id,
            prompt_ids=state.prompt_ids + state.response_ids,
            sampling_params=sampling_params | self.engine_params | state.seed_of_turn(),
        )
        elapsed_s = time.monotonic() - started_s
        # verl asks for max_model_len, which is more than what is left of the response.
        left = state.left(self.response_length)
        ids = list(output.token_ids)[:left]
        state.append(ids, mask=1, log_probs=list(output.log_probs)[:left] if output.log_probs else None)
        state.generate_s += elapsed_s
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        state.record.turns.append(TurnRecord(text=text, tokens=len(ids), generate_s=elapsed_s))
        return ids

    async def _run_calls(self, calls: Sequence[ToolCall | MalformedCall], state: _State) -> list[CallRecord]:
        """Run the calls in order, since they share one interpreter; stops at the first infra failure."""
        records: list[CallRecord] = []
        started_s = time.monotonic()
        for position, call in enumerate(calls):
            if position >= self.max_calls_per_turn:
                text = f"Not run: at most {self.max_calls_per_turn} calls are run in one turn."
                name = call.name if isinstance(call, ToolCall) else ""
                records.append(CallRecord(name, "", "not_run", text))
                continue
            record = await self._run_call(call, state)
            records.append(record)
            if record.status == "infra_failed":
                break
        state.tool_s += time.monotonic() - started_s
        return records

    async def _run_call(self, call: ToolCall | MalformedCall, state: _State) -> CallRecord:
        if isinstance(call, MalformedCall):
            text = (
                f"The tool call could not be read: {call.reason}. "
                'Write {"name": ..., "arguments": {...}} as JSON between <tool_call> and </tool_call>.'
            )
            return CallRecord("", call.reason, "malformed", text)
        arguments = json.dumps(call.arguments, default=str)
        tool = self.tools.get(call.name)
        if tool is None:
            text = f"There is no tool {call.name[:80]!r}. Tools: {', '.join(self.tools)}."
            return CallRecord(printable(call.name[:80]), arguments, "unknown_tool", text)
        started_s = time.monotonic()
        what = f"{call.name} for {state.record.trajectory_id}"
        with state.deadline.only_the_steps():
            result = await _attempt(tool.execute(state.instances[call.name], call.arguments), what)
        elapsed_s = time.monotonic() - started_s
        match result:
            case (ToolResponse() as response, _, facts):
                facts = facts if isinstance(facts, dict) else {}
                status, state.cause = str(facts.get("status", "ok")), str(facts.get("cause", ""))
                state.deadline.put_off(float(facts.get("waited_s", 0.0)))
            case _:
                return CallRecord(call.name, arguments, "infra_failed", "", elapsed_s)
        # Our own tool has cut its output already; this is for tools that have not.
        text = shorten(printable(response.text or ""), self.max_response_chars)
        return CallRecord(call.name, arguments, status, text, elapsed_s)

    def _output(self, state: _State) -> AgentLoopOutput:
        record = state.record
        if not state.response_ids:
            # verl cannot pad an empty response: one masked token stands for it.
            state.append([self.chat.turn_end_id], mask=0)
        masked = bool(record.infra_error)
        calls = list(record.calls())
        malformed = sum(call.status == "malformed" for call in calls)
        num_turns = 1 + len(record.turns) + sum(bool(turn.calls) for turn in record.turns)
        return AgentLoopOutput(
            prompt_ids=state.prompt_ids,
            response_ids=state.response_ids,
            response_mask=[0] * len(state.response_ids) if masked else state.response_mask,
            response_logprobs=state.log_probs if self.config.actor_rollout_ref.rollout.calculate_log_probs else None,
            num_turns=num_turns,
            metrics=AgentLoopMetrics(generate_sequences=state.generate_s, tool_calls=state.tool_s),
            extra_fields={
                "final_text": record.final_text,
                "assistant_text": record.assistant_text,
                "tool_calls": len(calls) - malformed,
                "tool_errors": sum(
                    call.status in ("error", "timeout", "bad_arguments", "unknown_tool") for call in calls
                ),
                "parse_failures": malformed,
                "num_turns": num_turns,
                "infra_failed": masked,
                RECORD_FIELD: record.to_json(),
            },
        )


class ToollessLoop(CodeInterpreterLoop):
    """The same without any tool: the prompt names none, and the first turn is the answer.

    verl's agent loop `no_tool`, by which an evaluation asks what the model can do alone.
    """

    _class_initialized = False  # verl keeps what a class shares in the class, and this one's is its own
    uses_tools = False


def final_ids_only() -> dict[str, Any]:
    """vLLM's sampling parameters for what a rollout needs: the ids, once, at the end.

    verl 0.6.1 leaves vLLM's defaults: text is decoded and an output object is handed over for each token of each
    request, in the one process that serves all of them. verl reads the last output's ids and nothing else
    (verl/workers/rollout/vllm_rollout/vllm_async_server.py@v0.6.1, generate).
    """
    from vllm.sampling_params import RequestOutputKind

    return {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}


class _State:
    """Ids, mask and log-probs of one trajectory while it grows; the three lists have one length."""

    def __init__(self, prompt_ids: list[int], record: LoopRecord, deadline: Deadline, seed: int | None) -> None:
        self.prompt_ids = prompt_ids
        self.record = record
        self.deadline = deadline
        self.seed = seed
        self.cause = ""  # of the last call that our infrastructure failed
        self.request_id = uuid4().hex
        self.instances: dict[str, str] = {}  # by name of the tool
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.log_probs: list[float] = []
        self.generate_s = 0.0
        self.tool_s = 0.0

    def left(self, response_length: int) -> int:
        return response_length - len(self.response_ids)

    def seed_of_turn(self) -> dict[str, int]:
        """vLLM's own seed of the next request; {} where the engine's order decides, as in training."""
        return {} if self.seed is None else {"seed": int(self.seed) + len(self.record.turns)}

    def append(self, ids: list[int], *, mask: int, log_probs: list[float] | None = None) -> None:
        self.response_ids += ids
        self.response_mask += [mask] * len(ids)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(ids)

    def stop(self, reason: str) -> None:
        self.record.stop_reason = reason

    def fail(self, reason: str, error: str) -> None:
        self.record.stop_reason = reason
        self.record.infra_error = error


async def _attempt(action: Awaitable[Any], what: str) -> Any:
    """What a tool's own code gave, or None if it raised: verl 0.6.1 would let that end the whole batch."""
    try:
        return await action
    except Exception:  # a tool is foreign code, and whatever it raises may cost one trajectory only
        logger.exception("%s raised", what)
        return None


def _trajectory_id(row: dict[str, Any]) -> str:
    """A name that is unique in the run and says where the trajectory belongs."""
    context = CONTEXT.get()
    where = f"{'val' if context.validation else 'train'}-{context.step}" if context else "loop"
    extra_info = row.get("extra_info")
    problem = str(extra_info.get("index", "")) if isinstance(extra_info, dict) else ""
    return f"{where}-{problem[:40] or 'row'}-{uuid4().hex[:8]}"
