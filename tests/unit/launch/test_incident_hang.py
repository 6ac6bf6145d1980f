"""When a hang that may end by itself is certain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from saferun.diagnosis.external_waits import EXTERNAL_WAIT, GROUP_TIMEOUT
from saferun.evidence.job_evidence import Capture, GroupProgress, HangVerdict, RankCollectives
from saferun.launch.incident_hang import HangIncident


def _ignore(*_: object) -> None:
    pass


def limits(*timeouts_s: int, kind: str = "quiescent", asked: bool = False) -> list[float]:
    """After how long a hang is certain by captures of ranks that wait in calls with these timeouts; 0: unknown."""
    watch = SimpleNamespace(external_wait_s=1200.0, external_wait_asked=asked)
    launch = SimpleNamespace(job=SimpleNamespace(leads=True), config=SimpleNamespace(watch=watch))
    context: Any = SimpleNamespace(launch=launch)
    record: Any = SimpleNamespace(raised_timeout_s=0.0)
    action: Any = SimpleNamespace(number=1)
    found = []
    for timeout_s in timeouts_s:
        incident = HangIncident(context, record, action, HangVerdict(kind, (0, 1), 400.0, certain=True), _ignore)
        group = GroupProgress("nccl:0", "default_pg", (0, 1), 1, -1, 0, (), timeout_ms=timeout_s * 1000)
        evidence: Any = SimpleNamespace(
            capture=Capture(collectives=(RankCollectives(0, (group,)),) if timeout_s else ())
        )
        limit_s, by = incident._limit(evidence)
        assert by == (EXTERNAL_WAIT if limit_s == watch.external_wait_s else GROUP_TIMEOUT)
        found.append(limit_s)
    return found


def test_who_raises_the_timeout_of_a_process_group_expects_long_waits() -> None:
    """One rank waits two hours for its data: the others wait in a barrier, and the script says that they may."""
    assert limits(600, 900, 7200) == [1200.0, 1200.0, 7200.0]


def test_a_timeout_counts_in_later_captures_whose_recorders_do_not_answer() -> None:
    assert limits(7200, 0) == [7200.0, 7200.0]


def test_what_the_user_asks_of_saferun_counts_for_more_than_the_timeouts_of_groups() -> None:
    """So do heartbeats: a script that sends them says how long it may be silent."""
    assert limits(7200, asked=True) == [1200.0]
    assert limits(7200, kind="heartbeat") == [1200.0]
