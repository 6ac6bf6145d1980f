"""The content of a rank's Flight Recorder as values, from its JSON or its pickle. Pure.

Recorders differ. NCCL's own knows from events on the GPU whether a call is over (``completed``), and a call that torch
took off its list before that (``retired``) timed out or failed. The others know only that a call is off the list. Sends
and receives of a batch have no state: their ``coalesced`` entry has it, under the number of a collective long over.

Source: ``torch/csrc/distributed/c10d/FlightRecorder*.hpp``, ``ProcessGroupNCCL.cpp``, ``hooks/`` (2.4 to 2.15).
"""

from __future__ import annotations

import json
from typing import Any

from saferun.evidence.job_evidence import CollectiveCall, Frame, GroupProgress
from saferun.model import Value
from saferun.text.decoding import loads

BACKENDS = {"fr_trace_json": "gloo", "dump_nccl_trace_json": "nccl", "dump_nccl_trace_pickle": "nccl"}
"""torch's names of its recorders, and the backend of calls that do not name one; a process may have several."""
GROUPS_LIMIT = 256
_WITH_EVENTS = frozenset({"nccl", "rccl", "xccl", "hccl", "mccl"})
_NEWEST_CALLS = 40
_NEWEST_TO_A_PEER = 4
_OLDEST_WAITING_CALLS = 4
_CALLS_LIMIT = 200
# A group that was made again counts from 1. Two threads may record calls in another order than they are numbered.
_DISORDER = 32
_FRAMES_LIMIT = 16
_RANKS_LIMIT = 1 << 16
_DIMENSIONS_LIMIT = 64
_FEW_TENSORS = 4
_TEXT_LIMIT = 200
_NUMBER_LIMIT = 1 << 62
_TIMEOUT_LIMIT_MS = 1 << 40  # 35 years
_OP_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
"""The recorder's names that differ from the user's."""
BATCH = "coalesced"
"""Sends and receives that are one call."""
_TIMES = ("state", "time_discovered_started_ns")

_Group = tuple[str, str, str]
"""Backend, name and description."""


class _Entry(Value):
    """The part of an entry that is decoded for all entries; the rest is decoded for those that are kept."""

    group: _Group
    pg_id: int
    seq: int
    op: str
    is_p2p: bool
    is_over: bool
    failed: bool
    p2p_seq: int
    raw: dict[str, Any]

    @property
    def stream(self) -> str:
        """A key of calls that run one after another: all collectives, or the sends and receives with one peer."""
        return self.op if self.is_p2p else ""


def read_groups(content: object, recorder: str, *, only_active: bool = False) -> tuple[GroupProgress, ...]:
    """Decode a recorder's dump, by process group.

    A group is called ``<backend>:<name>``, for each backend of a group counts for itself. ``enqueued`` is the newest
    collective, ``completed`` the last one before the first that is not complete; calls between two ranks do not count.

    Args:
        content: what its JSON or its pickle holds.
        recorder: its name.
        only_active: whether it was asked for calls that are not over. Of a batch of sends and receives that is over
            the members are still there then, and their state is not.
    """
    if not isinstance(content, dict):
        return ()
    groups: dict[str, GroupProgress] = {}
    for group in _groups_of(content, BACKENDS.get(recorder, recorder), only_active=only_active):
        groups.setdefault(group.group, group)
    return tuple(groups.values())[:GROUPS_LIMIT]


def _groups_of(content: dict[str, Any], backend: str, *, only_active: bool) -> list[GroupProgress]:
    calls: dict[_Group, list[_Entry]] = {}
    newest_batch: dict[_Group, int] = {}
    numbers: dict[_Group, int] = {}
    names: dict[int, _Group] = {0: (backend, "0", "default_pg")}
    for raw in _list(content.get("entries")):
        entry = _entry(raw, backend)
        if entry is None:
            continue
        _add(entry, calls.setdefault(entry.group, []))
        if entry.is_p2p:
            newest_batch[entry.group] = max(entry.seq, newest_batch.get(entry.group, 0))
        names[entry.pg_id] = entry.group
        numbers[entry.group] = entry.pg_id
    if only_active:
        for group, newest in newest_batch.items():
            calls[group] = [entry for entry in calls[group] if not entry.is_p2p or entry.seq == newest]
    statuses = {
        names[int(key)]: status
        for key, status in _dict(content.get("pg_status")).items()
        if isinstance(status, dict) and key.isascii() and key.isdecimal() and len(key) < 10 and int(key) in names  # noqa: PLR2004
    }
    members = group_members(content)
    groups = [
        _progress(
            group,
            members.get((group[1], group[2])) or members.get((group[1], "")) or (),
            calls.get(group, []),
            statuses.get(group, {}),
            numbers.get(group, -1),
        )
        for group in dict.fromkeys([*calls, *statuses])
    ]
    return [group for group in groups if group.calls or group.enqueued >= 0]


def _add(entry: _Entry, kept: list[_Entry]) -> None:
    """Add an entry to its group, in recorded order."""
    if entry.op == BATCH:
        if kept and kept[-1].is_p2p and kept[-1].seq == entry.p2p_seq:
            # It has the state of the sends and receives before it.
            for index in range(len(kept) - 1, -1, -1):
                member = kept[index]
                if not member.is_p2p or member.seq != entry.p2p_seq:
                    break
                raw = member.raw | {name: entry.raw.get(name) for name in _TIMES}
                kept[index] = member._replace(is_over=entry.is_over, failed=entry.failed, raw=raw)
            return
        if not kept and number_of(entry.raw.get("record_id")) > 0:
            return  # the entries it summarises have been overwritten
    last = next((one for one in reversed(kept) if one.is_p2p == entry.is_p2p), None)
    if last is not None and entry.seq < last.seq and (entry.seq <= 1 or entry.seq < last.seq - _DISORDER):
        # A group of the same name, made after the previous one was destroyed, counts from 1 again.
        kept.clear()
    kept.append(entry)


def _progress(
    group: _Group, ranks: tuple[int, ...], calls: list[_Entry], status: dict[str, Any], number: int
) -> GroupProgress:
    backend, name, description = group
    collectives = [call for call in calls if not call.is_p2p]
    enqueued = max((call.seq for call in collectives), default=-1)
    # The members of a coalesced call share one number, and only one of them is marked as complete.
    done = {call.seq for call in collectives if call.is_over}
    started = -1
    # With sends and receives in it the status has their numbers as well; some backends number all calls alike.
    has_p2p = len(collectives) < len(calls)
    in_order = completed = -1
    if not has_p2p and enqueued in {-1, number_of(status.get("last_enqueued_collective"))}:
        enqueued = max(enqueued, number_of(status.get("last_enqueued_collective")))
        started = number_of(status.get("last_started_collective"))
        completed = number_of(status.get("last_completed_collective"))
        in_order = completed if backend in _WITH_EVENTS else -1
    done.update(call.seq for call in collectives if call.seq <= in_order and not call.failed)
    waiting = [call.seq for call in collectives if call.seq not in done]
    if collectives:
        completed = min(waiting) - 1 if waiting else max(call.seq for call in collectives)
    positions = _positions(calls)
    kept = tuple(
        _call(calls[index], is_over=calls[index].is_over or _is_done(calls[index], done), nth=positions.get(index, -1))
        for index in _worth_keeping(calls, done)
    )
    return GroupProgress(
        f"{backend}:{name}",
        description,
        ranks,
        enqueued,
        started,
        min(completed, enqueued),
        kept,
        number,
        max((_timeout_ms(call) for call in calls if not (call.is_over or _is_done(call, done))), default=-1),
    )


def _timeout_ms(entry: _Entry) -> int:
    timeout_ms = number_of(entry.raw.get("timeout_ms"))
    return timeout_ms if timeout_ms < _TIMEOUT_LIMIT_MS else -1


def _is_done(entry: _Entry, done: set[int]) -> bool:
    return not entry.is_p2p and entry.seq in done


def _positions(calls: list[_Entry]) -> dict[int, int]:
    """The position of each send and receive among those of its stream; empty where the first ones are gone."""
    first = next((call.seq for call in calls if call.is_p2p), 0)
    if first != 1:
        return {}
    counts: dict[str, int] = {}
    positions = {}
    for index, call in enumerate(calls):
        if call.is_p2p:
            positions[index] = counts[call.op] = counts.get(call.op, 0) + 1
    return positions


def _worth_keeping(calls: list[_Entry], done: set[int]) -> list[int]:
    """The newest calls, and the first waiting ones: a GPU may be hundreds of calls behind its rank."""
    kept = set(range(max(0, len(calls) - _NEWEST_CALLS), len(calls)))
    newest: dict[str, int] = {}
    waiting: dict[str, int] = {}
    for index in range(len(calls) - 1, -1, -1):
        stream = calls[index].stream
        if stream and newest.setdefault(stream, 0) < _NEWEST_TO_A_PEER:
            newest[stream] += 1
            kept.add(index)
    for index, call in enumerate(calls):
        is_open = not (call.is_over or _is_done(call, done))
        if is_open and waiting.setdefault(call.stream, 0) < _OLDEST_WAITING_CALLS:
            waiting[call.stream] += 1
            kept.add(index)
    if len(kept) > _CALLS_LIMIT:
        oldest = [index for index in sorted(kept) if not calls[index].is_over][: _CALLS_LIMIT // 2]
        kept = {*oldest, *sorted(kept)[-(_CALLS_LIMIT - len(oldest)) :]}
    return sorted(kept)


def group_members(content: dict[str, Any]) -> dict[tuple[str, str], tuple[int, ...]]:
    """Name and description of a process group -> ranks, if torch has them: ``{"name": "0", "ranks": "[0, 1]"}``.

    Each name stands there with an empty description as well.
    """
    members: dict[tuple[str, str], tuple[int, ...]] = {}
    for key, raw in _dict(content.get("pg_config")).items():
        config = _dict(raw)
        ranks = config.get("ranks")
        if isinstance(ranks, str) and len(ranks) <= _RANKS_LIMIT * 8:
            try:
                ranks = loads(ranks)
            except ValueError:
                continue
        numbers = [rank for rank in _list(ranks)[:_RANKS_LIMIT] if type(rank) is int and 0 <= rank < _NUMBER_LIMIT]
        name = _text(config.get("name") or key)
        members[name, _text(config.get("desc"))] = members[name, ""] = tuple(dict.fromkeys(numbers))
    return members


def _entry(raw: Any, backend: str) -> _Entry | None:  # noqa: ANN401 - JSON
    if not isinstance(raw, dict):
        return None
    own_backend, colon, op = _text(raw.get("profiling_name")).rpartition(":")
    if colon:
        backend = own_backend
    is_p2p = raw.get("is_p2p") is True and op != BATCH
    p2p_seq = number_of(raw.get("p2p_seq_id"))
    # torch 2.4 has one number for both.
    seq = p2p_seq if is_p2p else number_of(raw.get("collective_seq_id", raw.get("seq_id")))
    if not op or seq < 0:
        return None
    name_and_description = [*_list(raw.get("process_group")), "", ""]
    group = (backend, _text(name_and_description[0]), _text(name_and_description[1]))
    is_complete = raw.get("state") == "completed"
    failed = raw.get("retired") is True and not is_complete and backend in _WITH_EVENTS
    is_over = is_complete or (raw.get("retired") is True and not failed)
    return _Entry(group, number_of(raw.get("pg_id")), seq, _OP_NAMES.get(op, op), is_p2p, is_over, failed, p2p_seq, raw)


def call_times(raw: object) -> tuple[str, str, str, bool] | None:
    """Of an entry the name and description of its group, its operation, and whether it is a send or receive."""
    entry = _entry(raw, "")
    return None if entry is None else (entry.group[1], entry.group[2], entry.op, entry.is_p2p)


def _call(entry: _Entry, *, is_over: bool, nth: int) -> CollectiveCall:
    raw = entry.raw
    frames = tuple(_frame(frame) for frame in _list(raw.get("frames"))[:_FRAMES_LIMIT] if isinstance(frame, dict))
    return CollectiveCall(
        entry.seq,
        entry.op,
        _sizes(raw.get("input_sizes", [])),
        is_over,
        entry.is_p2p,
        number_of(raw.get("time_created_ns")),
        frames,
        _sizes(raw.get("output_sizes", [])),
        _dtypes(raw),
        raw.get("state") == "started" or number_of(raw.get("time_discovered_started_ns")) > 0,
        entry.failed and not is_over,
        number_of(raw.get("record_id")),
        nth,
        _elements(raw.get("input_sizes")),
        _elements(raw.get("output_sizes")),
    )


def _sizes(raw: Any) -> str:  # noqa: ANN401 - JSON
    try:
        return _text(json.dumps(raw))
    except (TypeError, ValueError, RecursionError):
        return ""


def _elements(raw: Any) -> int:  # noqa: ANN401 - JSON
    """How many elements tensors have together that are too many for a text of their sizes; else -1."""
    shapes = _list(raw)
    if not _FEW_TENSORS < len(shapes) <= _RANKS_LIMIT:
        return -1
    total = 0
    for shape in shapes:
        count = 1 if isinstance(shape, (list, tuple)) else -1
        for size in _list(shape)[:_DIMENSIONS_LIMIT]:
            count = min(count * size, _NUMBER_LIMIT) if type(size) is int and size >= 0 else -1
            if count < 0:
                break
        if count < 0:
            return -1
        total += count
    return total if total < _NUMBER_LIMIT else -1


def _dtypes(raw: dict[str, Any]) -> str:
    """``Float -> Float``; of several tensors each type once."""
    sides = [_types(raw.get(name)) for name in ("input_dtypes", "output_dtypes")]
    return " -> ".join(sides) if any(sides) else ""


def _types(raw: Any) -> str:  # noqa: ANN401 - JSON
    return _text(", ".join(dict.fromkeys(one for one in _list(raw) if isinstance(one, str))))


def _frame(raw: dict[str, Any]) -> Frame:
    return Frame(_text(raw.get("name")), _text(raw.get("filename"), 1024), max(0, number_of(raw.get("line"))))


def _list(raw: Any) -> list[Any]:  # noqa: ANN401 - JSON
    # A pickle has tuples where JSON has lists.
    return raw if isinstance(raw, list) else [*raw] if isinstance(raw, tuple) else []


def _dict(raw: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    if not isinstance(raw, dict):
        return {}
    return raw if all(type(key) is str for key in raw) else {str(key)[:_TEXT_LIMIT]: raw[key] for key in raw}


def number_of(raw: Any) -> int:  # noqa: ANN401 - JSON
    """A number, also one in a string; -1 for anything else."""
    if isinstance(raw, str) and raw.isascii() and raw.isdecimal() and len(raw) < 19:  # noqa: PLR2004 - fits 64 bits
        raw = int(raw)
    return raw if type(raw) is int and 0 <= raw < _NUMBER_LIMIT else -1


def _text(raw: Any, limit: int = _TEXT_LIMIT) -> str:  # noqa: ANN401 - JSON
    """A printable string; empty for anything else."""
    if not isinstance(raw, str):
        return ""
    text = raw[:limit]
    # Of thousands of entries with three texts each hardly one has another letter.
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)
