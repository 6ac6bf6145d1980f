"""Ranks that ended well: when they are the cause of what became of the others, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, Frame, RankCollectives, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.failed_jobs import class_of, evidence, said
from tests.unit.diagnosis.recorded_hangs import C10D, dump_of, look_of, native
from tests.unit.diagnosis.recorded_hangs import evidence as evidence_of_hang
from tests.unit.diagnosis.test_timeouts import SLEEPS as SLEEPING
from tests.unit.diagnosis.test_timeouts import recorder
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CONNECTION = '  File "/usr/lib/python3.11/multiprocessing/connection.py", line 399, in _recv'
STORE = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'


def failed_late(*lines: str) -> Diagnosis:
    """Rank 0 failed 200 s after the others had ended well."""
    ends = (end_of(0, code=1, at=300.0), end_of(1, code=0, at=100.0), end_of(2, code=0, at=100.0))
    return diagnose(evidence(*ends, outputs=(RankOutput(0, lines, "", "", 0.0),)))


@pytest.mark.parametrize(
    "lines",
    [
        (HEAD, STEP, "    upload(checkpoint)", "ConnectionResetError: [Errno 104] Connection reset by peer"),
        (HEAD, STEP, "    table = manager.dict()", CONNECTION, "    raise EOFError", "EOFError"),
        (HEAD, STEP, "    client.send(result)", "BrokenPipeError: [Errno 32] Broken pipe"),
        ("ssh: connect to host backup port 22: Connection refused",),
    ],
)
def test_ranks_that_had_ended_well_are_not_to_blame_for_a_connection_of_anothers_own(lines: tuple[str, ...]) -> None:
    """Nothing shows that it was to one of them."""
    found = failed_late(*lines)
    assert found.cause is not None
    assert found.cause.class_name in {"connection_lost", "ssh_unreachable"}
    assert found.cause.ranks == (0,)
    assert found.headline.startswith("rank 0 (node3, local rank 0, pid 4000) failed first"), found.headline
    assert found.victims == ()


def test_a_connection_that_is_lost_in_a_collective_is_one_to_the_ranks_that_had_ended() -> None:
    found = failed_late(HEAD, STEP, STORE, "RuntimeError: Connection reset by peer")
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("early_exit", (1, 2))
    ends = (end_of(0, code=1, at=300.0), end_of(1, code=0, at=100.0))
    assert class_of(diagnose(evidence(*ends, outputs=(said(0, "gloo_peer_closed"),)))) == "early_exit"


# -------------------------------------------------------------------------------------------- an error that was caught

C10D_CALL = (
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'
)
RESET = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4"
)
CAUGHT = ("ERROR:root:training failed", HEAD, STEP, "ValueError: bad batch")


def ended_well(*lines: str, stdout: tuple[str, ...] = (), more: tuple[RankOutput, ...] = ()) -> Diagnosis:
    """Rank 1 ended with exit code 0 just before rank 0 lost it; of more outputs the ranks did so as well."""
    ends = [end_of(1, code=0, at=99.0), end_of(0, code=1, at=100.0)]
    ends += [end_of(one.local_rank, code=0, at=99.5) for one in more]
    lost = RankOutput(0, (HEAD, STEP, C10D_CALL, RESET), "", "", 0.0)
    return diagnose(evidence(*ends, outputs=(RankOutput(1, lines, "", "", 0.0, stdout), lost, *more)))


@pytest.mark.parametrize("is_on_stdout", [False, True])
def test_an_error_that_a_rank_had_logged_before_it_ended_well_is_named(*, is_on_stdout: bool) -> None:
    """``except Exception: logging.exception(...)`` at the end of a script ends it with exit code 0."""
    found = ended_well(stdout=CAUGHT) if is_on_stdout else ended_well(*CAUGHT)
    assert found.headline == (
        "rank 1 (node3, local rank 1, pid 4001) ended, 9.0 s after the start: exit code 0 after it had printed "
        "ValueError: bad batch, at train.py:52 in step, while others still needed it"
    )
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks, found.victims) == ("early_exit", (1,), (0,))
    assert found.cause.location == "train.py:52 in step"
    assert found.cause.advice.startswith("look at that error")
    assert found.tracebacks[0].ranks == (1,)
    assert found.tracebacks[0].lines[-1] == "ValueError: bad batch"


def test_that_it_had_got_over_that_error_is_possible_too() -> None:
    """Uneven batches leave others behind as well."""
    cause = ended_well(*CAUGHT).cause
    assert cause is not None
    assert cause.advice.startswith("look at that error: the script caught it")
    assert "look for batches, epochs or branches that differ by rank" in cause.advice


def test_an_upload_that_failed_at_the_end_is_not_said_to_be_why_a_rank_left() -> None:
    """To let it raise would end jobs that are well."""
    upload = (HEAD, STEP, "wandb.errors.CommError: Run finish has timed out")
    cause = ended_well("ERROR:root:no upload", *upload, stdout=("training done",)).cause
    assert cause is not None
    assert cause.advice.startswith("no rank may end before all collectives are over: look for batches")
    assert "let it raise" not in cause.advice
    assert "need not be why" in cause.advice


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (*CAUGHT, *(f"step {number}" for number in range(9))),
        ("Exception ignored in: <function close>", HEAD, STEP, "OSError: [Errno 9] Bad file descriptor"),
        ("Exception in thread Thread-1 (poll):", HEAD, STEP, "KeyError: 'x'"),
        ("WARNING:root:no cache", HEAD, STEP, "KeyError: 'cache'", "training is done"),
        ("ERROR:root:lost a rank", HEAD, STEP, C10D_CALL, RESET),
        ("WARNING metrics upload failed, going on", HEAD, STEP, "KeyError: 'x'"),
        ("2026-11-26 12:00:00 INFO skipped bad sample", HEAD, STEP, "KeyError: 'x'"),
        ("[W1126 12:00:00.1 train.py:9] no metrics", HEAD, STEP, "KeyError: 'x'"),
    ],
)
def test_other_errors_of_a_rank_that_ended_well_are_not(lines: tuple[str, ...]) -> None:
    """It had got over them, they ended no more than a thread, or another rank had brought them about."""
    found = ended_well(*lines)
    assert found.headline.endswith("exit code 0 while others still needed it")
    assert found.cause is not None
    assert (found.cause.ranks, found.cause.location) == ((1,), "")
    assert [one.ranks for one in found.tracebacks] == [(0,)]


def test_the_rank_with_an_error_of_its_own_is_named_of_those_that_ended_well() -> None:
    """Others had logged that they lost it; those that had nothing to log may have been needed as well."""
    lost = RankOutput(2, ("ERROR:root:training failed", HEAD, STEP, C10D_CALL, RESET), "", "", 0.0)
    found = ended_well(*CAUGHT, more=(lost, RankOutput(3, (), "", "", 0.0)))
    assert found.cause is not None
    assert found.cause.ranks == (1, 3)
    assert found.headline.endswith("while others still needed it; rank 3 ended as well, without one")
    again = ended_well(*CAUGHT, more=(RankOutput(2, CAUGHT, "", "", 0.0),))
    assert again.headline.endswith("while others still needed it; rank 2 ended after an error as well")


# --------------------------------------------------------------------------------------------------------- in a timeout


def timed_out(name: str, *collectives: RankCollectives, sleeps: bool = True) -> Diagnosis:
    """Rank 3, an evaluator, ended hours before rank 0 timed out; rank 1 sleeps."""
    ends = [end_of(3, code=0, at=100.0), end_of(0, code=1, at=10000.0)]
    ends += [end_of(rank, signum=15, at=10002.0, stopped=True) for rank in (1, 2)]
    stacks = (dump_of(1, *SLEEPING),) if sleeps else ()
    capture = Capture(stacks=stacks, collectives=collectives)
    return diagnose(evidence(*ends, outputs=(said(0, name),))._replace(capture=capture))


def of_subgroup(rank: int, number: int) -> RankCollectives:
    """The Flight Recorder of a rank that trains in a group without rank 3."""
    recorded = recorder(rank, number)
    return recorded._replace(groups=(recorded.groups[0]._replace(group="1", description="train", ranks=(0, 1, 2)),))


def test_of_several_that_had_ended_the_one_with_an_error_is_named_with_it() -> None:
    """Rank 3 had ended before rank 4, which had printed an error."""
    ends = [end_of(3, code=0, at=100.0), end_of(4, code=0, at=101.0), end_of(0, code=1, at=10000.0)]
    ends += [end_of(rank, signum=15, at=10002.0, stopped=True) for rank in (1, 2)]
    outputs = (said(0, "nccl_timeout"), RankOutput(4, CAUGHT, "", "", 0.0))
    found = diagnose(evidence(*ends, outputs=outputs)._replace(capture=Capture(stacks=(dump_of(1, *SLEEPING),))))
    assert found.headline.endswith(
        "rank 4 (node3, local rank 4, pid 4004) had ended, 11.0 s after the start: exit code 0 after it had printed "
        "ValueError: bad batch; rank 3 had ended as well"
    )
    assert found.cause is not None
    assert found.cause.ranks == (1, 3, 4)


@pytest.mark.parametrize("line", ["DEBUG skip", "INFO skipped bad sample", "WARNING no metrics"])
def test_nor_is_one_that_it_had_got_over_on_stdout(line: str) -> None:
    found = ended_well(stdout=(line, HEAD, STEP, "KeyError: 'x'"))
    assert found.headline.endswith("exit code 0 while others still needed it")


@pytest.mark.parametrize("name", ["nccl_timeout", "gloo_timeout"])
def test_a_rank_that_stays_away_comes_before_one_that_had_ended(name: str) -> None:
    """Both are named: which of them the others needed is not known."""
    found = timed_out(name)
    assert found.headline.startswith("rank 1 (node3, local rank 1, pid 4001) did not come")
    assert found.headline.endswith(
        "rank 3 (node3, local rank 3, pid 4003) had ended, 10.0 s after the start: exit code 0"
    )
    assert found.cause is not None
    assert (found.cause.ranks, found.victims) == ((1, 3), (0,))
    assert "where rank 3 was needed as well, no rank may end before" in found.cause.advice


def test_one_that_had_ended_and_is_not_of_the_group_is_not_named() -> None:
    """By the Flight Recorders the others waited in a group without it."""
    found = timed_out("nccl_timeout", of_subgroup(0, 5), of_subgroup(1, 4), of_subgroup(2, 5))
    assert found.headline.startswith("rank 1 has not called collective 5 (all_reduce) of group train")
    assert "rank 3" not in found.headline
    assert found.cause is not None
    assert found.cause.ranks == (1,)


def test_where_no_other_rank_stays_away_the_one_that_had_ended_is_the_cause() -> None:
    for found in (timed_out("nccl_timeout", sleeps=False), timed_out("gloo_timeout", sleeps=False)):
        assert found.cause is not None
        assert (found.cause.class_name, found.cause.ranks, found.victims) == ("early_exit", (3,), (0,))


# ------------------------------------------------------------------------------------------------------------ in a hang

ALL_REDUCE = (Frame("all_reduce", C10D, 3252), Frame("step", "/job/train.py", 52))
AWAY = Frame("evaluate", "/job/train.py", 41)
SLEEPS: dict[str, Any] = {"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}


def hang(*frames: Frame, **look: Any) -> Diagnosis:
    """Rank 3 has ended well, ranks 0 and 2 are in a collective, and rank 1 stands elsewhere."""
    stacks = (dump_of(0, *ALL_REDUCE), dump_of(1, *frames), dump_of(2, *ALL_REDUCE))
    looks = (look_of(0), look_of(1, **look), look_of(2))
    ended = RankEnd(3, 3, 103, ExitStatus(0, None), 9.0, 9.0, stopped_by_us=False)
    seen = Capture(processes=looks, stacks=stacks)
    return diagnose_hang(evidence_of_hang(seen, ends=(ended,), ranks=(0, 1, 2, 3)))


def test_a_living_rank_that_stays_away_is_named_with_the_one_that_has_ended() -> None:
    """Which of them the others need is not known: the one that ended may have had nothing left to do."""
    found = hang(AWAY, **SLEEPS)
    assert found.headline == (
        "the job hangs: rank 3 (node1) has ended (exit code 0), and ranks 0, 2 wait in all_reduce; rank 1 sleeps at "
        "train.py:41 in evaluate"
    )
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_early_exit", (1, 3))
    assert found.cause.location == "train.py:41 in evaluate"
    assert found.cause.advice.endswith("; else look at what keeps rank 1 away")


@pytest.mark.parametrize(
    ("frames", "look"),
    [
        ((native("cudaStreamSynchronize"), AWAY), {}),
        ((AWAY,), {"state": "R", "syscall": "", "wchan": ""}),
        ((), {"syscall": "ioctl", "wchan": ""}),
    ],
)
def test_one_that_may_wait_for_the_others_is_not_named_with_it(frames: tuple[Frame, ...], look: dict[str, Any]) -> None:
    """A call of NCCL's looks so."""
    found = hang(*frames, **look)
    assert found.headline.endswith("rank 3 (node1) has ended (exit code 0), and ranks 0, 2 wait in all_reduce")
    assert found.cause is not None
    assert found.cause.ranks == (3,)
