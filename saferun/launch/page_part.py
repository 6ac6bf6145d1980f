"""report.html: has a process of its own make it whenever report.json has been written, and never waits for it for long.

The process is forked as soon as the ranks are captured or stopped because of a failure, so that its imports take place
meanwhile, or else when a page is wanted. It reads the run directory, which the writer has brought up to date by then,
and hands the page to the writer. Where it fails, hangs or is late there is one line, and the launch ends as it would
without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from saferun.files.file_stream import WriterAnswer
from saferun.linux.helper import Helper, PartBase
from saferun.linux.poller import Poller

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.files.inbox import Outbox
    from saferun.files.run_dir import RunDirectory
    from saferun.linux.bare_socket import Socket
    from saferun.model import ExitStatus, JsonObject

NAME = "report.html"
PATIENCE_S = 2.0
"""How long the end of a launch waits for the page."""
# How long the process opens files of events and output, one after the other: at the end of a launch, and else.
_READING_S, _LAST_READING_S = 20.0, 0.7
# While the job runs nothing waits for it; longer than that is no page but a process that hangs.
_LONGEST_S = 60.0
# A process that has been lost so often is not forked again.
_MOST_LOST = 3
_HINT = "saferunctl report --html makes it"


class PagePart(PartBase):
    """Makes the page of a run. A part of the loop.

    Args:
        run_dir: the run directory.
        poller: the loop's.
        outbox: leads to the writer.
        warn: takes one line about a failure.
        is_wanted: whether there is to be a page at all.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        poller: Poller,
        *,
        outbox: Callable[[], Outbox],
        warn: Callable[[str], None],
        is_wanted: bool,
    ) -> None:
        self._run_dir = run_dir
        self._poller = poller
        self._outbox = outbox
        self._warn = warn
        self._is_wanted = is_wanted
        self._is_due = False  # the report has changed since the last page was begun
        self._is_asked = False  # the writer has been asked to bring the files up to date
        self._give_up_at: float | None = None  # a page is being made
        self._is_finishing = False
        self._lost = 0
        self._buried: list[Helper] = []  # killed, and not reaped yet

    # ----------------------------------------------------------------------------------------------- beside the loop

    def prepare(self) -> None:
        """A page will be wanted soon. Never raises."""
        self._guarded(self._prepare)

    def _prepare(self) -> None:
        if self._can_make() and self._helper is None:
            self._fork()

    def request(self) -> None:
        """The report has been written: have the page made of it. Never raises."""
        self._is_due = self._can_make()
        self._guarded(self._begin)

    def _guarded(self, call: Callable[..., None], *arguments: object) -> None:
        """Call; what fails costs the page, and nothing else."""
        try:
            call(*arguments)
        except Exception as error:
            self._lost = _MOST_LOST
            self._fail(f"{type(error).__name__}: {error}")

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""
        return self._give_up_at

    def tick(self, now: float) -> None:
        """End a process that takes too long."""
        if self._give_up_at is not None and self._give_up_at <= now:
            self._fail(f"not made within {_LONGEST_S:.0f} s")

    @property
    def pids(self) -> set[int]:
        """The process, until it has been reaped, and those that were killed."""
        return super().pids.union(*(helper.pids for helper in self._buried))

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was this part's."""
        buried = [helper for helper in self._buried if not helper.on_exit(pid, status)]
        if len(buried) < len(self._buried):
            self._buried = buried
            return True
        return super().on_exit(pid, status)

    def close(self) -> None:
        """Nothing: it is ``finish`` that ends the process, once the last report has been written."""

    def finish(self, is_hurried: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        """The launch is over: wait a moment for the page, if one is wanted, and end the process.

        Args:
            is_hurried: whether the user has asked again for the end.
            on_wait: called now and then while there is something to be waited for.
        """
        give_up_at = time.monotonic() + PATIENCE_S
        self._is_finishing = True
        try:
            while self._helper is not None and (self._is_due or self._is_asked or self._give_up_at is not None):
                left_s = give_up_at - time.monotonic()
                if left_s <= 0 or is_hurried():
                    self._fail("not made in time" if left_s <= 0 else "not waited for")
                    return
                on_wait()
                self._poller.wait(min(left_s, 0.1))
        finally:
            self._is_due = self._is_asked = False
            self._end()

    # ---------------------------------------------------------------------------------------------------- the process

    def _can_make(self) -> bool:
        directory = self._run_dir
        has_directory = directory.path is not None and not directory.is_part and not directory.files.is_stalled
        return self._is_wanted and has_directory and self._lost < _MOST_LOST

    def _fork(self) -> None:
        outbox = self._outbox()

        def begin(connection: Socket) -> None:
            from saferun.report.page.serving import serve

            serve(connection, outbox)

        try:
            self._helper = Helper("sr-page", begin, keep=outbox.fds)
        except OSError as error:
            self._lost = _MOST_LOST
            self._is_due = False
            self._warn(f"no {NAME}: no process that makes it: {error.strerror}; {_HINT}")
            return
        self._helper.attach(self._poller, lambda message: self._guarded(self._on_message, message), self._on_lost)

    def _begin(self) -> None:
        """Make a page, if that is due and none is being made."""
        if not self._is_due or self._is_asked or self._give_up_at is not None:
            return
        self._is_due = False
        if self._helper is None:
            self._fork()
        if self._helper is None:
            return
        self._is_asked = True
        # The writer answers when it has carried out all that came before: the files are as they are to be.
        self._run_dir.files.ask("make_directories", [[], []], lambda answer: self._guarded(self._on_written, answer))

    def _on_written(self, answer: WriterAnswer | None) -> None:
        self._is_asked = False
        path = self._run_dir.path
        if self._helper is None or path is None:
            self._begin()  # it was lost meanwhile, which has been reported
            return
        if answer is None:
            self._fail("the file system of the run directory does not answer")
            return
        self._give_up_at = time.monotonic() + _LONGEST_S
        patience_s = _LAST_READING_S if self._is_finishing else _READING_S
        self._helper.send({"run_dir": path, "path": os.path.join(path, NAME), "patience_s": patience_s})

    def _on_message(self, message: JsonObject) -> None:
        self._give_up_at = None
        if "made" not in message:
            self._lost = _MOST_LOST  # another try would fail alike
            self._fail(str(message.get("failed", "")))
        elif self._is_due:
            self._begin()
        else:
            self._end()  # it takes memory, and the next report may be hours away

    def _on_lost(self) -> None:
        self._lost += 1
        self._fail("the process that makes it was ended")

    def _fail(self, reason: str) -> None:
        self._is_due = False
        self._end()
        self._warn(f"no {NAME}: {reason}; {_HINT}")

    def _end(self) -> None:
        self._give_up_at = None
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
            if helper.pids:
                self._buried.append(helper)
