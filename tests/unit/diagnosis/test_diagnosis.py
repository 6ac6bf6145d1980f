"""Which rank is the root of a failure, which are its victims, and what is said of it."""

from __future__ import annotations

import math
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence import (
    Capture,
    CollectiveCall,
    CoreDump,
    Diagnosis,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    OomKill,
    RankCollectives,
    RankOutput,
    StackDump,
    ThreadStack,
)
from saferun.model import ExitStatus, RankEnd, signal_name
from tests.unit.samples import end_of

RECORDED = Path(__file__).parent / "recorded_failures"


def evidence(
    *ends: RankEnd,
    outputs: tuple[RankOutput, ...] = (),
    stop_signum: int | None = None,
    trouble: str = "",
    abandoned: tuple[int, ...] = (),
) -> Evidence:
    hint = "look there" if trouble else ""
    ranks = tuple(sorted(end.rank for end in ends))
    return Evidence(
        "node3",
        90.0,
        ends,
        outputs,
        abandoned,
        stop_signum,
        trouble,
        hint,
        ranks=ranks,
        script="train.py",
        cwd="/home/user/job",
    )


def raised(rank: int, seconds: float) -> RankOutput:
    """An error file whose exception was raised at this time (``at`` of ``end_of``)."""
    return RankOutput(rank, (), "", "ValueError: no", 1.7e9 + seconds)


def said(rank: int, name: str) -> RankOutput:
    """What a real program said, as if this rank had."""
    text = (RECORDED / f"{name}.txt").read_text(encoding="utf-8").partition("--- stderr\n")[2]
    lines = tuple(line.rstrip() for line in text.splitlines() if line.strip())
    return RankOutput(rank, tuple(line.replace("[rank1]", f"[rank{rank}]") for line in lines), "", "", 0.0)


def first_rank(found: Diagnosis) -> int | None:
    return found.first_failure.rank if found.first_failure is not None else None


def class_of(found: Diagnosis) -> str:
    return found.cause.class_name if found.cause is not None else ""


# ---------------------------------------------------------------------------------------------------------- the first


def test_the_first_failure_is_named_with_place_time_and_status() -> None:
    """Which rank, on which host, when, of what, and how."""
    found = diagnose(evidence(end_of(1, code=3, at=101.0), end_of(0, signum=11, at=100.5)))
    assert first_rank(found) == 0
    assert found.headline == (
        "rank 0 (node3, local rank 0, pid 4000) failed first, 10.5 s after the start: "
        "segmentation fault; killed by SIGSEGV"
    )
    assert [end.rank for end in found.also_failed] == [1]


def test_the_headline_has_the_cause_the_place_and_the_time_of_day() -> None:
    """It is all that many will read."""
    end = end_of(1, code=1, at=100.5)._replace(clock="03:15:33")
    found = diagnose(evidence(end, outputs=(said(1, "key_error"),)))
    assert found.headline == (
        "rank 1 (node3, local rank 1, pid 4001) failed first at 03:15:33, 10.5 s after the start: "
        "KeyError: 'labels', at train.py:34 in step; exit code 1"
    )


def test_a_status_that_says_what_the_cause_says_is_not_said_twice() -> None:
    """``killed from outside (SIGKILL); killed by SIGKILL``."""
    found = diagnose(evidence(end_of(1, signum=9, at=100.5)))
    assert found.headline.endswith("after the start: killed from outside (SIGKILL)")


def test_ranks_that_saferun_stopped_are_not_causes() -> None:
    """They ended by SIGTERM, SIGKILL or SIGABRT because another one failed."""
    found = diagnose(
        evidence(
            end_of(0, signum=15, at=99.0, stopped=True),
            end_of(1, code=1, at=100.0),
            end_of(2, code=0, at=98.0),
            end_of(3, code=0, at=98.0, stopped=True),
            end_of(4, signum=6, at=97.0, stopped=True),
        )
    )
    assert first_rank(found) == 1
    assert found.also_failed == ()
    assert found.stopped == (0, 3, 4)


def test_the_exception_that_was_raised_first_comes_first() -> None:
    """A rank with much to clean up ends after those that its failure took down."""
    outputs = (raised(0, 95.0), raised(1, 99.0))
    found = diagnose(evidence(end_of(1, code=1, at=100.0), end_of(0, code=1, at=130.0), outputs=outputs))
    assert first_rank(found) == 0
    assert found.output == outputs[0]


def test_error_files_know_whole_seconds_only() -> None:
    """Within the rounding the kernel's order counts."""
    outputs = (raised(0, 100.0), raised(1, 100.9))
    found = diagnose(evidence(end_of(1, code=1, at=100.2), end_of(0, code=1, at=100.5), outputs=outputs))
    assert first_rank(found) == 1


@pytest.mark.parametrize("nonsense", [0.0, -5.0, math.nan, math.inf, -math.inf, 1e300])
def test_a_time_that_makes_no_sense_is_not_believed(nonsense: float) -> None:
    """A rank may write what it likes into its error file."""
    output = RankOutput(0, (), "", "boom", nonsense)
    found = diagnose(evidence(end_of(0, code=1, at=105.0), end_of(1, code=1, at=100.0), outputs=(output,)))
    assert first_rank(found) == 1


def test_a_time_before_the_attempt_is_not_believed() -> None:
    """A stale file, or a clock that is not set, must not put a later failure first."""
    output = RankOutput(0, (), "", "boom", 86_400.0)
    found = diagnose(evidence(end_of(0, code=1, at=105.0), end_of(1, signum=9, at=100.0), outputs=(output,)))
    assert first_rank(found) == 1


def test_a_trouble_of_saferuns_own_is_the_headline() -> None:
    """The ranks can do nothing about a missing store."""
    found = diagnose(evidence(end_of(0, signum=15, stopped=True), trouble="the store's process ended"))
    assert found.headline == "the store's process ended"
    assert found.hint == "look there"
    assert found.first_failure is None
    assert found.cause is None


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_launch_that_was_asked_to_stop_says_so(signum: int) -> None:
    """It did not fail."""
    found = diagnose(evidence(end_of(0, code=0, stopped=True), stop_signum=signum))
    assert found.headline == f"stopped by {signal_name(signum)}"
    assert found.first_failure is None
    assert found.cause is None


def test_a_launch_that_the_scheduler_stopped_says_why() -> None:
    """Where the ranks' output has it."""
    outputs = (said(0, "slurm_time_limit"),)
    found = diagnose(evidence(end_of(0, signum=15, stopped=True), outputs=outputs, stop_signum=15))
    assert found.headline == "stopped by SIGTERM"
    assert class_of(found) == "scheduler_timeout"


def test_no_rank_that_failed_is_an_honest_answer() -> None:
    """Better than a wrong one."""
    found = diagnose(evidence(end_of(0, code=0), abandoned=(1,)))
    assert found.first_failure is None
    assert found.output is None
    assert found.cause is None
    assert "no rank" in found.headline
    assert found.abandoned == (1,)


# -------------------------------------------------------------------------------------------------- root and victims


@pytest.mark.parametrize("victim", ["gloo_peer_closed", "gloo_peer_reset", "nccl_remote_error", "store_gone"])
@pytest.mark.parametrize("culprit", ["key_error", "cuda_out_of_memory", "disk_full", "module_not_found"])
def test_a_victim_that_ended_first_is_not_the_root(culprit: str, victim: str) -> None:
    """The culprit was still writing its traceback."""
    outputs = (said(0, victim), said(1, culprit))
    found = diagnose(evidence(end_of(0, code=1, at=100.0), end_of(1, code=1, at=109.0), outputs=outputs))
    assert first_rank(found) == 1
    assert found.victims == (0,)
    assert found.cause is not None
    assert found.cause.ranks == (1,)
    assert found.output == outputs[1]


def test_a_core_takes_seconds_to_write_and_its_rank_is_the_root_all_the_same() -> None:
    """The parent learns of the crash only when the core is written."""
    outputs = (said(0, "gloo_peer_reset"), said(1, "segmentation_fault"), said(2, "gloo_peer_closed"))
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=11, at=118.0), end_of(2, code=1, at=101.0))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert (first_rank(found), found.victims) == (1, (0, 2))
    assert [end.rank for end in found.also_failed] == [0, 2]


def test_a_rank_killed_without_a_word_beats_victims_with_many() -> None:
    """The dead do not speak; those that lost them do."""
    outputs = (said(0, "gloo_peer_reset"), said(1, "killed"), said(2, "nccl_remote_error"))
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=9, at=100.5), end_of(2, code=1, at=99.5))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert (first_rank(found), class_of(found)) == (1, "killed_from_outside")


def test_a_timeout_is_weaker_than_a_crash() -> None:
    """Those that wait time out because of the one that crashed, even where it ended later."""
    outputs = (said(0, "nccl_timeout"), said(1, "key_error"))
    found = diagnose(evidence(end_of(0, signum=6, at=100.0), end_of(1, code=1, at=101.0), outputs=outputs))
    assert (first_rank(found), found.victims) == (1, (0,))


def test_a_timeout_is_stronger_than_a_lost_connection() -> None:
    """The first that gives up closes its connections."""
    outputs = (said(0, "gloo_peer_closed"), said(1, "gloo_timeout"))
    found = diagnose(evidence(end_of(0, code=1, at=100.0), end_of(1, code=1, at=100.1), outputs=outputs))
    assert (first_rank(found), class_of(found)) == (1, "collective_timeout")
    assert found.cause is not None
    assert found.cause.ranks == ()


def test_a_rank_that_ended_well_too_early_is_the_cause() -> None:
    """Nobody failed; somebody left."""
    ends = (end_of(0, code=1, at=101.0), end_of(1, code=0, at=100.0), end_of(2, signum=15, at=103.0, stopped=True))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"),)))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("early_exit", (1,))
    assert found.headline.startswith("rank 1 (node3, local rank 1, pid 4001) ended, 10.0 s after the start")
    assert "while others still needed it" in found.headline
    assert found.victims == (0,)


def test_a_rank_that_ended_well_is_no_cause_where_another_one_crashed() -> None:
    """It may have had nothing left to do."""
    ends = (end_of(0, code=1, at=101.0), end_of(1, code=0, at=100.0), end_of(2, code=1, at=102.0))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"), said(2, "key_error"))))
    assert (first_rank(found), class_of(found)) == (2, "python_exception")


def test_a_rank_that_ended_well_after_the_failure_did_not_leave_early() -> None:
    """The order matters."""
    ends = (end_of(0, code=1, at=101.0), end_of(1, code=0, at=102.0))
    assert class_of(diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"),)))) == "peer_lost"


@pytest.mark.parametrize("name", ["abort_at_exit", "segmentation_fault_at_exit"])
def test_a_script_that_was_through_too_early_is_an_early_exit_even_if_its_interpreter_crashed(name: str) -> None:
    """Torch's threads do not like to be left; that is not what the others died of."""
    signum = 6 if name == "abort_at_exit" else 11
    ends = (end_of(0, code=1, at=101.0, stopped=True), end_of(1, signum=signum, at=100.0))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"), said(1, name))))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("early_exit", (1,))
    assert "ended first" in found.headline
    assert "while others still needed it" in found.headline


def test_a_crash_at_the_very_end_of_a_job_is_a_crash() -> None:
    """Nobody needed it any more."""
    ends = (end_of(0, code=0, at=99.0), end_of(1, signum=6, at=100.0))
    found = diagnose(evidence(*ends, outputs=(said(1, "abort_at_exit"),)))
    assert class_of(found) == "abort"


def test_a_rank_that_nobody_could_look_at_is_not_blamed_for_a_timeout() -> None:
    """Not to know what it does is no proof that it does nothing."""
    capture = Capture(stacks=(dump_of(1, ())._replace(failure="permission denied"),))
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=15, at=102.0, stopped=True))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_timeout"),))._replace(capture=capture))
    assert found.cause is not None
    assert found.cause.ranks == ()


def test_where_there_are_victims_only_the_cause_is_elsewhere() -> None:
    """On another host, most likely."""
    outputs = (said(0, "nccl_remote_error"), said(1, "nccl_remote_error"))
    found = diagnose(evidence(end_of(0, code=1, at=101.0), end_of(1, code=1, at=100.0), outputs=outputs))
    assert first_rank(found) == 1
    assert found.cause is not None
    assert found.cause.ranks == ()
    assert "not among the ranks of this host" in found.headline
    assert found.victims == (0, 1)


def test_a_store_that_is_gone_with_nobody_to_blame_is_a_failure_of_the_store() -> None:
    """Nothing else is known."""
    found = diagnose(evidence(end_of(1, code=1, at=100.0), outputs=(said(1, "store_gone"),)))
    assert class_of(found) == "rendezvous_store_failure"


def test_ranks_that_fail_alike_are_one_cause() -> None:
    """All eight import what is not there."""
    outputs = tuple(said(rank, "module_not_found") for rank in range(8))
    ends = [end_of(rank, code=1, at=100.0 + (rank - 3) % 8 / 10) for rank in range(8)]
    found = diagnose(evidence(*ends, outputs=outputs))
    assert first_rank(found) == 3
    assert found.cause is not None
    assert found.cause.ranks == tuple(range(8))
    assert found.headline.endswith("ranks 0-2, 4-7 failed alike")
    assert [traceback.ranks for traceback in found.tracebacks] == [tuple(range(8))]


def test_ranks_that_fail_of_different_things_are_not_alike() -> None:
    """The second may be a cause of its own, but it is not this one."""
    outputs = (said(0, "key_error"), said(1, "disk_full"))
    found = diagnose(evidence(end_of(0, code=1, at=100.0), end_of(1, code=1, at=100.1), outputs=outputs))
    assert found.cause is not None
    assert found.cause.ranks == (0,)
    assert found.victims == ()
    assert [end.rank for end in found.also_failed] == [1]


def test_an_out_of_memory_kill_beats_the_victims_it_makes() -> None:
    """With the kernel as the witness."""
    outputs = (said(0, "gloo_peer_reset"),)
    given_evidence = evidence(end_of(0, code=1, at=100.0), end_of(1, signum=9, at=100.2), outputs=outputs)
    found = diagnose(given_evidence._replace(oom=OomKill("cgroup", 1 << 30, 0, (4001,), 1, "memory.events")))
    assert (first_rank(found), class_of(found)) == (1, "host_oom_kill")


# ------------------------------------------------------------------------------------- what the living were seen to do

MAIN = Frame("main", "/home/user/job/train.py", 80)
SLEEPS = (Frame("pause", "/home/user/job/train.py", 61), MAIN)
SLEEPING_NATIVE = (Frame("clock_nanosleep", "/lib/x86_64-linux-gnu/libc.so.6", 0, native=True), *SLEEPS)
TORCH = "/opt/venv/lib/python3.11/site-packages/torch/distributed"
REDUCES = (
    Frame("all_reduce", f"{TORCH}/distributed_c10d.py", 3252),
    Frame("wrapper", f"{TORCH}/c10d_logger.py", 83),
    Frame("step", "/home/user/job/train.py", 52),
    MAIN,
)


def dump_of(rank: int, frames: tuple[Frame, ...]) -> StackDump:
    thread = ThreadStack("MainThread", 4000 + rank, is_main=True, active=False, owns_gil=False, frames=frames)
    return StackDump(rank, 4000 + rank, is_rank=True, name="python", tool="py-spy", threads=(thread,))


def recorder_of(rank: int, op: str, seq: int = 5) -> RankCollectives:
    calls = tuple(
        CollectiveCall(number, op if number == seq else "all_reduce", "[[8]]", number < seq, is_p2p=False, created_ns=0)
        for number in range(1, seq + 1)
    )
    return RankCollectives(rank, (GroupProgress("0", "default_pg", (0, 1, 2), seq, seq - 1, seq - 1, calls),))


def test_a_timeout_is_laid_to_the_rank_that_did_something_else() -> None:
    """The one that timed out was waiting, as it should."""
    capture = Capture(stacks=(dump_of(1, SLEEPING_NATIVE), dump_of(2, REDUCES)))
    ends = (end_of(0, code=1, at=100.0), *(end_of(rank, signum=15, at=102.0, stopped=True) for rank in (1, 2)))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_timeout"),))._replace(capture=capture))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("collective_timeout", (1,))
    assert "meanwhile rank 1 " in found.headline
    assert "train.py:61 in pause" in found.headline
    assert found.victims == (0,)


def test_ranks_in_different_collectives_are_a_mismatch_however_they_ended() -> None:
    """The Flight Recorders show what the messages cannot."""
    capture = Capture(
        stacks=(dump_of(1, REDUCES), dump_of(2, REDUCES)),
        collectives=(recorder_of(0, "all_reduce"), recorder_of(1, "all_reduce"), recorder_of(2, "broadcast")),
    )
    ends = (end_of(0, code=1, at=100.0), *(end_of(rank, signum=15, at=102.0, stopped=True) for rank in (1, 2)))
    found = diagnose(evidence(*ends, outputs=(said(0, "gloo_timeout"),))._replace(capture=capture))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("mismatched_collectives", (2,))
    assert "broadcast" in found.headline


def test_collectives_that_do_not_end_are_no_news_after_a_crash() -> None:
    """Of course they do not: a rank is missing."""
    capture = Capture(stacks=(dump_of(0, REDUCES),), collectives=(recorder_of(0, "all_reduce"),))
    ends = (end_of(1, signum=11, at=100.0), end_of(0, signum=15, at=102.0, stopped=True))
    found = diagnose(evidence(*ends, outputs=(said(1, "segmentation_fault"),))._replace(capture=capture))
    assert class_of(found) == "segmentation_fault"
    assert found.findings == ()


def test_the_stacks_of_the_living_are_part_of_the_picture() -> None:
    """Where the others were when one failed."""
    capture = Capture(stacks=(dump_of(0, REDUCES), dump_of(2, REDUCES)), timed_out=("gpu",))
    ends = (end_of(1, signum=9, at=100.0), *(end_of(rank, signum=15, at=102.0, stopped=True) for rank in (0, 2)))
    found = diagnose(evidence(*ends)._replace(capture=capture))
    assert [(group.kind, group.ranks) for group in found.groups] == [("collective", (0, 2)), ("dead", (1,))]
    assert [node.ranks for node in found.tree] == [(0, 2)]
    assert found.findings == ("captures timed out: gpu",)


def test_what_the_kernel_says_of_gpus_is_told() -> None:
    """Xid messages explain what CUDA cannot."""
    xid = "[ 8412.117] NVRM: Xid (PCI:0000:3b:00): 31, pid=4001, MMU Fault"
    lines = ("usb 1-1: new device", xid)
    found = diagnose(
        evidence(end_of(1, code=1), outputs=(said(1, "cuda_launch_failure"),))._replace(kernel_lines=lines)
    )
    assert class_of(found) == "cuda_error"
    assert found.findings == (xid,)


# ------------------------------------------------------------------------------------------------------------- hangs


def test_a_hang_without_a_failure_is_judged_as_a_hang() -> None:
    """All ranks were stopped by saferun, SIGABRT for a core included."""
    verdict = HangVerdict("quiescent", (0, 1), 300.0, certain=True)
    capture = Capture(stacks=(dump_of(0, REDUCES), dump_of(1, SLEEPING_NATIVE)))
    ends = (end_of(0, signum=15, stopped=True), end_of(1, signum=6, stopped=True))
    found = diagnose(evidence(*ends)._replace(hang=verdict, capture=capture))
    assert found.cause is not None
    assert found.cause.class_name.startswith("hang_")
    assert found.cause.ranks == (1,)


def test_a_failure_after_a_hang_is_judged_as_a_failure() -> None:
    """A rank that dies by itself is news."""
    verdict = HangVerdict("quiescent", (0, 1), 300.0, certain=True)
    found = diagnose(evidence(end_of(0, signum=11), end_of(1, signum=15, stopped=True))._replace(hang=verdict))
    assert class_of(found) == "segmentation_fault"


# --------------------------------------------------------------------------------------------------------- tracebacks


def test_the_roots_traceback_stands_first_and_victims_share_one() -> None:
    """Seven ranks lost their connection in the same line."""
    outputs = (*(said(rank, "gloo_peer_closed") for rank in range(7)), said(7, "key_error"))
    ends = (*(end_of(rank, code=1, at=100.0) for rank in range(7)), end_of(7, code=1, at=101.0))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert [traceback.ranks for traceback in found.tracebacks] == [(7,), tuple(range(7))]
    assert found.tracebacks[0].lines[0] == "Traceback (most recent call last):"
    assert found.tracebacks[0].lines[-1] == "KeyError: 'labels'"


def test_no_more_than_three_tracebacks_are_kept() -> None:
    """The rest is in the files."""
    names = ["key_error", "assertion_error", "recursion", "disk_full", "memory_error"]
    outputs = tuple(said(rank, name) for rank, name in enumerate(names))
    found = diagnose(evidence(*(end_of(rank, code=1) for rank in range(5)), outputs=outputs))
    assert len(found.tracebacks) == 3


def test_a_crash_that_faulthandler_told_of_has_its_report_as_traceback() -> None:
    """Without the list of modules."""
    found = diagnose(evidence(end_of(1, signum=11), outputs=(said(1, "segmentation_fault"),)))
    assert found.tracebacks[0].lines[0] == "Fatal Python error: Segmentation fault"
    assert not any("Extension modules" in line for line in found.tracebacks[0].lines)


# --------------------------------------------------------------------------------------------------------- everything

SAMPLES = sorted(path.stem for path in RECORDED.glob("*.txt"))
LINES = {name: said(0, name).last_lines for name in SAMPLES}
ANY_LINE = st.one_of(
    st.sampled_from([line for lines in LINES.values() for line in lines]),
    st.text(max_size=60),
    st.sampled_from(["\x1b[31mTraceback (most recent call last):", '  File "', "[rank", "\x00" * 80, "a" * 70_000]),
)
WHOLE = st.sampled_from(SAMPLES).map(lambda name: LINES[name])
CUT = st.builds(lambda lines, first, count: lines[first : first + count], WHOLE, st.integers(0, 20), st.integers(1, 30))
ANY_OUTPUT = st.one_of(
    WHOLE,
    CUT,
    CUT.flatmap(st.permutations).map(tuple),
    st.builds(lambda one, other: one + other, CUT, CUT),
    st.lists(ANY_LINE, max_size=30).map(tuple),
)
ANY_END = st.builds(
    end_of,
    st.integers(0, 7),
    code=st.one_of(st.none(), st.sampled_from([0, 0, 1, 1, 2, 3, 134, 137, 139, 255])),
    signum=st.sampled_from([1, 2, 4, 6, 7, 8, 9, 11, 13, 15, 34, 64]),
    at=st.floats(90, 200),
    stopped=st.booleans(),
).map(
    lambda end: end._replace(
        status=ExitStatus(None, end.status.signum) if end.status.code is None else ExitStatus(end.status.code, None)
    )
)
ANY_FRAME = st.builds(
    Frame, st.text(max_size=20), st.sampled_from(["train.py", "/lib/libc.so.6", ""]), st.integers(0, 9), st.booleans()
)
ANY_THREAD = st.builds(
    ThreadStack,
    st.just("t"),
    st.integers(0, 9),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(ANY_FRAME, max_size=4).map(tuple),
)
ANY_CORE = st.builds(
    CoreDump,
    st.integers(0, 7),
    st.integers(4000, 4008),
    st.integers(0, 64),
    st.just(""),
    st.just(0),
    st.booleans(),
    st.just("gdb"),
    st.lists(ANY_THREAD, max_size=2).map(tuple),
    st.integers(-1, 4008),
)
ANY_EVIDENCE = st.builds(
    lambda ends, outputs, cores, kernel_lines, oom: evidence(
        *ends,
        outputs=tuple(
            RankOutput(rank, lines, "", message, 0.0, lines[:3]) for rank, (lines, message) in outputs.items()
        ),
    )._replace(cores=tuple(cores), kernel_lines=tuple(kernel_lines), oom=oom),
    st.lists(ANY_END, max_size=8, unique_by=lambda end: end.rank),
    st.dictionaries(st.integers(0, 7), st.tuples(ANY_OUTPUT, st.one_of(st.just(""), ANY_LINE)), max_size=8),
    st.lists(ANY_CORE, max_size=3),
    st.lists(st.one_of(st.text(max_size=40), st.just("Killed process 4003 (python)")), max_size=3),
    st.one_of(
        st.none(),
        st.builds(
            OomKill,
            st.sampled_from(["cgroup", "host"]),
            st.integers(0, 1 << 40),
            st.just(0),
            st.just(()),
            st.integers(0, 3),
            st.just(""),
        ),
    ),
)


@settings(max_examples=300, deadline=None)
@given(ANY_EVIDENCE)
def test_a_root_is_never_a_victim_while_there_is_a_better_one(case: Evidence) -> None:
    """And whatever ranks say, it is judged without an error, and every rank has one part."""
    found = diagnose(case)
    failed = [end for end in case.ends if not end.status.ok and not end.stopped_by_us]
    outputs = case.outputs_by_rank
    roles = {end.rank: role_of(cause_of(read_failure(case, end, outputs.get(end.rank)))) for end in failed}
    told = [end for end in (found.first_failure, *found.also_failed) if end is not None]
    assert {end.rank for end in told} == set(roles)
    assert len(told) == len(roles)
    assert set(found.stopped) == {end.rank for end in case.ends if end.stopped_by_us}
    assert set(found.victims) <= set(roles)
    if found.first_failure is not None:
        assert roles[found.first_failure.rank] == min(roles.values())
        if min(roles.values()) is Role.CULPRIT:
            assert found.first_failure.rank not in found.victims
    assert "\n" not in found.headline
    assert len(found.tracebacks) <= 3


@given(st.lists(ANY_END, max_size=8, unique_by=lambda end: end.rank))
def test_among_equals_the_kernels_order_counts(ends: list[RankEnd]) -> None:
    """Where nobody said anything and no signal makes a victim."""
    ends = [end for end in ends if end.status.signum != signal.SIGPIPE]
    found = diagnose(evidence(*ends))
    failed = [end for end in ends if not end.status.ok and not end.stopped_by_us]
    if failed:
        assert found.first_failure is not None
        assert found.first_failure.time == min(end.time for end in failed)


@pytest.mark.parametrize(
    ("status", "words", "returncode"),
    [
        (ExitStatus(0, None), "exit code 0", 0),
        (ExitStatus(3, None), "exit code 3", 3),
        (ExitStatus(None, 11, core_dumped=True), "killed by SIGSEGV (core dumped)", -11),
        (ExitStatus(None, 9), "killed by SIGKILL", -9),
        (ExitStatus(None, 33), "killed by signal 33", -33),
    ],
)
def test_a_status_in_words(status: ExitStatus, words: str, returncode: int) -> None:
    """A person reads SIGSEGV, not -11."""
    assert status.description == words
    assert status.returncode == returncode
    assert status.ok == (returncode == 0)
