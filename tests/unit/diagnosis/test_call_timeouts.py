"""How long calls may last by the timeouts that scripts set."""

from __future__ import annotations

import pytest

from saferun.diagnosis.call_timeouts import raised_timeout_s
from saferun.evidence.job_evidence import GroupProgress, RankCollectives


def recorder(rank: int, *groups: tuple[str, float]) -> RankCollectives:
    """The backends that a rank has calls of, and the longest timeout of those that are not over, in seconds."""
    return RankCollectives(
        rank,
        tuple(
            GroupProgress(f"{backend}:{name}", "", (), 1, -1, 0, (), timeout_ms=int(timeout_s * 1000))
            for name, (backend, timeout_s) in enumerate(groups)
        ),
    )


@pytest.mark.parametrize(
    ("backend", "timeout_s", "expected"),
    [
        ("gloo", 1800, 0.0),
        ("gloo", 1801, 1801.0),
        ("nccl", 600, 0.0),
        ("nccl", 7200, 7200.0),
        ("nccl2", 7200, 7200.0),
        ("gloo", 60, 0.0),
        ("gloo", -0.001, 0.0),
    ],
)
def test_a_timeout_counts_where_it_is_longer_than_torch_s_default(
    backend: str, timeout_s: float, expected: float
) -> None:
    """Else nobody has asked for patience: torch itself ends the ranks then."""
    assert raised_timeout_s([recorder(0, (backend, timeout_s))]) == expected


def test_the_longest_of_all_ranks_and_groups_counts() -> None:
    assert raised_timeout_s([recorder(0, ("nccl", 600), ("nccl", 900)), recorder(1, ("gloo", 5400))]) == 5400.0
    assert raised_timeout_s([]) == 0.0
