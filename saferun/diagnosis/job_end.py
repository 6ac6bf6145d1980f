"""What ends a job on all its hosts though no rank failed: lost hosts, signals, reasons of other hosts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import shortened
from saferun.diagnosis.job_hosts import Hosts, hosts_text
from saferun.diagnosis.judgement import Judgement
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import AbortReason, Evidence, HostView
from saferun.model import ABORT_FAILURES, Value, signal_name
from saferun.text.wording import ranks_text

_MOST_LOST = 4


class _Loss(Value):
    """Why a host is lost: the class of the cause, the observation, what to do."""

    class_name: str
    message: str
    advice: str


_LOSSES = {
    "gone": _Loss(
        "host_lost",
        "its saferun was killed (the host is up)",
        "find on {host} what killed it: dmesg (the OOM killer), the scheduler's log, a kill -9 by hand",
    ),
    "unreachable": _Loss(
        "host_lost",
        "none of its addresses answers: it has no power, has crashed, or its network is cut",
        "check whether {host} is up (its console, the scheduler), then check its network",
    ),
    "frozen": _Loss(
        "host_lost",
        "its saferun accepts connections but does not respond: it is stopped (SIGSTOP), or the host is overloaded",
        "on {host}, see `ps`: state T means stopped; find out by whom, and `kill -CONT` that pid: saferun then exits",
    ),
    "cut": _Loss(
        "network_cut",
        "it is alive, and cannot be reached on the way to the store: the network is cut there",
        "look at the network between {leader} and {host}: interface, cable, switch port, firewall",
    ),
    "unknown": _Loss(
        "host_lost",
        "no heartbeat is received from it",
        "check whether {host} is up and reachable, and runs saferun",
    ),
}
_FROM_FAR = frozenset({"unreachable", "cut", "unknown"})


def end_of_job(evidence: Evidence, hosts: Hosts, *, is_a_ranks: bool) -> Judgement | None:
    """What ended the job though no rank brought it about; None where one did, or the reason is not known.

    Args:
        evidence: what is known.
        hosts: its hosts.
        is_a_ranks: whether a rank failed by itself, and not because of others.
    """
    reason = evidence.abort_reason
    if reason is not None and reason.reason == "start":
        return _aborted(evidence, hosts)
    # A rank that failed before a host was missed is the cause, whatever became of that host afterwards.
    if reason is None or reason.reason == "lost" or not is_a_ranks:
        lost = lost_hosts(evidence, hosts)
        if lost is not None:
            return lost
    if evidence.error and (reason is None or reason.reason != "store_lost"):
        return None
    found = _aborted(evidence, hosts)
    return found if found is not None or is_a_ranks else _failed_elsewhere(evidence, hosts)


# --------------------------------------------------------------------------------------------------------------- losses


def lost_hosts(evidence: Evidence, hosts: Hosts) -> Judgement | None:
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
        return Judgement(cause, f"{head}: {loss.message}")
    each = "; ".join(f"{host.label}: {_LOSSES.get(host.lost_reason, loss).message}" for host in lost[:_MOST_LOST])
    message = f"of each: {loss.message}" if alike else each
    head = f"{len(lost)} hosts are lost ({hosts_text(lost)})"
    class_name = loss.class_name if alike else "host_lost"
    return Judgement(Cause(class_name, f"{head}: {message}", ranks, proof, advice), f"{head}: {message}")


def _cut_off(evidence: Evidence, lost: Sequence[HostView]) -> Judgement:
    """All others at once: then it is the one that judges."""
    message = f"{evidence.host} reaches none of the other {len(lost)} hosts any more: its own network is cut"
    advice = f"look at the network of {evidence.host}: interface, cable, switch port, firewall"
    return Judgement(Cause("network_cut", message, (), shortened(lost[0].lost_message), advice), message)


def _proof(message: str, loss: _Loss) -> str:
    return shortened(message) if message and message != loss.message else ""


def silent_lines(hosts: Hosts, headline: str) -> list[str]:
    """A line for the hosts that are lost, and one for those of which nothing has come, unless the headline has them."""
    lost = [host for host in hosts.all if host.lost_reason]
    lines = [f"lost: {host.label}: {host.lost_message or _LOSSES['unknown'].message}" for host in lost[:_MOST_LOST]]
    if any(host.label in headline for host in lost):
        lines = []
    unheard = [host for host in hosts.all if not host.has_evidence and not host.lost_reason]
    if unheard and f"no evidence from {hosts_text(unheard)}" not in headline:
        ranks = ranks_text(rank for host in unheard for rank in host.ranks)
        lines.append(f"no evidence from {hosts_text(unheard)} ({ranks})")
    return lines


# ------------------------------------------------------------------------------------------------------ abort reasons


def _aborted(evidence: Evidence, hosts: Hosts) -> Judgement | None:
    """What made all hosts stop where it is no rank's failure; None where it is one's, or no reason is known."""
    reason = evidence.abort_reason
    if reason is None:
        return _signal(evidence, hosts) if hosts.are_several and evidence.stop_signum is not None else None
    label = reason.label or evidence.host
    message = shortened(reason.message)
    if reason.reason in {"signal", "request"} or (reason.reason == "leave" and evidence.stop_signum is not None):
        return _signal(evidence, hosts)
    match reason.reason:
        case "parent":
            what = f"saferun's parent process on {label} exited" + (f" ({message})" if message else "")
            advice = (
                "the session that it was started from has ended (ssh, mpirun, an srun step): look at its end, or start "
                "with --stop-with-parent off"
            )
            return Judgement(Cause("parent_gone", what, (), "", advice), what)
        case "store_lost":
            return _store_lost(reason, label, evidence.host)
        case "task_lost":
            what = f"a saferun process of {label} is gone" + (f": {message}" if message else "")
            return Judgement(
                Cause("host_lost", what, _ranks(reason), "", _LOSSES["gone"].advice.format(host=label)), what
            )
        case "start":
            what = f"{label} could not start its ranks" + (f": {message}" if message else "")
            if evidence.error and label == evidence.host:
                # What the checks found may be about any host, and names it.
                what = evidence.error if evidence.is_checked else f"{label}: {evidence.error}"
            theirs = f"on {label}: {shortened(reason.hint)}" if reason.hint else f"look at what {label} says"
            advice = evidence.error_hint or theirs
            return Judgement(Cause("start_failed", what, _ranks(reason), "", advice), what)
        case "membership" | "leave":
            what = message or ("a host left the job" if reason.reason == "leave" else "hosts came to the job")
            if reason.reason == "leave" and label not in what:
                what = f"{label}: {what}"
            return Judgement(
                Cause("membership", what, (), "", "nothing: the job goes on with the hosts that it has"), what
            )
    return None


def _ranks(reason: AbortReason) -> tuple[int, ...]:
    return (reason.rank,) if reason.rank is not None and reason.rank >= 0 else ()


def _signal(evidence: Evidence, hosts: Hosts) -> Judgement:
    reason = evidence.abort_reason
    if reason is not None and reason.reason == "request":
        where = f" on {reason.label}" if hosts.are_several and reason.label not in reason.message else ""
        message = f"stopped by {shortened(reason.message) or 'saferunctl'}{where}"
        return Judgement(Cause("stopped_by_signal", message, (), "", ""), message)
    name = signal_name(evidence.stop_signum) if evidence.stop_signum is not None else ""
    label = evidence.host if hosts.are_several else ""
    if reason is not None:
        name, label = reason.message or name, reason.label or label
    signals = {host.stop_signum for host in hosts.all}
    if hosts.are_several and len(signals) == 1 and None not in signals:
        message = f"stopped by the scheduler ({shortened(name, 60)} to all {len(hosts.all)} hosts)"
        advice = (
            "look in the scheduler's log: a cancelled job (scancel), its time limit, preemption; or whoever ended the "
            "launcher (srun, mpirun, pdsh)"
        )
        return Judgement(Cause("stopped_by_signal", message, (), "", advice), message)
    message = f"stopped by {shortened(name, 60) or 'a signal'}" + (f" on {label}" if label else "")
    advice = f"find on {label or 'this host'} what sent it: the scheduler, or a user"
    return Judgement(Cause("stopped_by_signal", message, (), "", advice), message)


def _store_lost(reason: AbortReason, label: str, host: str) -> Judgement:
    if reason.lost_reason == "nic":
        message = f"{host}: {shortened(reason.message)}: it does not reach {label}, which has the job's store, any more"
        advice = f"look at the network of {host}: interface, cable, switch port"
        return Judgement(Cause("network_cut", message, _ranks(reason), "", advice), message)
    if reason.lost_reason == "ended":
        message = f"{shortened(reason.message)}, and with it the job's store"
        advice = f"find on {label} what killed it: dmesg (the OOM killer), the scheduler's log, a kill -9 by hand"
        return Judgement(Cause("store_host_lost", message, _ranks(reason), "", advice), message)
    loss = _LOSSES.get(reason.lost_reason, _LOSSES["unknown"])
    message = f"{label}, which had the job's store, is lost: {loss.message}"
    advice = loss.advice.format(host=label, leader="this host")
    class_name = "network_cut" if loss.class_name == "network_cut" else "store_host_lost"
    proof = _proof(reason.message, loss)
    return Judgement(Cause(class_name, message, _ranks(reason), proof, advice), message)


def ended_by_signal(evidence: Evidence, ended: Judgement | None) -> frozenset[int]:
    """Ranks that the signal has ended which stopped the job: a scheduler sends it to them as well.

    Args:
        evidence: what is known.
        ended: what ended the job, if it was no rank.
    """
    if ended is None or ended.cause.class_name != "stopped_by_signal":
        return frozenset()
    signals = {evidence.stop_signum, *(host.stop_signum for host in evidence.hosts)} - {None}
    return frozenset(end.rank for end in evidence.ends if end.status.signum in signals)


def _failed_elsewhere(evidence: Evidence, hosts: Hosts) -> Judgement | None:
    """A rank's failure that only its host knows, whose evidence has not come."""
    reason = evidence.abort_reason
    if reason is None or reason.reason not in ABORT_FAILURES or not reason.message:
        return None
    if reason.rank is not None and reason.rank in {end.rank for end in evidence.ends if not end.stopped_by_us}:
        return None
    where = reason.label or (hosts.label(reason.rank) if reason.rank is not None else "another host")
    who = f"rank {reason.rank} ({where})" if reason.rank is not None else where
    message = shortened(reason.message)
    advice = f"look at what {where} says; its evidence has not come here"
    headline = (
        message
        if where in message or (reason.rank is not None and f"rank {reason.rank}" in message)
        else f"{who}: {message}"
    )
    return Judgement(Cause("unknown", message, _ranks(reason), "", advice), headline)
