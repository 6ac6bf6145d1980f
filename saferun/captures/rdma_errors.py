"""Errors that the RDMA ports of this host have counted during the job.

The counters run since the driver was loaded, or since they were reset; so they are read once at the start as well.

Sources: Linux, Documentation/ABI/stable/sysfs-class-infiniband; NVIDIA, "Understanding mlx5 Linux Counters and Status
Parameters"; drivers/infiniband/hw/efa/efa_verbs.c.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
from collections.abc import Mapping

from saferun.captures.wire import HostCapture
from saferun.linux.children import reset_signals
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import die_with_parent
from saferun.linux.small_files import list_directory, read_line
from saferun.model import Value
from saferun.text.wording import duration_text

_PORTS = "sys/class/infiniband"
_COUNTERS = {
    "counters": (
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "port_rcv_errors",
        "symbol_error",
    ),
    "hw_counters": (
        "local_ack_timeout_err",
        "packet_seq_err",
        "req_transport_retries_exceeded",
        "rnr_nak_retry_err",
        # EFA's
        "impaired_remote_conn_events",
        "retrans_timeout_events",
        "unresponsive_remote_events",
    ),
}
_MOST_PORTS = 64
_MOST_SHOWN = 16
_SHARED_BYTES = 1 << 16

Counts = Mapping[str, Mapping[str, int]]
"""Of each port (``mlx5_0:1``) its counters."""


class _Start(Value):
    """``shared`` holds the counters as JSON once the process that reads them is done."""

    shared: mmap.mmap
    read_at: float


_START: list[_Start] = []


def remember_errors(root: str = "/") -> None:
    """Read the counters now, without waiting for them: a driver may answer late, or never.

    Captures that are forked from this process later compare with them.
    """
    if _START or not list_directory(os.path.join(root, _PORTS)):
        return
    shared = mmap.mmap(-1, _SHARED_BYTES)
    _START.append(_Start(shared, time.monotonic()))
    me = os.getpid()
    if os.fork():
        return
    try:
        die_with_parent(me)
        reset_signals(signal.pthread_sigmask(signal.SIG_BLOCK, ()), is_program=False)
        os.setsid()
        close_all_but()
        content = json.dumps(read_errors(root)).encode()
        if len(content) <= _SHARED_BYTES:
            shared[: len(content)] = content
    finally:
        os._exit(0)


def read_errors(root: str = "/") -> dict[str, dict[str, int]]:
    """The error counters of all ports of this host."""
    base = os.path.join(root, _PORTS)
    ports = [(device, port) for device in list_directory(base) for port in list_directory(f"{base}/{device}/ports")]
    found = {}
    for device, port in ports[:_MOST_PORTS]:
        counts = {}
        for folder, names in _COUNTERS.items():
            for name in names:
                count = read_line(f"{base}/{device}/ports/{port}/{folder}/{name}")
                if count.isdecimal():
                    counts[name] = int(count)
        found[f"{device}:{port}"] = counts
    return found


def is_remembered() -> bool:
    """Whether there were RDMA ports when ``remember_errors`` was called."""
    return bool(_START)


def capture_rdma_errors(root: str = "/") -> HostCapture:
    """What has been counted since ``remember_errors``, which must have been called."""
    start = _START[0]
    content = start.shared[:].rstrip(b"\0")
    if not content.endswith(b"}"):
        return HostCapture((), {}, "the counters at the start of the job are not known")
    before = json.loads(content)
    now = read_errors(root)
    seconds = time.monotonic() - start.read_at
    return HostCapture(
        error_lines(before, now, seconds), {"since_s": round(seconds, 1), "at_start": before, "now": now}
    )


def error_lines(before: Counts, now: Counts, seconds: float) -> tuple[str, ...]:
    """A line for each port that has counted errors in between."""
    lines = []
    for port, counts in sorted(now.items()):
        earlier = before.get(port, {})
        # A counter that has become smaller was reset.
        added = {
            name: count - earlier[name] if count >= earlier[name] else count
            for name, count in counts.items()
            if name in earlier
        }
        shown = ", ".join(f"{count} {name}" for name, count in added.items() if count)
        if shown:
            lines.append(f"{port}: {shown} in the last {duration_text(seconds)}")
    return (*lines[:_MOST_SHOWN], *((f"… {len(lines) - _MOST_SHOWN} more ports",) if len(lines) > _MOST_SHOWN else ()))
