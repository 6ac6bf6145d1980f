"""Names: whether this host's own and the master's resolve, and to what."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

from saferun.linux.nic import Nic
from saferun.model import Value
from saferun.preflight.checks.answers import failure, ok, warning
from saferun.preflight.checks.backend import GLOO, known_backend
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.default_nics import (
    GLOO_IFNAME,
    candidates,
    gloo_choice,
    is_loopback,
    own_name_hint,
    unanswered_text,
)
from saferun.preflight.results import CheckResult

DEADLINE_S = 2.0
"""How long a name may take to resolve."""

UNCERTAIN = frozenset({"late", "unanswered"})
"""The errors that say nothing of what a name resolves to a moment later."""

_SEVERAL = 2
_MASTER_HINT = "look at --master-addr (or --rdzv-endpoint), and at /etc/hosts and the name servers of this host"


class Lookup(Value):
    """What a name resolves to.

    Attributes:
        name: of a host, or an address.
        addresses: in the resolver's order, each once.
        error: ``unknown`` (there is no such name), ``unanswered`` (no name server says), ``late``; empty: it resolves.
    """

    name: str
    addresses: tuple[str, ...] = ()
    error: str = ""


def resolve(names: Sequence[str], deadline_s: float = DEADLINE_S) -> tuple[Lookup, ...]:
    """What names resolve to, all looked up at the same time; an answer that comes too late is left alone.

    Args:
        names: of hosts, or addresses.
        deadline_s: how long it may take for all of them, in seconds.
    """
    found: dict[str, Lookup] = {}
    done = threading.Semaphore(0)
    until = time.monotonic() + deadline_s

    def ask(name: str) -> None:
        found[name] = _ask(name)
        done.release()

    wanted = dict.fromkeys(names)
    for name in wanted:
        threading.Thread(target=ask, args=(name,), daemon=True).start()
    for _ in wanted:
        if not done.acquire(timeout=max(until - time.monotonic(), 0.0)):
            break
    return tuple(found.get(name, Lookup(name, error="late")) for name in names)


def _ask(name: str) -> Lookup:
    try:
        # As bytes: text would import the IDNA codec. The type is what gloo and torch's store ask for.
        infos = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        is_unanswered = error.errno in {socket.EAI_AGAIN, socket.EAI_FAIL}
        return Lookup(name, error="unanswered" if is_unanswered else "unknown")
    except (OSError, UnicodeError):
        return Lookup(name, error="unknown")
    return Lookup(name, tuple(dict.fromkeys(str(info[4][0]) for info in infos)))


def check_names(context: CheckContext) -> CheckResult:
    """Whether this host's own name leads to itself and not to loopback, and whether the master's name resolves.

    On one host no name is needed. Without a name of its own that leads to one of its interfaces, gloo listens on
    loopback, where other hosts never find it; NCCL does not care.
    """
    if not context.spans_hosts:
        return ok("only one host: no names are needed")
    from saferun.linux.netlink import read_nics

    own = socket.gethostname()
    lookups = resolve((own, context.master) if context.master else (own,))
    nics = read_nics(context.root)
    master = lookups[1] if context.master else Lookup("")
    facts = tuple((f"name {lookup.name}", " ".join(lookup.addresses)) for lookup in dict.fromkeys(lookups))
    for result in (_judge_master(context, master, nics), _judge_own(context, lookups[0], master, nics)):
        if result is not None:
            return result._replace(facts=facts)
    shown = ", ".join(f"{one.name} is {one.addresses[0]}" for one in dict.fromkeys(lookups) if one.addresses)
    return ok(shown or "no name is needed", facts)


def is_loopback_name(name: str) -> bool:
    """Whether a name or address is one that every host has for itself."""
    return name == "localhost" or is_loopback(name)


def is_elsewhere(context: CheckContext, master: Lookup, nics: Sequence[Nic]) -> bool:
    """Whether it is certain that ranks run on other machines than this one.

    ``context.spans_hosts`` alone is not: several saferuns may have been started on one machine.

    Args:
        context: the launch.
        master: what its name resolves to here.
        nics: this host's interfaces.
    """
    if is_loopback_name(context.master):
        return False
    own = socket.gethostname().partition(".")[0]
    hosts = {host.partition(".")[0] if host[:1].isalpha() else host for host in context.hosts}
    if own in hosts and sum(not is_loopback_name(host) for host in hosts) >= _SEVERAL:
        return True
    if context.serves or not master.addresses:
        return False
    return not any(is_loopback(one) or any(one in nic.addresses for nic in nics) for one in master.addresses)


def _judge_master(context: CheckContext, master: Lookup, nics: Sequence[Nic]) -> CheckResult | None:
    """What is wrong with the master's name; None: nothing."""
    if master.error:
        message = {
            "unknown": f"the master's name {master.name} is unknown on this host",
            "unanswered": f"the master's name {master.name} cannot be resolved on this host: no name server answers",
            "late": f"the master's name {master.name} takes longer than {DEADLINE_S:g} s to resolve on this host",
        }[master.error]
        # A name may be there when its host is, as a pod's or a container's, and the hosts wait for each other.
        return warning(message, _MASTER_HINT, class_name="name_resolution", transient=True)
    is_here = master.addresses and all(is_loopback(address) for address in master.addresses)
    if is_here and not context.serves and is_elsewhere(context, master, nics):
        message = (
            f"the master's name {master.name} resolves to {master.addresses[0]} on this host, which is this host itself"
        )
        hint = f"give {master.name} its address in /etc/hosts of this host, or pass --master-addr"
        answer = failure if known_backend(context) else warning
        return answer(message, hint, class_name="name_resolution")
    return None


def _judge_own(context: CheckContext, own: Lookup, master: Lookup, nics: Sequence[Nic]) -> CheckResult | None:
    """What is wrong with this host's own name; None: nothing."""
    choice = gloo_choice(nics, context.environ, own.addresses)
    if choice.rule == GLOO_IFNAME or context.nics or not is_loopback(choice.addresses[0]):
        return None
    if own.error == "late":
        message = f"its own name {own.name} takes longer than {DEADLINE_S:g} s to resolve"
        hint = "look at /etc/hosts and the name servers of this host"
        return warning(message, hint, class_name="name_resolution", transient=True)
    if own.error:
        message = f"its own name {own.name} cannot be resolved"
    elif is_loopback(own.addresses[0]):
        message = f"its own name {own.name} resolves to {own.addresses[0]}"
    else:
        message = f"its own name {own.name} resolves to {own.addresses[0]}, which none of its interfaces has"
    if not is_elsewhere(context, master, nics):
        return ok(f"{message}, which does no harm on one machine")
    tried = candidates(nics, context.environ) or ("the interface between the hosts",)
    hint = own_name_hint(tried[0])
    if own.error == "unanswered":
        # Gloo asks later, and the name server may answer by then.
        return warning(unanswered_text(own.name), hint, class_name="name_resolution", transient=True)
    # MPI, NCCL and what other accelerators bring do not ask for the host's name.
    answer = failure if known_backend(context) == GLOO else warning
    message += ", so that gloo would listen on loopback, where no other host reaches it"
    return answer(message, hint, class_name="network_interface")
