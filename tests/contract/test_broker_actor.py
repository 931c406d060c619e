"""The broker as a Ray actor: grants, and is killed with SIGKILL in the middle. Starts a small Ray, no torch."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed here")

from verl_ext.agent_loop import broker_process  # noqa: E402
from verl_ext.sandbox.broker_client import BrokerClient  # noqa: E402
from verl_ext.sandbox.e2b import LOCAL_KEY, E2BBackend  # noqa: E402
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL  # noqa: E402
from verl_ext.sandbox.pool import SessionPool  # noqa: E402

# Ray does not wait for the processes that it started.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

ROOT = Path(__file__).resolve().parents[2]
MAX_ALIVE = 3


@pytest.fixture(scope="module")
def ray_with_server(server_url: str) -> Iterator[None]:
    environment = {
        "PYTHONPATH": str(ROOT), "VERL_EXT_ENV_FILE": "/dev/null", "VERL_EXT_SANDBOX_BACKEND": "local",
        "E2B_API_URL": server_url, "VERL_EXT_SANDBOX_MAX_ALIVE": str(MAX_ALIVE),
        "VERL_EXT_SANDBOX_CREATE_RATE_PER_S": "1000", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ags-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ray.init(
                num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error", _temp_dir=folder,
                runtime_env={"env_vars": environment}, object_store_memory=80 * 2**20,
            )  # fmt: skip
        yield
        ray.shutdown()


async def trajectories(pool: SessionPool, count: int) -> list[tuple[str, ...]]:
    async def one(number: int) -> tuple[str, ...]:
        async with pool.session(f"t{number}") as session:
            await session.run(f"import time; time.sleep(0.2); x = {number}")
            return (await session.run("x")).results

    return await asyncio.gather(*(one(number) for number in range(count)))


async def test_a_broker_killed_in_the_middle_is_back_and_nothing_is_lost(
    ray_with_server, server_url: str, tmp_path: Path
):
    run_id = f"broker-{uuid.uuid4().hex}"
    broker = broker_process.start(tmp_path, run_id, 1)
    pid_before, is_again, modules = await broker.handle.process.remote()
    assert not is_again
    assert not {"torch", "verl", "vllm", "transformers"} & set(modules)
    backend = E2BBackend(api_key=LOCAL_KEY, api_url=server_url, sandbox_url=server_url)
    client = BrokerClient(broker, "w0")
    labels = {RUN_LABEL: run_id, WORKER_LABEL: "w0"}
    pool = SessionPool(backend, limiter=client, run_labels=labels, ttl_s=120)
    try:
        working = asyncio.create_task(trajectories(pool, 24))
        async with asyncio.timeout(60):
            while len(await backend.list_ids(labels=labels)) < MAX_ALIVE:
                assert not working.done(), working
                await asyncio.sleep(0.01)
        os.kill(pid_before, signal.SIGKILL)
        assert await asyncio.wait_for(working, 120) == [(str(number),) for number in range(24)]
        pid_after, is_again, _ = await broker.handle.process.remote()
        assert (pid_after != pid_before, is_again) == (True, True)
        report = pool.metrics.report()
        assert (report.counts["created"], report.counts["killed"]) == (24, 24)
        assert report.peaks["alive"] <= MAX_ALIVE
    finally:
        await pool.aclose()
        await client.aclose()
        assert await backend.list_ids(labels=labels) == []
        await backend.aclose()


def test_the_processes_of_a_run_count_no_cpu(ray_with_server):
    from verl_ext.start import start_on_nodes

    class Idle:  # here, so that it goes along by value: Ray's processes do not find this file
        def ready(self) -> bool:
            return True

    # Two where Ray counts one CPU: each would hold it for as long as it lives.
    [node] = ray.nodes()
    begun = start_on_nodes(Idle, [node["NodeID"]] * 2, "idle", soft=False)
    assert ray.get([process.ready.remote() for process in begun], timeout=60) == [True, True]
    for process in begun:
        ray.kill(process)
