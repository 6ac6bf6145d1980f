"""What is asked of a capture process, and what it answers: one request in, JSON lines out.

The process looks, the supervisor reads what has come so far and never waits. Both ends take what they read for
untrusted: stacks are made of names that the user's script chose, so everything is bounded and checked, and what does
not fit is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from saferun.evidence import (
    Capture,
    CaptureNote,
    CoreDump,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    RankGpu,
    StackDump,
    StuckLink,
)
from saferun.model import JsonObject, Value
from saferun.text.decoding import loads
from saferun.text.typed_json import fit

LINE_LIMIT_BYTES = 4 << 20
"""A longer line is dropped whole."""
NOT_READY = "not ready in time"
"""The failure of a capture that the budget did not suffice for."""
DEAD_FILE_SYSTEM = "the file system at "
"""How the failure begins of a capture that a file system kept from its work."""
EVERYTHING = "everything"
"""What is unfinished where nothing has come at all."""
_VALUES_LIMIT = 16384
_LINES_LIMIT = 512


# ------------------------------------------------------------------------------------------------------------- requests


class Target(Value):
    """One rank to look at, with everything that descends from it.

    ``hook_prefix`` is the rank's ``SAFERUN_HOOK``; empty where there is no hook.
    """

    rank: int
    pid: int
    hook_prefix: str = ""


class Request(Value):
    """What to look at, and how closely.

    Attributes:
        targets: the ranks that live.
        directory: where the files go; it exists. Empty: no files.
        budget_s: after so many seconds the process ends, ready or not.
        native: native frames of live processes: ``auto`` (of a few ranks that stand in C code), ``always``, ``never``.
        strace: whether to count system calls for a second.
        gpu: whether there may be GPUs to be asked.
        since: seconds since the epoch; older lines of the kernel log are not looked at.
    """

    targets: tuple[Target, ...]
    directory: str = ""
    budget_s: float = 20.0
    native: str = "auto"
    strace: bool = False
    gpu: bool = True
    since: float = 0.0


class DeadProcess(Value):
    """A rank that a signal killed. ``cwd`` and ``executable`` are empty where unknown."""

    rank: int
    pid: int
    signum: int
    cwd: str = ""
    executable: str = ""


class CoreRequest(Value):
    """Whose cores to look for.

    Attributes:
        dead: the ranks that died.
        directory: where the files go; it exists. Empty: no files.
        mode: ``backtrace`` (the core is deleted once its stacks are read) or ``keep``.
        keep: how many cores may be kept.
        gdb: whether gdb is to be asked even where pystack has answered.
        budget_s: after so many seconds the process ends, ready or not.
        since: seconds since the epoch; older cores and older lines of the kernel log are other people's.
    """

    dead: tuple[DeadProcess, ...]
    directory: str = ""
    mode: str = "backtrace"
    keep: int = 1
    gdb: bool = False
    budget_s: float = 60.0
    since: float = 0.0


class HostCapture(Value):
    """What one look at the host as a whole gave.

    ``lines`` are ready to be shown, ``content`` goes into the capture's file, ``failure`` says in one line why there is
    nothing.
    """

    lines: tuple[str, ...]
    content: JsonObject
    failure: str = ""


def request_value(request: Request | CoreRequest) -> JsonObject:
    """A request as JSON has it."""
    return {"kind": "cores" if isinstance(request, CoreRequest) else "live", "value": request._asdict()}


def request_from(message: object) -> Request | CoreRequest:
    """The other end of :func:`request_value`.

    Raises:
        ValueError: it is no request.
    """
    if not isinstance(message, dict):
        raise ValueError("a request is a JSON object")  # noqa: TRY004 - what was read is wrong, not the caller
    shape = CoreRequest if message.get("kind") == "cores" else Request
    request: Request | CoreRequest = fit(shape, message.get("value"))
    return request


# -------------------------------------------------------------------------------------------------------------- results


class Begun(Value):
    """A capture has begun; the :class:`CaptureNote` of the same name, rank and process ends it."""

    capture: str
    rank: int
    pid: int


class CoresFound(Value):
    """Cores that are about to be read, which takes a while: whose, and how large they are together."""

    ranks: tuple[int, ...]
    size_bytes: int

    @property
    def words(self) -> str:
        """``reading the core of rank 1 (245 MiB) …``."""
        numbers = ", ".join(map(str, self.ranks))
        whose = f"cores of ranks {numbers}" if len(self.ranks) > 1 else f"core of rank {numbers}"
        return f"reading the {whose} ({self.size_bytes / (1 << 20):.0f} MiB) …"


class Done(Value):
    """The last message."""

    elapsed_s: float = 0.0


_SHAPES: dict[str, type] = {
    "look": ProcessSnapshot,
    "stack": StackDump,
    "collectives": RankCollectives,
    "host_line": str,
    "kernel_line": str,
    "begun": Begun,
    "note": CaptureNote,
    "cores_found": CoresFound,
    "core": CoreDump,
    "oom": OomKill,
    "link": StuckLink,
    "gpu": RankGpu,
    "unwritten": str,
    "done": Done,
}


def encode(kind: str, value: Any = None) -> bytes:  # noqa: ANN401 - whatever the kind calls for
    """One line: ``{"kind": "look", "value": {...}}``. ``value`` is what the kind's shape says, or None for ``done``."""
    fields = value._asdict() if hasattr(value, "_asdict") else value
    return json.dumps({"kind": kind} if value is None else {"kind": kind, "value": fields}).encode() + b"\n"


class CaptureReader:
    """Reads what a capture process writes, in whatever pieces it comes.

    Attributes:
        is_done: whether the process has said that it is done.
        on_cores_found: told at once of cores that are about to be read.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.on_cores_found: Callable[[CoresFound], None] | None = None
        self._rest = b""
        self._skipping = False
        self._values: dict[str, list[Any]] = {kind: [] for kind in _SHAPES}

    def feed(self, content: bytes) -> None:
        """Take the next piece. Lines that are no message, or too long, are dropped."""
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
        """All that has come so far. ``unfinished`` names what has begun and not ended."""
        looks: list[ProcessSnapshot] = self._values["look"]
        done: list[Done] = self._values["done"]
        notes: list[CaptureNote] = self._values["note"]
        return Capture(
            # A later look at the same process knows more.
            tuple({(look.rank, look.pid): look for look in looks}.values()),
            tuple(self._values["stack"]),
            tuple(self._values["collectives"]),
            tuple(self._values["host_line"]),
            tuple(notes),
            self._unfinished(),
            done[-1].elapsed_s if done else 0.0,
            tuple(self._values["link"]),
            tuple(dict.fromkeys(self._values["gpu"])),
            self.kernel_lines,
        )

    @property
    def cores(self) -> tuple[CoreDump, ...]:
        """The cores that were looked at so far."""
        return tuple(self._values["core"])

    @property
    def oom(self) -> OomKill | None:
        """What the OOM killer did, if it did."""
        found: list[OomKill] = self._values["oom"]
        return found[0] if found else None

    @property
    def kernel_lines(self) -> tuple[str, ...]:
        """Lines of the kernel log."""
        return tuple(self._values["kernel_line"])

    @property
    def unwritten(self) -> tuple[str, ...]:
        """The names of files that there was no room for."""
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
        return tuple(dict.fromkeys(unfinished_words(one) for one in waited_for if tuple(one) not in ended))

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


def unfinished_words(begun: Begun) -> str:
    """``py_spy of rank 3``, ``py_spy of rank 3 (pid 4711)``, ``gpu_nvidia``."""
    if begun.rank < 0:
        return begun.capture
    return f"{begun.capture} of rank {begun.rank}" + (f" (pid {begun.pid})" if begun.pid else "")
