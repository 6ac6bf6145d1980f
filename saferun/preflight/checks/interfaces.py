"""The interfaces that the ranks' libraries would use: whether they exist, and whether others can reach them."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from saferun.linux.netlink import read_nics
from saferun.linux.nic import Nic, is_decoy
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.backend import GLOO, known_backend
from saferun.preflight.checks.common import NcclEnviron, listed, listed_are, with_nccl_conf
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import UNCERTAIN, Lookup, is_elsewhere, resolve
from saferun.preflight.default_nics import (
    AUTO,
    GLOO_IFNAME,
    NCCL_FAMILY,
    NCCL_IFNAME,
    Choice,
    address_to_reach,
    candidates,
    gloo_choice,
    is_loopback,
    named,
    nccl_choice,
    near_name,
)
from saferun.preflight.results import CheckResult

_CLASS = "network_interface"
_MOST_SHOWN = 6
# They only have an address that was set up for them: for a routing protocol to announce, or at a tunnel's end.
_GIVEN_ON_PURPOSE = ("dummy", "gre", "ip6gre")


def check_interfaces(context: CheckContext) -> CheckResult:
    """Whether the interfaces that variables and ``--nic`` name are there and up, and what gloo and NCCL would use.

    What a variable names breaks the job only if the ranks read the variable: sites set them for all hosts, and for jobs
    of all kinds. Whether an interface that is there reaches the others is found out by trying; only what leads
    nowhere by its nature is reported here.
    """
    nics = read_nics(context.root)
    settings = with_nccl_conf(context)
    environ = settings.environ
    lookups = _resolve(context, environ)
    own, master = lookups
    gloo = gloo_choice(nics, environ, own.addresses)
    is_nccl_known = settings.is_known(NCCL_IFNAME)
    nccl = nccl_choice(nics, environ) if is_nccl_known else Choice((), (), "")
    is_known = gloo.rule == GLOO_IFNAME or own.error not in UNCERTAIN
    facts = (
        ("gloo", ",".join(gloo.names) if is_known else ""),
        ("gloo_by", gloo.rule),
        ("nccl", ",".join(nccl.names)),
        ("nccl_by", nccl.rule),
        ("probed", ",".join(candidates(nics, environ, context.nics))),
    )
    elsewhere = context.spans_hosts and is_elsewhere(context, master, nics)
    result = (
        _judge_wanted(context, nics, elsewhere=elsewhere)
        or _judge_gloo(context, gloo, nics, elsewhere=elsewhere)
        or _judge_nccl(context, nccl, settings, nics)
        or (_judge_reach(context, gloo, nccl, settings, nics) if elsewhere else None)
    )
    if result is not None:
        return result._replace(facts=facts)
    by = {GLOO_IFNAME: f" ({GLOO_IFNAME})", NCCL_IFNAME: f" ({settings.named(NCCL_IFNAME)})"}
    why = "takes long to resolve" if own.error == "late" else "cannot be resolved now"
    used = _listed(gloo.names) if is_known else f"the interface of {own.name}, which {why}"
    message = f"gloo would use {used}{by.get(gloo.rule, '')}"
    if context.vendor != "none":
        unknown = f"what {settings.users_file} may name, which cannot be read now"
        message += f", NCCL {_listed(nccl.names) if is_nccl_known else unknown}{by.get(nccl.rule, '')}"
    return ok(message, facts)


def _resolve(context: CheckContext, environ: Mapping[str, str]) -> tuple[Lookup, Lookup]:
    """This host's own name and the master's, as far as they are needed."""
    if not context.spans_hosts:
        return Lookup(""), Lookup("")
    own = "" if len(environ.get(GLOO_IFNAME, "")) > 1 else socket.gethostname()
    names = [name for name in (own, context.master) if name]
    found = {lookup.name: lookup for lookup in resolve(names)}
    return found.get(own, Lookup("")), found.get(context.master, Lookup(""))


# ------------------------------------------------------------------------------------------------------ what is named


def _judge_wanted(context: CheckContext, nics: Sequence[Nic], *, elsewhere: bool) -> CheckResult | None:
    """What is wrong with the interfaces that ``--nic`` names."""
    for name in context.nics:
        if name != AUTO:
            result = _judge_name("--nic", name, nics, spans_hosts=context.spans_hosts)
            if result is not None:
                # What is asked of saferun itself and cannot be done is refused.
                is_there = named(nics, name) is not None
                verdict = _verdict_of(context, name, nics, elsewhere=elsewhere) if is_there else "fail"
                return result._replace(verdict=verdict)
    return None


def _judge_gloo(context: CheckContext, gloo: Choice, nics: Sequence[Nic], *, elsewhere: bool) -> CheckResult | None:
    """What is wrong with the interfaces that GLOO_SOCKET_IFNAME names."""
    if gloo.rule != GLOO_IFNAME:
        return None
    for name in (*gloo.missing, *gloo.names):
        result = _judge_name(GLOO_IFNAME, name, nics, spans_hosts=context.spans_hosts)
        if result is not None:
            if name.startswith(("^", "=")):
                result = result._replace(hint=f"gloo takes exact names, and only NCCL knows ^ and =; {result.hint}")
            return result._replace(verdict=_verdict_of(context, name, nics, elsewhere=elsewhere))
    return None


def _verdict_of(context: CheckContext, name: str, nics: Sequence[Nic], *, elsewhere: bool) -> str:
    """How bad it is that gloo would use an interface with which something is wrong.

    One that is down serves ranks of the same machine, and all saferuns of the job may be there.
    """
    serves_here = _judge_name("", name, nics, spans_hosts=False) is None
    return "warn" if serves_here and not elsewhere else _verdict(context)


def _verdict(context: CheckContext) -> str:
    """How bad it is where what gloo would use does not work."""
    return "fail" if known_backend(context) == GLOO else "warn"


def _judge_name(source: str, name: str, nics: Sequence[Nic], *, spans_hosts: bool) -> CheckResult | None:
    nic = named(nics, name)
    if nic is None:
        near = near_name(name, nics)
        meant = f"did you mean {near}? " if near else ""
        return _warning(f"{source} names {_shown(name)}, which this host does not have", f"{meant}{_there(nics)}")
    if spans_hosts and not nic.is_up:
        message = f"{source} names {name}, which is down on this host"
        hint = f"look at its cable and its switch port, and at `ip link show {name}`, or use another: {_there(nics)}"
        return _warning(message, hint)
    if spans_hosts and nic.kind != "loopback" and not address_to_reach(nic):
        message = f"{source} names {name}, which has no address that other hosts reach"
        return _warning(message, f"give it one, or use another: {_there(nics)}")
    if not nic.addresses:
        message = f"{source} names {name}, which has no address"
        return _warning(message, f"give it one, or use another: {_there(nics)}")
    return None


def _judge_nccl(context: CheckContext, nccl: Choice, settings: NcclEnviron, nics: Sequence[Nic]) -> CheckResult | None:
    """What looks wrong with NCCL_SOCKET_IFNAME, which no job on processors reads."""
    if nccl.names or nccl.rule != NCCL_IFNAME or context.vendor == "none":
        return None
    environ = settings.environ
    value = environ[NCCL_IFNAME]
    named = f"{NCCL_IFNAME}={_shown(value)}{settings.where(NCCL_IFNAME)}"
    family = environ.get(NCCL_FAMILY, "")
    other_family = {name: value for name, value in environ.items() if name != NCCL_FAMILY}
    if family and nccl_choice(nics, other_family).names:
        message = f"{named} fits no interface with an address of {NCCL_FAMILY}={family}{settings.where(NCCL_FAMILY)}"
        return _warning(message, f"{settings.without(NCCL_FAMILY)}, or name another interface")
    if value.startswith("^"):
        return _warning(f"{named} leaves no interface for NCCL", _there(nics))
    running = [nic._replace(is_up=True) for nic in nics]
    asleep = nccl_choice(running, environ).names
    if asleep:
        verb = "is" if len(asleep) == 1 else "are"
        message = f"{named} fits {_listed(asleep)} alone, which {verb} down on this host"
        return _warning(message, f"look at cables and switch ports, or use another: {_there(nics)}")
    near = next((near for name in nccl.missing if (near := near_name(name, nics))), "")
    meant = f"did you mean {near}? " if near else ""
    return _warning(f"{named} fits no interface of this host", f"{meant}{_there(nics)}")


# -------------------------------------------------------------------------------------------------- where it leads to


def _judge_reach(
    context: CheckContext, gloo: Choice, nccl: Choice, settings: NcclEnviron, nics: Sequence[Nic]
) -> CheckResult | None:
    """What leads to no other host by its nature, where there certainly are others."""
    better = [name for name in candidates(nics, {}) if name not in gloo.names]
    hint = f"run with --nic {better[0]}" if better else "name the interface between the hosts with --nic"
    if gloo.rule == GLOO_IFNAME and is_loopback(gloo.addresses[0]):
        message = f"{GLOO_IFNAME} names {gloo.names[0]}, which leads to no other host"
        return _warning(message, hint)._replace(verdict=_verdict(context))
    is_meant = gloo.rule != GLOO_IFNAME and gloo.names[0].startswith(_GIVEN_ON_PURPOSE)
    if is_decoy(gloo.names[0]) and not (is_meant or context.nics):
        why = f"{GLOO_IFNAME} names it" if gloo.rule == GLOO_IFNAME else f"its own name resolves to {gloo.addresses[0]}"
        message = (
            f"gloo would use {gloo.names[0]} ({why}), which belongs to containers or virtual machines of this host"
        )
        return _warning(message, hint)
    if context.vendor == "none" or context.nics or not nccl.names:
        return None
    named_there = f"{settings.named(NCCL_IFNAME)} names it" if nccl.rule == NCCL_IFNAME else "by its own rules"
    if is_loopback(nccl.addresses[0]):
        message = f"NCCL would use {nccl.names[0]} ({named_there}), which leads to no other host"
        return _warning(message, hint)
    # Without RDMA, NCCL sends over all that it finds; with it, it only starts over the first.
    used = nccl.names[:1] if any(nic.rdma for nic in nics) else nccl.names
    decoys = [name for name in used if is_decoy(name)]
    if decoys:
        message = (
            f"NCCL would use {_listed(decoys)} ({named_there}), which {_belong(decoys)} to containers of this host"
        )
        return _warning(message, hint)
    return None


# ---------------------------------------------------------------------------------------------------------------- words


def _warning(message: str, hint: str) -> CheckResult:
    return warning(message, hint, class_name=_CLASS)


def _there(nics: Sequence[Nic]) -> str:
    """``this host has eth0 and ib0, and ib1, which is down``."""
    up = candidates(nics, {})
    down = [nic.name for nic in nics if not nic.is_up and nic.kind in {"ethernet", "infiniband", "bond"}]
    message = f"this host has {_listed(up)}"
    return f"{message}; {listed_are(down, _MOST_SHOWN)} down" if down else message


def _listed(names: Sequence[str]) -> str:
    return listed(names, _MOST_SHOWN) if names else "no interface"


def _belong(names: Sequence[str]) -> str:
    return "belongs" if len(names) == 1 else "belong"


def _shown(text: str) -> str:
    """A value as it may stand in a line: bounded, printable, and quoted where its ends would not be seen."""
    plain = "".join(char if char.isprintable() else "?" for char in text[:80])
    return f'"{plain}"' if not plain or plain != plain.strip() else plain
