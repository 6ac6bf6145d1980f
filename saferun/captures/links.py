"""Connections to other hosts without acknowledgements: signs of a broken network between hosts.

A rank that waits in a collective looks the same whether another one is missing or its data does not get through. The
kernel knows: it retransmits what is not acknowledged, and counts. A stopped peer process is different: its kernel
acknowledges until the buffers are full, and then answers window probes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from saferun.captures.scene import Process, Scene
from saferun.evidence.job_evidence import StuckLink
from saferun.linux.small_files import list_directory, read_link
from saferun.linux.sockets import TcpState, sending_again

# The fourth attempt comes 1.4 s after the first, with the kernel's shortest timeout.
_LEAST_RETRIES = 3
_MOST_LINKS = 256


def capture_links(scene: Scene) -> None:
    """Emit the ranks' connections that stall, if any."""
    started_at = time.monotonic()
    found = stuck_links(scene.processes)
    for link in found:
        scene.emit("link", link)
    if found:
        content = {"links": [link._asdict() for link in found]}
        scene.note("links", (-1, 0), started_at, path=scene.write_json("links", content))


def stuck_links(processes: Iterable[Process]) -> list[StuckLink]:
    """The processes' connections to other hosts without acknowledgements, most retransmissions first."""
    found: dict[int, StuckLink] = {}
    tables: dict[str, dict[int, TcpState]] = {}
    for process in processes:
        stuck = _stuck_of_namespace(process.pid, tables)
        for inode in _socket_inodes(process.pid) if stuck else ():
            tcp = stuck.get(inode)
            if tcp is not None:
                found.setdefault(
                    inode, StuckLink(process.rank, tcp.local, tcp.remote, tcp.state, tcp.unsent_bytes, tcp.retries)
                )
    return sorted(found.values(), key=lambda link: (-link.retries, link))[:_MOST_LINKS]


def _stuck_of_namespace(pid: int, tables: dict[str, dict[int, TcpState]]) -> dict[int, TcpState]:
    namespace = read_link(f"/proc/{pid}/ns/net")
    if not namespace:
        return {}
    if namespace not in tables:
        tables[namespace] = {
            inode: tcp
            for inode, tcp in sending_again(pid, _LEAST_RETRIES).items()
            if tcp.remote.rpartition(":")[0] != tcp.local.rpartition(":")[0]
        }
    return tables[namespace]


def _socket_inodes(pid: int) -> list[int]:
    targets = (read_link(f"/proc/{pid}/fd/{name}") for name in list_directory(f"/proc/{pid}/fd"))
    return [int(target[8:-1]) for target in targets if target.startswith("socket:[") and target[8:-1].isdecimal()]
