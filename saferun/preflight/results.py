"""What the checks before a launch found: values passed between the checks, the hosts and the report. Pure."""

from __future__ import annotations

from saferun.linux.nic import Nic
from saferun.model import Value

Pairs = tuple[tuple[str, str], ...]
"""Names and values, as they travel between hosts."""

SEVERITY: dict[str, int] = {"ok": 0, "skipped": 1, "warn": 2, "fail": 3}
"""How bad a verdict is: the worst of several counts."""

UNUSABLE = "unusable"
"""The name of a fact about something that the ranks need and cannot use; its value says what."""

HELD_BY_OLD_RANK = "held by an old rank"
"""The name of the fact that a process of the previous attempt still holds what the ranks need."""


class CheckResult(Value):
    """What one check found.

    Attributes:
        name: of the check: ``shared_memory``.
        verdict: ``ok``, ``skipped``, ``warn`` or ``fail``. ``fail`` stops a launch before its ranks are started,
            ``warn`` is printed, ``ok`` and ``skipped`` are for the report.
        message: one sentence, without a full stop, that does not begin with the host's name: "/dev/shm has 64 MiB".
        hint: what to do about it; empty where there is nothing to do.
        facts: what was read, for machines.
        duration_s: what it took.
        class_name: the class of the cause, in the diagnosis' terms, where it is a failure: ``port_in_use``.
        transient: whether it may go away by itself, so that another try may help.
        host: the host's name in the job; empty: it is about the job, or there is one host only.
    """

    name: str
    verdict: str
    message: str
    hint: str = ""
    facts: Pairs = ()
    duration_s: float = 0.0
    class_name: str = ""
    transient: bool = False
    host: str = ""


class HostInfo(Value):
    """What the leader learns of a host before the ranks are started.

    Attributes:
        label: its name in the job; filled in by the leader.
        time: seconds since the epoch when it was written.
        nics: all interfaces, candidates or not.
        gloo, nccl: names of the interfaces that gloo and NCCL would use by their own rules; ``probed``: those that the
            hosts try.
        versions: of torch, nccl, cuda, hip, driver, python, saferun …; what is not there is left out.
        script: hash of the training script; empty: there is no file.
        environ: relevant variables and their values; those of secrets and of what differs by nature are left out.
        names: what names resolve to here, each with its addresses behind it, the host's own name first; none: unknown.
        results: what this host's own checks found, the good results left out.
        backend: ``gloo`` or ``nccl`` where the ranks are certain to use it; empty: unknown.
        launch: user and script, where other jobs may look for their master at the same address; else empty.
        unanswered: its own name, where gloo would ask for it and no name server answers now; else empty.
    """

    label: str = ""
    time: float = 0.0
    nics: tuple[Nic, ...] = ()
    gloo: tuple[str, ...] = ()
    nccl: tuple[str, ...] = ()
    probed: tuple[str, ...] = ()
    versions: Pairs = ()
    script: str = ""
    environ: Pairs = ()
    names: tuple[tuple[str, ...], ...] = ()
    results: tuple[CheckResult, ...] = ()
    backend: str = ""
    launch: Pairs = ()
    unanswered: str = ""


class ProbeEndpoint(Value):
    """Where other hosts can probe a host: its listener's port and secret, and its interfaces' addresses.

    ``routes``: (interface, address) pairs to be tried, in order.
    """

    port: int
    token: str
    routes: Pairs


class ProbeTarget(Value):
    """A host to be probed. ``host``: its number in the job."""

    host: int
    label: str
    endpoint: ProbeEndpoint


class Probe(Value):
    """What came of connecting from one host to another over one interface.

    Attributes:
        source, target: host numbers.
        nic: the target's interface; ``address``: the target's address on it.
        from_nic: the interface of the source whose address was bound; empty: the system's choice.
        kind: ``ok``, ``refused``, ``timeout`` (no answer at all), ``no_route``, ``unreachable`` (network down),
            ``stranger`` (another program answers; ``self``: the source itself), ``black_hole`` (small messages come
            through and large ones do not), ``slow`` is not a kind: it is judged by numbers, ``broken`` (closed midway),
            ``silent`` (the connection is accepted, but no data is received).
        latency_s: of a small message there and back, the best of a few; 0: unknown.
        bytes_s: throughput of the large message; 0: unknown.
        message: details for people.
        retransmits: segments that were retransmitted; ``segments``: of how many that were sent. 0 of 0: unknown.
        clock_s: how far the target's clock is ahead of the source's; 0: unknown.
    """

    source: int
    target: int
    nic: str
    address: str
    from_nic: str = ""
    kind: str = "ok"
    latency_s: float = 0.0
    bytes_s: float = 0.0
    message: str = ""
    retransmits: int = 0
    segments: int = 0
    clock_s: float = 0.0


class Cell(Value):
    """How one interface of a host did.

    ``state``: the worst kind of its probes, ``slow``, ``lossy``, or ``untested``; ``ok`` of ``total`` came through.
    """

    nic: str
    state: str
    ok: int
    total: int
    latency_s: float = 0.0
    bytes_s: float = 0.0


class MatrixRow(Value):
    """A host's interfaces, as the others reach them."""

    host: str
    cells: tuple[Cell, ...]


class Preflight(Value):
    """All that the checks of a job found.

    Attributes:
        results: of all hosts and between them, the worst first.
        matrix: one row a host.
        duration_s: from the first check to the verdict.
        again: pairs of host numbers (source, target) to be measured again before there is a verdict.
        nic: the interfaces to use, where they are ambiguous and nothing was set; empty: nothing to suggest.
    """

    results: tuple[CheckResult, ...] = ()
    matrix: tuple[MatrixRow, ...] = ()
    duration_s: float = 0.0
    again: tuple[tuple[int, int], ...] = ()
    nic: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """The worst of all."""
        return max((result.verdict for result in self.results), key=SEVERITY.__getitem__, default="ok")
