r"""Hermes tool calls as models really write them.

verl 0.6.1's parser is `json.loads` on each `<tool_call>` block and drops what does not parse, so that the
trajectory ends without a word to the model (HermesToolParser, verl/experimental/agent_loop/tool_parser.py).
This one repairs what has one meaning, and says what is wrong with the rest, so that the loop can answer.

Covered: raw newlines and tabs in strings, backslashes that are no JSON escape ("\pi", "\frac"), trailing
commas, Python literals with single quotes, `parameters` for `arguments`, arguments given as a JSON string or
as bare code, a fence around the JSON, a list of calls in one block, the literal `</tool_call>` inside the
code, a block that the end of the turn cut off. Not covered: anything that needs guessing; that is a
`MalformedCall`.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Model text of any length is parsed; a block above this is refused rather than repaired.
MAX_BLOCK_CHARS = 200_000
MAX_LITERAL_CHARS = 50_000
# How many closing tags are tried for one block whose code may hold the tag itself.
MAX_CLOSINGS = 8
# A model that repeats itself fills a turn with blocks; no loop runs that many.
MAX_BLOCKS = 64


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
    at = blocks = 0
    while (start := text.find(OPEN, at)) != -1:
        blocks += 1
        if blocks > MAX_BLOCKS:
            return [*calls, MalformedCall(f"the turn has more than {MAX_BLOCKS} calls, and the rest was not read")]
        body_start = start + len(OPEN)
        ends = _closings(text, body_start)
        if not ends:
            parsed, reason = _parse_block(text[body_start:].rstrip().removesuffix("<|im_end|>"))
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
    for repair in (str, _without_trailing_commas):
        try:
            # strict=False allows raw newlines and tabs inside strings.
            value = json.loads(repair(repaired), strict=False)
            return (value, "") if value is not None else (None, "it is null")
        except json.JSONDecodeError as error:
            reason = reason or f"it is not valid JSON: {error.msg} at character {error.pos}"
        except (RecursionError, ValueError):
            return None, "it is nested too deeply or holds a number that is too long"
    value = _python_literal(text)
    return (value, "") if value is not None else (None, reason)


def _python_literal(text: str) -> dict[str, Any] | list[Any] | None:
    """The dict or list that `text` is in Python's syntax, or None; only what JSON could say as well."""
    if text[:1] not in ("{", "[") or len(text) > MAX_LITERAL_CHARS:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash that is no escape stays a backslash, which is right here
            value = ast.literal_eval(text)
        # Keys that are tuples, bytes, sets and the like have no meaning as arguments.
        return json.loads(json.dumps(value))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def _without_trailing_commas(text: str) -> str:
    """`text` without commas before a closing bracket, strings left as they are."""
    # A string that never ends takes the rest, so that no quote inside it is tried again.
    pattern = r'("(?:[^"\\]|\\.)*+"?)|,(\s*[}\]])'
    return re.sub(pattern, lambda match: match.group(1) or match.group(2), text, flags=re.DOTALL)


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
    """What is between ``` and ``` if that is all there is, without the language's name."""
    if len(text) < 6 or not (text.startswith("```") and text.endswith("```")):
        return text
    inner = text[3:-3]
    first, newline, rest = inner.partition("\n")
    if newline and re.fullmatch(r"[\w+-]*\s*", first):
        inner = rest
    elif not newline:
        inner = re.sub(r"^(?:python3?|py|json)\s+", "", inner)
    return inner.rstrip() if newline else inner.strip()


def _as_call(entry: Any) -> ToolCall | MalformedCall:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict):
        return MalformedCall(f"a call must be a JSON object, not {type(entry).__name__}")
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        return MalformedCall('the call has no "name"')
    arguments = entry.get("arguments")
    if arguments is None:
        arguments = entry.get("parameters")
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
