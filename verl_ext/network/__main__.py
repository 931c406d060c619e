"""`python -m verl_ext.network`: exit status 1 if something is wrong with the network, 2 with the request.

130 and 143: ended by Ctrl-C and SIGTERM, with everything that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from verl_ext.errors import VerlAgsError
from verl_ext.gpus import visible_gpus
from verl_ext.interrupts import Interrupted, interruptible
from verl_ext.network import report
from verl_ext.network.check import check
from verl_ext.network.nodes import Nodes, ThisMachine, check_address
from verl_ext.settings import foreign


def main(arguments: Sequence[str]) -> int:
    """Check, and print tables or JSON."""
    parser = argparse.ArgumentParser(
        prog="invoke check-network", description="An all-reduce over all ranks, each pair timed before."
    )
    parser.add_argument("--address", default="", help="of a Ray cluster: HOST:PORT or auto; default: RAY_ADDRESS")
    parser.add_argument("--backend", default="", choices=("", "nccl", "gloo"), help="default: nccl if there are GPUs")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="after which the ranks are ended, default 120")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    say = Console(stderr=True).print
    try:
        with (
            interruptible(),
            contextlib.closing(
                _nodes(options.address or foreign("RAY_ADDRESS") or "", on_gpus=options.backend != "gloo")
            ) as nodes,
        ):
            finding = check(nodes, say, options.timeout_s, backend=options.backend)
    except Interrupted as interrupted:
        sys.stderr.write(f"ended by {signal.Signals(interrupted.signum).name}\n")
        return 128 + interrupted.signum
    except VerlAgsError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if options.json:
        sys.stdout.write(report.to_json(finding) + "\n")
    else:
        report.show(finding, Console())
    return 1 if finding.problems else 0


def _nodes(address: str, *, on_gpus: bool) -> Nodes:
    if not address:
        return ThisMachine(len(visible_gpus()) if on_gpus else 0)
    check_address(address)
    from verl_ext.network.ray_nodes import RayNodes

    return RayNodes(address, on_gpus=on_gpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
