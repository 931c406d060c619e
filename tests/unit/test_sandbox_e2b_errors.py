"""Every error class of the SDK and of the HTTP stack below it has a place in our tree."""

from __future__ import annotations

import inspect
import json
import pkgutil
from importlib import import_module

import e2b
import e2b.exceptions
import e2b_code_interpreter
import httpcore
import httpx
import pyqwest
import pytest

from verl_ext.errors import (
    SandboxAuthError,
    SandboxError,
    SandboxQuotaError,
    SandboxRequestError,
    SandboxTimeoutError,
    SandboxUnavailableError,
)
from verl_ext.sandbox.e2b_errors import CLASS_MAP, map_error

# Not errors of a call: they tell a programmer of a wrong use, or belong to parts that we do not use.
NOT_OURS = {"UnexpectedStatus"}  # openapi client, raised only where raise_on_unexpected_status is set


def classes_of(package) -> dict[str, type[BaseException]]:
    found: dict[str, type[BaseException]] = {}
    modules = [package]
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".template" in info.name or ".client.models" in info.name or ".client.api" in info.name:
            continue
        modules.append(import_module(info.name))
    for module in modules:
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and issubclass(kind, Exception)
            if own and kind.__module__.split(".")[0] == package.__name__:
                found[name] = kind
    return found


SDK = {**classes_of(e2b), **classes_of(e2b_code_interpreter)}
HTTP = {
    name: kind
    for library in (httpx, httpcore)
    for name, kind in vars(library).items()
    if inspect.isclass(kind) and issubclass(kind, Exception)
}


def test_the_walk_finds_what_the_sdk_documents():
    assert {"SandboxException", "RateLimitException", "CommandExitException"} <= set(SDK)
    assert set(vars(e2b.exceptions)) & set(SDK)


@pytest.mark.parametrize("name", sorted((set(SDK) | set(HTTP)) - NOT_OURS))
def test_every_class_is_mapped(name: str):
    kind = SDK.get(name) or HTTP[name]
    assert any(ancestor.__name__ in CLASS_MAP for ancestor in kind.__mro__), f"{kind.__module__}.{name} is not mapped"


@pytest.mark.parametrize("name", sorted(CLASS_MAP))
def test_the_map_names_no_class_that_is_gone(name: str):
    assert name in SDK or name in HTTP or name in {"JSONDecodeError", "UnicodeDecodeError"}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (e2b.AuthenticationException("401: no"), SandboxAuthError),
        (e2b.RateLimitException("429: slow down"), SandboxQuotaError),
        (e2b.ServiceBusyException("503"), SandboxUnavailableError),
        (e2b.TimeoutException("timed out"), SandboxTimeoutError),
        (e2b.SandboxException("400: [LimitExceeded.SandboxInstance] full", status_code=400), SandboxQuotaError),
        (e2b.SandboxException("429: b"), SandboxQuotaError),
        (e2b.SandboxException("400: bad", status_code=400), SandboxRequestError),
        (e2b.SandboxException("403: blocked"), SandboxAuthError),
        (e2b.SandboxException("400: [AuthFailure.SecretId] no", status_code=400), SandboxAuthError),
        (e2b.SandboxException("500: oops", status_code=500), SandboxUnavailableError),
        (e2b.SandboxException("no status"), SandboxUnavailableError),
        (json.JSONDecodeError("x", "<html>", 0), SandboxUnavailableError),
        (json.JSONDecodeError("x", "[LimitExceeded.SandboxInstance]", 0), SandboxQuotaError),
        (httpx.ReadTimeout("t"), SandboxTimeoutError),
        (httpx.ConnectTimeout("t"), SandboxUnavailableError),
        (httpx.ConnectError("refused"), SandboxUnavailableError),
        (httpx.RemoteProtocolError("cut"), SandboxUnavailableError),
        (httpx.InvalidURL("u"), SandboxRequestError),
        (pyqwest.ReadError("r"), SandboxUnavailableError),
        (KeyError("sandboxID"), SandboxUnavailableError),
        (Exception("Body of the request is None"), SandboxUnavailableError),
    ],
)
def test_the_meaning(error: Exception, expected: type[SandboxError]):
    ours = map_error(error, doing="do it")
    assert type(ours) is expected
    assert str(ours).startswith("could not do it: ")


def test_ours_pass_through_and_keys_are_blanked():
    ours = SandboxQuotaError("x")
    assert map_error(ours, doing="do it") is ours
    assert "sesame" not in str(map_error(ValueError("key sesame"), doing="do it", hide="sesame"))
    assert "0123" not in str(map_error(ValueError("key e2b_0123456789abcdef0123"), doing="do it"))
