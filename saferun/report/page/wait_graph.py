"""Who waits for whom: the collectives of each process group, and a small graph of the ranks with its root. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from saferun.model import Value
from saferun.report.page.contents import CallPart, IncidentPart, ProgressPart
from saferun.report.page.page_model import LABEL_CHARACTERS, GraphEdge, GraphNode, GroupTable, Table, WaitGraph
from saferun.report.text_diagram import cut_in_middle, rank_ranges
from saferun.text.bounded_json import shown
from saferun.text.wording import count_text, ranks_text

_MOST_NODES = 14
_MOST_EDGES = 40
_MOST_GROUPS = 48
_MOST_GROUP_ROWS = 24
_MOST_ROUNDS = 64
_NODE_WIDTH, _NODE_HEIGHT, _GAP_X, _GAP_Y, _EDGE = 250.0, 66.0, 34.0, 74.0, 12.0
_LABEL_CHARACTERS = 27
_DETAIL_CHARACTERS = 34
_KINDS = (
    ("tensor parallel", re.compile(r"(?:^|[^a-z])(?:tp|tensor)(?:[^a-z]|$|_)")),
    ("pipeline parallel", re.compile(r"(?:^|[^a-z])(?:pp|pipe|pipeline)(?:[^a-z]|$|_)")),
    ("expert parallel", re.compile(r"(?:^|[^a-z])(?:ep|expert|moe)(?:[^a-z]|$|_)")),
    ("context parallel", re.compile(r"(?:^|[^a-z])(?:cp|context|sequence)(?:[^a-z]|$|_)")),
    ("data parallel", re.compile(r"(?:^|[^a-z])(?:dp|ddp|fsdp|data|replicate|shard)(?:[^a-z]|$|_)")),
)


class _Group(Value):
    """A process group: how far each of its ranks is."""

    name: str
    kind: str
    progress: dict[int, ProgressPart]

    @property
    def newest(self) -> int:
        """The newest collective that any rank has called."""
        return max(one.enqueued for one in self.progress.values())

    def waiting(self) -> dict[int, tuple[int, ...]]:
        """The ranks that wait here, each with those that it waits for."""
        found: dict[int, tuple[int, ...]] = {}
        by_progress: dict[int, list[int]] = {}
        for rank, one in self.progress.items():
            by_progress.setdefault(one.enqueued, []).append(rank)
        behind: dict[int, tuple[int, ...]] = {}
        below: list[int] = []
        for enqueued in sorted(by_progress):
            behind[enqueued] = tuple(below)
            below = [*below, *by_progress[enqueued]]
        for rank, one in self.progress.items():
            last = one.last_call
            if last is None or last.retired or last.failed:
                continue
            if last.is_p2p and len(self.progress) == 2:  # noqa: PLR2004 - a pair
                found[rank] = tuple(other for other in self.progress if other != rank)
            elif behind[one.enqueued]:
                found[rank] = behind[one.enqueued]
        return found


def _groups(incident: IncidentPart) -> list[_Group]:
    names: dict[str, str] = {}
    progress: dict[str, dict[int, ProgressPart]] = {}
    for recorder in incident.collectives:
        for one in recorder.groups:
            progress.setdefault(one.group, {})[recorder.rank] = one
            names.setdefault(one.group, one.description)
    found = []
    for group, ranks in progress.items():
        description = names[group]
        name = group if description in {"", "undefined"} else description
        found.append(_Group(shown(name, 80), kind_of(description), ranks))
    return found


def kind_of(description: str) -> str:
    """What a process group is for, where its description says so: ``tensor parallel``."""
    text = description.lower()[:200]
    return next((kind for kind, pattern in _KINDS if pattern.search(text)), "")


# ---------------------------------------------------------------------------------------------------------- collectives


def build_group_tables(incident: IncidentPart, scale: float = 1.0) -> tuple[GroupTable, ...]:
    """The collectives of each process group; groups whose ranks differ come first."""
    groups = _groups(incident)
    # First those in which the cause is behind.
    groups.sort(
        key=lambda group: (
            not any(group.progress[rank].enqueued < group.newest for rank in incident.culprits & group.progress.keys())
        )
    )
    tables = [_group_table(group) for group in groups]
    tables.sort(key=lambda table: not table.is_odd)
    return tuple(tables[: max(int(_MOST_GROUPS * scale), 2)])


def _group_table(group: _Group) -> GroupTable:
    states: dict[tuple[object, ...], list[int]] = {}
    for rank, one in group.progress.items():
        last = one.last_call
        call = (last.seq, last.op, last.sizes, last.retired, last.failed) if last is not None else None
        states.setdefault((one.enqueued, one.started, one.completed, call), []).append(rank)
    most = max(states.values(), key=len)
    is_odd = len(states) > 1
    # The ranks that are behind first, the largest set last.
    order = sorted(states.items(), key=lambda item: (item[1] is most, item[0][0], min(item[1])))
    rows = []
    odd = set()
    for number, (_, ranks) in enumerate(order[:_MOST_GROUP_ROWS]):
        one = group.progress[ranks[0]]
        if is_odd and ranks is not most:
            odd.add(number)
        counts = (_number(one.enqueued), _number(one.started), _number(one.completed))
        rows.append((rank_ranges(ranks, LABEL_CHARACTERS), *counts, *_call_texts(one.last_call)))
    hidden = len(order) - len(rows)
    note = f"{count_text(hidden, 'more row')} not shown" if hidden > 0 else ""
    members = rank_ranges(group.progress, 60)
    kind = f", {group.kind}" if group.kind and group.kind != group.name.replace("_", " ") else ""
    caption = f"{group.name}{kind}: {members}"
    head = ("Ranks", "Enqueued", "Started", "Completed", "Last call", "State")
    return GroupTable(group.name, group.kind, is_odd, Table(caption, head, tuple(rows), frozenset(odd), note))


def _call_texts(last: CallPart | None) -> tuple[str, str]:
    if last is None:
        return "none", ""
    status = "failed" if last.failed else "done" if last.retired else "not done"
    return f"{last.seq}: {shown(last.op, 60)} {shown(last.sizes, 80)}", status


def _number(value: int) -> str:
    return str(value) if value >= 0 else "-"


# ---------------------------------------------------------------------------------------------------------------- graph


class _Node(Value):
    level: int
    group: int  # of the wait groups; -1: in none
    ranks: tuple[int, ...]


def build_wait_graph(incident: IncidentPart) -> WaitGraph | None:
    """Who waits for whom; None where nothing waits for anything that is known."""
    blocked: dict[int, list[tuple[_Group, tuple[int, ...]]]] = {}
    for group in _groups(incident):
        for rank, others in group.waiting().items():
            blocked.setdefault(rank, []).append((group, others))
    if not blocked:
        blocked = _blocked_by_culprits(incident)
    if not blocked:
        return None
    levels = _levels(blocked, incident.culprits)
    nodes, note = _nodes(levels, incident)
    index_of = {rank: index for index, node in enumerate(nodes) for rank in node.ranks}
    edges = _edges(blocked, levels, index_of)
    if not edges:
        return None
    return _laid_out(nodes, edges, incident, note)


def _blocked_by_culprits(incident: IncidentPart) -> dict[int, list[tuple[_Group, tuple[int, ...]]]]:
    """Without a Flight Recorder: who waits in a collective waits for the cause."""
    culprits = tuple(sorted(incident.culprits))
    found: dict[int, list[tuple[_Group, tuple[int, ...]]]] = {}
    for group in incident.wait_groups:
        if group.kind == "collective" and culprits:
            unknown = _Group(shown(group.detail, 60), "", {})
            found |= {rank: [(unknown, culprits)] for rank in group.ranks if rank not in incident.culprits}
    return found


def _levels(
    blocked: Mapping[int, Sequence[tuple[_Group, tuple[int, ...]]]], culprits: frozenset[int]
) -> dict[int, int]:
    """How many waits lie between each rank and one that waits for no other."""
    everyone = {rank for pairs in blocked.values() for _, others in pairs for rank in others} | set(blocked)
    levels = {rank: 0 for rank in everyone if rank in culprits or rank not in blocked}
    if not levels:
        levels[_most_awaited(blocked)] = 0
    for _ in range(_MOST_ROUNDS):
        before = len(levels), sum(levels.values())
        _spread(blocked, levels)
        if before == (len(levels), sum(levels.values())):
            break
    last = max(levels.values()) + 1
    return {rank: levels.get(rank, last) for rank in everyone}


def _spread(blocked: Mapping[int, Sequence[tuple[_Group, tuple[int, ...]]]], levels: dict[int, int]) -> None:
    """A rank is one level farther from the root than the nearest rank that it waits for."""
    nearest: dict[tuple[int, ...], int] = {}  # many ranks wait for the same ones
    for rank, pairs in blocked.items():
        for _, others in pairs if levels.get(rank) != 0 else ():
            if others not in nearest:
                nearest[others] = min((levels[other] for other in others if other in levels), default=-1)
            if nearest[others] >= 0:
                levels[rank] = min(levels.get(rank, nearest[others] + 1), nearest[others] + 1)


def _most_awaited(blocked: Mapping[int, Sequence[tuple[_Group, tuple[int, ...]]]]) -> int:
    """All wait in a circle: the rank that most of them wait for."""
    counts: dict[int, int] = {}
    for pairs in blocked.values():
        for _, others in pairs:
            for rank in others[:64]:
                counts[rank] = counts.get(rank, 0) + 1
    return max(sorted(counts), key=counts.__getitem__)


def _nodes(levels: Mapping[int, int], incident: IncidentPart) -> tuple[list[_Node], str]:
    group_of: dict[int, int] = {}
    for index, group in enumerate(incident.wait_groups):
        for rank in group.ranks:
            group_of.setdefault(rank, index)
    members: dict[tuple[int, int], list[int]] = {}
    for rank, level in sorted(levels.items()):
        members.setdefault((level, group_of.get(rank, -1)), []).append(rank)
    nodes = [_Node(level, group, tuple(ranks)) for (level, group), ranks in members.items()]
    nodes.sort(key=lambda node: (node.level, -len(node.ranks), node.ranks))
    kept, rest = nodes[:_MOST_NODES], nodes[_MOST_NODES:]
    left = sum(len(node.ranks) for node in rest)
    return kept, f"{count_text(left, 'more rank')}, farther from the cause, not shown." if left else ""


class _Edge(Value):
    source: int
    target: int
    groups: tuple[str, ...]
    waiting: frozenset[int]


def _edges(
    blocked: Mapping[int, Sequence[tuple[_Group, tuple[int, ...]]]],
    levels: Mapping[int, int],
    index_of: Mapping[int, int],
) -> list[_Edge]:
    found: dict[tuple[int, int], tuple[dict[str, None], set[int]]] = {}
    targets: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}
    for rank, pairs in blocked.items():
        source = index_of.get(rank)
        if source is None or levels[rank] == 0:
            continue
        for group, others in pairs:
            key = (id(group), others)
            if key not in targets:
                nearest = min(levels[other] for other in others)
                # The ones that matter: those that hold up the others that are behind.
                targets[key] = frozenset(
                    index_of[other] for other in others if levels[other] == nearest and other in index_of
                )
            for target in targets[key]:
                if target != source:
                    names, waiting = found.setdefault((source, target), ({}, set()))
                    names.setdefault(group.kind or group.name)
                    waiting.add(rank)
    edges = [_Edge(*pair, tuple(names), frozenset(waiting)) for pair, (names, waiting) in found.items()]
    edges.sort(key=lambda edge: (edge.target, edge.source))
    return edges[:_MOST_EDGES]


def _laid_out(nodes: Sequence[_Node], edges: Iterable[_Edge], incident: IncidentPart, note: str) -> WaitGraph:
    rows: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        rows.setdefault(node.level, []).append(index)
    widest = max(len(row) for row in rows.values())
    width = widest * _NODE_WIDTH + (widest - 1) * _GAP_X + 2 * _EDGE
    drawn: list[GraphNode] = []
    spots: dict[int, tuple[float, float]] = {}
    for line, level in enumerate(sorted(rows)):
        row = rows[level]
        row_width = len(row) * _NODE_WIDTH + (len(row) - 1) * _GAP_X
        for column, index in enumerate(row):
            x = (width - row_width) / 2 + column * (_NODE_WIDTH + _GAP_X)
            spots[index] = (x, _EDGE + line * (_NODE_HEIGHT + _GAP_Y))
    for index, node in enumerate(nodes):
        detail, location = "", ""
        if node.group >= 0:
            wait = incident.wait_groups[node.group]
            detail = f"{shown(wait.kind, 40)}: {shown(wait.detail, 120)}" if wait.detail else shown(wait.kind, 40)
            location = shown(wait.location, 200)
        label = rank_ranges(node.ranks, _LABEL_CHARACTERS)
        x, y = spots[index]
        texts = (cut_in_middle(label, _LABEL_CHARACTERS), cut_in_middle(detail, _DETAIL_CHARACTERS))
        location = cut_in_middle(location, _DETAIL_CHARACTERS)
        drawn.append(GraphNode(*texts, location, node.level == 0, x, y, _NODE_WIDTH, _NODE_HEIGHT))
    lines = []
    for edge in edges:
        (sx, sy), (tx, ty) = spots[edge.source], spots[edge.target]
        x1, y1 = sx + _NODE_WIDTH / 2, sy
        x2, y2 = tx + _NODE_WIDTH / 2, ty + _NODE_HEIGHT + 7
        if sy <= ty:  # they are in one row
            y1, y2 = sy + _NODE_HEIGHT / 2, ty + _NODE_HEIGHT / 2
            x1, x2 = (sx + _NODE_WIDTH, tx - 7) if sx < tx else (sx, tx + _NODE_WIDTH + 7)
            path = f"M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}"
        else:
            bend = (y1 - y2) / 2
            path = f"M{x1:.0f} {y1:.0f}C{x1:.0f} {y1 - bend:.0f} {x2:.0f} {y2 + bend:.0f} {x2:.0f} {y2:.0f}"
        label = ", ".join(edge.groups[:2]) + (f" +{len(edge.groups) - 2}" if len(edge.groups) > 2 else "")  # noqa: PLR2004
        text = (
            f"{ranks_text(edge.waiting)} wait{'s' if len(edge.waiting) == 1 else ''} for "
            f"{ranks_text(nodes[edge.target].ranks)} in {label}"
        )
        short = cut_in_middle(label, _LABEL_CHARACTERS)
        lines.append(GraphEdge(edge.source, edge.target, short, path, (x1 + x2) / 2, (y1 + y2) / 2 + 4, text))
    height = 2 * _EDGE + len(rows) * _NODE_HEIGHT + (len(rows) - 1) * _GAP_Y
    return WaitGraph(tuple(drawn), tuple(lines), width, height, note)
