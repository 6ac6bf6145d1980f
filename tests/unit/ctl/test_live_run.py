"""Requests to the saferuns of a run: which one is asked, what has come with its answer, and whose run it is."""

from __future__ import annotations

import json
import os
from _socket import SOCK_STREAM
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from saferun.ctl import status
from saferun.ctl.attach import _Terminal
from saferun.ctl.live_run import LiveRun, SilentError, ask_living, connections, find_live
from saferun.ctl.other_host import Destination, destination, find_rank
from saferun.errors import UsageError
from saferun.files.run_files import RunRecord
from saferun.linux.bare_socket import AF_UNIX, Socket, socketpair
from saferun.linux.control_socket import accept
from tests.unit.described_runs import ELSEWHERE, HERE, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "20260101-120000-abcdef"
RECORD = RunRecord("abcdef0123456789", (), "node1", HERE, 0.0, NAME, None)


class Saferun:
    """What listens at a control socket and gives one answer to each request, or none."""

    def __init__(self, name: str, answer: dict[str, Any] | None) -> None:
        self.path = f"@saferun-test-{os.getpid()}-{name}"
        self.asked: list[dict[str, Any]] = []
        self._answer = answer
        self._listener = Socket(AF_UNIX, SOCK_STREAM)
        self._listener.bind(f"\0{self.path[1:]}")
        self._listener.listen(4)
        self._thread = Thread(target=self._serve, daemon=True) if answer is not None else None
        if self._thread is not None:
            self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = accept(self._listener)
            except OSError:
                return
            connection.setblocking(True)
            if request := connection.recv(1 << 16):
                self.asked.append(json.loads(request))
                connection.sendall(json.dumps(self._answer).encode() + b"\n")
            connection.close()

    def close(self) -> None:
        """Nothing listens any more, and the address is free: a thread that still accepts would keep it."""
        self._listener.shutdown(2)
        if self._thread is not None:
            self._thread.join()
        self._listener.close()


@pytest.fixture
def leader() -> Iterator[Saferun]:
    """A saferun that is frozen."""
    saferun = Saferun("leader", None)
    yield saferun
    saferun.close()


def run_of(folder: Path, *saferuns: Saferun) -> Path:
    """A run whose saferuns all live on this host; the first one leads."""
    first, *others = saferuns
    path = make_run(folder / "saferun-runs", NAME, process=HERE, end=None, control_socket=first.path)
    content = json.loads((path / "run.json").read_text())
    for number, other in enumerate(others, 2):
        (path / f"node{number}").mkdir()
        part = {**content, "host": f"node{number}", "control_socket": other.path}
        (path / f"node{number}" / "run.json").write_text(json.dumps(part))
    return path


def test_a_saferun_that_does_not_answer_leaves_the_request_to_another_one(tmp_path: Path, leader: Saferun) -> None:
    """Any of them ends the job on all hosts."""
    second = Saferun("second", {"ok": True, "ranks": 2})
    try:
        live, reply = ask_living(run_of(tmp_path, leader, second), "stop", patience_s=0.2)
    finally:
        second.close()
    live.close()
    assert (reply["ranks"], live.record.host) == (2, "node2")
    (request,) = second.asked
    assert (request["op"], request["run_id"]) == ("stop", live.record.run_id)


def test_a_refusal_is_the_answer(tmp_path: Path) -> None:
    """Whoever leads the job has decided."""
    first, second = Saferun("first", {"error": "not now", "hint": "later"}), Saferun("second", {"ok": True})
    try:
        with pytest.raises(UsageError, match="not now"):
            ask_living(run_of(tmp_path, first, second), "restart")
    finally:
        first.close()
        second.close()
    assert second.asked == []


@pytest.mark.parametrize("answers", [{"ok": True, "pid": 7}, {"elsewhere": "node5"}, None])
def test_the_rank_is_found_although_a_saferun_before_its_own_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: Saferun, answers: dict[str, Any] | None
) -> None:
    """What ``attach`` and ``debug`` ask."""
    ask = LiveRun.ask
    monkeypatch.setattr(LiveRun, "ask", lambda live, op, **fields: ask(live, op, patience_s=0.2, **fields))
    second = Saferun("second", answers)
    try:
        directory = run_of(tmp_path, leader, second)
        if answers is None:
            with pytest.raises(SilentError):
                find_rank(directory, "3", "locate", "pid")
            return
        found = find_rank(directory, "3", "locate", "pid")
    finally:
        second.close()
    if "pid" in answers:
        assert isinstance(found, tuple)
        assert not isinstance(found, Destination)
        live, reply = found
        live.close()
        assert reply["pid"] == 7
    else:
        assert isinstance(found, Destination)
        assert found.host == "node5"


def test_the_status_is_that_of_a_saferun_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leader: Saferun
) -> None:
    monkeypatch.setattr(status, "_COLLECTED_S", 0.2)
    second = Saferun("second", {"ok": True, "ranks": []})
    try:
        read = status.read_status(run_of(tmp_path, leader, second))
    finally:
        second.close()
    assert (read.live, read.unanswered) == ({"ok": True, "ranks": []}, "")


def test_where_none_answers_the_signal_that_ends_the_saferun_is_named(tmp_path: Path, leader: Saferun) -> None:
    with pytest.raises(SilentError) as error:
        ask_living(run_of(tmp_path, leader), "stop", patience_s=0.1)
    assert error.value.hint == f"kill -TERM {os.getpid()} ends this saferun"


@pytest.mark.parametrize(
    ("process", "control_socket", "hint"),
    [
        (HERE, "", f"it opens some seconds after the ranks start; kill -TERM {os.getpid()} ends this saferun"),
        (ELSEWHERE, "", "kill -TERM stops its saferun process on a host"),
        (HERE, "/nowhere/control", f"kill -TERM {os.getpid()} ends this saferun"),
        (ELSEWHERE, "/nowhere/control", "run saferunctl on one of its hosts (node1)"),
    ],
    # Each worker of the tests has a process id of its own.
    ids=["it lives here", "it lives elsewhere", "here, by a socket that is gone", "elsewhere, by such a socket"],
)
def test_one_that_cannot_be_reached_is_ended_by_a_signal_if_it_lives_here(
    tmp_path: Path, process: Any, control_socket: str, hint: str
) -> None:
    path = make_run(tmp_path, NAME, process=process, end=None, age_s=0.0, control_socket=control_socket)
    with pytest.raises(UsageError) as error:
        find_live(path)
    assert error.value.hint.endswith(hint)


def test_a_socket_of_another_user_leads_to_that_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_run(tmp_path, NAME, process=HERE, end=None, control_socket="/x")

    def connect(_path: str, _timeout_s: float) -> Socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("saferun.ctl.live_run.connect", connect)
    with pytest.raises(UsageError) as error:
        find_live(path)
    assert error.value.hint == "run it as that user: sudo -u USER saferunctl …"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_the_directory_of_another_user_says_neither_whom_to_ask_nor_where_to_go(tmp_path: Path) -> None:
    """Its run.json could name the control socket of another job, and any host."""
    saferun = Saferun("own", {"ok": True})
    path = run_of(tmp_path, saferun)
    (path / "node1" / "attempt_0" / "rank_3").mkdir(parents=True)
    try:
        connection = next(connections(path))
        connection.close()
        assert destination(path, "3") is not None
        os.chown(path, 12345, -1)
        for refused in (lambda: next(connections(path)), lambda: destination(path, "3")):
            with pytest.raises(UsageError, match="it belongs to user 12345") as error:
                refused()
            assert "sudo -u '#12345' saferunctl" in error.value.hint
    finally:
        saferun.close()


# --------------------------------------------------------------------------------------------------- several messages


@pytest.fixture
def ends() -> Iterator[tuple[LiveRun, Socket]]:
    """A connection, and the end of the saferun."""
    own, other = socketpair(AF_UNIX, SOCK_STREAM)
    live = LiveRun(Path("saferun-runs") / NAME, own, RECORD)
    yield live, other
    live.close()
    other.close()


def send(other: Socket, *messages: object) -> None:
    """In one piece."""
    other.sendall("".join(f"{json.dumps(message)}\n" for message in messages).encode())


def test_what_comes_with_an_answer_is_not_lost(ends: tuple[LiveRun, Socket]) -> None:
    live, other = ends
    send(other, {"ok": True}, {"attempt": 1}, {"text": "a"}, {"text": "b"})
    assert live.ask("restart") == {"ok": True}
    assert live.next_answer(0.1) == {"attempt": 1}
    has_pending = live.has_pending
    assert live.receive() == [{"text": "a"}, {"text": "b"}]
    assert (has_pending, live.has_pending) == (True, False)
    other.close()
    assert live.receive() is None


def test_the_end_that_comes_with_an_answer_is_known(ends: tuple[LiveRun, Socket]) -> None:
    """Of a run without files it is the only record."""
    live, other = ends
    send(other, {"ok": True}, {"outcome": "stopped", "exit_code": 143})
    assert live.ask("stop") == {"ok": True}
    other.close()
    state = live.wait_for_end()
    assert state.name == "stopped"
    assert state.record is not None
    assert state.record.end is not None
    assert state.record.end.exit_code == 143


def test_what_a_rank_has_written_before_comes_at_once(
    ends: tuple[LiveRun, Socket], capfd: pytest.CaptureFixture[str]
) -> None:
    """``attach`` does not wait for more of it."""
    live, other = ends
    send(other, {"ok": True, "rank": 0}, {"text": "(Pdb) "})
    live.ask("attach")
    assert _Terminal(live)._step() is None
    assert capfd.readouterr().out == "(Pdb) "
