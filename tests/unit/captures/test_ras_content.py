"""NCCL's RAS answers, old and new, whole and malformed. All are hand-written after NCCL's documented format."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.ras_content import LONGEST_BYTES, lasting, outliers, read_ras
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess
from tests.unit.captures.ras_answers import HEALTHY_TEXT, HOST, OLD_TEXT, TEXT, answer, member, missing

NAME = "a7c35b1e2d4f60"


def found(content: bytes) -> dict[str, tuple[tuple[int, ...], str]]:
    """The pids of each kind, and the message."""
    return {
        one.kind: (tuple(process.pid for process in one.processes), one.message) for one in outliers(read_ras(content))
    }


def test_a_rank_of_json_has_its_process_status_and_counts() -> None:
    """Sends and receives are each rank's own, and are not compared; unknown fields are no harm."""
    (communicator,) = read_ras(answer([member(0), member(1)], unknown=[{"a": 1}])).communicators
    assert (communicator.name, communicator.size) == (NAME, 2)
    rank = communicator.ranks[1]
    assert (rank.process, rank.gpu, rank.status) == (NcclProcess(1, HOST, 101), 1, "RUNNING")
    assert rank.counts == {"Broadcast": 3, "AllReduce": 42}


def test_ranks_that_are_alike_are_no_outliers() -> None:
    """So it is while all ranks hang in the same call: RAS counts what was launched."""
    assert found(answer([member(rank) for rank in range(8)])) == {}
    assert found(HEALTHY_TEXT) == {}


def test_each_kind_of_outlier_is_read_from_json() -> None:
    """Missing ones are dead, silent, or have left the communicator."""
    ranks = [member(rank) for rank in range(8)]
    ranks[2] = member(2, AllReduce=41)
    ranks[3] = member(3, state={"finalize_called": True})
    ranks[4] = member(4, state={"abort_flag": True})
    ranks[5] = member(5, state={"async_error": 6})
    gone = [missing(8), missing(9, dead=True), missing(10, unresponsive=False)]
    assert found(answer(ranks, gone)) == {
        "dead": ((109,), ""),
        "unanswering": ((108,), ""),
        "failed": ((105,), ""),
        "finalizing": ((103,), ""),
        "aborted": ((104,), ""),
        "left": ((110,), ""),
        "behind": ((102,), "41 AllReduce, and others 42"),
    }


def test_where_most_are_behind_those_that_are_ahead_are_named() -> None:
    """One that called once too often is odd, and not all others."""
    ranks = [member(rank, AllReduce=43 if rank == 1 else 42) for rank in range(4)]
    assert found(answer(ranks)) == {"ahead": ((101,), "43 AllReduce, and others fewer")}


def test_a_communicator_that_all_close_is_no_hang() -> None:
    """The end of a job looks so."""
    assert found(answer([member(rank, state={"destroy_flag": True}) for rank in range(4)])) == {}


@pytest.mark.parametrize("where", [r"\},(\s+\{)", r"\],(\s+\")", r",(\s+\"pid\")"])
def test_commas_that_are_missing_are_put_back(where: str) -> None:
    """NCCL 2.28.9 leaves them out between missing ranks."""
    whole = answer([member(0), member(1)], [missing(2), missing(3, dead=True)])
    broken = re.sub(where, lambda match: match[0].replace(",", "", 1), whole.decode()).encode()
    with pytest.raises(ValueError, match="delimiter"):
        json.loads(broken)
    assert read_ras(broken) == read_ras(whole)


def test_a_text_says_the_same() -> None:
    """NCCL before 2.28.7 has no JSON."""
    answered = read_ras(TEXT)
    assert answered.timestamp == ""
    assert [(rank.process.pid, rank.status) for rank in answered.lost] == [(105, "unanswering"), (106, "dead")]
    odd = outliers(answered)
    assert not any(one.is_timed for one in odd)
    assert [(one.communicator, one.kind, one.processes, one.message) for one in odd] == [
        ("", "dead", (NcclProcess(-1, HOST, 106),), ""),
        (NAME, "unanswering", (NcclProcess(5, HOST, 105),), ""),
        ("", "unanswering", (NcclProcess(-1, HOST, 105),), ""),
        (NAME, "failed", (NcclProcess(4, HOST, 104),), ""),
        (NAME, "finalizing", (NcclProcess(3, HOST, 103),), ""),
        (NAME, "behind", (NcclProcess(3, HOST, 103),), "41 AllReduce, and others 42"),
        (NAME, "behind", (NcclProcess(2, HOST, 102),), "0 Broadcast, and others 3"),
    ]


def test_the_first_version_counts_all_calls_together() -> None:
    """NCCL 2.24."""
    assert found(OLD_TEXT) == {"behind": ((100, 101), "6649 collective, and others 6650")}


def test_only_what_lasts_is_an_outlier() -> None:
    """In a job that moves, counts differ for a moment."""
    process = (NcclProcess(3, HOST, 103),)
    silent = NcclOutlier(NAME, 8, "unanswering", process, 1)
    late = NcclOutlier(NAME, 8, "behind", process, 1, "41 AllReduce, and others 42")
    moved = late._replace(message="42 AllReduce, and others 43")
    assert lasting((silent, late), (silent._replace(kind="dead"), moved)) == (silent._replace(kind="dead"),)
    assert lasting((late,), (late,)) == (late,)


HOSTILE = [
    b"",
    b"{",
    b"{}",
    b"[]",
    b"\x00\xff" * 1000,
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b'{"communicators": {}}',
    b"{" * 100_000,
    b"1\n" * 100_000,
    b'{"communicators": [' + b"[" * 1000,
    b" " * (LONGEST_BYTES + 1),
    b'{"a": 1\n' + b" \t" * 100_000,
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    """Anything may listen at that port."""
    with pytest.raises(ValueError):  # noqa: PT011 - whichever
        read_ras(content)


def test_wrong_values_are_unknown_and_control_characters_do_not_pass() -> None:
    """A number may be anything, a host may hold an escape sequence."""
    strange = {"rank": -5, "host": "\x1b[31mred", "pid": True, "status": 3, "collective_counts": {"AllReduce": -1}}
    communicators = [
        3,
        {"hash": 3, "size": "8", "ranks": [strange, 3], "missing_ranks": {"a": 1}},
    ]
    answered = read_ras(answer([], communicators=communicators, nccl_version=3))
    ((rank,),) = (one.ranks for one in answered.communicators)
    assert (rank.process.member, rank.process.pid, rank.status, rank.counts) == (-1, -1, "", {})
    assert "\x1b" not in rank.process.host


def test_thousands_of_outliers_are_bounded() -> None:
    """The evidence goes to other hosts."""
    ranks = [member(rank, AllReduce=rank % 7) for rank in range(5000)]
    odd = outliers(read_ras(answer(ranks, [missing(rank) for rank in range(5000, 9000)])))
    assert all(len(one.processes) <= 8 for one in odd)
    assert (odd[0].kind, odd[0].total) == ("unanswering", 4000)
    assert len(odd) <= 16


@given(st.data())
def test_pieces_of_answers_raise_nothing_else(data: st.DataObject) -> None:
    """Whatever a connection breaks off at, and whatever is in between."""
    whole = data.draw(st.sampled_from([TEXT, OLD_TEXT, answer([member(0), member(1)], [missing(2)])]))
    start, end = (data.draw(st.integers(0, len(whole))) for _ in range(2))
    content = whole[:start] + data.draw(st.binary(max_size=20)) + whole[end:]
    try:
        answered = read_ras(content)
    except ValueError:
        return
    outliers(answered)
