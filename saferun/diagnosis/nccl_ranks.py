"""What NCCL's RAS subsystem knows of the ranks: processes of hosts -> ranks, in words. Pure.

It is no reason to blame a rank: it confirms a cause that other evidence has shown, and where no rank is the cause it is
quoted in the sentence. It counts launched calls:
while a call hangs that all ranks have launched no rank is behind; and who is behind may be the one that waited for its
GPU first. A process that RAS does not reach may be cut off itself, or be reached through one that is.
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judgement import Judgement
from saferun.evidence.gpu_evidence import NcclOutlier, NcclProcess
from saferun.evidence.job_evidence import Evidence
from saferun.model import Value
from saferun.text.wording import ranks_text

_SHOWN_LINES = 6
_LOST = frozenset({"dead", "unanswering"})
_PROOFS = frozenset({*_LOST, "behind"})
_NAMELESS = frozenset({"hang_all_in_collective", "hang_unknown", "network_between_hosts"})


class NcclFinding(Value):
    """An outlier by its ranks, in words."""

    ranks: tuple[int, ...]
    kind: str
    message: str
    is_timed: bool


class NcclFindings:
    """What is about ranks of this job."""

    def __init__(self, evidence: Evidence, hosts: Hosts) -> None:
        self._hosts = hosts
        self._ranks: dict[int, set[int]] = {}
        capture = evidence.capture
        owners = [(one.pid, one.rank) for one in capture.processes]
        owners += [(one.pid, one.rank) for one in capture.stacks]
        owners += [(one.pid, one.rank) for one in evidence.ends]
        for pid, rank in owners:
            self._ranks.setdefault(pid, set()).add(rank)
        known: dict[str, NcclFinding] = {}
        for outlier in capture.nccl:
            ranks = sorted({rank for process in outlier.processes for rank in self._rank_of(process)})
            if ranks:
                message = _message(outlier, ranks)
                known.setdefault(message, NcclFinding(tuple(ranks), outlier.kind, message, outlier.is_timed))
        self._found = tuple(known.values())

    @property
    def lines(self) -> tuple[str, ...]:
        """What to show."""
        return tuple(one.message for one in self._found[:_SHOWN_LINES])

    def proof(self, ranks: Iterable[int]) -> str:
        """What confirms that these ranks hold up the others; empty where nothing does."""
        named = {*ranks}
        return next((one.message for one in self._proofs if named.issuperset(one.ranks)), "")

    def quoted(self, judgement: Judgement) -> Judgement:
        """The judgement, with what is known of a rank where it names none."""
        line = next((one.message for one in self._proofs), "")
        if not line or judgement.cause.ranks or judgement.cause.class_name not in _NAMELESS:
            return judgement
        return judgement._replace(headline=f"{judgement.headline}; {line}")

    @property
    def _proofs(self) -> Iterable[NcclFinding]:
        return (one for one in self._found if one.is_timed and one.kind in _PROOFS)

    def _rank_of(self, process: NcclProcess) -> set[int]:
        """The rank of a process; empty where it is not known, or several have its number."""
        ranks = self._ranks.get(process.pid, set())
        if self._hosts.are_several:
            host = self._hosts.at_address(process.host)
            ranks = {rank for rank in ranks if host is not None and self._hosts.of(rank) == host}
        return ranks if len(ranks) == 1 else set()


def _message(outlier: NcclOutlier, ranks: list[int]) -> str:
    who = ranks_text(ranks)
    if len(ranks) < outlier.total:
        who += f" and {outlier.total - len(ranks)} more"
    is_one = outlier.total == 1
    does, has, is_ = ("does", "has", "is") if is_one else ("do", "have", "are")
    group = f" communicator {outlier.communicator}" if outlier.communicator else " the communicators"
    if outlier.size:
        group += f" ({outlier.size} ranks)"
    what = {
        "dead": f"{is_} considered dead: unreachable for the others in{group}",
        "unanswering": f"{does} not answer the others in{group}",
        "failed": f"{has} an error in{group}",
        "finalizing": f"{has} begun to close{group}, and others have not",
        "aborted": f"{has} aborted{group}, and others have not",
        "left": f"{has} left{group}, and others have not",
        "behind": f"{has} launched {outlier.message} in{group}",
        "ahead": f"{has} launched {outlier.message} in{group}",
    }.get(outlier.kind, f"{is_} unlike the others in{group}")
    return f"NCCL's RAS: {who} {what}"
