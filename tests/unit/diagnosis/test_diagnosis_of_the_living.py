"""What ranks that lived on were seen to do, hangs, tracebacks, and diagnoses of whatever comes."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.job_evidence import (
    Capture,
    CollectiveCall,
    CoreDump,
    Evidence,
    Frame,
    GroupProgress,
    HangVerdict,
    OomKill,
    RankCollectives,
    RankOutput,
    ThreadStack,
)
from saferun.model import ExitStatus, RankEnd
from tests.examples import examples
from tests.unit.diagnosis.failed_jobs import (
    RECORDED,
    class_of,
    dump_of,
    evidence,
    said,
)
from tests.unit.samples import end_of

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
    assert found.headline == (
        "rank 1 (node3, local rank 1, pid 4001) did not come to all_reduce: it sleeps at train.py:61 in pause; "
        "rank 0 (node3, local rank 0, pid 4000) timed out, 10.0 s after the start: gloo timeout after 8 s, "
        "at train.py:129 in main; exit code 1"
    )
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


@examples(300)
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
    stopped = {end.rank for end in case.ends if end.stopped_by_us}
    # One that saferun stopped may have failed before: because of another rank, or of the same as the cause.
    causes = set(found.cause.ranks) if found.cause is not None else set()
    assert stopped - set(found.victims) - causes <= set(found.stopped) <= stopped
    assert set(found.victims) <= set(roles) | stopped
    assert not set(found.stopped) & set(found.victims)
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
