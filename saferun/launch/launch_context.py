"""One launch, as its parts see it: settings, console, files, events, the current attempt, and the other parts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from saferun.config import LaunchConfig
from saferun.console.screen import Screen
from saferun.errors import SaferunError, printable
from saferun.files.run_dir import RunDirectory
from saferun.launch.guarded_poller import GuardedPoller
from saferun.linux.poller import Poller
from saferun.supervisor.events import Event, HostsJoined, StartFailed
from saferun.supervisor.machine import State, Supervisor

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.captures.examiner import Examiner
    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.job_values import Assignment
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.launch.attempt_end import AttemptEnd
    from saferun.launch.attempt_setup import AttemptSetup
    from saferun.launch.control_part import ControlPart
    from saferun.launch.core_part import CorePart
    from saferun.launch.event_log import EventLog
    from saferun.launch.event_loop import EventLoop
    from saferun.launch.idle_imports import IdleImports
    from saferun.launch.investigation import Investigation
    from saferun.launch.lint_part import LintPart
    from saferun.launch.metrics_part import MetricsPart
    from saferun.launch.on_event_part import OnEventPart
    from saferun.launch.page_part import PagePart
    from saferun.launch.preflight_part import PreflightPart
    from saferun.launch.rank import AttemptPlan, Rank
    from saferun.launch.rank_actions import RankActions
    from saferun.launch.rank_group import RankGroup
    from saferun.launch.rank_terminals import RankTerminals
    from saferun.launch.torchrun_events import TorchrunEvents
    from saferun.launch.wrapped_ranks import WrappedRanks
    from saferun.model import RankEnd
    from saferun.supervisor.actions import PrintLine


class HostAttempt:
    """One attempt on this host, from the meeting of the hosts to the report. The next one is a new object.

    Args:
        number: the job's number of the attempt.
        assignment: this host's ranks, and its part in the job; None: the hosts have not met.
    """

    def __init__(self, number: int = 0, assignment: Assignment | None = None) -> None:
        self.number = number
        self.assignment = assignment
        self.plan: AttemptPlan | None = None  # what the ranks are started with, once that is known
        self.group: RankGroup | None = None  # the ranks, from their start to the report
        self.started_at = 0.0  # monotonic seconds
        self.started_time = 0.0  # the same in seconds since the epoch
        self.has_joined = False  # the supervisor knows of this attempt, or hears of it next
        self.held: list[Event] = []  # what other hosts reported before: their ranks may run already

    @property
    def ranks(self) -> list[Rank]:
        """The ranks that have been started, until they have been reported on."""
        return self.group.ranks if self.group is not None else []

    @property
    def by_pid(self) -> dict[int, Rank]:
        """Those that have not been reaped."""
        return self.group.by_pid if self.group is not None else {}

    def living(self) -> list[Rank]:
        """Those that have not ended."""
        return [rank for rank in self.ranks if rank.end is None]

    def first_failure(self) -> Rank | None:
        """The first rank that failed."""
        failed = [rank for rank in self.ranks if rank.end is not None and not rank.end.status.ok]
        return min(failed, key=lambda rank: rank.end.at if rank.end is not None else 0.0, default=None)

    def own_failure(self, *diagnoses: Diagnosis | None) -> RankEnd | None:
        """The failure that counts on this host, as its torchrun would know it; None: no rank here failed by itself.

        It is the first one by the diagnosis of the job, or by the one of this host alone, or else by time. Where the
        job has no other ranks, that is for its diagnosis to say.

        Args:
            diagnoses: as far as there are any.
        """
        ends = {rank.end.rank: rank.end for rank in self.ranks if rank.end is not None}
        firsts = [found.first_failure.rank for found in diagnoses if found is not None and found.first_failure]
        for rank in firsts:
            if rank in ends:
                return ends[rank]
        placement = self.plan.placement if self.plan is not None else None
        is_whole_job = placement is None or len(placement.ranks) == placement.world_size
        failed = [end for end in ends.values() if not (end.stopped_by_us or end.status.ok or is_whole_job)]
        return min(failed, key=lambda end: end.at, default=None)


class LaunchContext:
    """What the parts of one launch share, and each other. The parts are made by ``host_launch.HostLaunch``.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        supervisor: decides.
        screen: the console.
        run_dir: the files.
        host: the host's short name.
        run_id: marks the processes of this run.

    Attributes:
        poller: the loop's.
        guarded_poller: the same for handlers that may fail, those of all that watches, captures and reports.
    """

    loop: EventLoop
    log: EventLog
    imports: IdleImports
    examiner: Examiner
    job: JobPort
    investigation: Investigation
    cores: CorePart
    checks: PreflightPart
    lint: LintPart
    torchrun_events: TorchrunEvents
    setup: AttemptSetup
    ranks: RankActions
    attempt_end: AttemptEnd
    page: PagePart
    on_event: OnEventPart | None = None
    metrics: MetricsPart | None = None
    wrapped: WrappedRanks | None = None
    terminals: RankTerminals | None = None
    control: ControlPart | None = None

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        *,
        screen: Screen,
        run_dir: RunDirectory,
        host: str,
        run_id: str,
    ) -> None:
        self.config = config
        self.environ = environ
        self.supervisor = supervisor
        self.screen = screen
        self.run_dir = run_dir
        self.host = host  # its name in the job, once the hosts have met
        self.bridges: tuple[str, ...] = ()  # addresses of containers' bridges, as they were when the hosts met
        self.run_id = run_id
        self.poller = Poller()
        self.guarded_poller = GuardedPoller(
            self.poller, lambda call: self.succeeds("read what a helper process has sent", call)
        )
        self.events: deque[Event] = deque()
        self.current = HostAttempt()
        self.ended_attempt: HostAttempt | None = None  # the attempt whose ranks ended last
        self._warned = set[str]()

    @property
    def attempt(self) -> int:
        """The number of the current attempt, as the supervisor counts."""
        return self.supervisor.attempt

    def is_in(self, state: State, attempt: int) -> bool:
        """Whether the launch is still in this state of this attempt."""
        return (self.supervisor.state, self.supervisor.attempt) == (state, attempt)

    def own_pids(self) -> set[int]:
        """Processes of saferun's own, and ranks that were given up: they are in an uninterruptible sleep."""
        return self.loop.pids.union(self.screen.pids, self.current.by_pid)

    def guarded(self, what: str, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - any call
        """Call what the launch can do without; a failure costs the result, None, and one line."""
        try:
            return call(*arguments)
        except ModuleNotFoundError as error:
            # The ranks had just been started when the file system stopped responding.
            self.warn(f"cannot {what}: {error}: the files of saferun cannot be read")
        except Exception as error:
            self.warn(f"cannot {what}: {type(error).__name__}: {error}")
        return None

    def succeeds(self, what: str, call: Callable[..., object], *arguments: object) -> bool:
        """Whether a call that may fail does not; if it does, that is said in one line."""
        return self.guarded(what, lambda: (call(*arguments),)) is not None

    def post(self, event: Event) -> None:
        """Hand an event to the supervisor, after those that wait."""
        self.events.append(event)

    def start_failed(
        self, attempt: int, error: SaferunError, started: tuple[int, ...] = (), joined: HostsJoined | None = None
    ) -> None:
        """Post that the ranks cannot be started.

        Args:
            attempt: this one.
            error: why.
            started: local ranks that run, or may come to.
            joined: what the hosts had agreed on, where the supervisor does not know that yet.
        """
        now = time.monotonic()
        failed = StartFailed(now, attempt, error.what, error.hint, error.exit_code, started)
        self.post(failed._replace(class_name=error.class_name, joined=joined))

    @property
    def another_host_prints(self) -> bool:
        """Whether another host prints, on the same console, what all hosts know."""
        if not self.config.hosts.shares_console:
            return False
        job = getattr(self, "job", None)  # which is made after the first lines
        return not job.leads if job is not None and job.leader else not self.config.hosts.prints_start_lines

    def lines_to_print(self, lines: Sequence[str], headline: str) -> Sequence[str]:
        """What is printed here of a report that each host makes for itself, because no leader makes it for all.

        On a console that all hosts share, the second host prints the whole report, the others one line each, with
        their names: there is no leader to print it for all.

        Args:
            lines: the report.
            headline: its sentence.
        """
        job, hosts = self.job, self.config.hosts
        if hosts.shares_console and job.is_refusal_printed:
            return ()
        if not self.another_host_prints:
            return lines
        if job.is_join_failure_reported:
            return ()
        number = job.host if job.leader else hosts.node_rank
        return lines if number == 1 and job.is_head else (f"saferun: {printable(self._named(headline))}",)

    def report(self, text: str) -> None:
        """One line for the user; where hosts share a console, with the name of this one."""
        self.screen.print_message(f"saferun: {printable(self._named(text))}")

    def _named(self, text: str) -> str:
        return f"{self.host}: {text}" if self.another_host_prints and not text.startswith(f"{self.host}: ") else text

    def report_signal(self, text: str) -> None:
        """One line about a signal. A scheduler signals all hosts at the same time."""
        if not self.another_host_prints:
            self.report(text)

    def print_line(self, action: PrintLine) -> None:
        """One line for the user that the supervisor has decided on."""
        (self.report_signal if action.of_signal else self.report)(action.text)

    def show_wait(self, text: str | None, waited_s: int = 0) -> bool:
        """Show which hosts are waited for, and for how long, where a line can change in place; None: they are there."""
        return self.screen.set_status("hosts", text, since=time.monotonic() - waited_s)

    def warn(self, text: str) -> None:
        """One line about something that could not be written or done; never twice the same."""
        if text not in self._warned:
            self._warned.add(text)
            text = self._named(text)
            self.screen.print_message(f"saferun: {printable(text)}")
