"""Which evidence of a hang counts for more, and what is not known."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    ProcessSnapshot,
    RankCollectives,
    RankOutput,
    StackDump,
)
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.recorded_hangs import C10D, SITE, dump_of, evidence, look_of, native

STEP = Frame("step", "/job/train.py", 52)
LOAD = Frame("load_batch", "/job/data.py", 47)
ALL_REDUCE = Frame("all_reduce", C10D, 3252)
SLEEPS: dict[str, Any] = {"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}


def end_of(rank: int, code: int = 0, *, stopped_by_us: bool = False) -> RankEnd:
    return RankEnd(rank, rank, 100 + rank, ExitStatus(code, None), 9.0, 9.0, stopped_by_us=stopped_by_us)


def recorder(rank: int, *ops: str, completed: int, ranks: tuple[int, ...] = (0, 1, 2)) -> RankCollectives:
    """A Flight Recorder of one group: what the rank has called, and how many of those are over."""
    calls = tuple(
        CollectiveCall(seq, op, "[[4]]", seq <= completed, is_p2p=False, created_ns=seq)
        for seq, op in enumerate(ops, 1)
    )
    return RankCollectives(rank, (GroupProgress("gloo:0", "default_pg", ranks, len(ops), -1, completed, calls),))


def job(
    *stacks: tuple[Frame, ...],
    looks: dict[int, dict[str, Any]] | None = None,
    recorders: tuple[RankCollectives, ...] = (),
    ends: tuple[RankEnd, ...] = (),
    verdict: HangVerdict | None = None,
    **capture: Any,
) -> Evidence:
    """A hang of as many ranks as there are stacks; an empty stack is one that was not to be had."""
    ended = {end.rank for end in ends}
    living = [rank for rank in range(len(stacks)) if rank not in ended]
    dumps = tuple(dump_of(rank, *stacks[rank]) for rank in living if stacks[rank])
    seen: tuple[ProcessSnapshot, ...] = tuple(look_of(rank, **(looks or {}).get(rank, {})) for rank in living)
    whole = Capture(processes=seen, stacks=dumps, collectives=recorders)
    return evidence(whole._replace(**capture), verdict, ends=ends, ranks=tuple(range(len(stacks))))


IN_STEP = (ALL_REDUCE, STEP)


# ------------------------------------------------------------------------------------------------- what counts for more


def test_a_stopped_rank_comes_before_everything() -> None:
    """It cannot be blamed for what it would have called."""
    recorders = (recorder(0, "all_reduce", completed=0), recorder(2, "broadcast", completed=0))
    found = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, looks={1: {"state": "T"}}, recorders=recorders))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_stopped", (1,))
    assert any("broadcast" in line for line in found.findings)


def test_a_mismatch_comes_before_a_rank_that_does_something_else() -> None:
    """The other one may only be late; ranks that called different things never meet."""
    broadcast = (Frame("broadcast", C10D, 9), LOAD)
    recorders = (
        recorder(0, "all_reduce", completed=0),
        recorder(1, "broadcast", completed=0),
        recorder(2, "all_reduce", completed=0),
        recorder(3, completed=0),
    )
    found = diagnose_hang(job(IN_STEP, broadcast, IN_STEP, (LOAD,), looks={3: SLEEPS}, recorders=recorders))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_mismatched_collectives", (1,))
    assert found.cause.location == "data.py:47 in load_batch"


def test_who_has_not_called_comes_before_who_looks_odd() -> None:
    """A rank may stand in the user's code with its collective called: it waits for the result."""
    recorders = (
        recorder(0, "all_reduce", completed=0),
        recorder(1, "all_reduce", completed=0),
        recorder(2, completed=0),
    )
    looks = {1: {"syscall": "ioctl", "wchan": "nvidia_ioctl"}, 2: SLEEPS}
    found = diagnose_hang(job(IN_STEP, (STEP,), (LOAD,), looks=looks, recorders=recorders))
    assert found.cause is not None
    assert found.cause.ranks == (2,)


def test_a_rank_that_waits_for_another_itself_is_not_named_while_there_is_a_better_one() -> None:
    """Rank 1 is late because rank 2 keeps it in the store."""
    recorders = (
        recorder(0, "all_reduce", completed=0),
        recorder(1, completed=0),
        recorder(2, completed=0),
    )
    in_store = (native("c10d::TCPStore::wait"), LOAD)
    found = diagnose_hang(job(IN_STEP, in_store, (LOAD,), looks={2: SLEEPS}, recorders=recorders))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_sleep", (2,))


def test_a_rank_that_has_ended_is_named_before_one_that_waits_for_it() -> None:
    """Rank 1 waits for a message of rank 2, which has ended; rank 0 waits for rank 1."""
    recorders = (recorder(0, "all_reduce", completed=0), recorder(1, completed=0))
    receiving = (Frame("recv", C10D, 9), LOAD)
    found = diagnose_hang(job(IN_STEP, receiving, (), recorders=recorders, ends=(end_of(2),)))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_early_exit", (2,))


def test_a_deadlock_within_a_rank_comes_before_one_that_has_ended_well() -> None:
    """As seen with torch 2.4: the destructor of a process group waits for gloo's thread, which waits for the GIL."""
    destroys = (native("c10d::ProcessGroupGloo::~ProcessGroupGloo"), native("c10d::ProcessGroup::~ProcessGroup"), STEP)
    frees = (
        native("pybind11::gil_scoped_acquire::gil_scoped_acquire"),
        native("c10d::ProcessGroupGloo::AsyncWork::~AsyncWork"),
        native("c10d::ProcessGroupGloo::runLoop"),
    )

    def found_with(other: tuple[Frame, ...]) -> Diagnosis:
        seen = job(destroys, (), ends=(end_of(1),))
        (dump,) = seen.capture.stacks
        thread = dump.threads[0]._replace(tid=7, name="", frames=other)
        dump = dump._replace(threads=(*dump.threads, thread))
        return diagnose_hang(seen._replace(capture=seen.capture._replace(stacks=(dump,))))

    found = found_with(frees)
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_lock", (0,))
    assert "waits for a thread of its process group that needs the GIL, which it holds" in found.headline
    assert "deadlock within torch" in found.cause.advice
    found = found_with((native("gloo::transport::tcp::UnboundBuffer::waitRecv"), *frees[2:]))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_early_exit", (1,))


def test_ranks_that_saferun_ended_are_not_to_blame() -> None:
    found = diagnose_hang(job(IN_STEP, IN_STEP, ends=(end_of(1, stopped_by_us=True),)))
    assert found.cause is not None
    assert found.cause.class_name != "hang_early_exit"


@pytest.mark.parametrize(
    "mostly", [IN_STEP, (Frame("_create_c10d_store", f"{SITE}/torch/distributed/rendezvous.py", 9), STEP)]
)
def test_who_does_not_wait_for_others_holds_them_up(mostly: tuple[Frame, ...]) -> None:
    """Without a Flight Recorder it is the odd one out, be it one or many."""
    one = diagnose_hang(job(*[mostly] * 7, (LOAD,), looks={7: SLEEPS}))
    assert one.cause is not None
    assert one.cause.ranks == (7,)
    many = diagnose_hang(job(mostly, *[(LOAD,)] * 7, looks=dict.fromkeys(range(1, 8), SLEEPS)))
    assert many.cause is not None
    assert many.cause.ranks == tuple(range(1, 8))
    assert "ranks 1-7 (node1) have not" in many.headline
    assert "rank 0 waits" in many.headline


def test_of_several_odd_ones_the_surest_is_named_and_the_others_told() -> None:
    """A rank that computes may be on its way; one in a lock is not."""
    computes = {"state": "R", "syscall": "", "wchan": ""}
    found = diagnose_hang(job(IN_STEP, (STEP,), (LOAD,), looks={1: computes, 2: {}}))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_lock", (2,))
    assert "rank 1 (node1) computes at train.py:52 in step" in found.findings


def test_most_ranks_in_one_line_of_the_user_s_probably_wait_for_the_one_that_is_elsewhere() -> None:
    """Nothing tells a bare futex from ``work.wait()`` where native calls and the recorder are missing."""
    found = diagnose_hang(job((STEP,), (STEP,), (STEP,), (LOAD,), looks={3: SLEEPS}))
    assert found.cause is not None
    assert found.cause.ranks == (3,)
    gpu = (native("cudaStreamSynchronize"), STEP)
    found = diagnose_hang(job(gpu, gpu, gpu, (LOAD,), looks={3: SLEEPS}))
    assert found.cause is not None
    assert found.cause.ranks == (3,)


def test_a_rank_of_which_only_the_line_is_known_is_at_that_line() -> None:
    unseen = {"syscall": "", "wchan": ""}
    found = diagnose_hang(job(IN_STEP, (LOAD,), looks={1: unseen}))
    assert found.headline.endswith(" that rank 0 waits in: it is at data.py:47 in load_batch")
    outside = (Frame("run", f"{SITE}/library/worker.py", 9),)
    assert diagnose_hang(job(IN_STEP, outside, looks={1: unseen})).headline.endswith(": it is in no line of the script")
    apart = diagnose_hang(job((STEP,), (LOAD,), looks={0: unseen, 1: unseen}))
    assert apart.headline == "the job hangs: all ranks of node1: each is in a different place"


def test_the_verdict_names_ranks_where_the_stacks_do_not() -> None:
    """All compute; one has stopped to beat."""
    computes = {"state": "R", "syscall": "", "wchan": ""}
    verdict = HangVerdict("heartbeat", (2,), 300.0, certain=True)
    looks = dict.fromkeys(range(4), computes)
    found = diagnose_hang(job((STEP,), (STEP,), (LOAD,), (STEP,), looks=looks, verdict=verdict))
    assert found.cause is not None
    assert found.cause.ranks == (2,)


def test_different_collectives_in_the_stacks_are_a_mismatch_where_there_is_no_recorder() -> None:
    """The minority is named; of two halves, both."""
    broadcast = (Frame("broadcast", C10D, 9), LOAD)
    found = diagnose_hang(job(IN_STEP, broadcast, IN_STEP))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_mismatched_collectives", (1,))
    assert found.headline.endswith("ranks 0, 2 in all_reduce, rank 1 in broadcast")
    found = diagnose_hang(job(IN_STEP, broadcast))
    assert found.cause is not None
    assert found.cause.ranks == (0, 1)


def test_a_send_and_a_collective_of_another_group_are_no_mismatch() -> None:
    """Pipelines wait in receives while others reduce."""
    receiving = (Frame("recv", C10D, 9), LOAD)
    found = diagnose_hang(job(IN_STEP, receiving, IN_STEP))
    assert found.cause is not None
    assert found.cause.class_name == "hang_all_in_collective"


@pytest.mark.parametrize("ranks", [1, 4])
def test_where_all_wait_in_the_same_collective_none_of_them_is_blamed(ranks: int) -> None:
    """It is the network, a GPU, or a rank on another host."""
    recorders = tuple(recorder(rank, "all_reduce", completed=0, ranks=tuple(range(ranks))) for rank in range(ranks))
    for known in ((), recorders):
        found = diagnose_hang(job(*[IN_STEP] * ranks, recorders=known))
        assert found.cause is not None
        assert (found.cause.class_name, found.cause.ranks) == ("hang_all_in_collective", ())
        assert "all ranks of node1 wait in all_reduce at train.py:52 in step" in found.headline


def in_group(rank: int, group: str) -> RankCollectives:
    """A rank that has called an all_reduce in a group of gloo's, whose members are not recorded."""
    call = CollectiveCall(1, "all_reduce", "[[2]]", False, is_p2p=False, created_ns=0)
    return RankCollectives(rank, (GroupProgress(f"gloo:{group}", "undefined", (), 1, -1, 0, (call,)),))


def test_ranks_that_wait_in_different_groups_are_shown_with_the_lines_to_compare() -> None:
    """The order in which a rank enters its groups is all that is wrong, and nobody is missing in one call."""
    recorders = tuple(in_group(rank, "2" if rank == 2 else "1") for rank in range(4))
    stacks = [(ALL_REDUCE, Frame("step", "/job/train.py", 9 if rank == 2 else 11)) for rank in range(4)]
    found = diagnose_hang(job(*stacks, recorders=recorders))
    assert (
        "all ranks of node1 wait in different groups: ranks 0-1, 3 in all_reduce of group 1 at train.py:11 in step, "
        "rank 2 in all_reduce of group 2 at train.py:9 in step"
    ) in found.headline
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_all_in_collective", ())
    assert "enter its groups in the same order" in found.cause.advice


def test_where_all_ranks_are_in_one_call_nobody_is_missing_though_its_members_are_not_recorded() -> None:
    """Whoever else belongs to the group, there is nobody else."""
    found = diagnose_hang(job(*[IN_STEP] * 4, recorders=tuple(in_group(rank, "1") for rank in range(4))))
    assert "none of them is missing there" in found.headline


def test_a_pair_that_does_not_get_through_its_call_is_named_though_its_cpus_are_ahead() -> None:
    """All ranks wait in calls of their GPUs, and those of ranks 2 and 3 are the first that do not end."""

    def stand(rank: int) -> RankCollectives:
        pair = (0, 1) if rank < 2 else (2, 3)
        own = CollectiveCall(5, "all_reduce", "[[4]]", rank < 2, is_p2p=False, created_ns=0, order=8)
        common = CollectiveCall(3, "all_reduce", "[[1]]", False, is_p2p=False, created_ns=0, order=9)
        return RankCollectives(
            rank,
            (
                GroupProgress("nccl:4", "TENSOR", pair, 5, -1, 5 if rank < 2 else 4, (own,)),
                GroupProgress("nccl:0", "default_pg", (0, 1, 2, 3), 3, -1, 2, (common,)),
            ),
        )

    found = diagnose_hang(job(*[IN_STEP] * 4, recorders=tuple(map(stand, range(4)))))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_stuck_collective", (2, 3))
    assert "ranks 2-3 (node1) are stuck in a call that all have made (collective 5 (all_reduce)" in found.headline
    assert found.cause.proof.endswith("which all members have called and none has completed")
    assert "GPUs of ranks 2-3" in found.cause.advice


def test_where_all_wait_in_the_store_somebody_has_not_been_started() -> None:
    in_store = (
        Frame("_create_c10d_store", f"{SITE}/torch/distributed/rendezvous.py", 9),
        Frame("init_process_group", C10D, 8),
        STEP,
    )
    found = diagnose_hang(job(in_store, in_store))
    assert found.cause is not None
    assert found.cause.class_name == "hang_all_in_collective"
    assert "WORLD_SIZE" in found.cause.advice


def test_a_lock_file_of_a_killed_build_is_told_as_such() -> None:
    """All ranks wait for a file that nobody will remove."""
    baton = (Frame("wait", f"{SITE}/torch/utils/file_baton.py", 49), STEP)
    found = diagnose_hang(job(baton, baton, looks=dict.fromkeys(range(2), SLEEPS)))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_lock", (0, 1))
    assert "lock file" in found.cause.advice


# ---------------------------------------------------------------------------------------------------- what is not known


def test_ranks_without_stacks_are_told_with_the_reason() -> None:
    """The user can do something about most of them."""
    denied = tuple(StackDump(rank, 100 + rank, True, "python", "", (), "ptrace is denied (Yama)") for rank in (0, 1))
    looks: dict[int, dict[str, Any]] = {rank: {"syscall": "", "wchan": ""} for rank in range(2)}
    found = diagnose_hang(job((), (), stacks=denied, looks=looks, timed_out=("gpu_nvidia",)))
    assert "no stacks of ranks 0-1: ptrace is denied (Yama)" in found.findings
    assert "captures timed out: gpu_nvidia" in found.findings
    assert found.cause is not None
    assert found.cause.class_name == "hang_unknown"


def test_a_rank_that_cannot_be_looked_into_is_named_only_if_nobody_else_can_be() -> None:
    """Not to be seen is not to be guilty; but a rank that has not called is."""
    looks: dict[int, dict[str, Any]] = {1: {"syscall": "", "wchan": ""}, 2: SLEEPS}
    found = diagnose_hang(job(IN_STEP, (), (LOAD,), looks=looks))
    assert found.cause is not None
    assert found.cause.ranks == (2,)
    recorders = (
        recorder(0, "all_reduce", completed=0),
        recorder(1, completed=0),
        recorder(2, "all_reduce", completed=0),
    )
    found = diagnose_hang(job(IN_STEP, (), IN_STEP, looks={1: looks[1]}, recorders=recorders))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_missing_collective", (1,))


def test_a_silent_flight_recorder_is_told_where_it_would_have_helped() -> None:
    """And only there."""
    silent = tuple(RankCollectives(rank, (), "torch has no worker server") for rank in (0, 1))
    line = "no Flight Recorder of ranks 0-1: torch has no worker server"
    assert line in diagnose_hang(job(IN_STEP, (LOAD,), looks={1: SLEEPS}, recorders=silent)).findings
    assert line not in diagnose_hang(job((LOAD,), (LOAD,), looks={0: SLEEPS, 1: SLEEPS}, recorders=silent)).findings


def test_a_hang_of_which_nothing_is_known_is_still_told() -> None:
    """An honest answer is better than none."""
    found = diagnose_hang(evidence(Capture(), ranks=()))
    assert found.headline == "the job hangs: the state of the ranks is unknown"
    assert found.cause is not None
    assert found.cause.class_name == "hang_unknown"


# ----------------------------------------------------------------------------------------------------------- in general

STACKS = st.sampled_from(
    [
        IN_STEP,
        (Frame("broadcast", C10D, 9), STEP),
        (native("c10d::TCPStore::wait"), STEP),
        (native("cudaStreamSynchronize"), STEP),
        (STEP,),
        (LOAD,),
        (),
    ]
)

LOOKS = st.fixed_dictionaries(
    {
        "state": st.sampled_from("RSDTtZ?"),
        "syscall": st.sampled_from(["", "futex", "read", "wait4", "clock_nanosleep", "poll"]),
        "waits_on": st.sampled_from(["", "the FIFO /x", "a connection to 10.0.0.2:80 (ESTABLISHED)"]),
        "tracer_pid": st.sampled_from([0, 0, 0, 9]),
    }
)

VERDICTS = st.sampled_from(["quiescent", "stuck_collective", "spinning", "stopped", "uninterruptible", "heartbeat"])


@given(
    st.lists(st.tuples(STACKS, LOOKS, st.integers(0, 2)), min_size=1, max_size=5),
    st.sets(st.integers(0, 4)),
    VERDICTS,
    st.sets(st.integers(0, 4)),
)
def test_whatever_is_seen_there_is_an_answer(
    ranks: list[tuple[tuple[Frame, ...], dict[str, Any], int]], ended: set[int], kind: str, about: set[int]
) -> None:
    """Every rank is in one group, causes name ranks that exist, and no text has holes in it."""
    stacks = [row[0] for row in ranks]
    looks = {rank: row[1] for rank, row in enumerate(ranks)}
    ends = tuple(end_of(rank, code=rank) for rank in sorted(ended) if rank < len(ranks))
    everybody = tuple(range(len(ranks)))
    recorders = tuple(
        recorder(rank, *["all_reduce"] * row[2], completed=0, ranks=everybody) for rank, row in enumerate(ranks)
    )
    verdict = HangVerdict(kind, tuple(sorted(about)), 300.0, certain=True)
    found = diagnose_hang(job(*stacks, looks=looks, recorders=recorders, ends=ends, verdict=verdict))
    assert sorted(rank for group in found.groups for rank in group.ranks) == list(everybody)
    assert found.cause is not None
    assert set(found.cause.ranks) <= set(everybody)
    assert found.cause.class_name.startswith("hang_")
    for text in (found.headline, found.cause.message, found.cause.advice, *found.findings):
        assert text
        assert "  " not in text
        assert "{" not in text
        assert not text.endswith((" ", ":", ";"))


@pytest.mark.parametrize(
    ("stderr", "raises"),
    [
        (("Traceback (most recent call last):", '  File "train.py", line 5, in <module>'), True),
        (("Traceback (most recent call last):", '  File "train.py", line 5, in <module>', "ValueError: 5"), False),
        (("step 5",), False),
    ],
)
def test_a_rank_that_cannot_complete_its_traceback_is_named(stderr: tuple[str, ...], *, raises: bool) -> None:
    """Python reads the source for it; where its file system does not answer, the rank hangs with its failure."""
    seen = job((STEP,), (STEP,))._replace(
        outputs=(RankOutput(0, (), "", "", 0.0), RankOutput(1, stderr, "", "", 0.0)),
    )
    told = "rank 1 has raised an exception, and its traceback is not complete: Python reads the source"
    assert (told in diagnose_hang(seen).findings) is raises


THREAD = (
    "Exception in thread Thread-1 (feed):",
    "Traceback (most recent call last):",
    '  File "/usr/lib/python3.11/threading.py", line 1045, in _bootstrap_inner',
    "    self.run()",
    '  File "/job/train.py", line 7, in feed',
    "    queue.put(batch['labels'])",
    "KeyError: 'labels'",
)
ENDED = "an exception ended thread Thread-1 (feed): KeyError: 'labels', at train.py:7 in feed"


@pytest.mark.parametrize(
    ("of_rank", "stderr", "is_shown"),
    [
        (1, ("step 1", *THREAD), True),
        (1, (*THREAD, "step 2"), True),
        # a rank that nobody waits for, an error that came later, no traceback
        (0, THREAD, False),
        (1, (*THREAD, "Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: no"), False),
        (1, (THREAD[0], "step 2"), False),
    ],
)
def test_a_thread_that_an_exception_has_ended_explains_why_nothing_comes(
    of_rank: int,
    stderr: tuple[str, ...],
    is_shown: bool,
) -> None:
    """The main thread waits for its queue forever, and the reason is far up on the screen."""
    found = diagnose_hang(
        job(
            IN_STEP,
            (
                Frame("wait", "/usr/lib/python3.11/threading.py", 327),
                Frame("get", "/usr/lib/python3.11/queue.py", 171),
                STEP,
            ),
        )._replace(outputs=(RankOutput(of_rank, stderr, "", "", 0.0, (), of_rank),))
    )
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert (f"rank {of_rank}: {ENDED}" in found.findings) is is_shown


@pytest.mark.parametrize(("failure", "word"), [("trainer is not a Python process", "gdb"), ("denied", "ptrace")])
def test_of_ranks_without_stacks_it_is_said_what_shows_them(failure: str, word: str) -> None:
    """Permission to look into a program that is not Python would show nothing more of it."""
    dumps = tuple(
        StackDump(rank, 100 + rank, is_rank=True, name="trainer", tool="py-spy", threads=(), failure=failure)
        for rank in range(2)
    )
    found = diagnose_hang(
        job((), (), looks={0: {"syscall": "", "wchan": ""}, 1: {"syscall": "", "wchan": ""}}, stacks=dumps)
    )
    assert found.cause is not None
    assert word in found.cause.advice


@pytest.mark.parametrize(("calls", "advised"), [(("recv", "recv"), True), (("recv", "all_reduce"), False)])
def test_ranks_that_all_receive_wait_for_messages_that_no_rank_sends(calls: tuple[str, str], *, advised: bool) -> None:
    stacks = [(Frame(call, C10D, 2400), STEP) for call in calls]
    found = diagnose_hang(job(*stacks))
    assert found.cause is not None
    assert ("compare the order of their sends and receives" in found.cause.advice) == advised
