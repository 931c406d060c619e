"""Recognising data by its columns, finding its files, and what a question is."""

import json
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.retool.data_files import find_files
from recipe.retool.questions import (
    CHINESE_SUFFIX,
    DAPO_PREFIX,
    DAPO_SUFFIX,
    INSTRUCTION,
    answer_kind,
    build_prompt,
    clean_question,
    language_of,
    question_key,
    same_answer_key,
)
from recipe.retool.selection import open_source
from recipe.retool.sources import AIME, DAPO, PREPARED, open_file
from verl_ext.errors import DataError


def dapo_row(question="What is 1+1?", answer: object = "2", index: object = "id-1"):
    content = f"{DAPO_PREFIX}\n\n{question}\n\n{DAPO_SUFFIX}"
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": content, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[tuple]:
    return [
        row
        for batch in open_file(path).batches()
        for row in zip(
            *(column.to_pylist() for column in (batch.prompt, batch.answer, batch.problem_id, batch.data_source)),
            strict=True,
        )
    ]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_each_schema_is_known_by_its_columns(tmp_path, name):
    aime = {"ID": "2024-I-1", "Problem": "p", "Solution": "s", "Answer": 33}
    for row, schema in ((dapo_row(), DAPO), (aime, AIME), (dapo_row() | {"agent_name": "tool_agent"}, PREPARED)):
        assert open_file(write(tmp_path / name, [row])).schema is schema


def test_further_columns_are_ignored(tmp_path):
    assert read(write(tmp_path / "a.parquet", [dapo_row() | {"note": 1}]))[0][1:] == ("2", "id-1", "math_dapo")


def test_unknown_columns_are_listed_with_the_known_schemas(tmp_path):
    with pytest.raises(DataError, match=r"found question, solution.*DAPO-Math-17k: data_source.*AIME_2024: ID.*YAML"):
        open_file(write(tmp_path / "a.parquet", [{"question": "q", "solution": "1"}]))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt", [{"text": "x"}], "list of messages"),
        ("reward_model", "2", "needs a field ground_truth"),
        ("reward_model", {"ground_truth": {"x": "2"}}, "must be a text"),
    ],
)
def test_a_known_column_of_another_shape_is_named(tmp_path, column, value, message):
    with pytest.raises(DataError, match=f"column {column}.*{message}"):
        open_file(write(tmp_path / "a.parquet", [dapo_row() | {column: value}]))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl"])
def test_numbers_become_exact_text(tmp_path, name):
    assert read(write(tmp_path / name, [dapo_row(answer=33, index=7)]))[0][1:3] == ("33", "7")


def test_integers_of_any_size_survive_jsonl(tmp_path):
    assert read(write(tmp_path / "a.jsonl", [dapo_row(answer=10**30)]))[0][1] == "1" + "0" * 30


def test_an_answer_column_of_floats_keeps_what_was_written(tmp_path):
    rows = [{"ID": str(answer), "Problem": "p", "Answer": answer} for answer in (33.0, 0.5, -3.0, None)]
    assert [row[1] for row in read(write(tmp_path / "a.parquet", rows))] == ["33", "0.5", "-3", None]
    assert [row[1] for row in read(write(tmp_path / "a.jsonl", rows))] == ["33.0", "0.5", "-3.0", None]
    with pytest.raises(DataError, match="store them as text"):
        read(write(tmp_path / "a.parquet", [{"ID": "x", "Problem": "p", "Answer": 1e17}]))


def test_verls_rows_need_no_id_and_a_plain_text_is_a_prompt(tmp_path):
    row = dapo_row() | {"extra_info": {"split": "test"}, "prompt": "What is 1+1?"}
    assert read(write(tmp_path / "a.parquet", [row])) == [("What is 1+1?", "2", None, "math_dapo")]
    del row["extra_info"]
    assert read(write(tmp_path / "a.parquet", [row])) == [("What is 1+1?", "2", None, "math_dapo")]


PUBLIC = {
    "MATH-500": {"problem": "p", "solution": "s", "answer": "1.25", "subject": "a", "level": 1, "unique_id": "u/1"},
    "HuggingFaceH4/aime_2024": {"id": 60, "problem": "p", "solution": "s", "answer": "033", "url": "u", "year": "2024"},
    "MathArena/aime_2025": {"problem_idx": 1, "problem": "p", "answer": 33, "problem_type": ["Algebra"]},
    "math-ai/aime25": {"problem": "p", "answer": "33", "id": "0"},
    "math-ai/aime24": {"id": 60, "problem": "p", "solution": "so \\boxed{033}.", "url": "u"},
    "a table of problem and answer": {"problem": "p", "answer": "33", "subset": "x"},
    "opencompass/AIME2025": {"question": "p", "answer": "33"},
}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
@pytest.mark.parametrize("name", PUBLIC)
def test_public_layouts(tmp_path, name, suffix):
    file = open_file(write(tmp_path / f"a.{suffix}", [PUBLIC[name]]))
    assert file.schema.name == name
    [(prompt, answer, problem_id, source)] = read(file.path)
    assert prompt == "p"
    assert answer in ("33", "033", "1.25")
    assert source == ("math_500" if name == "MATH-500" else "aime")
    assert problem_id == {"MATH-500": "u/1", "HuggingFaceH4/aime_2024": "60", "MathArena/aime_2025": "1",
                          "math-ai/aime25": "0", "math-ai/aime24": "60"}.get(name)  # fmt: skip


def describe(folder: Path, text: str) -> str:
    (folder / "mine.yaml").write_text(text)
    return str(folder / "mine.yaml")


GOOD = "path: mine.jsonl\nquestion: task.text\nanswer: out\ndata_source: mine\n"


def test_any_table_can_be_described(tmp_path):
    write(tmp_path / "mine.jsonl", [{"task": {"text": "q"}, "out": "7", "uid": "u1"}])
    for text, problem_id in ((GOOD, None), (GOOD + "id: uid\n", "u1")):
        [file] = open_source(describe(tmp_path, text), "train", None)
        assert file.schema.name == "described in YAML"
        [batch] = file.batches()
        assert [column.to_pylist() for column in (batch.prompt, batch.answer, batch.problem_id, batch.data_source)] == [
            ["q"], ["7"], [problem_id], ["mine"],
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("task.text", "task.txt"), "needs a field txt"),
        (GOOD.replace("task.text", "task"), "must be a text"),
        (GOOD.replace("out", "output"), "no column output .*found task, out"),
        (GOOD + "idd: uid\n", "did you mean id"),
        (GOOD.replace("answer: out\n", ""), "answer must be given"),
        (GOOD.replace("data_source: mine", "data_source: [mine]"), "data_source must be given"),
        ("just text", "holds no keys"),
        ("a: [", "cannot read"),
        (GOOD.replace("mine.jsonl", "missing.jsonl"), "no such file"),
    ],
)
def test_mistakes_in_a_description_are_named(tmp_path, text, message):
    write(tmp_path / "mine.jsonl", [{"task": {"text": "q"}, "out": "7"}])
    with pytest.raises(DataError, match=message):
        open_source(describe(tmp_path, text), "train", None)


def test_the_last_user_message_is_the_prompt(tmp_path):
    row = dapo_row()
    row["prompt"] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "old"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "new"},
    ]
    other = dapo_row() | {"prompt": [{"role": "system", "content": "only this"}]}
    assert [prompt for prompt, *_ in read(write(tmp_path / "a.parquet", [row, other]))] == ["new", None]
    assert [prompt for prompt, *_ in read(write(tmp_path / "a.parquet", [other]))] == [None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"not parquet", "cannot read .* as parquet"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"{\n", "line 1 .* is not JSON"),
        ("a.jsonl", b"[1]\n", "line 1 .* not a JSON object"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.jsonl", json.dumps(dapo_row("\ud800")).encode(), "cannot read the first row"),
        (
            "a.jsonl",
            json.dumps([dapo_row(), dapo_row("\ud800")]).encode()[1:-1].replace(b'}, {"d', b'}\n{"d'),
            "the rows",
        ),
    ],
    ids=["parquet", "empty", "json", "list", "utf8", "surrogate", "later surrogate"],
)
def test_damaged_files_are_data_errors(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name)


def test_files_behind_a_path(tmp_path):
    file = write(tmp_path / "hub" / "data" / "dapo-math-17k.parquet", [dapo_row()])
    write(tmp_path / "hub" / ".cache" / "hidden.parquet", [dapo_row()])
    write(tmp_path / "hub" / "same.jsonl", [dapo_row()])
    for source in (str(file), str(tmp_path / "hub"), f"{tmp_path / 'hub'}/", str(tmp_path / "hub" / "data")):
        assert find_files(source, "train") == [file]


def test_shards_come_in_order_and_splits_apart(tmp_path):
    names = ["train-00001-of-2.parquet", "train-00000-of-2.parquet", "test-00000-of-1.parquet"]
    for name in names:
        write(tmp_path / name, [dapo_row()])
    assert [file.name for file in find_files(str(tmp_path), "train")] == sorted(names[:2])
    assert [file.name for file in find_files(str(tmp_path), "val")] == names[2:]
    (tmp_path / names[2]).rename(tmp_path / "other.parquet")
    with pytest.raises(DataError, match=r"mixes files of several splits.*other\.parquet"):
        find_files(str(tmp_path), "val")


def test_hub_cache_folder_and_its_snapshot(tmp_path):
    cache = tmp_path / "datasets--org--name"
    old = write(cache / "snapshots" / "aaa" / "a.parquet", [dapo_row()])
    assert find_files(f"{cache}/", "train") == [old]
    new = write(cache / "snapshots" / "bbb" / "a.parquet", [dapo_row()])
    with pytest.raises(DataError, match=r"2 revisions"):
        find_files(str(cache), "train")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("bbb\n")
    assert find_files(str(cache), "train") == [new]
    assert find_files(str(old.parent), "train") == [old]


def test_hub_id_is_looked_up_under_the_data_root(tmp_path):
    with pytest.raises(DataError, match=r"invoke download --data org/name.*--data-root"):
        find_files("org/name", "train")
    with pytest.raises(DataError, match=rf"which puts it into {tmp_path}/data/raw/org--name"):
        find_files("org/name", "train", tmp_path)
    file = write(tmp_path / "data" / "raw" / "org--name" / "a.parquet", [dapo_row()])
    assert find_files("org/name", "train", tmp_path) == [file]


def test_hub_id_is_found_in_the_hubs_own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("recipe.retool.data_files._hub_cache", lambda: tmp_path)
    file = write(tmp_path / "datasets--org--name" / "snapshots" / "aaa" / "a.parquet", [dapo_row()])
    assert find_files("org/name", "train") == [file]
    with pytest.raises(DataError, match="invoke download --data org/other"):
        find_files("org/other", "train")


def test_nothing_there_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        find_files(str(tmp_path / "missing"), "train")
    with pytest.raises(DataError, match=r"no \.parquet and no \.jsonl"):
        find_files(str(tmp_path), "train")
    (tmp_path / "a.csv").touch()
    with pytest.raises(DataError, match="give a file of one of these kinds"):
        find_files(str(tmp_path / "a.csv"), "train")


def test_wrapper_and_our_instruction_come_off():
    assert clean_question(dapo_row(" q\n")["prompt"][0]["content"]).text == "q"
    assert clean_question(build_prompt("q")).text == "q"
    assert clean_question("q").text == "q"
    assert clean_question(dapo_row(f"q\n{CHINESE_SUFFIX}")["prompt"][0]["content"]).text == "q"
    assert "Answer:" not in INSTRUCTION


@pytest.mark.parametrize(
    ("broken", "whole", "repaired", "dropped"),
    [
        ("form \x0crac{m}{n}", r"form \frac{m}{n}", 1, 0),
        ("as $\\\x0crac{p}{q}$", r"as $\frac{p}{q}$", 1, 0),
        ("\\\\\x0crac12", r"\\\frac12", 1, 0),
        ("\text{I} 2 \times 3 \triangle \tfrac{1}{2}", r"\text{I} 2 \times 3 \triangle \tfrac{1}{2}", 4, 0),
        ("=\x08eta$", r"=\beta$", 1, 0),
        ("angle $\nabla ABD$", r"angle $\nabla ABD$", 1, 0),
        ("such that\n$$\nu = 1", "such that\n$$\nu = 1", 0, 0),
        ("\n\tn^n & k\n\tdraw(x)", "n^n & k\n\tdraw(x)", 0, 0),
        ("de\x0cne and \x0cnd the \x0crst", "define and find the first", 3, 0),
        ("fi\x0cve \x0cfigures", "five figures", 0, 2),
        ("di\x0bfference \x14\\le", "difference \\le", 0, 2),
        ("2 | \x0cx^2 - 9\x0c |", "2 | x^2 - 9 |", 0, 2),
        ("a\r\nb\rc", "a\nb\nc", 0, 0),
    ],
)
def test_control_characters(broken, whole, repaired, dropped):
    question = clean_question(broken)
    assert (question.text, question.repaired, question.dropped) == (whole, repaired, dropped)
    assert clean_question(question.text).text == question.text


def test_identity_of_a_question_ignores_blanks_and_unicode_form():
    assert question_key("a  b\n") == question_key("a b")
    composed = "caf\u00e9"
    assert question_key(composed) == question_key(unicodedata.normalize("NFD", composed))
    assert question_key("x\uff0by") == question_key("x+y")
    assert question_key("a b") != question_key("ab")


def test_language_and_answer_kinds():
    assert [language_of(text) for text in ("Find $x$.", "\u6c42 $x$")] == ["en", "zh"]
    kinds = [answer_kind(text) for text in ("33", "-3", "2" + "0" * 22, r"\frac12")]
    assert kinds == ["integer", "negative integer", "integer beyond 18 digits", "other"]
    assert [same_answer_key(text) for text in ("033", "-0", "-07", "x", "0")] == ["33", "0", "-7", "x", "0"]
