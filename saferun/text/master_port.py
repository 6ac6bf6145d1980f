"""Hints about the master's port, which advise nothing that the user has not done. Pure.

Where the number of the port comes from decides what can be done about it.
"""

from __future__ import annotations

GIVEN = "given"
"""``--master-port``; without it there would be one port that every job has."""
NEEDLESS = "needless"
"""``--master-port``, without which a free port is chosen."""
ENDPOINT = "endpoint"
"""``--rdzv-endpoint``."""
DEFAULT = "default"
"""No port was given to several hosts, so that it is the one that every job has."""
SCHEDULER = "scheduler"
"""Whatever started the job says which port it is."""
CHOSEN = "chosen"
"""One of several that follow from the scheduler's job."""


NO_MASTER_HINT = "no --master-addr was given, so this host looks on itself: pass --master-addr HOST, or --hosts"
"""What to do where a host finds no master on itself, and has no address of another host."""


def default_port_text(port: int) -> str:
    """Where a port comes from that the user has not named."""
    return f"the default port {port}, because no --master-port was given"


def another_port_hint(source: str, port: int) -> str:
    """How the job gets another port.

    Args:
        source: where the number of this one comes from, one of the constants above.
        port: the number.
    """
    if source == NEEDLESS:
        return "pass another --master-port (without one, a free port is chosen)"
    if source == GIVEN:
        return "pass another --master-port to all hosts"
    if source == ENDPOINT:
        return "pass another port in --rdzv-endpoint to all hosts"
    if source == DEFAULT:
        return f"pass a free --master-port to all hosts: this is {default_port_text(port)}"
    return "pass a free --master-port to all hosts"


def port_in_use_hint(source: str, port: int) -> str:
    """What to do where another program has the port."""
    return f"stop that process, or {another_port_hint(source, port)}"


def is_started_hint(source: str, host: str, port: int, firewall: str = "is between") -> str:
    """What to look at where it is not known whether the master's saferun has been started.

    Args:
        source: where the number of the port comes from.
        host: the master, as the user named it.
        port: the number.
        firewall: what a firewall may do.
    """
    what = f"see whether saferun runs on {host}"
    if source in {GIVEN, NEEDLESS}:
        what += " with this --master-port"
    if source == ENDPOINT:
        what += " with this --rdzv-endpoint"
    what += f", and whether a firewall {firewall}"
    return f"{what}; this is {default_port_text(port)}" if source == DEFAULT else what


def let_through_hint(source: str, host: str, port: int) -> str:
    """What to do where a firewall drops what goes to the port of a host that is up."""
    if source == CHOSEN:
        return f"let the hosts of the job through, on {host} and on the way, or pass a --master-port that is open"
    return f"let TCP port {port} through, on {host} and on the way, or {another_port_hint(source, port)}"
