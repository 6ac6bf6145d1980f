"""What ends a job on all its hosts though no rank failed: hosts that are lost, signals, what others told. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import shortened
from saferun.diagnosis.job_hosts import Hosts, hosts_text
from saferun.evidence import AbortReason, Cause, Evidence, HostView
from saferun.model import Value, signal_name
from saferun.text.wording import ranks_text

_MOST_LOST = 4


class Told(Value):
    """The cause, and the words of the first line."""

    cause: Cause
    headline: str


class _Loss(Value):
    """Why a host is lost: the class of the cause, what is seen of it, what follows, what to do."""

    class_name: str
    message: str
    advice: str


_LOSSES = {
    "gone": _Loss(
        "host_lost",
        "its saferun was killed (the host is up)",
        "look on {host} who killed it: dmesg (the OOM killer), the scheduler's log, a kill -9 by hand",
    ),
    "unreachable": _Loss(
        "host_lost",
        "none of its addresses answers: it has no power, has crashed, or its network is cut",
        "check whether {host} is up (its console, the scheduler's state of it), then at its network",
    ),
    "frozen": _Loss(
        "host_lost",
        "its saferun accepts connections but does not respond: it is stopped (SIGSTOP), or the host is overloaded",
        "look at the state of saferun on {host}: kill -CONT resumes it if it is in state T; who stopped it?",
    ),
    "cut": _Loss(
        "network_cut",
        "it is alive, and cannot be reached on the way to the store: the network is cut there",
        "look at the network between {leader} and {host}: interface, cable, switch port, firewall",
    ),
    "unknown": _Loss(
        "host_lost",
        "no heartbeat is received from it",
        "check whether {host} is up, at its network, and whether its saferun runs",
    ),
}
_FROM_FAR = frozenset({"unreachable", "cut", "unknown"})


def end_of_job(evidence: Evidence, hosts: Hosts, *, is_a_ranks: bool) -> Told | None:
    """What ended the job though no rank brought it about; None where one did, or nothing tells.

    Args:
        evidence: what is known.
        hosts: its hosts.
        is_a_ranks: whether a rank failed by itself, and not because of others.
    """
    told = evidence.abort_reason
    if told is not None and told.reason == "start":
        return _aborted(evidence, hosts)
    # A rank that failed before anybody missed a host is the cause, whatever became of that host afterwards.
    if told is None or told.reason == "lost" or not is_a_ranks:
        lost = lost_hosts(evidence, hosts)
        if lost is not None:
            return lost
    if evidence.error and (told is None or told.reason != "store_lost"):
        return None
    found = _aborted(evidence, hosts)
    return found if found is not None or is_a_ranks else _failed_elsewhere(evidence, hosts)


# --------------------------------------------------------------------------------------------------------------- losses


def lost_hosts(evidence: Evidence, hosts: Hosts) -> Told | None:
    """Hosts that are silent, as the one that judges sees it."""
    lost = [host for host in hosts.all if host.lost_reason]
    if not lost:
        return None
    others = [host for host in hosts.all if host.label != evidence.host]
    if len(lost) == len(others) > 1 and all(host.lost_reason in _FROM_FAR for host in lost):
        return _cut_off(evidence, lost)
    ranks = tuple(sorted(rank for host in lost for rank in host.ranks))
    first = lost[0]
    loss = _LOSSES.get(first.lost_reason, _LOSSES["unknown"])
    alike = all(host.lost_reason == first.lost_reason for host in lost)
    advice = loss.advice.format(host=hosts_text(lost), leader=evidence.host)
    proof = _proof(first.lost_message, loss)
    if len(lost) == 1:
        head = f"{first.label} is lost" + (f" ({ranks_text(ranks)})" if ranks else "")
        cause = Cause(loss.class_name, loss.message, ranks, proof, advice)
        return Told(cause, f"{head}: {loss.message}")
    each = "; ".join(f"{host.label}: {_LOSSES.get(host.lost_reason, loss).message}" for host in lost[:_MOST_LOST])
    words = f"of each: {loss.message}" if alike else each
    head = f"{len(lost)} hosts are lost ({hosts_text(lost)})"
    class_name = loss.class_name if alike else "host_lost"
    return Told(Cause(class_name, f"{head}: {words}", ranks, proof, advice), f"{head}: {words}")


def _cut_off(evidence: Evidence, lost: Sequence[HostView]) -> Told:
    """All others at once: then it is the one that judges."""
    words = f"{evidence.host} reaches none of the other {len(lost)} hosts any more: its own network is cut"
    advice = f"look at the network of {evidence.host}: interface, cable, switch port, firewall"
    return Told(Cause("network_cut", words, (), shortened(lost[0].lost_message), advice), words)


def _proof(words: str, loss: _Loss) -> str:
    return shortened(words) if words and words != loss.message else ""


def silent_lines(hosts: Hosts, headline: str) -> list[str]:
    """A line for the hosts that are lost, and one for those of which nothing has come, where it is not told already."""
    lost = [host for host in hosts.all if host.lost_reason]
    lines = [f"lost: {host.label}: {host.lost_message or _LOSSES['unknown'].message}" for host in lost[:_MOST_LOST]]
    if any(host.label in headline for host in lost):
        lines = []
    unheard = [host for host in hosts.all if not host.has_evidence and not host.lost_reason]
    if unheard and f"nothing has come from {hosts_text(unheard)}" not in headline:
        ranks = ranks_text(rank for host in unheard for rank in host.ranks)
        lines.append(f"nothing has come from {hosts_text(unheard)} ({ranks})")
    return lines


# ------------------------------------------------------------------------------------------------------ what was told


def _aborted(evidence: Evidence, hosts: Hosts) -> Told | None:
    """What made all hosts stop where it is no rank's failure; None where it is one's, or nothing was told."""
    told = evidence.abort_reason
    if told is None:
        return _signal(evidence, hosts) if hosts.are_several and evidence.stop_signum is not None else None
    label = told.label or evidence.host
    words = shortened(told.message)
    match told.reason:
        case "signal":
            return _signal(evidence, hosts)
        case "parent":
            what = f"saferun's parent process on {label} exited" + (f" ({words})" if words else "")
            advice = (
                "the session that it was started from has ended (ssh, mpirun, an srun step): look at its end, or start "
                "with --stop-with-parent off"
            )
            return Told(Cause("parent_gone", what, (), "", advice), what)
        case "store_lost":
            return _store_lost(told, label, evidence.host)
        case "task_lost":
            what = f"a saferun process of {label} is gone" + (f": {words}" if words else "")
            return Told(Cause("host_lost", what, _ranks(told), "", _LOSSES["gone"].advice.format(host=label)), what)
        case "start":
            what = f"{label} could not start its ranks" + (f": {words}" if words else "")
            if evidence.error and label == evidence.host:
                # What the checks found may be about any host, and says about which.
                what = evidence.error if evidence.is_checked else f"{label}: {evidence.error}"
            advice = evidence.error_hint or f"look at what {label} says"
            return Told(Cause("start_failed", what, _ranks(told), "", advice), what)
        case "membership" | "leave":
            what = words or ("a host left the job" if told.reason == "leave" else "hosts came to the job")
            if told.reason == "leave" and label not in what:
                what = f"{label}: {what}"
            return Told(Cause("membership", what, (), "", "nothing: the job goes on with the hosts that it has"), what)
    return None


def _ranks(told: AbortReason) -> tuple[int, ...]:
    return (told.rank,) if told.rank is not None and told.rank >= 0 else ()


def _signal(evidence: Evidence, hosts: Hosts) -> Told:
    told = evidence.abort_reason
    name = signal_name(evidence.stop_signum) if evidence.stop_signum is not None else ""
    label = evidence.host if hosts.are_several else ""
    if told is not None:
        name, label = told.message or name, told.label or label
    words = f"stopped by {shortened(name, 60) or 'a signal'}" + (f" on {label}" if label else "")
    advice = f"look on {label or 'this host'} who sent it: the scheduler, or a person"
    return Told(Cause("stopped_by_signal", words, (), "", advice), words)


def _store_lost(told: AbortReason, label: str, host: str) -> Told:
    if told.lost_reason == "nic":
        words = f"{host}: {shortened(told.message)}: it does not reach {label}, which has the job's store, any more"
        advice = f"look at the network of {host}: interface, cable, switch port"
        return Told(Cause("network_cut", words, _ranks(told), "", advice), words)
    loss = _LOSSES.get(told.lost_reason, _LOSSES["unknown"])
    words = f"{label}, which had the job's store, is lost: {loss.message}"
    advice = loss.advice.format(host=label, leader="this host")
    class_name = "network_cut" if loss.class_name == "network_cut" else "store_host_lost"
    proof = _proof(told.message, loss)
    return Told(Cause(class_name, words, _ranks(told), proof, advice), words)


def _failed_elsewhere(evidence: Evidence, hosts: Hosts) -> Told | None:
    """A rank's failure that only its host knows, whose evidence has not come."""
    told = evidence.abort_reason
    if told is None or told.reason not in {"failure", "hang"} or not told.message:
        return None
    if told.rank is not None and told.rank in {end.rank for end in evidence.ends if not end.stopped_by_us}:
        return None
    where = told.label or (hosts.label(told.rank) if told.rank is not None else "another host")
    who = f"rank {told.rank} ({where})" if told.rank is not None else where
    words = shortened(told.message)
    advice = f"look at what {where} says; its evidence has not come here"
    headline = (
        words if where in words or (told.rank is not None and f"rank {told.rank}" in words) else f"{who}: {words}"
    )
    return Told(Cause("unknown", words, _ranks(told), "", advice), headline)
