"""How much the ranks of one host wait for others, by their Flight Recorders. Pure.

Ranks that use GPUs wait with busy main threads, so that nothing shows from outside. Their recorders have the times of
the last calls, in one of two qualities:

* With ``TORCH_NCCL_ENABLE_TIMING=1`` each call has a duration, measured on the GPU. A rank that is early at a
  collective spends the time in it; one that is late does not. Durations need no common clock.
* Otherwise there is the moment of each call, and that at which torch's watchdog saw that it was over, a tenth of a
  second late. On one host it is known then for whom the ranks of a group wait: the one that called last. Of a group
  with ranks on other hosts, whose clocks may differ by seconds, the time from a call to its end is taken. What a GPU
  still has to do when a call is made counts as well; where that is much even on the rank that called last, nothing is
  known.

The counts have the shape of those of ``watchdog.stragglers``: one sample is a millisecond.

Source: ``FlightRecorderDetail.hpp`` (``time_created_ns``, ``time_discovered_completed_ns``, ``duration_ms``), torch 2.5
to 2.15; ``ProcessGroupNCCL.cpp`` (its watchdog looks every 100 ms).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

from saferun.captures.recorder_content import BATCH, call_times, group_members, number_of
from saferun.model import Value

_NS_PER_MS = 1_000_000
_LONGEST_NS = 1000 * 1_000_000_000
_FAR_NS = 1 << 63
_LEAST_NS = 1_000_000_000
_LEAST_CALLS = 20
_BLOCKS = 20
# So many of the calls have a duration where they are measured.
_MEASURED_SHARE = 0.9
# torch's watchdog looks every tenth of a second which calls are over: half of that late, and this much at most.
_MEAN_DELAY_NS = 60_000_000
_LONGEST_DELAY_NS = 150_000_000
_MOST_GROUPS = 4


class Timed(Value):
    """One call that is over: its times are nanoseconds of the host's clock.

    ``group``: what tells its group from others; ``seq``: its number there; ``ended_ns`` 0: unknown; ``duration_ns`` -1:
    was not measured; ``is_p2p``: a send or receive, or a batch of them.
    """

    group: str
    seq: int
    created_ns: int
    ended_ns: int
    duration_ns: int
    is_p2p: bool


class FlightRecorderCalls(Value):
    """What the recorder of one rank has: the calls that are over, and the ranks of each group, where torch has them."""

    calls: tuple[Timed, ...]
    members: Mapping[str, frozenset[int]]
    linked: frozenset[str]  # groups in which it has sent or received


_Spans = list[tuple[int, int]]


def calls_of(content: object) -> FlightRecorderCalls:
    """What a recorder's dump holds, as decoded JSON."""
    if not isinstance(content, dict):
        return FlightRecorderCalls((), {}, frozenset())
    known = group_members(content)
    members: dict[str, frozenset[int]] = {}
    linked: set[str] = set()
    calls: list[Timed] = []
    groups: dict[tuple[str, str], str] = {}
    entries = content.get("entries")
    for raw in entries if isinstance(entries, list) else ():
        found = call_times(raw)
        if found is None:
            continue
        name, description, op, is_p2p = found
        group = groups.get((name, description))
        if group is None:
            ranks = frozenset(known.get((name, description)) or known.get((name, "")) or ())
            # The same name may be another group's on another rank; its members tell them apart.
            group = f"{description}:{sorted(ranks)}" if ranks else f"{description}:{name}"
            groups[name, description] = group
            members[group] = ranks
        if is_p2p:
            linked.add(group)
        created, ended = number_of(raw.get("time_created_ns")), number_of(raw.get("time_discovered_completed_ns"))
        if created <= 0 or not (raw.get("retired") is True or raw.get("state") == "completed"):
            continue
        duration = raw.get("duration_ms")
        measured = isinstance(duration, int | float) and 0 <= duration < _FAR_NS // _NS_PER_MS
        calls.append(
            Timed(
                group,
                number_of(raw.get("collective_seq_id")),
                created,
                ended if ended >= created else 0,
                int(duration * _NS_PER_MS) if measured else -1,
                is_p2p or op == BATCH,
            )
        )
    return FlightRecorderCalls(tuple(calls), members, frozenset(linked))


def rows_of(recorded: Mapping[int, FlightRecorderCalls]) -> list[list[int]]:
    """A row for each rank, as ``watchdog.recorded_stragglers`` reads them; none where they cannot be compared.

    Rank, samples, waits, their squares, blocks, their squares; 1 where durations were measured; and the numbers of the
    groups whose ranks can be compared with this one, if it sends to other ranks.

    Args:
        recorded: what the recorders of a host's ranks have, by rank.
    """
    if not recorded or any(len(one.calls) < _LEAST_CALLS for one in recorded.values()):
        return []
    # What all of them have in common.
    end = min(max(call.created_ns for call in one.calls) for one in recorded.values())
    begin = max(min(call.created_ns for call in one.calls) for one in recorded.values())
    begin = max(begin, end - _LONGEST_NS)
    if end - begin < _LEAST_NS:
        return []
    within = {rank: [call for call in one.calls if begin <= call.created_ns < end] for rank, one in recorded.items()}
    every = [call for calls in within.values() for call in calls]
    is_measured = sum(call.duration_ns >= 0 for call in every) >= _MEASURED_SHARE * len(every)
    whole = _whole_collectives(within, recorded)
    last = _last_calls(whole)
    rows = []
    for rank, calls in within.items():
        groups = _comparable(rank, recorded[rank])
        if groups is None:
            return []
        spans = _measured_waits(calls, whole) if is_measured else _waits_by_calls(calls, whole, last)
        rows.append([rank, *_counts(_merged(spans, begin, end), begin, end), int(is_measured), *groups])
    return rows


def _whole_collectives(
    within: Mapping[int, Sequence[Timed]], recorded: Mapping[int, FlightRecorderCalls]
) -> dict[tuple[str, int], dict[int, Timed]]:
    """The calls of each collective whose ranks are all here, by rank."""
    found: dict[tuple[str, int], dict[int, Timed]] = {}
    for rank, calls in within.items():
        for call in calls:
            if not call.is_p2p and recorded[rank].members[call.group] <= recorded.keys():
                found.setdefault((call.group, call.seq), {})[rank] = call
    sizes = {group: len(ranks) for one in recorded.values() for group, ranks in one.members.items()}
    return {key: calls for key, calls in found.items() if len(calls) == sizes[key[0]]}


def _measured_waits(calls: Sequence[Timed], whole: Mapping[tuple[str, int], Mapping[int, Timed]]) -> _Spans:
    """When a rank's calls waited on its GPU: for as long as they took longer than that of the rank that came last.

    Of calls in groups with ranks elsewhere the whole time counts. Calls of a group run one after another, which tells
    when each was over where the watchdog saw some of them at once.
    """
    spans = []
    next_begins: dict[str, int] = {}
    for call in reversed(calls):
        if call.duration_ns < 0:
            continue
        ended = min(call.ended_ns or call.created_ns + call.duration_ns, next_begins.get(call.group, _FAR_NS))
        began = next_begins[call.group] = ended - call.duration_ns
        together = whole.get((call.group, call.seq), {}) if not call.is_p2p else {}
        shortest = min((other.duration_ns for other in together.values()), default=0)
        spans.append((began, ended - max(shortest, 0)))
    return spans


def _last_calls(whole: Mapping[tuple[str, int], Mapping[int, Timed]]) -> dict[tuple[str, int], int]:
    """When the last rank made its call of each collective, where the others are likely to have waited for that.

    Where even that call took long its GPU was behind, and so may be those of the others, which then need not wait.
    Of single calls that is not known, since their ends are seen late; of all in which a rank was last it is.
    """
    of_rank: dict[int, list[tuple[tuple[str, int], int, int, int]]] = {}
    for key, calls in whole.items():
        rank, last = max(calls.items(), key=lambda item: item[1].created_ns)
        late_ns = last.created_ns - min(call.created_ns for call in calls.values())
        of_rank.setdefault(rank, []).append((key, last.created_ns, max(0, last.ended_ns - last.created_ns), late_ns))
    found: dict[tuple[str, int], int] = {}
    for rows in of_rank.values():
        held_ns, late_ns = sum(held for _, _, held, _ in rows), sum(late for *_, late in rows)
        if held_ns <= _MEAN_DELAY_NS * len(rows) + late_ns / 4:
            found |= {key: at for key, at, held, _ in rows if held <= _LONGEST_DELAY_NS}
    return found


def _waits_by_calls(
    calls: Sequence[Timed], whole: Mapping[tuple[str, int], object], last: Mapping[tuple[str, int], int]
) -> _Spans:
    """From each call to that of the rank that came last; where that is not here, to the end."""
    spans = []
    for call in calls:
        key = (call.group, call.seq)
        is_whole = not call.is_p2p and key in whole
        spans.append((call.created_ns, last.get(key, 0) if is_whole else call.ended_ns))
    return spans


def _merged(spans: _Spans, begin: int, end: int) -> _Spans:
    """Within these limits; what overlaps is one wait."""
    merged: _Spans = []
    for began, ended in sorted((max(began, begin), min(ended, end)) for began, ended in spans):
        if ended <= began:
            continue
        if merged and began <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], ended))
        else:
            merged.append((began, ended))
    return merged


def _counts(spans: _Spans, begin: int, end: int) -> tuple[int, int, int, int, int]:
    """Samples, waits, squares, blocks and their squares."""
    samples = (end - begin) // _NS_PER_MS
    lengths = [(ended - began) / _NS_PER_MS for began, ended in spans]
    size = (end - begin) / _BLOCKS
    blocks = [0.0] * _BLOCKS
    for began, ended in spans:
        for block in range(int((began - begin) / size), min(int((ended - begin) / size), _BLOCKS - 1) + 1):
            low, high = begin + block * size, begin + (block + 1) * size
            blocks[block] += max(0.0, min(ended, high) - max(began, low)) / _NS_PER_MS
    return (
        samples,
        min(round(sum(lengths)), samples),
        min(round(sum(length * length for length in lengths)), samples * samples),
        _BLOCKS,
        min(round(sum(block * block for block in blocks)), samples * samples),
    )


def _comparable(rank: int, recorded: FlightRecorderCalls) -> list[int] | None:
    """The groups whose ranks have the same part in the job as this one. Empty: all have; None: not known.

    Stages of a pipeline do different work and wait in turn, so that one of them is early at every collective. Those of
    one stage are in groups without a rank that this one exchanges data with.
    """
    if not recorded.linked:
        return []
    if any(not recorded.members[group] for group in recorded.linked):
        return None
    others = frozenset().union(*(recorded.members[group] for group in recorded.linked)) - {rank}
    clean = [ranks for ranks in recorded.members.values() if len(ranks) > 1 and not ranks & others]
    numbers = sorted({zlib.crc32(str(sorted(ranks)).encode()) for ranks in clean})
    return numbers[:_MOST_GROUPS] or None
