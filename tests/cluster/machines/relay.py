"""A slow and lossy cable: ``python relay.py NIC NIC DELAY_MS LOSS [LONGEST_BYTES]`` carries frames between two NICs.

The kernel's own tool for that, netem, is a module that many kernels lack. Whoever sends to these NICs must compute
checksums and cut segments itself (``ethtool -K``): a frame that is read here has neither hardware before it nor after.
"""

from __future__ import annotations

import collections
import random
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from tests.cluster.machines import kernel

_ETH_P_ALL = 3
_LONGEST_FRAME_BYTES = 1 << 16


def relay(nics: tuple[str, str], delay_s: float, loss: float, longest_bytes: int) -> None:
    """Carry frames, in order, until a NIC goes away.

    Args:
        nics: names of NICs of this network namespace.
        delay_s: how long a frame is on its way, in both directions.
        loss: the part of the frames, from 0 to 1, that never arrives.
        longest_bytes: frames that are longer never arrive.
    """
    ends = [_end(nic) for nic in nics]
    print("ready", flush=True)
    chance = random.Random(0)  # noqa: S311 - no secret: the same losses every time, as far as the frames are the same
    under_way: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, end, frame = under_way.popleft()
            with suppress(BlockingIOError):  # a queue that is full loses frames, as a switch's does
                end.send(frame)
        timeout_s = max(0.0, under_way[0][0] - now) if under_way else None
        ready, _, _ = select.select(ends, [], [], timeout_s)
        for end in ready:
            other = ends[1 - ends.index(end)]
            with suppress(BlockingIOError):
                while True:
                    frame, (_, _, direction, *_) = end.recvfrom(_LONGEST_FRAME_BYTES)
                    if direction == socket.PACKET_OUTGOING or len(frame) > longest_bytes:
                        continue
                    if chance.random() >= loss:
                        under_way.append((time.monotonic() + delay_s, other, frame))


def _end(nic: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.htons(_ETH_P_ALL))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
    end.bind((nic, 0))
    return end


if __name__ == "__main__":
    kernel.die_with_parent(signal.SIGKILL)
    with suppress(OSError):  # ENETDOWN: the host was switched off
        longest_bytes = int([*sys.argv, str(_LONGEST_FRAME_BYTES)][5])
        relay((sys.argv[1], sys.argv[2]), float(sys.argv[3]) / 1000, float(sys.argv[4]), longest_bytes)
