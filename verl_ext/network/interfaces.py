"""A node's network interfaces, and what NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME choose among them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Interface:
    """One network interface.

    Attributes:
        name: as the system calls it.
        addresses: IPv4 and IPv6, without those that hold on the link only.
        up: whether it is switched on and has a cable.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool

    @property
    def is_loopback(self) -> bool:
        """Whether it leads to this machine only."""
        return bool(self.addresses) and all(is_loopback(address) for address in self.addresses)

    def __str__(self) -> str:
        state = ", ".join(self.addresses) or "no address"
        return f"{self.name} ({state if self.up else f'{state}, down'})"


def interfaces() -> tuple[Interface, ...]:
    """Every interface of this machine."""
    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Interface(
            name,
            tuple(entry.address for entry in entries if entry.family in families and "%" not in entry.address),
            name in states and states[name].isup,
        )
        for name, entries in sorted(psutil.net_if_addrs().items())
    )


def is_loopback(address: str) -> bool:
    """Whether an address leads to this machine only."""
    return address.startswith("127.") or address == "::1"


def with_address(address: str, among: Sequence[Interface]) -> Interface | None:
    """The interface that has an address."""
    return next((interface for interface in among if address in interface.addresses), None)


def chosen_by_nccl(value: str, among: Sequence[Interface]) -> list[Interface]:
    """What NCCL_SOCKET_IFNAME chooses: beginnings of names, `=` whole names, `^` all but these.

    Source: NCCL user guide, Environment Variables, NCCL_SOCKET_IFNAME.
    """
    excluded, names = _split(value.removeprefix("^")), value.startswith("^")
    exact = value.removeprefix("^").startswith("=")
    words = [word.removeprefix("=") for word in excluded]

    def is_named(interface: Interface) -> bool:
        return any(interface.name == word if exact else interface.name.startswith(word) for word in words)

    return [interface for interface in among if is_named(interface) != names]


def chosen_by_gloo(value: str, among: Sequence[Interface]) -> list[Interface]:
    """What GLOO_SOCKET_IFNAME chooses: whole names. A name that there is not makes gloo fail, beside others too.

    Source: torch 2.8 ProcessGroupGloo.cpp and init.cpp, where the list is split at commas.
    """
    return [interface for interface in among if interface.name in _split(value)]


VARIABLES: dict[str, Callable[[str, Sequence[Interface]], list[Interface]]] = {
    "nccl": chosen_by_nccl,
    "gloo": chosen_by_gloo,
}


def variable(backend: str) -> str:
    """The variable that chooses the interface of a backend of torch.distributed."""
    return f"{backend.upper()}_SOCKET_IFNAME"


def wrong_choice(backend: str, value: str, among: Sequence[Interface]) -> str:
    """Why the variable of a backend chooses nothing among these interfaces; "" if it is not set or chooses some."""
    chosen = VARIABLES[backend](value, among)
    enough = len(set(_split(value))) if backend == "gloo" else 1
    if not value or len(chosen) >= enough:
        return ""
    names = ", ".join(interface.name for interface in among)
    return f"{variable(backend)} names {value}, and this machine has {names}: unset it"


def _split(value: str) -> list[str]:
    return [word for word in value.split(",") if word]
