"""Which network interfaces gloo and NCCL would use by their own rules, and which are worth a try. Pure.

Sources: what torch 2.13's gloo listens on, tested case by case; NCCL's documentation of its variables and of its own
choice, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html. RCCL reads the same variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from saferun.linux.nic import Nic, is_decoy
from saferun.model import Value
from saferun.preflight.results import CheckResult, HostInfo, Pairs

GLOO_IFNAME, NCCL_IFNAME, TENSORPIPE_IFNAME = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"
NCCL_FAMILY, UCX_DEVICES = "NCCL_SOCKET_FAMILY", "UCX_NET_DEVICES"
AUTO = "auto"

_LOOPBACK = "127.0.0.1"
_LEAST_VALUE = 2  # both take a value of one letter for none
_MOST_INTERFACES = 16  # that NCCL looks at, and names that it reads


class Choice(Value):
    """The interfaces that a library would use.

    Attributes:
        names: in its order; empty: it finds none, and fails.
        addresses: the address that it takes on each.
        rule: what decided: the name of a variable, ``own name`` or ``default``.
        missing: names in the variable that fit nothing with an address.
    """

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    rule: str
    missing: tuple[str, ...] = ()


def is_loopback(address: str) -> bool:
    """Whether an address leads every host to itself."""
    return address.startswith("127.") or address == "::1"


def is_link_local(address: str) -> bool:
    """Whether an address is valid on its own link only."""
    return address.startswith(("169.254.", "fe8", "fe9", "fea", "feb"))


def address_to_reach(nic: Nic) -> str:
    """The address under which other hosts would reach an interface; empty: it has none.

    A link-local IPv6 address would need the other host's interface beside it.
    """
    return min(filter(_leads_here, nic.addresses), key=is_link_local, default="")


def _leads_here(address: str) -> bool:
    """Whether another host may reach this one by an address and nothing else."""
    return not is_loopback(address) and not (":" in address and is_link_local(address))


def named(nics: Iterable[Nic], name: str) -> Nic | None:
    """The interface of a name, or with an address that goes by it."""
    return next((nic for nic in nics if name == nic.name or name in nic.labels), None)


def near_name(name: str, nics: Iterable[Nic]) -> str:
    """The interface that was probably meant; empty: none is near."""
    from difflib import get_close_matches

    names = [nic.name for nic in nics if nic.kind != "loopback"]
    stripped = name.strip().lstrip("^=")
    return stripped if stripped in names else next(iter(get_close_matches(stripped[:40], names, 1, 0.6)), "")


# ---------------------------------------------------------------------------------------------------------------- gloo


def gloo_choice(nics: Sequence[Nic], environ: Mapping[str, str], own: Sequence[str]) -> Choice:
    """The interfaces that torch's gloo backend would listen on.

    Those that GLOO_SOCKET_IFNAME names, exactly, up or not; it fails if one of them has no address. Without it, the one
    with the first address that the host's own name resolves to and that can be bound; 127.0.0.1 if there is none.

    Args:
        nics: this host's interfaces.
        environ: the environment of the ranks.
        own: what the host's own name resolves to, in the resolver's order.
    """
    value = environ.get(GLOO_IFNAME, "")
    if len(value) < _LEAST_VALUE:
        address = next((one for one in own if is_loopback(one) or any(one in nic.addresses for nic in nics)), _LOOPBACK)
        return Choice((_nic_of(address, nics),), (address,), "own name")
    found, missing = [], []
    for name in value.removesuffix(",").split(","):
        nic = named(nics, name)
        if nic is None or not nic.addresses:
            missing.append(name)
        else:
            found.append((nic.name, nic.addresses[0]))
    return Choice(tuple(name for name, _ in found), tuple(address for _, address in found), GLOO_IFNAME, tuple(missing))


def _nic_of(address: str, nics: Iterable[Nic]) -> str:
    if address.startswith("127."):  # all of them are the loopback interface's, though it has but one
        return next((nic.name for nic in nics if nic.kind == "loopback"), "lo")
    return next((nic.name for nic in nics if address in nic.addresses), "lo")


# ---------------------------------------------------------------------------------------------------------------- NCCL


def nccl_choice(nics: Sequence[Nic], environ: Mapping[str, str]) -> Choice:
    """The interfaces that NCCL and RCCL would use for TCP: to get started, and for everything where there is no RDMA.

    NCCL_SOCKET_IFNAME is a list of prefixes, of exact names after ``=``, and of what is left out after ``^``. Without
    it: ``ib*``; else all but ``docker*``, ``lo*`` and ``virbr*``; else those, in this order. Only interfaces that run
    count. NCCL_COMM_ID, which torch does not set, is ignored.

    Args:
        nics: this host's interfaces, in the kernel's order.
        environ: the environment of the ranks.
    """
    family = environ.get(NCCL_FAMILY, "")
    value = environ.get(NCCL_IFNAME, "")
    if len(value) >= _LEAST_VALUE:
        found = _matching(nics, value, family)
        return _as_choice(found, NCCL_IFNAME, () if value.startswith("^") else _unmatched(nics, value, family))
    for rule in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        found = _matching(nics, rule, family)
        if found:
            return _as_choice(found, "default")
    return Choice((), (), "default")


def names_in(value: str) -> tuple[str, ...]:
    """The names in a value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA: without its signs, and without ports."""
    names = (item.partition(":")[0] for item in value.removeprefix("^").removeprefix("=").split(","))
    return tuple(name for name in names if name)[:_MOST_INTERFACES]


def fits(name: str, value: str) -> bool:
    """Whether a name is one that NCCL_SOCKET_IFNAME or NCCL_IB_HCA lets through."""
    excludes = value.startswith("^")
    is_exact = value.removeprefix("^").startswith("=")
    wanted = names_in(value)
    is_listed = not wanted or any(name == one if is_exact else name.startswith(one) for one in wanted)
    return is_listed != excludes


def _matching(nics: Sequence[Nic], value: str, family: str) -> list[tuple[str, str]]:
    """(interface, address) of those that fit: all with IPv4 first, then those with nothing but IPv6, as listed."""
    usable = []
    for nic in nics:
        address = next((one for one in nic.addresses if _is_of(one, family)), "")
        if nic.is_up and address and any(fits(name, value) for name in (nic.name, *nic.labels)):
            usable.append((":" in address, nic.name, address))
    return [(name, address) for _, name, address in sorted(usable, key=lambda row: row[0])][:_MOST_INTERFACES]


def _is_of(address: str, family: str) -> bool:
    if address == "::1":
        return False
    return family not in {"AF_INET", "AF_INET6"} or (":" in address) == (family == "AF_INET6")


def _unmatched(nics: Sequence[Nic], value: str, family: str) -> tuple[str, ...]:
    sign = "=" if value.startswith("=") else ""
    return tuple(name for name in names_in(value) if not _matching(nics, sign + name, family))


def _as_choice(found: Sequence[tuple[str, str]], rule: str, missing: tuple[str, ...] = ()) -> Choice:
    return Choice(tuple(name for name, _ in found), tuple(address for _, address in found), rule, missing)


# ------------------------------------------------------------------------------------------- what is tried, what is set


def candidates(nics: Sequence[Nic], environ: Mapping[str, str], wanted: Sequence[str] = ()) -> tuple[str, ...]:
    """The interfaces that other hosts should try, the likeliest first.

    Those that are up and have an address that others can reach, but not loopback and what containers leave behind, nor,
    where there is something better, those with nothing but a link-local address; what a variable names comes first,
    whatever it is called.

    Args:
        nics: this host's interfaces.
        environ: the environment of the ranks.
        wanted: what ``--nic`` names: these alone then; ``("auto",)`` stands for none.
    """
    usable = {nic.name: nic for nic in nics if nic.is_up and nic.kind != "loopback" and address_to_reach(nic)}
    if wanted and tuple(wanted) != (AUTO,):
        found = (named(nics, name) for name in wanted)
        return tuple(nic.name for nic in found if nic is not None and nic.name in usable)
    first: tuple[str, ...] = ()
    for variable, choice in ((GLOO_IFNAME, gloo_choice(nics, environ, ())), (NCCL_IFNAME, nccl_choice(nics, environ))):
        if choice.rule == variable and not environ[variable].startswith("^"):
            first += choice.names
    rest = [name for name in usable if not is_decoy(name)]
    better = [name for name in rest if not is_link_local(address_to_reach(usable[name]))]
    return tuple(dict.fromkeys(name for name in (*first, *(better or rest)) if name in usable))


def routes(nics: Sequence[Nic], names: Iterable[str], choices: Sequence[Choice] = ()) -> Pairs:
    """(interface, address) to be tried from other hosts, in order.

    Args:
        nics: this host's interfaces.
        names: of those to be tried.
        choices: of the libraries, the most important first: an interface is tried at the address that they take on it.
    """
    chosen: dict[str, str] = {}
    for choice in choices:
        for name, address in zip(choice.names, choice.addresses, strict=True):
            if _leads_here(address):
                chosen.setdefault(name, address)
    found = [(name, nic) for name in names if (nic := named(nics, name)) is not None and address_to_reach(nic)]
    return tuple((name, chosen.get(nic.name) or address_to_reach(nic)) for name, nic in found)


def nic_environ(
    names: Sequence[str], nics: Sequence[Nic], environ: Mapping[str, str], *, override: bool = True
) -> dict[str, str]:
    """The variables that make the libraries use certain interfaces: gloo, NCCL and RCCL, tensorpipe, UCX.

    Which RDMA devices NCCL takes beside them is left to it: an interface says where the ranks meet, and most hosts have
    more RDMA devices than that. UCX_NET_DEVICES is for TCP and RDMA alike, so it names both; one that is set is kept.

    Args:
        names: the interfaces, the first one first; none: no variables.
        nics: this host's interfaces.
        environ: the environment of the ranks.
        override: whether to replace what the user has set; else that is kept, too.
    """
    if not names:
        return {}
    variables = {
        GLOO_IFNAME: ",".join(names),
        NCCL_IFNAME: "=" + ",".join(names),
        TENSORPIPE_IFNAME: names[0],
    }
    if override:
        variables = {name: value for name, value in variables.items() if environ.get(name) != value}
    else:
        variables = {name: value for name, value in variables.items() if not environ.get(name)}
    if not environ.get(UCX_DEVICES):
        rdma = [device for name in names if (nic := named(nics, name)) is not None for device in nic.rdma]
        variables[UCX_DEVICES] = ",".join(dict.fromkeys((*rdma, *names)))
    return variables


def mpirun_options(names: Sequence[str]) -> str:
    """What to give ``mpirun``, which starts saferun and chooses its own interfaces."""
    listed = ",".join(names)
    return (
        f"mpirun of Open MPI: --mca btl_tcp_if_include {listed} --mca oob_tcp_if_include {listed}; "
        f"of MPICH: -iface {names[0]}"
    )


# ------------------------------------------------------------------------------------------------------- between hosts


def loopback_between(infos: Mapping[int, HostInfo]) -> tuple[CheckResult, ...]:
    """The hosts on which gloo would or may listen on loopback, though there are others that look for it.

    One host cannot know by itself: several tasks on one machine meet there quite well. A host whose own name leads gloo
    to an address of the loopback interface that leads to it from elsewhere, as routing protocols announce it, may be
    reached there, if no other machine has the same address.

    Args:
        infos: of all hosts, by number.
    """
    machines = {host: _addresses_of_machine(info) for host, info in infos.items()}
    known = [addresses for addresses in machines.values() if addresses]
    if all(not known[0].isdisjoint(addresses) for addresses in known):
        return ()  # one machine, as far as can be known
    holders: dict[str, list[set[str]]] = {}
    for host, info in infos.items():
        for nic in info.nics:
            for address in nic.addresses if nic.kind == "loopback" else ():
                if _leads_here(address):
                    holders.setdefault(address, []).append(machines[host])
    found = (_may_listen_on_loopback(info, holders) for info in infos.values() if not _is_reported(info))
    return tuple(result for result in found if result is not None)


def _may_listen_on_loopback(info: HostInfo, holders: Mapping[str, Sequence[set[str]]]) -> CheckResult | None:
    """What is wrong with a host's own name; None: nothing. ``holders`` as below."""
    if info.unanswered:
        return _unanswered(info) if info.backend != "nccl" else None
    loopback = {nic.name for nic in info.nics if nic.kind == "loopback"} or {"lo"}
    if not info.gloo or not loopback.issuperset(info.gloo) or _is_announced(info, holders):
        return None
    return CheckResult(
        "interfaces",
        "fail" if info.backend == "gloo" else "warn",
        "gloo would listen on loopback, where no other host reaches it",
        own_name_hint(_usable(info)),
        class_name="network_interface",
        host=info.label,
    )


def _unanswered(info: HostInfo) -> CheckResult:
    """A warning: the name server may answer when the ranks ask."""
    message, hint = unanswered_text(info.unanswered), own_name_hint(_usable(info))
    return CheckResult("names", "warn", message, hint, class_name="name_resolution", transient=True, host=info.label)


def _is_reported(info: HostInfo) -> bool:
    """Whether the host itself has said that its interfaces do not fit, or that its name cannot be resolved."""
    return any(
        result.class_name == "network_interface"
        or (result.class_name == "name_resolution" and bool(info.unanswered) and info.unanswered in result.message)
        for result in info.results
    )


def _usable(info: HostInfo) -> str:
    """The interface to name instead."""
    return next((nic.name for nic in info.nics if nic.name in info.probed), "the interface between the hosts")


def _addresses_of_machine(info: HostInfo) -> set[str]:
    """By what to tell one machine from another; those of the loopback interface may be a service's, and on all.

    So may link-local ones: a server's management controller gives each its own side of a USB cable the same address.
    """
    nics = [nic for nic in info.nics if not is_decoy(nic.name)]
    real = {address_to_reach(nic) for nic in nics if nic.kind != "loopback"} - {""}
    return (
        {address for address in real if not is_link_local(address)}
        or real
        or {address_to_reach(nic) for nic in nics} - {""}
    )


def _is_announced(info: HostInfo, holders: Mapping[str, Sequence[set[str]]]) -> bool:
    """Whether gloo, which takes the first address of the own name that it can use, may be reached there.

    Args:
        info: the host's.
        holders: the machines that have an address on their loopback interface.
    """
    own = [address for answer in info.names[:1] for address in answer[1:]]  # its own name is the first
    address = gloo_choice(info.nics, {}, own).addresses[0]
    machine = _addresses_of_machine(info)
    found = holders.get(address, ())  # none has an address that leads each host to itself
    return bool(found) and not any(machine.isdisjoint(other) for other in found)


def unanswered_text(name: str) -> str:
    """What follows where no name server answers for a host's own name."""
    return (
        f"its own name {name} cannot be resolved now (no name server answers): if it still cannot be when the ranks "
        "meet, gloo listens on loopback, where no other host reaches it"
    )


def own_name_hint(nic: str) -> str:
    """What to do about a host whose own name leads to loopback."""
    return f"give the host's name its address in /etc/hosts, or run with --nic {nic}"
