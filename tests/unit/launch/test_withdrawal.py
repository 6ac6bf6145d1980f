"""How long a host that cannot start waits until the others have heard of it."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from saferun.launch import withdrawal
from tests.descriptors import large_descriptors


def test_the_end_is_noticed_whatever_the_numbers_of_the_descriptors() -> None:
    """Saferun may inherit a thousand descriptors."""
    with large_descriptors():
        fds = [*os.pipe(), *os.pipe()]
        link: Any = SimpleNamespace(fd=fds[0], stderr_fd=fds[2], receive=lambda: [{"op": "joined"}])
        os.write(fds[1], b"\n")
        began_at = time.monotonic()
        withdrawal._await_end(link)
        assert time.monotonic() - began_at < withdrawal._ALL_S
        for fd in fds:
            os.close(fd)
