"""The nodes of a check, asked all at once; whoever does not answer in time is named and not waited for."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol

from verl_ext.errors import ConfigurationError
from verl_ext.interrupts import Interrupted
from verl_ext.network.node import CONNECT_TIMEOUT_S, NodeAgent


class Silent(str):
    """Why there is no answer."""

    __slots__ = ()


class Nodes(Protocol):
    """What a check asks.

    Attributes:
        addresses: of all nodes that should take part, in the order of their ranks.
        gone: nodes that the cluster knows and has lost, with what it says of each.
    """

    addresses: Sequence[str]
    gone: Mapping[str, str]

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
        """Call a method of NodeAgent on nodes, all at once.

        Args:
            method: its name.
            arguments: by address; only these nodes are asked.
            timeout_s: after which a node is taken to be silent.

        Returns:
            By address what it answered, or a Silent.
        """
        ...

    def close(self) -> None:
        """Let go of the nodes."""
        ...


class ThisMachine:
    """One node: the machine that the command runs on."""

    gone: Mapping[str, str] = {}

    def __init__(self, gpus: int) -> None:
        self.addresses: Sequence[str] = ["127.0.0.1"]
        self._agent = NodeAgent(self.addresses[0], gpus)

    def ask(self, method: str, arguments: Mapping[str, Sequence[Any]], timeout_s: float) -> dict[str, Any]:
        """As in Nodes."""
        answers: dict[str, Any] = {}
        with ThreadPoolExecutor(1) as beside:
            for address, values in arguments.items():
                future = beside.submit(getattr(self._agent, method), *values)
                try:
                    wait([future], timeout_s)
                except Interrupted:
                    self._agent.close()  # or the thread would be waited for until the ranks' deadline
                    raise
                answers[address] = future.result() if future.done() else Silent(f"no answer within {timeout_s:.0f} s")
        return answers

    def close(self) -> None:
        """As in Nodes."""
        self._agent.close()


def check_address(address: str) -> None:
    """Whether somebody listens there: Ray itself would try for minutes.

    Raises:
        ConfigurationError: nobody does, or it is no address of a cluster: HOST:PORT, or auto.
    """
    if "://" in address:
        raise ConfigurationError(
            f"{address} is the address of Ray's dashboard or client, and the check is a part of the cluster: run it on "
            "one of its nodes with --address auto, or as a job: ray job submit -- invoke check-network --address auto"
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit():
        raise ConfigurationError(f"{address} is no address of a Ray cluster: write HOST:PORT, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"nothing answers at {address} ({error}): is the head running (`ray status` there), and is this the "
            "address that `ray start --head` said?"
        ) from error
