"""verl_ext.prompt_length and verl_ext.parquet_files: tokens as transformers counts them, and only where needed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from verl_ext.compose import CONFIG_DIR
from verl_ext.errors import ConfigurationError
from verl_ext.parquet_files import files, footer, prompts_longer_than, total_rows
from verl_ext.prompt_length import PromptLengths, chat_template

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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "a"}, "a"),
        ({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]}, "b"),
        ({"chat_template": [{"name": "default", "template": "a"}]}, "a"),
    ],
)
def test_the_template_is_found_where_it_may_be(config: dict, expected: str, tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert chat_template(tmp_path) == expected
    (tmp_path / "chat_template.jinja").write_text("of its own")
    assert chat_template(tmp_path) == "of its own"


@pytest.mark.parametrize("config", ["{}", '{"chat_template": []}', "no json", '{"chat_template": [1]}', "[]"])
def test_a_folder_without_template_is_told(config: str, tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ConfigurationError, match="chat template"):
        chat_template(tmp_path)


def test_the_templates_special_tokens_and_arguments_are_given(tmp_path: Path):
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ thinking }}{{ tools | tojson }}")
    assert PromptLengths(tmp_path, ["é"], {"thinking": "on"}).render([]) == '<s></s>on["é"]'


def test_only_long_prompts_are_looked_at(tmp_path: Path):
    path = tmp_path / "x.parquet"
    prompts = [
        [{"role": "user", "content": "a" * 10}],
        [{"role": "system", "content": "b" * 30}, {"role": "user", "content": "c" * 30}],
        [],
        None,
        [{"role": "user", "content": None}],
        [{"role": "user", "content": "é" * 30}],
    ]
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=2)
    assert list(prompts_longer_than(path, 50)) == [prompts[1], prompts[5]]
    assert list(prompts_longer_than(path, 1000)) == []


def test_footers_of_what_is_there(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    (tmp_path / "bad.parquet").write_text("PAR1")
    assert footer(path) is not None
    assert footer(tmp_path / "bad.parquet") is footer(tmp_path / "gone.parquet") is footer(tmp_path) is None
    assert total_rows([str(path), str(path)]) == 4
    assert total_rows([str(path), str(tmp_path / "gone.parquet")]) is total_rows([]) is total_rows(None) is None


def test_files_are_one_or_many():
    assert files("~/a.parquet") == [Path("~/a.parquet").expanduser()]
    assert files(["/a", "/b"]) == [Path("/a"), Path("/b")]
    assert files(5) == files(None) == files({"a": 1}) == []
