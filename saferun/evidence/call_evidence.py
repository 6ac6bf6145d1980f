"""The part of the evidence about the last Python calls of ranks (``--trace-calls``). Values only; pure."""

from __future__ import annotations

from saferun.model import Value

CALL_KINDS = ("call", "return", "raise", "line")
"""What an event may be."""


class CalledFunction(Value):
    """A function: its qualified name, its file, and the line where it begins."""

    name: str
    file: str
    line: int


class CallEvent(Value):
    """One event of a thread.

    Attributes:
        kind: ``call`` (a generator or coroutine that goes on is called again), ``return`` (or yields), ``raise`` (an
            exception leaves it), ``line``.
        function: its place in the rank's ``functions``; -1: unknown.
        before_s: how many seconds before the capture or the death of the process.
        line: of a ``line`` the number.
    """

    kind: str
    function: int
    before_s: float
    line: int = 0


class ThreadCalls(Value):
    """The newest events of one thread, oldest first.

    Attributes:
        tid: the kernel's number.
        is_main: whether it is the main thread.
        total: how many events other than lines there have been so far, the last of which is the newest here.
        events: without a gap.
    """

    tid: int
    is_main: bool
    total: int
    events: tuple[CallEvent, ...]


class RankCalls(Value):
    """The last calls of one rank.

    Attributes:
        rank, pid: whose they are.
        functions: those that are called.
        threads: the main thread first, then those with the newest events.
        is_dead: whether it has ended; times are before its end then.
        note: why not all calls are recorded; empty: they are.
        failure: why nothing is known; empty: it is.
    """

    rank: int
    pid: int
    functions: tuple[CalledFunction, ...] = ()
    threads: tuple[ThreadCalls, ...] = ()
    is_dead: bool = False
    note: str = ""
    failure: str = ""

    @property
    def main(self) -> ThreadCalls | None:
        """The main thread, if it has called anything."""
        return next((thread for thread in self.threads if thread.is_main), None)

    def newest(self, main: int, others: int) -> RankCalls:
        """The same with so many events of the main thread and of each other one; of 0 the thread is left out."""
        kept = []
        numbers: dict[int, int] = {}
        for thread in self.threads:
            most = main if thread.is_main else others
            events = thread.events[-most:] if most > 0 else ()
            renumbered = (
                event._replace(function=numbers.setdefault(event.function, len(numbers)))
                if 0 <= event.function < len(self.functions)
                else event._replace(function=-1)
                for event in events
            )
            if events:
                kept.append(thread._replace(events=tuple(renumbered)))
        return self._replace(functions=tuple(self.functions[number] for number in numbers), threads=tuple(kept))

    def function(self, event: CallEvent) -> CalledFunction | None:
        """The function of an event; None where it is unknown."""
        return self.functions[event.function] if 0 <= event.function < len(self.functions) else None
