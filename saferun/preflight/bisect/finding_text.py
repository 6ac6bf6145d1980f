"""What was found, in sentences. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.model import Value
from saferun.preflight.bisect.halving import Blame, Unit
from saferun.preflight.bisect.trial_values import LOOPBACK, FailingSet, Group, Member, TrialResult

_NAMES_AT_MOST = 6


class Tally(Value):
    """How a set did: ``failed`` in ``of`` tries; ``outcomes``: the bad ones of its members, the last time."""

    failed: int
    of: int
    outcomes: tuple[TrialResult, ...] = ()


class Names(Value):
    """What hosts, their parts and interfaces are called.

    Attributes:
        labels: of the hosts, by number.
        part: what a member is: ``GPU``, or ``rank`` where there are none.
        sizes: how many members each host has.
    """

    labels: dict[int, str]
    part: str
    sizes: dict[int, int]

    def host(self, number: int) -> str:
        """A host's name."""
        return self.labels.get(number, f"host {number}")

    def hosts(self, units: Sequence[Unit]) -> str:
        """``node0, node1 and node2``; of many, the first ones and how many more."""
        return listed([self.host(number) for number in sorted({member.host for unit in units for member in unit})])

    def parts(self, members: Sequence[Member]) -> str:
        """``GPU 3``, ``GPUs 0 and 3``."""
        numbers = [str(member.local_rank) for member in members]
        return f"{self.part}{'s' * (len(numbers) > 1)} {listed(numbers)}"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``; of many, the first ones and how many more."""
    if len(names) > _NAMES_AT_MOST:
        return f"{', '.join(names[: _NAMES_AT_MOST - 1])} and {len(names) - _NAMES_AT_MOST + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def over(interface: str) -> str:
    """``over eth0``; nothing where everybody used what they would use by themselves."""
    if interface == LOOPBACK:
        return " over loopback"
    return f" over {interface}" if interface else ""


def reason(outcomes: Sequence[TrialResult], guilty: Sequence[Member]) -> str:
    """What the members said, in brackets: the guilty ones first, words before none, an error before a timeout.

    Of errors a crash comes first: its peers may have reported lost connections before the kernel reported its end.
    """
    bad = [outcome for outcome in outcomes if outcome.kind != "ok"]
    if not bad:
        return ""
    outcome = min(
        bad,
        key=lambda outcome: (
            *(outcome.member not in guilty, not outcome.message, outcome.kind != "error"),
            not outcome.message.startswith("killed by "),
        ),
    )
    kind = {"timeout": "timeout", "error": "error"}.get(outcome.kind, outcome.kind)
    where = f" {outcome.where}" if outcome.where else ""
    details = f": {outcome.message}" if outcome.message else ""
    return f" ({kind}{where}{details})"


def _often(tally: Tally) -> str:
    return f" {tally.failed} of {tally.of} times" if tally.failed < tally.of else ""


def describe_parts(
    blame: Blame, host: int, names: Names, tally: Callable[[Group], Tally], *, everything: bool
) -> FailingSet:
    """Parts of one host that fail over loopback.

    Args:
        blame: what was found.
        host: its number.
        names: what things are called.
        tally: how a set of members did over loopback.
        everything: no part of this host works alone.
    """
    members = tuple(member for unit in blame.units + blame.others for member in unit)
    label, what = names.host(host), names.parts(members)
    # A unit that fails with whomever it is tried: its trials are those with others.
    seen = together_with(blame, tally)
    why = reason(seen.outcomes, members) + _often(seen)
    gpu = names.part == "GPU"
    inspect = (
        "look at dmesg and nvidia-smi -q (amd-smi, rocm-smi) there" if gpu else "look at dmesg, memory and limits there"
    )
    topology = f"look at nvidia-smi topo -m on {label}; if NCCL_P2P_DISABLE=1 helps, their link is at fault"
    if everything:
        message = f"fails alone, over loopback too{why}"
        hint = f"{inspect}, and the installation of torch there, or leave {label} out"
        return FailingSet("host", members, LOOPBACK, message, hint, label, seen.failed, seen.of)
    if blame.kind == "alone":
        message, kind = f"{what} fails alone{why}", "gpu"
        hint = f"{inspect}, or leave {what} of {label} out" + (" (CUDA_VISIBLE_DEVICES)" if gpu else "")
    elif blame.kind == "unit":
        others = names.parts([member for unit in blame.others for member in unit])
        what = names.parts([member for unit in blame.units for member in unit])
        message, kind = f"{what} works alone and fails with {others}{why}", "gpu"
        hint = topology if gpu else inspect
        members = tuple(member for unit in blame.units for member in unit)
    else:
        message, kind = f"{what} each work alone and fail together{why}", "gpus"
        hint = topology if gpu else inspect
    return FailingSet(kind, members, LOOPBACK, message, hint, label, seen.failed, seen.of)


def together_with(blame: Blame, tally: Callable[[Group], Tally]) -> Tally:
    """How the trials behind a blame did, summed up."""
    if blame.kind == "unit" and blame.others:
        groups = [tuple(sorted(unit + other)) for unit in blame.units for other in blame.others]
    else:
        groups = [tuple(sorted(member for unit in blame.units + blame.others for member in unit))]
    tallies = [tally(group) for group in groups]
    outcomes = tuple(outcome for one in tallies for outcome in one.outcomes)
    return Tally(sum(one.failed for one in tallies), sum(one.of for one in tallies), outcomes)


def describe_all_alone(hosts: Sequence[Unit], names: Names, tally: Callable[[Group], Tally]) -> FailingSet:
    """Every host of the job fails alone, over loopback too."""
    tallies = [tally(group) for group in hosts]
    why = reason([outcome for one in tallies for outcome in one.outcomes], ())
    failed, of = sum(one.failed for one in tallies), sum(one.of for one in tallies)
    message = f"no host works, not even alone and over loopback: {names.hosts(hosts)}{why}"
    hint = "the network is not the cause: check the versions of torch and its libraries, drivers and limits"
    members = tuple(sorted(member for unit in hosts for member in unit))
    return FailingSet("no_pair", members, LOOPBACK, message, hint, "", failed, of)


def describe_hosts(
    blame: Blame, interface: str, works_over: str, names: Names, tally: Callable[[Group], Tally], *, sometimes: bool
) -> FailingSet:
    """Hosts that fail over an interface, and work over loopback.

    Args:
        blame: what was found.
        interface: the one they used; empty: their own choice.
        works_over: an interface over which all hosts work; empty: there is none.
        names: what things are called.
        tally: how a set of members did over this interface.
        sometimes: all of them together did work at times.
    """
    members = tuple(sorted(member for unit in blame.units for member in unit))
    seen = together_with(blame, tally)
    why = reason(seen.outcomes, members) + _often(seen)
    way = over(interface)
    label = names.hosts(blame.units)
    nic = interface or "interface"
    or_nic = f", or run with --nic {works_over}" if works_over else ""
    host = label if len({member.host for member in members}) == 1 else ""
    match blame.kind:
        case "alone" if len(blame.units) > 1:
            kind, message = (
                "interface",
                f"{label} work over loopback, and none of them alone{way or ' over its own interface'}{why}",
            )
            hint = f"check that {nic} is there on every host, up and has an address{or_nic}"
        case "alone":
            kind, message = "interface", f"works over loopback and fails alone{way or ' over its own interface'}{why}"
            hint = f"check that {nic} of {label} is there, up and has an address{or_nic}"
        case "unit":
            partners = names.hosts(blame.others)
            works = f"work{'s' * (len(blame.others) == 1)} without it"
            with_whom = f"with {partners}, which {works}" if partners else "with all others"
            kind, message = "network", f"works alone and fails{way} {with_whom}{why}"
            leave = f", or leave {label} out" if not works_over else ""
            hint = f"check cable, switch port, VLAN and firewall of {label}'s {nic}{or_nic}{leave}"
        case "pair":
            kind, message = "pair", f"{label} fail together{way}, though each works by itself{why}"
            hint = f"look at what lies between {label}: routes, firewalls, switch ports{or_nic}"
        case "parted":
            members = tuple(sorted(member for unit in blame.units + blame.others for member in unit))
            one, other = names.hosts(blame.units), names.hosts(blame.others)
            kind, message = "parted", f"{one} work{way}, {other} do too, and no host of one side with the other{why}"
            hint = f"look at what joins the two sides: switch, trunk, VLAN, firewall{or_nic}"
        case "untried":
            kind, message = "untried", f"{label} failed{way} in every set, and too few others work to try each of them"
            hint = f"repair or leave out those that were found first, and try again{or_nic}"
        case "no_pair":
            kind, message = "no_pair", f"no two of {label} work together{way}, though each works alone{why}"
            hint = f"check that this network lets hosts connect: firewall, the interface used{or_nic or ', --nic'}"
        case _:
            kind, message = "together", f"{label} fail together{way}, and no smaller set that was tried does{why}"
            hint = f"it takes all of them: load, ports or open files may run out{or_nic}"
            if sometimes:
                hint = f"it comes and goes: look for loss and errors on the interfaces (ip -s link){or_nic}"
    return FailingSet(kind, members, interface, message, hint, host, seen.failed, seen.of)
