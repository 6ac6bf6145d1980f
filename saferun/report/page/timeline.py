"""The timeline of all ranks, from the events of the hosts: who did what when, on one clock. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from saferun.model import Value, signal_name
from saferun.report.page.contents import IncidentPart, PreflightSection, ReportPart, VerdictPart
from saferun.report.page.hang_text import whose_text
from saferun.report.page.host_clocks import clock_corrections, hosts_listed
from saferun.report.page.page_model import LABEL_CHARACTERS, Mark, Segment, Timeline, TimelineRow
from saferun.report.page.run_contents import EventLine, HostEvents, QuietPart
from saferun.report.page.step_marks import (
    ReportedStep,
    add_step,
    all_step_marks,
    last_steps_of,
    last_steps_text,
    step_marks,
    steps_in,
)
from saferun.report.text_diagram import rank_ranges
from saferun.report.verdict_text import OF_SINGLE_RANKS, single_ranks_text
from saferun.text.bounded_json import shown
from saferun.text.wording import count_text, duration_text

_MOST_ROWS = 64
_MOST_MARKS = 60
_MOST_ATTEMPTS = 12
# How near moments have to be for ranks to be in one row: these parts of the whole.
_FINENESS = (400, 100, 25, 5, 1)
_CLOSING_PART = 0.25
_MARGIN = 0.15
_LEAST_WINDOW_S = 1.0
_MOST_HOSTS = 3
_SAME_MARK_S = 5.0
_REQUESTS = {
    "StopRequested": "a user asked for the end of the job",
    "RestartRequested": "a user asked for a restart of the ranks",
    "CheckpointRequested": "a user asked for a checkpoint and the end of the job",
}


class _Track:
    """What happened to one rank in one attempt."""

    def __init__(self, attempt: int, rank: int, host: str) -> None:
        self.attempt, self.rank, self.host = attempt, rank, host
        self.segments: list[Segment] = []
        self.marks: list[Mark] = []
        self.steps: list[ReportedStep] = []
        self._kind, self._since = "", 0.0
        self.has_ended = False
        self.group_at = float("inf")  # when it had a process group

    def begin(self, kind: str, at: float) -> None:
        """A phase begins, which ends the previous one."""
        self.close(at)
        if not self.has_ended:
            self._kind, self._since = kind, at

    def begin_earlier(self, kind: str, at: float, now: float) -> None:
        """A phase began some time ago, which was seen only now."""
        self.begin(kind, min(max(at, self._since), now))

    def close(self, at: float) -> None:
        """The phase is over."""
        if self._kind and at > self._since:
            self.segments.append(Segment(self._kind, self._since, at))
        self._kind = ""

    def finish(self, at: float) -> None:
        """There are no more events: what ran until it had a process group was still starting."""
        self.close(at)
        segments: list[Segment] = []
        for segment in self.segments:
            if segment.kind == "run" and segment.start < self.group_at < segment.end:
                segments.append(segment._replace(end=self.group_at))
                segments.append(Segment("work", self.group_at, segment.end))
            elif segment.kind == "run" and self.group_at <= segment.start:
                segments.append(segment._replace(kind="work"))
            else:
                segments.append(segment)
        self.segments = segments

    @property
    def last_step(self) -> int:
        """The last step that it has reported; -1: none is known."""
        return self.steps[-1].number if self.steps else -1

    def kinds(self) -> tuple[object, ...]:
        """What happened, in its order."""
        return (
            bool(self.steps),
            *(segment.kind for segment in self.segments),
            *(f"{mark.kind} {mark.text}" for mark in self.marks),
        )

    def moments(self, begin: float) -> tuple[float, ...]:
        """When, as far as it is after ``begin``; as many moments for all tracks of the same kinds."""
        times = [moment for segment in self.segments for moment in segment[1:]]
        return tuple(max(moment, begin) for moment in (*times, *(mark.time for mark in self.marks)))

    def end(self, at: float, mark: Mark) -> None:
        """The rank has ended."""
        self.close(at)
        self.marks.append(mark)
        self.has_ended = True


class _Recorded(Value):
    """All that the events say."""

    tracks: dict[tuple[int, int], _Track]
    marks: list[Mark]
    incidents_at: list[float]  # when something first went wrong, by incident
    moments: list[float]


def build_timelines(
    hosts: Sequence[HostEvents],
    report: ReportPart | None,
    preflight: PreflightSection | None,
    *,
    folds: bool = True,
) -> tuple[Timeline | None, Timeline | None]:
    """The timeline of the whole run, and that of its end where it is too short to be seen in the first.

    Args:
        hosts: the events of each host.
        report: names the ranks that are the cause.
        preflight: may know how far the clocks of hosts are apart.
        folds: whether ranks to which the same happened have one row; else each has its own, however many there are.
    """
    ahead, note = clock_corrections(hosts, preflight)
    incidents = report.incidents if report is not None else ()
    recorded = _Recorded({}, [], [], [])
    for host in hosts:
        replay = _Replay(host.host, ahead.get(host.host, 0.0), incidents, recorded)
        for event in host.events:
            replay.take(event)
    if not recorded.tracks:
        return None, None
    without_files = _add_unheard(recorded, incidents)
    if without_files:
        note = f"{note} The files of {hosts_listed(without_files)} are not here: their ranks are drawn by what the"
        note = f"{note} report knows of them.".strip()
    _add_last_steps(recorded, incidents)
    last = max(recorded.moments)
    for track in recorded.tracks.values():
        track.finish(last)
    if not folds:
        return _each(recorded, incidents), None
    whole = _drawn(recorded, incidents, note)
    incident_at = max(recorded.incidents_at, default=None)
    if whole is None or incident_at is None:
        return whole, None
    window = max(whole.end - incident_at, _LEAST_WINDOW_S)
    start = max(incident_at - window * _MARGIN, whole.start)
    if whole.end - start > _CLOSING_PART * (whole.end - whole.start):
        return whole, None
    return whole, _drawn(recorded, incidents, "", start=start)


# ----------------------------------------------------------------------------------------------------- without events


def _add_unheard(recorded: _Recorded, incidents: Sequence[IncidentPart]) -> list[str]:
    """Add the ranks of hosts whose files are elsewhere, by what the leader has found out; returns these hosts."""
    added: dict[tuple[int, int], _Track] = {}
    for attempt in sorted({attempt for attempt, _ in recorded.tracks}):
        known = [track for (number, _), track in recorded.tracks.items() if number == attempt and track.segments]
        own = [incident for incident in incidents if incident.attempt == attempt]
        if not known:
            continue
        begun_at = min(track.segments[0].start for track in known)
        ran_at = min(track.segments[0].end for track in known)
        ended_at = max((mark.time for track in known for mark in track.marks), default=max(recorded.moments))
        for incident in own:
            for host in incident.hosts:
                for rank in host.ranks:
                    if (attempt, rank) in recorded.tracks:
                        continue
                    if (attempt, rank) not in added:
                        track = added[attempt, rank] = _Track(attempt, rank, host.name)
                        track.begin("start", begun_at)
                        track.begin("run", ran_at)
                    _take_incident(added[attempt, rank], incident, ended_at)
    recorded.tracks.update(added)
    return list(dict.fromkeys(track.host for track in added.values()))


def _take_incident(track: _Track, incident: IncidentPart, ended_at: float) -> None:
    if track.has_ended:
        return
    verdict = incident.verdict
    if incident.kind == "hang" and incident.time is not None and verdict is not None and _stands_still(verdict, track):
        since = incident.time - max(verdict.stalled_s or 0.0, 0.0)
        track.begin_earlier("stuck" if track.rank in incident.culprits else "wait", since, incident.time)
    failures = (*((incident.first_failure,) if incident.first_failure is not None else ()), *incident.also_failed)
    failure = next((one for one in failures if one.rank == track.rank), None)
    if failure is not None and failure.time is not None:
        how = f"killed by {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
        track.end(failure.time, Mark("exit-bad", failure.time, shown(how, 80)))
    elif incident.outcome in {"ended", "stopped", "restarted"}:
        track.end(ended_at, Mark("exit-stopped", ended_at, "ended with the attempt"))


def _stands_still(verdict: VerdictPart | QuietPart, track: _Track) -> bool:
    """Whether a verdict is about a rank: while single ones stand still, others may make progress."""
    return verdict.kind not in OF_SINGLE_RANKS or track.rank in verdict.ranks


def _add_last_steps(recorded: _Recorded, incidents: Sequence[IncidentPart]) -> None:
    """What the report has as the last steps of ranks: of those that events have, their metrics."""
    for incident in incidents:
        for last in last_steps_of(incident):
            for rank in last.ranks:
                track = recorded.tracks.get((incident.attempt, rank))
                if track is None:
                    continue
                ends = [mark.time for mark in track.marks]
                until = min([*ends, *([incident.time] if incident.time is not None else [])], default=None)
                if until is not None:
                    add_step(track.steps, ReportedStep(until - last.before_s, last.number, last.text))


# ------------------------------------------------------------------------------------------------------------ replaying


class _Replay:
    """Goes through the events of one host.

    Args:
        host: the host.
        ahead_s: how far its clock is ahead.
        incidents: name the ranks that are the cause.
        recorded: what other hosts' events have said so far, which is added to.
    """

    def __init__(self, host: str, ahead_s: float, incidents: Sequence[IncidentPart], recorded: _Recorded) -> None:
        self._host = host
        self._ahead_s = ahead_s
        self._recorded = recorded
        self._culprits = {incident.attempt: incident.culprits for incident in incidents}
        self._recovered = {incident.attempt for incident in incidents if incident.outcome == "recovered"}
        self._ranks: dict[int, int] = {}  # local rank -> rank
        self._joined_at = 0.0
        self._is_stopping = False
        self._hung: set[int] = set()
        self._handlers: dict[str, Callable[[EventLine, float], None]] = {
            "HostsJoined": self._joined,
            "RanksStarted": self._started,
            "RanksInitialized": self._initialized,
            "StepsReported": self._stepped,
            "HangSuspected": self._hangs,
            "EvidenceCaptured": self._captured,
            "RankExited": self._exited,
        }

    def take(self, event: EventLine) -> None:
        """Take the next event."""
        at = event.time - self._ahead_s
        self._recorded.moments.append(at)
        handler = self._handlers.get(event.event)
        if handler is not None:
            handler(event, at)
        else:
            _add_job_mark(self._recorded.marks, event, at)
        if event.state == "stopping":  # ranks that still run get a signal now
            for track in self._own(event.attempt):
                track.begin("stopping", at)
        if event.state in {"stopping", "capturing"} and event.event != "HangSuspected":
            self._is_stopping = True
        elif event.state == "running":
            self._is_stopping = False

    def _own(self, attempt: int) -> list[_Track]:
        found = (self._recorded.tracks.get((attempt, rank)) for rank in self._ranks.values())
        return [track for track in found if track is not None and not track.has_ended]

    def _joined(self, event: EventLine, at: float) -> None:
        if event.placement is not None:
            self._ranks = {assignment.local_rank: assignment.rank for assignment in event.placement.ranks}
            self._joined_at, self._is_stopping = at, False

    def _started(self, event: EventLine, at: float) -> None:
        for rank in self._ranks.values():
            track = self._recorded.tracks[event.attempt, rank] = _Track(event.attempt, rank, self._host)
            track.begin("start", self._joined_at or at)
            track.begin("run", at)

    def _initialized(self, event: EventLine, at: float) -> None:
        """Ranks had a process group from these moments on: what came before was their start."""
        for rank, time in zip(event.ranks, event.times, strict=False):
            track = self._recorded.tracks.get((event.attempt, rank))
            if track is not None:
                track.group_at = min(time - self._ahead_s, at)

    def _stepped(self, event: EventLine, at: float) -> None:
        """Ranks have reported these steps at these moments."""
        for rank, step in steps_in(event, at, self._ahead_s):
            track = self._recorded.tracks.get((event.attempt, rank))
            if track is not None:
                add_step(track.steps, step)

    def _hangs(self, event: EventLine, at: float) -> None:
        verdict = event.verdict
        if verdict is None:
            return
        since = at - verdict.quiet_s
        self._recorded.incidents_at.append(at)
        self._hung.add(event.attempt)
        for track in self._own(event.attempt):
            if _stands_still(verdict, track):
                is_culprit = track.rank in self._culprits.get(event.attempt, ())
                track.begin_earlier("stuck" if is_culprit else "wait", since, at)
        text = single_ranks_text(verdict.kind, whose_text(verdict.ranks), verdict.quiet_s)
        text = text or f"no progress for {duration_text(max(verdict.quiet_s, 0.0))}"
        hangs = "the job hangs" if verdict.certain else "the job may hang"
        _add_mark(self._recorded.marks, Mark("hang", at, f"{text}: {hangs}"))

    def _captured(self, event: EventLine, at: float) -> None:
        if event.attempt in self._hung & self._recovered and event.state == "running":
            for track in self._own(event.attempt):
                track.begin("run", at)

    def _exited(self, event: EventLine, at: float) -> None:
        rank = self._ranks.get(event.local_rank)
        track = self._recorded.tracks.get((event.attempt, rank)) if rank is not None else None
        if track is None or track.has_ended:
            return
        mark = _exit_mark(event, at, is_stopping=self._is_stopping)
        track.end(at, mark)
        if mark.kind == "exit-bad" and not self._is_stopping and event.attempt not in self._hung:
            self._recorded.incidents_at.append(at)
            for other in self._own(event.attempt):
                other.begin("ending", at)


def _exit_mark(event: EventLine, at: float, *, is_stopping: bool) -> Mark:
    status = event.status
    if status is None:
        return Mark("exit-bad", at, "ended")
    core = ", core dumped" if status.core_dumped else ""
    if status.signum is not None:
        name = signal_name(status.signum) if 0 < status.signum < 65 else f"signal {status.signum}"  # noqa: PLR2004
        if is_stopping and not status.core_dumped:
            return Mark("exit-stopped", at, f"ended by {name} while the ranks were being stopped")
        return Mark("exit-bad", at, f"killed by {name}{core}")
    if status.code == 0:
        return Mark("exit-ok", at, "exit code 0")
    late = " while the ranks were being stopped" if is_stopping else ""
    return Mark("exit-stopped" if is_stopping else "exit-bad", at, f"exit code {status.code}{late}")


def _add_job_mark(marks: list[Mark], event: EventLine, at: float) -> None:
    if event.event == "SignalReceived":
        name = signal_name(event.signum) if 0 < event.signum < 65 else "a signal"  # noqa: PLR2004 - the last signal
        _add_mark(marks, Mark("signal", at, f"saferun received {name}"))
    elif event.event in _REQUESTS:
        by = f" ({shown(event.by, 120)})" if event.by else ""
        _add_mark(marks, Mark("signal", at, f"{_REQUESTS[event.event]}{by}"))
    elif event.event == "JobAborted":
        host = f" ({shown(event.host, 60)})" if event.host else ""
        _add_mark(
            marks, Mark("abort", at, f"the attempt was aborted: {shown(event.message or event.reason, 120)}{host}")
        )
    elif event.event == "RanksSlow":
        _add_mark(marks, Mark("slow", at, f"the others wait for {rank_ranges(event.ranks)}"))
    elif event.event == "Decision" and event.next_step in {"retry", "restart", "replace"}:
        _add_mark(marks, Mark("again", at, shown(event.message, 160)))
    elif event.event in {"JobLost", "HostsUnreachable", "StoreUnavailable"}:
        _add_mark(marks, Mark("abort", at, shown(event.message, 160) or "other hosts cannot be reached"))


def _add_mark(marks: list[Mark], mark: Mark) -> None:
    """Hosts report the same within moments: it is one."""
    if len(marks) < _MOST_MARKS and not any(
        other.kind == mark.kind and abs(other.time - mark.time) < _SAME_MARK_S for other in marks[-8:]
    ):
        marks.append(mark)


# -------------------------------------------------------------------------------------------------------------- folding


def _drawn(
    recorded: _Recorded, incidents: Sequence[IncidentPart], note: str, *, start: float | None = None
) -> Timeline | None:
    end = max(recorded.moments)
    attempts = sorted({attempt for attempt, _ in recorded.tracks})
    shown_attempts = {*attempts[:1], *attempts[1 - _MOST_ATTEMPTS :]} if attempts else set()
    begin = min((s.start for track in recorded.tracks.values() for s in track.segments), default=end)
    begin = begin if start is None else start
    span = max(end - begin, 1e-3)
    culprits = {incident.attempt: incident.culprits for incident in incidents}
    tracks = [
        track
        for (attempt, _), track in sorted(recorded.tracks.items())
        if attempt in shown_attempts and (start is None or any(s.end >= begin for s in track.segments))
    ]
    if not tracks:
        return None
    groups = _alike(tracks, culprits, begin, span)
    rows = [_row(group, culprits, begin, end) for group in groups]
    rows.sort(key=lambda row: (row.attempt, not row.is_culprit, row.ranks[0] if row.ranks else 0))
    folded = sum(len(row.ranks) for row in rows[_MOST_ROWS:])
    if folded:
        note = f"{note} {count_text(folded, 'more rank')} not shown.".strip()
    marks = tuple(mark for mark in recorded.marks if mark.time >= begin)
    return Timeline(begin, end, tuple(rows[:_MOST_ROWS]), marks, note, folded)


def _each(recorded: _Recorded, incidents: Sequence[IncidentPart]) -> Timeline:
    """Every rank with a row of its own."""
    culprits = {incident.attempt: incident.culprits for incident in incidents}
    begin = min((s.start for track in recorded.tracks.values() for s in track.segments), default=min(recorded.moments))
    end = max(recorded.moments)
    rows = []
    for _, track in sorted(recorded.tracks.items()):
        row = _row([track], culprits, begin, end)
        marks = (*all_step_marks(track.steps), *(mark for mark in row.marks if mark.kind != "step"))
        rows.append(row._replace(marks=marks))
    return Timeline(begin, end, tuple(rows), tuple(recorded.marks))


def _alike(
    tracks: Sequence[_Track], culprits: Mapping[int, frozenset[int]], begin: float, span: float
) -> list[list[_Track]]:
    """Ranks to which the same happened at nearly the same time: the nearer, the fewer groups that makes."""
    groups: list[list[_Track]] = []
    last_steps = [track.last_step for track in tracks if track.steps]
    step_span = max(last_steps, default=0) - min(last_steps, default=0)
    for fineness in _FINENESS:
        groups = []
        by_kinds: dict[object, list[list[_Track]]] = {}
        for track in tracks:
            is_culprit = track.rank in culprits.get(track.attempt, ())
            same = by_kinds.setdefault((track.attempt, is_culprit, track.kinds()), [])
            moments = track.moments(begin)
            most_steps = max(step_span / fineness, 1)  # ranks in step with each other are seen one apart
            for group in same:
                if abs(group[0].last_step - track.last_step) <= most_steps and all(
                    abs(a - b) <= span / fineness for a, b in zip(group[0].moments(begin), moments, strict=True)
                ):
                    group.append(track)
                    break
            else:
                same.append([track])
                groups.append(same[-1])
                if len(groups) > _MOST_ROWS and fineness > 1:
                    break
        else:
            break
    return groups


def _row(group: Sequence[_Track], culprits: Mapping[int, frozenset[int]], begin: float, end: float) -> TimelineRow:
    first = group[0]
    ranks = tuple(track.rank for track in group)
    is_culprit = first.rank in culprits.get(first.attempt, ())
    segments = tuple(s._replace(start=max(s.start, begin)) for s in first.segments if s.end >= begin)
    marks = tuple(mark for mark in first.marks if mark.time >= begin)
    whose = f" of rank {first.rank}" if len(group) > 1 else ""
    return TimelineRow(
        first.attempt,
        rank_ranges(ranks, LABEL_CHARACTERS),
        hosts_text(track.host for track in group),
        ranks,
        is_culprit,
        segments,
        (*step_marks(first.steps, begin, end, whose), *marks),
        last_steps_text([track.last_step for track in group]),
    )


def hosts_text(hosts: Iterable[str]) -> str:
    """``node1``; ``node1, node2``; ``128 hosts``."""
    distinct = list(dict.fromkeys(host for host in hosts if host))
    if len(distinct) > _MOST_HOSTS:
        return f"{len(distinct)} hosts"
    return ", ".join(shown(host, 60) for host in distinct)
