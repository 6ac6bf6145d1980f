"""What the checks found and what was decided, for programs: ``preflight.json``, and the same within report.json. Pure.

The fields are described in ``docs/report.md`` and checked by ``schema/preflight.schema.json``. Every field is always
there. Secrets are redacted, and the size is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saferun import __version__
from saferun.linux.nic import Nic
from saferun.model import JsonObject
from saferun.preflight.results import SEVERITY, Cell, CheckResult, HostInfo, MatrixRow, Pairs, Preflight
from saferun.supervisor.policy.decision_row import DecisionRow
from saferun.text.bounded_json import Page, count, number
from saferun.text.redaction import REDACTED
from saferun.text.secret_names import is_secret

SCHEMA = "saferun.preflight/1"
LIMIT_BYTES = 8 << 20
"""How large preflight.json is at most, as it is written (indented by one)."""
# A quarter is for what cannot be cut.
_COUNTED_BYTES = LIMIT_BYTES * 3 // 4
_BAD = ("warn", "fail")
_WELL = ("ok", "untested")
_NEXT_STEPS = ("retry", "restart", "replace", "finish")


def preflight_json(preflight: Preflight, infos: Mapping[int, HostInfo]) -> JsonObject:
    """The content of preflight.json: every result, good ones included, the matrix, and what each host is like.

    Args:
        preflight: what was found.
        infos: of all hosts, by their numbers.

    Returns:
        At most ``LIMIT_BYTES`` as JSON. Longer lists are shortened (``truncated`` names them), the good results before
        the bad ones.
    """
    page = Page(_COUNTED_BYTES)
    content = _found(page, preflight)
    hosts = page.objects("hosts", sorted(infos.items()), lambda item: _host(page, *item))
    return {"schema": SCHEMA, "saferun_version": __version__, **content, "hosts": hosts, "truncated": sorted(page.cut)}


def preflight_part(preflight: Preflight, page: Page) -> JsonObject:
    """What of it report.json has: all but what the hosts are like."""
    return {**_found(page, preflight), "truncated": sorted(page.cut)}


def decision(row: DecisionRow, page: Page) -> JsonObject:
    """A decision as report.json has it."""
    next_step = row.next_step if row.next_step in _NEXT_STEPS else "finish"
    return page.value("decisions", row, {"class_name": "class", "clock": ""}) | {"next_step": next_step}


def verdict_of(result: CheckResult) -> str:
    """What a check found, in one of the words that the schema knows: results come from other hosts, too."""
    return result.verdict if result.verdict in SEVERITY else "skipped"


def worst_first(results: Sequence[CheckResult]) -> list[CheckResult]:
    """The same results, those of one verdict in the order in which they are given."""
    return sorted(results, key=lambda result: -SEVERITY[verdict_of(result)])


def _found(page: Page, preflight: Preflight) -> JsonObject:
    results = worst_first(preflight.results)
    return {
        "verdict": verdict_of(results[0]) if results and verdict_of(results[0]) in _BAD else "ok",
        "duration_s": number(preflight.duration_s),
        "nic": page.first("nic", preflight.nic, page.text),
        "results": page.objects("results", results, lambda result: _result(page, result)),
        # Where there is not room for all, those that are not well matter most.
        "matrix": page.objects("matrix", sorted(preflight.matrix, key=is_well), lambda row: _row(page, row)),
    }


def _result(page: Page, result: CheckResult) -> JsonObject:
    return page.value("results", result, {"name": "check", "class_name": "class", "facts": ""}) | {
        "verdict": verdict_of(result),
        "facts": _pairs(page, "facts", result.facts),
    }


def is_well(row: MatrixRow) -> bool:
    """Whether nothing is wrong with a host's interfaces, as far as they were tried."""
    return all(cell.state in _WELL for cell in row.cells)


def _row(page: Page, row: MatrixRow) -> JsonObject:
    return {
        "host": page.text(row.host),
        "interfaces": page.objects("matrix", row.cells, lambda cell: _cell(page, cell)),
    }


def _cell(page: Page, cell: Cell) -> JsonObject:
    return page.value("matrix", cell, {"bytes_s": "bytes_per_s"}) | {
        "latency_s": _known(cell.latency_s),
        "bytes_per_s": _known(cell.bytes_s),
    }


def _known(value: float) -> float | None:
    return number(value) if value > 0 else None


def _host(page: Page, host: int, info: HostInfo) -> JsonObject:
    return {
        "index": count(host),
        "name": page.text(info.label),
        "time": number(info.time),
        "interfaces": page.objects("interfaces", info.nics, lambda nic: _nic(page, nic)),
        "gloo": page.first("interfaces", info.gloo, page.text),
        "nccl": page.first("interfaces", info.nccl, page.text),
        "probed": page.first("interfaces", info.probed, page.text),
        "versions": _pairs(page, "versions", info.versions),
        "script": page.text(info.script),
        "environ": _pairs(page, "environ", info.environ),
        "names": page.objects(
            "names",
            [names for names in info.names if names],
            lambda names: {"name": page.text(names[0]), "addresses": page.first("names", names[1:], page.text)},
        ),
    }


def _nic(page: Page, nic: Nic) -> JsonObject:
    return {
        "name": page.text(nic.name),
        "networks": page.first("interfaces", nic.networks or nic.addresses, page.text),
        "up": bool(nic.is_up),
        "mtu": count(nic.mtu),
        "kind": page.text(nic.kind),
        "speed_bits_per_s": count(nic.speed_bits_s) if nic.speed_bits_s > 0 else None,
        "labels": page.first("interfaces", nic.labels, page.text),
        "rdma": page.first("interfaces", nic.rdma, page.text),
    }


def _pairs(page: Page, name: str, pairs: Pairs) -> list[Any]:
    return page.objects(
        name,
        pairs,
        lambda pair: {"name": page.text(pair[0]), "value": REDACTED if is_secret(pair[0]) else page.text(pair[1])},
    )
