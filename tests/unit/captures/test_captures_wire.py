"""What the supervisor and the capture process say to each other."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.wire import (
    LINE_LIMIT_BYTES,
    NOT_READ,
    NOT_READY,
    Begun,
    CaptureReader,
    CaptureRequest,
    CaptureTarget,
    CoreRequest,
    DeadProcess,
    Done,
    encode,
)
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess, RankGpu
from saferun.evidence.job_evidence import (
    Capture,
    CaptureNote,
    CollectiveCall,
    CoreDump,
    Frame,
    GroupProgress,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    StuckLink,
    ThreadStack,
)
from tests.process.one_capture import decode_request, encode_request

FRAME = Frame("step", "/home/me/train.py", 52)
THREAD = ThreadStack("MainThread", 71, is_main=True, active=False, owns_gil=True, frames=(FRAME, FRAME))
DUMP = StackDump(3, 71, True, "python", "py-spy", (THREAD,))
LOOK = ProcessSnapshot(3, 71, 1, True, "python", "", "S", "futex_wait", "futex", 4, 0, False, 1 << 40, "", 0.25)
CALL = CollectiveCall(5, "all_reduce", "[[8]]", retired=False, is_p2p=False, created_ns=1 << 61, frames=(FRAME,))
COLLECTIVES = RankCollectives(3, (GroupProgress("0", "default_pg", (0, 1), 5, 4, 4, (CALL,)),))
NOTE = CaptureNote("py_spy", 3, 71, "/run/rank_3.py_spy.json", 0.1)
CORE = CoreDump(3, 71, 11, "/run/core", 99, True, "pystack", (THREAD,), address="0x0")
OOM = OomKill("cgroup", 1 << 36, 0, (71,), 1, "memory.events")
LINK = StuckLink(3, "10.0.0.1:40000", "10.0.0.3:50123", "ESTABLISHED", 4096, 8)
GPU = RankGpu(3, "0000:1b:00.0")
NCCL = NcclOutlier(
    "a7", 8, "behind", (NcclProcess(1, "10.0.0.1", 71),), 1, "41 AllReduce, and others 42", is_timed=True
)
LINES = (
    encode("snapshot", LOOK),
    encode("stack", DUMP),
    encode("collectives", COLLECTIVES),
    encode("host_line", "GPU 0: 100 %"),
    encode("kernel_line", "NVRM: Xid 79"),
    encode("note", NOTE),
    encode("core", CORE),
    encode("oom", OOM),
    encode("link", LINK),
    encode("gpu", GPU),
    encode("nccl", NCCL),
    encode("done", Done(1.5)),
)


def read(*lines: bytes) -> CaptureReader:
    reader = CaptureReader()
    reader.feed(b"".join(lines))
    return reader


def test_what_is_written_is_read() -> None:
    """Every kind of value, with every type that a field may have."""
    reader = read(*LINES)
    assert reader.capture == Capture(
        (LOOK,),
        (DUMP,),
        (COLLECTIVES,),
        ("GPU 0: 100 %",),
        (NOTE,),
        timed_out=(),
        elapsed_s=1.5,
        links=(LINK,),
        gpus=(GPU,),
        kernel_lines=("NVRM: Xid 79",),
        nccl=(NCCL,),
    )
    assert reader.cores == (CORE,)
    assert reader.oom == OOM
    assert reader.kernel_lines == ("NVRM: Xid 79",)
    assert reader.is_done


@given(st.lists(st.integers(1, 200), max_size=60))
def test_pieces_of_any_size_make_the_same(sizes: list[int]) -> None:
    """A pipe keeps no boundaries."""
    content = b"".join(LINES)
    reader = CaptureReader()
    for size in sizes:
        reader.feed(content[:size])
        content = content[size:]
    reader.feed(content)
    assert reader.capture == read(*LINES).capture


@pytest.mark.parametrize(
    "request_",
    [
        CaptureRequest((CaptureTarget(0, 71, "/tmp/x"), CaptureTarget(1, 72)), "/run", 3.0, "always", True, False, 1.5),
        CoreRequest((DeadProcess(0, 71, 11, "/home", "/bin/x"),), "/run", "keep", 2, True, 9.0, 1.5),
        CaptureRequest(()),
    ],
)
def test_a_request_arrives(request_: CaptureRequest | CoreRequest) -> None:
    """Both kinds, with all fields."""
    assert decode_request(encode_request(request_)) == request_


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"value": {"targets": 3}}', b'{"kind": "live"}'])
def test_what_is_no_request_is_refused(content: bytes) -> None:
    """It is said as one kind of error, for which the process has words."""
    with pytest.raises((ValueError, TypeError)):
        decode_request(content)


HOSTILE = [
    b"",
    b"not JSON",
    b"[]",
    b"null",
    b"{}",
    b'{"kind": 3}',
    b'{"kind": []}',
    b'{"kind": "shutdown", "value": {}}',
    b'{"kind": "snapshot"}',
    b'{"kind": "snapshot", "value": null}',
    b'{"kind": "snapshot", "value": {"rank": "3"}}',
    b'{"kind": "host_line", "value": 3}',
    b'{"kind": "done", "value": {"elapsed_s": NaN}}',
    b'{"kind": "done", "value": {"elapsed_s": 1e999}}',
    b'{"kind": "done", "value": {"elapsed_s": 1' + b"0" * 400 + b"}}",
    b'{"kind": "done", "value": {"elapsed_s": true}}',
    b'{"kind": "note", "value": ["x", 1' + b"0" * 5000 + b"]}",
    b'{"kind": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"kind": "stack", "value": {"rank": 0, "pid": 1, "is_rank": 1, "name": "", "tool": "", "threads": []}}',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_that_is_no_message_is_dropped(line: bytes) -> None:
    """What comes before and after it counts all the same."""
    reader = read(LINES[0], line + b"\n", LINES[1])
    assert reader.capture._replace(timed_out=()) == Capture((LOOK,), (DUMP,))
    assert not reader.is_done


@given(st.binary(max_size=300))
def test_no_bytes_raise(content: bytes) -> None:
    """The supervisor must live whatever comes."""
    read(content, b"\n", content).capture  # noqa: B018 - it is computed


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=20))
def test_no_value_raises(value: object) -> None:
    """Also where it is JSON, of a known kind, and not what the kind calls for."""
    for kind in ("snapshot", "stack", "collectives", "note", "core", "oom", "link", "done", "begun", "host_line"):
        read(json.dumps({"kind": kind, "value": value}).encode() + b"\n").capture  # noqa: B018 - it is computed


def test_a_line_without_end_takes_no_memory() -> None:
    """It is dropped, and what follows it is read."""
    reader = CaptureReader()
    for _ in range(3):
        reader.feed(b"x" * (LINE_LIMIT_BYTES - 1))
    assert len(reader._rest) <= LINE_LIMIT_BYTES
    reader.feed(b"tail\n" + LINES[0])
    assert reader.capture.processes == (LOOK,)


def test_strings_and_lists_are_bounded() -> None:
    """A function may have a name of a megabyte."""
    long = Frame("f" * 1_000_000, "x", 1)
    reader = read(encode("stack", DUMP._replace(threads=(THREAD._replace(frames=(long,)),))))
    assert len(reader.capture.stacks[0].threads[0].frames[0].function) == 4096
    reader = read(*[encode("host_line", "x")] * 2000)
    assert len(reader.capture.host_lines) < 1000


def test_halves_of_surrogate_pairs_do_not_get_through() -> None:
    """No file and no terminal takes them."""
    reader = read(b'{"kind": "host_line", "value": "a\\ud800b \\u00e4"}\n')
    assert reader.capture.host_lines == ("a?b ä",)


def test_a_later_look_at_a_process_replaces_the_first() -> None:
    """It comes with what takes longer to find out."""
    other = LOOK._replace(pid=72, is_rank=False)
    reader = read(*(encode("snapshot", look) for look in (LOOK, other, LOOK._replace(command="python train.py"))))
    assert reader.capture.processes == (LOOK._replace(command="python train.py"), other)


def test_what_has_begun_and_not_ended_is_named() -> None:
    """Whatever is not ready when the budget is spent is told."""
    reader = read(encode("begun", Begun("py_spy", 3, 71)), encode("begun", Begun("gpu_nvidia", -1, 0)))
    assert list(reader.capture.timed_out) == ["py_spy of rank 3 (pid 71)", "gpu_nvidia"]
    reader.feed(encode("note", NOTE))
    assert list(reader.capture.timed_out) == ["gpu_nvidia"]
    reader.feed(encode("note", CaptureNote("gpu_nvidia", -1, 0, "", 0.1, NOT_READY)))
    assert list(reader.capture.timed_out) == ["gpu_nvidia"]


def test_nothing_at_all_is_unfinished_as_a_whole() -> None:
    """The process may not even have come to begin."""
    assert CaptureReader().capture.timed_out == ("everything",)
    assert read(encode("done")).capture.timed_out == ()


def test_a_core_that_was_only_found_gives_way_to_what_was_read_in_it() -> None:
    """One process may have left two: a core handler keeps one, and another is in its directory."""
    unread = CORE._replace(tool="", threads=(), failure=NOT_READ)
    other = unread._replace(path="/var/core")
    third = unread._replace(rank=4, pid=72)
    reader = CaptureReader()
    for core in (unread, other, third):
        reader.feed(encode("core", core))
    assert reader.cores == (unread, other, third)
    reader.feed(encode("core", CORE))
    assert reader.cores == (CORE, other, third)
    reader.feed(encode("core", CORE._replace(rank=4, pid=72)))
    assert reader.cores == (CORE, CORE._replace(rank=4, pid=72), other)
