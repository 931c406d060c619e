"""What the model is shown of an execution: one text, in a fixed order, cut in the middle when long."""

from __future__ import annotations

from verl_ext.sandbox.interface import Execution

NOTHING = "(no output)"


def observation_text(execution: Execution, max_chars: int) -> str:
    """Standard output, then values, pictures, standard error and the traceback, at most `max_chars` long.

    The order is that of a notebook: what was printed, what was shown, what went wrong. The traceback comes
    last so that the cut, which keeps head and tail, keeps the exception itself.
    """
    parts = [execution.stdout, *execution.results]
    if execution.png_count:
        parts.append(f"({execution.png_count} picture(s) shown; pictures are not returned)")
    parts.append(execution.stderr)
    if execution.error is not None:
        parts.append(execution.error.traceback or f"{execution.error.name}: {execution.error.value}")
    text = "\n".join(stripped for part in parts if (stripped := part.strip("\n")))
    text = printable(text)
    if execution.dropped_bytes:
        text = f"{text}\n({execution.dropped_bytes} bytes of output were not kept)"
    return shorten(text, max_chars) if text.strip() else NOTHING


def shorten(text: str, max_chars: int) -> str:
    """`text`, or its head and tail around a line that says how many characters are missing."""
    if len(text) <= max_chars:
        return text
    note = f"\n... ({len(text)} characters; the middle is cut) ...\n"
    keep = max(2, max_chars - len(note))
    head = (keep + 1) // 2
    return text[:head] + note + text[len(text) - (keep - head) :]


def printable(text: str) -> str:
    """`text` without what a tokenizer refuses (lone surrogates) or what only misleads the model (NUL, escapes)."""
    safe = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c for c in safe if c in "\n\t" or c.isprintable() or ord(c) >= 0xA0)
