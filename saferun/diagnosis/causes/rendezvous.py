"""What goes wrong where ranks meet: the store, names, ports. Pure.

Sources: messages of torch's TCPStore and rendezvous (2.4 to 2.13) and of gloo; errno(3), getaddrinfo(3).
"""

from __future__ import annotations

import re

from saferun.diagnosis.causes.failure import Failure, cause, shortened
from saferun.diagnosis.causes.texts import TextRule, by_text, first_line, of_connections, reported_lines
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_WERE_STARTED = "check whether all ranks were started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
_STORE = (
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(r"Timed out after (\d{1,9}) seconds waiting for clients\. (\d{1,9}/\d{1,9}) clients joined"),
        "the ranks did not meet: {1} had come to the store after {0} s",
        _WERE_STARTED,
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        # The store of JAX and TensorFlow.
        LazyPattern(
            r"\bcluster registration failed\b|\bWait_for_all_tasks_to_register\b"
            r"|\bRegisterTask\b.{0,200}\b(?:DEADLINE_EXCEEDED|Deadline Exceeded)\b"
            r"|\b[Cc]oordination service\b.{0,60}\b(?:in error status|not (?:available|ready)): DEADLINE_EXCEEDED\b"
        ),
        "not all tasks have come to the coordination service",
        _WERE_STARTED,
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(r"[Tt]imed out initializing process group|[Tt]imed out.{0,120}store.based barrier"),
        "not all ranks have reached init_process_group",
        _WERE_STARTED,
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(
            r"client socket has (?:timed out after \w{1,20}|failed to connect to any network address of)"
            r"(?: while trying to connect to)? ?(?:\((.{1,200}?), (\d{1,5})\)|(\S{1,200}?):(\d{1,5})(?!\d))"
        ),
        lambda _, match: f"cannot connect to the store at {match[1] or match[3]}:{match[2] or match[4]}",
        "check whether the host of MASTER_ADDR can be reached at that port (firewall, wrong interface, wrong host)",
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(
            r"wait timeout after (\d{1,12})ms, keys: (.{1,160})|Timeout waiting for key: (.{1,160}?) after (\d{1,12})"
        ),
        lambda _, match: (
            f"another rank has not put {match[2] or match[3]} into the store within "
            f"{int(match[1] or match[4]) / 1000:g} s"
        ),
        f"one rank did not get that far: look at what the others did, and {_WERE_STARTED}",
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(
            r"store->get\(.{1,160}\) got error|ncclUniqueId.{0,200}store|\bSocket Timeout\b"
            r"|\bconnect\(\) timed out\. Original timeout was"
        ),
        "another rank did not join NCCL's setup",
        "one rank did not get that far: look at what the others did",
        must_be_last=True,
    ),
    TextRule(
        "network_interface",
        LazyPattern(r"[Uu]nable to find (?:address|interface) for: (\S{0,60})"),
        "this host has no network interface {0}",
        "look at GLOO_SOCKET_IFNAME: `ip addr` shows the names of this host",
        must_be_last=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(
            r"connectFullMesh failed"
            r"|\bIn \w{1,40} at tensorpipe/.{1,160}(?:refused|[Tt]imed out|unreachable|[Nn]o route)"
            r"|timed out connecting: |gloo/.{0,200}(?:\bconnect\b|Connection refused)"
        ),
        "gloo could not connect the ranks",
        "look at GLOO_SOCKET_IFNAME, and whether the hosts reach each other's addresses",
        in_last_lines=True,
    ),
    TextRule(
        "rendezvous_store_failure",
        LazyPattern(r"(Rendezvous(?:Timeout|Connection|Closed|State)Error|DistStoreError|DistNetworkError)\b"),
        "the store failed ({0})",
        _WERE_STARTED,
    ),
)
_MASTER_ADVICE = "look at MASTER_ADDR, and whether this host knows that name (getent hosts NAME)"
_NAME_ADVICE = "look at that name, and whether this host knows it (getent hosts NAME), and at /etc/resolv.conf"
# What torch says of the store's host, and where it looks that up.
_STORE_CALLS = LazyPattern(r"\bDist(?:Network|Store)Error\b|\bTCPStore\b|\[c10d\] |\bgai error: |\bclient socket\b")
_MEETS_RANKS = LazyPattern(r"/torch/distributed/(?:rendezvous\.py|distributed_c10d\.py|elastic/)")
_LONGEST_ERROR = 160
_NAMES = (
    TextRule(
        "name_resolution",
        LazyPattern(r"Temporary failure in name resolution|\bEAI_AGAIN\b|\[Errno -3\]|\bgai error: ?-3\b"),
        lambda _, match: f"the name service did not answer{_name_or_error(match)}",
        "look at /etc/resolv.conf, and whether that server answers (getent hosts NAME); an address needs none",
        in_context=True,
        of_connections=True,
    ),
    TextRule(
        "name_unknown",
        LazyPattern(
            r"Name or service not known|nodename nor servname provided|No address associated with hostname"
            r"|\bEAI_(?:NONAME|NODATA)\b|\bgaierror: \[Errno -[25]\]|\bgai error: ?-[25]\b"
        ),
        lambda _, match: f"a host's name is not known{_name_or_error(match)}",
        _MASTER_ADVICE,
        in_context=True,
        of_connections=True,
    ),
    TextRule(
        "name_unknown",
        LazyPattern(r"hostname of the client socket cannot be retrieved|\bgai error: -?\d"),
        lambda _, match: f"a host's name cannot be resolved{_name_or_error(match)}",
        _MASTER_ADVICE,
        of_connections=True,
    ),
    TextRule(
        "name_resolution",
        LazyPattern(
            r"^(?:ssh|scp|rsync|curl|wget|git|ping|nc|pdsh)\S{0,40}: .{1,200}: Temporary failure in name resolution$"
        ),
        lambda _, match: f"the name service did not answer: {match[0]}",
        "look at /etc/resolv.conf, and whether that server answers (getent hosts NAME)",
        in_last_lines=True,
    ),
    TextRule(
        "name_unknown",
        LazyPattern(r"^(?:ssh|scp|rsync|curl|wget|git|ping|nc|pdsh)\S{0,40}: .{1,200}: Name or service not known$"),
        lambda _, match: f"a host's name is not known: {match[0]}",
        "check whether this host knows that name (getent hosts NAME); a pod has one only while it runs",
        in_last_lines=True,
    ),
)
_CONNECTING = LazyPattern(
    r"client socket has (?:timed out after \w{1,20}|failed to connect to any network address of)"
    r"(?: while trying to connect to)? ?(\(.{1,253}?, \d{1,5}\))"
)
_UNRESOLVED = LazyPattern(r"network addresses of (\(.{1,253}?, \d{1,5}\)) cannot be retrieved \(gai error: (-?\d{1,4})")
_REACHED = LazyPattern(r"socket has failed to connect to \[|\berrno: \d")
_EAI_AGAIN = "-3"
# A server with a port of its own is one of the site's.
_SERVICE = LazyPattern(
    r"\bHTTPS?ConnectionPool\(host='([\w.-]{1,253})', port=(?:80|443)\b|\bhttps?://([\w.-]{1,253})(?!:\d|[\w.-])"
)
# Names of a cluster's own, and addresses.
_NEAR = LazyPattern(r"\.(?:local|localdomain|internal|lan|svc|cluster)\b|^[\d.]{1,15}$")
_HUB = LazyPattern(r"\b(?:huggingface\.co|hf\.co)$")
_NAME = LazyPattern(
    r"[Ff]ailed to resolve '([\w.:-]{1,253})'|\bhost='([\w.:-]{1,253})'"
    r"|\(([\w.:-]{1,253}), ?\d{1,5}\)|\[([\w.:-]{1,253})\]:\d{1,5}"
)
_IN_USE = LazyPattern(r"EADDRINUSE|[Aa]ddress already in use|\[Errno 98\]")
# What a server logs that gives up; others take the next port.
_BOUND = LazyPattern(
    r"^(?!.{0,200}\bWARN).{0,500}\b(?:bind|listen|binding)\b.{0,200}(?:EADDRINUSE|[Aa]ddress already in use)"
)
_PORT = LazyPattern(r"\bport: ?(\d{1,5})\b|[:\]](\d{2,5})(?: |,|$|\))")


def store_failure(failure: Failure) -> Cause | None:
    """The ranks did not find each other, or the store did not answer."""
    return by_text(failure, _STORE)


def name_failure(failure: Failure) -> Cause | None:
    """A host's name leads nowhere: now, because the name service is away, or ever."""
    found = by_text(failure, _NAMES)
    if found is None:
        return _name_of_store(failure)
    service = _service_of(found.proof, (*failure.messages, *failure.context))
    if service:
        return found._replace(advice=_advice_without(service))
    is_other = found.advice == _MASTER_ADVICE and not _is_of_store(failure, found.proof)
    return found._replace(advice=_NAME_ADVICE) if is_other else found


def _is_of_store(failure: Failure, proof: str) -> bool:
    """Whether the name is that of the store's host, and not of any other that the script connects to."""
    blocks = failure.error.blocks if failure.error is not None else ()
    return _STORE_CALLS.search(proof) is not None or any(
        _MEETS_RANKS.search(frame.file) for block in blocks for frame in block.frames
    )


def _service_of(proof: str, lines: tuple[str, ...]) -> str:
    """The service outside the job whose name it is; empty where it is of none.

    Where the proof names a host, other lines may show that it is a service's: they name the same one.
    """
    host = _host_in(proof)
    for line in (proof, *lines) if host else (proof,):
        for match in _SERVICE.finditer(line):
            name = str(next(filter(None, match.groups())))
            if "." in name and _NEAR.search(name) is None and host in {"", name}:
                return name
    return ""


def _advice_without(service: str) -> str:
    offline = " with HF_HUB_OFFLINE=1" if _HUB.search(service) else ""
    return (
        "where this host has no internet, download once before the job, and read from a shared directory"
        f"{offline}; else look at the proxy (HTTPS_PROXY), at /etc/resolv.conf, and whether the name is right"
    )


def _name_of_store(failure: Failure) -> Cause | None:
    """The name of the store's host: torch's exception has only a timeout, a line of its log has the reason."""
    connecting = first_line(_CONNECTING, failure.messages)
    if connecting is None:
        return None
    address = connecting[1][1]
    unresolved = None
    for line in failure.lines:
        if address in line and _REACHED.search(line):
            # The name led somewhere: what could not be resolved was its other kind of address.
            return None
        match = _UNRESOLVED.search(line)
        if match is not None and match[1] == address:
            unresolved = (line, match)
    if unresolved is None:
        return None
    line, match = unresolved
    rule = _NAMES[0] if match[2] == _EAI_AGAIN else _NAMES[1]
    message = rule.message(failure, match) if callable(rule.message) else rule.message
    return cause(failure, rule.class_name, message, rule.advice, proof=line)


def _name_or_error(match: re.Match[str]) -> str:
    """``: node7``, where the message has the name; else the message itself."""
    name = _host_in(match.string[:1000])
    return f": {name}" if name else f" ({shortened(match.string.strip(), _LONGEST_ERROR)})"


def _host_in(line: str) -> str:
    found = _NAME.search(line)
    return str(next(filter(None, found.groups()))) if found is not None else ""


def port_in_use(failure: Failure) -> Cause | None:
    """Another process has the port."""
    messages = of_connections(failure, (*failure.messages, *failure.context))
    found = first_line(_IN_USE, messages) or first_line(_BOUND, reported_lines(failure))
    if found is None:
        return None
    match = _PORT.search(found[0])
    port = f"port {match[1] or match[2]}" if match is not None else "a port"
    advice = "find who has it (ss -ltnp), and stop that or take another port; port 0 lets the system choose"
    return cause(failure, "port_in_use", f"{port} is in use", advice, proof=found[0])
