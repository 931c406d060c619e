"""verl_ext.settings: what is taken, what is refused and how, and that no secret shows anywhere."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from verl_ext import settings as under_test
from verl_ext.errors import ConfigurationError
from verl_ext.settings import PREFIX, VARIABLES, Secret, Settings, Variable

CANARY = "e2b_0123456789abcdefcanary"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no stray .env of the developer


def load(text: str, environ: dict[str, str] | None = None) -> Settings:
    Path("given.env").write_bytes(text.encode())
    return Settings.load("given.env", environ=environ or {})


def refused(text: str = "", environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(text, environ)
    assert CANARY not in str(caught.value)
    return str(caught.value)


def test_defaults_need_no_environment():
    settings = Settings.load(environ={})
    assert settings.backend == "local"
    assert settings.e2b_api_key is None
    assert settings.sandbox_max_alive == 10
    assert settings.data_root == Path.cwd() / "verl-ags-data"
    assert settings.folder("runs") == Path.cwd() / "verl-ags-data" / "runs"
    assert settings.env_file is None


def test_a_key_selects_ags():
    settings = load(f"E2B_API_KEY={CANARY}\n")
    assert settings.backend == "e2b"
    assert settings.e2b_domain == "ap-shanghai.tencentags.com"
    assert settings.e2b_api_key is not None
    assert settings.e2b_api_key.reveal() == CANARY


def test_the_process_wins_over_the_file_and_is_not_changed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_EXT_LOG_LEVEL", "error")
    Path(".env").write_text("VERL_EXT_LOG_LEVEL=debug\nVERL_EXT_SANDBOX_MAX_ALIVE=7\nOTHER=x y\n")
    before = dict(os.environ)
    settings = Settings.load()
    assert (settings.log_level, settings.sandbox_max_alive) == ("error", 7)
    assert dict(os.environ) == before
    assert settings.env_file == Path.cwd() / ".env"


def test_the_process_can_name_the_file():
    Path("shared.env").write_text("VERL_EXT_SANDBOX_MAX_ALIVE=99\n")
    assert Settings.load(environ={"VERL_EXT_ENV_FILE": "shared.env"}).sandbox_max_alive == 99
    with pytest.raises(ConfigurationError, match=r"gone\.env cannot be read"):
        Settings.load(environ={"VERL_EXT_ENV_FILE": "gone.env"})


@pytest.mark.parametrize("quoted", [f'"{CANARY}"', f"'{CANARY}'", CANARY])
def test_one_pair_of_quotes_means_nothing_in_the_file_and_in_docker(quoted: str):
    from_file = load(f"E2B_API_KEY={quoted}\n").e2b_api_key
    from_docker = Settings.load(environ={"E2B_API_KEY": quoted}).e2b_api_key
    assert from_file == from_docker == Secret(CANARY)


@pytest.mark.parametrize(
    ("line", "cure"),
    [
        (f'E2B_API_KEY="{CANARY}', "stray quote"),
        (f"E2B_API_KEY={CANARY}'", "stray quote"),
        (f"E2B_API_KEY=\"'{CANARY}'\"", "quote"),
        (f"E2B_API_KEY={CANARY}\r", "LF line ends"),
        (f"E2B_API_KEY={CANARY} ", "blank"),
        (f"E2B_API_KEY= {CANARY}", "blank"),
        (f"E2B_API_KEY ={CANARY}", "NAME=value"),
        (f" E2B_API_KEY={CANARY}", "NAME=value"),
        (f"E2B_API_KEY={CANARY} # mine", "blank inside"),
        (f"E2B_API_KEY={CANARY} {CANARY}", "blank inside"),
        (f"export E2B_API_KEY={CANARY}", "export"),
        ("E2B_API_KEY=${OTHER_KEY}", "read differently"),
        (f"E2B_API_KEY={CANARY}\\n", "read differently"),
        ("E2B_API_KEY", "NAME=value"),
        ("E2B_API_KEY=", "empty"),
        ('E2B_API_KEY=""', "empty"),
        (f"E2B_API_KEY={CANARY}\nE2B_API_KEY={CANARY}", "second time"),
    ],
)
def test_what_the_two_readers_take_differently_is_refused(line: str, cure: str):
    message = refused(line + "\n")
    assert "E2B_API_KEY" in message
    assert cure in message


@pytest.mark.parametrize(
    "value",
    [
        "your-key", "your_api_key_here", "changeme", "change-me", "<key>", "<E2B API key>", "xxx", "xxxxxxxx",
        "e2b_***", "ark_xxxx", "e2b_...", "...", "TODO", "null", "api_key", "ok", "schlüssel-abcdef",
    ],
)  # fmt: skip
def test_placeholders_are_refused_by_name(value: str):
    assert "E2B_API_KEY" in refused(environ={"E2B_API_KEY": value})
    assert "HF_TOKEN" in refused(f"HF_TOKEN={value}\n")


@pytest.mark.parametrize(
    "value", [f"{CANARY} ", f"{CANARY}\r", f"{CANARY}\n", f"a {CANARY}", "", '"', f'"{CANARY}', "a\tb-cdefghij"]
)
def test_bad_values_of_the_process_are_refused_by_name(value: str):
    message = refused(environ={"WANDB_API_KEY": value})
    assert "WANDB_API_KEY (the environment)" in message


@pytest.mark.parametrize(
    ("value", "cure"),
    [
        ("https://ap-shanghai.tencentags.com", "without https"),
        ("ap-shanghai.tencentags.com/", "slash"),
        ("api.ap-shanghai.tencentags.com", "api."),
        ("tencentags.com", "region"),
        ("localhost", "no domain"),
        ("AP-shanghai.tencentags.com", "did you mean ap-shanghai.tencentags.com?"),
        ("ap-shanghia.tencentags.com", "did you mean ap-shanghai.tencentags.com?"),
        ("shanghai.tencentags.com", "did you mean ap-shanghai.tencentags.com?"),
        ("cn-shanghai.tencentags.com", "did you mean ap-shanghai.tencentags.com?"),
        ("-a.b", "no domain"),
    ],
)
def test_wrong_domains_are_refused_with_the_cure(value: str, cure: str):
    assert cure in refused(f"E2B_DOMAIN={value}\n")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("VERL_EXT_SANDBOX_MAX_ALIVE", "300s"),
        ("VERL_EXT_SANDBOX_MAX_ALIVE", "1e3"),
        ("VERL_EXT_SANDBOX_MAX_ALIVE", "0"),
        ("VERL_EXT_SANDBOX_MAX_ALIVE", "1.5"),
        ("VERL_EXT_SANDBOX_MAX_ALIVE", "inf"),
        ("VERL_EXT_SANDBOX_CREATE_RATE_PER_S", "-1"),
        ("VERL_EXT_SANDBOX_BACKEND", "docker"),
        ("VERL_EXT_LOG_LEVEL", "loud"),
        ("VERL_EXT_REQUIRE_E2B", "yes"),
        ("CUDA_COMPAT", "1"),
        ("HF_ENDPOINT", "hub.example.org"),
        ("E2B_API_URL", "http://user:pw@host"),
    ],
)
def test_other_wrong_values_are_refused_by_name(name: str, value: str):
    assert name in refused(f"{name}={value}\n")


def test_everything_wrong_is_said_at_once():
    message = refused(
        "E2B_DOMAIN=https://x.y\nVERL_EXT_SANDBOX_MAX_ALIV=9\nexport HF_TOKEN=abc\n",
        {"VERL_EXT_LOG_LEVEL": "loud", "VERL_EXT_SANDBOX_BACKEND": "e2b"},
    )
    assert message.startswith("5 setting(s)")
    assert "did you mean VERL_EXT_SANDBOX_MAX_ALIVE?" in message
    assert "E2B_API_KEY is not set" in message


@pytest.mark.parametrize("content", [b"\xff\xfeE\x002\x00", b"\xef\xbb\xbfHF_ENDPOINT=https://h\n"])
def test_files_in_other_encodings_are_refused(content: bytes):
    Path("given.env").write_bytes(content)
    with pytest.raises(ConfigurationError, match="UTF-8"):
        Settings.load("given.env", environ={})


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Settings.load(tmp_path, environ={})


def test_no_secret_shows(caplog: pytest.LogCaptureFixture):
    settings = load("".join(f"{v.name}={CANARY}\n" for v in VARIABLES if v.secret))
    logging.getLogger("canary").warning("%s %r", settings, [settings.e2b_api_key])
    shown = [
        repr(settings),
        str(settings),
        f"{settings} {settings.e2b_api_key} {settings.e2b_api_key:>40}",
        repr(dataclasses.asdict(settings)),
        json.dumps(settings.public_dict()),
        repr(copy.deepcopy(settings)),
        caplog.text,
    ]
    assert not [text for text in shown if "canary" in text.replace("canary:", "")]
    assert settings.public_dict()["HF_TOKEN"] == "set"
    with pytest.raises(TypeError, match=r"Settings\.load"):
        pickle.dumps(settings)


def test_no_secret_is_in_an_error_or_its_pickle():
    with pytest.raises(ConfigurationError) as caught:
        load(f'E2B_API_KEY="{CANARY}\nHF_TOKEN={CANARY} x\n', {"WANDB_API_KEY": f"{CANARY}\r"})
    assert CANARY.encode() not in pickle.dumps(caught.value)
    cause: BaseException | None = caught.value
    while cause is not None:
        assert CANARY not in repr(cause)
        cause = cause.__cause__ or cause.__context__


@pytest.mark.parametrize(
    "domain", ["ap-guangzhou.tencentags.com", "xx-newtown.tencentags.com", "internal.tencentags.com", "e2b.app"]
)
def test_other_domains_are_taken(domain: str):
    assert load(f"E2B_DOMAIN={domain}\n").e2b_domain == domain


@pytest.mark.parametrize(
    ("key", "domain", "cure"),
    [
        ("ark_" + "0a" * 8, "e2b.app", "E2B_DOMAIN=ap-shanghai.tencentags.com"),
        ("e2b_" + "0a" * 20, "ap-shanghai.tencentags.com", "E2B_DOMAIN=e2b.app"),
    ],
)
def test_a_key_of_another_service_is_refused(key: str, domain: str, cure: str):
    message = refused(f"E2B_API_KEY={key}\nE2B_DOMAIN={domain}\n")
    assert cure in message
    assert key not in message


def test_what_is_wrong_has_its_default_so_that_the_rest_can_be_checked():
    settings, problems = Settings.read(environ={"VERL_EXT_SANDBOX_MAX_ALIVE": "many", "VERL_EXT_LOG_LEVEL": "debug"})
    assert len(problems) == 1
    assert (settings.sandbox_max_alive, settings.log_level) == (10, "debug")


def test_export_foreign_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    for name in ("E2B_API_KEY", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, CANARY)  # so that it is put back at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", "https://set.already")
    # An older `docker run --env-file` passes the quotes on.
    monkeypatch.setenv("WANDB_API_KEY", f"'{CANARY}'")
    Path(".env").write_text(f"HF_TOKEN={CANARY}\nHF_ENDPOINT=https://other\nE2B_API_KEY={CANARY}\n")
    assert Settings.load().export_foreign() == ["HF_TOKEN", "WANDB_API_KEY"]
    assert os.environ["HF_TOKEN"] == os.environ["WANDB_API_KEY"] == CANARY
    assert os.environ["HF_ENDPOINT"] == "https://set.already"
    assert "E2B_API_KEY" not in os.environ


@pytest.mark.parametrize("uri", ["http://mlflow:5000", "sqlite:////data/mlflow.db", "file:/data/mlflow"])
def test_mlflow_takes_a_server_or_a_file(uri: str):
    assert Settings.load(environ={"MLFLOW_TRACKING_URI": uri}).mlflow_tracking_uri == uri


@pytest.mark.parametrize("uri", ["http://me:word@mlflow:5000", "sqlite:mlflow.db", "mlflow.db", "file:"])
def test_and_neither_a_password_nor_half_an_address(uri: str):
    with pytest.raises(ConfigurationError, match="MLFLOW_TRACKING_URI") as raised:
        Settings.load(environ={"MLFLOW_TRACKING_URI": uri})
    assert "word" not in str(raised.value)


@pytest.mark.parametrize(
    "key",
    [
        "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567", "e2b_0123456789abcdef0123456789abcdef01234567",
        "ark_0123456789abcdefABCDEF", "sk-proj-0123_4567-89abcdefghij", "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    ],
)  # fmt: skip
def test_what_has_the_shape_of_a_key_is_masked_though_no_setting_holds_it(key: str):
    settings = Settings.load(environ={})
    assert settings.redacted(f"trainer.x={key}, 1e-6") == "trainer.x=***, 1e-6"
    assert settings.reveals(f"key:{key}") == "what has the shape of a key"


@pytest.mark.parametrize(
    "text",
    [
        "hf_transfer", "actor_rollout_ref.rollout.n=8", "/data/hf_models/Qwen--Qwen3-4B-Instruct-2507", "e2b_code",
        "task-0123456789abcdefghijklmn", "benchmark_0123456789abcdef0123", "risk-adjusted-return-of-the-portfolio",
        "retool-20251130-141502-1a2b", "0123456789abcdef0123456789abcdef01234567",
    ],
)  # fmt: skip
def test_what_only_looks_a_little_like_one_is_left(text: str):
    assert Settings.load(environ={}).redacted(text) == text


def test_a_flags_mistake_is_the_flags():
    flags = {"--sandbox": "ags", "--data-root": "/etc/passwd"}
    _, problems = Settings.read(flags=flags, environ={"VERL_EXT_SANDBOX_BACKEND": "local"})
    assert problems == [
        "--sandbox must be one of auto, e2b, local",
        "--data-root is no folder: /etc/passwd is a file",
    ]
    _, problems = Settings.read(flags={"--sandbox": "e2b"}, environ={})
    assert problems == ["--sandbox is e2b but E2B_API_KEY is not set: set it, or choose local"]
    assert Settings.load(flags={"--sandbox": "", "--data-root": "/x"}, environ={}).data_root == Path("/x")


@pytest.mark.parametrize("share", ["0", "1.5", "2", "-1"])
def test_a_share_beyond_the_account_is_told_when_it_is_read(share: str):
    with pytest.raises(ConfigurationError, match=r"VERL_EXT_SANDBOX_SHARE .* from 0.001 to 1"):
        Settings.load(environ={"VERL_EXT_SANDBOX_SHARE": share})


@pytest.mark.parametrize("below", ["", "/runs"])
def test_a_data_root_that_is_a_file_is_told_when_it_is_read(below: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"VERL_EXT_DATA_ROOT .* is no folder: .*/file is a file"):
        Settings.load(environ={"VERL_EXT_DATA_ROOT": f"{tmp_path}/file{below}"})
    assert Settings.load(environ={"VERL_EXT_DATA_ROOT": f"{tmp_path}/new{below}"}).data_root.name


def test_who_says_the_default_means_it_also_on_a_local_server():
    assert under_test.sandboxes_alive(Settings.load(environ={})) == under_test.LOCAL_MAX_ALIVE
    said = Settings.load(environ={"VERL_EXT_SANDBOX_MAX_ALIVE": "10"})
    assert (said.is_default("sandbox_max_alive"), said.is_default("sandbox_max_starting")) == (False, True)
    assert under_test.sandboxes_alive(said) == 10


def test_a_secret_in_a_text_is_told_by_name():
    settings = load(f"HF_TOKEN={CANARY}\n")
    assert settings.reveals(f"x={CANARY}!") == "HF_TOKEN"
    assert settings.reveals("HF_TOKEN") is None
    assert settings.reveals(CANARY[:12]) is None


def test_only_foreign_variables_are_read_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert under_test.foreign("RAY_ADDRESS") == "10.0.0.1:6379"
    with pytest.raises(ValueError, match="Settings has it"):
        under_test.foreign("E2B_API_KEY")


def test_a_host_is_exempted_from_the_proxy_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "a.example")
    monkeypatch.delenv("no_proxy", raising=False)
    for _ in range(2):
        under_test.exempt_from_proxy("http://127.0.0.1:3000/x")
    assert os.environ["NO_PROXY"] == "a.example,127.0.0.1"
    assert os.environ["no_proxy"] == "127.0.0.1"
    monkeypatch.delenv("no_proxy")


def test_the_fields_are_the_table():
    names = {v.name.removeprefix(PREFIX).lower() for v in VARIABLES}
    assert names == {field.name for field in dataclasses.fields(Settings)} - {"given"}


def test_importing_settings_is_light():
    code = "import sys, verl_ext.settings; print([m for m in ('torch','ray','vllm','e2b','httpx') if m in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(under_test.__file__).parents[1],
    )
    assert run.stdout.strip() == "[]"


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("E2B_API_KEY", CANARY)
    assert under_test._main([]) == 0
    assert "E2B_API_KEY=set" in capsys.readouterr().out
    monkeypatch.setenv("E2B_DOMAIN", "https://x")
    assert under_test._main([]) == 2
    assert "E2B_DOMAIN" in capsys.readouterr().err


@pytest.mark.parametrize("variable", [one for one in VARIABLES if "|" in one.unit], ids=lambda one: one.name)
def test_every_word_that_a_variable_names_is_taken(variable: Variable):
    for word in variable.unit.split("|"):
        given = {"E2B_API_KEY": "e2b_" + "a1" * 20, "E2B_DOMAIN": "e2b.app", variable.name: word}
        assert getattr(Settings.load(environ=given), variable.field) == variable.parse(word)


def test_a_slip_in_the_name_of_a_key_is_told(tmp_path: Path):
    (tmp_path / ".env").write_text("E2B_APIKEY=e2b_0123\nMY_OWN=1\n")
    with pytest.raises(ConfigurationError, match="did you mean E2B_API_KEY") as caught:
        Settings.load(tmp_path / ".env", environ={})
    assert "MY_OWN" not in str(caught.value)
    assert "e2b_0123" not in str(caught.value)
