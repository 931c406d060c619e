"""Reading an `.env` so that it means the same here and under `docker run --env-file`.

python-dotenv and Docker differ: Docker keeps quotes, escapes, `${...}` and a comment behind the value as
they are, takes a name without `=` from the host, and knows no `export`. Each of these is refused in the lines
that set a variable of ours, except one pair of outer quotes, which both sides drop (`without_quotes`).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

from dotenv import dotenv_values

_NAME = re.compile(r"\s*(?P<export>export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<rest>.*)", re.DOTALL)


def without_quotes(value: str) -> str:
    """`value` without one matching pair of outer quotes, if it has one."""
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value


def read_env_file(path: Path, *, wanted: Callable[[str], bool]) -> tuple[dict[str, str], list[str]]:
    """Raw values of the wanted variables, and what is wrong with the file.

    Args:
        path: the file.
        wanted: whether a variable is ours; other lines are not judged.

    Returns:
        Values by name (only lines without a problem), and the problems, each naming file, line, variable and
        cure, never a value.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        return {}, [f"{path} cannot be read ({error.strerror}): check the path and its rights"]
    except UnicodeDecodeError:
        return {}, [f"{path} is not UTF-8 text: save it as UTF-8"]
    problems: list[str] = []
    good: dict[str, str] = {}
    if text.startswith("\N{BYTE ORDER MARK}"):
        text = text[1:]
        problems.append(f"{path} begins with a byte order mark, which Docker refuses: save it as UTF-8 without BOM")
    for number, line in enumerate(text.split("\n"), start=1):
        match = _NAME.match(line)
        if match is None or not wanted(match["name"]):
            continue
        name, where = match["name"], f"{path} line {number}: {match['name']}"
        problem = _problem(match)
        if problem:
            problems.append(f"{where} {problem}")
        elif name in good:
            problems.append(f"{where} is set a second time: keep one line")
        else:
            good[name] = line
    values = dotenv_values(stream=io.StringIO("\n".join(good.values())), interpolate=False)
    return {name: value for name, value in values.items() if value is not None}, problems


def _problem(match: re.Match[str]) -> str | None:
    line, rest = match.string, match["rest"]
    if "\r" in line:
        return "ends in a carriage return (a file from Windows): save the file with LF line ends"
    if match["export"]:
        return "has `export` before it, which Docker does not know: remove the word"
    if line[0].isspace() or not rest.startswith("="):
        return "is not written NAME=value: no blank before the name or around the =, and the = itself"
    value = rest[1:]
    if value != value.strip():
        return "has a blank before or behind the value: remove it"
    inner = without_quotes(value)
    if inner == value and value and (value[0] in "'\"`" or value[-1] in "'\"`"):
        return "has a stray quote: write the value without quotes"
    if re.search(r"\s", inner):
        return "has a blank inside (a comment behind the value counts): remove it, put the comment above"
    if re.search(r"['\"`\\]|\$\{", inner):
        return "has a quote, a backslash or ${...} inside, which Docker and dotenv read differently: write it plainly"
    if inner != value and not inner:
        return "is set but empty: give it a value or remove the line"
    return None
