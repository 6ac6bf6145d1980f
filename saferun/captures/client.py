"""The examiner beside a job, and what is asked of it: forked early, asked without ever waiting, replaced when lost."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from saferun.errors import suppress
from saferun.linux.helper import Helper, NoHelperError
from saferun.linux.poller import Poller
from saferun.linux.prctl import set_name
from saferun.linux.procfs import read_stat
from saferun.model import ExitStatus, JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.captures.wire import CaptureReader, CoreRequest, CoresFound, Request
    from saferun.files.inbox import Outbox

_READ_BYTES = 1 << 18
_READS_AT_MOST = 64
_REPLACED_AT_MOST = 5
_REPLACE_S = 0.5
# One that has not begun with a request by then does not answer; a fork takes milliseconds. Of a capture's budget half
# is left for the examiner that takes its place.
_NO_ANSWER_S = 10.0
_LEAST_ANSWER_S = 3.0
# One that has taken another's place and does not answer either is no exception: what hung the first one hangs it too.
_SECOND_ANSWER_S = 5.0
# A capture whose examiner is lost is asked of the next one; if that is lost as well, nobody waits for a third.
_TRIES = 2
_LEAST_BUDGET_S = 0.5


class Examiner:
    """The supervisor's handle on the process that looks at others for it.

    Args:
        environ: the environment of the process and of the tools that it runs.
        poller: the loop's.
        warn: takes one line about what could not be done.
        wanted: modules that the supervisor will want.
        on_loaded: told, once, that these can be read; takes their names, with those of the modules that they import.
        on_ready: told when it needs no file any more.
        outbox: leads to the writer of the run directory; None: captures write their files themselves.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        warn: Callable[[str], None],
        wanted: Sequence[str] = (),
        on_loaded: Callable[[list[str]], None] | None = None,
        on_ready: Callable[[], None] = lambda: None,
        outbox: Callable[[], Outbox] | None = None,
    ) -> None:
        self._begin_at: float | None = None
        self._environ = dict(environ)
        self._poller = poller
        self._warn = warn
        self._wanted = tuple(wanted)
        self._on_loaded = on_loaded
        self._on_ready = on_ready
        self._outbox = outbox
        self._helper: Helper | None = None
        self._lost: list[Helper] = []  # ended, not reaped yet; in an uninterruptible sleep perhaps
        self._replaced = 0
        self._is_impossible = False  # not even the first one could be forked
        self._number = 0
        self._waiting: dict[int, float] = {}  # number -> when it must have begun
        self._unsent: dict[int, int] = {}  # number -> the descriptor for its answer
        self._asked: dict[int, Callable[[], None]] = {}  # number -> told when the examiner is lost
        self.tools: frozenset[str] | None = None
        """The tools that it has; None: it has not said so yet."""

    # ----------------------------------------------------------------------------------------------- beside the loop

    def begin_at(self, at: float) -> None:
        """Have it begin then, unless it has been asked for something before, or has begun."""
        if self._helper is None and self._replaced == 0:
            self._begin_at = at

    def begin(self) -> None:
        """Begin now, if it has not begun."""
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
                self._take_loaded(list(self._wanted), [])  # nobody has tried, and somebody has to be the first
                return
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _serve(self, outbox: Outbox | None, connection: socket.socket) -> None:
        from saferun.linux.held_code import Recorder

        recorder = Recorder()
        recorder.begin()
        from saferun.captures.serve import serve

        def write_code(names: list[str]) -> None:
            recorder.write(names, _write)

        kinds = {"lint": _lint, "code": write_code, "waits": _waits, "hook": _copy_hook}
        serve(connection, self._environ, self._wanted, kinds, outbox, on_loaded=recorder.end)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""
        moments = [*self._waiting.values(), *([self._begin_at] if self._begin_at is not None else [])]
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Begin, begin again, or give up one that does not answer."""
        if any(at <= now for at in self._waiting.values()):
            self._give_up()
        if self._begin_at is not None and self._begin_at <= now:
            self.begin()

    @property
    def pids(self) -> set[int]:
        """The process, and those before it that no signal has ended yet."""
        helpers = [*self._lost, *([self._helper] if self._helper is not None else [])]
        pids: set[int] = set().union(*(helper.pids for helper in helpers))
        return pids

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was an examiner."""
        helpers = [*self._lost, *([self._helper] if self._helper is not None else [])]
        owned = any(helper.on_exit(pid, status) for helper in helpers)
        self._lost = [helper for helper in self._lost if helper.pids]
        return owned

    def close(self) -> None:
        """End it."""
        self._begin_at = None
        self._replaced = _REPLACED_AT_MOST + 1
        self._waiting.clear()
        self._asked.clear()
        self._drop()

    def hear(self) -> None:
        """Take note now of what the loop would tell a moment later: whether it has ended."""
        if self._helper is not None:
            self._helper.hear()

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
        if "loaded" in message:
            self._take_loaded(message["loaded"], message["tools"])
        elif "ready" in message:
            self._on_ready()

    def _take_loaded(self, names: list[str], tools: list[str]) -> None:
        first = self.tools is None
        self.tools = frozenset(tools)
        if first and self._on_loaded is not None:
            self._on_loaded(names)

    def _on_lost(self) -> None:
        """It has ended by itself, or somebody has killed it."""
        self._replace("the examiner has ended")

    def _give_up(self) -> None:
        """It does not answer: it may be in an uninterruptible sleep, which no signal ends."""
        words = "the examiner does not answer"
        if self._helper is not None:
            states = [stat.state for stat in map(read_stat, self._helper.pids) if stat is not None]
            if "D" in states:
                with suppress(ImportError):
                    from saferun.linux.stuck import stuck_words

                    words = f"the examiner {stuck_words(min(self._helper.pids))}"
        self._replace(words)

    def _replace(self, words: str) -> None:
        self._waiting.clear()
        self._drop()
        if self._replaced <= _REPLACED_AT_MOST:
            self._warn(f"{words}; another one takes its place")
            self._begin_at = time.monotonic() + _REPLACE_S
        else:
            self._warn(f"{words}; hangs are no longer captured")
            if self.tools is None:
                self._take_loaded(list(self._wanted), [])
        asked, self._asked = self._asked, {}
        for on_lost in asked.values():
            on_lost()

    # ----------------------------------------------------------------------------------------------------- requests

    def ask(
        self,
        kind: str,
        value: Any,  # noqa: ANN401 - what the kind calls for
        budget_s: float,
        on_lost: Callable[[], None] | None = None,
        *,
        is_urgent: bool = True,
    ) -> tuple[int, int]:
        """Ask for something.

        Args:
            kind: ``capture``, ``dump``, ``lint``, ``code``, ``hook`` or ``waits``.
            value: what exactly, as JSON has it.
            budget_s: after so many seconds it is ended by the examiner.
            on_lost: told where the examiner is lost before ``end`` is called for it; another one may be asked then.
            is_urgent: whether an examiner that does not begin with it in time is given up, and replaced.

        Returns:
            The number to end it by, and a descriptor to read the answer from, non-blocking; the caller closes it.

        Raises:
            NoHelperError: there has never been an examiner, and there never will be.
            OSError: there is no examiner, or it takes no requests.
        """
        self.begin()
        if self._is_impossible:
            raise NoHelperError(0, "there is no examiner")
        if self._helper is None:
            raise OSError(0, "there is no examiner")
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
            patience_s = _NO_ANSWER_S if self._replaced == 1 else _SECOND_ANSWER_S
            self._waiting[number] = time.monotonic() + min(patience_s, max(budget_s / 2, _LEAST_ANSWER_S))
        if on_lost is not None:
            self._asked[number] = on_lost
        os.set_blocking(read_end, False)
        return number, read_end

    def _sent(self, number: int) -> None:
        """The examiner has the descriptor; as long as this process has it too, its end cannot be noticed."""
        fd = self._unsent.pop(number, None)
        if fd is not None:
            os.close(fd)

    def end(self, number: int) -> None:
        """End what was asked for under this number, if it has not ended."""
        self._asked.pop(number, None)
        self._waiting.pop(number, None)
        if self._helper is not None:
            self._helper.send({"end": number})


def _lint(value: Any) -> None:  # noqa: ANN401 - see LintRun
    """The lint of a rank's environment, in a process of the examiner's."""
    set_name("sr-lint")
    os.environ.clear()
    os.environ.update(value["environ"])
    from saferun.env.lint.__main__ import main

    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it ends with the process
    main([str(value["python"]), str(value["script"])])
    sys.stdout.flush()


def _waits(value: Any) -> None:  # noqa: ANN401 - see RetryWaits
    """The waits before the retries of a start: the first one, and how many there are."""
    from saferun.supervisor.policy.waits import retry_waits_s

    first_s, count = value
    _write(json.dumps(retry_waits_s(float(first_s), int(count))).encode())


def _copy_hook(value: Any) -> None:  # noqa: ANN401 - the directories from and to which it is copied
    from saferun.linux.hook_copy import copy_hook

    with suppress(OSError):
        copy_hook(*map(str, value))


def _write(content: bytes) -> None:
    while content:
        content = content[os.write(1, content) :]


class CaptureRun:
    """One capture. ``on_done`` is called exactly once: when it is complete, cut short, or could not begin.

    Where the examiner is lost, the one that takes its place is asked for what is left of the time. If that is lost as
    well, what has come is all there is.

    Args:
        request: what to look at.
        examiner: who looks.
        poller: the loop's.
        deadline: monotonic seconds after which what has come must do; the owner calls ``expire`` then.
        on_done: takes what was seen, and in one line why that is not all (empty: it is).
        on_cores_found: told at once of cores that are about to be read.
    """

    def __init__(
        self,
        request: Request | CoreRequest,
        examiner: Examiner,
        poller: Poller,
        *,
        deadline: float,
        on_done: Callable[[CaptureReader, str], None],
        on_cores_found: Callable[[CoresFound], None] | None = None,
    ) -> None:
        from saferun.captures.wire import CaptureReader

        self.deadline = deadline
        self._request = request
        self._examiner = examiner
        self._poller = poller
        self._on_done = on_done
        self._reader = CaptureReader()
        self._reader.on_cores_found = on_cores_found
        self._seen = self._reader  # the one that has most, of those that examiners which were lost have filled
        self._tries = 0
        self._fd = -1
        self._number = 0
        self._failure = ""
        try:
            self._ask(request)
        except OSError as error:
            self._failure = f"the capture cannot be started: {error.strerror}"

    def _ask(self, request: Request | CoreRequest) -> None:
        from saferun.captures.wire import request_value

        self._tries += 1
        value = request_value(request)
        self._number, self._fd = self._examiner.ask("capture", value, request.budget_s, self._again)
        self._poller.watch(self._fd, self._on_readable)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._fd < 0

    def begin(self) -> None:
        """Call ``on_done`` where it could not even be started."""
        if self._failure:
            self._finish(self._failure)

    def expire(self) -> None:
        """The time is over: what has come is all there is."""
        if not self.is_over:
            self._read_rest()
            self.close()
            self._finish("" if self._reader.is_done else "capture budget exceeded")

    def break_off(self) -> CaptureReader | None:
        """End the process, ``on_done`` is not called. Returns what has come so far; None where it is over."""
        if self.is_over:
            return None
        self._read_rest()
        self.close()
        return self._best()

    def close(self) -> None:
        """End the process. ``on_done`` is not called."""
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._examiner.end(self._number)

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self._reader.feed(chunk)
        if self._reader.is_done:
            self.close()
            self._finish("")
        elif not chunk:
            number = self._number
            # It may be the examiner that has ended, which ends all that it has begun.
            self._examiner.hear()
            if self._number == number and not self.is_over:
                self._again()

    def _read_rest(self) -> None:
        """What is in the pipe already; whoever fills it is slower than this, or is told to end."""
        with suppress(Exception):  # nothing is there, or it cannot be taken in, which has been said then
            for _ in range(_READS_AT_MOST):
                chunk = os.read(self._fd, _READ_BYTES)
                if not chunk:
                    return
                self._reader.feed(chunk)

    def _again(self) -> None:
        """Whoever was asked is lost."""
        if self.is_over:
            return
        self._read_rest()
        self.close()
        left_s = self.deadline - time.monotonic()
        if self._tries < _TRIES and left_s >= _LEAST_BUDGET_S:
            from saferun.captures.wire import CaptureReader

            self._seen, self._reader = self._reader, CaptureReader()
            with suppress(OSError):
                self._ask(self._request._replace(budget_s=left_s))
                return
        self._finish("the capture process ended before it was done")

    def _best(self) -> CaptureReader:
        """What the last one has told, unless the one before has told more."""
        readers = (self._reader, self._seen)
        return max(readers, key=lambda reader: (reader.is_done, len(reader.capture.stacks) + len(reader.cores)))

    def _finish(self, failure: str) -> None:
        self._failure = ""
        self._on_done(self._best(), failure)
