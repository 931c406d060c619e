"""Builds a process's pool from what the run says: settings, run folder, tool file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import yaml

from verl_ext.errors import ConfigurationError
from verl_ext.sandbox.e2b import E2BBackend
from verl_ext.sandbox.ledger import RUN_LABEL, WORKER_LABEL, SandboxLedger
from verl_ext.sandbox.pool import SessionPool
from verl_ext.settings import Settings

LEDGERS = "sandboxes"


def open_pool(
    settings: Settings, *, run_dir: Path, run_id: str, worker: str, share: int, tool_config_path: str | None
) -> SessionPool:
    """A pool over the configured service, with this worker's share of the account's limits.

    Args:
        settings: which service, its key and the account's limits.
        run_dir: the run's folder; the worker's ledger goes below it.
        run_id: the label that every sandbox of the run carries.
        worker: this process's name.
        share: how many workers divide the account's limits among them.
        tool_config_path: the tool's YAML; its time-outs are used.

    Raises:
        ConfigurationError: the account allows fewer sandboxes than there are workers.
    """
    if settings.sandbox_max_alive < share:
        raise ConfigurationError(
            f"VERL_EXT_SANDBOX_MAX_ALIVE is {settings.sandbox_max_alive}, but {share} agent loop workers share it: "
            f"set actor_rollout_ref.rollout.agent.num_workers to {settings.sandbox_max_alive} or fewer"
        )
    logging.getLogger("verl_ext.sandbox").setLevel(settings.sandbox_log_level.upper())
    block = tool_block(Path(tool_config_path)) if tool_config_path else {}
    return SessionPool(
        E2BBackend.from_settings(settings),
        max_alive=settings.sandbox_max_alive // share,
        create_rate_per_s=settings.sandbox_create_rate_per_s / share,
        ttl_s=int(block.get("sandbox_ttl_s", 300)),
        call_timeout_s=float(block.get("call_timeout_s", 30)),
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
