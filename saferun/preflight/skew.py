"""What should be the same on all hosts of a job, and is not: versions, script, environment, clocks, names. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from saferun.preflight.default_nics import is_loopback
from saferun.preflight.nic_links import hosts_text, label_of, median
from saferun.preflight.results import CheckResult, HostInfo, Probe

__all__ = ["skew_results"]

_SEVERAL = 2
_CLOCK_S = 1.0
_MOST_REPORTED = 8
_MOST_NAMED = 6
_SHOWN_HASH = 8
_NONE = "none"

# What may differ between hosts that work together well: where to write, what to log, and what belongs to a host.
_OWN = frozenset(
    [
        *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "UCX_NET_DEVICES", "NCCL_IB_HCA"),
        *("NCCL_TOPO_FILE", "NCCL_GRAPH_FILE", "NCCL_CONF_FILE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES"),
        # Which of them a launch sets follows from torch's version.
        *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        *("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    ]
)
_OWN_PREFIXES = ("NCCL_DEBUG", "RCCL_DEBUG", "TORCH_LOGS", "UCX_LOG", "FI_LOG", "OMP_", "KMP_")


def skew_results(infos: Mapping[int, HostInfo], probes: Iterable[Probe]) -> list[CheckResult]:
    """What differs between hosts, each with the hosts that are in the minority.

    Args:
        infos: of the hosts that have some.
        probes: they show how far apart the clocks are.
    """
    if len(infos) < _SEVERAL:
        return []
    return [
        *_version_results(infos),
        *(_other_jobs(infos) or _script_results(infos)),
        *_environ_results(infos),
        *_clock_results(infos, probes),
        *_name_results(infos),
    ]


# --------------------------------------------------------------------------------------- versions, script, environment


def _version_results(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    known = {host: dict(pair[:2] for pair in info.versions if len(pair) >= _SEVERAL) for host, info in infos.items()}
    hint = "install the same everywhere (the same image, module or environment on all hosts)"
    return _differences("versions", infos, {h: v for h, v in known.items() if v}, hint)


def _environ_results(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    known = {
        host: {pair[0]: pair[1] for pair in info.environ if len(pair) >= _SEVERAL and not _is_own(pair[0])}
        for host, info in infos.items()
        # Who has no versions has said nothing.
        if info.environ or info.versions
    }
    hint = "set the same value on all hosts, unless the difference is intended (srun and mpirun can pass them on)"
    return _differences("environment", infos, known, hint, equals="=")


def _is_own(name: str) -> bool:
    return name in _OWN or name.startswith(_OWN_PREFIXES)


def _script_results(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    hashes = {host: info.script for host, info in infos.items() if info.script}
    common, odd = _majority(hashes)
    if not odd:
        return []
    hint = "copy the same script to all hosts, or put it where all of them see it; a shared file system may lag"
    if common is None:
        groups = "; ".join(
            f"{script[:_SHOWN_HASH]} on {hosts_text(infos, hosts)}" for script, hosts in list(odd.items())[:_MOST_NAMED]
        )
        return [CheckResult("script", "warn", f"the training script differs between the hosts: {groups}", hint)]
    message = "its training script is not that of the others"
    return [
        CheckResult("script", "warn", message, hint, (("script", script),), host=label_of(infos, host))
        for script, hosts in odd.items()
        for host in hosts
    ]


def _other_jobs(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    """Hosts of another job than the first one's that have come to the address that both have without being asked to.

    What is certain only: another script by name and content, or another user and content. A job may well have different
    scripts, but then it says by an id of its own that it is one.
    """
    first = infos.get(0)
    if first is None or not (first.launch and first.script):
        return []
    own = dict(pair[:2] for pair in first.launch if len(pair) >= _SEVERAL)
    results = []
    for host, info in sorted(infos.items()):
        other = dict(pair[:2] for pair in info.launch if len(pair) >= _SEVERAL)
        if not (other and info.script) or info.script == first.script or other == own:
            continue
        script, user = other.get("script", ""), other.get("user", "")
        leader = label_of(infos, 0)
        message = f"another job (script {script} of user {user}) connects to this job's port on {leader}"
        message += f" (script {own.get('script', '')} of user {own.get('user', '')})"
        hint = "give each job its own --master-port or --rdzv-id, also a job that has different scripts"
        results.append(CheckResult("script", "fail", message, hint, host=label_of(infos, host)))
    return results


def _differences(
    check: str,
    infos: Mapping[int, HostInfo],
    known: Mapping[int, Mapping[str, str]],
    hint: str,
    *,
    equals: str = " ",
) -> list[CheckResult]:
    """Where hosts differ from the majority, one result a host; where there is none, one result a name."""
    own: dict[int, list[tuple[str, str, str]]] = {}
    results: list[CheckResult] = []
    for name in sorted({name for values in known.values() for name in values}):
        common, odd = _majority({host: values.get(name, _NONE) for host, values in known.items()})
        if common is not None:
            for value, hosts in odd.items():
                for host in hosts:
                    own.setdefault(host, []).append((name, value, common))
        elif odd:
            groups = [f"{value} on {hosts_text(infos, hosts)}" for value, hosts in odd.items()]
            message = f"{name} differs between the hosts: {', '.join(groups[:_MOST_NAMED])}"
            results.append(CheckResult(check, "warn", message, hint))
    for host, found in sorted(own.items()):
        values = ", ".join(f"{name}{equals}{value}" for name, value, _ in found[:_MOST_NAMED])
        common_values = ", ".join(f"{name}{equals}{common}" for name, _, common in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        message = f"{values}{more}, where the others have {common_values}"
        facts = tuple((name, value) for name, value, _ in found)
        results.append(CheckResult(check, "warn", message, hint, facts, host=label_of(infos, host)))
    return results


def _majority(values: Mapping[int, str]) -> tuple[str | None, dict[str, list[int]]]:
    """The value that more than half of the hosts have, and the hosts of the others; None: there is none."""
    groups: dict[str, list[int]] = {}
    for host, value in sorted(values.items()):
        groups.setdefault(value, []).append(host)
    if len(groups) < _SEVERAL:
        return None, {}
    most = max(groups, key=lambda value: len(groups[value]))
    if 2 * len(groups[most]) <= len(values):
        return None, groups
    del groups[most]
    return most, groups


# -------------------------------------------------------------------------------------------------------------- clocks


def _clock_results(infos: Mapping[int, HostInfo], probes: Iterable[Probe]) -> list[CheckResult]:
    """The hosts whose clocks are not those of most, however they are connected."""
    steps: dict[int, dict[int, list[float]]] = {}
    for probe in probes:
        if probe.clock_s and probe.source in infos and probe.target in infos:
            steps.setdefault(probe.source, {}).setdefault(probe.target, []).append(probe.clock_s)
            steps.setdefault(probe.target, {}).setdefault(probe.source, []).append(-probe.clock_s)
    ahead = _offsets(steps)
    middle = median(list(ahead.values()))
    off = {host: value - middle for host, value in ahead.items() if abs(value - middle) > _CLOCK_S}
    hint = "let all hosts keep time (chronyd, systemd-timesyncd): logs, certificates and timeouts depend on it"
    if len(ahead) == _SEVERAL and off:
        (a, b), apart = sorted(ahead), abs(next(iter(off.values())))
        return [
            CheckResult("clock", "warn", f"the clocks of {hosts_text(infos, (a, b))} are {_apart(apart)} apart", hint)
        ]
    return [
        CheckResult(
            "clock",
            "warn",
            f"its clock is {_apart(abs(value))} {'ahead of' if value > 0 else 'behind'} the others'",
            hint,
            (("ahead_s", f"{value:.3f}"),),
            host=label_of(infos, host),
        )
        for host, value in sorted(off.items())
    ]


def _offsets(steps: Mapping[int, Mapping[int, Sequence[float]]]) -> dict[int, float]:
    """How far each clock is ahead of that of one host, of those that are connected with most."""
    best: dict[int, float] = {}
    seen: set[int] = set()
    for first in sorted(steps):
        if first in seen:
            continue
        found = {first: 0.0}
        queue = [first]
        for host in queue:
            for other, values in steps[host].items():
                if other not in found:
                    found[other] = found[host] + median(list(values))
                    queue.append(other)
        seen |= set(found)
        if len(found) > len(best):
            best = found
    return best


def _apart(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


# --------------------------------------------------------------------------------------------------------------- names


def _name_results(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    """Names that lead to another host from some hosts. Two addresses of one host are not reported: it has them both.

    Nor is a name that several hosts have, as containers of one image do, and that leads each of them to itself.
    """
    owners: dict[str, set[int]] = {}
    for host, info in infos.items():
        for nic in info.nics:
            for address in nic.addresses:
                owners.setdefault(address, set()).add(host)
    results: list[CheckResult] = []
    shared = _shared_names(infos)
    for name, known in sorted(_answers(infos).items()):
        if name in shared:
            continue
        # What most hosts get, of two hosts what one of them has; and all that belongs to the same hosts.
        counts = Counter(address for addresses in known.values() for address in addresses)
        common = max(sorted(counts), key=lambda address: (counts[address], address in owners))
        right = owners.get(common, set())
        if 2 * counts[common] <= len(known) and not right:
            continue
        for host, addresses in sorted(known.items()):
            if common in addresses or any(owners.get(address, set()) & right for address in addresses):
                continue
            message = f"{name} is {addresses[0]} there, for the others it is {common}"
            hint = f"make {name} resolve alike on all hosts: /etc/hosts and the name servers of {label_of(infos, host)}"
            results.append(CheckResult("names", "warn", message, hint, host=label_of(infos, host)))
    return results[:_MOST_REPORTED]


def _shared_names(infos: Mapping[int, HostInfo]) -> set[str]:
    """The names that are those of several hosts, and lead each to itself, as gloo needs it."""
    counts: Counter[str] = Counter()
    for info in infos.values():
        own = {address for nic in info.nics for address in nic.addresses}
        for answer in info.names[:1]:  # its own name is the first
            if any(address in own and not is_loopback(address) for address in answer[1:]):
                counts[answer[0]] += 1
    return {name for name, count in counts.items() if count >= _SEVERAL}


def _answers(infos: Mapping[int, HostInfo]) -> dict[str, dict[int, tuple[str, ...]]]:
    """What each name is on each host, where that is known. A name's own host may know it as a loopback address."""
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for host, info in infos.items():
        for answer in info.names:
            addresses = tuple(address for address in answer[1:] if not is_loopback(address))
            if addresses:
                found.setdefault(answer[0], {})[host] = addresses
    return found
