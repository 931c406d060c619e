"""verl_ext.check without a service: the forms of key and domain, each part over the fake, and the advice."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from verl_ext.check import account, limits, proof
from verl_ext.check import sandbox as one
from verl_ext.check.advice import Load, advise
from verl_ext.check.findings import FAILED, OK, SKIPPED, WARNING, Finding
from verl_ext.errors import SandboxAuthError, SandboxQuotaError, SandboxUnavailableError
from verl_ext.sandbox.fake import FakeBackend, FaultScript
from verl_ext.sandbox.interface import Execution
from verl_ext.sandbox.ledger import RUN_LABEL
from verl_ext.setting_values import Secret
from verl_ext.settings import Settings

LABELS = {RUN_LABEL: "check"}


def settings(**environ: str) -> Settings:
    return Settings.load(environ={"VERL_EXT_ENV_FILE": "/dev/null", **environ})


@pytest.mark.parametrize(
    ("key", "domain", "status", "words"),
    [
        ("ark_0123", "ap-guangzhou.tencentags.com", OK, "ap-guangzhou"),
        ("other-0123", "ap-guangzhou.tencentags.com", WARNING, "does not begin with ark_"),
        ("e2b_0123abcd", "e2b.app", OK, "e2b.app"),
        ("e2b_no-digits", "e2b.app", WARNING, "not e2b_ and hexadecimal"),
        ("anything", "sandboxes.example.com", OK, "sandboxes.example.com"),
    ],
)
def test_a_key_of_an_unusual_shape_is_doubted_and_never_shown(key: str, domain: str, status: str, words: str):
    found = account.check_forms(dataclasses.replace(settings(), e2b_api_key=Secret(key), e2b_domain=domain))
    assert (found.status, words in found.text) == (status, True), found
    assert key not in found.text


def test_without_a_key_the_machine_itself_is_meant():
    assert "this machine" in account.check_forms(settings()).text


async def test_an_address_that_is_none_and_a_port_that_is_shut_are_told_apart():
    nowhere = await account.check_reach(settings(), "http://no-such-host.invalid")
    assert (nowhere.status, "has no address" in nowhere.text) == (FAILED, True)
    shut = await account.check_reach(settings(), "http://127.0.0.1:9")
    assert (shut.status, "does not answer" in shut.text) == (FAILED, True)


async def test_a_refused_key_is_said_and_what_lives_is_counted_by_run():
    backend = FakeBackend()
    assert (await account.check_key(backend)).status == OK
    await backend.create(labels={RUN_LABEL: "old-run"}, ttl_s=9)
    found = await account.check_key(backend)
    assert (found.status, found.numbers["alive"]) == (WARNING, 1.0)
    assert "invoke clean-sandboxes --run old-run" in found.text

    async def refuse(*, labels):
        raise SandboxAuthError("401")

    backend.list_labels = refuse  # type: ignore[method-assign]
    assert (await account.check_key(backend)).status == FAILED


async def test_latencies_are_measured_on_what_is_there():
    backend = FakeBackend(FaultScript(create_delay_s=0.02))
    filled = await limits.fill(backend, LABELS, 2)
    found = await one.check_latency(filled.alive, filled.create_s)
    assert found.status == OK
    assert found.numbers["create_p50_s"] >= 0.02
    assert (backend.creates, backend.runs) == (2, 2 * (1 + one.RUNS))
    killed = await one.check_kills(backend, filled.alive)
    assert (killed.status, len(backend.alive), "kill_p50_s" in killed.numbers) == (OK, 0, True)


async def test_a_service_that_makes_nothing_or_runs_nothing_has_failed():
    broken = FakeBackend(
        FaultScript(create_errors=dict.fromkeys(range(1, 9), SandboxUnavailableError("no such template")))
    )
    found = limits.check_concurrency(await limits.fill(broken, LABELS, 1))
    assert (found.status, found.text) == (FAILED, "0 at once, then: no such template")
    mute = FakeBackend(FaultScript(run_errors={1: SandboxUnavailableError("502")}))
    filled = await limits.fill(mute, LABELS, 1)
    assert (await one.check_latency(filled.alive, filled.create_s)).text == "502"


async def test_behaviour_of_a_service_that_does_what_it_should(monkeypatch: pytest.MonkeyPatch):
    sandbox = await FakeBackend().create(labels=LABELS, ttl_s=9)
    original = sandbox.run_code
    # The fake's thread cannot be stopped in a sleep; what a service would give is given for it.
    late = Execution(stdout="begun\n", timed_out=True)

    async def run_code(code: str, *, timeout_s: float, context_id: str | None = None) -> Execution:
        return late if "sleep" in code else await original(code, timeout_s=timeout_s)

    sandbox.run_code = run_code  # type: ignore[method-assign]
    assert [(each.name, each.status) for each in await one.check_behaviour(sandbox)] == [
        ("state", OK), ("streaming", OK), ("deadline", OK),
    ]  # fmt: skip


async def test_behaviour_of_a_service_that_forgets_and_keeps_silent():
    backend = FakeBackend(FaultScript(answer=lambda code: Execution(timed_out="sleep" in code)))
    found = await one.check_behaviour(await backend.create(labels=LABELS, ttl_s=9))
    assert [(each.name, each.status) for each in found] == [("state", FAILED), ("streaming", WARNING), ("deadline", OK)]


async def test_packages_that_are_missing_are_named():
    answer = json.dumps(["3.12.1", {"numpy": "1.26.4"}])
    backend = FakeBackend(FaultScript(answer=lambda code: Execution(stdout=answer)))
    found = await one.check_packages(await backend.create(labels=LABELS, ttl_s=9))
    assert found.status == WARNING
    assert "numpy 1.26.4" in found.text
    assert "sympy" in found.text


async def test_contexts_are_counted_by_what_opens_and_what_memory_holds():
    def size(total: int, rss: int) -> str:
        return json.dumps({"cpus": 2, "total": total, "cgroup": 0, "rss": rss})

    for total, rss, contexts in ((8000, 100, 8), (1000, 100, 5), (150, 100, 0)):
        backend = FakeBackend(FaultScript(answer=lambda code, t=total, r=rss: Execution(stdout=size(t, r))))
        found = await one.check_size(await backend.create(labels=LABELS, ttl_s=9))
        assert found.numbers["contexts"] == contexts
    broken = FaultScript(
        context_errors={4: SandboxUnavailableError("full")}, answer=lambda code: Execution(stdout=size(8000, 100))
    )
    found = await one.check_size(await FakeBackend(broken).create(labels=LABELS, ttl_s=9))
    assert (found.numbers["contexts"], "context 4 could not be opened: full" in found.text) == (3, True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CREATES_PER_S", 1000.0)
    monkeypatch.setattr(limits, "_RETRY_S", 0.01)


async def test_the_probe_stops_at_its_bound(quick: None):
    backend = FakeBackend()
    filled = await limits.fill(backend, LABELS, 5)
    found = limits.check_concurrency(filled)
    assert (found.status, found.numbers, backend.creates) == (OK, {"max_alive": 5.0}, 5)
    assert (await limits.check_release(backend, LABELS, filled)).status == SKIPPED
    assert len((await limits.fill(FakeBackend(), LABELS, 0)).alive) == 1, "one is needed to look at"


async def test_the_probe_finds_the_cap_and_how_soon_places_come_back(quick: None):
    backend = FakeBackend(FaultScript(max_alive=3, create_delay_s=0.001))
    filled = await limits.fill(backend, LABELS, 20)
    assert limits.check_concurrency(filled).numbers == {"max_alive": 3.0, "is_cap": 1.0}
    assert backend.creates < 12, "the first refusal ends the probe"
    found = await limits.check_release(backend, LABELS, filled)
    assert (found.status, found.numbers["quota_release_s"] < 1) == (OK, True)
    await one.check_kills(backend, filled.alive)
    assert not backend.alive


async def test_places_that_do_not_come_back_in_time_are_said():
    backend = FakeBackend(FaultScript(max_alive=0))
    kept = [await FakeBackend().create(labels=LABELS, ttl_s=9)]
    found = await limits._release(backend, LABELS, kept, wait_s=0.0)
    assert (found.status, "VERL_EXT_SANDBOX_QUOTA_RELEASE_S" in found.text) == (WARNING, True)


async def test_the_rate_is_tried_and_the_first_refusal_ends_it():
    backend = FakeBackend()
    found = await limits.check_rate(backend, LABELS, 200, seconds=0.1)
    assert "200 were tried" in found.text
    asked = 0

    async def list_ids(*, labels):
        nonlocal asked
        asked += 1
        if asked > 5:
            raise SandboxQuotaError("429")
        await asyncio.sleep(0)
        return []

    backend.list_ids = list_ids  # type: ignore[method-assign]
    found = await limits.check_rate(backend, LABELS, 200, seconds=0.2)
    assert found.numbers["is_cap"] == 1.0
    assert asked < 20


# --- the advice


def measured(alive: int, contexts: int, create_s: float, **more: float) -> list[Finding]:
    return [
        Finding("latency", OK, "", {"create_p95_s": create_s, "run_p50_s": 0.05}),
        Finding("kill", OK, "", {"kill_p50_s": 0.1}),
        Finding("size", OK, "", {"contexts": contexts, "open_context_s": 0.1}),
        Finding("sandboxes at once", OK, "", {"max_alive": alive}),
        Finding("requests", OK, "", {"requests_per_s": 50}),
        Finding("places come back", OK, "", {"quota_release_s": more.get("release_s", 0.0)}),
    ]


def test_a_small_account_shares_its_sandboxes_and_a_large_one_need_not():
    small = advise(measured(10, 8, 4.0, release_s=12.3), Load(1024))
    assert small is not None
    assert small.mode == "context"
    assert small.settings == {
        "VERL_EXT_SANDBOX_MODE": "context", "VERL_EXT_SANDBOX_MAX_ALIVE": "10", "VERL_EXT_SANDBOX_MAX_STARTING": "10",
        "VERL_EXT_SANDBOX_CREATE_RATE_PER_S": "25", "VERL_EXT_SANDBOX_QUOTA_RELEASE_S": "13",
        "VERL_EXT_SANDBOX_CONTEXTS": "8",
    }  # fmt: skip
    settings(**small.settings)  # each is a setting and takes its value
    large = advise(measured(2000, 8, 4.0), Load(1024))
    assert large is not None
    assert (large.mode, large.wait_s["sandbox"]) == ("sandbox", 0.0)


def test_the_wait_is_a_queues():
    advice = advise(measured(10, 1, 4.0), Load(100, calls=4, code_s=0.5, think_s=10))
    assert advice is not None
    one_s = 4.0 + 4 * 10.55 + 0.1
    assert advice.wait_s["sandbox"] == pytest.approx(9 * one_s)
    assert advice.mode == "sandbox", "one context to a sandbox shares nothing"


def test_what_failed_comes_before_any_advice():
    assert advise([*measured(10, 8, 4.0), Finding("key", FAILED, "401")], Load(8)) is None


def test_a_server_of_ones_own_needs_no_settings():
    advice = advise(measured(10, 8, 4.0), Load(8), is_local=True)
    assert advice is not None
    assert advice.settings == {}


# --- the proof while a run starts


async def test_a_service_that_works_is_used_once_and_left_empty():
    backend = FakeBackend()
    await proof.run_one(backend, "r")
    assert backend.creates == 1
    assert await backend.list_ids(labels={proof.LABEL: "r"}) == []


async def test_a_full_account_is_waited_for_and_no_failure():
    await proof.run_one(FakeBackend(FaultScript(create_errors={1: SandboxQuotaError("full")})), "r")


@pytest.mark.parametrize(
    "script",
    [
        FaultScript(create_errors={1: SandboxUnavailableError("500: the interpreter ended before it was ready")}),
        FaultScript(run_errors={1: SandboxUnavailableError("the interpreter ended before it was ready")}),
    ],
)
async def test_a_service_that_cannot_run_code_is_told_with_its_cause(script: FaultScript):
    backend = FakeBackend(script)
    with pytest.raises(SandboxUnavailableError, match="ended before it was ready"):
        await proof.run_one(backend, "r")
    assert await backend.list_ids(labels={proof.LABEL: "r"}) == []
