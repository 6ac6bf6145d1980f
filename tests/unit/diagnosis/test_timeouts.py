"""A timeout is told of the rank that did not come, then of those that waited for it."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Frame,
    GroupProgress,
    RankCollectives,
    RankOutput,
    StackDump,
)
from tests.unit.diagnosis.failed_jobs import dump_of, evidence, said
from tests.unit.samples import end_of

SLEEPS = (
    Frame("clock_nanosleep", "/lib/x86_64-linux-gnu/libc.so.6", 0, native=True),
    Frame("pause", "/home/user/job/train.py", 61),
    Frame("main", "/home/user/job/train.py", 80),
)
FIRST = "rank 0 (node3, local rank 0, pid 4000)"
LATE = "rank 1 (node3, local rank 1, pid 4001)"


def judged(
    name: str, *stacks: StackDump, also: tuple[int, ...] = (), recorders: tuple[RankCollectives, ...] = ()
) -> Diagnosis:
    """Rank 0 timed out first, the ranks of ``also`` after it; saferun stopped the others."""
    ends = [end_of(0, code=1, at=100.0), *(end_of(rank, code=1, at=100.2) for rank in also)]
    ends += [end_of(rank, signum=15, at=102.0, stopped=True) for rank in range(1, 4) if rank not in also]
    outputs = tuple(said(rank, name) for rank in (0, *also))
    capture = Capture(stacks=stacks, collectives=recorders)
    return diagnose(evidence(*ends, outputs=outputs)._replace(capture=capture))


def recorder(rank: int, seq: int) -> RankCollectives:
    """A rank that has called up to a number, and waits in that call unless it is number 4."""
    calls = tuple(
        CollectiveCall(number, "all_reduce", "[[8]]", number < 5, is_p2p=False, created_ns=0)
        for number in range(1, seq + 1)
    )
    return RankCollectives(rank, (GroupProgress("0", "default_pg", (0, 1, 2, 3), seq, -1, 4, calls),))


def test_the_rank_that_did_not_come_is_named_before_those_that_waited() -> None:
    found = judged("gloo_timeout", dump_of(1, SLEEPS), also=(2, 3))
    assert found.headline == (
        f"{LATE} did not come to all_reduce: it sleeps at train.py:61 in pause; {FIRST} timed out, 10.0 s after the "
        "start: gloo timeout after 8 s, at train.py:129 in main; exit code 1; ranks 2-3 timed out as well"
    )
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.cause.advice.startswith("look at what keeps rank 1 from it")
    assert found.victims == (0, 2, 3)
    assert [peers.message for peers in found.lost_peers] == ["gloo timeout after 8 s"]


def test_a_rank_that_did_not_come_is_not_its_own_victim() -> None:
    """It came after all, lost the ranks that had timed out, and was stopped when it had printed that."""
    ends = (end_of(0, code=1, at=100.0), *(end_of(rank, signum=15, at=111.0, stopped=True) for rank in (1, 2)))
    outputs = (said(0, "gloo_timeout"), *(said(rank, "gloo_peer_closed")._replace(raised=True) for rank in (1, 2)))
    waits = dump_of(2, (Frame("all_reduce", "/x/torch/distributed/distributed_c10d.py", 9), *SLEEPS[1:]))
    found = diagnose(evidence(*ends, outputs=outputs)._replace(capture=Capture(stacks=(dump_of(1, SLEEPS), waits))))
    assert found.headline.startswith(f"{LATE} did not come to all_reduce: it sleeps at train.py:61 in pause")
    assert found.cause is not None
    assert (found.cause.ranks, found.victims, found.stopped) == ((1,), (0, 2), ())


def test_several_ranks_that_did_not_come_are_named_with_what_the_first_did() -> None:
    found = judged("gloo_timeout", dump_of(1, SLEEPS), dump_of(2, SLEEPS))
    assert found.headline.startswith(
        f"ranks 1-2 (node3) did not come to all_reduce: {LATE} sleeps at train.py:61 in pause; {FIRST} timed out"
    ), found.headline


def test_the_ranks_that_a_monitored_barrier_names_come_with_their_place() -> None:
    found = judged("monitored_barrier", dump_of(1, SLEEPS))
    assert found.headline.startswith(
        "rank 1 did not come to monitored_barrier within 3 s: it sleeps at train.py:61 in pause; "
        f"{FIRST} timed out, 10.0 s after the start, at train.py:115 in main; exit code 1"
    )
    assert [peers.message for peers in found.lost_peers] == ["timed out"]


def test_the_flight_recorders_know_best_who_did_not_come() -> None:
    """And the stacks where it is."""
    recorders = (recorder(0, 5), recorder(1, 4), recorder(2, 5), recorder(3, 5))
    found = judged("nccl_timeout", dump_of(1, SLEEPS), recorders=recorders)
    late, _, waited = found.headline.partition(": ")
    assert late == (
        "rank 1 has not called collective 5 (all_reduce) of group default_pg that ranks 0, 2-3 wait in; it is 1 behind"
    )
    assert waited.startswith(
        f"it sleeps at train.py:61 in pause; {FIRST} timed out, 10.0 s after the start: NCCL timeout: ALLREDUCE"
    )


def logged(rank: int, number: int, group: str = "PG ID 0 PG GUID 0(default_pg)") -> RankOutput:
    line = f"[rank{rank}]:[E1122 ProcessGroupNCCL.cpp:1] [{group} Rank {rank}] Received a dump signal. "
    line += f"Last enqueued NCCL work: {number}, last completed NCCL work: {number}. "
    return RankOutput(rank, (line,), "", "", 0.0)


def test_without_flight_recorders_the_watchdogs_logs_show_who_did_not_come() -> None:
    ends = (end_of(0, signum=6, at=100.0), *(end_of(rank, signum=15, at=102.0, stopped=True) for rank in (1, 2)))
    waited = said(0, "nccl_timeout")
    first = waited._replace(last_lines=(*logged(0, 5).last_lines, *waited.last_lines))
    found = diagnose(evidence(*ends, outputs=(first, logged(1, 4), logged(2, 5))))
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.headline.startswith(f"rank 1 has not called collective 5 that ranks 0, 2 waited in; {FIRST} timed out")
    # Numbers of different groups are not compared.
    found = diagnose(evidence(*ends, outputs=(first, logged(1, 4, "PG ID 3 PG GUID 7(tp)"), logged(2, 5))))
    assert found.cause is not None
    assert found.cause.ranks == ()


@pytest.mark.parametrize("name", ["gloo_timeout", "nccl_timeout"])
def test_where_nobody_is_seen_to_be_late_the_one_that_timed_out_is_told_alone(name: str) -> None:
    found = judged(name)
    assert found.headline.startswith(f"{FIRST} failed first, 10.0 s after the start: ")
    assert found.cause is not None
    assert found.cause.ranks == ()


def timed_out_in(rank: int, number: int, last: int) -> RankOutput:
    """What the watchdog of a rank logs whose CPU had gone on after the collective that did not end."""
    head = f"[rank{rank}]:[E1122 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    caught = f"{head}Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, "
    caught += "Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    ended = f"{head}Exception (either an error or timeout) detected by watchdog at work: {number}, last enqueued NCCL "
    ended += f"work: {last}, last completed NCCL work: {number - 1}."
    return RankOutput(rank, (caught, ended), "", "", 0.0)


def all_timed_out(*outputs: RankOutput, stopped: tuple[int, ...] = (), capture: Capture | None = None) -> Diagnosis:
    """These ranks timed out, but for those that saferun stopped."""
    ranks = [output.local_rank for output in outputs]
    ends = [end_of(rank, signum=6, at=100.0 + rank / 10) for rank in ranks if rank not in stopped]
    ends += [end_of(rank, signum=15, at=102.0, stopped=True) for rank in stopped]
    return diagnose(evidence(*ends, outputs=outputs)._replace(capture=capture or Capture()))


def test_a_cpu_that_is_less_far_ahead_is_not_late() -> None:
    """All have called collective 5, which did not end; what they had called after that does not matter."""
    found = all_timed_out(timed_out_in(0, 5, 9), timed_out_in(1, 5, 7), timed_out_in(2, 5, 9))
    assert found.cause is not None
    assert found.cause.ranks == ()
    assert "has not called" not in found.headline


def test_the_first_collective_that_timed_out_is_the_one_that_a_rank_has_not_called() -> None:
    found = all_timed_out(timed_out_in(0, 6, 9), logged(1, 3), timed_out_in(2, 5, 8), stopped=(1,))
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.headline.startswith("rank 1 has not called collective 5 that ranks 0, 2 waited in")


def test_by_the_logs_alone_no_rank_is_late_where_no_number_timed_out() -> None:
    waited = RankOutput(0, ("[rank0]: NCCL operation timed out", *logged(0, 5).last_lines), "", "", 0.0)
    found = all_timed_out(waited, logged(1, 4), stopped=(1,))
    assert found.cause is not None
    assert found.cause.ranks == ()


def test_a_call_that_all_have_made_by_their_flight_recorders_is_not_missed_by_their_logs() -> None:
    recorders = tuple(recorder(rank, 5) for rank in range(4))
    outputs = (timed_out_in(0, 6, 9), logged(1, 4), logged(2, 9), logged(3, 9))
    found = all_timed_out(*outputs, stopped=(1, 2, 3), capture=Capture(collectives=recorders))
    assert "has not called" not in found.headline
    assert found.headline.startswith(f"{FIRST} failed first")


IN_GPU = (
    Frame("cudaStreamSynchronize", "/usr/lib/libcudart.so", 0, native=True),
    Frame("step", "/home/user/job/train.py", 52),
)


def test_ranks_that_may_wait_in_nccl_as_well_are_not_late() -> None:
    """Its calls keep the CPU busy until the GPU is done."""
    found = judged("nccl_timeout", dump_of(1, IN_GPU), dump_of(2, IN_GPU), dump_of(3, IN_GPU))
    assert found.cause is not None
    assert found.cause.ranks == ()
    assert found.headline.startswith(f"{FIRST} failed first")
    assert found.headline.endswith("; the awaited rank is unknown: ranks 1-3 compute or wait in NCCL as well")
    computes = dump_of(2, IN_GPU[1:])
    computes = computes._replace(threads=(computes.threads[0]._replace(active=True),))
    found = judged("nccl_timeout", dump_of(1, SLEEPS), computes, dump_of(3, IN_GPU))
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.headline.startswith(f"{LATE} did not come")


def test_a_rank_that_computes_is_late_for_gloo() -> None:
    """There it is no call of another collective."""
    computes = dump_of(1, IN_GPU[1:])
    computes = computes._replace(threads=(computes.threads[0]._replace(active=True),))
    assert judged("gloo_timeout", computes).headline.startswith(f"{LATE} did not come to all_reduce: it computes")


def test_a_timeout_of_this_rank_is_not_another_ranks_fault() -> None:
    """The line is the heartbeat monitor's, where no other is left."""
    head = "[rank0]:[E1122 ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 0] Received a dump signal "
    head += "due to a collective timeout from "
    own = RankOutput(0, (f"{head}this local rank and we will try our best to dump the debug info.",), "", "", 0.0)
    found = all_timed_out(own)
    assert found.cause is not None
    assert (found.cause.class_name, found.victims) == ("nccl_timeout", ())
    ended = "[rank0]: Exception (either an error or timeout) detected by watchdog at work: 808, last enqueued NCCL work"
    found = all_timed_out(own._replace(last_lines=(*own.last_lines, ended)))
    assert "NCCL timeout: collective number 808" in found.headline
    other = RankOutput(0, (f"{head} rank 3 and we will try our best to dump the debug info.",), "", "", 0.0)
    found = all_timed_out(other)
    assert found.cause is not None
    assert found.cause.class_name == "communicator_aborted"
