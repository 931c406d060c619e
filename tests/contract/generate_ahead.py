"""Greedy answers of one vLLM engine on a CPU whose executor is verl's (`verl`) or ours (`ahead`), as a line of JSON.

    python tests/contract/generate_ahead.py ahead MODEL

The worker is in a thread and answers as verl's does (vLLMAsyncRollout._loop_forever). There is room in the KV cache for
a part of what is asked, so requests are preempted, and answers end at different lengths, by a token or by a limit.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import threading
from typing import Any

import verl_ext.cpu  # noqa: F401 - before vLLM is imported

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip

import torch
import zmq
from verl.workers.rollout.vllm_rollout.vllm_async_server import ExternalZeroMQDistributedExecutor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.worker.worker_base import WorkerWrapperBase

from verl_ext.engine.async_scheduling import AsyncSchedulingExecutor

REQUESTS, BLOCKS, BLOCK_TOKENS = 24, 32, 16


def serve(socket: Any, store: str) -> None:
    wrapper: Any = None
    while True:
        method, args, kwargs = pickle.loads(socket.recv())
        try:
            if method == "init_worker":
                args[0][0] |= {"rank": 0, "local_rank": 0, "distributed_init_method": f"file://{store}"}
                wrapper = WorkerWrapperBase(vllm_config=args[0][0]["vllm_config"])
                answer = wrapper.init_worker(args[0])
            elif method == "load_model":
                answer = wrapper.load_model()
            else:
                answer = wrapper.execute_method(method, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as verl does
            answer = error
        socket.send(pickle.dumps(answer))


def main(name: str, model: str) -> None:
    folder = tempfile.mkdtemp()
    socket = zmq.Context.instance().socket(zmq.REP)
    os.environ["VERL_VLLM_ZMQ_ADDRESSES"] = f"ipc://{folder}/worker"
    socket.bind(os.environ["VERL_VLLM_ZMQ_ADDRESSES"])
    threading.Thread(target=serve, args=(socket, f"{folder}/store"), daemon=True).start()

    llm = LLM(
        model, dtype="float32", max_model_len=256, max_num_seqs=64, enforce_eager=True, skip_tokenizer_init=True,
        num_gpu_blocks_override=BLOCKS, block_size=BLOCK_TOKENS, seed=0,
        distributed_executor_backend=AsyncSchedulingExecutor if name == "ahead" else ExternalZeroMQDistributedExecutor,
    )  # fmt: skip
    core: Any = llm.llm_engine.engine_core
    executor = core.engine_core.model_executor
    most = 1
    if name == "ahead":
        receive = executor.receive

        def counted() -> None:
            nonlocal most
            most = max(most, len(executor._unanswered))
            receive()

        executor.receive = counted
    waiting, preempted = core.engine_core.scheduler.waiting, []
    prepend = waiting.prepend_request
    waiting.prepend_request = lambda request: (preempted.append(request.request_id), prepend(request))
    generator = torch.Generator().manual_seed(1)
    prompts = [
        TokensPrompt(prompt_token_ids=torch.randint(5, 300, (8 + number,), generator=generator).tolist())
        for number in range(REQUESTS)
    ]
    asked = [
        SamplingParams(temperature=0.0, max_tokens=20 + 4 * number, logprobs=0, detokenize=False,
                       stop_token_ids=list(range(5, 9)), ignore_eos=True)
        for number in range(REQUESTS)
    ]  # fmt: skip
    answers = [output.outputs[0] for output in llm.generate(prompts, asked, use_tqdm=False)]
    print(json.dumps({
        "tokens": [list(answer.token_ids) for answer in answers],
        "log_probs": [[one[token].logprob for one, token in zip(answer.logprobs or [], answer.token_ids, strict=True)]
                      for answer in answers],
        "preempted": len(preempted), "most_under_way": most,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # the worker's thread has no end
