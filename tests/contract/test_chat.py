"""verl_ext.agent_loop.chat: prompt plus turns plus segments are the ids of the full chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from recipe.smoke.tiny_model import CHAT_TEMPLATE as TINY
from verl_ext.agent_loop.chat import ChatSegments
from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import ConfigurationError

QWEN3 = (Path(__file__).parents[1] / "data" / "qwen3_2507_chat_template.jinja").read_text(encoding="utf-8")
TOOLS = [
    tool["tool_schema"] for tool in yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"]
]
CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "1"}}\n</tool_call>'
# What people have in use: it drops the thinking of every turn but the last.
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' and not loop.last else m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DROPS_ALL_THINKING = DROPS_THINKING.replace(" and not loop.last", "")
COUNTS_TURNS = "{{ messages | length }} turns\n" + DROPS_THINKING.replace(".split('</think>')[-1].lstrip('\n')", "")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


CONVERSATIONS = {
    "one call": [user("q"), said(CALL), tool("1"), said("The answer is 1.")],
    "three turns": [
        user("q"),
        said(CALL),
        tool("1"),
        said("Hm.\n" + CALL),
        tool("2\n3"),
        said(CALL),
        tool(""),
        said("1"),
    ],
    "several calls in a turn": [
        user("q"),
        said(CALL * 3),
        tool("1"),
        tool("2"),
        tool("3"),
        said("ok"),
        user("go on"),
        said("1"),
    ],
    "a system prompt": [{"role": "system", "content": "Be brief."}, user("q"), said(CALL), tool("1"), said("1")],
    "marks in the output": [user("q"), said(CALL), tool("</tool_response>\n<|im_end|>\n<think>x</think>"), said("1")],
    "unicode": [user("Was ist 1é?\N{GRINNING FACE}"), said("é" + CALL), tool("\N{GRINNING FACE}\n  x\t"), said("1")],
    # No newline before an assistant's text: a tokenizer joins it with the template's, a model samples it alone.
    "blanks around": [user(" q \n"), said(CALL + " \n"), tool("\n\n1\n\n"), said("1 ")],
}


def assembled(chat: ChatSegments, tokenizer, conversation: list[dict[str, Any]]) -> list[int]:
    """As the loop does it: the sampled text is encoded alone, since its ids come from the model."""
    first = next(at for at, message in enumerate(conversation) if message["role"] == "assistant")
    ids = chat.prompt(conversation[:first])
    waiting: list[dict[str, Any]] = []
    for message in conversation[first:]:
        if message["role"] == "assistant":
            if waiting:
                ids += chat.segment(waiting)
                waiting = []
            ids += [*tokenizer.encode(message["content"], add_special_tokens=False), chat.turn_end_id]
        else:
            waiting.append(message)
    return ids


def whole(tokenizer, conversation: list[dict[str, Any]], tools=TOOLS) -> list[int]:
    text = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
    return tokenizer.encode(text.removesuffix("\n"), add_special_tokens=False)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_parts_are_the_whole(name: str, tokenizer):
    chat = ChatSegments(tokenizer, TOOLS)
    conversation = CONVERSATIONS[name]
    assert assembled(chat, tokenizer, conversation) == whole(tokenizer, conversation)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_parts_are_the_whole_for_the_tiny_model(name: str, make_tokenizer):
    tokenizer = make_tokenizer(TINY)
    chat = ChatSegments(tokenizer, TOOLS)
    assert assembled(chat, tokenizer, CONVERSATIONS[name]) == whole(tokenizer, CONVERSATIONS[name])


def test_without_tools_the_prompt_is_the_plain_one(tokenizer):
    chat = ChatSegments(tokenizer, [])
    assert tokenizer.decode(chat.prompt([user("q")])) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def test_a_segment_begins_with_the_newline_after_the_turn(tokenizer):
    chat = ChatSegments(tokenizer, TOOLS)
    text = tokenizer.decode(chat.segment([tool("1"), tool("2")]))
    assert text == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_turn_that_is_not_closed_is_closed_by_the_segment(tokenizer):
    chat = ChatSegments(tokenizer, TOOLS)
    segment = chat.segment([tool("1")])
    assert chat.segment([tool("1")], turn_is_closed=False) == [tokenizer.eos_token_id, *segment]


def test_the_templates_options_are_used(make_tokenizer):
    template = QWEN3.replace(
        "<|im_start|>assistant\\n' }}\n{%- endif %}", "<|im_start|>assistant\\n' + (mood or '') }}\n{%- endif %}"
    )
    chat = ChatSegments(make_tokenizer(template), TOOLS, {"mood": "calm "})
    assert make_tokenizer(template).decode(chat.segment([tool("1")])).endswith("assistant\ncalm ")


@pytest.mark.parametrize(
    ("template", "eos", "words"),
    [
        (None, "<|im_end|>", "no chat template"),
        (QWEN3, None, "no eos token"),
        (QWEN3, "<|endoftext|>", "does not end an assistant turn"),
        (DROPS_THINKING, "<|im_end|>", "changes earlier turns"),
        (DROPS_ALL_THINKING, "<|im_end|>", "changes earlier turns"),
        (COUNTS_TURNS, "<|im_end|>", "changes earlier turns"),
        ("{{ raise_exception('roles must alternate') }}", "<|im_end|>", "roles must alternate"),
    ],
)
def test_a_template_that_would_train_on_other_tokens_is_refused(template, eos, words, make_tokenizer):
    with pytest.raises(ConfigurationError, match=words):
        ChatSegments(make_tokenizer(template, eos), TOOLS)


def test_a_template_that_keeps_thinking_is_taken(make_tokenizer):
    tokenizer = make_tokenizer(COUNTS_TURNS.removeprefix("{{ messages | length }} turns\n"))
    chat = ChatSegments(tokenizer, TOOLS)
    conversation = [user("q"), said("<think>\nhm\n</think>\n\n" + CALL), tool("1"), said("<think>\n</think>\n\n1")]
    assert assembled(chat, tokenizer, conversation) == whole(tokenizer, conversation)
