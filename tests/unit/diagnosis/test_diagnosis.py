"""Which rank is the root of a failure, which are its victims, and what is said of it."""

from __future__ import annotations

import math
import signal

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, OomKill, RankOutput
from saferun.model import signal_name
from tests.unit.diagnosis.failed_jobs import (
    class_of,
    dump_of,
    evidence,
    said,
)
from tests.unit.samples import end_of


def raised(rank: int, seconds: float) -> RankOutput:
    """An error file whose exception was raised at this time (``at`` of ``end_of``)."""
    return RankOutput(rank, (), "", "ValueError: no", 1.7e9 + seconds)


def first_rank(found: Diagnosis) -> int | None:
    return found.first_failure.rank if found.first_failure is not None else None


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
    """On another host, most likely: the job has ranks that this one does not."""
    outputs = (said(0, "nccl_remote_error"), said(1, "nccl_remote_error"))
    of_this_host = evidence(end_of(0, code=1, at=101.0), end_of(1, code=1, at=100.0), outputs=outputs)
    found = diagnose(of_this_host._replace(world_size=4))
    assert first_rank(found) == 1
    assert found.cause is not None
    assert found.cause.ranks == ()
    assert "not among the ranks of this host" in found.headline
    assert found.victims == (0,)


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
    assert found.headline.endswith("ranks 0-2, 4-7 failed in the same way")
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
