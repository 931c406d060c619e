"""verl_ext.prompt_length and verl_ext.parquet_files: what is counted, and where the template is found."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_ext.errors import ConfigurationError
from verl_ext.parquet_files import files, footer, prompts_longer_than, total_rows
from verl_ext.prompt_length import PromptLengths, chat_template


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
