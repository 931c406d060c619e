"""Reading an `.env` so that it means the same here, under `docker run --env-file` and in a compose file.

Where the three differ (python-dotenv 1.x; docker/cli pkg/kvfile; compose-go dotenv/parser.go):

| in a line | python-dotenv | docker --env-file | compose env_file |
|---|---|---|---|
| outer quotes | dropped | dropped, until 2025 kept | dropped |
| `export NAME=` | known | refused | known |
| `#` behind the value | comment after a blank | part of the value | comment |
| `$NAME`, `${NAME}` | as they are (we switch it off) | as they are | replaced, but in '...' |
| backslash in "..." | escape | as it is | escape |
| a quoted value over lines | one value | a line each | one value |
| blanks around `=` | dropped | refused before, kept behind | dropped |
| NAME alone | no value | the host's value | the host's value |

Each is refused in the lines that set a variable of ours, except one pair of outer quotes, which the reader of
the variable drops again (`without_quotes`).
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
        problems.append(f"{path} begins with a byte order mark, which not every reader skips: save it as UTF-8 alone")
    open_quote = ""  # of another program's value over several lines, which was told of
    for number, line in enumerate(text.split("\n"), start=1):
        if open_quote:
            open_quote = "" if open_quote in line else open_quote
            continue
        match = _NAME.match(line)
        ours = match is not None and wanted(match["name"])
        if not ours and re.fullmatch(r"[A-Z][A-Z0-9_]*", line):
            continue  # another program's, which Docker takes from its host
        if "=" not in line and line.strip() and not line.lstrip().startswith("#"):
            name = f"{match['name']} " if match and ours else ""  # else not shown: it may be a key, pasted alone
            problems.append(f"{path} line {number}: {name}has no =: write NAME=value, or put # before it")
            continue
        if match is None:
            continue
        if not ours:
            if _goes_on(match["rest"]):
                open_quote = match["rest"].strip().removeprefix("=").strip()[0]
                problems.append(
                    f"{path} line {number}: {match['name']} has a quoted value that does not end in its line, which "
                    "Docker reads line by line: put it into one line, or into another file"
                )
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


def _goes_on(rest: str) -> bool:
    """Whether a line of another program's opens a quote that it does not close."""
    value = rest.strip().removeprefix("=").strip()
    return value[:1] in ("'", '"') and value.count(value[0]) - value.count("\\" + value[0]) < 2


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
    if re.search(r"['\"`\\]", inner) or ("$" in inner and value[0] != "'"):
        return "has a quote, a backslash or $ inside, which Docker and dotenv read differently: write it plainly"
    if "#" in inner and inner == value:
        return "has a # inside, which compose takes for a comment: put the value in single quotes"
    if inner != value and not inner:
        return "is set but empty: give it a value or remove the line"
    return None
