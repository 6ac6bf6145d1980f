"""Sequence numbers of backends that have a recorder of their own."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from saferun.linux.poller import Poller
from saferun.watchdog.flight_recorder_seq import NumbersQuery, numbers_from, numbers_of_calls


def calls_of(*calls: tuple[int, int, str, bool, bool]) -> bytes:
    """The end of what a recorder of a backend's own answers: (record, group, op, between two ranks, off the list)."""
    entries = [
        {
            "collective_seq_id": 7,
            "is_p2p": is_p2p,
            "p2p_seq_id": 3,
            "pg_id": group,
            "profiling_name": op,
            "record_id": record,
            "retired": retired,
            "state": "scheduled",
        }
        for record, group, op, is_p2p, retired in calls
    ]
    content = {"entries": entries, "nccl_comm_state": {}, "pg_status": {"0": "of no use: it numbers all calls"}}
    return b'"state":"scheduled"},' + json.dumps(content, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("calls", "numbers"),
    [
        ([(8, 0, "nccl2:all_reduce", False, True), (9, 0, "nccl2:all_reduce", False, True)], {"0": (9, 9)}),
        ([(8, 0, "nccl2:all_reduce", False, False), (9, 0, "nccl2:all_reduce", False, False)], {"0": (9, 7)}),
        ([(8, 0, "nccl2:send 0->1", True, True), (9, 0, "nccl2:send 0->1", True, False)], {"0": (9, 8)}),
        # Within a batch nothing ever tells that they are over.
        ([(8, 0, "nccl2:send 0->1", True, False), (9, 0, "nccl2:all_reduce", False, True)], {"0": (9, 9)}),
        ([(8, 1, "nccl2:barrier", False, False), (9, 0, "nccl2:barrier", False, True)], {"1": (8, 7), "0": (9, 9)}),
        ([(8, 0, "gloo:all_reduce", False, False)], None),
        ([], None),
    ],
)
def test_a_recorder_of_a_backend_s_own_tells_by_its_calls(
    calls: list[tuple[int, int, str, bool, bool]], numbers: dict[str, tuple[int, int]] | None
) -> None:
    assert numbers_of_calls(calls_of(*calls), "nccl2") == numbers


@pytest.mark.parametrize("text", [b"", b'{"collective_seq_id"' + b"[" * 100_000 + b'}],"nccl_comm_state"', b"\xff" * 9])
def test_what_holds_no_calls_is_none(text: bytes) -> None:
    assert numbers_of_calls(text, "nccl2") is None


def made_as_one(*calls: tuple[str, bool, int, int, bool]) -> bytes:
    """The same with numbers: (op, between two ranks, collective's number, transfer's number, off the list)."""
    entries = [
        {
            "collective_seq_id": number,
            "is_p2p": is_p2p,
            "p2p_seq_id": transfer,
            "pg_id": 0,
            "profiling_name": f"nccl:{op}",
            "record_id": record,
            "retired": retired,
            "state": "scheduled",
        }
        for record, (op, is_p2p, number, transfer, retired) in enumerate(calls, start=1)
    ]
    return json.dumps({"entries": entries, "nccl_comm_state": {}}, separators=(",", ":")).encode()


SINGLE_SEND = ("send 0->1", True, 7, 2, True)
BATCH = (("send 0->1", True, 7, 3, False), ("recv 0<-1", True, 7, 3, False))
UNEVEN = (("_broadcast_oop", False, 8, 3, False), ("_broadcast_oop", False, 8, 3, False))


@pytest.mark.parametrize(
    ("calls", "numbers"),
    [
        ([SINGLE_SEND, *BATCH, ("coalesced", False, 7, 3, True)], (4, 4)),
        ([SINGLE_SEND, *BATCH, ("coalesced", False, 7, 3, False)], (4, 3)),
        # A collective that waits has the number of the batch's entry, and is none of its members.
        ([("all_reduce", False, 7, 2, False), *BATCH, ("coalesced", False, 7, 3, True)], (4, 0)),
        ([*UNEVEN, ("coalesced", False, 8, 3, True), ("all_reduce", False, 9, 3, True)], (4, 4)),
        ([*UNEVEN, ("coalesced", False, 8, 3, False)], (3, 2)),
        ([*UNEVEN, ("all_gather_into_tensor_coalesced", False, 8, 3, True)], (3, 3)),
        # A send with the newest number of sends is no member of a collective.
        (
            [
                SINGLE_SEND,
                ("send 0->1", True, 7, 3, False),
                ("reduce_scatter_tensor_coalesced", False, 8, 3, True),
            ],
            (3, 1),
        ),
    ],
)
def test_calls_that_were_made_as_one_have_the_state_of_the_entry_behind_them(
    calls: list[tuple[str, bool, int, int, bool]], numbers: tuple[int, int]
) -> None:
    """The members of a batch are never retired, nor those of an uneven all_gather."""
    assert numbers_of_calls(made_as_one(*calls), "nccl") == {"0": numbers}


def calls_and(status: bytes, *calls: tuple[int, int, str, bool, bool]) -> bytes:
    """A whole answer."""
    return calls_of(*calls) + status


OPEN_BY_STATUS = (
    b'"pg_status":{"0":{"last_enqueued_collective":"7","last_completed_collective":"6"},'
    b'"1":{"last_enqueued_collective":"900","last_completed_collective":"900"}}'
)


def test_a_group_of_which_an_answer_holds_no_call_is_not_known_to_be_in_one() -> None:
    """Its calls lie before the end that is read, or were overwritten: call 7 may have ended before 6."""
    answer = calls_and(OPEN_BY_STATUS, *((number, 1, "gloo:all_reduce", False, True) for number in range(50)))
    assert numbers_from(answer) == {"0": (7, 7), "1": (900, 900)}
    assert numbers_from(OPEN_BY_STATUS, is_cut=True) == {"0": (7, 7), "1": (900, 900)}
    # Where the numbers come without calls, they are all that there is.
    assert numbers_from(OPEN_BY_STATUS) == {"0": (7, 6), "1": (900, 900)}


def test_calls_that_are_over_prove_nothing_of_those_before_the_end_that_is_read() -> None:
    """Nor is a rank in a collective by them: what counts is an open call that was read."""
    over = calls_of(*((number, 0, "gloo:all_reduce", False, True) for number in range(50)))
    assert numbers_from(over + OPEN_BY_STATUS, is_cut=True) == {"0": (7, 7), "1": (900, 900)}
    open_one = calls_of((8, 0, "gloo:all_reduce", False, True), (9, 0, "gloo:all_reduce", False, False))
    assert numbers_from(open_one + OPEN_BY_STATUS, is_cut=True) == {"0": (7, 6), "1": (900, 900)}


def test_a_first_receive_that_never_ends_is_open() -> None:
    """No transfer of the group has ended that would show that such calls are retired at all."""
    status = b'"pg_status":{"0":{"last_enqueued_collective":"1","last_completed_collective":"-1"}}'
    assert numbers_from(calls_and(status, (1, 0, "gloo:recv 0<-1", True, False))) == {"0": (1, -1)}


@pytest.mark.parametrize(("is_over", "numbers"), [(True, (7, 7)), (False, (7, 6))])
def test_gloo_s_numbers_count_as_open_only_if_a_call_is(is_over: bool, numbers: tuple[int, int]) -> None:
    """The last completed number is assigned in the order in which calls end: 7 may have ended before 6."""
    calls = calls_of((8, 0, "gloo:all_reduce", False, True), (9, 0, "gloo:all_reduce", False, is_over))
    status = b'"pg_status":{"0":{"last_enqueued_collective":"7","last_completed_collective":"6"}}'
    assert numbers_from(calls + status) == {"0": numbers}
    assert numbers_from(status) == {"0": (7, 6)}


def asked_of(answers: dict[str, bytes], directory: Path) -> tuple[list[str], list[tuple[int, int]]]:
    """What a query asks a server with these answers, in this order, and the numbers that it makes of them."""
    asked = []
    poller = Poller()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "sock"))
        listener.listen()
        listener.settimeout(30)

        def serve() -> None:
            for _ in answers:
                link, _ = listener.accept()
                with link:
                    resource = link.recv(4096).split()[1].decode().removeprefix("/handler/")
                    asked.append(resource)
                    link.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + answers[resource])

        server = threading.Thread(target=serve)
        server.start()
        query = NumbersQuery(str(directory / "sock"), poller, time.monotonic() + 30)
        done: list[bool] = []
        query.begin(lambda: done.append(True))
        while not done:
            poller.wait(30)
        server.join()
    poller.close()
    assert query.numbers is not None
    return asked, sorted(query.numbers.values())


NUMBERS = "dump_nccl_trace_json?includecollectives=false&onlyactive=true"


def test_of_a_long_answer_only_its_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what stands before it is not known: here the calls, all of which are over."""
    monkeypatch.setattr("saferun.watchdog.flight_recorder_seq._TAIL_BYTES", 500)
    calls = calls_of((8, 0, "gloo:all_reduce", False, True), (9, 0, "gloo:all_reduce", False, True))
    answers = {NUMBERS: b"{}", "fr_trace_json": calls + b" " * 2000 + OPEN_BY_STATUS}
    assert asked_of(answers, tmp_path) == ([*answers], [(7, 7), (900, 900)])


@pytest.mark.parametrize("handler", [NUMBERS, "fr_trace_json"])
def test_a_long_list_of_groups_does_not_hide_calls_where_there_are_none(
    handler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's numbers come without calls, in large jobs behind hundreds of kilobytes of ranks."""
    monkeypatch.setattr("saferun.watchdog.flight_recorder_seq._TAIL_BYTES", 500)
    groups = b'{"entries":[],"pg_config":{"0":{"ranks":"' + b"1," * 2000 + b'"}},'
    answers = {NUMBERS: b"{}", "fr_trace_json": b"{}", handler: groups + OPEN_BY_STATUS + b"}"}
    assert asked_of(answers, tmp_path) == ([*answers], [(7, 6), (900, 900)])


def test_where_nccl_s_recorder_is_empty_the_backends_are_asked(tmp_path: Path) -> None:
    """And the first that has groups is the last that is asked."""
    answers = {
        NUMBERS: b'{"pg_status":{}}',
        "fr_trace_json": b'{"pg_status":{"0":{"last_enqueued_collective":"4","last_completed_collective":"4"}}}',
        "fr_trace_json?backend=nccl2": b'{"pg_status":{}}',
        "fr_trace_json?backend=nccl-lazy": calls_of((8, 0, "nccl-lazy:all_reduce", False, False)),
    }
    assert asked_of(answers, tmp_path) == ([*answers], [(4, 4), (8, 7)])


@pytest.mark.parametrize("is_over", [True, False])
def test_where_the_numbers_of_sends_and_collectives_differ_the_calls_are_asked_for(
    tmp_path: Path,
    is_over: bool,
) -> None:
    """A rank whose collective ended after a later send has the numbers of one that waits in that send."""
    answers = {
        NUMBERS: b'{"pg_status":{"0":{"last_enqueued_collective":"5","last_completed_collective":"900"}}}',
        "fr_trace_json": b'{"pg_status":{}}',
        "dump_nccl_trace_json": calls_of(
            (7, 0, "nccl:send 0->1", True, True),
            (8, 0, "nccl:all_reduce", False, True),
            (9, 0, "nccl:send 0->1", True, is_over),
        ),
    }
    assert asked_of(answers, tmp_path) == ([*answers], [(5, 900), (9, 9 if is_over else 8)])
