"""Whether network interfaces work, by name. Source: netdevice(7), SIOCGIFFLAGS; if_nameindex(3)."""

from __future__ import annotations

import fcntl
import socket
import struct

_GET_FLAGS = 0x8913
_REQUEST = struct.Struct("=16sH14x")  # struct ifreq
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40

WORKS = ""
NO_CARRIER = "has no carrier"
DOWN = "is down"
MISSING = "does not exist any more"


def working_nics() -> list[str]:
    """The interfaces except loopback that are up and have a carrier; none if the kernel cannot be asked."""
    try:
        with _probe() as probe:
            return [
                name
                for _, name in socket.if_nameindex()
                if _flags(probe, name) & (_UP | _RUNNING | _LOOPBACK) == _UP | _RUNNING
            ]
    except OSError:
        return []


def nic_state(name: str) -> str:
    """What is wrong with an interface, to follow its name in a message; ``WORKS`` (empty): nothing."""
    try:
        with _probe() as probe:
            flags = _flags(probe, name)
    except OSError:
        return MISSING
    if not flags & _UP:
        return DOWN
    return WORKS if flags & _RUNNING else NO_CARRIER


def _probe() -> socket.socket:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)


def _flags(probe: socket.socket, name: str) -> int:
    flags: int = _REQUEST.unpack(fcntl.ioctl(probe, _GET_FLAGS, _REQUEST.pack(name.encode()[:15], 0)))[1]
    return flags
