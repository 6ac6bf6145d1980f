"""The model of the page: what it says, in the order in which it says it, and nothing about how it looks. Pure.

All texts are single lines without control characters and without secrets, unless a field says otherwise.
"""

from __future__ import annotations

from saferun.model import Value

LABEL_CHARACTERS = 30
"""How long the name of some ranks is: ``ranks 0-2,4-55,… (411)``."""


class Fact(Value):
    """A name and a value."""

    name: str
    value: str


class Table(Value):
    """A table. ``rows`` are as long as ``head``; ``odd``: the numbers of rows that stand out."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    odd: frozenset[int] = frozenset()
    note: str = ""


# ---------------------------------------------------------------------------------------------------------- the verdict


class Verdict(Value):
    """What is said first.

    Attributes:
        tone: ``bad``, ``warn``, ``good`` or ``plain``.
        kind: ``hang``, ``failure``, ``checks``, ``end`` …, as a heading.
        headline: the cause in one sentence.
        proof: what proves it; empty where nothing does.
        hints: what to do.
        lines: what else is known, one sentence each.
        facts: of the incident: attempt, time, start, class.
    """

    tone: str
    kind: str
    headline: str
    proof: str = ""
    hints: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()


# --------------------------------------------------------------------------------------------------------- the timeline


class Segment(Value):
    """A phase of ranks. ``start`` and ``end`` are seconds since the epoch by the corrected clock."""

    kind: str
    start: float
    end: float


class Mark(Value):
    """A moment.

    ``kind``: ``exit-ok``, ``exit-bad``, ``exit-stopped``, ``step``, ``hang``, ``signal``, ``abort``, ``slow``,
    ``again``.
    """

    kind: str
    time: float
    text: str


class TimelineRow(Value):
    """Ranks to which the same happened.

    Attributes:
        attempt: 0 for the first.
        label: ``ranks 0-7 (8)``.
        where: their hosts.
        ranks: they.
        is_culprit: whether they are the cause.
        segments: their phases, in order.
        marks: what happened to them.
        steps: the last steps that they have reported, ``steps 98-99``; empty where none is known.
    """

    attempt: int
    label: str
    where: str
    ranks: tuple[int, ...]
    is_culprit: bool
    segments: tuple[Segment, ...]
    marks: tuple[Mark, ...]
    steps: str = ""


class Timeline(Value):
    """All ranks over time. ``marks``: what happened to the whole job; ``note``: about the clocks."""

    start: float
    end: float
    rows: tuple[TimelineRow, ...]
    marks: tuple[Mark, ...]
    note: str = ""
    folded_ranks: int = 0


# ----------------------------------------------------------------------------------------------------------- the stacks


class Call(Value):
    """One call. ``location``: file and line as they are shown, ``file``: the whole path."""

    function: str
    location: str
    file: str
    line: int
    is_native: bool
    is_user: bool


class StackBranch(Value):
    """Calls of the same ranks, and the branches below; ``position``: its own in the list of all."""

    position: int
    parent: int
    depth: int
    label: str
    ranks: tuple[int, ...]
    calls: tuple[Call, ...]
    omitted: int
    is_culprit: bool
    children: tuple[int, ...]


class FlameBox(Value):
    """A box of the flame view: offsets and widths are in ranks."""

    level: int
    offset: float
    width: float
    name: str
    title: str
    tone: str


class Stacks(Value):
    """The merged stacks. ``roots``: indices of outermost branches."""

    branches: tuple[StackBranch, ...]
    roots: tuple[int, ...]
    flame: tuple[FlameBox, ...]
    flame_width: float
    flame_levels: int
    omitted: int = 0


# ---------------------------------------------------------------------------------------------------------------- waits


class GraphNode(Value):
    """Ranks that are at the same point. Positions and sizes are in units of the drawing."""

    label: str
    detail: str
    location: str
    is_root: bool
    x: float
    y: float
    width: float
    height: float


class GraphEdge(Value):
    """One group waits for another. ``path``: of the line, ``label``: in which process group."""

    source: int
    target: int
    label: str
    path: str
    label_x: float
    label_y: float
    text: str


class WaitGraph(Value):
    """Who waits for whom."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    width: float
    height: float
    note: str = ""


class GroupTable(Value):
    """The collectives of a process group. ``is_odd``: not all of its ranks are at the same one."""

    name: str
    kind: str
    is_odd: bool
    table: Table


# --------------------------------------------------------------------------------------------------------------- output


class OutputPiece(Value):
    """Lines of output. ``summary``: they are a traceback, which ends so; empty: ordinary lines."""

    summary: str
    lines: tuple[str, ...]


class RankOutputs(Value):
    """The last output of ranks that wrote the same."""

    label: str
    where: str
    ranks: tuple[int, ...]
    stream: str
    is_culprit: bool
    pieces: tuple[OutputPiece, ...]
    omitted: str
    lines: int


# ---------------------------------------------------------------------------------------------------------------- hosts


class MatrixCell(Value):
    """An interface of a host. ``tone``: ``good``, ``warn``, ``bad`` or ``none``."""

    text: str
    tone: str
    title: str


class Matrix(Value):
    """Hosts by interfaces. ``folded``: hosts of which all interfaces are fine."""

    nics: tuple[str, ...]
    rows: tuple[tuple[str, tuple[MatrixCell, ...]], ...]
    folded: str = ""


class FrameView(Value):
    """A frame of an exception. ``locals``: what they were; ``is_first``: they are what is read first."""

    function: str
    location: str
    is_user: bool
    locals: Table | None
    is_first: bool = False


class ExceptionView(Value):
    """An exception of a failure record. ``link``: how another one comes from it, empty for the first."""

    link: str
    title: str
    frames: tuple[FrameView, ...]


class FailureView(Value):
    """The failure record of a rank. ``omitted``: exceptions that are not shown."""

    label: str
    where: str
    ranks: tuple[int, ...]
    is_culprit: bool
    title: str
    facts: tuple[Fact, ...]
    exceptions: tuple[ExceptionView, ...]
    omitted: int = 0


class RankCallsView(Value):
    """The last calls of a thread of a rank, as lines, the newest last.

    Attributes:
        label: of the rank.
        ranks: its number.
        is_culprit: whether it is the cause.
        note: which thread it is, or why nothing is known; empty for the main thread.
        until: when the newest was; empty where there is none.
        lines: the calls.
    """

    label: str
    ranks: tuple[int, ...]
    is_culprit: bool
    note: str
    until: str
    lines: tuple[str, ...]


class IncidentRow(Value):
    """One incident, as a row of the story."""

    verdict: Verdict
    attempt: int
    clock: str
    outcome: str
    stacks: Stacks | None = None
    graph: WaitGraph | None = None
    groups: tuple[GroupTable, ...] = ()
    waits: Table | None = None
    ends: Table | None = None
    tracebacks: tuple[OutputPiece, ...] = ()
    gpus: Table | None = None
    machine: tuple[Table, ...] = ()
    kernel_log: tuple[str, ...] = ()
    host_status: tuple[str, ...] = ()
    cores: tuple[tuple[str, tuple[Call, ...]], ...] = ()
    captures: tuple[str, ...] = ()
    truncated: tuple[str, ...] = ()
    steps: Table | None = None
    calls: tuple[RankCallsView, ...] = ()


class PageModel(Value):
    """The whole page. Parts without content are None or empty, and are left out."""

    title: str
    run: tuple[Fact, ...]
    command: str
    verdict: Verdict
    main: IncidentRow | None
    earlier: tuple[IncidentRow, ...]
    timeline: Timeline | None
    closing: Timeline | None
    slow: tuple[tuple[str, ...], ...]
    outputs: tuple[RankOutputs, ...]
    outputs_omitted: str
    checks: Table | None
    checks_ok: Table | None
    matrix: Matrix | None
    versions: Table | None
    environment: Table | None
    settings: Table | None
    defaults: Table | None
    story: Table | None
    notes: tuple[str, ...]
    version: str
    world_size: int = 0
    failures: tuple[FailureView, ...] = ()
