"""Every exception of ours, with the standard error each one stands for.

    VerlAgsError
    ├── ConfigurationError (ValueError)      a setting, flag or file of the user is wrong
    │   └── HubUnreachableError              the hub does not answer; the message says how to do without
    ├── DataError (ValueError)               a data set cannot be used as it is
    ├── GraderError (RuntimeError)           answers cannot be compared here; never raised for an answer
    ├── TrainingDiedError (RuntimeError)     a process of the run died; carries the cause
    ├── EngineDiedError (RuntimeError)       vLLM's engine died; carries what its worker said
    ├── CheckpointError (RuntimeError)       a checkpoint could not be made whole; older ones are as they were
    ├── AlarmStopError (RuntimeError)        an alarm that the user named ended the run
    ├── ClusterSilentError (RuntimeError)    a Ray cluster does not answer; what runs there may go on
    └── SandboxError (RuntimeError)          our infrastructure failed, never the model's code
        ├── SandboxAuthError                 key or domain refused; retrying cannot help
        ├── SandboxRequestError              request refused as wrong (template unknown, ...); no retry
        ├── SandboxQuotaError                too many sandboxes or requests; retry later
        ├── SandboxUnavailableError          service unreachable or failing; retry later
        ├── SandboxTimeoutError              our deadline passed; the sandbox is tainted
        └── SandboxDiedError                 the sandbox vanished under us; state is lost

A new error goes into this tree, keeps a message of the form "what is wrong, where: the cure", and takes
only its message as argument, so that it survives pickling (Ray carries it between processes).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self


class VerlAgsError(Exception):
    """Root of everything that this project raises on purpose."""


class ConfigurationError(VerlAgsError, ValueError):
    """A setting, flag or file of the user is wrong; the message names it and the cure."""

    @classmethod
    def listing(cls, headline: str, problems: Iterable[str]) -> Self:
        """Several problems in one error, one a line."""
        return cls(headline + ":" + "".join(f"\n  - {problem}" for problem in problems))


class HubUnreachableError(ConfigurationError):
    """The hub, or the way to it, does not answer; what was fetched already stays."""


class DataError(VerlAgsError, ValueError):
    """A data set cannot be used; the message names the file, the rows and the cure."""


class GraderError(VerlAgsError, RuntimeError):
    """The process that compares answers cannot be started; the message names the cure."""


class TrainingDiedError(VerlAgsError, RuntimeError):
    """A process of the run died; the message holds which one and its last words."""


class EngineDiedError(VerlAgsError, RuntimeError):
    """vLLM's engine died; the message holds what its worker said last."""


class CheckpointError(VerlAgsError, RuntimeError):
    """A checkpoint could not be made whole, and nothing of it is left; the older ones are as they were."""


class AlarmStopError(VerlAgsError, RuntimeError):
    """An alarm that `verl_ext.stop_on` names ended the run; the message has the alarm and the checkpoint."""


class ClusterSilentError(VerlAgsError, RuntimeError):
    """A Ray cluster's dashboard does not answer; what runs on the cluster may well go on."""


class SandboxError(VerlAgsError, RuntimeError):
    """The sandbox service or the way to it failed. Never raised for errors of the model's code."""


class SandboxAuthError(SandboxError):
    """The service refused the key, or the domain belongs to another key."""


class SandboxRequestError(SandboxError):
    """The service refused the request as wrong, for example an unknown template."""


class SandboxQuotaError(SandboxError):
    """Too many sandboxes alive or too many requests; the same call may work later."""


class SandboxUnavailableError(SandboxError):
    """The service could not be reached or answered with a fault of its own."""


class SandboxTimeoutError(SandboxError):
    """Our deadline passed in silence. Whether the call took effect is unknown, so the sandbox is tainted."""


class SandboxDiedError(SandboxError):
    """The sandbox ended under us; whatever state it held is lost."""
