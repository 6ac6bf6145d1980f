"""Who holds up the others, and what that rank does: recorded hangs, and the order in which evidence counts."""

from __future__ import annotations

import pytest

from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, CollectiveCall, Frame, GroupProgress, HangVerdict, RankCollectives
from tests.unit.diagnosis.recorded_hangs import NAMES, dump_of, evidence, evidence_of

LIB = "/usr/local/lib/python3.11"
NOT_CALLED = "rank 1 (node1) has not called the all_reduce that ranks 0, 2 wait in"


# ----------------------------------------------------------------------------------------------------------- recordings


@pytest.mark.parametrize("recorded_collectives", [True, False])
@pytest.mark.parametrize("native_calls", [True, False])
@pytest.mark.parametrize(
    ("name", "class_name", "ranks", "location"),
    [
        ("sleep", "hang_sleep", (1,), "train.py:41 in bad_sleep"),
        ("poll", "hang_sleep", (1,), "train.py:45 in bad_poll"),
        ("lock", "hang_lock", (1,), "train.py:49 in bad_lock"),
        ("event", "hang_lock", (1,), "train.py:141 in bad_event"),
        ("queue", "hang_lock", (1,), "train.py:53 in bad_queue"),
        ("process_queue", "hang_lock", (1,), "train.py:56 in bad_mpqueue"),
        ("c_holding_the_gil", "hang_sleep", (1,), "train.py:64 in bad_cgil"),
        ("fifo", "hang_fifo", (1,), "train.py:68 in bad_fifo"),
        ("fifo_save", "hang_fifo", (1,), "train.py:73 in bad_fifosave"),
        ("stopped", "hang_stopped", (1,), "train.py:76 in bad_stop"),
        ("uninterruptible", "hang_uninterruptible", (1,), "train.py:81 in bad_dstate"),
        ("subprocess", "hang_subprocess", (1,), "train.py:84 in bad_subprocess"),
        ("system", "hang_subprocess", (1,), "train.py:87 in bad_system"),
        ("forked_child", "hang_subprocess", (1,), "train.py:138 in bad_fork"),
        ("process_pool", "hang_subprocess", (1,), "train.py:130 in bad_mppool"),
        ("network", "hang_network", (1,), "train.py:93 in bad_network"),
        ("connect", "hang_network", (1,), "train.py:98 in bad_connect"),
        ("debugger", "hang_debugger", (1,), "train.py:144 in bad_pdb"),
        ("mismatched", "hang_mismatched_collectives", (1,), "train.py:101 in bad_broadcast"),
        ("loader_deadlocked", "hang_data_loading", (1,), "train.py:111 in bad_loader"),
        ("init_missing_rank", "hang_sleep", (1,), "train.py:214 in main"),
        ("early_exit", "hang_early_exit", (1,), ""),
        ("evaluating", "hang_missing_collective", (0,), "train.py:24 in forward"),
        ("ddp_backward", "hang_sleep", (1,), "train.py:169 in ddp"),
        ("ddp_forward", "hang_sleep", (1,), "train.py:31 in forward"),
        ("async_wait", "hang_sleep", (1,), "train.py:187 in many"),
        ("all_gather", "hang_sleep", (1,), "train.py:187 in many"),
        ("all_gather_object", "hang_sleep", (1,), "train.py:187 in many"),
        ("monitored_barrier", "hang_sleep", (1,), "train.py:187 in many"),
        ("recv", "hang_sleep", (1,), "train.py:187 in many"),
        ("all_asleep", "hang_sleep", (0, 1, 2), "train.py:41 in bad_sleep"),
        ("all_in_lock", "hang_lock", (0, 1, 2), "train.py:49 in bad_lock"),
    ],
)
def test_the_right_rank_and_the_right_class(
    name: str, class_name: str, ranks: tuple[int, ...], location: str, *, native_calls: bool, recorded_collectives: bool
) -> None:
    """Whatever of the evidence is missing."""
    diagnosis = diagnose_hang(evidence_of(name, native=native_calls, recorder=recorded_collectives))
    assert diagnosis.cause is not None
    assert (diagnosis.cause.class_name, diagnosis.cause.ranks, diagnosis.cause.location) == (
        class_name,
        ranks,
        location,
    )
    assert diagnosis.headline.startswith("the job hangs: ")
    assert len(diagnosis.headline) < 250
    assert diagnosis.cause.message
    assert diagnosis.cause.advice


def test_the_recorded_hangs_are_all_diagnosed() -> None:
    """Those that are not above have tests of their own below."""
    marks = test_the_right_rank_and_the_right_class.pytestmark  # type: ignore[attr-defined]
    (rows,) = [mark.args[1] for mark in marks if "class_name" in mark.args[0]]
    assert {*NAMES} - {row[0] for row in rows} == {"spin", "store_wait", "thread", "thread_pool"}


def test_a_rank_that_spins() -> None:
    verdict = HangVerdict("spinning", (1,), 300.0, certain=False)
    diagnosis = diagnose_hang(evidence_of("spin", verdict))
    cause = diagnosis.cause
    assert cause is not None
    assert (cause.class_name, cause.ranks, cause.location) == ("hang_spinning", (1,), "train.py:60 in bad_spin")
    # Nobody is told that it hangs: it may as well be a long step.
    assert diagnosis.headline == (
        "rank 1 (node1) has been computing at train.py:60 in bad_spin for 300 s; ranks 0, 2 wait for it in all_reduce "
        "(it may be a long step; no action is taken)"
    )


@pytest.mark.parametrize("kind", ["quiescent", "stopped", "heartbeat"])
def test_what_is_suspected_is_worded_so(kind: str) -> None:
    """Whoever reads "hangs" goes and kills the job."""
    verdict = HangVerdict(kind, (1,), 300.0, certain=False)
    certain = diagnose_hang(evidence_of("sleep", verdict._replace(certain=True))).headline
    suspected = diagnose_hang(evidence_of("sleep", verdict)).headline
    assert certain.startswith("the job hangs: rank 1 ")
    assert suspected == certain.replace("the job hangs", "the job may hang")


def test_a_rank_that_waits_in_the_store_has_not_come_to_the_collective() -> None:
    """It waits for a message that would be sent after the collective."""
    for recorded in (True, False):
        diagnosis = diagnose_hang(evidence_of("store_wait", recorder=recorded))
        assert diagnosis.cause is not None
        assert (diagnosis.cause.class_name, diagnosis.cause.ranks) == ("hang_missing_collective", (1,))
        assert "waits for the rendezvous store at train.py:108 in bad_store" in diagnosis.headline


@pytest.mark.parametrize(("name", "line"), [("thread", "41 in bad_sleep"), ("thread_pool", "45 in bad_poll")])
def test_the_thread_that_the_main_thread_waits_for_is_the_place(name: str, line: str) -> None:
    cause = diagnose_hang(evidence_of(name)).cause
    assert cause is not None
    assert (cause.class_name, cause.ranks, cause.location) == ("hang_sleep", (1,), f"train.py:{line}")


# ---------------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("name", "headline"),
    [
        ("sleep", f"{NOT_CALLED}: it sleeps at train.py:41 in bad_sleep"),
        ("c_holding_the_gil", f"{NOT_CALLED}: it sleeps in C code that holds the GIL at train.py:64 in bad_cgil"),
        (
            "loader_deadlocked",
            (
                f"{NOT_CALLED}: its data-loader worker pid 32628 (and 1 more) waits for a lock at dataset.py:15 in "
                "__getitem__"
            ),
        ),
        (
            "forked_child",
            (
                f"{NOT_CALLED}: it waits for its forked child pid 408 at train.py:138 in bad_fork; its child pid 408 "
                "waits for a lock at train.py:137 in bad_fork"
            ),
        ),
        (
            "ddp_backward",
            (
                "rank 1 (node1) has not called the all_reduce in DDP's backward that ranks 0, 2 wait in: it sleeps at "
                "train.py:169 in ddp"
            ),
        ),
        (
            "mismatched",
            (
                "rank 1 called broadcast of shape [3] as collective 3 of group default_pg where ranks 0, 2 called "
                "all_reduce of shape [4]"
            ),
        ),
        ("early_exit", "rank 1 (node1) has ended (exit code 0), and ranks 0, 2 wait in init_process_group"),
        (
            "init_missing_rank",
            (
                "rank 1 (node1) has not come to init_process_group, where ranks 0, 2 wait: it sleeps at "
                "train.py:214 in main"
            ),
        ),
        ("recv", "rank 1 (node1) keeps ranks 0, 2 waiting in recv: it sleeps at train.py:187 in many"),
        ("all_in_lock", "all ranks of node1: each waits for a lock at train.py:49 in bad_lock"),
    ],
)
def test_the_first_line_says_it_all(name: str, headline: str) -> None:
    """Who, what the others wait for, what it does instead, and where."""
    assert diagnose_hang(evidence_of(name)).headline == f"the job hangs: {headline}"


def test_the_picture_comes_with_it() -> None:
    """Groups and merged stacks are those of all ranks."""
    diagnosis = diagnose_hang(evidence_of("sleep"))
    assert [group.ranks for group in diagnosis.groups] == [(0, 2), (1,)]
    assert diagnosis.tree[0].ranks == (0, 1, 2)
    assert diagnosis.first_failure is None


def test_the_proof_is_the_flight_recorder_s_or_the_kernel_s() -> None:
    """A claim without its reason is an opinion."""
    with_recorder = diagnose_hang(evidence_of("sleep")).cause
    without = diagnose_hang(evidence_of("sleep", recorder=False)).cause
    assert with_recorder is not None
    assert without is not None
    assert with_recorder.proof.startswith("rank 1 has not called collective 3 (all_reduce)")
    assert without.proof == "/proc of rank 1: state S, system call clock_nanosleep in hrtimer_nanosleep"


IN_ALL_REDUCE = Frame("all_reduce", f"{LIB}/site-packages/torch/distributed/distributed_c10d.py", 3252)


def _in_groups(*groups: tuple[int, str, tuple[int, ...], bool]) -> tuple[RankCollectives, ...]:
    """Ranks that have ended call 1 of a group, and may wait in call 2; rank 0 waits for them in a barrier."""
    by_rank: dict[int, list[GroupProgress]] = {rank: [] for rank in range(3)}
    for rank, name, members, waits in groups:
        calls = [
            CollectiveCall(seq, "all_reduce", "[[3]]", seq == 1, is_p2p=False, created_ns=0)
            for seq in (1, 2)[: 1 + waits]
        ]
        by_rank[rank].append(GroupProgress(f"gloo:{name}", "", members, 1 + waits, -1, 1, tuple(calls)))
    barrier = CollectiveCall(1, "barrier", "[]", retired=False, is_p2p=False, created_ns=0)
    by_rank[0].append(GroupProgress("gloo:0", "default_pg", (0, 1, 2), 1, -1, 0, (barrier,)))
    return tuple(RankCollectives(rank, tuple(progress)) for rank, progress in by_rank.items())


def _hang_in(*groups: tuple[int, str, tuple[int, ...], bool]) -> Diagnosis:
    frames = ((IN_ALL_REDUCE, Frame("main", "/home/user/job/train.py", line)) for line in (7, 8, 9))
    stacks = tuple(dump_of(rank, *calls) for rank, calls in enumerate(frames))
    return diagnose_hang(evidence(Capture(stacks=stacks, collectives=_in_groups(*groups))))


def test_ranks_that_wait_for_each_other_are_named_with_what_each_waits_in() -> None:
    both = (1, 2)
    found = _hang_in((1, "a", both, True), (1, "b", both, False), (2, "a", both, False), (2, "b", both, True))
    assert found.cause is not None
    assert found.cause.ranks == (1, 2)
    assert "ranks 1-2 (node1) wait for each other: rank 1 in collective 2 (all_reduce) of group a for rank 2, " in (
        found.headline
    )
    assert found.headline.endswith("(train.py:8 in main, train.py:9 in main); rank 0 waits for them")
    assert not any("wait for each other" in line for line in found.findings)


def test_ranks_in_groups_of_unknown_members_are_named_with_their_lines() -> None:
    """Gloo does not say who belongs to a group."""
    found = _hang_in((1, "a", (), True), (2, "b", (), True))
    assert "ranks 1-2 (node1) wait in all_reduce at train.py:8 in main, train.py:9 in main, in groups" in found.headline
    assert "whose members are not known; all others wait for them" in found.headline
    assert "all have made" not in found.headline
