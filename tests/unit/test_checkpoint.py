"""A checkpoint is whole or not to be seen: real files, hurt in every way that a crash or a disk can hurt them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_ext.checkpoint.folder import POINTER, CheckpointFolder, Found
from verl_ext.checkpoint.marker import MARKER, Marker, SealedFile, damages, seal_files, seal_shards
from verl_ext.checkpoint.saving import Saved, save
from verl_ext.errors import CheckpointError

SHARDS = tuple(f"actor/{kind}_world_size_2_rank_{rank}.pt" for kind in ("model", "optim") for rank in (0, 1))
REST = ("actor/fsdp_config.json", "actor/huggingface/config.json", "data.pt")


def write_like_verl(root: Path, step: int, *, until: str = "", stop: Callable[[], None] = lambda: None) -> None:
    """The files of verl 0.6.1, in its order; `stop` is called before `until`."""
    for name in (*SHARDS, *REST):
        if name == until:
            stop()
        path = root / f"global_step_{step}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"{name} of step {step} ".encode() * 100)
    (root / POINTER).write_text(f"{step}")


def save_step(root: Path, step: int, keep: int | None = 2, expected: int | None = None, **how) -> Saved:
    return save(
        step,
        CheckpointFolder(root),
        write=lambda scratch: write_like_verl(scratch, step, **how),
        seal_ranks=lambda scratch: [seal_shards(scratch, rank) for rank in (0, 1)],
        keep=keep,
        expected_bytes=expected,
    )


def visible(root: Path) -> set[str]:
    """What verl, a person or `ls` takes for checkpoints."""
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4."""
    for step in (2, 4):
        save_step(tmp_path, step)
    return tmp_path


def test_a_finished_save_is_whole_named_and_pointed_to(saved):
    found = CheckpointFolder(saved).find()
    assert found == Found(saved / "global_step_4", Marker.read(saved / "global_step_4"), ())
    assert (saved / POINTER).read_text() == "4"
    assert visible(saved) == {"global_step_2", "global_step_4", POINTER}
    content = json.loads((saved / "global_step_4" / MARKER).read_text())
    assert {file["name"] for file in content["files"]} == {*SHARDS, *REST}
    assert content["bytes"] == sum((saved / "global_step_4" / name).stat().st_size for name in (*SHARDS, *REST))


KILLED_IN_A_SAVE = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import test_checkpoint as t
t.save_step(Path(sys.argv[3]), 6, until=sys.argv[4], stop=lambda: os.kill(os.getpid(), 9))
"""


def in_python(script: str, *arguments: object) -> list[str]:
    """A command that runs a script which imports this module."""
    return [
        sys.executable,
        "-c",
        script,
        str(Path(__file__).parents[2]),
        str(Path(__file__).parent),
        *map(str, arguments),
    ]


@pytest.mark.parametrize("until", [SHARDS[1], SHARDS[3], REST[2]])
def test_a_save_that_is_killed_leaves_nothing_to_be_seen(saved, until):
    done = subprocess.run(in_python(KILLED_IN_A_SAVE, saved, until), capture_output=True)
    assert done.returncode == -9, done.stderr
    assert visible(saved) == {"global_step_2", "global_step_4", POINTER}
    assert (saved / POINTER).read_text() == "4"
    found = CheckpointFolder(saved).find()
    assert found.folder == saved / "global_step_4"
    assert [(one.step, one.why) for one in found.passed] == [(6, ("its saving did not end",))]
    save_step(saved, 6)
    assert CheckpointFolder(saved).find().folder == saved / "global_step_6"
    assert not (saved / ".saving").exists()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("hurt", "words"),
    [
        (Path.unlink, "is missing"),
        (truncate, "bytes of the"),
        (flip_a_bit, "holds other bytes than were written"),
        (lambda path: path.write_bytes(b""), "has 0 bytes of the"),
    ],
)
@pytest.mark.parametrize("name", [SHARDS[3], "data.pt"])
def test_a_hurt_file_is_named_and_the_older_checkpoint_is_taken(saved, hurt: Callable[[Path], None], words, name):
    hurt(saved / "global_step_4" / name)
    folder = CheckpointFolder(saved)
    found = folder.find()
    assert found.folder == saved / "global_step_2"
    [passed] = found.passed
    assert passed.step == 4
    assert name in str(passed)
    assert words in str(passed)
    aside = folder.put_aside(passed)
    assert aside.name == "damaged-global_step_4"
    assert [path.name for path in aside.glob("*")] != []
    assert folder.find() == Found(saved / "global_step_2", found.marker, ())


@pytest.mark.parametrize("content", [None, b"", b'{"format": 1', b'{"format": 9}', b"[]"])
def test_without_a_marker_that_can_be_read_it_is_passed_over(saved, content):
    marker = saved / "global_step_4" / MARKER
    marker.unlink() if content is None else marker.write_bytes(content)
    found = CheckpointFolder(saved).find()
    assert found.folder == saved / "global_step_2"
    assert MARKER in str(found.passed[0])


def test_all_that_is_damaged_is_said(saved):
    for step in (2, 4):
        flip_a_bit(saved / f"global_step_{step}" / "data.pt")
    found = CheckpointFolder(saved).find()
    assert found.folder is None
    assert [one.step for one in found.passed] == [4, 2]


@pytest.mark.parametrize(("keep", "left"), [(2, [4, 6]), (3, [2, 4, 6]), (None, [2, 4, 6])])
def test_the_newest_are_kept_and_the_oldest_goes_last(saved, keep, left):
    seen: list[set[str]] = []

    def seal_ranks(scratch: Path) -> list[list[SealedFile]]:
        seen.append(visible(saved))
        return [seal_shards(scratch, rank) for rank in (0, 1)]

    done = save(
        6,
        CheckpointFolder(saved),
        write=lambda scratch: write_like_verl(scratch, 6),
        seal_ranks=seal_ranks,
        keep=keep,
        expected_bytes=None,
    )
    assert seen == [{"global_step_2", "global_step_4", POINTER}], "none goes before the new one is whole"
    assert visible(saved) == {POINTER, *(f"global_step_{step}" for step in left)}
    assert set(done.retired) == {2, 4, 6} - set(left)


def test_what_is_not_whole_is_not_counted_as_kept(saved):
    (saved / "global_step_4" / MARKER).unlink()
    save_step(saved, 6)
    assert [step for step in (2, 4, 6) if isinstance(Marker.read(saved / f"global_step_{step}"), Marker)] == [2, 6]


def test_a_step_that_is_saved_again_replaces_the_old_one(saved):
    flip_a_bit(saved / "global_step_4" / "data.pt")
    save_step(saved, 4)
    assert CheckpointFolder(saved).find().folder == saved / "global_step_4"


def test_shards_that_another_node_keeps_for_itself_are_named(saved):
    def seal_ranks(scratch: Path) -> list[list[SealedFile]]:
        elsewhere = scratch / SHARDS[1]
        ranks = [seal_shards(scratch, 0), [SealedFile(SHARDS[1], 1, "0", "node-b")]]
        elsewhere.unlink()
        return ranks

    with pytest.raises(CheckpointError, match=r"rank_1\.pt of step 6 was written on node-b.*VERL_EXT_DATA_ROOT"):
        save(
            6,
            CheckpointFolder(saved),
            write=lambda scratch: write_like_verl(scratch, 6),
            seal_ranks=seal_ranks,
            keep=2,
            expected_bytes=None,
        )
    assert visible(saved) == {"global_step_2", "global_step_4", POINTER}
    with pytest.raises(CheckpointError, match="rank 1 wrote no file"):
        save(
            6,
            CheckpointFolder(saved),
            write=lambda scratch: write_like_verl(scratch, 6),
            seal_ranks=lambda scratch: [seal_shards(scratch, 0), []],
            keep=2,
            expected_bytes=None,
        )


# --- a full disk


def test_room_is_looked_for_before_anything_is_written(saved):
    free = shutil.disk_usage(saved).free
    with pytest.raises(CheckpointError) as error:
        save_step(saved, 6, expected=free + 2**32)
    for words in ("step 6 needs", "free; the checkpoint of step 4 is whole", "VERL_EXT_DATA_ROOT", "train --resume"):
        assert words in str(error.value)
    assert CheckpointFolder(saved).find().folder == saved / "global_step_4"
    assert not (saved / ".saving").exists()


def test_an_error_that_is_not_the_disks_is_not_called_so(saved):
    def stop() -> None:
        raise ValueError("no optimizer")

    with pytest.raises(ValueError, match="no optimizer"):
        save_step(saved, 6, until=SHARDS[2], stop=stop)
    assert visible(saved) == {"global_step_2", "global_step_4", POINTER}
    assert not (saved / ".saving").exists()


# --- what is sealed


def test_a_rank_seals_its_own_shards(tmp_path):
    for rank in (1, 11, 21):
        (tmp_path / "actor").mkdir(exist_ok=True)
        (tmp_path / "actor" / f"model_world_size_32_rank_{rank}.pt").write_bytes(bytes([rank]))
    assert [file.name for file in seal_shards(tmp_path, 1)] == ["actor/model_world_size_32_rank_1.pt"]


def test_hashes_are_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    [file] = seal_files(tmp_path, [tmp_path / "a"])
    assert file.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    marker = Marker(1, 0.0, (file,))
    assert damages(tmp_path, marker) == []
    said: list[str] = []
    (tmp_path / "a").write_bytes(b"abd")
    assert damages(tmp_path, marker, said.append) == ["a holds other bytes than were written"]
