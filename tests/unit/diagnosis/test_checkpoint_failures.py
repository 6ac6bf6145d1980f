"""Which rank a distributed checkpoint failed on: torch raises one exception in all that save or load together."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.host_fault import host_faults
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Evidence
from saferun.model import RankEnd
from tests.unit.host_samples import ended, host_evidence, job, traceback_of

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/distributed/checkpoint"


def raised(ranks: str, error: str = "OSError: [Errno 5] Input/output error") -> tuple[str, ...]:
    """What each rank prints where the checkpoint failed on these."""
    return (
        *traceback_of(
            f"torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([{ranks}])"
        ),
        f"Traceback (most recent call last): (RANK {ranks.partition(',')[0]})",
        f'  File "{LIBRARY}/utils.py", line 249, in all_reduce',
        "    local_data = map_fun()",
        f'  File "{LIBRARY}/filesystem.py", line 600, in write_data',
        "    fut.wait()",
        error,
    )


def evidence_of(
    said: dict[int, tuple[str, ...]], stopped: tuple[int, ...] = (), silent: tuple[int, ...] = ()
) -> Evidence:
    """A job of eight ranks on four hosts, which raise this; some were stopped, some of those had raised nothing."""

    def end_of(rank: int) -> RankEnd:
        if rank in (*stopped, *silent):
            return ended(rank, 2, after_s=33.0, signum=15, stopped=True)
        return ended(rank, 2, after_s=31.0 + rank / 100, code=1)

    parts = {}
    for host in range(4):
        ranks = (2 * host, 2 * host + 1)
        printed = {rank: tuple(f"[rank{rank}]: {line}" for line in said[rank]) for rank in ranks if rank in said}
        part = host_evidence(host, ends=[end_of(rank) for rank in ranks], said=printed)
        outputs = (output._replace(raised=rank in stopped) for rank, output in zip(ranks, part.outputs, strict=True))
        parts[host] = part._replace(outputs=tuple(outputs))
    return job(parts)


def verdict(found: Diagnosis) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    assert found.cause is not None
    return found.cause.class_name, found.cause.ranks, found.victims


def test_the_rank_that_a_checkpoint_failed_on_is_the_cause_and_no_other_host_is_at_fault() -> None:
    """All ranks were said to have failed alike, and all hosts to have a GPU with uncorrectable errors."""
    evidence = evidence_of(dict.fromkeys(range(8), raised("5", ECC)))
    found = diagnose(evidence)
    assert verdict(found) == ("gpu_hardware_error", (5,), (0, 1, 2, 3, 4, 6, 7))
    assert found.headline.startswith("rank 5 (node3, ")
    assert [fault.label for fault in host_faults(evidence, found)] == ["node3"]
    assert [peers.message for peers in found.lost_peers] == ["the distributed checkpoint failed on rank 5"]


def test_of_several_ranks_that_a_checkpoint_failed_on_all_are_named() -> None:
    found = diagnose(evidence_of(dict.fromkeys(range(8), raised("1, 6"))))
    assert verdict(found) == ("file_system_error", (1, 6), (0, 2, 3, 4, 5, 7))


@pytest.mark.parametrize("stopped", [(5,), (5, 6, 7)])
def test_a_rank_that_was_stopped_as_it_raised_that_is_the_cause_all_the_same(stopped: tuple[int, ...]) -> None:
    """It frees its memory, and ends later than the others."""
    found = diagnose(evidence_of(dict.fromkeys(range(8), raised("5")), stopped=stopped))
    assert verdict(found)[:2] == ("file_system_error", (5,))
    assert 5 not in found.victims


def test_a_number_in_a_smaller_group_is_no_rank_of_the_job() -> None:
    """Here the group has the ranks 1, 3, 5 and 7, and its number 1 is rank 3."""
    said = dict.fromkeys((1, 3, 5, 7), raised("1"))
    found = diagnose(evidence_of(said, silent=(0, 2, 4, 6)))
    assert verdict(found) == ("file_system_error", (1, 3, 5, 7), ())


def test_where_the_rank_that_is_named_has_raised_nothing_all_are_named() -> None:
    said = dict.fromkeys((0, 1, 2, 3, 4, 6, 7), raised("5"))
    found = diagnose(evidence_of(said, silent=(5,)))
    assert verdict(found) == ("file_system_error", (0, 1, 2, 3, 4, 6, 7), ())
