"""`python -m verl_ext.sandbox.server`: the local sandbox server on the command line.

The first line of standard output is one JSON object,
`{"event": "ready", "url": ..., "isolation": ..., "pid": ...}`; everything else goes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import contextmanager

import uvicorn

from verl_ext.errors import ConfigurationError

from .app import build_app
from .limits import Limits
from .options import Options
from .processes import birth
from .registry import Registry
from .tiers import Tier

log = logging.getLogger("verl_ext.sandbox.server")
_PARENT_EVERY_S = 0.25
_KEEP_ALIVE_S = 330  # the SDK keeps idle connections for 300 s and must never meet a closed one


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(prog="python -m verl_ext.sandbox.server", description=__doc__)
    defaults, limits = Options(), Limits()
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on; beyond loopback also give --api-key")
    add("--port", type=int, default=0, help="port, 0 for any free one")
    add("--isolation", default="auto", choices=["auto", "required", *Tier], help="see verl_ext/sandbox/server/tiers.py")
    add("--warm", type=int, default=defaults.warm, help="sandboxes kept ready")
    add("--max-alive", type=int, help="sandboxes alive at once; more are answered 429")
    add("--quota-release-s", type=float, default=0.0, help="how long a killed sandbox still counts")
    add("--create-rate", type=float, help="creates per second; more are answered 429")
    add("--create-delay-s", type=float, default=0.0, help="that a create takes at least")
    add("--execute-delay-s", type=float, default=0.0, help="before the code of an execution begins")
    add("--request-rate", type=float, help="requests to the control plane per second; more are answered 429")
    add("--limit-as-400", action="store_true", help="answer a full account as AGS does")
    add("--max-output-bytes", type=int, default=defaults.max_output_bytes, help="of one execution")
    add("--max-execution-s", type=float, default=defaults.max_execution_s, help="then it is interrupted")
    add("--memory-mib", type=int, default=limits.memory_mib, help="of one process; a sandbox may use twice this")
    add("--cpu-s", type=int, default=limits.cpu_s, help="CPU seconds of one process")
    add("--file-mib", type=int, default=limits.file_mib, help="of one file, and of /tmp and home in bubblewrap")
    add("--max-processes", type=int, default=limits.max_processes, help="of one sandbox")
    add("--keep-root", action="store_true", help="with root: do not give each sandbox a user of its own")
    add("--api-key", help="the only key accepted (default: any)")
    add("--faults", action="store_true", help="templates named fault-... inject faults")
    add("--parent-pid", type=int, help="end when this process ends")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    return parser


def options_from(arguments: argparse.Namespace) -> Options:
    """The options that the flags say."""
    limits = Limits(
        memory_mib=arguments.memory_mib,
        cpu_s=arguments.cpu_s,
        file_mib=arguments.file_mib,
        max_processes=arguments.max_processes,
    )
    return Options(
        isolation=arguments.isolation,
        warm=arguments.warm,
        max_alive=arguments.max_alive,
        quota_release_s=arguments.quota_release_s,
        create_rate=arguments.create_rate,
        create_delay_s=arguments.create_delay_s,
        execute_delay_s=arguments.execute_delay_s,
        request_rate=arguments.request_rate,
        limit_as_400=arguments.limit_as_400,
        max_output_bytes=arguments.max_output_bytes,
        max_execution_s=arguments.max_execution_s,
        has_faults=arguments.faults,
        api_key=arguments.api_key,
        drop_root=not arguments.keep_root,
        limits=limits,
    )


class _Server(uvicorn.Server):
    """uvicorn, with signals left to us."""

    @contextmanager
    def capture_signals(self):  # type: ignore[override]
        yield


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal, or the parent's end.

    Raises:
        ConfigurationError: the isolation asked for does not work here, or the address cannot be had.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    watch = asyncio.create_task(_watch_parent(arguments.parent_pid, stop)) if arguments.parent_pid else None
    listener = _listen(arguments.host, arguments.port)
    registry = Registry(options_from(arguments))
    try:
        await registry.start()
        _say_isolation(registry)
        config = uvicorn.Config(
            build_app(registry),
            log_config=None,
            log_level=arguments.log_level,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn gives no event
            await asyncio.sleep(0.005)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        ready = {"event": "ready", "url": url, "isolation": str(registry.fork_server.tier), "pid": os.getpid()}
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({serving, stopping}, return_when="FIRST_COMPLETED")
        await registry.close()
        server.should_exit = True
        await serving
    finally:
        if watch is not None:
            watch.cancel()
        await registry.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's delay (40 ms a call) off only where it is.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
        return listener
    except OSError as exc:
        listener.close()
        raise ConfigurationError(f"cannot listen on {host}:{port} ({exc}): choose another --port") from exc


async def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    born = birth(pid)
    while born is not None and birth(pid) == born:  # noqa: ASYNC110 - see birth
        await asyncio.sleep(_PARENT_EVERY_S)
    stop.set()


def _say_isolation(registry: Registry) -> None:
    tier = registry.fork_server.tier
    for reason in registry.fork_server.passed_over:
        log.warning("isolation passed over - %s", reason)
    if tier is Tier.NONE:
        log.warning("isolation NONE: NOTHING is contained. The model's code runs with every right of this server.")
    elif tier is Tier.RLIMITS:
        log.warning("isolation rlimits: the model's code can use the network and read this user's files")
    else:
        log.info("isolation %s", tier)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = build_parser().parse_args(argv)
    level = getattr(logging, arguments.log_level.upper())
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(serve(arguments))
    except ConfigurationError as exc:
        log.error("%s", exc)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
