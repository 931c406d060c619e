"""verl_ext.env_file: what is taken means the same to every reader of an `.env`; what does not is refused.

python-dotenv is the real one. Docker's and compose's readers are written in Go, so their rules stand here in
Python, from docker/cli pkg/kvfile/kvfile.go and compose-go dotenv/parser.go (versions of 2024 and 2025).
"""

from __future__ import annotations

import io
import re
import tempfile
from pathlib import Path

import pytest
from dotenv import dotenv_values
from hypothesis import given
from hypothesis import strategies as st

from verl_ext.env_file import read_env_file, without_quotes

NAME = "E2B_API_KEY"
HOST = "(what the host has)"


def python_dotenv(text: str) -> str | None:
    return dotenv_values(stream=io.StringIO(text)).get(NAME)


def docker(text: str, *, drops_quotes: bool) -> str | None:
    """`docker run --env-file`."""
    found = None
    for line in text.split("\n"):
        line = line.removesuffix("\r").lstrip()
        if not line or line.startswith("#"):
            continue
        key, equals, value = line.partition("=")
        if not key or re.search(r"[ \t]", key):
            raise ValueError("docker refuses the file")
        if key == NAME:
            found = (without_quotes(value) if drops_quotes else value) if equals else HOST
    return found


def compose(text: str, *, comment: str) -> str | None:
    """`env_file:` of a compose file; versions differ in what begins a comment behind a value."""
    found, rest = None, text
    while rest := re.sub(r"^(\s|#[^\n]*(\n|$))*", "", rest):
        match = re.match(r"(?:export)?[ \t\v\f\r]*([\w.]*)[ \t\v\f\r]*([=:\n]|$)[ \t\v\f\r]*", rest)
        if match is None:
            raise ValueError("compose refuses the file")
        rest = rest[match.end() :]
        if match[2] not in ("=", ":"):
            found = HOST if match[1] == NAME else found
            continue
        if rest[:1] in ("'", '"') and rest:
            quote = rest[0]
            end = next((at for at in range(1, len(rest)) if rest[at] == quote and rest[at - 1] != "\\"), None)
            if end is None:
                raise ValueError("compose refuses the file")
            value, rest = rest[:end].strip(quote), rest[end + 1 :]
            if quote == '"':
                value = expanded(re.sub(r"\\(.)", r"\1", value.replace("\\n", "\n").replace("\\r", "\r")))
        else:
            line, _, rest = rest.partition("\n")
            value = expanded(line.split(comment)[0].rstrip())
        if match[1] == NAME:
            found = value
    return found


def expanded(value: str) -> str:
    return re.sub(r"\$(\{\w*[^}]*\}|\w+)", "", value)


READERS = {
    "python-dotenv": python_dotenv,
    "docker": lambda text: docker(text, drops_quotes=True),
    "docker until 2025": lambda text: without_quotes(docker(text, drops_quotes=False) or "") or None,
    "compose": lambda text: compose(text, comment=" #"),
    "compose of 2024": lambda text: compose(text, comment="#"),
}


def ours(text: str, tmp: Path) -> tuple[str | None, list[str]]:
    path = tmp / "given.env"
    path.write_bytes(text.encode())
    values, problems = read_env_file(path, wanted=lambda name: name == NAME)
    return (without_quotes(values[NAME]) if NAME in values else None), problems


@pytest.mark.parametrize(
    "line",
    [
        f"{NAME}=ark_0123",
        f'{NAME}="ark_0123"',
        f"{NAME}='ark_0123'",
        f"{NAME}='ark$0123'",
        f"{NAME}='ark#0123'",
        f'{NAME}="ark#0123"',
        f"{NAME}=ark=01=",
        f"# a comment\n\n  # another\n{NAME}=ark_0123\n",
        f"OTHER=a b c # d\n{NAME}=ark_0123\nexport THIRD=x",
        f"#{NAME}=old\n{NAME}=ark_0123",
    ],
)
def test_what_is_taken_means_the_same_to_all(line: str, tmp_path: Path):
    value, problems = ours(line, tmp_path)
    assert problems == []
    readers = READERS if "export THIRD" not in line else {**READERS, "docker": lambda _: value} | {
        "docker until 2025": lambda _: value  # it refuses the other program's line, and the whole file with it
    }  # fmt: skip
    assert {name: read(line) for name, read in readers.items()} == dict.fromkeys(readers, value)


@pytest.mark.parametrize(
    "line",
    [
        f"export {NAME}=ark_0123",
        f"{NAME}=ark_0123 # mine",
        f"{NAME}=ark_0123#mine",
        f"{NAME}=ark$HOME",
        f"{NAME}=ark${{HOME}}",
        f'{NAME}="ark$HOME"',
        f'{NAME}="ark\\n0123"',
        f"{NAME} = ark_0123",
        f"{NAME}= ark_0123",
        f"{NAME}=ark_0123  ",
        f"{NAME}: ark_0123",
        f"{NAME}='ark_0123",
        f"{NAME}",
        f'OTHER="a key\n{NAME}=ark_0123\nof several lines"',
    ],
)
def test_where_readers_differ_the_line_is_refused_and_not_shown(line: str, tmp_path: Path):
    seen = set()
    for read in READERS.values():
        try:
            seen.add(read(line))
        except ValueError:
            seen.add("refused")
    assert len(seen) > 1, "all readers agree here: no need to refuse it"
    _, problems = ours(line, tmp_path)
    assert problems
    assert "ark" not in "".join(problems)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12), st.sampled_from(["", "'", '"']))
def test_no_value_is_taken_that_a_reader_takes_otherwise(value: str, quote: str):
    line = f"{NAME}={quote}{value}{quote}"
    with tempfile.TemporaryDirectory() as folder:
        taken, problems = ours(line, Path(folder))
    if problems or not taken or not taken.isprintable():
        return  # refused here, or by `clean_text`, which takes neither an empty value nor control characters
    assert {name: read(line) for name, read in READERS.items()} == dict.fromkeys(READERS, taken)


@pytest.mark.parametrize("line", ["ark_0123456789abcdef", "some words", "other", "  E2B API KEY", "export OTHER"])
def test_a_line_without_an_equals_sign_is_told_by_its_number_and_not_shown(line: str, tmp_path: Path):
    value, [problem] = ours(f"# a comment\n\n{line}\n{NAME}=ark_0123\n   \n", tmp_path)
    assert value == "ark_0123"
    assert problem.endswith(".env line 3: has no =: write NAME=value, or put # before it")


def test_the_lines_of_another_programs_long_value_are_told_of_once(tmp_path: Path):
    text = f"PEM='-----BEGIN\nMIIB\nAAAA\n-----END'\nlost\n{NAME}=ark_0123\n"
    value, problems = ours(text, tmp_path)
    assert value == "ark_0123"
    assert [problem.partition("line ")[2].split(":")[0] for problem in problems] == ["1", "5"]


@pytest.mark.parametrize("line", ["OTHER='a'", 'OTHER="a \\" b"', "OTHER=it's", "OTHER=", "OTHER", "OTHER='a' # 'b'"])
def test_other_programs_lines_are_not_judged(line: str, tmp_path: Path):
    assert ours(f"{line}\n{NAME}=ark_0123", tmp_path) == ("ark_0123", [])
