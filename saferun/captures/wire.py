"""The messages of a capture process: one request in, JSON lines out.

The supervisor reads what has arrived and never blocks. Both ends treat what they read as untrusted: names in stacks are
chosen by the user's script, so everything is bounded and checked, and what does not fit is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from saferun.evidence.call_evidence import RankCalls
from saferun.evidence.gpu_evidence import NcclOutlier, RankGpu
from saferun.evidence.job_evidence import (
    Capture,
    CaptureNote,
    CoreDump,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    StuckLink,
)
from saferun.evidence.wait_evidence import JobPorts
from saferun.model import JsonObject, Value
from saferun.text.decoding import loads
from saferun.text.typed_json import fit

LINE_LIMIT_BYTES = 4 << 20
"""Longer lines are dropped."""
NOT_READY = "not ready in time"
"""The failure of a capture that ran out of budget."""
NOT_READ = "it has not been read"
"""The failure of a core that has been found, until a later message has what was read in it."""
DEAD_FILE_SYSTEM = "the file system at "
"""The beginning of a failure that is due to a hung file system."""
EVERYTHING = "everything"
"""What is unfinished if nothing was received at all."""
_VALUES_LIMIT = 16384
_LINES_LIMIT = 512
LONGEST_RECORDING_S = 600.0
"""How long a recording of ranks may last."""
FASTEST_RECORDING = 1000
"""How many samples a second it may have."""
MOST_RECORDED = 64
"""Of how many ranks there may be one at a time."""


# ------------------------------------------------------------------------------------------------------------- requests


class CaptureTarget(Value):
    """One rank to capture, with its descendants.

    ``hook_prefix`` is the rank's ``SAFERUN_HOOK``; empty without a hook.
    """

    rank: int
    pid: int
    hook_prefix: str = ""


class CaptureRequest(Value):
    """What to capture, and in how much detail.

    Attributes:
        targets: the living ranks.
        directory: where the files go; it exists. Empty: no files.
        budget_s: after this many seconds the process ends, complete or not.
        native: native frames of live processes: ``auto`` (of a few ranks in C code), ``always``, ``never``.
        strace: whether to count system calls for a second.
        gpu: whether there may be GPUs to query.
        since: seconds since the epoch; older lines of the kernel log are ignored.
        nccl: whether to ask NCCL's RAS subsystem, which takes seconds: of a hang, where there may be GPUs.
        is_certain: whether it is certain that the ranks hang, so that it disturbs nothing to stop one for seconds.
        is_asked: whether a user only asks for stacks, maybe of a healthy job: no rank is sent a signal or, unless
            native frames are wanted, stopped.
        calls: whether the ranks record their last calls.
    """

    targets: tuple[CaptureTarget, ...]
    directory: str = ""
    budget_s: float = 20.0
    native: str = "auto"
    strace: bool = False
    gpu: bool = True
    since: float = 0.0
    nccl: bool = False
    is_certain: bool = False
    is_asked: bool = False
    calls: bool = False


class DeadProcess(Value):
    """A rank that a signal killed. ``cwd`` and ``executable`` are empty if unknown.

    ``directory`` is where libraries write logs of this rank; empty: nowhere.
    """

    rank: int
    pid: int
    signum: int
    cwd: str = ""
    executable: str = ""
    directory: str = ""


class RecorderFile(Value):
    """Where a rank that has ended may have written its Flight Recorder."""

    rank: int
    pid: int
    path: str


class DeadCalls(Value):
    """A rank that has ended, and may have recorded its last calls. ``ended_at``: in monotonic seconds."""

    rank: int
    pid: int
    hook_prefix: str
    ended_at: float


class CoreRequest(Value):
    """What of dead ranks to find: cores, files of the Flight Recorder, and last calls.

    Attributes:
        dead: the ranks that died and may have left a core.
        directory: where the files go; it exists. Empty: no files.
        mode: ``backtrace`` (the core is deleted once its stacks are read) or ``keep``.
        keep: how many cores may be kept.
        gdb: whether to run gdb even if pystack succeeds.
        budget_s: after this many seconds the process ends, complete or not.
        since: seconds since the epoch; older cores and lines of the kernel log are ignored.
        recorders: where ranks that have ended may have written their Flight Recorders.
        calls: ranks that have ended, where they record their last calls.
        may_delete: whether there are cores only because the ranks raised the limit on them for saferun; others are the
            user's.
    """

    dead: tuple[DeadProcess, ...]
    directory: str = ""
    mode: str = "backtrace"
    keep: int = 1
    gdb: bool = False
    budget_s: float = 60.0
    since: float = 0.0
    recorders: tuple[RecorderFile, ...] = ()
    calls: tuple[DeadCalls, ...] = ()
    may_delete: bool = True


class HostCapture(Value):
    """A capture of the host as a whole.

    ``lines`` are ready to print, ``content`` goes to the capture's file, ``failure`` says in one line why there is
    none.
    """

    lines: tuple[str, ...]
    content: JsonObject
    failure: str = ""


def request_value(request: CaptureRequest | CoreRequest) -> JsonObject:
    """A request as JSON."""
    return {"kind": "cores" if isinstance(request, CoreRequest) else "live", "value": request._asdict()}


def request_from(message: object) -> CaptureRequest | CoreRequest:
    """The inverse of :func:`request_value`.

    Raises:
        ValueError: it is not a request.
    """
    if not isinstance(message, dict):
        raise ValueError("a request is a JSON object")  # noqa: TRY004 - what was read is wrong, not the caller
    shape = CoreRequest if message.get("kind") == "cores" else CaptureRequest
    request: CaptureRequest | CoreRequest = fit(shape, message.get("value"))
    return request


# -------------------------------------------------------------------------------------------------------------- results


class Begun(Value):
    """A capture has begun; the :class:`CaptureNote` of the same name, rank and process ends it."""

    capture: str
    rank: int
    pid: int


class CoresFound(Value):
    """Cores that are about to be read, which takes a while: their ranks and total size."""

    ranks: tuple[int, ...]
    size_bytes: int

    @property
    def message(self) -> str:
        """``reading the core of rank 1 (245 MiB) …``."""
        numbers = ", ".join(map(str, self.ranks))
        whose = f"cores of ranks {numbers}" if len(self.ranks) > 1 else f"core of rank {numbers}"
        return f"reading the {whose} ({self.size_bytes / (1 << 20):.0f} MiB) …"


class LibraryLog(Value):
    """What a library of a rank has written into a log file of its own."""

    rank: int
    lines: tuple[str, ...]


class Done(Value):
    """The last message."""

    elapsed_s: float = 0.0


_SHAPES: dict[str, type] = {
    "snapshot": ProcessSnapshot,
    "stack": StackDump,
    "collectives": RankCollectives,
    "calls": RankCalls,
    "host_line": str,
    "kernel_line": str,
    "begun": Begun,
    "note": CaptureNote,
    "cores_found": CoresFound,
    "core": CoreDump,
    "oom": OomKill,
    "link": StuckLink,
    "gpu": RankGpu,
    "nccl": NcclOutlier,
    "library_log": LibraryLog,
    "ports": JobPorts,
    "unwritten": str,
    "done": Done,
}


def encode(kind: str, value: Any = None) -> bytes:  # noqa: ANN401 - depends on the kind
    """One line: ``{"kind": "snapshot", "value": {...}}``. ``value`` has the kind's shape, or is None for ``done``."""
    fields = value._asdict() if hasattr(value, "_asdict") else value
    return json.dumps({"kind": kind} if value is None else {"kind": kind, "value": fields}).encode() + b"\n"


class CaptureReader:
    """Reads the output of a capture process, in chunks.

    Attributes:
        is_done: whether the process has reported that it is done.
        on_cores_found: called with cores that are about to be read.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.on_cores_found: Callable[[CoresFound], None] | None = None
        self._rest = b""
        self._skipping = False
        self._values: dict[str, list[Any]] = {kind: [] for kind in _SHAPES}

    def feed(self, content: bytes) -> None:
        """Process a chunk. Malformed or too long lines are dropped."""
        *lines, rest = (self._rest + content).split(b"\n")
        for line in lines:
            if self._skipping:
                self._skipping = False
            elif len(line) <= LINE_LIMIT_BYTES:
                self._take(line)
        if len(rest) > LINE_LIMIT_BYTES:
            self._skipping = True
        self._rest = b"" if self._skipping else rest

    @property
    def capture(self) -> Capture:
        """All that has been received so far. ``unfinished`` names what has begun and not ended."""
        snapshots: list[ProcessSnapshot] = self._values["snapshot"]
        done: list[Done] = self._values["done"]
        notes: list[CaptureNote] = self._values["note"]
        return Capture(
            # A later snapshot of the same process has more.
            tuple({(one.rank, one.pid): one for one in snapshots}.values()),
            tuple(self._values["stack"]),
            tuple(self._values["collectives"]),
            tuple(self._values["host_line"]),
            tuple(notes),
            self._unfinished(),
            done[-1].elapsed_s if done else 0.0,
            tuple(self._values["link"]),
            tuple(dict.fromkeys(self._values["gpu"])),
            self.kernel_lines,
            tuple(self._values["nccl"]),
            tuple(self._values["ports"]),
            tuple(self._values["calls"]),
        )

    @property
    def cores(self) -> tuple[CoreDump, ...]:
        """The cores that were examined so far, then those that were only found."""
        examined: list[CoreDump] = []
        waiting: dict[tuple[int, int], list[CoreDump]] = {}
        found: list[CoreDump] = self._values["core"]
        for one in found:
            of_process = waiting.setdefault((one.rank, one.pid), [])
            if one.failure == NOT_READ:
                of_process.append(one)
            else:
                examined.append(one)
                del of_process[:1]
        return (*examined, *(one for of_process in waiting.values() for one in of_process))

    def add_cores(self, other: CaptureReader) -> None:
        """Add the cores that another process has read for the same request: what it has deleted is not found again."""
        own = {(core.rank, core.pid) for core in self.cores if core.threads}
        read = {(core.rank, core.pid): core for core in other.cores if core.threads}
        added = {process: core for process, core in read.items() if process not in own}
        kept = [core for core in self._values["core"] if (core.rank, core.pid) not in added]
        self._values["core"] = [*added.values(), *kept]

    @property
    def oom(self) -> OomKill | None:
        """The OOM killer's kill, if any."""
        found: list[OomKill] = self._values["oom"]
        return found[0] if found else None

    @property
    def kernel_lines(self) -> tuple[str, ...]:
        """Lines of the kernel log."""
        return tuple(self._values["kernel_line"])

    @property
    def library_logs(self) -> tuple[LibraryLog, ...]:
        """What libraries have written into log files of their own."""
        return tuple(self._values["library_log"])

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The names of files that could not be written."""
        return tuple(self._values["unwritten"])

    def _unfinished(self) -> tuple[str, ...]:
        if not any(self._values.values()):
            return (EVERYTHING,)
        begun: list[Begun] = self._values["begun"]
        notes: list[CaptureNote] = self._values["note"]
        ended = {(note.capture, note.rank, note.pid) for note in notes if note.failure != NOT_READY}
        waited_for = [
            *begun,
            *(Begun(note.capture, note.rank, note.pid) for note in notes if note.failure == NOT_READY),
        ]
        return tuple(dict.fromkeys(unfinished_text(one) for one in waited_for if tuple(one) not in ended))

    def _take(self, line: bytes) -> None:
        try:
            message = loads(line)
            kind = message["kind"]
            kept = self._values[kind]
            value = fit(_SHAPES[kind], message.get("value", {}))
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        if kind == "done":
            self.is_done = True
        elif kind == "cores_found" and self.on_cores_found is not None:
            self.on_cores_found(value)
        if len(kept) < (_LINES_LIMIT if _SHAPES[kind] is str else _VALUES_LIMIT):
            kept.append(value)


def unfinished_text(begun: Begun) -> str:
    """``py_spy of rank 3``, ``py_spy of rank 3 (pid 4711)``, ``gpu_nvidia``."""
    if begun.rank < 0:
        return begun.capture
    return f"{begun.capture} of rank {begun.rank}" + (f" (pid {begun.pid})" if begun.pid else "")
