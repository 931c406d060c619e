"""Prompts are counted without transformers, and come out as transformers counts them."""

from __future__ import annotations

from pathlib import Path

import yaml

from verl_ext.compose import CONFIG_DIR
from verl_ext.prompt_length import PromptLengths

SCHEMA = yaml.safe_load((CONFIG_DIR / "tool" / "code_interpreter.yaml").read_text())["tools"][0]["tool_schema"]
CONVERSATIONS = [
    [{"role": "user", "content": "What is 7 * 6?"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "二加二是多少?\n\n$\\frac{1}{2}$ \U0001f600"},
    ],
    [{"role": "user", "content": ""}],
]


def test_counts_are_transformers_own(tokenizer, tmp_path: Path):
    template = Path(__file__).parents[1] / "data" / "qwen3_2507_chat_template.jinja"
    tokenizer.chat_template = template.read_text(encoding="utf-8")
    tokenizer.save_pretrained(tmp_path)
    for tools in ([SCHEMA], []):
        lengths = PromptLengths(tmp_path, tools, {})
        for messages in CONVERSATIONS:
            theirs = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True)
            assert lengths.count(messages) == len(theirs)
