"""Hermes tool calls as models really write them.

verl 0.6.1's parser is `json.loads` on each `<tool_call>` block and drops what does not parse, so that the
trajectory ends without a word to the model (HermesToolParser, verl/experimental/agent_loop/tool_parser.py).
This one repairs what has one meaning, and says what is wrong with the rest, so that the loop can answer.

Covered: raw newlines and tabs in strings, backslashes that are no JSON escape ("\\pi", "\\frac"), trailing
commas, Python literals with single quotes, `parameters` for `arguments`, arguments given as a JSON string or
as bare code, a fence around the JSON, a list of calls in one block, the literal `</tool_call>` inside the
code, a block that the end of the turn cut off. Not covered: anything that needs guessing; that is a
`MalformedCall`.
"""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Model text of any length is parsed; a block above this is refused rather than repaired.
MAX_BLOCK_CHARS = 200_000
# How many closing tags are tried for one block whose code may hold the tag itself.
MAX_CLOSINGS = 8


@dataclass(frozen=True)
class ToolCall:
    """One call that can be run."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """One block that cannot be run; `reason` is written for the model."""

    reason: str


def parse_tool_calls(text: str) -> list[ToolCall | MalformedCall]:
    """The calls in one assistant turn, in order; empty if the turn calls no tool.

    Args:
        text: the turn, decoded with or without special tokens.
    """
    calls: list[ToolCall | MalformedCall] = []
    at = 0
    while (start := text.find(OPEN, at)) != -1:
        body_start = start + len(OPEN)
        ends = _closings(text, body_start)
        if not ends:
            parsed, reason = _parse_block(re.sub(r"<\|im_end\|>\s*$", "", text[body_start:]))
            return calls + (parsed or [MalformedCall(f"the call has no closing {CLOSE}, and {reason}")])
        # The code itself may hold the closing tag: take the first end at which the block parses.
        attempts = [(end, *_parse_block(text[body_start:end])) for end in ends[:1]]
        attempts += [(end, *_parse_block(text[body_start:end])) for end in ends[1:] if not attempts[0][1]]
        end, parsed, _ = next((attempt for attempt in attempts if attempt[1]), attempts[0])
        calls += parsed or [MalformedCall(attempts[0][2])]
        at = end + len(CLOSE)
    return calls


def _closings(text: str, start: int) -> list[int]:
    """Where the first few closing tags after `start` begin."""
    found: list[int] = []
    while len(found) < MAX_CLOSINGS and (end := text.find(CLOSE, start)) != -1:
        found.append(end)
        start = end + len(CLOSE)
    return found


def _parse_block(block: str) -> tuple[list[ToolCall | MalformedCall], str]:
    """The calls of one block, or an empty list and why it cannot be read."""
    stripped = _without_fence(block.strip())
    if not stripped:
        return [], "the call is empty"
    if len(stripped) > MAX_BLOCK_CHARS:
        return [], f"the call is longer than {MAX_BLOCK_CHARS} characters"
    value, reason = _load(stripped)
    if value is None:
        return [], reason
    entries = value if isinstance(value, list) else [value]
    calls = [_as_call(entry) for entry in entries]
    return (calls, "") if calls else ([], "the list of calls is empty")


def _load(text: str) -> tuple[Any, str]:
    """The JSON value in `text` with unambiguous repairs, or None and the reason."""
    repaired = _repair_escapes(text)
    reason = ""
    for candidate in dict.fromkeys((repaired, re.sub(r",(\s*[}\]])", r"\1", repaired))):
        try:
            # strict=False allows raw newlines and tabs inside strings.
            return json.loads(candidate, strict=False), ""
        except json.JSONDecodeError as error:
            reason = reason or f"it is not valid JSON: {error.msg} at character {error.pos}"
        except (RecursionError, ValueError):
            return None, "it is nested too deeply or holds a number that is too long"
    try:
        value = ast.literal_eval(text) if len(text) < 50_000 else None
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        value = None
    return (value, "") if isinstance(value, dict | list) else (None, reason)


def _repair_escapes(text: str) -> str:
    r"""Double the backslashes that JSON would refuse or that are never meant as JSON reads them.

    `\pi` is no JSON escape. `\f` and `\b` are, but nobody writes a form feed or a backspace in code, while
    `\frac` and the regular expression `\bword` are common. `\n`, `\r`, `\t` stay what JSON says.
    """
    return re.sub(
        r'\\(?:(?P<valid>["\\/nrt]|u[0-9a-fA-F]{4})|(?=.|$))',
        lambda match: match.group(0) if match.group("valid") else "\\\\",
        text,
        flags=re.DOTALL,
    )


def _without_fence(text: str) -> str:
    fenced = re.fullmatch(r"```[\w-]*\s*\n?(.*?)\n?```", text, flags=re.DOTALL)
    return fenced.group(1).strip() if fenced else text


def _as_call(entry: Any) -> ToolCall | MalformedCall:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict):
        return MalformedCall(f"a call must be a JSON object, not {type(entry).__name__}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall('the call has no "name"')
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):
        loaded, _ = _load(arguments.strip())
        # A string that is no JSON object is the code itself: the one argument that there is.
        arguments = loaded if isinstance(loaded, dict) else {"code": arguments}
    if not isinstance(arguments, dict):
        return MalformedCall('the call has no "arguments" object')
    code = arguments.get("code")
    if isinstance(code, str):
        arguments = {**arguments, "code": _without_fence(code.replace("\r\n", "\n").strip("\n"))}
    return ToolCall(name, arguments)
