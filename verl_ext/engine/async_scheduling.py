"""Plan the engine's next step while the workers run this one.

vLLM 0.11.0 plans a step, waits for the workers' tokens, takes them in and plans the next one. With a trainer the plan
is made in a process of its own, and the GPU does nothing meanwhile. vLLM can plan ahead (`--async-scheduling`), but its
option also leaves the tokens on the GPU, and then a request that was preempted goes on with wrong ones (vLLM PR 26385
and 27756, in 0.11.1); and verl's executor cannot be asked again before it has answered.

Here only the plan is ahead: vLLM's `AsyncScheduler`, workers that know nothing of it and have each token before the
next step needs it, and an executor that takes two steps at a time. Imported where an engine is made: it imports vLLM.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import deque
from typing import Any

import cloudpickle
import zmq
from verl.workers.rollout.vllm_rollout.vllm_async_server import ExternalZeroMQDistributedExecutor

SCHEDULER = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"


class _Answer:
    """What the workers will say to one message; what vLLM asks of a future."""

    def __init__(self, executor: AsyncSchedulingExecutor) -> None:
        self._executor = executor
        self.outputs: list[Any] | None = None

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self.outputs is not None or self._executor.has_answers()

    def result(self) -> Any:
        """The first worker's output.

        Raises:
            Exception: a worker's own.
        """
        return self.all()[0]

    def all(self) -> list[Any]:
        """The outputs of all workers, in their order; waits for them."""
        while self.outputs is None:
            self._executor.receive()
        for output in self.outputs:
            if isinstance(output, Exception):
                raise output
        return self.outputs


class AsyncSchedulingExecutor(ExternalZeroMQDistributedExecutor):
    """verl's executor, of which vLLM may ask the next step before it has this one's tokens."""

    def _init_executor(self) -> None:
        self._unanswered: deque[_Answer] = deque()
        self._failed: list[Any] | None = None  # the outputs with a worker's error, the last that will come
        # AsyncScheduler cannot guess how many tokens a step of these will make (vllm/engine/arg_utils.py@v0.11.0).
        config: Any = self.vllm_config
        is_plain = config.speculative_config is None and config.parallel_config.pipeline_parallel_size == 1
        self._steps = 2 if is_plain else 1
        if self._steps > 1:
            # vLLM's engine reads it after it has made its executor. The two belong together: vLLM's own scheduler plans
            # nothing ahead for a request whose token it does not have, so the steps would only be smaller.
            config.scheduler_config.scheduler_cls = SCHEDULER
        super()._init_executor()

    @property
    def max_concurrent_batches(self) -> int:
        """Steps that may be under way."""
        return self._steps

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        **_: Any,
    ) -> list[Any]:
        """verl's; with `non_block` a list of one future instead of the workers' outputs.

        Messages are answered in their order, so one that waits for its answer has all steps before it behind it.
        """
        answer = _Answer(self)
        if self._failed is None:
            self._let_two_be_asked()
            message = _message(method, args, kwargs or {})
            for socket in self.sockets:
                socket.send_multipart([b"", message], zmq.DONTWAIT)
            self._unanswered.append(answer)
        answer.outputs = self._failed
        return [answer] if non_block else answer.all()

    def has_answers(self) -> bool:
        """Whether every worker has answered the oldest message."""
        return all(socket.poll(0) for socket in self.sockets)

    def receive(self) -> None:
        """Wait for the answers to the oldest message.

        A worker that answers with an error ends its loop (vLLMAsyncRollout._loop_forever): what it has been sent since,
        and whatever it is sent later, it never answers, so these fail with the same error.
        """
        outputs = [cloudpickle.loads(socket.recv_multipart()[-1]) for socket in self.sockets]
        self._unanswered.popleft().outputs = outputs
        if any(isinstance(output, Exception) for output in outputs):
            self._failed = outputs
            while self._unanswered:
                self._unanswered.popleft().outputs = outputs

    def shutdown(self) -> None:
        """Leave the workers, which are the trainer's.

        vLLM's would ask them to end and wait for the answer, which one that has failed, or has ended with the run,
        does not give.
        """
        for socket in self.sockets:
            socket.close(linger=0)
        self.context.term()

    def _let_two_be_asked(self) -> None:
        """A REQ socket, as verl makes it, sends nothing before it has its answer; a DEALER does."""
        for number, socket in enumerate(self.sockets):
            if socket.type == zmq.REQ:
                address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                socket.close(linger=0)
                self.sockets[number] = self.context.socket(zmq.DEALER)
                self.sockets[number].setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))
                self.sockets[number].connect(address)


def _message(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    call = (method if isinstance(method, str) else cloudpickle.dumps(method), args, kwargs)
    if method == "execute_model":
        # Only a step, which is vLLM's own classes throughout. The configuration may have one that the worker cannot
        # import, of a model's own code or of this process's main module; pickle would carry its name, and no error.
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            return pickle.dumps(call, protocol=pickle.HIGHEST_PROTOCOL)  # faster
    return cloudpickle.dumps(call)


def schedule_ahead(module: Any) -> None:
    """Let verl's server make its engine with it.

    Args:
        module: verl's vllm_async_server.
    """
    module.ExternalZeroMQDistributedExecutor = AsyncSchedulingExecutor
