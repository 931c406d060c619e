"""Everything the server can be told, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass, field

from .limits import Limits


@dataclass(frozen=True)
class Options:
    """Settings of one server; the command line has one flag for each.

    Attributes:
        isolation: auto, required, none, or the name of one tier that must work.
        warm: sandboxes kept ready.
        max_alive: sandboxes alive at once; None for no bound.
        quota_release_s: seconds for which a killed sandbox still counts against `max_alive`.
        create_delay_s: seconds that a create takes at least; the sandbox counts from their beginning.
        execute_delay_s: seconds before the code of an execution begins.
        request_rate: requests per second to the control plane beyond which 429 is answered; None for no bound.
        limit_as_400: answer a full account as AGS does, with 400 [LimitExceeded.SandboxInstance].
        create_rate: creates per second beyond which 429 is answered; None for no bound.
        max_output_bytes: output of one execution that is sent; the rest is dropped and the cut stated.
        max_execution_s: seconds after which an execution is interrupted.
        default_ttl_s: life of a sandbox whose request names none.
        has_faults: whether templates named fault-... inject faults.
        api_key: the only key accepted; None accepts any that is not empty.
        drop_root: with root, give each sandbox a user of its own where that user can read Python.
        limits: of one sandbox.
    """

    isolation: str = "auto"
    warm: int = 2
    max_alive: int | None = None
    quota_release_s: float = 0.0
    create_rate: float | None = None
    create_delay_s: float = 0.0
    execute_delay_s: float = 0.0
    request_rate: float | None = None
    limit_as_400: bool = False
    max_output_bytes: int = 1 << 20
    max_execution_s: float = 900.0
    default_ttl_s: int = 300
    has_faults: bool = False
    api_key: str | None = field(default=None, repr=False)
    drop_root: bool = True
    limits: Limits = field(default_factory=Limits)
