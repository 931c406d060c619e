"""What a kernel sends: buffered text, results and errors as JSON lines, cut at a number of bytes."""

from __future__ import annotations

import base64
import codecs
import contextlib
import io
import json
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

_FLUSH_BYTES = 16_384
_FLUSH_AGE_S = 0.05
_MIME_FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
}


def clean_text(text: str) -> str:
    """`text` without lone surrogates, which no UTF-8 client could print."""
    return text.encode("utf-8", "replace").decode("utf-8")


def result_event(data: dict[str, Any], *, is_main_result: bool) -> dict[str, Any]:
    """The E2B event for a MIME bundle; a string's quotes are taken off, as E2B does."""
    event: dict[str, Any] = {"type": "result", "is_main_result": is_main_result, "extra": {}}
    for mime, value in data.items():
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        if isinstance(value, str):
            value = clean_text(value)
        name = _MIME_FIELDS.get(mime)
        if name is None:
            event["extra"][mime] = value
        else:
            event[name] = value
    text = event.get("text")
    if text and len(text) > 1 and text[0] == text[-1] == "'":
        event["text"] = text[1:-1]
    return event


@contextlib.contextmanager
def _interrupts_put_off() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end.

    A `try` around the calls inside is not enough: Python raises it between two instructions, at the jump back of a loop
    too, which belongs to no `try`.
    """
    is_raised = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_raised or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


def _send_whole(channel: socket.socket, data: bytes) -> None:
    """Send all of `data`, waiting for a slow reader; an interrupt is raised after the line, never within it.

    The kernel's asyncio reader holds a duplicate of the socket. O_NONBLOCK belongs to what both share, so a
    full buffer is BlockingIOError here although nobody asked this socket not to block: `sendall` would stop there.
    """
    left = memoryview(data)
    room = select.poll()
    room.register(channel, select.POLLOUT)
    with _interrupts_put_off():
        while left:
            room.poll()
            with contextlib.suppress(BlockingIOError):
                left = left[channel.send(left) :]


class EventWriter:
    """Writes events from any thread; text is gathered for some milliseconds and counted against a cap."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.RLock()
        self._name = "stdout"
        self._parts: list[str] = []
        self._size = 0
        self._since = 0.0
        self._left = 2**20
        self._dropped_bytes = 0
        self._has_error = False
        self._wake_r, self._wake_w = os.pipe()
        self._is_pump_waiting = False
        self._pid = os.getpid()

    def start(self, cap_bytes: int) -> None:
        """Begin an execution that may send `cap_bytes` in all."""
        self.flush()
        with self._lock:
            self._left, self._dropped_bytes, self._has_error = cap_bytes, 0, False

    def take_dropped_bytes(self) -> int:
        """Bytes not sent since `start`."""
        with self._lock:
            return self._dropped_bytes

    def text(self, name: str, text: str) -> None:
        """Queue text of the stream `name`; a fork of the kernel writes to the captured descriptor instead."""
        if os.getpid() != self._pid:
            os.write(1 if name == "stdout" else 2, text.encode("utf-8", "replace"))
            return
        with self._lock:
            if name != self._name:
                self.flush()
                self._name = name
            if not self._parts:
                self._since = time.monotonic()
                if self._is_pump_waiting:
                    self._is_pump_waiting = False
                    os.write(self._wake_w, b"x")
            self._parts.append(text)
            self._size += len(text)
            if self._size >= _FLUSH_BYTES:
                self.flush()

    def flush(self) -> None:
        """Send the text that waits."""
        with self._lock:
            if not self._parts:
                return
            text = "".join(self._parts)
            self._parts, self._size = [], 0
            data = text.encode("utf-8", "replace")
            if len(data) > self._left:
                self._dropped_bytes += len(data) - self._left
                text = data[: self._left].decode("utf-8", "ignore")
                self._left = 0
            else:
                text = data.decode("utf-8")
                self._left -= len(data)
            for start in range(0, len(text), _FLUSH_BYTES):
                self.raw({"type": self._name, "text": text[start : start + _FLUSH_BYTES], "timestamp": time.time_ns()})

    def flush_if_old(self) -> None:
        """Send the text that waits, if it has waited long enough."""
        if self._parts and time.monotonic() - self._since >= _FLUSH_AGE_S:
            self.flush()

    def pump_timeout_ms(self) -> int | None:
        """How long the pump may sleep; with no text waiting, until `wake_fd` or a capture is readable."""
        with self._lock:
            self._is_pump_waiting = not self._parts
            return None if self._is_pump_waiting else int(_FLUSH_AGE_S * 1000)

    @property
    def wake_fd(self) -> int:
        """Readable when text came while the pump slept."""
        return self._wake_r

    def event(self, event: dict[str, Any]) -> None:
        """Send a result; it is dropped whole if it does not fit into what is left."""
        with self._lock:
            self.flush()
            size = sum(len(value) for value in event.values() if isinstance(value, str))
            if size > self._left:
                self._dropped_bytes += size
                return
            self._left -= size
            self.raw(event)

    def error(self, name: str, value: str, traceback: str) -> None:
        """Send the error that ended the cell, the first one only; each part is cut at 64 KiB."""
        if self._has_error:
            return
        self._has_error = True
        self.flush()
        cut = 65_536
        self.raw(
            {
                "type": "error",
                "name": clean_text(name[:cut]),
                "value": clean_text(value[:cut]),
                "traceback": clean_text(traceback[-cut:]),
            }
        )

    def raw(self, event: dict[str, Any]) -> None:
        """Send one line as it is."""
        line = json.dumps(event, default=str).encode() + b"\n"
        with self._lock:
            _send_whole(self._channel, line)

    def text_stream(self, name: str, fd: int) -> io.TextIOBase:
        """A replacement of sys.stdout or sys.stderr."""
        return _TextStream(self, name, fd)


class _TextStream(io.TextIOBase):
    encoding = "utf-8"  # type: ignore[assignment]
    errors = "replace"  # type: ignore[assignment]

    def __init__(self, writer: EventWriter, name: str, fd: int) -> None:
        self._writer, self.name, self._fd = writer, f"<{name}>", fd
        self._stream = name

    def write(self, text: str) -> int:  # type: ignore[override]
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if text:
            self._writer.text(self._stream, text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._writer.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._fd

    @property
    def buffer(self) -> Any:
        """Bytes written here are decoded and follow the text."""
        return _ByteStream(self)


class _ByteStream(io.RawIOBase):
    def __init__(self, text_stream: _TextStream) -> None:
        self._text_stream = text_stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:  # type: ignore[override]
        self._text_stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)


class CapturedText:
    """Text that children and C code write to a descriptor."""

    def __init__(self, fd: int, name: str, writer: EventWriter) -> None:
        self.fd = fd
        self.is_busy = False
        self._name = name
        self._writer = writer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def pump(self) -> None:
        """Read once and queue what came."""
        self.is_busy = True
        text = self._decoder.decode(os.read(self.fd, 65_536))
        if text:
            self._writer.text(self._name, text)
        self.is_busy = False
