"""What is known of one attempt's ranks, and what its incidents are investigated with."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence

from saferun.errors import printable
from saferun.launch.incident_log import IncidentLog
from saferun.launch.launch_context import LaunchContext
from saferun.launch.rank import Rank
from saferun.launch.rank_group import RankGroup
from saferun.launch.rank_hook import RankHook
from saferun.linux.scratch import current_directory
from saferun.model import Value
from saferun.supervisor.actions import ATTEMPT_FAILED, Diagnose, Undiagnosed
from saferun.supervisor.events import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.captures.capture_query import CaptureQuery
    from saferun.cluster.evidence_exchange import EvidenceExchange
    from saferun.diagnosis.host_fault import HostFault
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import Capture, Evidence, HangVerdict, RankOutput

CORE_BUDGET_S = 60.0
"""How long the cores of dead ranks may be read; gdb takes half a minute where nothing is in the cache."""
NO_TIME = "a signal left no time"
"""Why what dead ranks left has not been read to the end, if it is not because of the budget."""
ENDED_BY_HANG = "ended because of the hang above"
"""The headline of a failure whose hang has been reported already."""


class InvestigationContext(Value):
    """What the incidents of a launch are investigated with.

    Attributes:
        launch: the launch, and its other parts.
        hook: the start-up hook of the ranks.
        log: the incidents so far.
        others_s: how long the evidence of other hosts is waited for after a failure.
        numbers: of the captures, which name their directories.
    """

    launch: LaunchContext
    hook: RankHook
    log: IncidentLog
    others_s: float
    numbers: Iterator[int]

    def post(self, event: Event) -> None:
        """Hand an event to the supervisor."""
        self.launch.attempt_end.post_investigated(event)

    def exchange(self) -> EvidenceExchange:
        """The evidence of all hosts."""
        from saferun.cluster.evidence_exchange import EvidenceExchange

        task = self.launch.config.hosts.task
        return EvidenceExchange(self.launch.job, task.local_rank if task is not None else 0, self.launch.guarded)

    def print_lines(self, lines: Sequence[str]) -> None:
        """Say these lines, one below the other."""
        self.launch.screen.print_message("\n".join(lines))

    def print_verdict(self, verdict: HangVerdict) -> None:
        """Report a hang that cannot be diagnosed."""
        self.launch.screen.print_message(
            f"saferun: no progress for {verdict.lasted_s:.0f} s ({printable(verdict.kind)})"
        )


class AttemptRecord:
    """One attempt's ranks, and what has been captured and concluded so far. Each attempt has a new one.

    Args:
        context: of the launch.
        group: the ranks; None: none have been started.
        started_at: when they were started, in monotonic seconds.

    Attributes:
        capture: of the ranks that still run; a failure or the end of a hang is diagnosed with it.
        captured_at: when the newest capture of living ranks began, in monotonic seconds.
        verdict: the hang that it is of, if any.
        last_hang: capture and verdict of the hang that was reported last.
        reported_hang: what it was found to be.
        hang_shown: the beginning of the line about it that this host has printed for another one.
        raised_timeout_s: the longest timeout of process groups that hangs were found to wait with, if the script has
            set it longer than torch's default.
        evidence: what the newest diagnosis was made from.
        diagnosis: the newest one.
        running: the capture that runs, if any.
        read_until: until when what dead ranks left may be read, in monotonic seconds: a signal has come.
        directory: of the newest capture's files; empty where there are none.
        concluded_attempt: the attempt whose end the evidence is of.
        host_faults: on the leader, the hosts whose own hardware or system is at fault, the worst first.
    """

    def __init__(self, context: InvestigationContext, group: RankGroup | None = None, started_at: float = 0.0) -> None:
        self._context = context
        self.group = group
        self.started_at = started_at
        self.started_time = time.time()
        self.capture: Capture | None = None
        self.captured_at = 0.0
        self.verdict: HangVerdict | None = None
        self.last_hang: tuple[Capture | None, HangVerdict | None] = (None, None)
        self.reported_hang: tuple[object, ...] = ()
        self.hang_shown = ""
        self.raised_timeout_s = 0.0
        self.evidence: Evidence | None = None
        self.diagnosis: Diagnosis | None = None
        self.running: CaptureQuery | None = None
        self.read_until = float("inf")
        self.directory = ""
        self.concluded_attempt = -1
        self.host_faults: tuple[HostFault, ...] = ()

    @property
    def ranks(self) -> list[Rank]:
        """All of them."""
        return self.group.ranks if self.group is not None else []

    @property
    def living(self) -> list[Rank]:
        """Those that run."""
        return [rank for rank in self.ranks if rank.end is None]

    @property
    def restarts(self) -> int:
        """How many failures the launch had survived before: attempts also count retries and new rendezvous."""
        return self.group.plan.placement.restarts if self.group is not None else self._context.launch.attempt

    def local_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of these ranks of the job that run on this host."""
        return tuple(rank.assignment.local_rank for rank in self.living if rank.assignment.rank in ranks)

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        return self.group.plan.placement.world_size if self.group is not None else 0

    @property
    def store_port(self) -> int:
        """Where the ranks find the store; 0: no rank was started."""
        return self.group.plan.placement.master_port if self.group is not None else 0

    def gather(self, verdict: HangVerdict | None) -> Evidence:
        """The evidence of this host. ``verdict``: the hang that it is of, if any."""
        from saferun.cluster.evidence_exchange import abort_reason_of
        from saferun.evidence.job_evidence import Capture, Evidence

        config, group = self._context.launch.config, self.group
        placement = group.plan.placement if group is not None else None
        capture = self.capture or Capture()
        return Evidence(
            host=self._context.log.host,
            started_at=self.started_at,
            ends=tuple(rank.end for rank in self.ranks if rank.end is not None),
            outputs=self._outputs(),
            abandoned=(),
            stop_signum=None,
            ranks=tuple(rank.assignment.rank for rank in self.ranks),
            capture=capture,
            kernel_lines=capture.kernel_lines,
            hang=verdict,
            supervisor_pid=os.getpid(),
            script=config.command.name,
            cwd=current_directory(),
            store_port=self.store_port,
            started_time=self.started_time,
            world_size=placement.world_size if placement is not None and config.hosts.spans_hosts else 0,
            abort_reason=abort_reason_of(self._context.launch.job),
            nics=(fault,) if (fault := self._nic_fault()) else (),
            bridges=self._context.launch.bridges,
        )

    def _nic_fault(self) -> str:
        """What has become of an interface that led to other hosts when they met."""
        launch = self._context.launch
        return launch.guarded("look at the interfaces", launch.job.nic_fault) or ""

    def _outputs(self) -> tuple[RankOutput, ...]:
        """What the ranks have written last, with the last steps that their scripts have reported."""
        outputs = self.group.outputs() if self.group is not None else ()
        return self._context.launch.guarded("read the last steps", self._with_steps, outputs) or outputs

    def _with_steps(self, outputs: tuple[RankOutput, ...]) -> tuple[RankOutput, ...]:
        from saferun.text.script_state import step_text

        hook, attempt, now = self._context.hook, self._context.launch.attempt, time.monotonic()
        found = []
        for rank, output in zip(self.ranks, outputs, strict=True):
            state = hook.script_state(attempt, rank.assignment.rank)
            at = rank.end.at if rank.end is not None else now
            found.append(output._replace(last_step=step_text(state, at)) if state is not None else output)
        return tuple(found)

    def add_incident(
        self,
        kind: str,
        diagnosis: Diagnosis,
        outcome: str,
        lines: Sequence[str],
        evidence: Evidence | None = None,
    ) -> None:
        """Add an incident to the report.

        Args:
            kind: ``hang`` or ``failure``.
            diagnosis: the cause.
            outcome: what saferun did.
            lines: what was printed about it.
            evidence: what it follows from; None: the newest.
        """
        self._context.log.add(
            kind,
            evidence or self.evidence or self.gather(None),
            diagnosis,
            attempt=self._context.launch.attempt,
            outcome=outcome,
            console_lines=lines,
            directory=self.directory,
        )

    def add_failure(self, diagnosis: Diagnosis, lines: Sequence[str], *, restarting: bool) -> None:
        """Add the end of the attempt to the report. ``lines``: what was printed about it."""
        outcome = "restarted" if restarting else "ended"
        self._context.launch.guarded("report", self.add_incident, "failure", diagnosis, outcome, lines)

    @property
    def first_failure(self) -> str:
        """Which rank of this host failed first, and how it ended; empty: none has failed by itself.

        Where other hosts have ranks, one of these may have failed before.
        """
        failed = [(rank.end, rank.assignment.rank) for rank in self.ranks if rank.end is not None]
        failed = [(end, rank) for end, rank in failed if not (end.stopped_by_us or end.status.ok)]
        if not failed:
            return ""
        end, rank = min(failed, key=lambda one: one[0].at)
        first = " first" if len(self.ranks) == self.world_size else ""
        return f"rank {rank} failed{first}: {end.status.description}"

    def undiagnosed(self, action: Diagnose) -> Diagnosis:
        """What remains to be said of a failed attempt that cannot be diagnosed."""
        headline = action.error or self.first_failure or ATTEMPT_FAILED
        if action.stop_signum is not None:
            headline = f"stopped by {action.stopped_by or signal.Signals(action.stop_signum).name}"
        try:
            from saferun.evidence.diagnosis_values import Diagnosis
        except ModuleNotFoundError:
            return Undiagnosed(headline, abandoned=action.abandoned)  # type: ignore[return-value]
        return Diagnosis(headline, None, None, (), (), action.abandoned)
