"""The lines about a slow rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.text.wording import duration_text, ranks_text
from saferun.watchdog.stragglers import Straggler, WaitCount

_RECORDED = {
    "durations": "how long collectives took on the GPUs",
    "calls": "when ranks called collectives, and when those were over",
}


def slow_lines(
    found: Straggler, counts: Mapping[int, WaitCount], hosts: Mapping[int, str], beside: Sequence[str]
) -> list[str]:
    """What the console and the report say.

    Args:
        found: the slow ranks.
        counts: how often each rank of the job waited in the same time.
        hosts: the name of each rank's host.
        beside: what their host has found about its GPUs and interfaces.
    """
    ranks = ranks_text(found.ranks)
    host = hosts.get(found.ranks[0], "")
    here = sorted(rank for rank in counts if hosts.get(rank, "") == host)
    one = len(found.ranks) == 1
    who = f"{host} ({ranks})" if not one and here == list(found.ranks) else f"{ranks} ({host})"
    it = ranks if one else "they"
    verb = "are" if who.startswith("ranks") else "is"
    time = "of the time" if found.by in _RECORDED else f"of the last {duration_text(found.window_s)}"
    spent = f"{_percent(found.others_waited)} {time}"
    lines = [f"saferun: {who} {verb} slow: the other ranks spent {spent} waiting, {it} only {_percent(found.waited)}"]
    if found.by in _RECORDED:
        lines.append(f"  by Flight Recorders of the last {duration_text(found.window_s)}: {_RECORDED[found.by]}")
    others = [rank for rank in here if rank not in found.ranks]
    if others:
        shares = [counts[rank].share for rank in others]
        lines.append(f"  {ranks_text(others)} on the same host: {_span(min(shares), max(shares))}")
    lines += [f"  {line}" for line in beside]
    stacks = f"saferunctl stacks shows where {'it is' if one else 'they are'}"
    lines.append(f"hint: {stacks}; a rank that only has more to do looks the same, such as one stage of a pipeline")
    return lines


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _span(least: float, most: float) -> str:
    low, high = f"{least * 100:.0f}", f"{most * 100:.0f}"
    return f"{high} %" if low == high else f"{low}-{high} %"
