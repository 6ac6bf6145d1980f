"""Handing whole files to the writer: the other end of the inbox, for processes of captures."""

from __future__ import annotations

import json
import os
import select
import time
from contextlib import suppress

from saferun.files.inbox import TOKENS, Outbox, put_back, tokens_for
from saferun.linux.bare_socket import MSG_DONTWAIT, MSG_NOSIGNAL, Socket, send_fds
from saferun.linux.memory_file import memory_file


def hand_in(outbox: Outbox, path: str, content: bytes, patience_s: float) -> bool:
    """Hand in a file. Safe in several threads and processes at a time.

    Args:
        outbox: leads to the writer.
        path: where it is to be; its directory is made where there is none.
        content: the whole of it.
        patience_s: how long to wait for room.

    Returns:
        Whether the writer has it or will get it. If not, it found no room, or there is no writer.
    """
    if outbox.fd < 0:
        return False
    give_up_at = time.monotonic() + patience_s
    count = tokens_for(len(content))
    taken = _take(outbox.tokens_read, count, give_up_at)
    is_sent = False
    if taken == count:
        with suppress(OSError):
            fd = memory_file("capture", content)
            try:
                _send(outbox.fd, json.dumps([path, len(content)]).encode(), fd, give_up_at)
            finally:
                os.close(fd)
            is_sent = True
    if not is_sent:
        put_back(outbox.tokens_write, taken)
    return is_sent


def _take(tokens_read: int, count: int, give_up_at: float) -> int:
    taken = 0
    while count <= TOKENS and taken < count:
        try:
            tokens = os.read(tokens_read, count - taken)
            if not tokens:  # no process is left that could put any back
                break
            taken += len(tokens)
        except BlockingIOError:
            if not _wait(tokens_read, select.POLLIN, give_up_at):
                break
        except OSError:
            break
    return taken


def _send(outbox_fd: int, message: bytes, fd: int, give_up_at: float) -> None:
    connection = Socket(fileno=os.dup(outbox_fd))
    try:
        while True:
            try:
                send_fds(connection, message, [fd], MSG_DONTWAIT | MSG_NOSIGNAL)
            except BlockingIOError:
                if not _wait(outbox_fd, select.POLLOUT, give_up_at):
                    raise
            else:
                return
    finally:
        connection.close()


def _wait(fd: int, events: int, give_up_at: float) -> bool:
    poll = select.poll()
    poll.register(fd, events)
    return bool(poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000))
