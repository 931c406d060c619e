"""Output of the model's code, kept within a budget while it streams in.

Covered: a flood of small chunks, one line of many megabytes, lone surrogates and NULs (tokenizers, parquet
and terminals choke on them; each becomes U+FFFD). Memory stays below about three times the budget.
Not covered: control sequences are kept as they are; what a terminal does with them is the reader's business.
"""

from __future__ import annotations

import re

from verl_ext.sandbox.interface import ExecutionError, OutputLimits

_UNSAFE = re.compile("[\x00\ud800-\udfff]")
_NAME_MAX_BYTES = 200


def safe_text(text: str) -> str:
    """`text` without the characters that cannot be encoded or stored: each becomes U+FFFD."""
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


class CappedText:
    """Text that keeps the first and the last half of a budget of bytes, and counts what it dropped.

    Args:
        max_bytes: budget in bytes of UTF-8, at least 2.
    """

    def __init__(self, max_bytes: int) -> None:
        self._half_bytes = max(1, max_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self._trimmed_bytes = 0

    def add(self, text: str) -> None:
        """Append a chunk."""
        chunk = safe_text(text).encode()
        room = self._half_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        if not chunk:
            return
        if len(chunk) > self._half_bytes:
            self._trimmed_bytes += len(self._tail) + len(chunk) - self._half_bytes
            self._tail = bytearray(chunk[-self._half_bytes :])
            return
        self._tail += chunk
        if len(self._tail) > 2 * self._half_bytes:  # trim rarely: each trim moves the whole tail
            self._trim()

    def _trim(self) -> None:
        excess = len(self._tail) - self._half_bytes
        if excess > 0:
            del self._tail[:excess]
            self._trimmed_bytes += excess

    @property
    def dropped_bytes(self) -> int:
        """Bytes that are not in `text()`."""
        return self._trimmed_bytes + max(0, len(self._tail) - self._half_bytes)

    def text(self) -> str:
        """What was kept; where bytes were dropped, a line in the middle says how many."""
        self._trim()
        if not self._trimmed_bytes:
            return (self._head + self._tail).decode()
        # The cuts may fall inside a character; its rest is dropped in silence.
        head = self._head.decode(errors="ignore")
        tail = self._tail.decode(errors="ignore")
        return f"{head}\n[... {self._trimmed_bytes} bytes dropped ...]\n{tail}"


def cap_text(text: str, max_bytes: int) -> tuple[str, int]:
    """`text` within `max_bytes` (head and tail kept), and the number of bytes dropped."""
    capped = CappedText(max_bytes)
    capped.add(text)
    return capped.text(), capped.dropped_bytes


class OutputCollector:
    """Everything that one call of `run_code` shows, within `OutputLimits`.

    Standard output, standard error, all results together, and the error's value and traceback have one
    budget of `limits.max_bytes` each.
    """

    def __init__(self, limits: OutputLimits) -> None:
        self._max_bytes = limits.max_bytes
        self.stdout = CappedText(limits.max_bytes)
        self.stderr = CappedText(limits.max_bytes)
        self.png_count = 0
        self.error: ExecutionError | None = None
        self._results: list[str] = []
        self._results_bytes = 0
        self._dropped_bytes = 0

    def add_result(self, text: str | None) -> None:
        """Append the text of a displayed value. None (a picture without text) adds nothing."""
        if text is None:
            return
        kept, dropped = cap_text(text, self._max_bytes)
        self._dropped_bytes += dropped
        self._results.append(kept)
        self._results_bytes += len(kept.encode())
        # The last value is the one that the code ends with, so the budget is paid by the oldest.
        while self._results_bytes > self._max_bytes and len(self._results) > 1:
            size = len(self._results.pop(0).encode())
            self._results_bytes -= size
            self._dropped_bytes += size

    def set_error(self, name: str, value: str, traceback: str) -> None:
        """Note the exception that ended the code; the last one wins."""
        value, dropped_value = cap_text(value, self._max_bytes)
        traceback, dropped_traceback = cap_text(traceback, self._max_bytes)
        self._dropped_bytes += dropped_value + dropped_traceback
        self.error = ExecutionError(cap_text(name, _NAME_MAX_BYTES)[0], value, traceback)

    @property
    def results(self) -> tuple[str, ...]:
        """Texts of the displayed values, in order."""
        return tuple(self._results)

    def drop(self, size_bytes: int) -> None:
        """Count bytes that came but could not be kept at all."""
        self._dropped_bytes += size_bytes

    @property
    def dropped_bytes(self) -> int:
        """Bytes not kept, over all streams."""
        return self.stdout.dropped_bytes + self.stderr.dropped_bytes + self._dropped_bytes
