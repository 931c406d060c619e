"""Grading files: what is read, what each grader says, and where they differ."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.retool.answer_files import read_answers
from recipe.retool.grade import OURS, STRICT, compare_graders, main
from recipe.retool.other_graders import OtherGrader
from verl_ext.errors import DataError
from verl_ext.trajectory import write_records

ROWS = [
    {"id": "plain", "text": r"So \boxed{33}.", "ground_truth": "33", "correct": True},
    {"id": "padded", "text": r"So \boxed{033}.", "ground_truth": "33", "correct": True},
    {"id": "printed", "text": "<tool_response>\\boxed{33}</tool_response>No.", "ground_truth": "33", "correct": False},
    {"id": "wrong", "text": r"\boxed{34}", "ground_truth": "33", "correct": False},
    {"id": "none", "text": None, "ground_truth": "33", "correct": False},
]  # fmt: skip
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed here")
needs_math_verify = pytest.mark.skipif(find_spec("math_verify") is None, reason="math-verify is not installed here")


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "answers.jsonl", ROWS)


@needs_verl
def test_graders_are_counted_against_a_persons_verdicts(file):
    comparison = compare_graders(list(read_answers(file)))
    assert comparison.right(OURS) == 2
    assert comparison.mistakes(OURS) == (0, 0, 0)
    assert comparison.right(STRICT) == 2
    assert comparison.mistakes(STRICT) == (2, 1, 1)
    assert comparison.agreement(OURS, STRICT) == 0.6
    assert [row.given.key for row in comparison.graded if row.differs][:2] == ["padded", "printed"]


@needs_verl
def test_the_command_prints_tables_and_writes_json(file, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert main([str(file), "--json", str(out), "--show", "1"]) == 0
    printed = capsys.readouterr().out
    assert "5 answers" in printed
    assert "2 answers over which they differ, the first 1:" in printed
    assert "padded  known '33'; ours: right, strict box (verl): wrong" in printed
    assert "printed" not in printed
    told = json.loads(out.read_text())
    assert told["mistakes"][OURS] == [0, 0, 0]
    assert told["graded"][1] | {"outcomes": None} == {
        "id": "padded", "reason": "equal", "extracted": "033", "outcomes": None,
    }  # fmt: skip


@needs_math_verify
def test_math_verify_is_asked_without_its_signals():
    grader = OtherGrader("math_verify", "math_verify")
    assert [grader(text, "33") for text in (r"\boxed{33}", r"\boxed{34}")] == [True, False]
    grader.close()


def test_a_grader_that_is_not_installed_is_said():
    grader = OtherGrader("math_verify", "no_such_package")
    assert grader(r"\boxed{33}", "33") == "not installed"
    grader.close()


def test_a_runs_folder_gives_the_last_turn_and_the_whole_response(tmp_path):
    call = {"name": "code_interpreter", "arguments": "{}", "status": "ok", "response": r"\boxed{33}", "elapsed_s": 0.1}
    turns = [
        {"text": "I compute.", "tokens": 3, "generate_s": 0.1, "calls": [call]},
        {"text": r"\boxed{34}", "tokens": 3, "generate_s": 0.1, "calls": []},
    ]
    row = {"trajectory_id": "t1", "ground_truth": "33", "turns": turns, "final_text": r"\boxed{34}"}
    write_records(tmp_path, 1, False, [row])
    write_records(tmp_path, 1, True, [row])
    [one, other] = read_answers(tmp_path)
    assert (one.key, one.text, one.truth, one.correct) == ("t1", r"\boxed{34}", "33", None)
    assert one.response == "I compute.\n<tool_response>\n\\boxed{33}\n</tool_response>\n\\boxed{34}"
    assert other.response == one.response


def test_verls_dump_of_rollouts_is_read(tmp_path):
    dump = write(tmp_path / "1.jsonl", [{"input": "q", "output": r"\boxed{33}", "gts": "33", "score": 1.0}])
    [one] = read_answers(dump)
    assert (one.key, one.text, one.response, one.truth) == ("1:1", r"\boxed{33}", r"\boxed{33}", "33")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{\n", "cannot read"),
        ("[1]\n", "line 1 .* no JSON object"),
        ('{"question": "q"}\n', "no column with the text .* found question"),
        ('{"text": "q"}\n', "no column with the known answer"),
        ("[" * 100_000, "cannot read"),
    ],
    ids=["json", "list", "text", "answer", "deep"],
)
def test_what_cannot_be_read_is_said_with_a_cure(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        list(read_answers(tmp_path / "a.jsonl"))


def test_a_users_mistakes_end_with_2_and_a_message(tmp_path, file, capsys):
    assert main([str(tmp_path / "missing")]) == 2
    assert "neither a folder nor a name in" in capsys.readouterr().err
    assert main([str(file), "--json", str(tmp_path / "no" / "out.json")]) == 2
    assert "Give --json a file" in capsys.readouterr().err


def test_a_file_without_answers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty.jsonl").touch()
    assert main([str(tmp_path / "empty.jsonl")]) == 2
    assert "holds no answers" in capsys.readouterr().err
