"""What the checks before a launch found, and what was decided after an attempt, in words. Pure.

On the console only what is wrong, in a few lines however many hosts there are; as a table all of it, for
``saferunctl doctor`` and report.txt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from saferun.model import Value
from saferun.preflight.json_report import is_well, preflight_json, verdict_of, worst_first
from saferun.preflight.results import SEVERITY, Cell, CheckResult, HostInfo, MatrixRow, Preflight
from saferun.supervisor.policy.decision_row import DecisionRow
from saferun.text.bounded_json import redacted_line

__all__ = ["decision_text", "host_ranges", "preflight_json", "result_lines", "show", "table_lines"]

_WIDTH = 120
_MOST_REPORTED = 12
_LONGEST_MESSAGE = 500
_LONGEST_NAME = 80
_HOSTS_WIDTH = 60
_SEVERAL = 2
# Results that differ in numbers only are put together from so many on.
_ALIKE = 3
_TABLE_HOSTS_WIDTH = 30
_FEWEST_COLUMNS = 24
_ROWS_IN_FULL = 12
_MOST_ROWS = 40
_MOST_HOST_COLUMNS = 40
_BAD = ("fail", "warn")
_STATES = {
    "timeout": "timeout",
    "no_route": "no route",
    "unreachable": "network down",
    "stranger": "stranger",
    "self": "reaches itself",
    "black_hole": "black hole",
    "broken": "closed midway",
}
# The number of a host stands at the end of its name, before the domain.
_NUMBERED = re.compile(r"([^.]*?)([0-9]{1,9})([^0-9.]*(?:\..*)?)")
# A number that stands for itself: neither hsn0's nor that of node3.
_FREE_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)*(?![\w.-]*\w)")


class _Row(Value):
    """Results that are reported as one. ``hosts``: empty where it is about the job, or there is one host."""

    verdict: str
    check: str
    message: str
    hint: str
    hosts: tuple[str, ...]


# -------------------------------------------------------------------------------------------------------------- console


def result_lines(results: Sequence[CheckResult]) -> list[str]:
    """What the user reads of the checks: warnings and failures only, two lines each, the failures first.

    Equal words of several hosts are one sentence. At most 12 sentences, however many hosts there are.

    Args:
        results: what was found.
    """
    rows = _together([result for result in worst_first(results) if verdict_of(result) in _BAD])
    lines = []
    for item in rows[:_MOST_REPORTED]:
        who = f"{host_ranges(item.hosts)}: " if item.hosts else ""
        begin = "saferun" if item.verdict == "fail" else "saferun: warning"
        lines.append(f"{begin}: {who}{item.message}")
        if item.hint:
            lines.append(f"hint: {item.hint}")
    left = rows[_MOST_REPORTED:]
    if left:
        failures = sum(item.verdict == "fail" for item in left)
        counts = [*_several(failures, "more failure"), *_several(len(left) - failures, "more warning")]
        lines.append(f"saferun: {' and '.join(counts)}")
    return lines


def show(preflight: Preflight, infos: Mapping[int, HostInfo], *, as_json: bool, width: int = _WIDTH) -> str:
    """The answer to ``saferunctl doctor``, in whole lines: the table, or the content of preflight.json."""
    if as_json:
        return json.dumps(preflight_json(preflight, infos), indent=1) + "\n"
    return "".join(f"{line}\n" for line in table_lines(preflight, infos, width=width))


def decision_text(row: DecisionRow) -> str:
    """A decision as report.txt has it: ``attempt 0 at 03:15:33 (port_in_use, node1): …``."""
    clock = f" at {row.clock}" if row.clock else ""
    about = ", ".join(redacted_line(word, _LONGEST_NAME) for word in (row.class_name, row.host) if word)
    return f"attempt {row.attempt}{clock}{f' ({about})' if about else ''}: {_sentence(row.message)}"


def host_ranges(hosts: Iterable[str], width: int = _HOSTS_WIDTH) -> str:
    """Hosts in the order of their numbers: ``node3``; ``node1, node2``; ``node1, node3-node9 (8 hosts)``.

    Where all of them would be wider than ``width``, the first ones: ``node1, node3, … (512 hosts)``.
    """
    spans, total = _spans(hosts)
    if not spans:
        return "no host"
    tail = f" ({total} hosts)" if total > _SEVERAL else ""
    message = ", ".join(spans)
    if len(message) + len(tail) <= width:
        return f"{message}{tail}"
    message = spans[0]
    for span in spans[1:]:
        if len(message) + len(span) + len(", , …") + len(tail) > width:
            break
        message = f"{message}, {span}"
    return f"{message}{', …' if len(spans) > 1 else ''}{tail}"


def _spans(hosts: Iterable[str]) -> tuple[list[str], int]:
    # prefix, suffix, number, digits
    names: list[tuple[str, str, int, str]] = []
    for host in {redacted_line(host, _LONGEST_NAME) for host in hosts}:
        match = _NUMBERED.fullmatch(host)
        names.append((match[1], match[3], int(match[2]), match[2]) if match else (host, "", -1, ""))
    spans: list[list[tuple[str, str, int, str]]] = []
    for name in sorted(names):
        before = spans[-1][-1] if spans else None
        if before is not None and name[:2] == before[:2] and name[2] == before[2] + 1 and _in_a_row(before[3], name[3]):
            spans[-1].append(name)
        else:
            spans.append([name])
    message = []
    for span in spans:
        ends = [span[0], span[-1]] if len(span) > 1 else [span[0]]
        joint = "-" if len(span) > _SEVERAL else ", "
        message.append(joint.join(f"{prefix}{digits}{suffix}" for prefix, suffix, _, digits in ends))
    return message, len(names)


def _in_a_row(digits: str, after: str) -> bool:
    """9 and 10 stand in one range, and so do 09 and 10; 009 and 10 do not."""
    return len(digits) == len(after) or not (digits.startswith("0") or after.startswith("0"))


def _together(results: Sequence[CheckResult]) -> list[_Row]:
    """Results of equal words as one, and then those that differ in numbers only, where there are many."""
    found: dict[tuple[str, str, str, str], list[CheckResult]] = {}
    for result in results:
        check = redacted_line(result.name, _LONGEST_NAME)
        message, hint = _hostless(result.message or result.name, result.host), _hostless(result.hint, result.host)
        found.setdefault((verdict_of(result), check, message, hint), []).append(result)
    alike: dict[tuple[str, str, str, str], list[tuple[str, str, str, str]]] = {}
    for key in found:
        verdict, check, message, hint = key
        alike.setdefault((verdict, check, _numberless(message), _numberless(hint)), []).append(key)
    rows = []
    for keys in alike.values():
        if len(keys) < _ALIKE or not all(result.host for key in keys for result in found[key]):
            rows += [_row_of(key, found[key]) for key in keys]
            continue
        verdict, check, message, hint = keys[0]
        first = redacted_line(found[keys[0]][0].host, _LONGEST_NAME)
        hosts = tuple(result.host for key in keys for result in found[key])
        rows.append(_Row(verdict, check, f"{message} ({first}; the others' numbers differ)", hint, hosts))
    return sorted(rows, key=lambda item: -SEVERITY[item.verdict])


def _row_of(key: tuple[str, str, str, str], results: Sequence[CheckResult]) -> _Row:
    hosts = tuple(dict.fromkeys(result.host for result in results if result.host))
    if len(hosts) > 1:
        return _Row(*key, hosts)
    return _Row(*key[:2], _sentence(results[0].message) or key[1], _sentence(results[0].hint), hosts)


def _hostless(message: str, host: str) -> str:
    """A message of one host as it reads for several: "the cable of node3's hsn0" is "the cable of <host>'s hsn0"."""
    if host and host in message:
        message = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<host>", message)
    return _sentence(message)


def _numberless(message: str) -> str:
    return _FREE_NUMBER.sub("#", message)


def _sentence(message: str) -> str:
    return redacted_line(message.strip(), _LONGEST_MESSAGE)


def _several(number: int, what: str) -> list[str]:
    return [f"{number} {what}{'' if number == 1 else 's'}"] if number else []


# ---------------------------------------------------------------------------------------------------------------- table


def table_lines(preflight: Preflight, infos: Mapping[int, HostInfo], *, width: int) -> list[str]:
    """All that was found: a line a check, what the others see of each host's interfaces, and the sum.

    Checks that found the same on several hosts are one line; so are good results of one check whatever their words.
    With many hosts, those whose interfaces do alike are one row of the matrix.

    Args:
        preflight: what was found.
        infos: the host info of all hosts, by their numbers.
        width: columns that there are; 0: lines may be as long as they are.
    """
    all_hosts = {redacted_line(info.label, _LONGEST_NAME) for info in infos.values() if info.label}
    all_hosts |= {redacted_line(row.host, _LONGEST_NAME) for row in preflight.matrix if row.host}
    lines = _check_lines(preflight.results, all_hosts, width)
    matrix = _matrix_lines(preflight.matrix, width)
    if matrix:
        lines += ["", "interfaces as the other hosts reach them:", *matrix]
    if preflight.nic:
        names = ",".join(redacted_line(name, _LONGEST_NAME) for name in preflight.nic)
        lines += ["", f"the interfaces to use: --nic {names}"]
    return [*lines, "", _sum_line(preflight, max(len(infos), len(preflight.matrix), 1))]


def _check_lines(results: Sequence[CheckResult], all_hosts: set[str], width: int) -> list[str]:
    bad = [result for result in worst_first(results) if verdict_of(result) in _BAD]
    rows = [*_together(bad), *_good(results)]
    several = len(all_hosts) >= _SEVERAL
    table = [(row.verdict, row.check, _where(row.hosts, all_hosts) if several else "") for row in rows]
    columns = [max((len(cells[column]) for cells in table), default=0) for column in range(3)]
    lines = []
    for row, cells in zip(rows, table, strict=True):
        begin = "  ".join(cell.ljust(size) for cell, size in zip(cells, columns, strict=True) if size)
        message = [*_wrapped(row.message, width, len(begin) + 2)]
        hint = [*_wrapped(f"hint: {row.hint}", width, len(begin) + 2)] if row.hint and row.verdict in _BAD else []
        for number, line in enumerate([*message, *hint]):
            lines.append(f"{begin if number == 0 else ' ' * len(begin)}  {line}".rstrip())
    return lines


def _good(results: Sequence[CheckResult]) -> list[_Row]:
    """What was not asked for, and what is as it should be: a line a check."""
    found: dict[tuple[str, str], list[CheckResult]] = {}
    for result in worst_first(results):
        if verdict_of(result) not in _BAD:
            found.setdefault((verdict_of(result), redacted_line(result.name, _LONGEST_NAME)), []).append(result)
    rows = []
    for (verdict, check), alike in found.items():
        message = _sentence(alike[0].message)
        if len({result.message for result in alike}) > 1 and alike[0].host:
            message = f"{message} ({redacted_line(alike[0].host, _LONGEST_NAME)})"
        rows.append(_Row(verdict, check, message, "", tuple(result.host for result in alike if result.host)))
    return rows


def _where(hosts: Sequence[str], all_hosts: set[str]) -> str:
    if not hosts:
        return "the job"
    if {redacted_line(host, _LONGEST_NAME) for host in hosts} == all_hosts:
        return f"all {len(all_hosts)} hosts"
    return host_ranges(hosts, _TABLE_HOSTS_WIDTH)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    """A text in lines that fit beside ``indent`` columns; words longer than that are cut."""
    room = max(width - indent, _FEWEST_COLUMNS) if width > 0 else len(text)
    if len(text) <= room:
        return [text]
    from textwrap import wrap

    return wrap(text, room, break_on_hyphens=False) or [""]


def _sum_line(preflight: Preflight, hosts: int) -> str:
    verdicts = [verdict_of(result) for result in preflight.results]
    counts = [
        *([f"{verdicts.count('fail')} failed"] if "fail" in verdicts else []),
        *_several(verdicts.count("warn"), "warning"),
        *([f"{verdicts.count('skipped')} skipped"] if "skipped" in verdicts else []),
        f"{verdicts.count('ok')} ok",
    ]
    checks = len({result.name for result in preflight.results})
    where = f"{hosts} hosts, " if hosts >= _SEVERAL else ""
    return f"{where}{checks} check{'' if checks == 1 else 's'} in {_seconds(preflight.duration_s)}: {', '.join(counts)}"


# --------------------------------------------------------------------------------------------------------------- matrix


def _matrix_lines(matrix: Sequence[MatrixRow], width: int) -> list[str]:
    """A row a host, a column an interface; blocks of columns one below the other where they are too wide."""
    nics = [*dict.fromkeys(redacted_line(cell.nic, _LONGEST_NAME) for row in matrix for cell in row.cells)]
    if not nics:
        return []
    groups = _row_groups(matrix)
    left_out = groups[_MOST_ROWS:]
    rows = [
        (host_ranges([row.host for row in group], _MOST_HOST_COLUMNS), _cells(group)) for group in groups[:_MOST_ROWS]
    ]
    first = max(len("host"), *(len(who) for who, _ in rows))
    sizes = {nic: max(len(nic), *(len(cells.get(nic, "-")) for _, cells in rows)) for nic in nics}
    lines: list[str] = []
    for block in _blocks(nics, sizes, width - first):
        lines += [""] if lines else []
        lines.append("  ".join(["host".ljust(first), *(nic.ljust(sizes[nic]) for nic in block)]).rstrip())
        for who, cells in rows:
            shown = (cells.get(nic, "-").ljust(sizes[nic]) for nic in block)
            lines.append("  ".join([who.ljust(first), *shown]).rstrip())
    if left_out:
        lines.append(f"… and {sum(map(len, left_out))} more hosts")
    return lines


def _blocks(nics: Sequence[str], sizes: Mapping[str, int], room: int) -> Iterator[list[str]]:
    block: list[str] = []
    used = 0
    for nic in nics:
        if block and 0 < room < used + sizes[nic] + 2:
            yield block
            block, used = [], 0
        block.append(nic)
        used += sizes[nic] + 2
    yield block


def _row_groups(matrix: Sequence[MatrixRow]) -> list[list[MatrixRow]]:
    """Every host for itself; many hosts, with those that do alike together, those that are not well first."""
    if len(matrix) <= _ROWS_IN_FULL:
        return [[row] for row in matrix]
    groups: dict[tuple[tuple[str, str, bool], ...], list[MatrixRow]] = {}
    for row in matrix:
        alike = tuple((cell.nic, cell.state, cell.ok >= cell.total) for cell in row.cells)
        groups.setdefault(alike, []).append(row)
    return sorted(groups.values(), key=lambda group: is_well(group[0]))


def _cells(group: Sequence[MatrixRow]) -> dict[str, str]:
    found: dict[str, list[Cell]] = {}
    for row in group:
        for cell in row.cells:
            found.setdefault(redacted_line(cell.nic, _LONGEST_NAME), []).append(cell)
    return {nic: _cell(cells) for nic, cells in found.items()}


def _cell(cells: Sequence[Cell]) -> str:
    """``ok 3/3, 21 µs, 11.8 GB/s``: of several hosts, the least and the most."""
    state = redacted_line(_STATES.get(cells[0].state, cells[0].state), _LONGEST_NAME)
    counts = {f"{cell.ok}/{cell.total}" for cell in cells}
    parts = [f"{state} {counts.pop()}" if len(counts) == 1 and cells[0].total else state]
    latencies = sorted(cell.latency_s for cell in cells if cell.latency_s > 0)
    rates = sorted(cell.bytes_s for cell in cells if cell.bytes_s > 0)
    if latencies:
        parts.append(_span(_latency(latencies[0]), _latency(latencies[-1])))
    if rates:
        parts.append(_span(_rate(rates[0]), _rate(rates[-1])))
    return ", ".join(parts)


def _span(least: str, most: str) -> str:
    if least == most:
        return least
    number, _, unit = least.partition(" ")
    return f"{number}-{most}" if most.endswith(f" {unit}") else f"{least}-{most}"


def _latency(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _rate(bytes_s: float) -> str:
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_s >= factor:
            return f"{bytes_s / factor:.3g} {unit}"
    return f"{bytes_s:.3g} B/s"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"  # noqa: PLR2004 - fewer need their decimals
