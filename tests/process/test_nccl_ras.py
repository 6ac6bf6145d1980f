"""NCCL's RAS subsystem is asked over TCP by a capture, with a deadline and bounds, only of ranks that use GPUs.

The answers are hand-written after NCCL's documented format; the server plays NCCL's part of the conversation.
"""

from __future__ import annotations

import io
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import nccl_ras
from saferun.captures.all_captures import CAPTURES
from saferun.captures.inspection import inspect_ranks
from saferun.captures.inspection_values import NcclCalls
from saferun.captures.process_state import read_snapshot
from saferun.captures.ras_content import LONGEST_BYTES
from saferun.captures.scene import Process, Scene
from saferun.captures.wire import CaptureReader, CaptureRequest, encode
from saferun.evidence.gpu_evidence import NcclProcess
from tests.process.capturing import SLEEP, python
from tests.unit.captures.ras_answers import HOST, TEXT, answer, member

BEHIND_PID = 4711


class Ras:
    """Answers like NCCL, each connection with the next of the answers; ``asked`` are the commands of each."""

    def __init__(
        self, *answers: bytes | None, knows_json: bool = True, greeting: bytes = b"SERVER PROTOCOL 2\n"
    ) -> None:
        self.asked: list[list[bytes]] = []
        self._answers = list(answers)
        self._knows_json, self._greeting = knows_json, greeting
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"localhost:{self._listener.getsockname()[1]}"
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                link = self._listener.accept()[0]
            except OSError:
                return
            content = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            if content is None:
                self._kept.append(link)
                continue
            try:
                self._talk(link, content)
            except OSError:
                pass
            finally:
                link.close()

    def _talk(self, link: socket.socket, content: bytes) -> None:
        commands: list[bytes] = []
        self.asked.append(commands)
        with link.makefile("rb") as lines:
            for line in lines:
                command = line.strip()
                commands.append(command)
                if command.startswith(b"client protocol"):
                    link.sendall(self._greeting)
                elif command.startswith(b"timeout"):
                    link.sendall(b"OK\n")
                elif command.startswith(b"set format"):
                    link.sendall(b"OK\n" if self._knows_json else b"ERROR: Unknown command set format json\n")
                elif command == b"verbose status":
                    link.sendall(content)
                    return

    def close(self) -> None:
        self._listener.close()
        for link in self._kept:
            link.close()


def behind(pid: int, second: int) -> bytes:
    """Rank 1 is behind; it was told at another second."""
    ranks = [member(0, pid), member(1, BEHIND_PID, AllReduce=41), *map(member, range(2, 8))]
    return answer(ranks, timestamp=f"2026-01-02 03:04:{second:02}")


@contextmanager
def rank(address: str = "", **environ: str) -> Iterator[int]:
    """A process with the environment of a rank."""
    settings = {"NCCL_RAS_ADDR": address} | environ
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        with python(SLEEP) as pid:
            yield pid


def look(pid: int, directory: Path | None = None, left_s: float = 60.0) -> CaptureReader:
    """What the capture finds of a rank."""
    reader = CaptureReader()

    def emit(kind: str, value: Any) -> None:
        reader.feed(encode(kind, value))

    process = Process(0, pid, True, "", read_snapshot(0, pid, is_rank=True))
    scene = Scene(CaptureRequest((), str(directory or ""), nccl=True), (process,), time.monotonic() + left_s, emit)
    nccl_ras.capture_nccl_ras(scene)
    return reader


@pytest.fixture(autouse=True)
def _with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_ras, "uses_gpus", lambda _pid: True)
    monkeypatch.setattr(nccl_ras, "_APART_S", 0.0)


def failure(reader: CaptureReader) -> str:
    (note,) = reader.capture.notes
    assert (note.capture, note.rank) == ("nccl_ras", -1)
    return note.failure


def test_who_is_behind_in_two_answers_is_emitted_and_the_answer_is_a_file(tmp_path: Path) -> None:
    """The address is that of the rank's environment."""
    with rank_of(lambda pid: (behind(pid, 1), behind(pid, 2))) as (pid, ras):
        reader = look(pid, tmp_path)
    assert failure(reader) == ""
    (found,) = reader.capture.nccl
    assert (found.kind, found.processes, found.is_timed) == ("behind", (NcclProcess(1, HOST, BEHIND_PID),), True)
    assert ras.asked == [[b"client protocol 2", b"timeout 2", b"set format json", b"verbose status"]] * 2
    assert "AllReduce" in Path(reader.capture.notes[0].path).read_text(encoding="utf-8")


@contextmanager
def rank_of(answers: Any, **fields: Any) -> Iterator[tuple[int, Ras]]:
    """A rank, and the server that its environment names, whose answers may hold its pid."""
    ras = Ras(b"", **fields)
    with closing(ras), rank(ras.address) as pid:
        ras._answers[:] = answers(pid)
        yield pid, ras


def test_the_same_timestamp_twice_is_an_old_state() -> None:
    """Nothing of it counts."""
    with rank_of(lambda pid: (behind(pid, 1),)) as (pid, _):
        reader = look(pid)
    assert reader.capture.nccl == ()
    assert failure(reader) == "NCCL's RAS gives the same old state twice"


def test_an_inspection_has_the_calls_that_the_ranks_of_this_host_have_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends too; a process of the same number on another host is another one."""
    with rank_of(
        lambda pid: (answer([member(0, pid, AllReduce=7), member(1) | {"pid": pid, "host": "10.9.9.9"}]),)
    ) as (
        pid,
        _,
    ):
        (nothing,) = inspect_ranks([(0, pid, pid)], 0, 0.01).ranks
        assert nothing.nccl_calls == ()
        monkeypatch.setattr(nccl_ras, "own_addresses", lambda: ["127.0.0.1", HOST])
        (found,) = inspect_ranks([(0, pid, pid)], 0, 0.01).ranks
        assert found.nccl_calls == (NcclCalls("a7c35b1e2d4f60", 3 + 7 + 0),)


@pytest.mark.parametrize("content", [None, b"", TEXT, b"{" * 99_999], ids=["silence", "nothing", "a text", "nonsense"])
def test_where_ras_says_nothing_an_inspection_is_as_without_it(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older NCCL answers with a text, which has no counts of ranks that are alike."""
    monkeypatch.setattr(nccl_ras, "_GREETING_S", 0.1)
    monkeypatch.setattr(nccl_ras, "own_addresses", lambda: [HOST])
    with rank_of(lambda _: (content,)) as (pid, _):
        (found,) = inspect_ranks([(0, pid, pid)], 0, 0.01).ranks
    assert found.nccl_calls == ()
    assert found.threads


def test_an_inspection_of_ranks_without_gpus_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """An inspection is only made where nothing moves, and most jobs of other kinds have no RAS."""
    monkeypatch.setattr(nccl_ras, "uses_gpus", lambda _pid: False)
    with rank_of(lambda pid: (answer([member(0, pid)]),)) as (pid, ras):
        inspect_ranks([(0, pid, pid)], 0, 0.01)
    assert ras.asked == []


def test_where_all_are_alike_one_answer_is_enough() -> None:
    """A second one would say the same."""
    with rank_of(lambda pid: (answer([member(0, pid), member(1)]),)) as (pid, ras):
        reader = look(pid)
    assert (len(ras.asked), reader.capture.nccl, failure(reader)) == (1, (), "")


def test_a_version_without_json_answers_with_a_text() -> None:
    """It says so in a line before the text."""
    with rank_of(lambda _: (TEXT,), knows_json=False) as (pid, _):
        reader = look(pid)
    assert failure(reader) == ""
    assert {one.kind for one in reader.capture.nccl} == {"dead", "unanswering", "failed", "finalizing", "behind"}
    assert not any(one.is_timed for one in reader.capture.nccl)


def test_a_stopped_rank_that_the_kernel_chose_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a host listen at the same port; a stopped one accepts nothing, and another try meets another."""
    monkeypatch.setattr(nccl_ras, "_GREETING_S", 1.0)
    with rank_of(lambda pid: (None, answer([member(0, pid), member(1)]))) as (pid, ras):
        reader = look(pid)
    assert (failure(reader), len(ras.asked)) == ("", 1)


def test_another_job_at_the_same_port_is_passed_over() -> None:
    """Jobs of one user may share it."""
    with rank_of(lambda pid: (answer([member(0), member(1)]), answer([member(0, pid), member(1)]))) as (pid, ras):
        reader = look(pid)
    assert (failure(reader), len(ras.asked)) == ("", 2)
    with rank_of(lambda _: (answer([member(0), member(1)]),)) as (pid, ras):
        reader = look(pid)
    assert failure(reader) == f"{ras.address}: another job answers"


def test_the_process_of_another_user_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the host may listen at that port before the ranks do."""
    monkeypatch.setattr(nccl_ras, "_is_ours", lambda _link: False)
    with rank_of(lambda pid: (behind(pid, 1),)) as (pid, ras):
        reader = look(pid)
    assert failure(reader) == f"{ras.address}: a process of another user answers"
    assert all(commands == [b"client protocol 2"] for commands in ras.asked)


def test_the_owner_of_the_other_end_is_known() -> None:
    """By the kernel's table."""
    listener = socket.create_server(("127.0.0.1", 0))
    with closing(listener), closing(socket.create_connection(listener.getsockname())) as link:
        accepted = listener.accept()[0]
        with closing(accepted), pytest.MonkeyPatch.context() as patch:
            assert nccl_ras._is_ours(link)
            ends = f"0100007F:{listener.getsockname()[1]:04X} 0100007F:{link.getsockname()[1]:04X}"
            table = f"sl local rem st q tr retr uid\n0: {ends} 01 0:0 0:0 0 65534 0 1\n".encode()
            patch.setattr(nccl_ras, "read_bytes", lambda _path: table)
            assert not nccl_ras._is_ours(link)


@pytest.mark.parametrize(
    ("content", "greeting", "message"),
    [
        (b"", b"HTTP/1.1 400 Bad Request\r\n", "it is not NCCL's RAS that answers"),
        (b"", b"x" * 10_000, "it is not NCCL's RAS that answers"),
        (b"", b"SERVER PROTOCOL 2\n", "it hangs up"),
        (b"\xff\x00" * 99, b"SERVER PROTOCOL 2\n", "its answer cannot be read: it is not NCCL's RAS that answers"),
        (b"{" * 99_999, b"SERVER PROTOCOL 2\n", "its answer cannot be read: too deep"),
        (b" " * (LONGEST_BYTES * 2), b"SERVER PROTOCOL 2\n", "its answer cannot be read: it is longer than 8 MiB"),
    ],
)
def test_whatever_else_answers_is_a_failure(content: bytes, greeting: bytes, message: str) -> None:
    """And no exception."""
    with rank_of(lambda _: (content,), greeting=greeting) as (pid, ras):
        reader = look(pid)
    assert reader.capture.nccl == ()
    assert failure(reader) == f"{ras.address}: {message}"


def test_one_that_never_answers_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline holds, and the capture returns."""
    monkeypatch.setattr(nccl_ras, "_GREETING_S", 0.1)
    with rank_of(lambda _: (None,)) as (pid, ras):
        assert failure(look(pid)) == f"{ras.address}: it does not answer"
        assert failure(look(pid, left_s=-1.0)) == f"{ras.address}: no time is left"


def test_one_that_answers_letter_by_letter_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter comes in time, and their sum does not."""
    letters = itertools.repeat(b"x")
    now = itertools.count()
    monkeypatch.setattr("saferun.captures.nccl_ras.time.monotonic", lambda: next(now) * 0.3)

    class Link:
        def settimeout(self, _timeout_s: float) -> None:
            pass

        def recv(self, _size: int) -> bytes:
            return next(letters)

    with pytest.raises(TimeoutError):
        nccl_ras._line(Link(), 3.0)  # type: ignore[arg-type]


def test_one_that_is_too_long_is_no_whole_answer_however_its_parts_arrive() -> None:
    """The answers to settings do not count, though they arrive in the same stream."""
    stream = io.BytesIO(b"OK\nOK\n" + b" " * (2 * LONGEST_BYTES))

    class Link:
        def settimeout(self, _timeout_s: float) -> None:
            pass

        def recv(self, size: int) -> bytes:
            left = LONGEST_BYTES + 1 - stream.tell()
            return stream.read(min(size, left) if left > 0 else size)

    content = nccl_ras._content(Link(), time.monotonic() + 60.0)  # type: ignore[arg-type]
    assert len(content) > LONGEST_BYTES


def test_a_name_is_not_looked_up() -> None:
    """A name server that never answers would cost the whole capture."""
    with rank("node5.example.org:28028") as pid:
        assert failure(look(pid)) == "node5.example.org:28028: NCCL_RAS_ADDR has a name, which is not looked up"


@pytest.mark.parametrize("address", ["localhost", "localhost:x", "localhost:99999", ":"])
def test_an_address_that_is_none_is_a_failure(address: str) -> None:
    """NCCL does not take it either."""
    with rank(address) as pid:
        assert failure(look(pid)) == f"{address}: NCCL_RAS_ADDR is not HOST:PORT"


def test_where_nothing_listens_that_is_said() -> None:
    """NCCL is older, or not yet initialized."""
    ras = Ras(b"")
    ras.close()
    with rank(ras.address) as pid:
        assert failure(look(pid)) == f"{ras.address}: Connection refused"


def test_nobody_is_asked_where_ras_is_off_or_no_rank_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to be known, and nothing to be said about it."""
    ras = Ras(b"")
    with closing(ras):
        with rank(ras.address, NCCL_RAS_ENABLE="0") as pid:
            assert look(pid).capture.notes == ()
        monkeypatch.undo()
        with rank(ras.address) as pid:
            assert not nccl_ras.uses_gpus(pid)
            assert look(pid).capture.notes == ()
        assert ras.asked == []


def test_only_a_hang_with_gpus_is_worth_it() -> None:
    """It is not on by default: a failed job need not wait for it."""
    (step,) = (step for step in CAPTURES if step.name == "nccl_ras")
    assert step.wanted_by == "nccl"
    assert not CaptureRequest(()).nccl
