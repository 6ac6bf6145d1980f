"""The hosts of a run: what the checks found, which interfaces reach which, and what differs between them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from saferun.report.page.contents import (
    CellPart,
    IncidentPart,
    MatrixRowPart,
    PairPart,
    PreflightSection,
    ProcessPart,
    ResultPart,
)
from saferun.report.page.page_model import LABEL_CHARACTERS, Matrix, MatrixCell, Table
from saferun.report.page.run_contents import RunJson
from saferun.report.text_diagram import rank_ranges
from saferun.text.bounded_json import shown
from saferun.text.wording import count_text, duration_text, size_text

_MOST_ROWS = 200
_MOST_HOST_ROWS = 48
_MOST_NICS = 24
_MOST_NAMES = 4
_LONGEST_VALUE = 300
_TONES = {"ok": "good", "slow": "warn", "lossy": "warn", "untested": "none", "self": "none"}
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "zombie",
    "I": "idle",
}
_ORDER = {"fail": 0, "warn": 1, "skipped": 2, "ok": 3}


def build_checks(preflight: PreflightSection | None) -> tuple[Table | None, Table | None]:
    """What the checks found: first what is wrong or was not checked, then what is fine."""
    if preflight is None:
        return None, None
    rows = _alike(preflight.results)
    bad = [row for row in rows if row[0] in {"fail", "warn"}]
    fine = [row for row in rows if row[0] not in {"fail", "warn"}]
    head = ("Result", "Check", "Hosts", "Finding")
    took = f"; all checks took {duration_text(preflight.duration_s)}" if preflight.duration_s is not None else ""
    odd = frozenset(number for number, row in enumerate(bad) if row[0] == "fail")
    first = Table("What the preflight checks found", head, tuple(bad[:_MOST_ROWS]), odd, "") if bad else None
    caption = f"{count_text(len(fine), 'finding')} without a problem{took}"
    second = Table(caption, head, tuple(fine[:_MOST_ROWS])) if fine else None
    return first, second


def _alike(results: Iterable[ResultPart]) -> list[tuple[str, ...]]:
    """Equal findings of several hosts as one row."""
    hosts: dict[tuple[str, str, str, str], list[str]] = {}
    for result in results:
        verdict = result.verdict if result.verdict in _ORDER else "skipped"
        key = (verdict, shown(result.check, 60), shown(result.message, 500), shown(result.hint, 500))
        hosts.setdefault(key, []).append(result.host)
    rows = []
    for (verdict, check, message, hint), names in hosts.items():
        rows.append((verdict, check, names_text(names), f"{message} — {hint}" if hint else message))
    return sorted(rows, key=lambda row: _ORDER[row[0]])


def names_text(names: Sequence[str]) -> str:
    """``node1, node2``; ``node1, node2, node3, node4 and 60 more``."""
    distinct = [shown(name, 60) for name in dict.fromkeys(names) if name]
    more = f" and {len(distinct) - _MOST_NAMES} more" if len(distinct) > _MOST_NAMES else ""
    return ", ".join(distinct[:_MOST_NAMES]) + more


# --------------------------------------------------------------------------------------------------------------- matrix


def build_matrix(rows: Sequence[MatrixRowPart]) -> Matrix | None:
    """Hosts by interfaces; of many hosts those without problems are folded into one line."""
    if not rows:
        return None
    nics = tuple(dict.fromkeys(shown(cell.nic, 40) for row in rows for cell in row.interfaces))[:_MOST_NICS]
    drawn = []
    fine: list[str] = []
    for row in rows:
        cells = {shown(cell.nic, 40): cell for cell in row.interfaces}
        is_fine = all(cell.state == "ok" for cell in row.interfaces)
        if is_fine and len(rows) > _MOST_HOST_ROWS:
            fine.append(row.host)
            continue
        drawn.append((shown(row.host, 60), tuple(_cell(cells.get(nic)) for nic in nics)))
    hidden = len(drawn) - 4 * _MOST_HOST_ROWS
    notes = []
    if fine:
        notes.append(f"{count_text(len(fine), 'host')} with all interfaces reachable: {names_text(fine)}")
    if hidden > 0:
        notes.append(f"{count_text(hidden, 'more host')} with problems not shown")
    return Matrix(nics, tuple(drawn[: 4 * _MOST_HOST_ROWS]), "; ".join(notes))


def _cell(cell: CellPart | None) -> MatrixCell:
    if cell is None:
        return MatrixCell("-", "none", "no such interface")
    parts = [shown(cell.state, 30)]
    if cell.total:
        parts.append(f"{cell.ok}/{cell.total}")
    more = []
    if cell.latency_s is not None:
        more.append(f"{cell.latency_s * 1e6:.0f} µs")
    if cell.bytes_per_s is not None:
        more.append(f"{cell.bytes_per_s / 1e9:.1f} GB/s")
    title = f"{cell.ok} of {cell.total} connections came through"
    return MatrixCell(", ".join([" ".join(parts), *more]), _TONES.get(cell.state, "bad"), title)


# ---------------------------------------------------------------------------------------------------------- differences


def build_versions(preflight: PreflightSection | None, run: RunJson | None) -> Table | None:
    """Versions; where hosts differ, each value with its hosts."""
    by_host = {host.name: host.versions for host in preflight.hosts} if preflight is not None else {}
    if preflight is not None and not by_host:
        by_host = {
            result.host or "this host": result.facts for result in preflight.results if result.check == "versions"
        }
    if not by_host and run is not None and run.versions:
        by_host = {"this host": run.versions}
    scripts = {host.name: host.script for host in preflight.hosts if host.script} if preflight is not None else {}
    if len(set(scripts.values())) > 1:
        by_host = {
            name: (*pairs, PairPart("training script (hash)", scripts.get(name, ""))) for name, pairs in by_host.items()
        }
    return _differences("Versions", by_host)


def build_environment(preflight: PreflightSection | None) -> Table | None:
    """The variables that matter between hosts, likewise."""
    if preflight is None:
        return None
    return _differences("Environment variables that matter between hosts", {h.name: h.environ for h in preflight.hosts})


def _differences(caption: str, by_host: Mapping[str, Sequence[PairPart]]) -> Table | None:
    names = dict.fromkeys(pair.name for pairs in by_host.values() for pair in pairs)
    rows: list[tuple[bool, tuple[str, ...]]] = []
    for name in names:
        values: dict[str, list[str]] = {}
        for host, pairs in by_host.items():
            value = next((pair.value for pair in pairs if pair.name == name), "")
            values.setdefault(value, []).append(host)
        most = max(values.values(), key=len)
        for value, hosts in sorted(values.items(), key=lambda item: item[1] is most):
            differs = len(values) > 1
            where = names_text(hosts) if differs else ("all hosts" if len(by_host) > 1 else names_text(hosts))
            text = shown(value, _LONGEST_VALUE) or "(not set)"
            rows.append((differs and hosts is not most, (shown(name, 80), text, where)))
    if not rows:
        return None
    rows.sort(key=lambda row: not row[0])
    odd = frozenset(number for number, (is_odd, _) in enumerate(rows[:_MOST_ROWS]) if is_odd)
    note = "The highlighted rows differ between hosts." if odd else ""
    return Table(caption, ("Name", "Value", "Hosts"), tuple(row for _, row in rows[:_MOST_ROWS]), odd, note)


# ------------------------------------------------------------------------------------------------------------- settings


def build_settings(run: RunJson | None) -> tuple[Table | None, Table | None]:
    """The settings that were set, and the defaults."""
    if run is None or not run.settings:
        return None, None
    chosen, defaults = [], []
    for setting in run.settings[:_MOST_ROWS]:
        name = shown(setting.name, 60)
        value = shown(setting.value, _LONGEST_VALUE)
        if setting.origin == "default":
            defaults.append((name, value or "-"))
        else:
            chosen.append((name, value or "-", shown(setting.origin, 120)))
    first = Table("Settings that are not defaults", ("Setting", "Value", "From"), tuple(chosen)) if chosen else None
    second = Table("Defaults", ("Setting", "Value"), tuple(defaults)) if defaults else None
    return first, second


# ------------------------------------------------------------------------------------------------- state of the machine


def build_machine(incident: IncidentPart) -> tuple[Table, ...]:
    """Processes, memory and connections at the incident."""
    tables = (_processes(incident.processes), _connections(incident), _memory(incident))
    return tuple(table for table in tables if table is not None)


def _processes(processes: Sequence[ProcessPart]) -> Table | None:
    groups: dict[tuple[str, ...], list[ProcessPart]] = {}
    for process in processes:
        kernel = ", ".join(part for part in (shown(process.syscall, 60), shown(process.wchan, 60)) if part)
        whose = "rank" if process.is_rank else "child"
        name = f"{shown(process.name, 60)} ({whose})"
        groups.setdefault(
            (name, _STATES.get(process.state, "unknown"), kernel, shown(process.waits_on, 200)), []
        ).append(process)
    rows = []
    for (name, state, kernel, waits_on), members in sorted(groups.items(), key=lambda item: len(item[1])):
        sizes = [max(member.rss_bytes, 0) for member in members]
        times = [member.cpu_s for member in members if member.cpu_s is not None]
        ranks = rank_ranges((member.rank for member in members), LABEL_CHARACTERS)
        cpu = _span(min(times), max(times), duration_text) if times else "-"
        rows.append((ranks, name, state, kernel or "-", waits_on or "-", _span(min(sizes), max(sizes), size_text), cpu))
    head = ("Ranks", "Process", "State", "In the kernel", "Waits for", "Memory", "CPU time")
    return Table("Processes, as /proc showed them", head, tuple(rows[:_MOST_ROWS])) if rows else None


def _span(low: float, high: float, text: Callable[[float], str]) -> str:
    first, last = text(low), text(high)
    return first if first == last else f"{first} … {last}"


def _connections(incident: IncidentPart) -> Table | None:
    rows = tuple(
        (
            f"rank {one.rank}",
            shown(one.local, 60),
            shown(one.remote, 60),
            shown(one.state, 30),
            size_text(max(one.send_queue_bytes, 0)),
            str(one.retransmits),
        )
        for one in incident.stuck_connections[:_MOST_ROWS]
    )
    head = ("Rank", "Local", "Remote", "State", "Not acknowledged", "Retransmits")
    return Table("Connections with unacknowledged data", head, rows) if rows else None


def _memory(incident: IncidentPart) -> Table | None:
    oom = incident.oom
    if oom is None:
        return None
    limit = size_text(oom.limit_bytes) if oom.limit_bytes else "-"
    used = size_text(oom.rss_bytes) if oom.rss_bytes else "-"
    row = (str(oom.kills), shown(oom.scope, 40), limit, used, shown(oom.host, 60) or "-", shown(oom.source, 200))
    head = ("Killed", "Scope", "Limit", "Used by the killed process", "Host", "Read from")
    return Table("The kernel's OOM killer", head, (row,), frozenset({0}))
