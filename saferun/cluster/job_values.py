"""What a host knows of its job."""

from __future__ import annotations

from saferun.model import JsonObject, Placement, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from saferun.cluster.join_messages import HostInfoText, ProbeTarget, Replacement
    from saferun.cluster.progress import ObservedRank
    from saferun.errors import SaferunError
    from saferun.supervisor.events import Event


class EvidenceChunk(Value):
    """Evidence that a task handed in.

    ``offset_s``: to be added to its times. ``measured``: whether that is exact, or as good as the moment at which the
    chunk came.
    """

    host: int
    task: int
    label: str
    offset_s: float
    moved: bool
    stopped: bool
    evidence: str
    measured: bool = False


class LostHost(Value):
    """A host that does not answer any more. ``why``: ``gone``, ``unreachable``, ``cut``, ``frozen``, ``unknown``.

    ``why`` and ``message`` as in :class:`~saferun.evidence.job_evidence.HostView`.
    """

    host: int
    label: str
    why: str
    message: str
    ranks: tuple[int, ...]


class Assignment(Value):
    """This process's ranks and role in the job, as the hosts agreed on them.

    Attributes:
        placement: its ranks.
        number: the job's number of the attempt.
        leads: whether this host decides for the job.
        may_leave: whether the job goes on without this host.
        files: the name of the run directory on all hosts.
        checked: whether the hosts probe each other before the ranks are started.
        probe_endpoints: the hosts that this one is to probe.
        host_infos: what all hosts found out about themselves, with their probe endpoints; for the leader.
        spares: the names of the hosts that wait to take the place of one; for the leader all of them.
        replacements: which hosts have lost their places to spares without a decision; likewise.
        has_begun: whether some of the hosts have met before: the job may have run without this one.
        needed: the numbers of the hosts without which the others cannot meet again; for the leader.
    """

    placement: Placement
    number: int
    leads: bool
    may_leave: bool
    files: str
    checked: bool = False
    probe_endpoints: tuple[ProbeTarget, ...] = ()
    host_infos: tuple[HostInfoText, ...] = ()
    spares: tuple[str, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    has_begun: bool = False
    needed: tuple[int, ...] = ()


class AbortReason(Value):
    """Why an attempt ends on all hosts, with the fields of ``evidence.AbortReason``."""

    reason: str
    label: str
    message: str
    rank: int | None
    lost_reason: str
    hint: str = ""


class JobCallbacks(Value):
    """What a job calls.

    Attributes:
        post: takes events.
        attempt: returns the attempt that is current.
        on_assigned: takes this process's ranks when the hosts have met.
        on_prepared: takes what only torch knows of an attempt, when all is ready for its ranks.
        on_prepare_failed: takes why torch cannot answer.
        on_preflight: takes the leader's messages about the preflight checks.
        on_torch: takes torch's version, where this host is alone.
        on_stderr: takes whole lines that torch's event handlers write to stderr.
        print_line: takes a line for the user.
        ranks: returns the ranks of this process that run.
        set_status: shows what is waited for, and for how many seconds, where a line can change in place; None: it is
            over. Returns whether it is shown.
    """

    post: Callable[[Event], None]
    attempt: Callable[[], int]
    on_assigned: Callable[[Assignment], None]
    on_prepared: Callable[[JsonObject], None]
    on_prepare_failed: Callable[[SaferunError], None]
    on_preflight: Callable[[JsonObject], None]
    on_torch: Callable[[str], None]
    on_stderr: Callable[[bytes], None]
    print_line: Callable[[str], None]
    ranks: Callable[[], Sequence[ObservedRank]]
    set_status: Callable[[str | None, int], bool] = lambda _text, _waited_s: False
