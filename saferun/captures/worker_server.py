"""Stacks from torch's worker server, which the hook opens on a Unix socket in ranks that use torch.distributed."""

from __future__ import annotations

import time

from saferun.captures.scene import UNPTRACEABLE_STATES, Process
from saferun.linux.procfs import read_stat

_TEXT_LIMIT_BYTES = 1 << 20
_PATIENCE_S = 1.0
_REQUEST = b"POST /handler/dump_traceback HTTP/1.0\r\nHost: rank\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def dump_by_worker_server(process: Process, deadline: float) -> bytes:
    """What the server's ``dump_traceback`` answers, faulthandler's text; empty where there is no answer.

    Args:
        process: whom to ask.
        deadline: in monotonic seconds; one second is the most that is waited for in any case.
    """
    import socket

    stat = read_stat(process.pid)
    if not process.hook_prefix or stat is None or stat.state in UNPTRACEABLE_STATES:
        return b""
    give_up_at = min(deadline, time.monotonic() + _PATIENCE_S)
    content = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as link:
            link.settimeout(max(0.001, give_up_at - time.monotonic()))
            link.connect(f"{process.hook_prefix}.{process.pid}.sock")
            link.sendall(_REQUEST)
            while len(content) < _TEXT_LIMIT_BYTES:
                link.settimeout(max(0.001, give_up_at - time.monotonic()))
                chunk = link.recv(1 << 16)
                if not chunk:
                    break
                content += chunk
    except OSError:
        pass
    head, _, body = content.partition(b"\r\n\r\n")
    return body if b" 200 " in head.partition(b"\r\n")[0] else b""
