"""What a host answers at its ports when its coordinator is gone: by which signal. So others do not have to guess."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from functools import partial

from saferun.cluster.messages import COORDINATOR_ENDED
from saferun.errors import suppress
from saferun.linux.bare_socket import MSG_DONTWAIT, MSG_NOSIGNAL, Socket, accept_connection
from saferun.linux.poller import Poller

__all__ = ["EndAnswers"]

_MOST_AT_ONCE = 64
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class EndAnswers:
    """Answers whoever connects to the ports that this host listens on.

    Args:
        listeners: their sockets.
        signum: the signal that ended the coordinator; 0: none.
        poller: the loop's.
    """

    def __init__(self, listeners: Iterable[Socket], signum: int, poller: Poller) -> None:
        self._listeners = list(listeners)
        self._answer = b"%s%d\n" % (COORDINATOR_ENDED, signum)
        self._poller = poller
        for listener in self._listeners:
            listener.setblocking(False)
            poller.watch(listener.fileno(), partial(self._answer_all, listener))

    def _answer_all(self, listener: Socket) -> None:
        try:
            for _ in range(_MOST_AT_ONCE):
                connection = accept_connection(listener)
                with suppress(OSError):
                    connection.send(self._answer, MSG_DONTWAIT | MSG_NOSIGNAL)
                connection.close()
        except BlockingIOError:
            return  # there is no other one
        except OSError as error:
            if error.errno in _NO_ROOM:
                # It would be ready again at once, and take a whole processor.
                self._poller.unwatch(listener.fileno())
                self._listeners.remove(listener)

    def close(self) -> None:
        """Another coordinator is to answer there."""
        for listener in self._listeners:
            self._poller.unwatch(listener.fileno())
        self._listeners.clear()
