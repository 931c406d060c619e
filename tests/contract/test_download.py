"""`invoke download` with the real huggingface_hub against a hub of our own: resuming, verifying, atomic, offline.

Covered: the hub's JSON and files as huggingface_hub 0.36 asks for them, plain HTTP. Not covered: Xet, the real hubs.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from http_answers import AnsweringHandler

from verl_ext import download as under_test
from verl_ext.data_root import RECORD, read_record
from verl_ext.download import Wanted, download, fetch, main
from verl_ext.errors import ConfigurationError, HubUnreachableError
from verl_ext.hubs import HuggingFace, RemoteFile, wanted_files
from verl_ext.settings import Settings

ROOT = Path(under_test.__file__).parents[1]
MODEL, DATA = "Qwen/Qwen3-4B-Instruct-2507", "Maxwell-Jia/AIME_2024"
SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_canary0123456789"
CHUNK = 65_536  # what the library writes at a time; 10 MiB by itself
BIG = bytes(range(256)) * 4096  # 1 MiB, in chunks of which a cut can fall


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub(ThreadingHTTPServer):
    """Two repositories, and what can go wrong with them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        model = {"config.json": b'{"a": 1}', "model.safetensors": BIG, "pytorch_model.bin": b"same", "a.gguf": b"no"}
        self.repositories = {MODEL: model, DATA: {"a.parquet": b"PAR1", "sub/b.parquet": b"PAR1PAR1"}}
        self.cut_after = 0  # bytes of a file after which the connection is closed, once
        self.stall: threading.Event | None = None  # the large file ends only when it is set
        self.stalled = threading.Event()
        self.cut_always = 0  # the same, every time
        self.spoil = ""  # a file whose content comes changed
        self.status = 0  # what every request is answered with
        self.error_code = ""
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(AnsweringHandler):
    server: FakeHub

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path, self.headers.get("Range", "")))
        if hub.status:
            return self.send(hub.status, X_Error_Code=hub.error_code)
        if found := re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self.repository(found[1], found[2] or "main")
        if found := re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self.file(hub.repositories[found[1]][found[2]], found[2])
        return self.send(404, X_Error_Code="RepoNotFound")

    def repository(self, name: str, revision: str) -> None:
        if name not in self.server.repositories:
            return self.send(404, X_Error_Code="RepoNotFound")
        if revision not in ("main", SHA):
            return self.send(404, X_Error_Code="RevisionNotFound")
        siblings: list[dict[str, Any]] = []
        for path, content in self.server.repositories[name].items():
            entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": git_sha1(content)}
            if path.endswith((".safetensors", ".parquet")):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        self.send(200, json.dumps({"id": name, "sha": SHA, "siblings": siblings}).encode())

    def file(self, content: bytes, name: str) -> None:
        hub, total = self.server, len(content)
        if name == hub.spoil:
            content = content[:-1] + b"!"
        start = int((re.search(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X_Repo_Commit": SHA, "Accept_Ranges": "bytes"}
        if start:
            headers["Content_Range"] = f"bytes {start}-{total - 1}/{total}"
        cut = hub.cut_after or hub.cut_always
        if self.command == "GET" and 0 < cut < total - start:
            hub.cut_after = 0
            self.send_response(206 if start else 200)
            for key, value in {**headers, "Content_Length": str(total - start)}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content[start : start + cut])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        if hub.stall and self.command == "GET" and total > CHUNK:
            hub.stalled.set()
            hub.stall.wait(60)
        self.send(206 if start else 200, content[start:], **headers)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def settings(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(under_test, "PAUSE_S", 0.0)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    values = {"VERL_EXT_DATA_ROOT": str(tmp_path / "root"), "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    return Settings.load(environ=values)


@pytest.fixture
def wanted(tmp_path: Path) -> Wanted:
    return Wanted(MODEL, "model", tmp_path / "root" / "models" / "Qwen--Qwen3-4B-Instruct-2507")


@pytest.fixture
def run(settings: Settings, wanted: Wanted) -> Callable[..., bool]:
    return lambda revision="": fetch(wanted, HuggingFace(settings), revision, lambda _: None)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_repository_comes_whole_with_a_record_and_nothing_else(run, wanted: Wanted, hub: FakeHub):
    assert run() is True
    found = content(wanted.folder)
    record = json.loads(found.pop(RECORD))
    assert found == {"config.json": b'{"a": 1}', "model.safetensors": BIG}
    assert (record["id"], record["hub"], record["revision"]) == (MODEL, "huggingface", SHA)
    assert record["files"]["model.safetensors"]["sha256"] == hashlib.sha256(BIG).hexdigest()
    assert not wanted.folder.with_name(wanted.folder.name + ".partial").exists()
    assert TOKEN not in json.dumps(record)


def test_what_is_there_is_not_asked_for_again(run, hub: FakeHub):
    run()
    hub.asked.clear()
    assert run() is False
    assert hub.asked == []
    assert run(SHA) is False


def test_a_broken_download_goes_on_where_it_broke_off(run, wanted: Wanted, hub: FakeHub):
    hub.cut_after = 400_000
    run()
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges[0] == ""
    assert ranges[1:] == [f"bytes={400_000 // CHUNK * CHUNK}-"]
    assert content(wanted.folder)["model.safetensors"] == BIG


def test_a_way_that_always_breaks_is_given_up_and_what_came_is_kept(run, wanted: Wanted, hub: FakeHub):
    hub.cut_always = 100_000
    with pytest.raises(ConfigurationError, match=r"broke off 5 times.*it goes on"):
        run()
    hub.cut_always = 0
    hub.asked.clear()
    run()
    ranges = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith("model.safetensors")]
    assert ranges == [f"bytes={5 * CHUNK}-"]


def test_a_killed_download_goes_on_in_the_next_call(run, wanted: Wanted, hub: FakeHub):
    partial = wanted.folder.with_name(wanted.folder.name + ".partial")
    (partial / "model.safetensors").parent.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(BIG)
    run()
    assert [path for method, path, _ in hub.asked if method == "GET" and path.endswith("model.safetensors")] == []
    assert read_record(wanted.folder)


def test_a_file_that_came_changed_is_not_taken(run, wanted: Wanted, hub: FakeHub):
    hub.spoil = "model.safetensors"
    with pytest.raises(ConfigurationError, match=r"model\.safetensors has another content than the hub's"):
        run()
    assert not wanted.folder.exists()
    hub.spoil = ""
    hub.asked.clear()
    assert run() is True
    assert [path for method, path, _ in hub.asked if method == "GET" and "config.json" in path] == []
    assert content(wanted.folder)["model.safetensors"] == BIG


@pytest.mark.parametrize("damage", [b"", BIG[:-1], b"x" * len(BIG)], ids=["empty", "short", "other"])
def test_a_folder_of_the_users_is_completed_and_repaired(damage: bytes, run, wanted: Wanted, hub: FakeHub):
    wanted.folder.mkdir(parents=True)
    (wanted.folder / "model.safetensors").write_bytes(damage)
    (wanted.folder / "config.json").write_bytes(b'{"a": 1}')
    assert run() is True
    assert content(wanted.folder)["model.safetensors"] == BIG
    assert [path for method, path, _ in hub.asked if method == "GET" and path.endswith("config.json")] == []


def test_a_file_that_was_lost_since_is_fetched(run, wanted: Wanted):
    run()
    (wanted.folder / "config.json").unlink()
    assert run() is True
    assert (wanted.folder / "config.json").is_file()


def test_a_data_set_goes_where_prepare_data_looks(settings: Settings, tmp_path: Path):
    from recipe.retool.data_files import find_files

    download(settings, "huggingface", [], [DATA], "", lambda _: None)
    names = [path.name for path in find_files(DATA, "val", tmp_path / "root")]
    assert names == ["a.parquet", "b.parquet"]


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (404, "RepoNotFound", "is not there, or not for everybody"),
        (401, "RepoNotFound", "set HF_TOKEN"),
        (403, "GatedRepo", "is gated: accept its terms"),
        (404, "RevisionNotFound", "has no such revision"),
    ],
)
def test_what_cannot_be_had_is_told_with_its_cure(status: int, code: str, words: str, run, hub: FakeHub):
    hub.status, hub.error_code = status, code
    with pytest.raises(ConfigurationError, match=words) as caught:
        run()
    assert not isinstance(caught.value, HubUnreachableError)
    assert TOKEN not in str(caught.value)


def test_a_hub_that_fails_is_out_of_reach(run, hub: FakeHub):
    hub.status = 500
    with pytest.raises(HubUnreachableError, match="does not answer"):
        run()


def test_too_little_disk_is_told_before_a_byte_comes(run, wanted: Wanted, hub: FakeHub, monkeypatch):
    monkeypatch.setattr(under_test.shutil, "disk_usage", lambda _: under_test.shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(ConfigurationError, match="another --data-root"):
        run()
    assert [path for _, path, _ in hub.asked if "/resolve/" in path] == []


def invoke(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    values = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "verl_ext.download", f"--data-root={tmp_path / 'root'}", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=values, capture_output=True, text=True, timeout=120)


def test_where_the_hub_is_out_of_reach_the_way_by_hand_is_printed(tmp_path: Path):
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}\nHF_ENDPOINT=http://127.0.0.1:1\n")
    done = invoke(tmp_path)
    assert done.returncode == 2
    assert f"hf download {MODEL} --local-dir Qwen--Qwen3-4B-Instruct-2507\n" in done.stderr
    assert f"hf download {DATA} --repo-type dataset --local-dir Maxwell-Jia--AIME_2024\n" in done.stderr
    assert f"    {tmp_path}/root/models/Qwen--Qwen3-4B-Instruct-2507\n" in done.stderr
    assert "set HF_ENDPOINT to a mirror, or take --source modelscope" in done.stderr
    assert "Traceback" not in done.stderr
    assert TOKEN not in done.stderr + done.stdout


def test_what_was_brought_by_hand_is_enough(tmp_path: Path, settings: Settings, hub: FakeHub):
    for folder in ("models/a--b", "data/raw/c--d"):
        (tmp_path / "root" / folder).mkdir(parents=True)
    hub.status = 500
    said: list[str] = []
    download(settings, "huggingface", ["a/b"], ["c/d"], "", said.append)
    assert "put there by hand" in said[-1]


def test_the_mirror_and_the_token_come_from_the_env_file(tmp_path: Path, hub: FakeHub):
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}\nHF_ENDPOINT={hub.url}\n")
    done = invoke(tmp_path, f"--model={MODEL}")
    assert done.returncode == 0, done.stderr
    assert "every file verified" in done.stdout
    again = invoke(tmp_path, f"--model={MODEL}")
    assert "revision 0123456789ab" in again.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model=Qwen3"], "is no name of a repository: write it like Qwen/"),
        (["--model=Qwen/Qwen3/x"], "is no name of a repository"),
        (["--source=kaggle"], "no hub named 'kaggle'"),
        (["--data-root=/proc/no"], "cannot be made"),
    ],
)
def test_a_mistake_is_told_with_its_cure(arguments, words, settings, hub, capsys, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert words in told
    assert "Traceback" not in told


def test_one_format_of_the_weights_is_enough():
    names = ["model.safetensors", "pytorch_model.bin", "a.gguf", "original/x.pth", "onnx/m.onnx", "tokenizer.json"]
    assert wanted_files(names) == ["model.safetensors", "tokenizer.json"]
    assert wanted_files(["pytorch_model.bin"]) == ["pytorch_model.bin"]


def test_content_is_compared_by_whichever_hash_the_hub_gives(tmp_path: Path):
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert RemoteFile(3, sha256=hashlib.sha256(b"abc").hexdigest()).differs(path) == ""
    assert RemoteFile(3, git_sha1=git_sha1(b"abc")).differs(path) == ""
    assert RemoteFile(3, git_sha1=git_sha1(b"abd")).differs(path)
    assert RemoteFile(4).differs(path) == "has 3 bytes in place of 4"
    assert RemoteFile(3).differs(path) == ""
    assert RemoteFile(3).differs(tmp_path / "gone") == "is missing"


def test_a_signal_ends_it_at_once_and_what_came_is_kept(tmp_path: Path, hub: FakeHub):
    hub.stall = threading.Event()
    command = [sys.executable, "-m", "verl_ext.download", f"--data-root={tmp_path / 'root'}", f"--model={MODEL}"]
    values = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url}
    with subprocess.Popen(command, cwd=tmp_path, env=values, stderr=subprocess.PIPE, text=True) as process:
        assert hub.stalled.wait(60)
        process.terminate()
        _, told = process.communicate(timeout=60)
    hub.stall.set()
    assert process.returncode == 128 + signal.SIGTERM
    assert "the next `invoke download` goes on from there" in told
    assert not (tmp_path / "root" / "models" / "Qwen--Qwen3-4B-Instruct-2507").exists()


def test_the_callers_signals_are_its_own_again(capsys: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--model=none"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
