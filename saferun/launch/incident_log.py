"""The incidents of a launch so far, the preflight checks before and the decisions after them, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.files.run_dir import RunDirectory, shorter_path
from saferun.model import JsonObject, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.diagnosis.host_fault import BadHost
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import Evidence
    from saferun.preflight.results import HostInfo, Preflight
    from saferun.report.event_json import LaunchEvent
    from saferun.report.report_json import Incident, Outcome, SlowRow
    from saferun.supervisor.policy.decision_row import DecisionRow
    from saferun.watchdog.stragglers import Straggler

# Of ranks that were slow: the newest; there is one every ten minutes at most.
_MOST_SLOW = 19
_CLOCK = "%Y-%m-%d %H:%M:%S"
_MOST_BAD_HOSTS = 1000
# Of a hang that lasts for days, so many of the first reports and of the last ones are kept.
_FIRST_HANGS, _LAST_HANGS = 8, 8


class Counted(Value):
    """What has happened so far. ``retries``: by the class of the cause; ``slow``: ranks of the current attempt."""

    hangs: int
    failures: int
    restarts: int
    retries: dict[str, int]
    slow: int
    is_hung: bool


class IncidentLog:
    """Incidents in the order of time. The report is written again after each, and at the end.

    It is written with a delay: the console comes first, and the disk may be what hangs.

    Args:
        config: the launch.
        run_dir: where the report goes.
        host: the host's short name.
        run_id: marks the processes of this run.
        guarded: calls a function, and reports its failure in one line.
        on_written: called when a report that is to be shown as a page has been handed to the writer.
        notify: takes events for the command of ``--on-event``; None: there is none.
    """

    def __init__(
        self,
        config: LaunchConfig,
        run_dir: RunDirectory,
        *,
        host: str,
        run_id: str,
        guarded: Callable[..., Any],
        on_written: Callable[[], object] = bool,
        notify: Callable[[LaunchEvent], object] | None = None,
    ) -> None:
        self.launched_time = time.time()
        self._config = config
        self._run_dir = run_dir
        self.host = host  # its name in the job, once it has one
        self._run_id = run_id
        self._guarded = guarded
        self._on_written = on_written
        self._notify = notify
        self._incidents: list[Incident] = []  # those that a report has
        self._omitted = 0  # how many it would leave out, whose evidence is not kept
        self._counts: dict[str, int] = {}  # by kind, those included that are not kept
        self._decisions: list[DecisionRow] = []
        self._slow: list[SlowRow] = []
        self._bad_hosts: dict[tuple[str, str], BadHost] = {}  # by host and kind of fault
        self._seen_bad: dict[tuple[str, str], float] = {}  # hosts and kinds of faults: when it was last seen
        self._preflight: Preflight | None = None
        self._host_infos: Mapping[int, HostInfo] = {}
        self._has_new_preflight = False
        self.is_due = False
        self.captures = 0  # of this host's ranks
        self.exit_code: int | None = None  # of the launch, once it is over
        self.reported: tuple[str, ...] = ()  # of the failure that was reported last, but for what followed

    @property
    def files(self) -> str | None:
        """The run directory as it is shown, if there is one."""
        return shorter_path(self._run_dir.path) if self._run_dir.path is not None else None

    @property
    def last_headline(self) -> str:
        """The headline of the newest incident; empty: there was none."""
        return self._incidents[-1].diagnosis.headline if self._incidents else ""

    def add(
        self,
        kind: str,
        evidence: Evidence,
        diagnosis: Diagnosis,
        *,
        attempt: int,
        outcome: str,
        console_lines: Sequence[str],
        directory: str,
    ) -> None:
        """One more incident. The arguments are the fields of report_json's Incident."""
        from saferun.report.report_json import Incident, first_and_last

        hangs = [at for at, one in enumerate(self._incidents) if one.kind == "hang" and one.attempt == attempt]
        if kind == "hang" and len(hangs) >= _FIRST_HANGS + _LAST_HANGS:
            del self._incidents[hangs[_FIRST_HANGS]]
        now = time.time()
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._incidents.append(
            Incident(
                kind,  # type: ignore[arg-type]
                attempt,
                now,
                evidence,
                diagnosis,
                outcome,  # type: ignore[arg-type]
                console_lines=tuple(console_lines),
                directory=directory,
                clock=time.strftime(_CLOCK, time.localtime(now)),
            )
        )
        kept = first_and_last(self._incidents)
        self._omitted += len(self._incidents) - len(kept)
        self._incidents = kept
        self.is_due = True
        cause, first = diagnosis.cause, diagnosis.first_failure
        ranks = cause.ranks if cause is not None else ()
        self._send_event(
            kind,
            attempt,
            diagnosis.headline,
            hint=diagnosis.advice,
            ranks=ranks or ((first.rank,) if first is not None else ()),
            exit_code=first.status.returncode if first is not None and kind == "failure" else None,
            outcome=outcome,
        )

    def _send_event(self, kind: str, attempt: int, headline: str, **fields: Any) -> None:  # noqa: ANN401 - LaunchEvent's
        """Tell the command of --on-event, if there is one."""
        if self._notify is None:
            return
        from saferun.report.event_json import LaunchEvent

        event = LaunchEvent(kind, attempt, time.time(), headline, has_report=self._has_report, **fields)
        self._guarded("run the command of --on-event", self._notify, event)

    def add_decision(self, row: DecisionRow) -> None:
        """Add a decision after an attempt, and why: one more row of the report."""
        clock = row.clock or time.strftime(_CLOCK, time.localtime(row.time))
        self._decisions.append(row._replace(clock=clock))
        self.is_due = self.is_due or self._has_report
        if row.next_step != "finish":
            self._send_event("restart", row.attempt, row.message, outcome=row.next_step)

    def add_slow(self, found: Straggler, host: str, lines: Sequence[str], attempt: int) -> JsonObject:
        """Ranks that the others wait for: an event, and one more row of the report. Returns what run.json has of it."""
        from saferun.report.report_json import SlowRow

        now = time.time()
        row = SlowRow(now, attempt, host, tuple(lines), time.strftime(_CLOCK, time.localtime(now)), *found)
        self._slow = [*self._slow[-_MOST_SLOW:], row]
        self.is_due = True
        event = {"event": "RanksSlow", "time": now, "monotonic_s": time.monotonic(), "attempt": attempt, "host": host}
        self._run_dir.write_event({**event, **found._asdict()})
        return {"time": now, "attempt": attempt, "host": host, **found._asdict()}

    def add_bad_host(self, row: BadHost) -> bool:
        """A bad host was found: an event, and one more row of the report. Returns whether that is new."""
        if len(self._bad_hosts) >= _MOST_BAD_HOSTS:
            return False
        if (row.host, row.kind) in self._bad_hosts:
            return False
        row = row._replace(clock=row.clock or time.strftime(_CLOCK, time.localtime(row.time)))
        self._bad_hosts[row.host, row.kind] = row
        self.is_due = self.is_due or self._has_report
        event = {"event": "BadHost", "monotonic_s": time.monotonic(), **row._asdict()}
        self._run_dir.write_event({name: item for name, item in event.items() if name != "clock"})
        return True

    def last_seen_bad(self, row: BadHost) -> float | None:
        """When the same fault of this host was last noted, in seconds since the epoch; notes it now."""
        before = self._seen_bad.get((row.host, row.kind))
        if before is not None or len(self._seen_bad) < _MOST_BAD_HOSTS:
            self._seen_bad[row.host, row.kind] = row.time
        return before

    @property
    def bad_hosts(self) -> Sequence[BadHost]:
        """The hosts that were found bad so far, each once for each kind of fault, in the order of time."""
        return tuple(self._bad_hosts.values())

    def set_preflight(self, preflight: Preflight, host_infos: Mapping[int, HostInfo]) -> None:
        """Keep the results of the preflight checks; those of an earlier start are dropped.

        If no check failed, nothing is written until the launch is over, or ``write_preflight`` is called.

        Args:
            preflight: of all hosts, or of this one where it is alone.
            host_infos: the host infos, by the numbers of the hosts.
        """
        self._preflight, self._host_infos = preflight, host_infos
        self._has_new_preflight = True
        self.is_due = self.is_due or self._has_failed_checks

    def write_preflight(self) -> None:
        """Write preflight.json if there is a run directory, and something new. To be called at a quiet moment."""
        if self._has_new_preflight and self._run_dir.path is not None:
            self._has_new_preflight = False
            self._guarded("write the results of the checks", self._write_preflight)

    def write(self) -> None:
        """Write the report, if something has happened since."""
        if self.is_due:
            self.is_due = False
            self._guarded("write the report", self._write)

    def note_recovery(self, lasted_s: float) -> None:
        """The hang that was reported last is over, after so many seconds."""
        if self._incidents and self._incidents[-1].kind == "hang":
            self._incidents[-1] = self._incidents[-1]._replace(outcome="recovered", recovered_after_s=lasted_s)
            self.is_due = True
            headline = f"the hang is over after {lasted_s:.0f} s"
            self._send_event("recovery", self._incidents[-1].attempt, headline, outcome="recovered")

    def finish(self, exit_code: int, outcome: Outcome) -> None:
        """The launch is over; if nothing went wrong there is no report."""
        self.is_due = False
        self.exit_code = exit_code
        if self._has_report or self._is_always_wanted:
            self._guarded("write the report", self._write, exit_code, outcome)
        elif self._preflight is not None and self._config.checks.preflight == "only":
            self._run_dir.open()  # which does nothing if no files are wanted
        self.write_preflight()
        attempts = [one.attempt for one in self._incidents] + [row.attempt for row in self._decisions]
        how = {"left": "this host has left the job", "stopped": "the launch has been stopped"}
        headline = f"{how.get(outcome, f'the launch has {outcome}')} (exit code {exit_code})"
        self._send_event("end", max(attempts, default=0), headline, exit_code=exit_code, outcome=outcome)

    def counted(self, attempt: int) -> Counted:
        """Numbers of what has happened. ``attempt``: the current one."""
        retries: dict[str, int] = {}
        for row in self._decisions:
            if row.next_step == "retry":
                name = row.class_name or "unknown"
                retries[name] = retries.get(name, 0) + 1
        last = self._incidents[-1] if self._incidents else None
        is_hung = last is not None and (last.kind, last.outcome, last.attempt) == ("hang", "continued", attempt)
        return Counted(
            hangs=self._counts.get("hang", 0),
            failures=self._counts.get("failure", 0),
            restarts=sum(row.next_step == "restart" and row.class_name != "request" for row in self._decisions),
            retries=retries,
            slow=len({rank for row in self._slow if row.attempt == attempt for rank in row.ranks}),
            is_hung=is_hung,
        )

    @property
    def has_incidents(self) -> bool:
        """Whether there was a hang or a failure."""
        return bool(self._incidents)

    @property
    def _is_always_wanted(self) -> bool:
        return self._config.output.report_html == "always"

    @property
    def _has_failed_checks(self) -> bool:
        return self._preflight is not None and any(result.verdict == "fail" for result in self._preflight.results)

    @property
    def _has_report(self) -> bool:
        # A launch that just ends may have been stopped by the user.
        has_tried_again = any(row.next_step != "finish" for row in self._decisions)
        has_found = bool(self._incidents) or bool(self._slow) or bool(self._bad_hosts)
        return has_found or has_tried_again or self._has_failed_checks

    def _write(self, exit_code: int | None = None, outcome: Outcome = "running") -> None:
        if not self._incidents:
            self._run_dir.open()  # perhaps no rank has been started
        if self._run_dir.path is None:
            return
        self.write_preflight()
        from saferun.report.report_json import Run, build_report
        from saferun.report.report_text import build_report_text

        run = Run(
            self._run_id,
            self.host,
            ("saferun", *self._config.argv),
            self.launched_time,
            ended_at=time.time() if exit_code is not None else None,
            exit_code=exit_code,
            outcome=outcome,
            files=self.files or "",
            clock=time.strftime(_CLOCK, time.localtime(self.launched_time)),
        )
        decisions, preflight = self._decisions, self._preflight
        known: dict[str, Any] = {
            "omitted": self._omitted,
            "decisions": decisions,
            "preflight": preflight,
            "slow": self._slow,
            "bad_hosts": self.bad_hosts,
        }
        report = build_report(run, self._incidents, **known)
        self._run_dir.write_json("report.json", report)
        text = build_report_text(run, self._incidents, infos=self._host_infos, **known)
        self._run_dir.write_text("report.txt", text)
        has_failed = bool(self._incidents) or self._has_failed_checks
        # If ranks were only slow, there is a page at the end, and only if one is always wanted.
        if has_failed or (exit_code is not None and (self._decisions or self._is_always_wanted)):
            self._guarded("have report.html made", self._on_written)

    def _write_preflight(self) -> None:
        if self._preflight is not None:
            from saferun.preflight.json_report import preflight_json

            self._run_dir.write_json("preflight.json", preflight_json(self._preflight, self._host_infos))
