"""Parts of the local server that need no server: tables, filters, paths, cuts."""

from __future__ import annotations

import asyncio
import json
import platform
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_ext.sandbox.server import bubblewrap, files, folders, forkserver, paths, seccomp, wire
from verl_ext.sandbox.server.faults import FAULTS, InjectedError, find_fault
from verl_ext.sandbox.server.limits import Limits
from verl_ext.sandbox.server.options import Options
from verl_ext.sandbox.server.outputs import EventWriter, clean_text, result_event
from verl_ext.sandbox.server.tiers import AUTO_ORDER, Tier


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, verl_ext.sandbox.server.__main__\n"
        "bad = {'torch', 'ray', 'vllm', 'verl', 'IPython', 'numpy', 'e2b'} & set(sys.modules)\n"
        "ours = {n for n in sys.modules if n.startswith('verl_ext') and 'sandbox.server' not in n}\n"
        "print(sorted(bad), sorted(ours))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] ['verl_ext', 'verl_ext.errors', 'verl_ext.sandbox']"


def test_every_tier_says_what_it_covers() -> None:
    assert Tier.__doc__ is not None
    for tier in Tier:
        section = Tier.__doc__.split(f"    {tier}\n")[1]
        assert section.lstrip().startswith("Covered:")
    assert Tier.NONE not in AUTO_ORDER


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_faults_are_found_by_name(name: str) -> None:
    assert find_fault(f"fault-{name}:2") is not None


def test_an_unknown_fault_is_refused_and_an_ordinary_template_has_none() -> None:
    assert find_fault("code-interpreter-v1") is None
    with pytest.raises(InjectedError) as refusal:
        find_fault("fault-nope")
    assert b"429" in refusal.value.body


async def test_a_share_strikes_exactly_so_often_and_evenly() -> None:
    struck = []
    for _ in range(100):
        fault = find_fault("fault-429@0.25+503@0.1")
        assert fault is not None
        try:
            await fault.before_create()
            struck.append(0)
        except InjectedError as error:
            struck.append(error.status)
    assert struck.count(429) == 25
    assert 7 <= struck.count(503) <= 10, "a create can be refused once only"
    assert all(429 in struck[start : start + 4] for start in range(96))


async def test_a_delay_and_an_unknown_fault_are_read_from_the_name() -> None:
    fault = find_fault("fault-vanish:2.5+429@0.5")
    assert fault is not None
    assert fault.lives_s == 2.5
    with pytest.raises(InjectedError, match="400"):
        find_fault("fault-429+nonsense")
    assert find_fault("code-interpreter-v1") is None


async def test_the_limit_of_ags_is_a_400() -> None:
    fault = find_fault("fault-400-limit")
    assert fault is not None
    with pytest.raises(InjectedError) as refusal:
        await fault.before_create()
    assert refusal.value.status == 400
    assert json.loads(refusal.value.body)["message"].startswith("[LimitExceeded.SandboxInstance]")


def test_wrong_values_change_every_number_of_the_output() -> None:
    fault = find_fault("fault-wrong-values")
    assert fault is not None
    change = fault.line_changer()
    for text in ("0", "42", "3.14", "[1, 2]"):
        out = change(json.dumps({"type": "result", "text": text}).encode())
        assert out is not None
        assert json.loads(out)["text"] != text
    line = json.dumps({"type": "number_of_executions", "execution_count": 3}).encode()
    assert json.loads(change(line) or b"")["execution_count"] == 3


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no filter for this architecture")
@pytest.mark.parametrize(
    "rules", [seccomp.in_namespaces(), seccomp.alone(allow_kill=True), seccomp.alone(allow_kill=False)]
)
def test_jumps_of_the_filter_stay_inside(rules: seccomp.Rules) -> None:
    code = seccomp.program(rules)
    steps = [struct.unpack("HBBI", code[at : at + 8]) for at in range(0, len(code), 8)]
    assert len(steps) < 4096
    assert steps[-1][0] == 0x06
    for at, (kind, if_true, if_false, _) in enumerate(steps):
        if kind & 0x07 == 0x05:
            assert at + 1 + max(if_true, if_false) < len(steps)


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("a", "/h/a"),
        ("/home/user/a", "/h/a"),
        ("/home/user", "/h"),
        ("~/a", "/h/a"),
        ("/tmp/a", "/tmp/a"),
        ("../x", "/x"),
    ],
)
def test_api_paths(path: str, real: str) -> None:
    assert files.resolve(path, "/h") == real


def test_only_own_folders_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not made by this server"):
        folders.remove_tree(tmp_path)
    own = tmp_path / f"{folders.PREFIX}x"
    (own / "inner").mkdir(parents=True)
    mounted = f"1 1 8:1 / {own}/inner rw - ext4 x rw\n"
    real = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: mounted if self.name == "mountinfo" else real(self, *a, **k)
    )
    folders.remove_tree(own)
    assert (own / "inner").exists()
    monkeypatch.undo()
    folders.remove_tree(own)
    assert not own.exists()


def test_python_is_shown_and_the_checkout_is_not() -> None:
    shown = paths.python_paths()
    assert any(Path(sys.base_prefix).resolve().is_relative_to(one) for one in (*shown, Path("/usr")))
    assert not any(Path(__file__).resolve().is_relative_to(one) for one in shown)


def test_messages_keep_their_borders_and_odd_ones_are_refused() -> None:
    ours, theirs = wire.packet_pair()
    with ours, theirs:
        wire.send_message(ours, {"a": 1})
        wire.send_message(ours, {"b": 2})
        assert [wire.receive_message(theirs)[0], wire.receive_message(theirs)[0]] == [{"a": 1}, {"b": 2}]
        ours.send(b"[1]")
        assert wire.receive_message(theirs) == (None, [])
        with pytest.raises(ValueError, match="longer than"):
            wire.send_message(ours, {"a": "x" * wire.MAX_MESSAGE_BYTES})


def written(act) -> list[dict]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = EventWriter(theirs)
        writer.start(10)
        act(writer)
        writer.flush()
        theirs.shutdown(socket.SHUT_WR)
        lines = ours.makefile("rb").read().splitlines()
    assert all(lines)
    return [json.loads(line) for line in lines]


def test_text_is_gathered_and_cut() -> None:
    events = written(lambda w: [w.text("stdout", "ab"), w.text("stdout", "cd"), w.text("stderr", "é" * 9)])
    assert [(one["type"], one["text"]) for one in events] == [("stdout", "abcd"), ("stderr", "ééé")]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a program starts with it; whoever started pytest in the background had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("again", range(10))  # the interrupt comes at any instruction of the loop
def test_a_slow_reader_is_waited_for_and_an_interrupt_cuts_no_line(again: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)  # as the kernel's asyncio reader leaves it
        writer = EventWriter(theirs)
        seen: list[bytes] = []

        def read_slowly() -> None:
            room = select.poll()
            room.register(theirs, select.POLLOUT)
            while not select.select([ours], [], [], 0)[0] or room.poll(0):  # until the buffer is full
                time.sleep(0.001)
            if again % 2:
                seen.append(ours.recv(65_536))
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            while part := ours.recv(65_536):
                seen.append(part)

        reader = threading.Thread(target=read_slowly)
        reader.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                writer.raw({"text": "x" * 4_000_000})
        finally:
            theirs.shutdown(socket.SHUT_WR)
            reader.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert json.loads(b"".join(seen)) == {"text": "x" * 4_000_000}


def test_only_the_first_error_counts() -> None:
    events = written(lambda w: [w.error("A", "\udc80", ""), w.error("B", "", "")])
    assert [(one["name"], one["value"]) for one in events] == [("A", "?")]


def test_results() -> None:
    assert result_event({"text/plain": "'a'"}, is_main_result=True)["text"] == "a"
    assert result_event({"image/png": b"x"}, is_main_result=False)["png"] == "eA=="
    assert clean_text("a\udc80") == "a?"


def test_an_environment_below_tmp_or_home_stays_visible(monkeypatch: pytest.MonkeyPatch):
    # The sandbox's own /tmp and home are mounted first, or they would hide it.
    monkeypatch.setattr(bubblewrap, "python_paths", lambda: [Path("/tmp/project/.venv")])
    words = bubblewrap.arguments(Limits())
    for folder in ("/tmp", "/home/user", "/var/tmp"):
        assert words.index(folder) < words.index("/tmp/project/.venv")


async def test_why_no_sandbox_can_be_made_any_more_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork server that cannot load what a kernel needs: a broken Python, a package that is not there."""
    python = tmp_path / "python"
    halt = "import sys; sys.modules['IPython'] = None"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -c "{halt}\n$3"\n')
    python.chmod(0o755)
    monkeypatch.setattr(forkserver.sys, "executable", str(python))
    said: list[str | None] = []
    server = forkserver.ForkServer(Options(isolation="none"), lambda _, reason: said.append(reason))
    ours, theirs = wire.packet_pair()
    try:
        await server.start()
        async with asyncio.timeout(30):
            while not said:
                await asyncio.sleep(0.02)
        with pytest.raises(ConnectionError, match=r"^the fork server ended \(ModuleNotFoundError: .*IPython"):
            server.spawn("i", theirs)
    finally:
        await server.close()
        ours.close()
        theirs.close()
    assert "IPython" in str(said[0])
