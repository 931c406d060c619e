"""verl's agent loop worker, with a sandbox pool of its own and the reward computed in the same process."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop import agent_loop as verl_agent_loop
from verl.experimental.reward import RewardManagerWorker
from verl.protocol import DataProto

from verl_ext.agent_loop.loop import CONTEXT, TrajectoryContext
from verl_ext.errors import SandboxError
from verl_ext.sandbox.broker_client import BrokerCalls, BrokerClient
from verl_ext.sandbox.connect import open_pool
from verl_ext.sandbox.metrics import PoolReport
from verl_ext.settings import Settings
from verl_ext.tools import code_interpreter

_broker: BrokerCalls | None = None


def use_broker(broker: BrokerCalls | None) -> None:
    """Name the run's broker before the worker of this process is made, whose arguments are verl's."""
    global _broker
    _broker = broker


class _Colocated:
    """Stands for a Ray actor class but makes a plain object in this process."""

    def __init__(self, actor_class: Any) -> None:
        self._class = actor_class.__ray_metadata__.modified_class

    def options(self, **_: Any) -> _Colocated:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> _ColocatedActor:
        return _ColocatedActor(self._class(*args, **kwargs))


class _ColocatedActor:
    def __init__(self, target: Any) -> None:
        self._target = target

    @property
    def compute_score(self) -> Any:
        return _Method(self._target.compute_score)


class _Method:
    def __init__(self, method: Any) -> None:
        self.remote = method


def colocate_reward_worker() -> None:
    """Make agent loop workers compute rewards themselves.

    verl 0.6.1 starts one reward worker beside each agent loop worker; each imports torch again, 15 to 20 s
    of one core, to run a grader that takes microseconds. The reward loop itself is verl's, unchanged.
    """
    verl_agent_loop.RewardManagerWorker = _Colocated(RewardManagerWorker)  # type: ignore[misc]


class SandboxedAgentLoopWorker(verl_agent_loop.AgentLoopWorkerBase):
    """One process that rolls out its share of each batch; its sandboxes are ended by `close_sandboxes`.

    Args:
        config, server_handles, reward_router_address: verl's.
    """

    def __init__(self, config: Any, server_handles: list[Any], reward_router_address: str | None = None) -> None:
        colocate_reward_worker()
        super().__init__(config, server_handles, reward_router_address)  # pyright: ignore[reportArgumentType]
        name = f"agent-{socket.gethostname()}-{os.getpid()}"
        self._limiter = BrokerClient(_broker, name) if _broker is not None else None
        self._pool = open_pool(
            Settings.load(),
            run_dir=Path(config.verl_ext.run_dir),
            run_id=config.verl_ext.run_id,
            worker=name,
            tool_config_path=config.actor_rollout_ref.rollout.multi_turn.tool_config_path,
            limiter=self._limiter,
        )
        self._step_ends_s = float("inf")
        code_interpreter.use_sessions(self._pool.session)

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **kwargs: Any
    ) -> Any:
        # Each trajectory is a task of its own, so the variable is set for this one only.
        CONTEXT.set(TrajectoryContext(int(trajectory["step"]), bool(trajectory["validate"]), self._step_ends_s))
        return await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, **kwargs)

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """verl's batch in, verl's batch out; see `AgentLoopWorkerBase.generate_sequences`.

        Raises:
            SandboxAuthError, SandboxRequestError: the service refused the key or the template, so no trajectory
                can get a sandbox any more; said at once, and not when the last one has given up.
        """
        timeout_s = self.config.verl_ext.get("step_timeout_s")
        self._step_ends_s = time.monotonic() + float(timeout_s) if timeout_s else float("inf")
        with self._pool.lifecycle.watching_fatal() as refused:
            rollout = asyncio.create_task(super().generate_sequences(batch))
            waiting = asyncio.create_task(refused.wait())
            try:
                await asyncio.wait({rollout, waiting}, return_when=asyncio.FIRST_COMPLETED)
                if (fatal := self._pool.lifecycle.fatal) is not None:
                    raise fatal
                return await rollout
            finally:
                waiting.cancel()
                if not rollout.done():
                    rollout.cancel()
                    await asyncio.wait({rollout})

    def sandbox_report(self) -> PoolReport:
        """What this worker's sandboxes did since the last report."""
        return self._pool.metrics.report()

    async def probe_sandbox(self) -> str:
        """Run one line in a sandbox; "" if that works, else what is wrong."""
        try:
            async with self._pool.session("probe") as session:
                await session.run("1")
        except SandboxError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def close_sandboxes(self) -> dict[str, float]:
        """End every sandbox of this worker; the counts since it started."""
        await self._pool.aclose()
        if self._limiter is not None:
            await self._limiter.aclose()
        return self._pool.metrics.totals()
