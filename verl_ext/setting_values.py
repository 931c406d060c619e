"""How a value of the environment is written, and what is refused: secrets, domains, addresses, numbers.

A parser takes the text and gives the value or raises `WrongValue` with the cure. No message of a parser
holds the text itself, so none can show a secret.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from verl_ext.env_file import without_quotes

AGS_DOMAIN = "ap-shanghai.tencentags.com"
# Only to see a slip of the pen: which of them has AGS changes. Source: Tencent Cloud's list of regions, 2025.
TENCENT_REGIONS = (
    "ap-bangkok", "ap-beijing", "ap-beijing-fsi", "ap-chengdu", "ap-chongqing", "ap-guangzhou", "ap-hongkong",
    "ap-jakarta", "ap-mumbai", "ap-nanjing", "ap-seoul", "ap-shanghai", "ap-shanghai-fsi", "ap-shenzhen-fsi",
    "ap-singapore", "ap-tokyo", "eu-frankfurt", "na-ashburn", "na-siliconvalley", "sa-saopaulo",
)  # fmt: skip


# Keys that no setting holds are known by how they begin: Hugging Face's, E2B's, AGS's, GitHub's; OpenAI's and those
# like them. W&B's and SwanLab's have no beginning of their own. Shorter than any that is given out.
# Source: the services' own documentation of their keys; AGS's: public user reports.
_SECRET_SHAPE = re.compile(r"(?<![A-Za-z0-9])(?:(?:hf|e2b|ark|ghp)_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,})")


def masked(text: str) -> str:
    """`text` with *** for everything in it that has the shape of a key."""
    return _SECRET_SHAPE.sub("***", text)


class Secret:
    """A value that is used but never shown, copied into logs, or pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself; call it where it is sent, and keep it nowhere."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return repr(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a Secret is not pickled: call Settings.load() in the process that needs it")


class WrongValue(Exception):
    """Why a value cannot be taken, with the cure; never holds the value of a secret."""


_PLACEHOLDER = re.compile(
    r"<.*>|\$\{?\w*\}?|.*\*{2,}.*|(.*[-_])?x{3,}|.*\.{3}|(your|replace)[-_].*|change[-_]?(me|this|it)"
    r"|todo|tbd|none|null|placeholder|dummy|example|secret|key|api[-_]?key|token",
    re.IGNORECASE,
)


def parse_text(value: str) -> str:
    """Any text."""
    return value


def parse_secret(value: str) -> Secret:
    """A key or token."""
    if not value.isascii():
        raise WrongValue("holds letters outside ASCII, so it was not copied whole: copy it again")
    if len(value) < 8:
        raise WrongValue(f"is only {len(value)} characters long, so it was not copied whole: copy it again")
    return Secret(value)


def parse_domain(value: str) -> str:
    """A domain, alone."""
    if "://" in value:
        raise WrongValue("is an address: give the domain alone, without https://")
    if value.endswith("/") or "/" in value:
        raise WrongValue("has a slash: give the domain alone")
    if value.startswith("api."):
        raise WrongValue("begins with api., which the SDK puts before it: leave that away")
    if _is_ags(value):
        _check_region(value)
    if not re.fullmatch(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+", value):
        raise WrongValue(f"is no domain: write it like {AGS_DOMAIN}")
    return value


def _check_region(domain: str) -> None:
    """A region that nearly has the name of one is a slip; one that is like none may be new."""
    region = domain.removesuffix("tencentags.com").removesuffix(".")
    if not region:
        raise WrongValue(f"names no region: write <region>.tencentags.com, for example {AGS_DOMAIN}")
    if region not in TENCENT_REGIONS and region != "internal":
        near = difflib.get_close_matches(region, TENCENT_REGIONS, n=1, cutoff=0.75) or [
            name for name in TENCENT_REGIONS if name.endswith(f"-{region}")
        ]
        if near:
            raise WrongValue(f"names a region that there is not: did you mean {near[0]}.tencentags.com?")


def key_of_another_service(key: Secret | None, domain: str) -> str | None:
    """Why the key cannot belong to the domain, by the shapes that the two services give their keys.

    Source: E2B's keys are e2b_<hex> (e2b 2.25.0, connection_config.py); AGS's begin with ark_ (public user reports).
    """
    text = key.reveal() if key else ""
    if _is_e2b(domain) and text.startswith("ark_"):
        return f"E2B_API_KEY has the shape of an AGS key, but E2B_DOMAIN is E2B's: write E2B_DOMAIN={AGS_DOMAIN}"
    if _is_ags(domain) and re.fullmatch(r"e2b_[0-9a-f]{40}", text):
        return "E2B_API_KEY has the shape of an E2B key, but E2B_DOMAIN is AGS's: write E2B_DOMAIN=e2b.app"
    return None


def doubt_of_key(key: Secret | None, domain: str) -> str | None:
    """What is unusual about the key's shape, without being surely wrong; sources as above."""
    text = key.reveal() if key else ""
    if _is_e2b(domain) and not re.fullmatch(r"e2b_[0-9a-f]+", text):
        return "E2B_API_KEY is not e2b_ and hexadecimal digits, as E2B's keys are"
    if _is_ags(domain) and not text.startswith("ark_"):
        return "E2B_API_KEY does not begin with ark_, as AGS's are reported to"
    return None


def _is_e2b(domain: str) -> bool:
    return domain.endswith(("e2b.app", "e2b.dev"))


def _is_ags(domain: str) -> bool:
    return domain.endswith("tencentags.com")


def parse_url(value: str) -> str:
    """An http(s) address without the slash at its end."""
    if not re.fullmatch(r"https?://[A-Za-z0-9.\-\[\]:]+(/[^\s?#]*)?", value):
        raise WrongValue("is no address: write it like http://127.0.0.1:3000, without user name and query")
    return value.rstrip("/")


def parse_tracking_uri(value: str) -> str:
    """An http(s) address, or a file of MLflow's on this machine; without a password, which would be logged."""
    if re.fullmatch(r"(sqlite:///|file:/)[^\s@?#]+", value):
        return value
    if value.startswith(("sqlite:", "file:")):
        raise WrongValue("is no file: write it like sqlite:////data/mlflow.db")
    return parse_url(value)


def parse_number(low: float, *, whole: bool, high: float = math.inf) -> Callable[[str], float]:
    """A parser of numbers from `low` up, to `high` at most."""
    bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"

    def parse(value: str) -> float:
        pattern = r"\d+" if whole else r"\d+(\.\d+)?"
        if not re.fullmatch(pattern, value) or not low <= float(value) <= high:
            raise WrongValue(f"must be a {'whole ' if whole else ''}number {bounds}, in digits alone")
        return int(value) if whole else float(value)

    return parse


def parse_one_of(*names: str) -> Callable[[str], str]:
    """A parser of one of `names`, in small letters."""

    def parse(value: str) -> str:
        if value.lower() not in names:
            raise WrongValue(f"must be one of {', '.join(names)}")
        return value.lower()

    return parse


def parse_flag(value: str) -> bool:
    """0 or 1."""
    return parse_one_of("0", "1")(value) == "1"


def parse_path(value: str) -> Path:
    """A path, absolute; ~ is the home folder."""
    return Path(value).expanduser().absolute()


def parse_folder(value: str) -> Path:
    """A folder's path, absolute; it need not be there, but nothing else may be in its place."""
    folder = parse_path(value)
    there = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), folder)
    if there.exists() and not there.is_dir():
        raise WrongValue(f"is no folder: {there} is a file")
    return folder


def clean_text(text: str) -> str:
    """`text` without its outer quotes.

    Raises:
        WrongValue: it is empty, holds a placeholder, or holds what editors and copying leave behind.
    """
    if "\r" in text:
        raise WrongValue("ends in a carriage return (a file from Windows): save the file with LF line ends")
    if text != text.strip():
        raise WrongValue("begins or ends with a blank: remove it")
    text = without_quotes(text)
    if not text:
        raise WrongValue("is set but empty: give it a value or remove the line")
    if text[0] in "'\"`" or text[-1] in "'\"`":
        raise WrongValue("has a stray quote: write the value without quotes")
    if re.search(r"[\s\x00-\x1f\x7f]", text):
        raise WrongValue("has a blank or control character inside (a comment behind it counts): remove it")
    if _PLACEHOLDER.fullmatch(text):
        raise WrongValue("still holds a placeholder: put the real value there or remove the line")
    return text
