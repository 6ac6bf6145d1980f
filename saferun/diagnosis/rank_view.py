"""What was captured of one rank, and questions about it. Pure.

A call that blocks in C shows in a Python stack only as the line that makes it. So four things are combined: the
library calls that the user's code has made, the native ones below them, the system call that the kernel names, and the
collective that the Flight Recorder has as not over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saferun.diagnosis.frames import Calls, UserCode, is_native, native_name
from saferun.evidence.job_evidence import Frame, HangVerdict, ProcessSnapshot, StackDump
from saferun.model import Value


class Found(Value):
    """What a rank waits in.

    Attributes:
        kind: that of a :class:`~saferun.evidence.diagnosis_values.WaitGroup`.
        detail: to stand after the kind: ``all_reduce``, ``a connection to 10.0.0.2:29500``.
        doing: to stand after "it": ``sleeps``, ``waits for a lock``.
        of_peers: whether other ranks have to do something for it to go on.
        problem: what is wrong with a process that it waits for; ``its data-loader worker pid 12 waits for a lock``.
    """

    kind: str
    detail: str
    doing: str
    of_peers: bool = False
    problem: str = ""

    @property
    def description(self) -> str:
        """``waits for its forked child pid 12; its child pid 12 waits for a lock``."""
        # A rank that waits for its workers does nothing wrong; what they do is what matters.
        if self.problem and self.kind == "data_loading":
            return self.problem
        return f"{self.doing}; {self.problem}" if self.problem else self.doing


class RankView(Value):
    """Everything that was captured of one rank, or of a process that descends from it.

    Attributes:
        frames: the calls of the thread that represents it, innermost first; empty where there are none.
        active: whether that thread was running Python when it was captured.
        owns_gil: whether that thread held the GIL.
        process: the process as /proc shows it, where it does.
        is_main: whether ``frames`` are the main thread's, the only ones whose system call /proc has.
        children: its descendants, as /proc shows them.
        workers: the dumps of its descendants, by pid.
        pending: the oldest collective that it has called and that is not over; empty where none is known.
        is_behind: whether others have called a collective that it has not.
        ended: how it ended, ``exit code 1``; empty while it lives.
        failure: why there are no stacks.
        hang: the verdict.
        rank: its number.
        user: distinguishes the user's own code.
        store_port: of the job's store; 0: unknown.
        is_bare: whether there is a dump, and no Python code in it.
        keeps_gil: whether the main thread holds the GIL while it waits for a thread of torch that needs it.
    """

    rank: int
    user: UserCode
    frames: tuple[Frame, ...] = ()
    active: bool = False
    process: ProcessSnapshot | None = None
    owns_gil: bool = False
    is_main: bool = True
    children: tuple[ProcessSnapshot, ...] = ()
    workers: tuple[StackDump, ...] = ()
    pending: str = ""
    is_behind: bool = False
    ended: str = ""
    failure: str = ""
    hang: HangVerdict | None = None
    store_port: int = 0
    is_bare: bool = False
    keeps_gil: bool = False


Rule = Callable[[RankView], Found | None]


def user_frame(frames: Sequence[Frame], user: UserCode) -> Frame | None:
    """The innermost call of the user's own code."""
    return next((frame for frame in frames if user.owns(frame)), None)


def library_calls(view: RankView) -> Iterator[Frame]:
    """The Python calls that the user's innermost call has led to, innermost first."""
    for frame in view.frames:
        if view.user.owns(frame):
            return
        if not is_native(frame):
            yield frame


def native_calls(view: RankView) -> Iterator[str]:
    """The names of the native calls that Python's innermost call has led to, innermost first."""
    for frame in view.frames:
        if not is_native(frame):
            return
        yield native_name(frame.function)


def library_call(view: RankView, table: Calls) -> Frame | None:
    """The innermost of those calls that stands in a table."""
    return next((frame for frame in library_calls(view) if frame in table), None)


def native_call(view: RankView, *starts: str) -> str:
    """The innermost native call whose name starts so; empty where there is none."""
    return next((name for name in native_calls(view) if name.startswith(starts)), "")


def syscall(view: RankView) -> str:
    """The system call that the thread is in; empty where that is not known."""
    return view.process.syscall if view.process is not None and view.is_main else ""


def wchan(view: RankView) -> str:
    """The kernel function that the thread sleeps in; empty where it is not known."""
    return view.process.wchan if view.process is not None and view.is_main else ""


def waits_on(view: RankView) -> str:
    """What the system call waits for: ``the FIFO /tmp/x``; empty where it is not known."""
    return view.process.waits_on if view.process is not None and view.is_main else ""


def is_at_work(view: RankView) -> bool:
    """Whether the thread is at work rather than asleep."""
    return view.active or (view.is_main and view.process is not None and view.process.state == "R")


def first_found(view: RankView, rules: Sequence[Rule]) -> Found | None:
    """The result of the first rule that matches."""
    for rule in rules:
        found = rule(view)
        if found is not None:
            return found
    return None
