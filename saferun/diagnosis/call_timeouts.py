"""How long the calls that ranks wait in may last, by the timeout of their process group. Pure.

Who sets one that is longer than a backend's default (``init_process_group(timeout=)``, ``new_group(timeout=)``) expects
a rank to come to a call that late. As long as this is possible, no hang is certain that may end by itself. Where no
backend or several are given, torch gives NCCL the longer default of gloo; it waits that long then, so it counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.diagnosis.process_groups import OF_GPUS
from saferun.evidence.job_evidence import RankCollectives

_DEFAULT_S = 1800.0
_DEFAULT_ON_GPUS_S = 600.0


def raised_timeout_s(collectives: Iterable[RankCollectives]) -> float:
    """The longest timeout of calls that are not over, in seconds; 0.0 where none is longer than torch's default."""
    longest_s = 0.0
    for group in (group for one in collectives for group in one.groups):
        timeout_s = group.timeout_ms / 1000
        default_s = _DEFAULT_ON_GPUS_S if group.group.partition(":")[0] in OF_GPUS else _DEFAULT_S
        if timeout_s > default_s:
            longest_s = max(longest_s, timeout_s)
    return longest_s
