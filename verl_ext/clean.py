"""`python -m verl_ext.clean --run ID`, called by `invoke clean-sandboxes`: end what a run left behind.

Needs neither Ray nor the run's processes: the service is asked for what carries the run's label, and the run's
ledgers, where its folder is at hand, name what the service may have forgotten to list.

Exit status: 0 nothing of the run is alive; 1 something could not be ended; 2 a setting is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_ext import runs
from verl_ext.errors import ConfigurationError, SandboxError, VerlAgsError
from verl_ext.sandbox.ledger import LEDGERS, RUN_LABEL, clean_run, count_events, still_listed
from verl_ext.settings import Settings


@dataclass(frozen=True)
class Cleaned:
    """What is known of a run's sandboxes after cleaning.

    Attributes:
        created, killed: by the run itself, as its ledgers have it.
        swept: ended now, since the run had not.
        leaked: what the service still lists.
    """

    created: int
    killed: int
    swept: int
    leaked: int

    def __str__(self) -> str:
        return f"created {self.created}, killed {self.killed}, swept {self.swept}, leaked {self.leaked}"


async def clean(settings: Settings, run_id: str, run_dir: Path, *, local_url: str | None = None) -> Cleaned:
    """End what is left of a run and see that nothing is.

    Args:
        settings: the service and its key.
        run_id: the run.
        run_dir: its folder, for the ledgers; need not be there.
        local_url: of a local server that the caller started.

    Raises:
        SandboxError: the service cannot list.
    """
    from verl_ext.sandbox.e2b import E2BBackend

    backend = E2BBackend.from_settings(settings, local_url=local_url)
    try:
        report = await clean_run(backend, run_id, run_folder=run_dir / LEDGERS)
        leaked = await still_listed(backend, {RUN_LABEL: run_id})
    finally:
        await backend.aclose()
    counts = count_events(run_dir / LEDGERS)
    return Cleaned(counts["created"], counts["killed"], report.killed, len(leaked))


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="invoke clean-sandboxes", description="End what a run left.")
    parser.add_argument("--run", required=True, help="id of the run: a folder's name in runs/ under the data root")
    parser.add_argument("--data-root", default="", help="in place of VERL_EXT_DATA_ROOT")
    parser.add_argument("--env-file", default="", help="in place of ./.env")
    parser.add_argument("--json", action="store_true", help="the counts as JSON")
    options = parser.parse_args(arguments)
    try:
        settings = Settings.load(options.env_file or None, flags={"--data-root": options.data_root})
        run_id = runs.check_run_id(options.run)
        if settings.needs_own_server:
            raise ConfigurationError(
                "no E2B_API_KEY and no E2B_API_URL: sandboxes of a run's own server end with that server, so "
                "there is nothing to clean; for a service, set what the run had"
            )
        cleaned = asyncio.run(clean(settings, run_id, settings.folder("runs") / run_id))
    except SandboxError as error:
        sys.stderr.write(f"the sandboxes of {options.run} could not be ended: {error}\n")
        return 1
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(f"{json.dumps(asdict(cleaned)) if options.json else f'sandboxes of {run_id}: {cleaned}'}\n")
    return 1 if cleaned.leaked else 0


if __name__ == "__main__":
    sys.exit(main())
