"""The supervisor's end of the examiner: forked early, queried without blocking, replaced when lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from saferun.errors import suppress
from saferun.linux.helper import Helper, NoHelperError, NoHelperLeftError
from saferun.linux.poller import Poller
from saferun.linux.procfs import children_of, main_thread_run_s, read_stat
from saferun.model import ExitStatus, JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.files.inbox import Outbox
    from saferun.linux.bare_socket import Socket

READ_BYTES = 1 << 18
_REPLACED_AT_MOST = 5
_REPLACE_S = 0.5
# An examiner that has not begun with a request by then hangs; a fork takes milliseconds. Half of a capture's budget is
# kept for its replacement.
_NO_ANSWER_S = 10.0
_LEAST_ANSWER_S = 3.0
# A replacement has less time: what hung the first examiner hangs it too.
_SECOND_ANSWER_S = 5.0
_RECHECK_S = 1.0


class Examiner:
    """The supervisor's handle on the process that runs captures.

    Args:
        environ: the environment of the process and of the tools that it runs.
        poller: the loop's.
        warn: called with one line about a failure.
        on_begun: called once when it answers requests, or there is none.
        on_ready: called when it needs no more files.
        outbox: connects to the writer of the run directory; None: captures write their files themselves.
        kinds: more kinds of requests, each with what carries it out in a process of its own.
        modules: what these import.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        warn: Callable[[str], None],
        on_begun: Callable[[], None] = lambda: None,
        on_ready: Callable[[], None] = lambda: None,
        outbox: Callable[[], Outbox] | None = None,
        kinds: Mapping[str, Callable[[Any], None]] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self._begin_at: float | None = None
        self._environ = dict(environ)
        self._poller = poller
        self._warn = warn
        self._on_begun = on_begun
        self._on_ready = on_ready
        self._outbox = outbox
        self._kinds = dict(kinds or {})
        self._modules = tuple(modules)
        self._helper: Helper | None = None
        self._lost: list[Helper] = []  # killed, not reaped yet; perhaps in uninterruptible sleep
        self._replaced = 0
        self._is_impossible = False  # not even the first one could be forked
        self._number = 0
        self._waiting: dict[int, tuple[float, float]] = {}  # number -> when it must have begun, at least and at most
        self._unsent: dict[int, int] = {}  # number -> the descriptor for its answer
        self._asked: dict[int, Callable[[], None]] = {}  # number -> called when the examiner is lost
        self._run_s: dict[str, float] = {}  # how long it has run, by who has asked, when they did last
        self.tools: frozenset[str] | None = None
        """The tools that it has; None: not known yet."""

    # ----------------------------------------------------------------------------------------------- beside the loop

    def begin_at(self, at: float) -> None:
        """Start the process at that time, unless it has been started."""
        if self._helper is None and self._replaced == 0:
            self._begin_at = at

    def begin(self) -> None:
        """Start the process now, unless it has been started."""
        if self._helper is None and self._replaced <= _REPLACED_AT_MOST:
            self._begin_at = None
            self._replaced += 1
            try:
                outbox = self._outbox() if self._outbox is not None else None
                self._helper = Helper(
                    "sr-examiner", partial(self._serve, outbox), keep=outbox.fds if outbox is not None else ()
                )
            except OSError as error:
                self._is_impossible = self._replaced == 1
                self._replaced = _REPLACED_AT_MOST + 1
                self._warn(f"the examiner cannot be forked: {error.strerror}; hangs are not captured")
                self._take_tools([])
                return
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _serve(self, outbox: Outbox | None, connection: Socket) -> None:
        from saferun.linux.held_code import ImportRecorder

        recorder = ImportRecorder()
        from saferun.captures.examiner_process import serve

        serve(connection, self._environ, recorder, outbox, kinds=self._kinds, modules=self._modules)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""
        moments = [*(at for at, _ in self._waiting.values()), *([self._begin_at] if self._begin_at is not None else [])]
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Start the process or its replacement, or replace one that does not respond."""
        late = {number: most for number, (at, most) in self._waiting.items() if at <= now}
        if late and (min(late.values()) <= now or not self.runs("an answer")):
            self._give_up()
        else:
            # It waits for a processor, and so would another one.
            self._waiting.update((number, (min(now + _RECHECK_S, most), most)) for number, most in late.items())
        if self._begin_at is not None and self._begin_at <= now:
            self.begin()

    @property
    def pids(self) -> set[int]:
        """The process, and earlier ones that have not died yet."""
        helpers = [*self._lost, *([self._helper] if self._helper is not None else [])]
        pids: set[int] = set().union(*(helper.pids for helper in helpers))
        return pids

    def runs(self, caller: str) -> bool:
        """Whether it, or a process that it has forked for a request, has run since the last call or is ready to.

        Args:
            caller: who waits for it, by any name: each has its own last call, and at the first one it has run.
        """
        pids = self._helper.pids if self._helper is not None else set[int]()
        pids = pids.union(*map(children_of, pids))
        run_s = sum(map(main_thread_run_s, pids))
        before, self._run_s[caller] = self._run_s.get(caller, 0.0), run_s
        return run_s > before or any(stat.state == "R" for stat in map(read_stat, pids) if stat is not None)

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was an examiner."""
        helpers = [*self._lost, *([self._helper] if self._helper is not None else [])]
        owned = any(helper.on_exit(pid, status) for helper in helpers)
        self._lost = [helper for helper in self._lost if helper.pids]
        return owned

    def close(self) -> None:
        """Kill the process."""
        self._begin_at = None
        self._replaced = _REPLACED_AT_MOST + 1
        self._waiting.clear()
        self._asked.clear()
        self._drop()

    def receive(self) -> None:
        """Process pending messages and the end of the process now instead of from the loop."""
        if self._helper is not None:
            self._helper.receive()

    def _drop(self) -> None:
        for number in tuple(self._unsent):
            self._sent(number)
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()
            if helper.pids:
                self._lost.append(helper)

    def _on_message(self, message: JsonObject) -> None:
        if "began" in message:
            self._waiting.pop(message["began"], None)
            self._sent(message["began"])
            return
        if "tools" in message:
            self._take_tools(message["tools"])
        elif "ready" in message:
            self._on_ready()

    def _take_tools(self, tools: list[str]) -> None:
        first = self.tools is None
        self.tools = frozenset(tools)
        if first:
            self._on_begun()

    def _on_lost(self) -> None:
        """It has exited, or was killed."""
        self._replace("the examiner has ended")

    def _give_up(self) -> None:
        """It does not respond: it may be in uninterruptible sleep."""
        what = "the examiner does not answer"
        if self._helper is not None:
            states = [stat.state for stat in map(read_stat, self._helper.pids) if stat is not None]
            if "D" in states:
                with suppress(ImportError):
                    from saferun.linux.stuck import stuck_text

                    what = f"the examiner {stuck_text(min(self._helper.pids))}"
        self._replace(what)

    def _replace(self, what: str) -> None:
        self._waiting.clear()
        self._drop()
        if self._replaced <= _REPLACED_AT_MOST:
            self._warn(f"{what}; another one takes its place")
            self._begin_at = time.monotonic() + _REPLACE_S
        else:
            self._warn(f"{what}; hangs are no longer captured")
            if self.tools is None:
                self._take_tools([])
        asked, self._asked = self._asked, {}
        for on_lost in asked.values():
            on_lost()

    # ----------------------------------------------------------------------------------------------------- requests

    def ask(
        self,
        kind: str,
        value: Any,  # noqa: ANN401 - depends on the kind
        budget_s: float,
        on_lost: Callable[[], None] | None = None,
        *,
        is_urgent: bool = True,
    ) -> tuple[int, int]:
        """Send a request.

        Args:
            kind: ``capture``, ``dump``, ``inspect``, ``beside``, ``recorders``, ``lint``, ``code``,
                ``hook``, ``waits``, ``usage`` or ``stacks``.
            value: its argument, as JSON.
            budget_s: after this many seconds the examiner ends it.
            on_lost: called if the examiner is lost before ``end`` is called for it; the request may be repeated then.
            is_urgent: whether to replace an examiner that does not begin with it in time.

        Returns:
            The request's number, for ``end``, and a non-blocking descriptor of the answer, which the caller closes.

        Raises:
            NoHelperError: the examiner could never be started.
            NoHelperLeftError: it has been lost for good.
            OSError: there is no examiner, or it accepts no requests.
        """
        self.begin()
        if self._is_impossible:
            raise NoHelperError(0, "there is no examiner")
        if self._helper is None:
            is_last = self._replaced > _REPLACED_AT_MOST
            raise (NoHelperLeftError if is_last else OSError)(0, "there is no examiner")
        read_end, write_end = os.pipe()
        self._number += 1
        number = self._number
        self._unsent[number] = write_end
        if not self._helper.send({"ask": number, "kind": kind, "value": value, "budget_s": budget_s}, [write_end]):
            self._sent(number)
            os.close(read_end)
            raise OSError(0, "the examiner does not answer")
        if not self._helper.queued_bytes:
            self._sent(number)
        if is_urgent:
            now, most_s = time.monotonic(), max(budget_s / 2, _LEAST_ANSWER_S)
            patience_s = _NO_ANSWER_S if self._replaced == 1 else _SECOND_ANSWER_S
            self._waiting[number] = now + min(patience_s, most_s), now + most_s
        if on_lost is not None:
            self._asked[number] = on_lost
        os.set_blocking(read_end, False)
        return number, read_end

    def _sent(self, number: int) -> None:
        """The examiner has the descriptor: close it here, so that the end of the answer is seen."""
        fd = self._unsent.pop(number, None)
        if fd is not None:
            os.close(fd)

    def hurry(self) -> None:
        """Have code read without pauses from now on."""
        if self._helper is not None:
            self._helper.send({"hurry": True})

    def ranks_started(self, at: float) -> None:
        """Have what the kernel has logged before this moment, in monotonic seconds, left out of later captures."""
        if self._helper is not None:
            self._helper.send({"started": at})

    def end(self, number: int) -> None:
        """End a request, if it has not ended."""
        self._asked.pop(number, None)
        self._waiting.pop(number, None)
        if self._helper is not None:
            self._helper.send({"end": number})


class Query:
    """One request to the examiner, whose answer is read from a pipe without blocking. Subclasses process the chunks.

    Args:
        examiner: gets the request.
        poller: the loop's.
    """

    def __init__(self, examiner: Examiner, poller: Poller) -> None:
        self._examiner = examiner
        self._poller = poller
        self._fd = -1
        self._number = 0

    def _send(
        self,
        kind: str,
        value: Any,  # noqa: ANN401 - depends on the kind
        budget_s: float,
        on_lost: Callable[[], None] | None = None,
        *,
        is_urgent: bool = True,
    ) -> None:
        """Send the request; for the arguments and errors see ``Examiner.ask``."""
        self._number, self._fd = self._examiner.ask(kind, value, budget_s, on_lost, is_urgent=is_urgent)
        self._poller.watch(self._fd, self._on_readable)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._fd < 0

    def close(self) -> None:
        """End the request, if it has not ended. Nothing more is reported."""
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._examiner.end(self._number)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        self._on_chunk(chunk)

    def _on_chunk(self, chunk: bytes) -> None:
        """Process a chunk of the answer; an empty one is its end."""
        raise NotImplementedError


class Answer(Query):
    """The whole answer to one request; ``on_done`` is called with it once, unless it is closed before.

    Args:
        examiner: gets the request.
        poller: the loop's.
        kind: see ``Examiner.ask``.
        value: likewise.
        budget_s: likewise.
        on_done: called with the answer, which is cut at ``limit_bytes``.
        limit_bytes: how much is read.
        is_urgent: see ``Examiner.ask``.

    Raises:
        OSError: there is no examiner, or it accepts no requests.
    """

    def __init__(
        self,
        examiner: Examiner,
        poller: Poller,
        kind: str,
        value: Any,  # noqa: ANN401 - depends on the kind
        budget_s: float,
        on_done: Callable[[bytes], None],
        *,
        limit_bytes: int = 1 << 20,
        is_urgent: bool = True,
    ) -> None:
        super().__init__(examiner, poller)
        self._on_done = on_done
        self._limit_bytes = limit_bytes
        self._content = bytearray()
        self._send(kind, value, budget_s, is_urgent=is_urgent)

    def _on_chunk(self, chunk: bytes) -> None:
        self._content += chunk
        if not chunk or len(self._content) > self._limit_bytes:
            self.close()
            self._on_done(bytes(self._content[: self._limit_bytes]))
