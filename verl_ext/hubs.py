"""Hugging Face and ModelScope, each through its own library: what is there, and how to fetch it.

Both libraries go on where a download broke off. Neither is trusted to have checked what it fetched:
huggingface_hub compares sizes only, so verl_ext/download.py hashes every file itself.
"""

from __future__ import annotations

import errno
import hashlib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, Protocol

from verl_ext.errors import ConfigurationError, HubUnreachableError
from verl_ext.settings import Settings

Kind = Literal["model", "dataset"]
# Other formats of the same weights, and things that no run reads.
LEFT_OUT = ("*.gguf", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.ot", "original/*", "onnx/*", ".git*", "*.md5")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        size: in bytes.
        sha256: of its content, "" if the hub says none.
        git_sha1: of its content as a git blob, "" if the hub says none.
    """

    size: int
    sha256: str = ""
    git_sha1: str = ""

    def differs(self, path: Path) -> str:
        """How a file on disk differs from this one, "" if it does not."""
        if not path.is_file():
            return "is missing"
        if path.stat().st_size != self.size:
            return f"has {path.stat().st_size} bytes in place of {self.size}"
        with path.open("rb") as file:
            if self.sha256:
                same = hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
            elif self.git_sha1:
                digest = hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
                while block := file.read(1 << 20):
                    digest.update(block)
                same = digest.hexdigest() == self.git_sha1
            else:
                same = True
        return "" if same else "has another content than the hub's"


@dataclass(frozen=True)
class Listing:
    """What a repository holds at one revision, what no run reads left out."""

    revision: str
    files: Mapping[str, RemoteFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


class Hub(Protocol):
    """A place to fetch from."""

    name: str
    address: str

    def listing(self, hub_id: str, kind: Kind, revision: str) -> Listing:
        """What is there.

        Raises:
            ConfigurationError: there is no such repository or revision, or it needs a token.
            HubUnreachableError: the hub does not answer.
        """
        ...

    def fetch(self, hub_id: str, kind: Kind, listing: Listing, folder: Path) -> None:
        """Bring the files of a listing into a folder; what is there already is not fetched again.

        Raises:
            HubUnreachableError: it broke off.
        """
        ...

    def commands(self, hub_id: str, kind: Kind) -> list[str]:
        """The same on another machine, by the hub's own tool, into a folder of the repository's name."""
        ...


def hub_named(name: str, settings: Settings) -> Hub:
    """The hub of that name.

    Raises:
        ConfigurationError: there is none, or its library is not installed.
    """
    if name not in HUBS:
        raise ConfigurationError(f"no hub named {name!r}: there are {', '.join(HUBS)}")
    return HUBS[name](settings)


def wanted_files(names: Iterable[str]) -> list[str]:
    """What of a repository a run can read: one format of the weights, no pictures of progress."""
    kept = [name for name in names if not any(fnmatch(name, pattern) for pattern in LEFT_OUT)]
    if any(name.endswith(".safetensors") for name in kept):
        kept = [name for name in kept if not fnmatch(name, "*.bin")]
    return kept


class HuggingFace:
    """The hub at HF_ENDPOINT, with HF_TOKEN if there is one."""

    name = "huggingface"

    def __init__(self, settings: Settings) -> None:
        settings.export_foreign()
        self._hub: Any = importlib.import_module("huggingface_hub")
        self.address = settings.hf_endpoint or "https://huggingface.co"
        if settings.hf_endpoint:
            # A mirror has the files but not the other service that Xet would take them from.
            constants: Any = importlib.import_module("huggingface_hub.constants")
            constants.HF_HUB_DISABLE_XET = True
        self._token = settings.hf_token.reveal() if settings.hf_token else None

    def listing(self, hub_id: str, kind: Kind, revision: str) -> Listing:
        """See `Hub.listing`."""
        api = self._hub.HfApi(endpoint=self.address, token=self._token)
        with _told(self, hub_id, self._hub):
            info = api.repo_info(hub_id, repo_type=kind, revision=revision or None, files_metadata=True, timeout=30)
        found = {sibling.rfilename: sibling for sibling in info.siblings or []}
        files = {
            name: RemoteFile(
                found[name].size or 0, (found[name].lfs or {}).get("sha256", ""), found[name].blob_id or ""
            )
            for name in wanted_files(found)
        }
        return Listing(info.sha, files)

    def fetch(self, hub_id: str, kind: Kind, listing: Listing, folder: Path) -> None:
        """See `Hub.fetch`."""
        with _told(self, hub_id, self._hub):
            self._hub.snapshot_download(
                hub_id, repo_type=kind, revision=listing.revision, local_dir=folder, endpoint=self.address,
                token=self._token, allow_patterns=[_literal(name) for name in listing.files],
            )  # fmt: skip

    def commands(self, hub_id: str, kind: Kind) -> list[str]:
        """See `Hub.commands`."""
        what = " --repo-type dataset" if kind == "dataset" else ""
        return [f"hf download {hub_id}{what} --local-dir {hub_id.replace('/', '--')}"]


class ModelScope:
    """ModelScope; repositories there mostly have the names that they have at Hugging Face."""

    name = "modelscope"
    address = "https://www.modelscope.cn"

    def __init__(self, settings: Settings) -> None:
        try:
            self._api_module: Any = importlib.import_module("modelscope.hub.api")
            self._download: Any = importlib.import_module("modelscope.hub.snapshot_download")
        except ImportError as error:
            raise ConfigurationError("the library `modelscope` is not installed: run `invoke setup` again") from error

    def listing(self, hub_id: str, kind: Kind, revision: str) -> Listing:
        """See `Hub.listing`."""
        api = self._api_module.HubApi()
        branch = revision or "master"
        with _told(self, hub_id):
            endpoint = api.get_endpoint_for_read(repo_id=hub_id, repo_type=kind)
            if kind == "model":
                rows = api.get_model_files(hub_id, revision=branch, recursive=True, endpoint=endpoint)
            else:
                rows = self._download.fetch_repo_files(api, hub_id, branch, endpoint)
        rows = {row["Path"]: row for row in rows or [] if row.get("Type") != "tree"}
        files = {
            name: RemoteFile(int(rows[name]["Size"]), rows[name].get("Sha256") or "") for name in wanted_files(rows)
        }
        return Listing(branch, files)

    def fetch(self, hub_id: str, kind: Kind, listing: Listing, folder: Path) -> None:
        """See `Hub.fetch`."""
        with _told(self, hub_id):
            self._download.snapshot_download(
                repo_id=hub_id, repo_type=kind, revision=listing.revision, local_dir=str(folder),
                allow_patterns=[_literal(name) for name in listing.files],
            )  # fmt: skip

    def commands(self, hub_id: str, kind: Kind) -> list[str]:
        """See `Hub.commands`."""
        return [f"modelscope download --{kind} {hub_id} --local_dir {hub_id.replace('/', '--')}"]


HUBS: dict[str, type[HuggingFace] | type[ModelScope]] = {"huggingface": HuggingFace, "modelscope": ModelScope}


def _literal(name: str) -> str:
    """A file's name as a pattern that fits no other."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in name)


class _told:
    """Turns what a hub's library raises into words with a cure."""

    def __init__(self, hub: Hub, hub_id: str, huggingface: Any = None) -> None:
        self._hub, self._id, self._library = hub, hub_id, huggingface

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, ConfigurationError):
            return
        words = " ".join(str(error).split())[:160]
        where = f"{self._hub.address}/{self._id}"
        answers = (getattr(error, "response", None), *error.args)  # modelscope gives it as the argument
        status = next(filter(None, (getattr(answer, "status_code", None) for answer in answers)), None)
        names = {parent.__name__ for parent in type(error).__mro__}
        if "GatedRepoError" in names:
            raise ConfigurationError(f"{where} is gated: accept its terms there, and set HF_TOKEN in .env") from error
        if "RevisionNotFoundError" in names:
            raise ConfigurationError(f"{where} has no such revision: leave --revision away, or look there") from error
        if "RepositoryNotFoundError" in names or status in (401, 403, 404) or "NotExistError" in names:
            raise ConfigurationError(
                f"{where} is not there, or not for everybody: look at its name, and if it is private set HF_TOKEN"
            ) from error
        if "HFValidationError" in names:
            raise ConfigurationError(f"{self._id!r} is no name of a repository: write it like Qwen/Qwen3-4B") from error
        if "OfflineModeIsEnabled" in names:
            raise ConfigurationError("HF_HUB_OFFLINE forbids downloads: unset it") from error
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigurationError(f"the disk is full ({words}): free some of it; what came stays") from error
        raise HubUnreachableError(f"{self._hub.address} does not answer ({type(error).__name__}: {words})") from error
