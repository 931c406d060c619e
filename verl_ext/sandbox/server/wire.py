"""Small JSON messages, with file descriptors, between the server, the fork server and the agents.

One message is one packet of a SOCK_SEQPACKET Unix socket. Bulk data (code, output, files) never travels
here: it has a stream of its own, whose descriptor is what a message carries.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 160_000
_MAX_FDS = 8


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep message borders."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_message(channel: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message and copies of `fds`.

    Raises:
        ValueError: the message is longer than `MAX_MESSAGE_BYTES`.
        OSError: the other side is gone.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes is longer than {MAX_MESSAGE_BYTES}: write a file instead")
    socket.send_fds(channel, [data], list(fds))


def receive_message(channel: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receive one message; None when the other side closed or sent what is not an object.

    Raises:
        BlockingIOError: the socket does not block and nothing is there.
    """
    try:
        data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE_BYTES + 1, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    except ConnectionError:
        return None, []
    try:
        message = json.loads(data) if data else None
    except ValueError:
        message = None
    if not isinstance(message, dict):
        close_fds(fds)
        return None, []
    return message, fds


def close_fds(fds: Sequence[int]) -> None:
    """Close descriptors, harmless for those that are closed already."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            continue
