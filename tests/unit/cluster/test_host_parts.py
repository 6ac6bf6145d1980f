"""What the hosts of a job hand to their leader, and how it lays it together."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.evidence import HostPart, HostPeer, LostHost, decode_part, encode_part, merge_parts
from saferun.evidence.job_evidence import (
    Capture,
    CoreDump,
    Evidence,
    Frame,
    HangVerdict,
    OomKill,
    StackDump,
    ThreadStack,
)
from tests.examples import examples
from tests.unit.host_samples import (
    IN_ALL_REDUCE,
    IN_LOAD,
    START,
    STARTED_AT,
    captured,
    ended,
    host_evidence,
    job,
    peers_of,
    recorder_of,
    traceback_of,
)

SEGFAULT = CoreDump(
    3,
    4001,
    11,
    "/var/cores/core.4001",
    1 << 27,
    kept=True,
    tool="pystack",
    threads=(
        ThreadStack("MainThread", 4001, True, True, True, (Frame("embedding", "libtorch.so", 0, True), *IN_LOAD)),
        ThreadStack("worker", 4100, False, False, False, IN_LOAD),
    ),
    address="0x10",
)


def heavy(host: int, nproc: int) -> Evidence:
    """A host that has much more to say than there is room for."""
    first = host * nproc
    ranks = range(first, first + nproc)
    chatter = [f"step {step}: loss {step / 7:.9f} and many other words that nobody needs" for step in range(400)]
    deep = tuple(Frame(f"recurse_{depth % 7}", f"/home/me/project/part{depth % 5}.py", depth) for depth in range(300))
    capture = captured(host, nproc)
    threads = tuple(
        ThreadStack(
            f"pool-{number}", 9000 + number, False, False, False, (Frame(f"job{number}", "/x/y.py", number), *deep)
        )
        for number in range(60)
    )
    stacks = tuple(
        dump._replace(threads=(dump.threads[0]._replace(frames=(*IN_ALL_REDUCE[:-1], *deep)), *threads))
        for dump in capture.stacks
    )
    return host_evidence(
        host,
        nproc,
        ends=[
            ended(first, nproc, signum=11),
            *(ended(rank, nproc, signum=15, stopped=True) for rank in ranks if rank != first),
        ],
        said={rank: [*chatter, *traceback_of(f"ValueError: the bad batch of rank {rank}")] for rank in ranks},
        capture=capture._replace(stacks=stacks, host_lines=tuple(chatter)),
        cores=(SEGFAULT._replace(rank=first),),
        hang=HangVerdict("quiescent", tuple(ranks), 300.0, certain=True),
        kernel_lines=tuple(chatter),
    )


# ------------------------------------------------------------------------------------------------------------- packing


def test_a_part_comes_back_as_it_was() -> None:
    """What a host knows reaches the leader whole where there is room."""
    evidence = host_evidence(
        1,
        ends=[ended(2, 2, code=1), ended(3, 2, signum=11)],
        said={2: traceback_of("ValueError: bad")},
        capture=captured(1, states={2: "T"}, frames={3: IN_LOAD}),
        cores=(SEGFAULT,),
        oom=OomKill("cgroup", 1 << 30, 1 << 29, (4001,), 1, "memory.events"),
        abandoned=(1,),
        hang=HangVerdict("stopped", (2,), 12.5, certain=False),
    )
    back = decode_part(encode_part(evidence, 1 << 16))
    assert back is not None
    assert back.ends == evidence.ends
    assert back.oom == evidence.oom
    assert back.abandoned == (1,)
    assert back.hang == evidence.hang
    assert back.outputs[0].last_lines == evidence.outputs[0].last_lines
    assert back.capture.processes == evidence.capture.processes
    assert back.capture.stacks == evidence.capture.stacks
    assert [(one.rank, one.groups[0].enqueued) for one in back.capture.collectives] == [(2, 7), (3, 7)]
    assert back.cores[0].threads[0].frames == SEGFAULT.threads[0].frames


@pytest.mark.parametrize(
    ("limit_bytes", "nproc"),
    [
        pytest.param(limit_bytes, nproc, marks=[pytest.mark.slow] if nproc == 64 and limit_bytes > 2048 else [])
        for limit_bytes in (2048, 4096, 16384, 65536)
        for nproc in (1, 8, 64)
    ],
)
def test_a_part_is_never_longer_than_it_may_be(limit_bytes: int, nproc: int) -> None:
    """The leader's memory and the job's log have room for a known amount, whatever the ranks wrote."""
    text = encode_part(heavy(1, nproc), limit_bytes)
    assert 0 < len(text) <= limit_bytes
    assert text.isascii()
    back = decode_part(text)
    assert back is not None
    assert nproc in {end.rank for end in back.ends}


def test_the_cause_stays_where_there_is_little_room() -> None:
    """Two kibibytes tell which rank failed, of what, and in what it crashed; what others said goes first."""
    back = decode_part(encode_part(heavy(1, 8), 2048))
    assert back is not None
    first = next(end for end in back.ends if end.rank == 8)
    assert first.status.signum == 11
    assert not first.stopped_by_us
    lines = back.outputs_by_rank[8].last_lines
    assert lines[-1] == "ValueError: the bad batch of rank 8"
    assert any("Traceback" in line for line in lines)
    assert back.hang is not None
    assert back.hang.kind == "quiescent"
    assert back.cores[0].threads[0].frames[0].function == "embedding"


def test_a_hang_of_eight_ranks_finds_room_in_two_kibibytes() -> None:
    """At ten thousand hosts that is all that each has, and an ordinary hang must not be cut at all."""
    evidence = host_evidence(1, 8, capture=captured(1, 8), hang=HangVerdict("quiescent", (8,), 300.0, certain=True))
    back = decode_part(encode_part(evidence, 2048))
    assert back is not None
    assert [dump.threads[0].frames for dump in back.capture.stacks] == [IN_ALL_REDUCE] * 8
    assert [one.groups[0].enqueued for one in back.capture.collectives] == [7] * 8
    assert len(back.capture.processes) >= 2


def test_equal_stacks_of_a_host_travel_once() -> None:
    """Each host merges its own stacks: sixty-four ranks that wait alike cost little more than one."""
    one = encode_part(host_evidence(1, 1, capture=Capture(stacks=captured(1, 1).stacks)), 1 << 20)
    many = encode_part(host_evidence(1, 64, capture=Capture(stacks=captured(1, 64).stacks)), 1 << 20)
    frames = [part for part in json.loads(zlib.decompress(base64.b85decode(many)))[2] if part[0] == "all_reduce"]
    assert len(frames) == 1
    assert len(many) < len(one) + 64 * 20


def test_where_nothing_finds_room_there_is_no_part() -> None:
    """An empty text is none."""
    assert encode_part(heavy(1, 8), 20) == ""
    assert decode_part("") is None


def _content_of(text: str) -> list[Any]:
    content: list[Any] = json.loads(zlib.decompress(base64.b85decode(text)))
    return content


def _text_of(content: object) -> str:
    return base64.b85encode(zlib.compress(json.dumps(content).encode())).decode()


EMPTY = json.loads(zlib.decompress(base64.b85decode(encode_part(host_evidence(1), 1 << 16))))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no part",
        "ünïcode",
        "x" * 100,
        base64.b85encode(b"not compressed").decode(),
        base64.b85encode(zlib.compress(b"not json")).decode(),
        base64.b85encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b85encode(zlib.compress(b"[1," + b"[]," * 5 + b"[]]")).decode(),
        _text_of({}),
        _text_of([]),
        _text_of(None),
        _text_of([2, *EMPTY[1:]]),
        _text_of([1, EMPTY[1][:3]]),
        _text_of([1, EMPTY[1], [], [], [[[[1, 2, 3], [-1]], "yes"]]]),
        _text_of([1, [*EMPTY[1][:1], 1e400, *EMPTY[1][2:]]]),
        _text_of([1, [*EMPTY[1][:1], 10**400, *EMPTY[1][2:]]]),
    ],
)
def test_what_is_no_part_is_none(text: str) -> None:
    """Other hosts' texts are made of what programs wrote; nothing in them may end the leader."""
    assert decode_part(text) is None


def test_a_part_that_grows_without_bound_is_cut() -> None:
    """A few kilobytes may stand for gigabytes of the same letter, or for processes times threads."""
    bomb = base64.b85encode(zlib.compress(b'[1,["' + b"a" * (64 << 20) + b'"]]')).decode()
    assert decode_part(bomb) is None
    thread = ["t", False, False, False, 0]
    dumps = [[[[1, 2]] * 5000, True, "", "", "", [thread] * 5000]] * 4
    back = decode_part(_text_of([1, EMPTY[1], [["f", "x.py", 1, False]], [[0, 7, -1]], dumps]))
    assert back is not None
    assert sum(len(dump.threads) for dump in back.capture.stacks) <= 1 << 17
    assert back.capture.stacks[0].threads[0].frames == (Frame("f", "x.py", 1),)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=30,
)


@examples(150)
@given(path=st.lists(st.integers(0, 40), max_size=6), value=JSON)
def test_no_change_of_a_part_is_an_exception(path: list[int], value: object) -> None:
    """Whatever stands in the place of one of its values, it is a part or it is none."""
    evidence = host_evidence(1, ends=[ended(2, 2, code=1)], capture=captured(1), cores=(SEGFAULT,))
    content = json.loads(zlib.decompress(base64.b85decode(encode_part(evidence, 1 << 16))))
    place = content
    for step in path[:-1]:
        if not isinstance(place[step % len(place)], list) or not place[step % len(place)]:
            break
        place = place[step % len(place)]
    place[(path or [0])[-1] % len(place)] = value
    back = decode_part(_text_of(content))
    if back is not None:
        merged = merge_parts([HostPart(1, 0, "node2", 0.0, back)], world_size=4, peers=peers_of(2))
        assert all(end.rank in {2, 3} for end in merged.ends)
        assert all(look.rank in {2, 3} for look in merged.capture.processes)


def with_states() -> Evidence:
    """The recorder of rank 2 answered with an error; that of rank 3, which has the same calls, did not."""
    alike = recorder_of(2)
    failed = alike._replace(incomplete="NCCL's recorder has not sent its calls: it answers with status 500")
    capture = captured(1)._replace(collectives=(failed._replace(has_failed=True), alike._replace(rank=3)))
    return host_evidence(1, capture=capture)


def test_what_is_known_of_a_recorder_comes_to_the_leader() -> None:
    """Else it takes a rank whose GPU has failed for any other that waits."""
    back = decode_part(encode_part(with_states(), 1 << 20))
    assert back is not None
    assert [(one.rank, bool(one.incomplete), one.has_failed) for one in back.capture.collectives] == [
        (2, True, True),
        (3, False, False),
    ]


def test_recorders_of_which_only_the_calls_are_sent_are_read() -> None:
    """By a saferun that sends no more."""
    content = _content_of(encode_part(with_states(), 1 << 20))
    content[5] = [recorder[:3] for recorder in content[5]]
    back = decode_part(_text_of(content))
    assert back is not None
    assert [(one.incomplete, one.has_failed) for one in back.capture.collectives] == [("", False)] * 2


# ------------------------------------------------------------------------------------------------------------- merging


def test_a_host_speaks_of_its_own_ranks_only() -> None:
    """A host that is wrong, or worse, must not end another's rank."""
    liar = host_evidence(1, ends=[ended(2, 2, code=1), ended(0, 2, signum=9), ended(99, 2, code=3)])
    liar = liar._replace(
        capture=captured(0)._replace(collectives=(recorder_of(0), recorder_of(3))),
        outputs=tuple(output._replace(rank=rank) for output, rank in zip(liar.outputs, (0, 3), strict=True)),
        cores=(SEGFAULT._replace(rank=-5), SEGFAULT._replace(rank=3)),
        hang=HangVerdict("stopped", (0, 3), 1.0, certain=True),
    )
    merged = job({0: host_evidence(0), 1: liar}, hosts=2)
    assert [end.rank for end in merged.ends] == [2]
    assert not merged.capture.processes
    assert not merged.capture.stacks
    assert [one.rank for one in merged.capture.collectives] == [3]
    assert [core.rank for core in merged.cores] == [3]
    assert 0 in merged.outputs_by_rank
    assert merged.outputs_by_rank[0].stderr_path.startswith("saferun-runs/7/node1/")
    assert merged.hang is not None
    assert merged.hang.ranks == (3,)


def test_without_peers_the_judging_host_is_believed_first() -> None:
    """Where nobody has said which ranks are whose, two hosts cannot both have rank 0."""
    parts = [
        HostPart(1, 0, "node2", 0.0, host_evidence(1, ends=[ended(0, 2, signum=9), ended(2, 2, code=1)])),
        HostPart(0, 0, "node1", 0.0, host_evidence(0)),
    ]
    merged = merge_parts(parts, world_size=4)
    assert [end.rank for end in merged.ends] == [2]


@pytest.mark.parametrize(
    ("offset_s", "after_s", "clock"), [(0.0, 31.4, "03:15:33"), (0.2, 31.2, "03:15:33"), (70.0, 31.4, "03:16:43")]
)
def test_times_are_the_leaders_own(offset_s: float, after_s: float, clock: str) -> None:
    """Hosts have been up for different times, and their clocks differ; less than a quarter of a second is noise."""
    evidence = host_evidence(1, ends=[ended(2, 2, code=1, offset_s=offset_s)])
    raised_at = START + 31.0 - offset_s
    output = evidence.outputs[0]._replace(error_time=raised_at, uncaught_time=raised_at)
    evidence = evidence._replace(outputs=(output,))
    parts = [HostPart(0, 0, "node1", 0.0, host_evidence(0)), HostPart(1, 0, "node2", offset_s, evidence)]
    merged = merge_parts(parts, world_size=4, peers=peers_of(2))
    (end,) = merged.ends
    assert end.at - merged.started_at == pytest.approx(after_s)
    assert end.at == pytest.approx(STARTED_AT + after_s)
    assert end.time - START == pytest.approx(after_s, abs=1e-5)
    assert end.clock == clock
    raised_s = merged.outputs_by_rank[2].error_time - START
    assert raised_s == pytest.approx(31.0 - (offset_s if offset_s < 0.25 else 0), abs=1e-5)
    assert merged.outputs_by_rank[2].uncaught_time == merged.outputs_by_rank[2].error_time


def test_a_measured_clock_decides_who_was_first() -> None:
    """By less than a network takes: rank 2 failed 10 ms before rank 0, and its host's clock is 30 ms ahead."""
    first, second = ended(2, 2, code=1, offset_s=-0.03), ended(0, 2, code=1)
    parts = [
        HostPart(0, 0, "node1", 0.0, host_evidence(0, ends=[second._replace(time=first.time - 0.03 + 0.01)])),
        HostPart(1, 0, "node2", -0.03, host_evidence(1, ends=[first]), measured=True),
    ]
    second, first = merge_parts(parts, world_size=4, peers=peers_of(2)).ends
    assert (first.rank, second.rank) == (2, 0)
    assert second.time - first.time == pytest.approx(0.01, abs=1e-5)
    assert second.at - first.at == pytest.approx(0.01, abs=1e-5)


def test_a_leader_without_a_start_time_learns_it_from_an_end() -> None:
    """Older evidence does not say when it began; when a rank ended, and how long after, does."""
    evidence = host_evidence(1, ends=[ended(2, 2, code=1)])._replace(started_time=0.0)
    parts = [
        HostPart(0, 0, "node1", 0.0, host_evidence(0)._replace(started_time=0.0)),
        HostPart(1, 0, "node2", 0.0, evidence),
    ]
    merged = merge_parts(parts, world_size=4, peers=peers_of(2))
    assert merged.ends[0].at - merged.started_at == pytest.approx(31.4)


def test_paths_of_other_hosts_name_them() -> None:
    """``stderr.log`` of another host is not here, and looks as if it were."""
    evidence = host_evidence(1, ends=[ended(3, 2, signum=11)], capture=captured(1), cores=(SEGFAULT,))
    merged = job({0: host_evidence(0, capture=captured(0)), 1: evidence}, hosts=2)
    outputs = merged.outputs_by_rank
    assert outputs[3].stderr_path == "node2:saferun-runs/7/node2/attempt_0/rank_3/stderr.log"
    assert outputs[0].stderr_path == "saferun-runs/7/node1/attempt_0/rank_0/stderr.log"
    assert merged.cores[0].path == "node2:/var/cores/core.4001"
    assert [(note.host, note.path) for note in merged.capture.notes] == [
        ("", "/tmp/x/stacks.json"),
        ("node2", "node2:/tmp/x/stacks.json"),
    ]


def test_what_is_one_hosts_stays_with_it() -> None:
    """Process numbers repeat across hosts, and an OOM killer kills on its own."""
    oom = OomKill("host", 0, 0, (4001,), 1, "kernel log")
    evidence = host_evidence(1, oom=oom, kernel_lines=("Out of memory: Killed process 4001",), abandoned=(1,))
    merged = job({0: host_evidence(0), 1: evidence}, lost=[LostHost(3, "node4", "gone", "its saferun is gone", (6, 7))])
    first, second, third, fourth = merged.hosts
    assert first.oom is None
    assert second.oom == oom._replace(host="node2")
    assert second.abandoned_ranks == (3,)
    assert second.addresses == ("10.0.0.2", "192.168.0.2")
    assert merged.kernel_lines == ("node2: Out of memory: Killed process 4001",)
    assert (third.has_evidence, third.lost_reason) == (False, "")
    assert (fourth.lost_reason, fourth.lost_message, fourth.ranks) == ("gone", "its saferun is gone", (6, 7))
    assert merged.ranks == tuple(range(8))


def test_tasks_of_one_host_are_one_host() -> None:
    """With one saferun per rank, a host's evidence comes in as many parts as it has ranks."""
    tasks = []
    for local_rank in range(4):
        evidence = host_evidence(1, 4, capture=captured(1, 4))
        rank = 4 + local_rank
        capture = evidence.capture._replace(
            processes=evidence.capture.processes[local_rank : local_rank + 1],
            stacks=evidence.capture.stacks[local_rank : local_rank + 1],
            collectives=(),
        )
        outputs = (evidence.outputs[local_rank]._replace(last_lines=(f"rank {rank}",)),)
        ends = (ended(rank, 4, code=1),) if local_rank == 2 else ()
        task = evidence._replace(
            ranks=(rank,), capture=capture, outputs=outputs, ends=ends, supervisor_pid=3000 + local_rank
        )
        tasks.append(HostPart(1, local_rank, "node2", 0.0, task))
    peers = [HostPeer(0, "node1", (0, 1, 2, 3)), *(HostPeer(1, "node2", (rank,)) for rank in range(4, 8))]
    merged = merge_parts(tasks, world_size=8, peers=peers)
    assert [host.label for host in merged.hosts] == ["node1", "node2"]
    assert merged.hosts[1].ranks == (4, 5, 6, 7)
    assert merged.hosts[1].supervisor_pids == (3000, 3001, 3002, 3003)
    assert {rank: output.last_lines for rank, output in merged.outputs_by_rank.items()} == {
        rank: (f"rank {rank}",) for rank in range(4, 8)
    }


def test_what_was_not_ready_names_its_hosts() -> None:
    """On many hosts the same thing was not ready: that is one line."""
    late = Capture(timed_out=("gpu_nvidia", "py_spy of rank 3"))
    merged = job({host: host_evidence(host, capture=late) for host in range(6)}, hosts=6)
    assert merged.capture.timed_out == ("gpu_nvidia on node1, node2, node3, node4 and 2 more", "py_spy of rank 3")


def test_the_later_part_of_a_process_counts() -> None:
    """At its end a process knows more than at the hang before."""
    parts = [
        HostPart(0, 0, "node1", 0.0, host_evidence(0)),
        HostPart(0, 0, "node1", 0.0, host_evidence(0, ends=[ended(0, 2, code=1)])),
    ]
    assert [end.rank for end in merge_parts(parts, world_size=2).ends] == [0]


def test_nothing_at_all_is_an_evidence_too() -> None:
    """A leader that hears nobody still has to say so."""
    merged = merge_parts([], [LostHost(1, "node2", "unreachable", "no address answers", (1,))], world_size=2)
    assert merged.hosts[0].label == "node2"
    assert merged.ends == ()


def test_many_hosts_are_laid_together_in_seconds() -> None:
    """The leader of many hosts does this once, while everybody waits for it."""
    text = encode_part(host_evidence(1, 8, capture=captured(1, 8)), 4096)
    sent = decode_part(text)
    assert sent is not None
    parts = []
    for host in range(300):
        shift = 8 * (host - 1)
        capture = sent.capture._replace(
            stacks=tuple(dump._replace(rank=dump.rank + shift) for dump in sent.capture.stacks),
            processes=tuple(look._replace(rank=look.rank + shift) for look in sent.capture.processes),
        )
        parts.append(HostPart(host, 0, f"node{host + 1}", 0.0, sent._replace(capture=capture)))
    merged = merge_parts(parts, world_size=2400, peers=peers_of(300, 8))
    assert len(merged.capture.stacks) == 2400


def test_stacks_keep_their_main_threads_number() -> None:
    """Tools that do not tell the main thread are known by its number, which packing takes away from the others."""
    threads = (
        ThreadStack("", 4100, False, False, False, IN_LOAD),
        ThreadStack("", 4000, False, False, False, IN_ALL_REDUCE),
    )
    dump = StackDump(2, 4000, True, "python", "gdb", threads)
    back = decode_part(encode_part(host_evidence(1, capture=Capture(stacks=(dump,))), 1 << 16))
    assert back is not None
    assert [thread.is_main for thread in back.capture.stacks[0].threads] == [False, True]
