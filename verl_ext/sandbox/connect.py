"""Builds a process's pool from what the run says: settings, run folder, tool file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from verl_ext.errors import ConfigurationError
from verl_ext.sandbox.ledger import LEDGERS, RUN_LABEL, WORKER_LABEL, SandboxLedger
from verl_ext.sandbox.limiter import Limiter, Limits, LocalLimiter
from verl_ext.sandbox.pool import SessionPool
from verl_ext.settings import Settings


def run_limits(settings: Settings, workers: int) -> Limits:
    """What one run may take of the account: its stated share of the account's limits.

    Args:
        settings: the account's limits, the run's share and the session mode.
        workers: agent loop workers of the run.

    Raises:
        ConfigurationError: the share leaves no sandbox, or in mode `context` not one for each worker.
    """
    share = settings.sandbox_share
    max_alive = int(settings.sandbox_max_alive * share + 1e-9)
    what = f"VERL_EXT_SANDBOX_MAX_ALIVE {settings.sandbox_max_alive} x VERL_EXT_SANDBOX_SHARE {share:g} = {max_alive}"
    if not 0 < share <= 1:
        raise ConfigurationError(f"VERL_EXT_SANDBOX_SHARE is {share:g}: give the run's part of the account, 0 to 1")
    if max_alive < 1:
        raise ConfigurationError(f"{what} sandboxes: raise one of them")
    shared = settings.sandbox_mode == "context"
    if shared and max_alive < workers:
        raise ConfigurationError(
            f"{what} sandboxes, but in mode context each of {workers} agent loop workers holds one: set "
            f"actor_rollout_ref.rollout.agent.num_workers to {max_alive} or fewer"
        )
    return Limits(
        max_alive=max_alive,
        max_starting=max(1, int(settings.sandbox_max_starting * share)),
        create_rate_per_s=settings.sandbox_create_rate_per_s * share,
        quota_release_s=settings.sandbox_quota_release_s,
        reserved_for=workers if shared else 0,
    )


def open_pool(
    settings: Settings,
    *,
    run_dir: Path,
    run_id: str,
    worker: str,
    tool_config_path: str | None,
    limiter: Limiter | None = None,
) -> SessionPool:
    """A worker's pool over the configured service.

    Args:
        settings: which service, its key, the account's limits and the session mode.
        run_dir: the run's folder; the worker's ledger goes below it.
        run_id: the label that every sandbox of the run carries.
        worker: this process's name.
        tool_config_path: the tool's YAML; its time-outs are used.
        limiter: grants the sandboxes, for all workers of the run; None if this is the only one.

    Raises:
        ConfigurationError: the limits admit no sandbox, or the tool's file is none.
    """
    from verl_ext.sandbox.e2b import E2BBackend  # and with it the SDK: not for those who ask for the limits only

    logging.getLogger("verl_ext.sandbox").setLevel(settings.sandbox_log_level.upper())
    block = tool_block(Path(tool_config_path)) if tool_config_path else {}
    return SessionPool(
        E2BBackend.from_settings(settings),
        mode=settings.sandbox_mode,
        contexts=settings.sandbox_contexts,
        ahead=settings.sandbox_ahead,
        limiter=limiter or LocalLimiter(run_limits(settings, workers=1)),
        ttl_s=int(block.get("sandbox_ttl_s", 300)),
        call_timeout_s=float(block.get("call_timeout_s", 30)),
        acquire_timeout_s=float(block.get("acquire_timeout_s", 600)),
        run_labels={RUN_LABEL: run_id, WORKER_LABEL: worker},
        ledger=SandboxLedger(run_dir / LEDGERS, worker),
    )


def tool_block(path: Path) -> dict[str, Any]:
    """The `config:` block of the first tool in verl's tool file.

    Raises:
        ConfigurationError: the file is missing or is no tool file.
    """
    try:
        tools = yaml.safe_load(path.read_text(encoding="utf-8"))["tools"]
        return dict(tools[0]["config"])
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(f"{path} is no tool file of verl's ({error}): it needs tools[0].config") from error
