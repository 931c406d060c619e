"""From what was measured to settings for a run, and to the seconds that its steps will wait.

The estimate is a queue's: so many trajectories, each holding a place for so long, over so many places. It knows
nothing of how long the model's turns are but what it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor

from verl_ext.check.findings import FAILED, Finding

_CONTEXT_WORTH_S = 30.0  # a step may wait this long before sharing a sandbox is the better choice


@dataclass(frozen=True)
class Load:
    """What a step of the recipe asks for.

    Attributes:
        trajectories: rolled out at once.
        calls: of one trajectory.
        code_s: seconds that the code of one call runs.
        think_s: seconds that the model writes between two calls, with the sandbox idle.
    """

    trajectories: int
    calls: int = 4
    code_s: float = 0.5
    think_s: float = 10.0


@dataclass(frozen=True)
class Advice:
    """Settings, and what a step will wait with them.

    Attributes:
        mode: session mode.
        settings: environment variables and their values.
        wait_s: seconds that a step takes longer than with a sandbox for everyone, by mode.
        text: the reason.
    """

    mode: str
    settings: dict[str, str]
    wait_s: dict[str, float]
    text: str

    def to_dict(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)


def advise(findings: Sequence[Finding], load: Load, *, is_local: bool = False) -> Advice | None:
    """What follows from the findings; None if something failed, which comes first.

    Args:
        findings: all of them.
        load: what a step asks for.
        is_local: the service is the run's own server, which has no quota but this machine.
    """
    if any(finding.status == FAILED for finding in findings):
        return None
    if is_local:
        return Advice(
            "sandbox", {}, {}, "Sandboxes of a run's own server are bounded by this machine alone: no setting is needed"
        )
    known: dict[str, float] = {}
    for finding in findings:
        known |= {f"{finding.name}/{name}": value for name, value in finding.numbers.items()}
    alive = max(1, int(known.get("sandboxes at once/max_alive", 1)))
    contexts = max(1, int(known.get("size/contexts", 1)))
    create_s = known.get("latency/create_p95_s", 1.0)
    release_s = known.get("places come back/quota_release_s", 0.0)
    rate = known.get("requests/requests_per_s", 10.0)
    one_s = load.calls * (known.get("latency/run_p50_s", 0.0) + load.code_s + load.think_s)
    own_s = create_s + one_s + known.get("kill/kill_p50_s", 0.0) + release_s
    open_s = known.get("size/open_context_s", 0.5)
    waits = {
        "sandbox": _makespan_s(load.trajectories, alive, own_s) - own_s,
        "context": create_s + _makespan_s(load.trajectories, alive * contexts, open_s + one_s) - one_s,
    }
    shares = contexts > 1 and waits["sandbox"] > max(_CONTEXT_WORTH_S, waits["context"])
    mode = "context" if shares else "sandbox"
    settings = {
        "VERL_EXT_SANDBOX_MODE": mode,
        "VERL_EXT_SANDBOX_MAX_ALIVE": str(alive),
        "VERL_EXT_SANDBOX_MAX_STARTING": str(min(alive, 10)),
        # Half of what the account takes: a kill and an extension go with each create.
        "VERL_EXT_SANDBOX_CREATE_RATE_PER_S": f"{max(0.5, floor(rate / 2)):g}",
        "VERL_EXT_SANDBOX_QUOTA_RELEASE_S": f"{ceil(release_s)}",
    }
    if mode == "context":
        settings["VERL_EXT_SANDBOX_CONTEXTS"] = str(contexts)
    text = (
        f"{load.trajectories} trajectories on {alive} sandboxes: with one each, a step waits about "
        f"{waits['sandbox']:.0f} s; with {contexts} contexts to a sandbox, {waits['context']:.0f} s"
    )
    return Advice(mode, settings, waits, text)


def _makespan_s(jobs: int, places: int, one_s: float) -> float:
    return ceil(jobs / places) * one_s
