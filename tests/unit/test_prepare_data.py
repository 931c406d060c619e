"""The command that prepares data: what is kept and why not, the hash, the report, and the user's mistakes."""

import copy
import json
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.retool.aime import SAMPLES, AimeProblem, known_problems, word_pairs
from recipe.retool.prepare_data import main, prepare
from recipe.retool.prepared import HASH_KEY, load_report
from recipe.retool.questions import DAPO_PREFIX, DAPO_SUFFIX, INSTRUCTION, build_prompt, question_key
from recipe.retool.selection import Limits
from verl_ext.data_hash import content_hash
from verl_ext.errors import ConfigurationError, DataError
from verl_ext.parquet_files import footer

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"
DAPO_SAMPLE = SAMPLES / "dapo_sample.parquet"
ANSWERS = {one.problem_id: one.answer for one in known_problems() if one.data_source == "aime_2024"}


def row(question: str, answer: str | None, index: str | None = "same id") -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{DAPO_PREFIX}\n\n{question}\n\n{DAPO_SUFFIX}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write(path: Path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.fixture
def aime(tmp_path) -> str:
    """The known ids and answers over texts of our own, since the real ones may not be shipped."""
    rows = [
        {"ID": key, "Problem": f"A made-up problem, {key}.", "Solution": "", "Answer": int(answer)}
        for key, answer in ANSWERS.items()
    ]
    return write(tmp_path / "aime.parquet", rows)


def rows_of(out: Path, split: str = "train") -> list[dict]:
    return pq.read_table(out / f"{split}.parquet").to_pylist()


@pytest.fixture(autouse=True)
def quick_picture(request, monkeypatch):
    """The picture is drawn where a test asks for it: it costs more than all the rest."""
    if "real_picture" not in request.fixturenames:
        monkeypatch.setattr("recipe.retool.prepared.draw_report", lambda report, path: path.write_bytes(b"picture"))


@pytest.fixture
def real_picture():
    return None


def test_rows_are_in_verls_schema(tmp_path, aime):
    prepare(write(tmp_path / "t.parquet", [row("What is 1+1?", "2", "id-1")]), aime, tmp_path / "out")
    assert rows_of(tmp_path / "out") == [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is 1+1?\n\n{INSTRUCTION}"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "2", "style": "rule"},
            "extra_info": {"index": "id-1", "split": "train", "language": "en"},
            "agent_name": "tool_agent",
        }
    ]
    val = rows_of(tmp_path / "out", "val")
    assert {entry["extra_info"]["index"]: entry["reward_model"]["ground_truth"] for entry in val} == ANSWERS
    assert {entry["data_source"] for entry in val} == {"aime_2024"}


def test_every_row_left_out_has_a_cause(tmp_path, aime):
    train = [
        row("What is 1+1?", "2", "a"),
        row("What is  1+1?\n", "02", "b"),
        row("What is 1\uff0b1?", "2", "c"),
        row("What is 1+1?", "2", "d"),
        row("Twice asked", "3"),
        row("Twice  asked", "4"),
        row("\u6c42 $x$", "-7"),
        row("No answer", None),
        row("", "5"),
        row("A made-up problem, 2024-I-1.", "204"),
        row("Large", "2" + "0" * 22),
        row("Large again", "3"),
        row("One too many", "3"),
    ]
    report = prepare(write(tmp_path / "t.parquet", train), aime, tmp_path / "out", limits=Limits(3, "en"))
    side = report["train"]
    assert side["rows_left_out"] == {
        "beyond max rows": 1,
        "conflicting": 2,
        "duplicate": 3,
        "empty": 2,
        "in validation": 1,
        "language": 1,
    }
    assert side["rows_raw"] == 13 == side["rows_kept"] + sum(side["rows_left_out"].values())
    assert side["questions_conflicting"] == 1
    assert side["conflicts"] == [{"index": "same id", "answers": {"3": 1, "4": 1}, "question": "Twice asked"}]
    assert side["answer_kinds"] == {"integer": 2, "integer beyond 18 digits": 1}
    kept = rows_of(tmp_path / "out")
    assert [entry["reward_model"]["ground_truth"] for entry in kept] == ["2", "2" + "0" * 22, "3"]
    assert [entry["extra_info"]["index"] for entry in kept][:2] == ["a", "same id"]
    assert len({entry["extra_info"]["index"] for entry in kept}) == 3


def test_rows_of_several_batches_and_files_are_counted_as_of_one(tmp_path, aime, monkeypatch):
    rows = [row(f"q{number % 7}", str(number % 7), str(number)) for number in range(50)]
    whole = prepare(write(tmp_path / "t.parquet", rows), aime, tmp_path / "whole")
    monkeypatch.setattr("recipe.retool.sources.BATCH_ROWS", 4)
    shards = tmp_path / "shards"
    shards.mkdir()
    write(shards / "train-0.parquet", rows[:23])
    write(shards / "train-1.parquet", rows[23:])
    split = prepare(str(shards), aime, tmp_path / "split")
    assert split["train"]["rows_left_out"] == whole["train"]["rows_left_out"] == {"duplicate": 43}
    assert split["train"]["content_sha256"] == whole["train"]["content_sha256"]


def test_same_input_gives_the_same_bytes_and_our_output_is_an_input(tmp_path, aime, real_picture):
    first = prepare(str(DAPO_SAMPLE), aime, tmp_path / "a")
    prepare(str(DAPO_SAMPLE), aime, tmp_path / "b")
    for name in ("train.parquet", "val.parquet", "report.json", "report.txt", "report.png"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "different questions" in (tmp_path / "a" / "report.txt").read_text()
    again = prepare(str(tmp_path / "a"), str(tmp_path / "a"), tmp_path / "c")
    for side in ("train", "val"):
        assert again[side]["content_sha256"] == first[side]["content_sha256"]
    assert again["val"]["aime_checked"] == {"answers_right": 30, "texts_known": 0, "not_known": 0}


def test_the_shipped_sample_holds_what_its_readme_says(tmp_path, aime):
    side = prepare(str(DAPO_SAMPLE), aime, tmp_path / "out")["train"]
    assert (side["rows_raw"], side["rows_kept"]) == (64, 60)
    assert side["rows_left_out"] == {"conflicting": 2, "duplicate": 2}
    assert side["answer_kinds"] == {"integer": 53, "integer beyond 18 digits": 3, "negative integer": 4}
    assert side["languages"] == {"en": 52, "zh": 8}
    assert side["control_characters"] == {"repaired": 8, "dropped": 5, "questions": 5}


def test_hash_is_of_the_rows_and_not_of_the_file(tmp_path, aime):
    report = prepare(str(DAPO_SAMPLE), aime, tmp_path / "out")
    path = tmp_path / "out" / "train.parquet"
    expected = report["train"]["content_sha256"]
    assert pq.read_metadata(path).metadata[HASH_KEY].decode() == expected == content_hash(path)
    pq.write_table(pq.read_table(path), tmp_path / "other.parquet", compression="none", row_group_size=7)
    assert content_hash(tmp_path / "other.parquet") == expected
    pq.write_table(pq.read_table(path).slice(1), tmp_path / "other.parquet")
    assert content_hash(tmp_path / "other.parquet") != expected
    with pytest.raises(DataError, match="Run prepare-data again"):
        content_hash(tmp_path / "missing.parquet")


def test_report_is_refused_beside_other_files(tmp_path, aime):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"report\.json is missing"):
        load_report(out)
    report = prepare(str(DAPO_SAMPLE), aime, out)
    assert load_report(out) == json.loads(json.dumps(report))
    prepare(str(DAPO_SAMPLE), aime, tmp_path / "other", limits=Limits(5))
    (tmp_path / "other" / "train.parquet").replace(out / "train.parquet")
    with pytest.raises(DataError, match="not the file that"):
        load_report(out)
    (out / "train.parquet").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read"):
        load_report(out)
    (out / "report.json").write_text("[]")
    with pytest.raises(DataError, match="cannot read"):
        load_report(out)


def test_a_run_that_dies_leaves_the_old_output_whole(tmp_path, aime, monkeypatch):
    out = tmp_path / "out"
    prepare(str(DAPO_SAMPLE), aime, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    calls = []

    def dies(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("disk full")
        return real(*args, **kwargs)

    real = pq.write_table
    monkeypatch.setattr(pq, "write_table", dies)
    with pytest.raises(ConfigurationError, match="disk full"):
        prepare(str(DAPO_SAMPLE), aime, out, limits=Limits(5))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_wrong_aime_answer_is_found(tmp_path):
    rows = [{"ID": "2024-I-12", "Problem": "p", "Solution": "", "Answer": 384}]
    with pytest.raises(DataError, match="2024-I-12 has 384, known is 385"):
        prepare(str(DAPO_SAMPLE), write(tmp_path / "v.parquet", rows), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    padded = [{"ID": "2024-II-12", "Problem": "p", "Solution": "", "Answer": "023"}]
    report = prepare(str(DAPO_SAMPLE), write(tmp_path / "v.parquet", padded), tmp_path / "out")
    assert report["val"]["aime_checked"] == {"answers_right": 1, "texts_known": 0, "not_known": 0}


@pytest.mark.parametrize("year", ["2024", "2025"])
def test_key_tables_hold_30_problems_and_no_text(year):
    keys = json.loads((SAMPLES / f"aime_{year}_keys.json").read_text())["problems"]
    assert [entry["id"] for entry in keys] == [f"{year}-{half}-{n}" for half in ("I", "II") for n in range(1, 16)]
    assert {frozenset(entry) for entry in keys} == {frozenset({"id", "answer", "sha256", "word_pairs"})}
    assert all(0 <= int(entry["answer"]) <= 999 and len(entry["sha256"]) == 64 for entry in keys)
    assert all(set(entry["word_pairs"]) <= set("0123456789abcdef") for entry in keys)


def words(number: int) -> str:
    """A text of our own whose word pairs no other one has."""
    return " ".join(f"word{'abcdefgh'[number % 8]}{number} thing{number * 7 + at}" for at in range(20))


@pytest.fixture
def own_aime(monkeypatch) -> list[AimeProblem]:
    """A table of known problems over texts of our own."""
    table = [
        AimeProblem(
            f"2025-I-{number}", str(number * 11), question_key(words(number)), frozenset(word_pairs(words(number)))
        )
        for number in range(1, 11)
    ]
    monkeypatch.setattr("recipe.retool.aime.known_problems", lambda: tuple(table))
    return table


def test_aime_is_known_by_its_words_whatever_the_copy(tmp_path, own_aime):
    rows = [{"question": words(number), "answer": f"{number * 11:03}"} for number in range(1, 11)]
    rows[1]["question"] = "Note: " + words(2).replace(" ", "\n", 3) + " [asy] draw(x); [/asy]"
    rows[2]["question"] = "Something else altogether."
    report = prepare(str(DAPO_SAMPLE), write(tmp_path / "v.parquet", rows), tmp_path / "out")
    assert report["val"]["aime_checked"] == {"answers_right": 9, "texts_known": 8, "not_known": 1}
    val = rows_of(tmp_path / "out", "val")
    assert {entry["data_source"] for entry in val} == {"aime_2025"}
    assert [entry["extra_info"]["index"] for entry in val][:2] == ["2025-I-1", "2025-I-2"]
    rows[1]["answer"] = "23"
    with pytest.raises(DataError, match="2025-I-2 has 23, known is 22"):
        prepare(str(DAPO_SAMPLE), write(tmp_path / "v.parquet", rows), tmp_path / "out")


def test_a_table_that_is_not_aime_must_be_described(tmp_path, own_aime):
    rows = [{"question": f"Question {number}?", "answer": "1"} for number in range(5)]
    with pytest.raises(DataError, match=r"5 questions, of which 0 .* YAML"):
        prepare(str(DAPO_SAMPLE), write(tmp_path / "v.parquet", rows), tmp_path / "out")


def test_several_sources_become_one_side(tmp_path, aime):
    math = [{"problem": "What is 1+1?", "answer": "2", "unique_id": "u1"}]
    both = prepare(
        [str(DAPO_SAMPLE), write(tmp_path / "t.parquet", [row("What is 1+1?", "2"), row("What is 2+2?", "4")])],
        [aime, write(tmp_path / "m.parquet", math)],
        tmp_path / "out",
    )
    assert both["val"]["data_sources"] == {"aime_2024": 30, "math_500": 1}
    assert both["train"]["rows_raw"] == 66
    assert both["train"]["rows_left_out"]["in validation"] == 1
    twice = write(tmp_path / "t.parquet", [row("Twice", "1"), row("Twice", "2")])
    assert prepare([str(DAPO_SAMPLE), twice], aime, tmp_path / "out")["train"]["questions_conflicting"] == 2


class Tokenizer:
    """Counts words; stands for a model's tokenizer and remembers what it was asked."""

    chat_template = "x"

    def apply_chat_template(self, batch, *, tools, add_generation_prompt, tokenize):
        assert [tool["function"]["name"] for tool in tools] == ["code_interpreter"]
        assert (add_generation_prompt, tokenize) == (True, False)
        return [f"tools and template {conversation[0]['content']}" for conversation in batch]

    def __call__(self, texts, *, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [text.split() for text in texts]}


@pytest.fixture
def tokenizer(monkeypatch, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    fake = types.SimpleNamespace(AutoTokenizer=types.SimpleNamespace(from_pretrained=lambda *_, **__: Tokenizer()))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    return model


def test_over_long_prompts_are_counted_with_template_and_tools(tmp_path, aime, tokenizer):
    around = len(f"tools and template {build_prompt('')}".split())
    rows = [row("short", "1"), row("one two three four five", "2"), row("one two three four", "3")]
    report = prepare(
        write(tmp_path / "t.parquet", rows), aime, tmp_path / "out",
        model=tokenizer, limits=Limits(max_prompt_tokens=around + 4),
    )  # fmt: skip
    assert report["train"]["rows_left_out"] == {"over-long": 1}
    lengths = report["train"]["prompt_tokens"]
    assert (lengths["median"], lengths["max"]) == (around + 4, around + 4)
    assert sum(count for _, count in lengths["up_to"]) == 2
    assert report["val"]["rows_kept"] == 30  # a validation set is judged whole
    uncounted = prepare(write(tmp_path / "t.parquet", rows), aime, tmp_path / "out")
    assert uncounted["train"]["prompt_tokens"] is None


def test_a_folder_without_tokenizer_is_the_users_mistake(tmp_path, aime, capsys, tokenizer, monkeypatch):
    def refuses(*_, **__):
        raise OSError("no tokenizer.json")

    monkeypatch.setattr(sys.modules["transformers"].AutoTokenizer, "from_pretrained", refuses)
    for model in (tokenizer, tmp_path / "missing"):
        assert command("--train", DAPO_SAMPLE, "--val", aime, "--out", tmp_path / "o", "--model", model) == 2
        assert "ive --model a" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command("--train", DAPO_SAMPLE, "--val", aime, "--out", tmp_path / "o", "--max-prompt-tokens", "9")
    assert "needs --model" in capsys.readouterr().err


def test_a_missing_answer_written_as_text_is_none(tmp_path, aime):
    report = prepare(write(tmp_path / "t.parquet", [row("q", "nan"), row("r", "1")]), aime, tmp_path / "out")
    assert report["train"]["rows_left_out"] == {"empty": 1}


@pytest.mark.parametrize("target", ["prepared.draw_report", "Path.replace"])
def test_a_run_that_is_killed_leaves_the_old_output_whole(tmp_path, aime, real_picture, target):
    out = tmp_path / "out"
    prepare(str(DAPO_SAMPLE), aime, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from recipe.retool import prepared\nfrom recipe.retool.prepare_data import main\n"
        f"{target} = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"main(['--train', {str(DAPO_SAMPLE)!r}, '--val', {aime!r}, '--out', {str(out)!r}, '--max-rows', '5'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True)
    assert done.returncode == -9, done.stderr
    assert {path.name: path.read_bytes() for path in out.iterdir() if not path.name.startswith(".")} == before
    load_report(out)
    prepare(str(DAPO_SAMPLE), aime, out)  # and what it left behind goes with the next run
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def command(*args: object) -> int:
    return main([str(arg) for arg in args])


def test_command_prints_the_table_and_the_conflicts(tmp_path, aime, capsys):
    assert command("--train", DAPO_SAMPLE, "--val", aime, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "conflicting" in printed
    assert "{'6': 1, '64': 1}" in printed


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("missing.parquet", "no such file or folder"),
        ("org/name", "invoke download --data org/name"),
        ("empty_folder", "no .parquet and no .jsonl"),
        ("empty.parquet", "no rows in"),
        ("columns.parquet", "found question"),
        ("blank.parquet", "no row of"),
        ("broken.parquet", "cannot read"),
    ],
)
def test_mistakes_end_with_2_and_a_message(tmp_path, aime, capsys, monkeypatch, train, message):
    monkeypatch.chdir(tmp_path)
    Path("empty_folder").mkdir()
    pq.write_table(pa.Table.from_pylist([row("q", "1")]).slice(1), "empty.parquet")
    write(Path("columns.parquet"), [{"question": "q"}])
    write(Path("blank.parquet"), [row("", "1")])
    Path("broken.parquet").write_bytes(b"PAR1")
    assert command("--train", train, "--val", aime, "--out", "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert not Path("out").exists()


def test_out_that_cannot_be_written_ends_with_2(tmp_path, aime, capsys):
    (tmp_path / "file").touch()
    assert command("--train", DAPO_SAMPLE, "--val", aime, "--out", tmp_path / "file" / "out") == 2
    assert "Give --out a folder" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-rows", "0"], ["--max-rows", "x"], ["--language", "fr"]])
def test_bad_flags_end_with_2(flags, capsys):
    with pytest.raises(SystemExit) as end:
        command("--train", "t", "--val", "v", "--out", "o", *flags)
    assert end.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_imports_are_light():
    heavy = ["torch", "transformers", "verl", "ray", "datasets", "pandas"]
    code = f"import sys, recipe.retool.prepare_data as _; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_progress_off_a_terminal_is_plain_lines(tmp_path, aime, capsys, monkeypatch):
    monkeypatch.setattr("recipe.retool.prepare_data._LINE_ROWS", 50)
    assert command("--train", DAPO_SAMPLE, "--val", aime, "--out", tmp_path / "out") == 0
    assert "reading train: 64 of 64 rows\n" in capsys.readouterr().out


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the full data sets are not beside this checkout")
def test_full_data_sets(tmp_path):
    out = tmp_path / "out"
    report = prepare(
        str(SHARED_DATA / "dapo_math_17k_rebuilt.parquet"), str(SHARED_DATA / "aime_2024_problems.parquet"), out
    )
    assert report["val"]["aime_checked"] == {"answers_right": 30, "texts_known": 30, "not_known": 0}
    assert report["val"]["rows_kept"] == 30
    side = copy.deepcopy(report["train"])
    assert side["rows_raw"] == 17_917 == side["rows_kept"] + sum(side["rows_left_out"].values())
    assert 17_000 < side["rows_kept"] < 17_290
    contents = [entry["prompt"][0]["content"] for entry in rows_of(out)]
    assert not any("Answer:" in content or "\f" in content for content in contents)
    assert all(content == build_prompt(content.removesuffix(INSTRUCTION).rstrip()) for content in contents)


def test_files_of_two_runs_can_be_told_by_their_footers(tmp_path, aime):
    prepare(str(DAPO_SAMPLE), aime, tmp_path / "one")
    prepare(str(DAPO_SAMPLE), aime, tmp_path / "two", limits=Limits(5))
    marks = {
        (out, split): footer(tmp_path / out / f"{split}.parquet").prepared
        for out in ("one", "two")
        for split in ("train", "val")
    }
    assert marks["one", "train"] == marks["one", "val"]
    assert marks["two", "train"] == marks["two", "val"] != marks["one", "val"]
