"""What stands in for the connection to a coordinator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from saferun.linux.children import Child
from saferun.linux.poller import Poller
from saferun.model import JsonObject

if TYPE_CHECKING:
    from saferun.model import TorchParts

NO_PID = 1 << 22  # one above the largest that Linux gives


class SilentLink:
    """Stands in for a coordinator: it takes every message and answers when it is told to."""

    def __init__(
        self,
        listen_fd: int,
        environ: Mapping[str, str],
        *,
        torch_parts: TorchParts,
        more_fds: Mapping[str, int],
        poller: Poller,
    ) -> None:
        del listen_fd, environ, poller
        assert not more_fds
        self.fd, self._other = os.pipe()
        self.stderr_fd, self._stderr = os.pipe()
        self.child = Child(NO_PID, -1)
        self.torch_parts = torch_parts
        self.sent: list[JsonObject] = []
        self.said: list[JsonObject] = []

    def send(self, message: JsonObject) -> None:
        self.sent.append(message)

    def receive(self) -> list[JsonObject] | None:
        said, self.said = self.said, []
        return said or None

    def read_stderr(self) -> bytes | None:
        return None

    def last_line(self) -> str:
        return ""

    def say(self, **message: Any) -> None:
        """Have the loop find a message."""
        self.said.append(message)
        os.write(self._other, b".")

    def close(self) -> None:
        for fd in (self.fd, self._other, self.stderr_fd, self._stderr):
            os.close(fd)
