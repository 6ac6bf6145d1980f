"""What NCCL's RAS subsystem adds to the diagnosis of a hang: findings by rank, and blame for nobody."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess
from saferun.evidence.job_evidence import Evidence, Frame
from tests.unit.diagnosis.recorded_hangs import C10D
from tests.unit.diagnosis.test_hang_precedence import IN_STEP, STEP, job, recorder
from tests.unit.host_samples import captured, host_evidence
from tests.unit.host_samples import job as job_of_hosts

NAME = "a7c3"


def outlier(kind: str, *ranks: int, message: str = "", is_timed: bool = True, host: str = "10.0.0.1") -> NcclOutlier:
    processes = tuple(NcclProcess(rank, host, 100 + rank) for rank in ranks)
    return NcclOutlier(NAME, 3, kind, processes, len(ranks), message, is_timed)


BEHIND = outlier("behind", 1, message="41 AllReduce, and others 42")
BEHIND_TEXT = "NCCL's RAS: rank 1 has launched 41 AllReduce, and others 42 in communicator a7c3 (3 ranks)"


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (BEHIND, BEHIND_TEXT),
        (
            outlier("dead", 2),
            "NCCL's RAS: rank 2 is considered dead: unreachable for the others in communicator a7c3 (3 ranks)",
        ),
        (outlier("unanswering", 0, 1), "NCCL's RAS: ranks 0-1 do not answer the others in communicator a7c3 (3 ranks)"),
        (
            outlier("finalizing", 1),
            "NCCL's RAS: rank 1 has begun to close communicator a7c3 (3 ranks), and others have not",
        ),
        (
            outlier("finalizing", 1)._replace(total=3),
            "NCCL's RAS: rank 1 and 2 more have begun to close communicator a7c3 (3 ranks), and others have not",
        ),
    ],
)
def test_processes_are_named_as_ranks(found: NcclOutlier, line: str) -> None:
    """A pid says nothing to whoever reads the report."""
    diagnosis = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, nccl=(found,)))
    assert any(line in shown for shown in (diagnosis.headline, *diagnosis.findings))


@pytest.mark.parametrize("kind", ["behind", "ahead", "dead", "unanswering", "finalizing", "left", "failed", "aborted"])
def test_nobody_is_blamed_by_it(kind: str) -> None:
    """Who is behind in launches may only be the first that waited for its GPU; who is silent may be cut off."""
    without = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP))
    found = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, nccl=(outlier(kind, 1, message="41 AllReduce"),)))
    assert without.cause is not None
    assert found.cause == without.cause
    assert without.cause.ranks == ()
    if kind not in {"behind", "dead", "unanswering"}:
        assert found.headline == without.headline


@pytest.mark.parametrize("is_timed", [True, False])
def test_where_no_rank_is_named_the_sentence_quotes_it(is_timed: bool) -> None:
    """And only what two answers of different times have shown."""
    without = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP))
    found = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, nccl=(BEHIND._replace(is_timed=is_timed),)))
    assert found.headline == without.headline + (f"; {BEHIND_TEXT}" if is_timed else "")
    assert (BEHIND_TEXT in found.findings) is not is_timed


def absent(*nccl: NcclOutlier) -> Evidence:
    """Rank 1 is in another call than the others, by the stacks alone."""
    other = (Frame("broadcast", C10D, 9), STEP)
    return job(IN_STEP, other, IN_STEP, nccl=nccl)


def test_what_confirms_the_cause_is_its_proof() -> None:
    """Then it need not stand among the findings."""
    found = diagnose_hang(absent(BEHIND))
    assert found.cause is not None
    assert (found.cause.ranks, found.cause.proof) == ((1,), BEHIND_TEXT)
    assert BEHIND_TEXT not in found.findings


@pytest.mark.parametrize("other", [BEHIND._replace(is_timed=False), outlier("behind", 2), outlier("finalizing", 1)])
def test_what_is_old_or_about_others_proves_nothing(other: NcclOutlier) -> None:
    """A text has no time, so that nobody knows how old it is."""
    found = diagnose_hang(absent(other))
    assert found.cause is not None
    assert (found.cause.ranks, found.cause.proof) == ((1,), "")
    assert any("NCCL's RAS" in line for line in found.findings)


def test_the_flight_recorder_counts_for_more() -> None:
    """It knows which call it is."""
    recorders = tuple(recorder(rank, "all_reduce", *["all_reduce"][: rank != 2], completed=1) for rank in range(3))
    with_it = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, recorders=recorders, nccl=(BEHIND,)))
    without = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, recorders=recorders))
    assert with_it.cause == without.cause
    assert BEHIND_TEXT in with_it.findings


def test_processes_of_nobody_are_not_named() -> None:
    """Another job of this user may answer."""
    stranger = BEHIND._replace(processes=(NcclProcess(1, "10.0.0.1", 99_999),))
    found = diagnose_hang(job(IN_STEP, IN_STEP, IN_STEP, nccl=(stranger,)))
    assert not any("NCCL's RAS" in line for line in found.findings)


def test_of_several_hosts_the_address_says_whose_pid_it_is() -> None:
    """All hosts have the same pids, and each tells the same of all ranks."""
    parts = {}
    for host in range(4):
        capture = captured(host)
        processes = tuple(
            process._replace(pid=500 + process.rank % 2) if process.is_rank else process
            for process in capture.processes
        )
        told = NcclOutlier(NAME, 8, "unanswering", (NcclProcess(5, "10.0.0.3", 501),), 1, "", is_timed=True)
        unknown = told._replace(processes=(NcclProcess(5, "10.9.9.9", 501),))
        parts[host] = host_evidence(
            host, capture=capture._replace(processes=processes, stacks=(), nccl=(told, unknown))
        )
    evidence = job_of_hosts(parts)
    from saferun.diagnosis.job_hosts import Hosts
    from saferun.diagnosis.nccl_ranks import NcclFindings

    assert NcclFindings(evidence, Hosts(evidence)).lines == (
        "NCCL's RAS: rank 5 does not answer the others in communicator a7c3 (8 ranks)",
    )
    diagnose(evidence)
