"""Carries out what is asked of files: in the writer process, or where there is none, in the one that asks."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.files.file_stream import APPENDED, LAZY, WHOLE
from saferun.files.housekeeping import Housekeeper, Housework
from saferun.files.index_file import IndexFile
from saferun.files.operations import OPERATIONS, touch_live_record
from saferun.files.ring import ASK, CLOSE, DATA, GAP, OPEN
from saferun.files.sinks import Budget, Sink, WholeFile
from saferun.files.trees import remove_directory
from saferun.linux.ownership import NotOursError
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.files.inbox import Inbox
    from saferun.files.ring import RingRecord


class FileServer:
    """The files that are open, by the numbers that whoever asks has given them.

    Args:
        send: takes what is to be said: ``{"answer": …}``, ``{"failed": …}``, ``{"written": …}``.
    """

    def __init__(self, send: Callable[[JsonObject], None]) -> None:
        self._send = send
        self._budget = Budget()
        self._sinks: dict[int, Sink | WholeFile] = {}
        self._unwritten: list[Sink | WholeFile] = []
        self._index: IndexFile | None = None
        self._keep_bytes = 0
        self._rank_folders: set[str] = set()
        self.housekeeper = Housekeeper(lambda found: send({"runs": found}))

    def take_over(self, opened: Sequence[tuple[int, str]], begun: Sequence[Any]) -> None:
        """Go on with what another server has begun: its open files, and the arguments of its ``begin_run``, if any."""
        if begun:
            self.begin_run(*begun, again=True)
        for stream, path in opened:
            self._reopen(stream, path)

    def _reopen(self, stream: int, path: str) -> None:
        sink = self._sinks[stream] = Sink(path, fresh=False, budget=self._budget, report=self._report)
        if not _is_of_events(path):
            self._add_output(stream, sink)

    def begin_run(self, index: str, keep_bytes: int, work: list[Any], *, again: bool = False) -> None:
        """The run directory is there.

        Args:
            index: where the times of the ranks' output are noted.
            keep_bytes: how large their files may become, about; 0: there is no limit.
            work: what is to be done beside the launch, a ``Housework``.
            again: whether another server has begun with it.
        """
        self._index = IndexFile(index, fresh=not again)
        self._keep_bytes = keep_bytes
        if not again:
            self.housekeeper.plan(Housework(*work))

    def _add_output(self, stream: int, sink: Sink) -> None:
        if self._index is not None and self._index.add(stream, sink):
            sink.keep_bytes = self._keep_bytes
            sink.gives_way = True

    def handle(self, kind: int, stream: int, payload: memoryview) -> None:
        """Carry out one record, but for DATA."""
        if kind == ASK:
            self._answer(*json.loads(bytes(payload)))
        elif kind == OPEN:
            path, how = json.loads(bytes(payload))
            self._open(stream, path, how)
        elif kind == CLOSE:
            self._close(stream)
        elif kind == GAP and stream in self._sinks:
            self._sinks[stream].note_gap(*json.loads(bytes(payload)))
        elif kind == DATA:
            self.write(stream, [payload])

    def write(self, stream: int, blocks: Sequence[memoryview]) -> None:
        """Append to a file."""
        sink = self._sinks.get(stream)
        if sink is not None:
            sink.write(blocks)

    def note_times(self, records: Sequence[RingRecord]) -> None:
        """These records of DATA have been appended: note when."""
        if self._index is not None:
            self._index.note(records)

    def take(self, inbox: Inbox) -> bool:
        """Write a file that another process has handed in. Returns whether there was one."""
        file = inbox.take(self._report)
        if file is None:
            return False
        self._forget_unwritten(file.path)
        file.close()
        if file.retry_at is not None:
            self._unwritten.append(file)
        inbox.taken()
        return True

    @property
    def retry_at(self) -> float | None:
        """When ``retry`` is due, in monotonic seconds."""
        moments = (sink.retry_at for sink in (*self._sinks.values(), *self._unwritten))
        return min((moment for moment in moments if moment is not None), default=None)

    def retry(self, *, at_once: bool = False) -> None:
        """Try again what has failed, as far as it is due."""
        now = time.monotonic()
        for sink in (*self._sinks.values(), *self._unwritten):
            sink.retry(now, at_once=at_once)
        for sink in self._unwritten:
            if sink.retry_at is None:
                sink_closed(sink)
        self._unwritten = [sink for sink in self._unwritten if sink.retry_at is not None]

    def beat(self) -> None:
        """Show other hosts and containers that this one lives, by the times of its files."""
        touch_live_record()
        for sink in self._sinks.values():
            if isinstance(sink, Sink) and _is_of_events(sink.path):
                sink.touch()

    def finish(self) -> None:
        """Nothing more will come: close everything, and try once more what has failed."""
        for stream in list(self._sinks):
            self._close(stream)
        self.retry(at_once=True)
        if self._index is not None:
            self._index.close()
        for folder in self._rank_folders:
            with suppress(OSError):  # it has files
                remove_directory(folder)

    def _open(self, stream: int, path: str, how: int) -> None:
        if how == WHOLE:
            self._sinks[stream] = WholeFile(path, report=self._report)
            return
        sink = Sink(path, fresh=how != APPENDED, budget=self._budget, report=self._report)
        self._sinks[stream] = sink
        if how != LAZY:
            sink.open()
        if how != APPENDED:
            self._add_output(stream, sink)

    def _close(self, stream: int) -> None:
        sink = self._sinks.pop(stream, None)
        if sink is None:
            return
        if self._index is not None:
            self._index.remove(stream)
        if isinstance(sink, WholeFile):
            self._forget_unwritten(sink.path)
        sink.close()
        if sink.retry_at is not None:
            self._unwritten.append(sink)

    def _forget_unwritten(self, path: str) -> None:
        """What could not be written before is out of date."""
        for old in self._unwritten:
            if old.path == path and isinstance(old, WholeFile):
                old.forget()
        self._unwritten = [old for old in self._unwritten if old.path != path]

    def _answer(self, number: int, name: str, arguments: list[Any]) -> None:
        try:
            if name == "begin_run":
                self.begin_run(*arguments)
                answer: JsonObject = {"answer": number, "value": None}
            else:
                if name == "make_directories":
                    self._rank_folders.update(path for path in arguments[0] if os.path.basename(path)[:5] == "rank_")
                answer = {"answer": number, "value": OPERATIONS[name](*arguments)}
        except OSError as error:
            details = [error.errno, error.strerror, str(error.filename or "")]
            answer = {"answer": number, "error": details, "is_theirs": isinstance(error, NotOursError)}
        except Exception as error:
            answer = {"answer": number, "error": [0, f"{type(error).__name__}: {error}", ""], "is_theirs": False}
        self._send(answer)

    def _report(self, path: str, error: OSError | None, missing_bytes: int) -> None:
        if error is None:
            self._send({"written": path, "missing": missing_bytes})
        else:
            self._send({"failed": path, "errno": error.errno, "words": error.strerror, "once": missing_bytes < 0})


def _is_of_events(path: str) -> bool:
    return os.path.basename(path).startswith("events")


def sink_closed(sink: Sink | WholeFile) -> None:
    """A file that had been closed before it could be written: it is written now, and needs its descriptor no more."""
    if isinstance(sink, Sink):
        sink.close()
