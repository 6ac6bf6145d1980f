"""The messages between hosts before the ranks are started, as JSON of bounded size, and back again. Pure.

No sender is trusted: what does not fit is None or left out, texts are single lines without control characters, and a
host can only speak for itself. Secrets do not travel, but for that of a probe endpoint, which is made for the hosts of
the job.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any

from saferun.preflight.results import SEVERITY, HostInfo, Pairs, Probe, ProbeEndpoint
from saferun.text.decoding import loads
from saferun.text.redaction import redacted_text
from saferun.text.secret_names import is_secret
from saferun.text.typed_json import fit

__all__ = [
    "decode_endpoint",
    "decode_host_info",
    "decode_probes",
    "encode_endpoint",
    "encode_host_info",
    "encode_probes",
    "left_out_of",
]

INFO_LIMIT_BYTES = 64 << 10
# A host whose record has a longer one could not join.
ENDPOINT_LIMIT_BYTES = 4 << 10
PROBES_LIMIT_BYTES = 4 << 20

_MOST_NICS = 64
_MOST_RESULTS = 64
_MOST_ROUTES = 64
_MOST_PROBES = 8192
_MOST_ITEMS = 256
_MOST_FACTS = 32
_LONGEST_TEXT = 600
_PORT_LIMIT = 1 << 16
_HOST_LIMIT = 1 << 20

_TOKEN = re.compile(r"[0-9a-f]{32}")
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]{2,45}(%[\w.-]{1,32})?")
_LEFT_OUT = re.compile(r'\{"left_out":([0-9]{1,9})\}\]\Z')
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
KINDS = (
    "ok",
    "refused",
    "timeout",
    "no_route",
    "unreachable",
    "stranger",
    "self",
    "black_hole",
    "broken",
    "silent",
)


# ----------------------------------------------------------------------------------------------------------- host info


def encode_host_info(info: HostInfo) -> str:
    """Host info as JSON of at most ``INFO_LIMIT_BYTES``: of one that is larger, what matters least is left out."""
    info = _bounded_info(info)
    text = json.dumps(info, separators=(",", ":"))
    for shorter in (
        lambda c: c._replace(results=tuple(result._replace(facts=()) for result in c.results)),
        lambda c: c._replace(environ=c.environ[:32], nics=c.nics[:16]),
        lambda c: c._replace(environ=(), results=c.results[:16], names=()),
        lambda c: HostInfo(
            *(c.label, c.time, c.nics[:4], c.gloo, c.nccl, c.probed, (), c.script),
            backend=c.backend,
            launch=c.launch,
            unanswered=c.unanswered,
        ),
    ):
        if len(text) <= INFO_LIMIT_BYTES:
            break
        info = shorter(info)
        text = json.dumps(info, separators=(",", ":"))
    return text


def decode_host_info(text: str | bytes) -> HostInfo | None:
    """Host info; None where it is none."""
    value = _decode(HostInfo, text, INFO_LIMIT_BYTES)
    return _bounded_info(value) if isinstance(value, HostInfo) else None


def _bounded_info(info: HostInfo) -> HostInfo:
    short: HostInfo = _bounded(info)
    return short._replace(
        nics=short.nics[:_MOST_NICS],
        versions=_pairs(short.versions),
        launch=_pairs(short.launch),
        environ=_pairs(short.environ),
        results=tuple(
            result._replace(facts=_pairs(result.facts[:_MOST_FACTS]))
            for result in short.results[:_MOST_RESULTS]
            if result.verdict in SEVERITY
        ),
    )


def _bounded(value: Any) -> Any:  # noqa: ANN401 - a value of the same shape
    """A value whose texts are single lines of bounded length, and whose lists are bounded, however deep they are."""
    if isinstance(value, str):
        return _CONTROL.sub(" ", value[:_LONGEST_TEXT])
    if not isinstance(value, tuple):
        return value
    items = map(_bounded, value[:_MOST_ITEMS])
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _pairs(pairs: Pairs) -> Pairs:
    """The pairs without those whose names say that they hold secrets, and without secrets in the values of others."""
    kept = [(pair[0], pair[1]) for pair in pairs if len(pair) == len(("name", "value"))]
    return tuple((name, _redacted(value)) for name, value in kept if not is_secret(name))


@functools.lru_cache(maxsize=4096)
def _redacted(value: str) -> str:
    """Thousands of hosts say the same."""
    return redacted_text(value)


# ----------------------------------------------------------------------------------------------------------- endpoints


def encode_endpoint(endpoint: ProbeEndpoint) -> str:
    """A probe endpoint as JSON with as many routes as fit; it holds the secret that lets others in."""
    text = ""
    for most in (_MOST_ROUTES, _MOST_ROUTES // 2, _MOST_ROUTES // 4, 0):
        text = json.dumps(endpoint._replace(routes=endpoint.routes[:most]), separators=(",", ":"))
        if len(text) <= ENDPOINT_LIMIT_BYTES:
            break
    return text


def decode_endpoint(text: str | bytes) -> ProbeEndpoint | None:
    """A probe endpoint; None where it is none, or no port and secret of a listener."""
    endpoint = _decode(ProbeEndpoint, text, ENDPOINT_LIMIT_BYTES)
    if (
        not isinstance(endpoint, ProbeEndpoint)
        or not 0 <= endpoint.port < _PORT_LIMIT
        or _TOKEN.fullmatch(endpoint.token) is None
    ):
        return None
    routes = [
        (_bounded(route[0]), route[1])
        for route in endpoint.routes[:_MOST_ROUTES]
        if len(route) == len(("nic", "address")) and _ADDRESS.fullmatch(route[1]) is not None
    ]
    return endpoint._replace(routes=tuple(routes) if endpoint.port else ())


# -------------------------------------------------------------------------------------------------------------- probes


def encode_probes(probes: Sequence[Probe], limit_bytes: int = PROBES_LIMIT_BYTES) -> str:
    """Probes of a host as JSON; where not all find room, those that failed and a sample, and how many are left out.

    What was tried of a target is kept or left out as a whole: that one interface fails and another one works belongs
    together. Targets with a failure take turns with others, so that a host some of whose targets fail is not taken for
    one that reaches none. Of both kinds the targets are spread evenly, so that each target is tried by as many hosts.

    Args:
        probes: what came of them, target by target.
        limit_bytes: how long the text may be where it is a string in another message.
    """
    texts = [json.dumps(_bounded_probe(probe), separators=(",", ":")) for probe in probes]
    text = f"[{','.join(texts)}]"
    if len(probes) <= _MOST_PROBES and _size_within(text) <= limit_bytes:
        return text
    by_target: dict[int, list[int]] = {}
    for index, probe in enumerate(probes):
        by_target.setdefault(probe.target, []).append(index)
    targets = list(by_target.values())
    failing = [indexes for indexes in targets if any(probes[index].kind != "ok" for index in indexes)]
    sound = [indexes for indexes in targets if all(probes[index].kind == "ok" for index in indexes)]
    turns = zip_longest(_spread(failing), _spread(sound), fillvalue=())
    room_bytes = limit_bytes - _size_within(_with_rest([], len(probes)))
    kept = _fitting(chain.from_iterable(turns), texts, room_bytes)
    if not kept:
        kept = _fitting(([index] for index in chain.from_iterable((*failing, *sound))), texts, room_bytes)
    return _with_rest([texts[index] for index in sorted(kept)], len(probes) - len(kept))


def left_out_of(text: str) -> int:
    """How many probes a host has left out for want of room of those that ``encode_probes`` was given."""
    match = _LEFT_OUT.search(text[-32:])
    return int(match[1]) if match is not None else 0


def _with_rest(texts: Sequence[str], left_out: int) -> str:
    # A saferun of another state that leads takes it for a probe that cannot be read, and ignores it.
    return f"[{','.join((*texts, json.dumps({'left_out': left_out}, separators=(',', ':'))))}]"


def _size_within(text: str) -> int:
    """How long a text is where it is a string in JSON."""
    return len(json.dumps(text))


def _spread(targets: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The same in an order of which the first few, however many, are spread over all of them."""
    width = max(len(targets) - 1, 0).bit_length()
    return [targets[at] for at in sorted(range(len(targets)), key=lambda at: f"{at:0{width or 1}b}"[::-1])]


def _fitting(groups: Iterable[Sequence[int]], texts: Sequence[str], room_bytes: int) -> list[int]:
    """The groups of texts, by their indexes, that find room: each that does when it comes to it."""
    kept: list[int] = []
    for indexes in groups:
        size = sum(_size_within(texts[index]) - 1 for index in indexes)  # without its quotes, and with a comma
        if size <= room_bytes and len(kept) + len(indexes) <= _MOST_PROBES - 1:
            kept += indexes
            room_bytes -= size
    return kept


def decode_probes(text: str | bytes, source: int) -> tuple[Probe, ...]:
    """The probes of one host.

    Args:
        text: what it says.
        source: its number; what it says of others' probes is left out.
    """
    raw = _load(text, PROBES_LIMIT_BYTES)
    found: list[Probe] = []
    for item in raw[:_MOST_PROBES] if isinstance(raw, list) else ():
        try:
            probe = fit(Probe, item)
        except (TypeError, ValueError):
            continue
        if _is_plausible(probe) and probe.source == source:
            found.append(_bounded_probe(probe))
    return tuple(found)


def _is_plausible(probe: Probe) -> bool:
    return (
        0 <= probe.target < _HOST_LIMIT
        and probe.target != probe.source
        and probe.kind in KINDS
        and min(probe.latency_s, probe.bytes_s, probe.retransmits, probe.segments) >= 0
    )


def _bounded_probe(probe: Probe) -> Probe:
    short: Probe = _bounded(probe)
    return short._replace(
        latency_s=round(probe.latency_s, 7), bytes_s=round(probe.bytes_s), clock_s=round(probe.clock_s, 4)
    )


# ---------------------------------------------------------------------------------------------------------------- JSON


def _load(text: str | bytes, limit_bytes: int) -> Any:  # noqa: ANN401 - JSON
    if len(text) > limit_bytes:
        return None
    try:
        return loads(text)
    except ValueError:
        return None


def _decode(shape: type, text: str | bytes, limit_bytes: int) -> Any:  # noqa: ANN401 - a value of the shape
    try:
        return fit(shape, _load(text, limit_bytes))
    except (TypeError, ValueError):
        return None
