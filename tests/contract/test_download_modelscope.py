"""`invoke download --source modelscope` with the real modelscope library against a server of our own.

Covered: the answers that modelscope 1.33 asks for, plain HTTP. Not covered: the real ModelScope.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import warnings
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from http_answers import AnsweringHandler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library's own imports
    pytest.importorskip("modelscope", reason="modelscope is not installed here")
    from modelscope.hub import api as modelscope_api

from verl_ext.data_root import RECORD
from verl_ext.download import Wanted, download, fetch
from verl_ext.errors import ConfigurationError, HubUnreachableError
from verl_ext.hubs import ModelScope
from verl_ext.settings import Settings

MODEL, DATA = "Qwen/Qwen3-4B-Instruct-2507", "Maxwell-Jia/AIME_2024"
FILES = {
    MODEL: {"config.json": b'{"a": 1}', "model.safetensors": bytes(range(256)) * 1024, "a.gguf": b"no"},
    DATA: {"a.parquet": b"PAR1", "sub/b.parquet": b"PAR1PAR1"},
}


class Handler(AnsweringHandler):
    def answer(self, data: Any, status: int = 200) -> None:
        self.send(status, json.dumps({"Code": status, "Success": status == 200, "Message": "", "Data": data}).encode())

    def do_GET(self) -> None:
        path, query = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
        found = re.fullmatch(
            r"/api/v1/(models|datasets)/([^/]+(?:/[^/]+)?)(/revisions|/repo/files|/repo/tree|/repo)?", path
        )
        name = DATA if found and found[2] == "77" else found[2] if found else ""
        if found is None or name not in FILES:
            return self.answer(None, 404)
        match found[3]:
            case None:
                self.answer({"Id": 77, "Type": 1, "Name": name})
            case "/revisions":
                branches = [{"Revision": "master", "CreatedAt": 0}]
                self.answer({"RevisionMap": {"Branches": branches, "Tags": []}})
            case "/repo/files" | "/repo/tree":
                self.answer({"Files": [self.entry(path, content) for path, content in FILES[name].items()]})
            case _:
                content = FILES[name][query["FilePath"][0]]
                spoiled = self.server.spoil  # type: ignore[attr-defined]
                start = int((re.search(r"bytes=(\d+)-", self.headers.get("Range", "")) or ["", "0"])[1])
                body = (b"x" * len(content) if spoiled else content)[start:]
                self.send(206 if self.headers.get("Range") else 200, body)

    @staticmethod
    def entry(path: str, content: bytes) -> dict[str, Any]:
        return {
            "Path": path, "Name": path.rpartition("/")[2], "Type": "blob", "Size": len(content), "Revision": "r1",
            "Sha256": hashlib.sha256(content).hexdigest(), "IsLFS": False,
        }  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.spoil = False  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(modelscope_api, "MODELSCOPE_URL_SCHEME", "http://")
    monkeypatch.setenv("MODELSCOPE_DOMAIN", f"127.0.0.1:{server.server_port}")
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("verl_ext.download.PAUSE_S", 0.0)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(environ={"VERL_EXT_DATA_ROOT": str(tmp_path / "root")})


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_model_and_data_come_whole(hub, settings: Settings, tmp_path: Path):
    download(settings, "modelscope", [MODEL], [DATA], "", lambda _: None)
    model = content(tmp_path / "root" / "models" / "Qwen--Qwen3-4B-Instruct-2507")
    record = json.loads(model.pop(RECORD))
    assert model == {name: FILES[MODEL][name] for name in ("config.json", "model.safetensors")}
    assert (record["hub"], record["revision"]) == ("modelscope", "master")
    data = content(tmp_path / "root" / "data" / "raw" / "Maxwell-Jia--AIME_2024")
    data.pop(RECORD)
    assert data == FILES[DATA]


def test_what_comes_changed_is_not_taken(hub, settings: Settings, tmp_path: Path):
    hub.spoil = True
    folder = tmp_path / "root" / "m"
    with pytest.raises(ConfigurationError):
        fetch(Wanted(MODEL, "model", folder), ModelScope(settings), "", lambda _: None)
    assert not folder.exists()


def test_what_is_not_there_is_told(hub, settings: Settings, tmp_path: Path):
    with pytest.raises(ConfigurationError, match="is not there, or not for everybody"):
        fetch(Wanted("no/such", "model", tmp_path / "m"), ModelScope(settings), "", lambda _: None)


def test_out_of_reach_is_told_with_the_way_by_hand(settings: Settings, hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MODELSCOPE_DOMAIN", "127.0.0.1:1")
    with pytest.raises(HubUnreachableError, match=f"modelscope download --model {MODEL} --local_dir Qwen--Qwen3"):
        download(settings, "modelscope", [MODEL], [], "", lambda _: None)
