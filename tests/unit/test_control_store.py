"""verl_ext.control_store without Ray: a socket that listens, is closed, and comes back, under a clock of the test's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from verl_ext.control_store import RAYS_LIMIT_S, Beside, ControlStore, answers, patience_s
from verl_ext.errors import TrainingDiedError


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


class Watched:
    """A store behind a socket, looked at at seconds that the test says."""

    def __init__(self, limit_s: float = 40.0) -> None:
        self.socket = listening()
        self.port = self.socket.getsockname()[1]
        self.said: list[str] = []
        self.now_s = 0.0
        self.store = ControlStore(f"127.0.0.1:{self.port}", self.said.append, limit_s, lambda: self.now_s)

    def look(self, at_s: float) -> bool:
        self.now_s = at_s
        return self.store.look()

    def die(self) -> None:
        self.socket.close()

    def come_back(self) -> None:
        self.socket = listening(self.port)


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.socket.close()


def test_of_a_store_that_answers_nothing_is_said(watched: Watched):
    assert all(watched.look(second) for second in range(100))
    assert watched.said == []
    assert watched.store.silence == ""


def test_a_lost_store_is_said_once_and_then_ends_the_run_before_ray_does(watched: Watched):
    assert watched.look(99)
    watched.die()
    assert not watched.look(100)
    assert watched.said == [], "a moment is nothing to speak of"
    assert not any(watched.look(second) for second in range(101, 140))
    (line,) = watched.said
    assert line == (
        f"Ray's control store at 127.0.0.1:{watched.port} has not answered for 5 s; the run waits for it, and ends "
        "after 40 s"
    )
    with pytest.raises(TrainingDiedError) as died:
        watched.look(140)
    message = str(died.value)
    assert message.startswith(f"Ray's control store at 127.0.0.1:{watched.port} has not answered for 40 s: ")
    assert "`invoke cluster-head`" in message
    assert "`invoke train --resume`" in message
    assert "\n" not in message


def test_a_head_that_comes_back_costs_nothing_and_the_next_silence_is_a_new_one(watched: Watched):
    watched.die()
    assert not any(watched.look(second) for second in range(0, 39))
    watched.come_back()
    assert watched.look(39)
    assert watched.said[1:] == ["Ray's control store answers again, after 39 s"]
    watched.die()
    assert not any(watched.look(second) for second in range(40, 79))
    with pytest.raises(TrainingDiedError):
        watched.look(80)


def test_a_short_silence_is_never_said(watched: Watched):
    watched.die()
    assert not any(watched.look(second) for second in range(4))
    watched.come_back()
    assert watched.look(4)
    assert watched.said == []


def test_a_store_whose_connections_wait_in_vain_is_silent(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    def swallowed(address: tuple[str, int], timeout_s: float) -> socket.socket:
        raise TimeoutError(f"{address} after {timeout_s}")

    monkeypatch.setattr(socket, "create_connection", swallowed)
    assert not watched.look(0)


def test_an_address_that_nobody_knows_or_of_version_6_is_asked_too():
    assert not answers("no-such-host.invalid:6379")
    if socket.has_ipv6:
        try:
            server = socket.create_server(("::1", 0), family=socket.AF_INET6)
        except OSError:
            pytest.skip("no IPv6 here")
        with server:
            assert answers(f"[::1]:{server.getsockname()[1]}")


def test_the_run_ends_well_before_ray_and_later_where_ray_is_told_to_wait():
    assert patience_s(None) == pytest.approx(40)
    assert patience_s("") == patience_s("a minute") == patience_s(None) < RAYS_LIMIT_S
    assert patience_s("600") == pytest.approx(400)


def test_a_question_that_blocks_is_asked_once_and_answered_later():
    asked: list[int] = []
    go_on = threading.Event()

    def ask() -> str:
        asked.append(1)
        go_on.wait(10)
        return "well"

    beside = Beside(ask)
    assert beside.answer(0.01) is None
    assert beside.answer(0.01) is None
    assert len(asked) == 1
    go_on.set()
    assert beside.answer(10) == "well"
    assert beside.answer(10) == "well"
    assert len(asked) == 2


def test_what_a_question_raises_is_raised_to_the_asker():
    beside = Beside(lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            beside.answer(10)
