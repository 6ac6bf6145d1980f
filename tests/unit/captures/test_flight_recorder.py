"""Asking torch's worker server, with a stand-in for it that answers what a test wants, and reading what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures import flight_recorder
from saferun.captures.flight_recorder import capture_flight_recorder
from saferun.captures.recorder_content import read_groups
from saferun.captures.wire import CaptureReader, CaptureTarget, encode
from saferun.diagnosis.collectives import compare
from saferun.evidence.job_evidence import CollectiveCall, GroupProgress, RankCollectives
from saferun.text.decoding import loads

PID = os.getpid()


def entry(seq: int, op: str = "gloo:all_reduce", **other: Any) -> dict[str, Any]:
    """One entry as torch 2.13 writes it, as far as it is read."""
    return {
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "profiling_name": op,
        "input_sizes": [[3]],
        "retired": True,
        # NCCL's recorder asks the GPU; the others know only that it is over.
        "state": "completed" if op.startswith("nccl:") and other.get("retired", True) else "scheduled",
        "time_created_ns": 1_795_237_237_184_915_516,
    } | other


def trace(*entries: Any, **other: Any) -> bytes:
    return json.dumps({"entries": list(entries), "pg_config": {}, "pg_status": {}, "version": "2.10"} | other).encode()


def http(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@contextlib.contextmanager
def answering(folder: Path, answers: Mapping[str, bytes], pid: int = PID) -> Iterator[CaptureTarget]:
    """A server that gives each path the bytes of its name, and then closes; a path without bytes is never answered.

    As with an older torch, a query makes no difference unless there are bytes for it.
    """
    stopping = threading.Event()
    held: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / f"a0r3.{pid}.sock"))
        listener.listen()
        listener.settimeout(0.05)

        def serve() -> None:
            while not stopping.is_set():
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    continue
                held.append(link)
                link.settimeout(5)
                request = link.recv(4096).split()
                path = request[1].decode()
                answer = answers.get(path, answers.get(path.partition("?")[0]))
                if answer is not None:
                    with contextlib.suppress(OSError):
                        link.sendall(answer)
                    link.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield CaptureTarget(3, PID, str(folder / "a0r3"))
        finally:
            stopping.set()
            thread.join()
            for link in held:
                link.close()


def capture(target: CaptureTarget, wait_s: float = 5.0) -> tuple[RankCollectives, bytes]:
    return capture_flight_recorder(target, time.monotonic() + wait_s)


NAMES = http(b'["ping","fr_trace_json","dump_traceback"]')
BOTH = http(b'["fr_trace_json","dump_nccl_trace_json"]')


# -------------------------------------------------------------------------------------------------------------- asking


def test_a_rank_is_asked_for_what_its_torch_offers(tmp_path: Path) -> None:
    reply = trace(entry(1), entry(2, retired=False))
    with answering(tmp_path, {"/handler/": NAMES, "/handler/fr_trace_json": http(reply)}) as target:
        collectives, content = capture(target)
    assert collectives.failure == ""
    assert collectives.rank == 3
    (group,) = collectives.groups
    assert (group.group, group.description, group.enqueued, group.completed) == ("gloo:0", "default_pg", 2, 1)
    assert json.loads(content) == {"fr_trace_json": json.loads(reply)}


def test_both_recorders_of_a_process_count(tmp_path: Path) -> None:
    """A CUDA build keeps NCCL's calls apart from gloo's; one that fails does not cost the other."""
    answers = {"/handler/": BOTH, "/handler/fr_trace_json": http(trace(entry(1)))}
    nccl = trace(entry(7, "nccl:_all_gather_base"))
    with answering(tmp_path, answers | {"/handler/dump_nccl_trace_json": http(nccl)}) as target:
        assert [group.group for group in capture(target)[0].groups] == ["gloo:0", "nccl:0"]
    (tmp_path / f"a0r3.{PID}.sock").unlink()
    broken = ("", "?onlyactive=true", "?includecollectives=false")
    answers |= {f"/handler/dump_nccl_trace_json{query}": http(b"", "500 Oh") for query in broken}
    with answering(tmp_path, answers) as target:
        collectives, content = capture(target)
    assert [group.group for group in collectives.groups] == ["gloo:0"]
    assert list(json.loads(content)) == ["fr_trace_json"]


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        ({}, "it does not answer"),
        ({"/handler/": b""}, "what answers is not torch's worker server"),
        ({"/handler/": b"\x00" * 100_000}, "what answers is not torch's worker server"),
        ({"/handler/": b"SSH-2.0-OpenSSH\r\n\r\n"}, "what answers is not torch's worker server"),
        ({"/handler/": http(b"", "404 Not Found")}, "it answers with status 404"),
        ({"/handler/": http(b"no json")}, "its answer is not JSON"),
        ({"/handler/": http(b"[" * 100_000)}, "its answer is not JSON"),
        ({"/handler/": http(b"\xff\xfe")}, "its answer is not JSON"),
        ({"/handler/": http(b"null")}, "this torch has no Flight Recorder that can be asked"),
        ({"/handler/": http(b'["ping"]')}, "this torch has no Flight Recorder that can be asked"),
        ({"/handler/": http(b'["ping"]')[:-4]}, "its answer breaks off"),
        ({"/handler/": NAMES}, "it does not answer"),
        ({"/handler/": NAMES, "/handler/fr_trace_json": http(b"{")}, "its answer is not JSON"),
    ],
)
def test_whatever_answers_otherwise_is_told_in_one_line(
    answers: dict[str, bytes], failure: str, tmp_path: Path
) -> None:
    """The socket's other end is the user's process: it may be anything, and may be stopped."""
    with answering(tmp_path, answers) as target:
        collectives, content = capture(target, 0.5)
    assert collectives == RankCollectives(3, (), failure)
    assert content == b""


@pytest.mark.parametrize("body", [b"[]", b"null", b"3", b'"x"', b'{"entries": 3, "pg_status": [], "pg_config": 1}'])
def test_json_of_another_shape_tells_nothing(body: bytes, tmp_path: Path) -> None:
    with answering(tmp_path, {"/handler/": NAMES, "/handler/fr_trace_json": http(body)}) as target:
        assert capture(target)[0] == RankCollectives(3, ())


def test_an_endless_answer_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "REPLY_LIMIT_BYTES", 1 << 20)
    answers = {"/handler/": NAMES, "/handler/fr_trace_json": b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (2 << 20)}
    with answering(tmp_path, answers) as target:
        assert capture(target)[0].failure == "its answer is longer than 1 MiB"


def test_without_a_hook_or_a_process_group_nothing_is_asked(tmp_path: Path) -> None:
    assert capture(CaptureTarget(3, PID))[0].failure == "the hook is not in this rank"
    assert capture(CaptureTarget(3, PID, str(tmp_path / "a0r3")))[0].failure == flight_recorder._NO_SOCKET
    assert capture(CaptureTarget(3, PID, str(tmp_path / "none" / "a0r3")))[0].failure == flight_recorder._NO_SOCKET
    for name in ("a0r3.x.sock", "a0r3..sock", "a0r3.sock", "a0r33.1.sock", f"a0r3.{2**22 + 1}.sock", "a0r3.²3.sock"):
        (tmp_path / name).touch()
    assert capture(CaptureTarget(3, PID, str(tmp_path / "a0r3")))[0].failure == flight_recorder._NO_SOCKET


def test_a_server_that_was_left_out_for_want_of_room_is_named(tmp_path: Path) -> None:
    """Otherwise the user looks for what is wrong with torch, or with the process group; a limit can be raised."""
    (tmp_path / f"a0r3.{PID}.sock").touch()
    assert capture(CaptureTarget(3, PID, str(tmp_path / "a0r3")))[0].failure == (
        "a limit (pids.max, ulimit -u, -v or -d, vm.overcommit_memory) leaves too little room for torch's worker server"
    )


def test_where_the_rank_is_a_shell_its_python_is_asked(tmp_path: Path) -> None:
    """Any process of the rank may hold the process group; the sockets carry the rank's prefix."""
    reply = http(trace(entry(4)))
    with answering(tmp_path, {"/handler/": NAMES, "/handler/fr_trace_json": reply}, os.getppid()) as target:
        assert capture(target)[0].groups[0].enqueued == 4


def test_a_process_that_does_not_answer_leaves_time_for_the_next(tmp_path: Path) -> None:
    answers = {"/handler/": NAMES, "/handler/fr_trace_json": http(trace(entry(4)))}
    with answering(tmp_path, {}) as target, answering(tmp_path, answers, os.getppid()):
        assert capture(target, 1.0)[0].groups[0].enqueued == 4


def nccl2(*entries: Any, **other: Any) -> bytes:
    """The recorder of a backend that is recorded by torch's hook: its calls are scheduled, and then retired."""
    return http(trace(*entries, pg_config={"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, **other))


def test_a_backend_may_have_a_recorder_of_its_own(tmp_path: Path) -> None:
    """Since torch 2.15, whose NCCL backend is nccl2; NCCL's own recorder is there and empty."""
    calls = [entry(1, "nccl2:all_reduce"), entry(2, "nccl2:_all_gather_base", retired=False)]
    nothing = http(trace())
    answers = {"/handler/": BOTH, "/handler/fr_trace_json": http(trace(entry(9)))}
    answers |= {f"/handler/fr_trace_json?backend={name}": nothing for name in flight_recorder._BACKENDS}
    answers |= {"/handler/fr_trace_json?backend=nccl2": nccl2(*calls), "/handler/dump_nccl_trace_json": nothing}
    answers |= {"/handler/fr_trace_json?backend=ncclx": nccl2(entry(4, "ncclx:all_reduce"))}
    with answering(tmp_path, answers) as target:
        collectives, content = capture(target)
    groups = {group.group: group for group in collectives.groups}
    assert [*groups] == ["gloo:0", "nccl2:0", "ncclx:0"]
    assert (groups["nccl2:0"].enqueued, groups["nccl2:0"].completed, groups["nccl2:0"].ranks) == (2, 1, (0, 1))
    assert "fr_trace_json?backend=nccl2" in json.loads(content)
    assert "fr_trace_json?backend=rcclx" not in json.loads(content)


def test_a_torch_that_does_not_look_at_the_name_is_asked_once_more_and_no_more(tmp_path: Path) -> None:
    asked: list[str] = []

    class Answers(dict[str, bytes]):
        def get(self, path: str, default: Any = None) -> Any:
            asked.append(path)
            return super().get(path, default)

    answers = Answers({"/handler/": NAMES, "/handler/fr_trace_json": http(trace(entry(9)))})
    with answering(tmp_path, answers) as target:
        assert len(capture(target)[0].groups) == 1
    assert [path for path in asked if "backend" in path] == ["/handler/fr_trace_json?backend=nccl2"]


def test_where_a_gpu_has_failed_its_numbers_are_asked_for(tmp_path: Path) -> None:
    """NCCL's recorder asks the GPU for each call's state, and HTTP says 500 where CUDA has a sticky error."""
    numbers = trace(pg_status={"0": {"last_enqueued_collective": "9", "last_completed_collective": "7"}})
    answers = {
        "/handler/": http(b'["dump_nccl_trace_json"]'),
        "/handler/dump_nccl_trace_json": http(b"CUDA error: unspecified launch failure", "500 Internal Server Error"),
        "/handler/dump_nccl_trace_json?onlyactive=true": http(b"", "500 Internal Server Error"),
        "/handler/dump_nccl_trace_json?includecollectives=false": http(numbers),
    }
    with answering(tmp_path, answers) as target:
        collectives, _ = capture(target)
    assert [group[:2] + group[3:6] for group in collectives.groups] == [("nccl:0", "default_pg", 9, -1, 7)]
    assert collectives.failure == ""
    assert collectives.incomplete == "NCCL's recorder has not sent its calls: it answers with status 500"
    assert collectives.has_failed


def test_a_full_dump_that_does_not_come_leaves_time_for_a_smaller_one(tmp_path: Path) -> None:
    answers = {
        "/handler/": http(b'["dump_nccl_trace_json"]'),
        "/handler/dump_nccl_trace_json?onlyactive=true": http(trace(entry(7, "nccl:all_reduce", retired=False))),
    }
    with answering(tmp_path, answers) as target:
        collectives, _ = capture(target, 2.0)
    assert [group.enqueued for group in collectives.groups] == [7]
    assert collectives.incomplete == "NCCL's recorder has not sent the calls that are over: it does not answer"
    assert not collectives.has_failed


def test_the_pickle_of_an_older_torch_is_read(tmp_path: Path) -> None:
    """Torch 2.4 has no JSON, one number for all calls, and no name of the group."""
    old = {name: value for name, value in entry(3, "nccl:all_reduce").items() if name != "collective_seq_id"}
    body = pickle.dumps({"entries": [old | {"seq_id": 3}], "version": "2.2"}, protocol=2)
    answers = {"/handler/": http(b'["dump_nccl_trace_pickle"]')}
    answers["/handler/dump_nccl_trace_pickle?includestacktraces=false"] = http(body)
    with answering(tmp_path, answers) as target:
        collectives, content = capture(target)
    assert [(group.group, group.completed) for group in collectives.groups] == [("nccl:0", 3)]
    assert json.loads(content)["dump_nccl_trace_pickle?includestacktraces=false"]["version"] == "2.2"
    (tmp_path / f"a0r3.{PID}.sock").unlink()
    answers["/handler/dump_nccl_trace_pickle?includestacktraces=false"] = http(pickle.dumps(os.getpid))
    with answering(tmp_path, answers) as target:
        assert capture(target)[0].failure == (
            "its pickle cannot be read: it does more than hold plain values (instruction 0x93)"
        )


# ------------------------------------------------------------------------------------------------------------- reading


def groups_of(*entries: Any, recorder: str = "fr_trace_json", **other: Any) -> dict[str, GroupProgress]:
    return {group.group: group for group in read_groups(json.loads(trace(*entries, **other)), recorder)}


def test_a_call_is_read() -> None:
    frames = [{"name": "step", "filename": "train.py", "line": 52}, "none", {}]
    (group,) = groups_of(entry(5, "nccl:_reduce_scatter_base", input_sizes=[[2, 3]], frames=frames)).values()
    (call,) = group.calls
    assert call[:6] == (5, "reduce_scatter_tensor", "[[2, 3]]", True, False, 1_795_237_237_184_915_516)
    assert [tuple(frame)[:3] for frame in call.frames] == [("step", "train.py", 52), ("", "", 0)]
    assert group.group == "nccl:0"


def test_groups_are_told_apart_by_name_and_not_by_a_rank_s_own_number() -> None:
    """A rank numbers the groups that it is in; the third group is its second."""
    groups = groups_of(
        entry(1),
        entry(1, pg_id=1, process_group=["2", "pair"]),
        pg_status={"0": {"last_enqueued_collective": "1", "last_completed_collective": "1"}, "9": {}, "x": 3},
        pg_config={"": {"name": "", "ranks": "[]"}, "2": {"name": "2", "desc": "pair", "ranks": "[2, 1]"}},
    )
    assert {name: (group.description, group.ranks) for name, group in groups.items()} == {
        "gloo:0": ("default_pg", ()),
        "gloo:2": ("pair", (2, 1)),
    }


def test_numbers_that_count_something_else_are_not_believed() -> None:
    """With gloo the status counts sends and receives too: 21 where the collectives are at 16."""
    status = {
        "0": {"last_enqueued_collective": "21", "last_completed_collective": "14", "last_started_collective": "-1"}
    }
    group = groups_of(entry(13), entry(16, retired=False), pg_status=status)["gloo:0"]
    assert (group.enqueued, group.started, group.completed) == (16, -1, 15)


def test_a_status_without_entries_is_all_that_there_is() -> None:
    status = {"0": {"last_enqueued_collective": "9", "last_started_collective": "8", "last_completed_collective": 7}}
    group = groups_of(pg_status=status, recorder="dump_nccl_trace_json")["nccl:0"]
    assert (group.enqueued, group.started, group.completed, group.calls) == (9, 8, 7, ())
    nothing = {"0": dict.fromkeys(status["0"], "-1")}
    assert groups_of(pg_status=nothing) == {}


def test_a_coalesced_call_is_complete_once_one_of_its_members_is() -> None:
    members = [entry(4, "nccl:_broadcast_oop", retired=False), entry(4, "nccl:coalesced")]
    assert groups_of(*members)["nccl:0"].completed == 4


@pytest.mark.parametrize(
    ("shapes", "elements"),
    [([[2, 3]] * 9, 54), ([[]] * 9, 9), ([[2, 3]], -1), ([3] * 9, -1), ([[-3]] * 9, -1), ([[1 << 61] * 3] * 9, -1)],
)
def test_elements_of_many_tensors_are_counted(shapes: list[Any], elements: int) -> None:
    """The text of their sizes is cut."""
    ((call,),) = (group.calls for group in groups_of(entry(5, input_sizes=shapes, output_sizes=[[1]] * 9)).values())
    assert (call.elements, call.output_elements) == (elements, 9)


def p2p(seq: int, op: str, **other: Any) -> dict[str, Any]:
    """A send or receive within a batch: no event ever tells that it is over."""
    return entry(1, op, is_p2p=True, p2p_seq_id=seq, retired=False, **other)


def batch_end(seq: int, **other: Any) -> dict[str, Any]:
    """What stands behind a batch, under the number of the last collective."""
    return entry(1, "nccl:coalesced", p2p_seq_id=seq, **other)


def test_the_entry_behind_a_batch_tells_whether_its_members_are_over() -> None:
    group = groups_of(
        entry(1, "nccl:all_reduce"),
        *(p2p(7, "nccl:send 0->1"), p2p(7, "nccl:recv 0<-1"), batch_end(7)),
        *(p2p(8, "nccl:send 0->1"), p2p(8, "nccl:recv 0<-1"), batch_end(8, retired=False)),
        *(p2p(9, "nccl:send 0->1"), p2p(9, "nccl:recv 0<-1")),
    )["nccl:0"]
    assert (group.enqueued, group.completed) == (1, 1)
    members = [(call.seq, call.op, call.retired) for call in group.calls if call.is_p2p]
    assert members == [(seq, op, seq == 7) for seq in (7, 8, 9) for op in ("send 0->1", "recv 0<-1")]
    assert "coalesced" not in {call.op for call in group.calls}


def test_of_a_batch_that_is_over_only_its_members_are_left_among_the_active() -> None:
    """Only active calls were asked for: the entry that says that they are over is not among them."""
    content = json.loads(trace(p2p(7, "nccl:send 0->1"), p2p(8, "nccl:send 0->1"), batch_end(8, retired=False)))
    (group,) = read_groups(content, "dump_nccl_trace_json", only_active=True)
    assert [(call.seq, call.retired) for call in group.calls] == [(8, False)]


def test_a_batch_whose_members_have_been_overwritten_is_no_collective() -> None:
    assert not groups_of(batch_end(7, record_id=12, retired=False))


def test_what_was_taken_off_the_list_without_being_complete_has_failed() -> None:
    """With NCCL's recorder; the others know no more than that a call is off the list."""
    failed = {"retired": True, "state": "scheduled"}
    groups = groups_of(entry(1, "nccl:all_reduce"), entry(2, "nccl:all_reduce", **failed), entry(2, "nccl2:all_reduce"))
    (_, call) = groups["nccl:0"].calls
    assert (groups["nccl:0"].completed, call.retired, call.failed) == (1, False, True)
    assert (groups["nccl2:0"].completed, groups["nccl2:0"].calls[0].failed) == (2, False)


def test_the_status_says_nothing_of_collectives_where_there_are_sends() -> None:
    """It has the number of whatever came last: a stage of a pipeline is at 13,698 and the next at 11,986."""
    status = {"0": {"last_enqueued_collective": "3", "last_completed_collective": "13698"}}
    calls = [entry(3, "nccl:all_reduce", retired=False), p2p(40, "nccl:send 0->1")]
    assert groups_of(*calls, pg_status=status)["nccl:0"].completed == 2


def test_types_and_places_of_calls_are_read() -> None:
    types: dict[str, Any] = {"input_dtypes": ["Float", "Float"], "output_dtypes": ["BFloat16"], "output_sizes": [[6]]}
    (call,) = groups_of(entry(5, record_id=77, time_discovered_started_ns=9, **types))["gloo:0"].calls
    assert (call.dtypes, call.output_sizes, call.order, call.started) == ("Float -> BFloat16", "[[6]]", 77, True)


def test_the_longest_timeout_of_calls_that_are_not_over_is_read() -> None:
    calls = [
        entry(1, timeout_ms=9_000_000),
        *(entry(seq, retired=False, timeout_ms=ms) for seq, ms in ((2, 5), (3, 7))),
    ]
    assert groups_of(*calls)["gloo:0"].timeout_ms == 7
    assert groups_of(entry(1, timeout_ms=5))["gloo:0"].timeout_ms == -1


@pytest.mark.parametrize("timeout", [None, -1, 1.5, "soon", [7], True, 1 << 40, 10**30])
def test_a_timeout_that_is_none_is_not_known(timeout: Any) -> None:
    """The answer is the rank's, and may hold anything."""
    assert groups_of(entry(1, retired=False, timeout_ms=timeout))["gloo:0"].timeout_ms == -1


def test_a_group_that_was_made_anew_counts_from_one_again() -> None:
    group = groups_of(entry(1), entry(2), entry(3), entry(1), entry(2, retired=False))["gloo:0"]
    assert (group.enqueued, group.completed, [call.seq for call in group.calls]) == (2, 1, [1, 2])


def test_sends_and_receives_do_not_count_as_collectives() -> None:
    group = groups_of(entry(3), entry(3, "nccl:send 0->1", is_p2p=True, p2p_seq_id=40, retired=False))
    assert [(call.seq, call.op, call.is_p2p) for call in group["nccl:0"].calls] == [(40, "send 0->1", True)]
    assert group["gloo:0"].enqueued == 3


def test_what_a_rank_waits_in_is_kept_though_it_ran_far_ahead() -> None:
    """A GPU may be hundreds of calls behind its rank."""
    group = groups_of(*(entry(seq, "nccl:all_reduce", retired=seq < 100) for seq in range(1, 501)))["nccl:0"]
    assert group.completed == 99
    assert [call.seq for call in group.calls] == [100, 101, 102, 103, *range(461, 501)]


def test_of_each_peer_the_oldest_that_waits_is_kept() -> None:
    """Each pair of ranks has a stream of its own, and there may be hundreds of calls to others behind it."""
    others = [entry(1, "nccl:recv 0<-2", is_p2p=True, p2p_seq_id=seq) for seq in range(2, 400)]
    group = groups_of(p2p(1, "nccl:send 0->1"), *others)["nccl:0"]
    assert [call.seq for call in group.calls] == [1, *range(360, 400)]
    many = [p2p(seq, f"nccl:send 0->{seq}") for seq in range(1, 1000)]
    kept = groups_of(*many)["nccl:0"].calls
    assert len(kept) == 200
    assert kept[0].seq == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["0", "[1]", "-1"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*entry(1), "0", "ranks"]), inner),
    max_leaves=12,
)


@given(
    entries=JSON | st.lists(st.builds(lambda odd: entry(1) | odd, st.dictionaries(st.sampled_from([*entry(1)]), JSON))),
    status=JSON,
    config=JSON,
)
def test_whatever_an_entry_holds_it_is_read_or_passed_over(entries: Any, status: Any, config: Any) -> None:
    """And what is read travels to the supervisor, and can be compared and shown."""
    reply = json.dumps({"entries": entries, "pg_status": status, "pg_config": config}).encode()
    found = RankCollectives(0, read_groups(json.loads(reply), "fr_trace_json"))
    read_groups(json.loads(reply), "dump_nccl_trace_json", only_active=True)
    reader = CaptureReader()
    reader.feed(encode("collectives", found))
    assert reader.capture.collectives == (found,)
    for line in compare([found, found._replace(rank=1)], [0, 1]).lines:
        assert line.isprintable()
    assert all(isinstance(call, CollectiveCall) for group in found.groups for call in group.calls)


def test_an_answer_is_parsed_once_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values take many times the memory of their JSON: two answers of 60 MB cost 1.5 GB and 20 s."""
    assert flight_recorder.REPLY_LIMIT_BYTES == 16 << 20
    parsed: list[bytes] = []

    def counted(content: bytes, **bounds: int) -> Any:
        parsed.append(content)
        return loads(content, **bounds)

    monkeypatch.setattr(flight_recorder, "loads", counted)
    replies = [trace(entry(1)), trace(entry(7, "nccl:_all_gather_base"))]
    answers = {"/handler/fr_trace_json": http(replies[0]), "/handler/dump_nccl_trace_json": http(replies[1])}
    with answering(tmp_path, {"/handler/": BOTH, **answers}) as target:
        assert len(capture(target)[0].groups) == 2
    assert [content for content in parsed if b"entries" in content] == replies


def test_an_answer_that_takes_too_much_memory_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short_of_memory(content: bytes, **bounds: int) -> Any:
        if b"all_gather" in content:
            raise MemoryError
        return loads(content, **bounds)

    monkeypatch.setattr(flight_recorder, "loads", short_of_memory)
    nccl = http(trace(entry(7, "nccl:_all_gather_base")))
    answers = {"/handler/fr_trace_json": http(trace(entry(1))), "/handler/dump_nccl_trace_json": nccl}
    with answering(tmp_path, {"/handler/": BOTH, **answers}) as target:
        assert [group.group for group in capture(target)[0].groups] == ["gloo:0"]
    (tmp_path / f"a0r3.{PID}.sock").unlink()
    with answering(tmp_path, {"/handler/": http(b'["dump_nccl_trace_json"]'), **answers}) as target:
        assert capture(target)[0].failure == "its answer takes too much memory"


def test_memory_is_limited_for_what_is_parsed() -> None:
    """A hostile answer costs its own capture, not the job its memory."""
    program = (
        "from saferun.linux.memory_limit import limit_memory\n"
        "from saferun.text.decoding import loads\n"
        "limit_memory(64 << 20)\n"
        "limit_memory(1 << 40)\n"  # a lower limit stays
        "content = b'[' + b'[],' * (5 << 20) + b'[]]'\n"
        "try:\n"
        "    loads(content, longest=1 << 30, most=1 << 30)\n"
        "except MemoryError:\n"
        "    print('bounded')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "bounded\n"
