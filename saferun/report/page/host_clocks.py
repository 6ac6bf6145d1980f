"""How far the clocks of hosts are apart, which the timeline corrects. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.report.page.contents import PreflightSection
from saferun.report.page.run_contents import HostEvents
from saferun.text.bounded_json import shown

_LEAST_AHEAD_S = 0.001
_MOST_HOSTS = 3


def clock_corrections(hosts: Sequence[HostEvents], preflight: PreflightSection | None) -> tuple[dict[str, float], str]:
    """How many seconds the clocks of hosts are ahead of the leader's, and a note about that.

    Messages of the hosts measured it. The clock of a host that has none of them is as the preflight probes found it.
    """
    probed = clock_offsets(preflight)
    measured = {host.host: event.ahead_s for host in hosts for event in host.events if event.event == "ClockMeasured"}
    ahead = {host.host: measured.get(host.host, probed.get(host.host, 0.0)) for host in hosts}
    unmeasured = [host.host for host in hosts if host.host not in measured]
    if measured and len(unmeasured) == 1:
        ahead[unmeasured[0]] = 0.0  # the leader, whose clock is the measure
    corrected = [host for host, seconds in ahead.items() if abs(seconds) >= _LEAST_AHEAD_S]
    if corrected:
        by = "messages between the hosts" if measured else "the preflight probes"
        return ahead, f"The clocks of {hosts_listed(corrected)} are corrected by what {by} measured."
    if measured and len(unmeasured) == 1:
        return ahead, "The clocks of the hosts are less than a millisecond apart."
    return ahead, "Times are those of each host's own clock." if len(hosts) > 1 else ""


def clock_offsets(preflight: PreflightSection | None) -> dict[str, float]:
    """How many seconds the clocks of hosts are ahead of the others', where the checks measured it."""
    offsets = {}
    for result in preflight.results if preflight is not None else ():
        for fact in result.facts:
            if result.check == "clock" and fact.name == "ahead_s" and result.host:
                try:
                    value = float(fact.value)
                except ValueError:
                    continue
                if abs(value) < 1e9:  # noqa: PLR2004 - thirty years, and no NaN
                    offsets[result.host] = value
    return offsets


def hosts_listed(hosts: Sequence[str]) -> str:
    """``node1, node2, node3 and 5 more``."""
    more = f" and {len(hosts) - _MOST_HOSTS} more" if len(hosts) > _MOST_HOSTS else ""
    return f"{', '.join(shown(host, 60) for host in hosts[:_MOST_HOSTS])}{more}"
