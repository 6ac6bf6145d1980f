"""The writer process: takes records from the ring and carries them out, one after the other, until the line ends."""

from __future__ import annotations

import json
import select
import signal
import time
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.files.file_server import FileServer
from saferun.files.inbox import Inbox
from saferun.files.ring import DATA, END, Ring, RingRecord
from saferun.linux.bare_socket import Socket
from saferun.linux.limits import raise_files
from saferun.linux.signals import JOB_SIGNALS
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BATCH_BYTES = 1 << 20
_BELLS_BYTES = 4096


def serve(
    connection: Socket,
    ring: Ring,
    opened: Sequence[tuple[int, str]] = (),
    inbox: Inbox | None = None,
    begun: Sequence[Any] = (),
) -> None:
    """Do all that comes.

    Args:
        connection: the line to the supervisor. Whatever comes from there is a bell: there is something in the ring.
        ring: what is to be done.
        inbox: files that other processes hand in.
        opened: numbers and paths of files that a writer before this one has opened.
        begun: what it was asked to begin the run with, if it was.
    """
    # SIGPIPE: it outlives the supervisor, to write what is left. SIGXFSZ: a limit on sizes is an error like others.
    for signum in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ, *JOB_SIGNALS):
        signal.signal(signum, signal.SIG_IGN)
    raise_files()

    def send(message: JsonObject) -> None:
        with suppress(OSError):  # whatever is reported when the supervisor is gone
            connection.sendall(json.dumps(message).encode() + b"\n")

    server = FileServer(send)
    keeper = server.housekeeper
    server.take_over(opened, begun)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    inbox_fd = inbox.fds[0] if inbox is not None and inbox.fds else -1
    if inbox_fd >= 0:
        poll.register(inbox_fd, select.POLLIN)
    while not _drain(ring, server, send):
        due = min(moment for moment in (server.retry_at, keeper.due) if moment is not None)
        ready = dict(poll.poll(max(due - time.monotonic(), 0.0) * 1000))
        keeper.step(poll, ready, server.beat)
        if inbox is not None and inbox_fd in ready:
            ring.begin(0)
            if not server.take(inbox) and ready[inbox_fd] & select.POLLHUP:
                poll.unregister(inbox_fd)  # no process is left that could hand anything in
        if connection.fileno() in ready and _is_alone(connection):
            _drain(ring, server, send, everything=True)
            break
        server.retry()
    while inbox is not None and server.take(inbox):
        pass
    server.finish()
    keeper.finish()


def _is_alone(connection: Socket) -> bool:
    try:
        return not connection.recv(_BELLS_BYTES)
    except OSError:
        return True


def _drain(ring: Ring, server: FileServer, send: Callable[[JsonObject], None], *, everything: bool = False) -> bool:
    """Carry out what is in the ring. Returns whether it says that nothing more will come."""
    while records := ring.take(_BATCH_BYTES, everything=everything):
        last = records[-1]
        if last.kind == END:
            ring.release(last)
            return True
        if last.kind == DATA:
            _write(ring, server, records)
        else:
            ring.begin(last.stream)
            if not last.stream or not ring.is_done(last):
                server.handle(last.kind, last.stream, last.payload)
                ring.set_done(last)
        if ring.release(last):
            send({"room": True})
    return False


def _write(ring: Ring, server: FileServer, records: list[RingRecord]) -> None:
    """Append the records of each stream to its file, in one piece."""
    streams: dict[int, list[RingRecord]] = {}
    new = [record for record in records if not ring.is_done(record)]
    for record in new:
        streams.setdefault(record.stream, []).append(record)
    for stream, some in streams.items():
        ring.begin(stream)
        server.write(stream, [record.payload for record in some])
        ring.set_done(some[-1])
    server.note_times(new)
