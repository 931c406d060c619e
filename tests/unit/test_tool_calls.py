r"""verl_ext.agent_loop.tool_calls: calls as models write them; nothing raises, nothing is dropped in silence."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from verl_ext.agent_loop import tool_calls
from verl_ext.agent_loop.tool_calls import (
    CLOSE,
    MAX_BLOCK_CHARS,
    MAX_BLOCKS,
    OPEN,
    MalformedCall,
    ToolCall,
    parse_tool_calls,
)

NAME = "code_interpreter"


def block(body: str) -> str:
    return f"{OPEN}\n{body}\n{CLOSE}"


def call(code: str) -> ToolCall:
    return ToolCall(NAME, {"code": code})


def written(code: str) -> str:
    """The call with `code` between its quotes as it stands, not escaped."""
    return block('{"name": "code_interpreter", "arguments": {"code": "' + code + '"}}')


@pytest.mark.parametrize("text", ["", "The answer is 5.", "</tool_call>", "<tool_cal>{}", "a < b > c", "<tool call>"])
def test_a_turn_without_a_call_has_none(text: str):
    assert parse_tool_calls(text) == []


# What verl 0.6.1 drops or misreads, of public-faults entry 20 and facts on the hermes parser.
@pytest.mark.parametrize(
    ("text", "code"),
    [
        (written("a = 1\nprint(a)"), "a = 1\nprint(a)"),
        (written("a = 1\tb"), "a = 1\tb"),
        (written(r"r'\pi'"), r"r'\pi'"),
        (written(r"r'\frac{1}{2}'"), r"r'\frac{1}{2}'"),
        (written(r"r'\bword\b'"), r"r'\bword\b'"),
        (written(r"'\d+\.\s'"), r"'\d+\.\s'"),
        (written(r"'\user'"), r"'\user'"),
        (written(r"1 \ 2"), r"1 \ 2"),
        (written(r"print(\"x\")\nprint(1)"), 'print("x")\nprint(1)'),
        (written(r"print(\"\\n\")"), 'print("\\n")'),
        (written(r"print('\u00e9')"), "print('é')"),
        (written(f"print('{CLOSE}')"), f"print('{CLOSE}')"),
        (written(f"print('{OPEN}x{CLOSE}')"), f"print('{OPEN}x{CLOSE}')"),
        (written("```python\\nprint(1)\\n```"), "print(1)"),
        (written("```py\\nprint(1)\\n```"), "print(1)"),
        (written("```\\nprint(1)\\n```"), "print(1)"),
        (written("```print(1)```"), "print(1)"),
        (written("```python print(1)```"), "print(1)"),
        (written("```x = 1```"), "x = 1"),
        (written("\\nprint(1)\\n"), "print(1)"),
        (written("a\\r\\nb"), "a\nb"),
        (block("{'name': 'code_interpreter', 'arguments': {'code': 'print(1)'}}"), "print(1)"),
        (block(r"{'name': 'code_interpreter', 'arguments': {'code': 'r\"\d\"'}}"), r'r"\d"'),
        (block('{"name": "code_interpreter", "parameters": {"code": "print(1)"}}'), "print(1)"),
        (block('{"name": "code_interpreter", "arguments": null, "parameters": {"code": "print(1)"}}'), "print(1)"),
        (block('{"name": "code_interpreter", "arguments": "{\\"code\\": \\"print(1)\\"}"}'), "print(1)"),
        (block('{"name": "code_interpreter", "arguments": "print(1)"}'), "print(1)"),
        (block('[{"name": "code_interpreter", "arguments": {"code": "print(1)"}}]'), "print(1)"),
        (block('{"name": "code_interpreter", "arguments": {"code": "print(1)",},}'), "print(1)"),
        (block('{"name": "code_interpreter", "arguments": {"code": "f(\'a, ]\', {1,})",},}'), "f('a, ]', {1,})"),
        (block('```json\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}\n```'), "print(1)"),
        (block('{"function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}'), "print(1)"),
        (OPEN + '{"name": "code_interpreter", "arguments": {"code": "print(1)"}}' + CLOSE, "print(1)"),
        (OPEN + '{"name": "code_interpreter", "arguments": {"code": "print(1)"}}', "print(1)"),
        (OPEN + '{"name": "code_interpreter", "arguments": {"code": "print(1)"}}<|im_end|>\n', "print(1)"),
        ("First I think.\n" + written("print(1)") + "\nThen I wait.", "print(1)"),
    ],
)  # fmt: skip
def test_what_has_one_meaning_is_a_call(text: str, code: str):
    assert parse_tool_calls(text) == [call(code)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "empty"),
        ("   \n", "empty"),
        ("print(1)", "not valid JSON"),
        ("null", "null"),
        ("[]", "list of calls is empty"),
        ("3", "not int"),
        ('"code"', "not str"),
        ("[1]", "not int"),
        ('{"name": "code_interpreter"}', '"arguments"'),
        ('{"name": "code_interpreter", "arguments": [1]}', '"arguments"'),
        ('{"name": "code_interpreter", "arguments": 7}', '"arguments"'),
        ('{"arguments": {"code": "1"}}', '"name"'),
        ('{"name": "", "arguments": {}}', '"name"'),
        ('{"name": 3, "arguments": {}}', '"name"'),
        ('{"name": "code_interpreter", "arguments": {"code": "print("x")"}}', "not valid JSON"),
        ('{"name": "code_interpreter", "arguments": {"code": "1"}} and more', "not valid JSON"),
        ('{"name": "code_interpreter", "arguments": {"code": 1' + "0" * 5000 + "}}", "too long"),
        ("[" * 100_000, "nested too deeply"),
        ("{'name': 'code_interpreter', 'arguments': {(1, 2): 'x'}}", "not valid JSON"),
        ("{'name': 'code_interpreter', 'arguments': {'code': b'x'}}", "not valid JSON"),
        ("{'name': 'code_interpreter', 'arguments': {'code': {1, 2}}}", "not valid JSON"),
        ("{'name': 'code_interpreter', 'arguments': {'code': 0x" + "f" * 9000 + "}}", "not valid JSON"),
        ("x" * (MAX_BLOCK_CHARS + 1), "longer than"),
    ],
)
def test_what_needs_guessing_is_answered_with_the_reason(body: str, reason: str):
    [found] = parse_tool_calls(block(body))
    assert isinstance(found, MalformedCall)
    assert reason in found.reason
    assert len(found.reason) < 200


def test_a_call_that_is_cut_off_says_so():
    [found] = parse_tool_calls(OPEN + '\n{"name": "code_interpreter", "arguments": {"code": "print(')
    assert isinstance(found, MalformedCall)
    assert f"no closing {CLOSE}" in found.reason


def test_calls_keep_their_order_good_ones_and_bad_ones():
    text = f"{written('1')}\n{block('nonsense')}\n{written('2')}{OPEN}"
    first, second, third, fourth = parse_tool_calls(text)
    assert (first, third) == (call("1"), call("2"))
    assert isinstance(second, MalformedCall)
    assert isinstance(fourth, MalformedCall)


def test_a_list_in_one_block_is_several_calls():
    entries = [{"name": NAME, "arguments": {"code": str(number)}} for number in range(3)]
    assert parse_tool_calls(block(json.dumps(entries))) == [call("0"), call("1"), call("2")]


def test_a_bad_block_does_not_swallow_the_good_one_behind_it():
    bad, good = parse_tool_calls(block('{"name": "code_interpreter", "arguments": {"code": "x') + written("2"))
    assert isinstance(bad, MalformedCall)
    assert good == call("2")


def test_a_turn_full_of_blocks_is_read_up_to_a_limit():
    found = parse_tool_calls(written("1") * (MAX_BLOCKS + 500))
    assert len(found) == MAX_BLOCKS + 1
    assert isinstance(found[-1], MalformedCall)
    assert "the rest was not read" in found[-1].reason


def test_a_pythons_backslash_warns_nobody(recwarn: pytest.WarningsRecorder):
    parse_tool_calls(block(r"{'name': 'code_interpreter', 'arguments': {'code': '\d'}}"))
    assert not recwarn.list


# Form feed and backspace are the exception, on purpose: models mean \\frac and \\bword by them (tested above).
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\f\b"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(
    name=TEXT.filter(bool),
    arguments=st.dictionaries(TEXT.filter(lambda key: key != "code"), JSON, max_size=4),
    as_text=st.booleans(),
    ascii_only=st.booleans(),
)
@example(name="t", arguments={"a": '\\ " / \n \r \t é 😀 </tool_call> <tool_call>'}, as_text=False, ascii_only=True)
@example(name="t", arguments={"a": "\\n \\t \\u0041 \\\\ \\frac \\pi"}, as_text=True, ascii_only=False)
@example(name="t", arguments={"a": [",]", ",}", {"b": ", ]"}]}, as_text=False, ascii_only=False)
def test_any_call_that_json_wrote_comes_back_exactly(name: str, arguments: dict, as_text: bool, ascii_only: bool):
    value = {"name": name, "arguments": json.dumps(arguments) if as_text else arguments}
    text = json.dumps(value, ensure_ascii=ascii_only)
    if text.count(CLOSE) >= tool_calls.MAX_CLOSINGS:
        return
    assert parse_tool_calls(f"before {OPEN}{text}{CLOSE} after") == [ToolCall(name, arguments)]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\f\b\r"), min_size=1))
def test_any_code_that_json_wrote_comes_back(code: str):
    if code.strip() != code or code.startswith("```"):
        return
    assert parse_tool_calls(block(json.dumps({"name": NAME, "arguments": {"code": code}}))) == [call(code)]


PIECES = st.lists(
    st.sampled_from([OPEN, CLOSE, '{"name": "', NAME, '", "arguments": ', '{"code": "', '"}}', "\\", '"', "'", "`" * 3,
                     ",", "}", "]", "[", "{", "null", "\n", " ", "\x00", "\ud800", "<|im_end|>", "é", "json\n"]),
    max_size=60,
)  # fmt: skip


@given(st.text() | PIECES.map("".join))
def test_nothing_raises_and_every_block_has_an_answer(text: str):
    found = parse_tool_calls(text)
    assert bool(found) == (OPEN in text)
    for entry in found:
        assert entry.reason if isinstance(entry, MalformedCall) else json.dumps(entry.arguments)


@pytest.mark.parametrize(
    "hostile",
    [
        OPEN, CLOSE, OPEN + CLOSE, OPEN + "{" + CLOSE, OPEN + "[", "[", "{", "(", "-", '"', "'", "\\", "\\u", ",", ", ",
        "`" * 3, "`" * 3 + "a", "a", " ", "\n", "{'a':", "[1,", "1+", "not ", '{"a":"', "<|im_end|> ", "\\\"", ",]",
    ],
)  # fmt: skip
@pytest.mark.parametrize("opened", ["", OPEN, OPEN + "`" * 3, OPEN + "{'"])
@pytest.mark.timeout(60)
def test_a_megabyte_of_anything_ends(hostile: str, opened: str):
    # The time limit is for the quadratic and exponential: each of these takes well under a second.
    for closed in ("", CLOSE):
        for size in (40_000, MAX_BLOCK_CHARS - 10, 1_000_000):
            parse_tool_calls(opened + hostile * (size // len(hostile)) + closed)
