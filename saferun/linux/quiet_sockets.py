"""Over which TCP connections nothing has moved for a while.

The kernel's socket diagnosis may wait for a file system when it is first used, so a fork asks it, for a bounded time.

Sources: tcp(7); include/uapi/linux/tcp.h of Linux, ``tcpi_last_data_sent`` and ``tcpi_last_data_recv``.
"""

from __future__ import annotations

import marshal
import os
from collections.abc import Iterable

from saferun.errors import suppress
from saferun.linux.child_output import run_forked

# A server may be busy with what it got for as long before it answers.
_QUIET_S = 60.0
_TIMEOUT_S = 2.0
_PROCESS = "sr-sockets"
_MOST = 4096  # their answer is whole

_late: list[float] = []


def quiet_sockets(inodes: Iterable[int]) -> frozenset[int]:
    """Those of these sockets over which no data has moved for a minute, and none waits for the other end.

    None is quiet of which the kernel does not tell: one of another network namespace, or without socket diagnosis.
    After the kernel has not answered in time, it is not asked again.
    """
    wanted = sorted(inodes)[:_MOST]
    if not wanted or _late:
        return frozenset()
    with suppress(OSError, ValueError, EOFError, TypeError):
        output, status = run_forked(lambda write_fd: _answer(wanted, write_fd), _TIMEOUT_S, _PROCESS)
        if status is None:
            _late.append(_TIMEOUT_S)
        elif output:
            return frozenset(marshal.loads(output))  # noqa: S302 - of a fork of this process
    return frozenset()


def _answer(wanted: Iterable[int], write_fd: int) -> None:
    from saferun.linux.sock_diag import tcp_counters

    known = tcp_counters() or {}
    quiet = [
        inode
        for inode in wanted
        if (one := known.get(inode)) is not None and one.quiet_s >= _QUIET_S and not one.waiting_bytes
    ]
    os.write(write_fd, marshal.dumps(quiet))
