"""Sentences about hosts that do not reach each other. Pure."""

from __future__ import annotations

from saferun.linux.nic import is_decoy

__all__ = ["FROM_HOST", "NO_HOST", "ONE_WAY", "TO_HOST", "TWO", "hint_of", "sentence"]

_REASONS = {
    "timeout": "timeout",
    "refused": "connection refused",
    "no_route": "no route to host",
    "unreachable": "network is unreachable",
    "broken": "connections break midway",
    "silent": "connections are accepted, but no data is received",
}

# By the kind of the probes; "" is for all others.
TO_HOST = {
    "timeout": "{nic} does not answer (timeout) from {of}",
    "refused": "{nic} refuses connections from {of}",
    "silent": "{nic} accepts connections from {of}, but no data is received",
    "broken": "{nic} breaks connections from {of} midway",
    "black_hole": "{nic} lets small messages from {of} through, and no large ones",
    "stranger": "another machine or program answers at {address}, the address of its {nic}, to {of}",
    "self": "its {nic} has the address of another host ({address}): {of} met themselves there",
    "": "{nic} cannot be reached ({reason}) from {of}",
}
"""One host is not reached; its name stands before."""

FROM_HOST = {
    "black_hole": "gets small messages through to {of} over {nic}, and no large ones",
    "stranger": "meets another machine or program at the addresses of {of} on {nic}",
    "self": "meets itself at the addresses of {of} on {nic}",
    "": "does not reach {of} over {nic} ({reason})",
}
"""One host does not reach others; its name stands before."""

TWO = {
    "black_hole": "{who} get small messages through to each other over {nic}, and no large ones",
    "stranger": "{who} meet another machine or program at each other's addresses on {nic}",
    "self": "{who} have the same address on {nic} ({address})",
    "": "{who} do not reach each other over {nic} ({reason})",
}

ONE_WAY = {
    "black_hole": "{source} gets small messages through to {who} over {nic}, and no large ones",
    "stranger": "{source} meets another machine or program at {address}, the address of {who}'s {nic}",
    "self": "{source} has the address of {who}'s {nic} itself ({address})",
    "": "{source} does not reach {who} over {nic} ({reason})",
}

NO_HOST = {
    "black_hole": "{nic} lets small messages through between all hosts, and no large ones",
    "stranger": "another machine or program answers at the hosts' addresses on {nic}",
    "self": "{nic} has the same address on several hosts ({address})",
    "": "no host reaches another over {nic} ({reason})",
}


def sentence(
    forms: dict[str, str], kind: str, nic: str, *, of: str = "", who: str = "", source: str = "", address: str = ""
) -> str:
    """One of the forms above, filled in.

    Args:
        forms: the table.
        kind: of the probes.
        nic: the interface.
        of: ``3 of 3 hosts``.
        who: the host that is not reached, or both.
        source: the host that does not reach it.
        address: that was tried.
    """
    form = forms.get(kind, forms[""])
    return form.format(
        nic=nic, of=of, who=who, source=source, address=address or "its address", reason=_REASONS.get(kind, kind)
    )


def hint_of(
    kind: str, nic: str, who: str, instead: str, *, direction: str = "", source: str = "", mtu: str = ""
) -> str:
    """What to do.

    Args:
        kind: of the probes.
        nic: the interface.
        who: the host or the hosts at fault.
        instead: the interface that can be used instead; empty: none is known.
        direction: ``in``: no host reaches it, but it reaches others; ``out``: the other way round; ``pair``: one of
            two directions works.
        source: for ``pair``, the host that does not get through to the other one.
        mtu: in what the MTUs differ: ``MTU 9000 on node3, 1500 on the others``.
    """
    tail = f", or run with --nic {instead}" if instead else ""
    commands = "nft list ruleset, iptables -S"
    if kind == "black_hole":
        differing = f" (now {mtu})" if mtu else ""
        return f"set the same MTU{differing} on all hosts and switch ports that {nic} passes{tail}"
    if is_decoy(nic):
        choice = f"run with --nic {instead}" if instead else "run with --nic and the interface between the hosts"
        return f"{nic} is for what runs inside one host: {choice}"
    if kind in {"stranger", "self"}:
        return f"give each host an address of its own on {nic} (arping -D shows who has one){tail}"
    if kind == "refused" and direction != "out":
        return f"a firewall on {who} rejects connections ({commands}): let the hosts of the job in{tail}"
    if kind == "silent" and direction != "out":  # what is accepted has passed all firewalls
        return f"another program may listen there, or saferun on {who} is stopped or starved{tail}"
    if direction == "in":
        return f"a firewall on {who} keeps connections out ({commands}): let the hosts of the job in{tail}"
    if direction == "out":
        return f"look at the routes and the firewall of {who} for what goes out ({commands}){tail}"
    if direction == "pair":
        return (
            f"a firewall on {who} (incoming) or {source} (outgoing) is likely ({commands}): let all hosts through{tail}"
        )
    whose = f"{nic} on {who}" if " " in who else f"{who}'s {nic}"
    return f"check the cable, the switch port and the VLAN of {whose}, and firewalls{tail}"
