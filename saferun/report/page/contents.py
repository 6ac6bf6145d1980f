"""What the page takes from report.json and preflight.json, as values. Pure.

No file of a run directory is trusted: whoever sends it may have written them. What does not fit is left out.
"""

from __future__ import annotations

from typing import Annotated, Any

from saferun.model import Value
from saferun.report.report_values import BadHostRow, CauseOrNone, Decision, Launch, RankFailure, Ranks
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit_or, list_of

LONGEST_FILE = 8 << 20
MOST_ROWS = 20_000


# ---------------------------------------------------------------------------------------------------------- report.json


class VerdictPart(Value):
    """``verdict`` of an incident."""

    kind: str = ""
    ranks: Ranks = ()
    stalled_s: float | None = None
    certain: bool = False
    busy_ranks: Ranks = ()


class LostPeerPart(Value):
    """Ranks that failed only because another one had."""

    ranks: Ranks = ()
    message: str = ""
    call: str = ""
    location: str = ""


class WaitGroupPart(Value):
    """Ranks that wait in the same thing."""

    kind: str = ""
    detail: str = ""
    ranks: Ranks = ()
    location: str = ""


class FramePart(Value):
    """One call."""

    function: str = ""
    file: str = ""
    line: int = 0
    native: bool = False


class BranchPart(Value):
    """Calls of the same ranks."""

    parent: int | None = None
    ranks: Ranks = ()
    frames: tuple[FramePart, ...] = ()
    frames_omitted: int = 0


class TracebackPart(Value):
    """A traceback that these ranks printed alike."""

    ranks: Ranks = ()
    lines: tuple[str, ...] = ()


class CoreSection(Value):
    """What became of a core."""

    rank: int
    pid: int = 0
    signal: str = ""
    path: str = ""
    size_bytes: int = 0
    kept: bool = False
    tool: str = ""
    crashing_thread: tuple[FramePart, ...] = ()
    address: str = ""
    failure: str = ""


class OomPart(Value):
    """The OOM killer."""

    scope: str = ""
    limit_bytes: int | None = None
    rss_bytes: int | None = None
    kills: int = 0
    source: str = ""
    host: str = ""


class ConnectionPart(Value):
    """A connection with unacknowledged data."""

    rank: int
    local: str = ""
    remote: str = ""
    state: str = ""
    send_queue_bytes: int = 0
    retransmits: int = 0


class ProcessPart(Value):
    """A process as /proc showed it."""

    rank: int
    pid: int = 0
    is_rank: bool = True
    name: str = ""
    state: str = ""
    wchan: str = ""
    syscall: str = ""
    waits_on: str = ""
    threads: int = 0
    rss_bytes: int = 0
    cpu_s: float | None = None


class CallPart(Value):
    """A collective."""

    seq: int = -1
    op: str = ""
    sizes: str = ""
    retired: bool = False
    failed: bool = False
    is_p2p: bool = False


class ProgressPart(Value):
    """How far a rank is in a process group."""

    group: str = ""
    description: str = ""
    enqueued: int = -1
    started: int = -1
    completed: int = -1
    last_call: CallPart | None = None


class RecorderPart(Value):
    """The Flight Recorder of a rank."""

    rank: int
    failure: str = ""
    incomplete: str = ""
    groups: tuple[ProgressPart, ...] = ()


class CapturePart(Value):
    """What became of a capture."""

    capture: str = ""
    rank: int | None = None
    failure: str = ""
    host: str = ""


class HostSection(Value):
    """A host of several."""

    name: str = ""
    ranks: Ranks = ()
    has_evidence: bool = True
    lost_reason: str = ""
    lost_message: str = ""


class StepPart(Value):
    """What ranks last reported by ``saferun.step``."""

    ranks: Ranks = ()
    text: str = ""


class EventPart(Value):
    """A call, its end, or a line."""

    kind: str = ""
    function: str = ""
    file: str = ""
    line: int = 0
    before_s: float = 0.0


class ThreadPart(Value):
    """The newest calls of a thread."""

    tid: int = 0
    is_main: bool = False
    total: int = 0
    events: Annotated[tuple[EventPart, ...], list_of(EventPart, 1000, skips=True)] = ()


class CallsPart(Value):
    """The last calls of a rank."""

    rank: int
    pid: int = 0
    has_ended: bool = False
    note: str = ""
    failure: str = ""
    threads: Annotated[tuple[ThreadPart, ...], list_of(ThreadPart, 100, skips=True)] = ()


class IncidentPart(Value):
    """A hang or a failure."""

    kind: str
    host: str = ""
    attempt: int = 0
    start_stage: str = ""
    time: float | None = None
    capture_dir: str = ""
    headline: str = ""
    hint: str = ""
    verdict: VerdictPart | None = None
    cause: CauseOrNone = None
    first_failure: RankFailure | None = None
    also_failed: Annotated[tuple[RankFailure, ...], list_of(RankFailure, MOST_ROWS, skips=True)] = ()
    victims: Ranks = ()
    lost_peers: Annotated[tuple[LostPeerPart, ...], list_of(LostPeerPart, MOST_ROWS, skips=True)] = ()
    stopped: Ranks = ()
    hosts: Annotated[tuple[HostSection, ...], list_of(HostSection, MOST_ROWS, skips=True)] = ()
    wait_groups: Annotated[tuple[WaitGroupPart, ...], list_of(WaitGroupPart, MOST_ROWS, skips=True)] = ()
    tree: Annotated[tuple[BranchPart, ...], list_of(BranchPart, MOST_ROWS)] = ()
    tracebacks: Annotated[tuple[TracebackPart, ...], list_of(TracebackPart, MOST_ROWS, skips=True)] = ()
    findings: tuple[str, ...] = ()
    cores: Annotated[tuple[CoreSection, ...], list_of(CoreSection, MOST_ROWS, skips=True)] = ()
    oom: OomPart | None = None
    kernel_log: tuple[str, ...] = ()
    host_status: tuple[str, ...] = ()
    stuck_connections: Annotated[tuple[ConnectionPart, ...], list_of(ConnectionPart, MOST_ROWS, skips=True)] = ()
    processes: Annotated[tuple[ProcessPart, ...], list_of(ProcessPart, MOST_ROWS, skips=True)] = ()
    collectives: Annotated[tuple[RecorderPart, ...], list_of(RecorderPart, MOST_ROWS, skips=True)] = ()
    last_steps: Annotated[tuple[StepPart, ...], list_of(StepPart, MOST_ROWS, skips=True)] = ()
    last_calls: Annotated[tuple[CallsPart, ...], list_of(CallsPart, MOST_ROWS, skips=True)] = ()
    captures: Annotated[tuple[CapturePart, ...], list_of(CapturePart, MOST_ROWS, skips=True)] = ()
    timed_out: tuple[str, ...] = ()
    outcome: str = ""
    recovered_after_s: float | None = None
    truncated: tuple[str, ...] = ()

    @property
    def culprits(self) -> frozenset[int]:
        """The ranks that are the cause."""
        if self.cause is not None and self.cause.ranks:
            return frozenset(self.cause.ranks)
        return frozenset({self.first_failure.rank} if self.first_failure is not None else ())


class SlowPart(Value):
    """Ranks that the others waited for."""

    time: float | None = None
    attempt: int = 0
    host: str = ""
    ranks: Ranks = ()
    waited: float | None = None
    others_waited: float | None = None
    window_s: float | None = None
    console_lines: tuple[str, ...] = ()


class PairPart(Value):
    """A name and its value."""

    name: str
    value: str = ""


class ResultPart(Value):
    """What a check found."""

    check: str
    verdict: str = ""
    host: str = ""
    message: str = ""
    hint: str = ""
    facts: Annotated[tuple[PairPart, ...], list_of(PairPart, MOST_ROWS, skips=True)] = ()


class CellPart(Value):
    """An interface of a host as others reach it."""

    nic: str
    state: str = ""
    ok: int = 0
    total: int = 0
    latency_s: float | None = None
    bytes_per_s: float | None = None


class MatrixRowPart(Value):
    """A host's interfaces as others reach them."""

    host: str
    interfaces: tuple[CellPart, ...] = ()


class HostInfoPart(Value):
    """A host as it describes itself."""

    name: str = ""
    versions: tuple[PairPart, ...] = ()
    script: str = ""
    environ: tuple[PairPart, ...] = ()
    gloo: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()


class PreflightSection(Value):
    """The checks before a start."""

    verdict: str = ""
    duration_s: float | None = None
    nic: tuple[str, ...] = ()
    results: Annotated[tuple[ResultPart, ...], list_of(ResultPart, MOST_ROWS, skips=True)] = ()
    matrix: Annotated[tuple[MatrixRowPart, ...], list_of(MatrixRowPart, MOST_ROWS, skips=True)] = ()
    hosts: Annotated[tuple[HostInfoPart, ...], list_of(HostInfoPart, MOST_ROWS, skips=True)] = ()


class ReportPart(Value):
    """report.json."""

    schema: str = ""
    saferun_version: str = ""
    run: Launch = Launch()
    preflight: PreflightSection | None = None
    decisions: Annotated[tuple[Decision, ...], list_of(Decision, MOST_ROWS, skips=True)] = ()
    decisions_omitted: int = 0
    incidents: Annotated[tuple[IncidentPart, ...], list_of(IncidentPart, 200, skips=True)] = ()
    incidents_omitted: int = 0
    slow_ranks: Annotated[tuple[SlowPart, ...], list_of(SlowPart, 200, skips=True)] = ()
    bad_hosts: Annotated[tuple[BadHostRow, ...], list_of(BadHostRow, MOST_ROWS, skips=True)] = ()
    bad_hosts_omitted: int = 0


# ----------------------------------------------------------------------------------------------------------- decoding


def decode_report(content: bytes) -> ReportPart | None:
    """report.json; None where it is none."""
    report: ReportPart | None = _decoded(ReportPart, content)
    return report


def decode_preflight(content: bytes) -> PreflightSection | None:
    """preflight.json; None where it is none."""
    preflight: PreflightSection | None = _decoded(PreflightSection, content)
    return preflight


def decoded_object(content: bytes) -> dict[str, Any] | None:
    """JSON that is an object; None for anything else."""
    try:
        raw = loads(content, longest=LONGEST_FILE)
    except MALFORMED:
        return None
    return raw if isinstance(raw, dict) else None


def _decoded(shape: Any, content: bytes) -> Any:  # noqa: ANN401 - of the shape
    raw = decoded_object(content)
    return fit_or(shape, raw, None) if raw is not None else None
