"""Every error that the E2B SDK or the HTTP stack below it can raise, as one of ours.

The classes are told apart by name along their ancestry, so this file needs no SDK; a test walks the real
classes of the SDK, httpx and httpcore and fails when one is not named here.
"""

from __future__ import annotations

import json
import re

from verl_ext.errors import (
    SandboxAuthError,
    SandboxDiedError,
    SandboxError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.setting_values import masked

# AGS answers a full account with 400 [LimitExceeded.SandboxInstance], and Tencent's gateway a full rate with
# RequestLimitExceeded. Source: one public user report; not tried against live AGS.
_QUOTA_WORDS = re.compile(r"LimitExceeded|ResourceInsufficient|rate limit|maximum number of concurrent", re.IGNORECASE)
_AUTH_WORDS = re.compile(r"AuthFailure|UnauthorizedOperation|invalid api key", re.IGNORECASE)
_STATUS = re.compile(r"\s*([1-5]\d\d)\b")

# First match along the ancestry of the error's class wins.
CLASS_MAP: dict[str, type[SandboxError] | None] = {
    # e2b
    "AuthenticationException": SandboxAuthError,
    "RateLimitException": SandboxQuotaError,
    "ServiceBusyException": SandboxUnavailableError,
    "TimeoutException": SandboxTimeoutError,
    "SandboxNotFoundException": SandboxDiedError,
    "NotFoundException": SandboxRequestError,
    "InvalidArgumentException": SandboxRequestError,
    "TemplateException": SandboxRequestError,
    "NotEnoughSpaceException": SandboxUnavailableError,
    "BuildException": SandboxRequestError,
    "VolumeException": SandboxRequestError,
    "SecretException": SandboxRequestError,
    "GitUpstreamException": SandboxRequestError,
    "CommandExitException": SandboxRequestError,
    "SandboxException": None,  # by its HTTP status
    # httpx and httpcore
    "PoolTimeout": SandboxUnavailableError,
    "ConnectTimeout": SandboxUnavailableError,
    "UnsupportedProtocol": SandboxRequestError,
    "LocalProtocolError": SandboxRequestError,
    "InvalidURL": SandboxRequestError,
    "TransportError": SandboxUnavailableError,
    "HTTPError": SandboxUnavailableError,
    "StreamError": SandboxUnavailableError,
    "CookieConflict": SandboxUnavailableError,
    "ProtocolError": SandboxUnavailableError,
    "NetworkError": SandboxUnavailableError,
    "ProxyError": SandboxUnavailableError,
    "ConnectionNotAvailable": SandboxUnavailableError,
    # what answers that are not the protocol's come out as
    "JSONDecodeError": None,
    "UnicodeDecodeError": SandboxUnavailableError,
}
# httpx.TimeoutException and httpcore.TimeoutException share the SDK's name and meaning.

_CURES: dict[type[SandboxError], str] = {
    SandboxAuthError: "check E2B_API_KEY, and that E2B_DOMAIN is the region or service that the key belongs to",
    SandboxRequestError: "check VERL_EXT_SANDBOX_TEMPLATE, E2B_DOMAIN and E2B_API_URL",
    SandboxQuotaError: "the account is full or too fast: lower VERL_EXT_SANDBOX_MAX_ALIVE or the create rate",
    SandboxTimeoutError: "the service did not answer in time",
    SandboxUnavailableError: "the service failed or could not be reached; the same call may work later",
    SandboxDiedError: "the sandbox is gone and its state with it",
}


def status_of(error: BaseException) -> int | None:
    """HTTP status that an SDK error stands for, if it tells one."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int):
        return status
    match = _STATUS.match(str(error))
    return int(match[1]) if match else None


def was_surely_not_acted_on(error: BaseException) -> bool:
    """Whether the service refused a request before it began with it, so that it may be repeated."""
    if type(error).__name__ in ("ConnectError", "ConnectTimeout"):
        return True
    return status_of(error) in (429, 503) or "port is not open" in str(error)


def _class_for(error: BaseException) -> type[SandboxError]:
    words = f"{error} {error.doc[:2000]}" if isinstance(error, json.JSONDecodeError) else str(error)
    for ancestor in type(error).__mro__:
        if ancestor.__name__ in CLASS_MAP:
            found = CLASS_MAP[ancestor.__name__]
            if found is not None:
                return found
            break
    else:
        return SandboxUnavailableError  # an answer outside the protocol; the SDK raises whatever it trips over
    if _QUOTA_WORDS.search(words):
        return SandboxQuotaError
    if _AUTH_WORDS.search(words):
        return SandboxAuthError
    match status_of(error):
        case 401 | 402 | 403:
            return SandboxAuthError
        case 408 | 429:
            return SandboxQuotaError
        case int(status) if 400 <= status < 500:
            return SandboxRequestError
    return SandboxUnavailableError


def map_error(error: BaseException, *, doing: str, hide: str | None = None) -> SandboxError:
    """Our error for an SDK's error.

    Args:
        error: what the SDK raised.
        doing: what was being done, for the message ("create a sandbox from code-interpreter-v1").
        hide: the key; should the service echo it, it is blanked, as is all that has the shape of a key.
    """
    if isinstance(error, SandboxError):
        return error
    kind = _class_for(error)
    text = str(error) or type(error).__name__
    if isinstance(error, json.JSONDecodeError):
        text = f"the answer is not JSON: {error.doc[:200]!r}"
    if hide:
        text = text.replace(hide, "***")
    return kind(f"could not {doing}: {type(error).__name__}: {masked(text)[:500]}: {_CURES[kind]}")
