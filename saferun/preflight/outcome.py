"""What the preflight checks come to: whether the ranks are started, and what the user reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from saferun.model import Value
from saferun.preflight.results import UNUSABLE, CheckResult, HostInfo, Preflight

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.host_fault import HostFault, HostFinding
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

__all__ = ["PreflightFailure", "PreflightOutcome", "message_lines", "outcome_of", "problems"]


class PreflightFailure(Value):
    """Why the ranks are not to be started. ``class_name``: where another try may help; else empty."""

    what: str
    hint: str
    class_name: str


class PreflightOutcome(Value):
    """What the checks came to.

    Attributes:
        failure: why the ranks may not be started; None: they may.
        preflight: what was found.
        infos: of all hosts, by their numbers.
        nics: the interfaces to use; empty: there is nothing to choose.
        faults: hosts whose own hardware or system is at fault, the worst first; known where the results of all hosts
            are. No launch is ended because of them.
        replaced: those of them whose places spares take before any rank is started.
    """

    failure: PreflightFailure | None
    preflight: Preflight
    infos: Mapping[int, HostInfo]
    nics: tuple[str, ...] = ()
    faults: tuple[HostFault, ...] = ()
    replaced: tuple[FaultyHost, ...] = ()


def findings_of(results: Iterable[CheckResult], infos: Mapping[int, HostInfo] | None = None) -> list[HostFinding]:
    """What checks found of single hosts, for the judgement of these.

    Args:
        results: of all hosts.
        infos: of all hosts, by their numbers.
    """
    from saferun.diagnosis.host_fault import HostFinding

    numbers = {info.label: host for host, info in (infos or {}).items() if info.label}
    return [
        HostFinding(
            result.host,
            result.name,
            result.class_name,
            result.message,
            numbers.get(result.host, -1),
            unusable=result.verdict == "fail" or any(name == UNUSABLE for name, *_ in result.facts),
        )
        for result in results
        if result.verdict in {"warn", "fail"} and (result.host or not numbers)
    ]


def bad_hosts(preflight: Preflight, infos: Mapping[int, HostInfo]) -> tuple[HostFault, ...]:
    """The hosts whose own hardware or system is at fault by what all hosts found."""
    if preflight.verdict not in {"warn", "fail"}:
        return ()  # as for nearly every launch: nothing is imported for it
    from saferun.diagnosis.host_fault import found_faults

    return found_faults(findings_of(preflight.results, infos), max(len(infos), 1))


def unusable_hosts(outcome: PreflightOutcome) -> tuple[FaultyHost, ...]:
    """The hosts without which the ranks could be started, and with which they cannot work.

    None where the launch would be ended for something else as well.
    """
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

    found: dict[int, FaultyHost] = {}
    for fault in outcome.faults:
        # What the script may have brought about, or what another host does not change, is none of these.
        if fault.unusable and fault.host >= 0 and fault.kind not in {"clock", "memory"}:
            found.setdefault(fault.host, FaultyHost(fault.host, fault.label, fault.reason))
    labels = {fault.label for fault in found.values()}
    has_others = outcome.failure is not None and any(
        result.host not in labels for result in _failures(outcome.preflight.results)
    )
    return () if has_others else tuple(found.values())


def reason_of(outcome: PreflightOutcome) -> CheckResult | None:
    """The warning for which spares replace the first of the hosts; None: it ends the launch, or they replace none."""
    if outcome.failure is not None or not outcome.replaced:
        return None
    first = outcome.replaced[0]
    same = (one for one in outcome.preflight.results if (one.host, one.message) == (first.label, first.why))
    return next(same, None)


def problems(results: Sequence[CheckResult], *, only_warn: bool) -> list[CheckResult]:
    """What the user is to read of: warnings and failures.

    Args:
        results: what was found.
        only_warn: whether nothing that was found ends the launch.
    """
    found = [result for result in results if result.verdict in {"warn", "fail"}]
    return [result._replace(verdict="warn") for result in found] if only_warn else found


def outcome_of(
    preflight: Preflight, infos: Mapping[int, HostInfo], *, nics: Sequence[str], only_warn: bool
) -> PreflightOutcome:
    """The consequence of what was found.

    Args:
        preflight: what was found.
        infos: of all hosts.
        nics: what ``--nic`` named.
        only_warn: whether nothing that was found ends the launch.
    """
    failing = _failures(problems(preflight.results, only_warn=only_warn))
    faults = bad_hosts(preflight, infos)
    if not failing:
        return PreflightOutcome(None, preflight, infos, preflight.nic if tuple(nics) == ("auto",) else (), faults)
    same = _alike(failing[0], failing)
    first = max(same, key=lambda result: len(result.message))  # it says most
    host, what = "", first.message
    if len(same) > 1:
        from saferun.preflight.findings_text import host_ranges

        host = f"{host_ranges(result.host for result in same)}: "
        what = _hostless(first) if any(result.message != what for result in same) else what
    elif first.host and not first.message.startswith(first.host):
        host = f"{first.host}: "
    more = f" (and {len(failing) - len(same)} more, above)" if len(failing) > len(same) else ""
    is_transient = all(result.transient for result in failing)
    hint = first.hint or "see the other lines"
    return PreflightOutcome(
        PreflightFailure(f"{host}{what}{more}", hint, first.class_name if is_transient else ""),
        preflight,
        infos,
        faults=faults,
    )


def message_lines(found: Sequence[CheckResult]) -> list[str]:
    """What is printed of the problems: all but the failure that ends the launch, which is given as its reason."""
    failing = _failures(found)
    reason = _alike(failing[0], failing) if failing else []
    printed = [result for result in found if result not in reason]
    if not printed:
        return []
    from saferun.preflight.findings_text import result_lines

    return result_lines(printed)


def _failures(results: Sequence[CheckResult]) -> list[CheckResult]:
    return [result for result in results if result.verdict == "fail"]


def _alike(first: CheckResult, failing: Sequence[CheckResult]) -> list[CheckResult]:
    """The same on other hosts, some of which may have seen less of it."""
    what = _hostless(first)
    return [
        result
        for result in failing
        if (result.name, _hostless(result)) == (first.name, what)
        or (result.host and first.host and result.hint == first.hint and _is_part(what, _hostless(result)))
    ]


def _is_part(what: str, other: str) -> bool:
    """Whether one of two messages is the end of the other."""
    return what.endswith(other) or other.endswith(what)


def _hostless(result: CheckResult) -> str:
    """A message of one host as it reads for several."""
    if not result.host:
        return result.message
    return re.sub(rf"(?<![\w.-]){re.escape(result.host)}(?![\w-])", "<host>", result.message)
