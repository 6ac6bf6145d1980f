"""One launch on this host: its parts are put together here, run, and ended whatever happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from saferun.captures.examiner import Examiner
from saferun.cluster.job_values import JobCallbacks
from saferun.cluster.solo_job import SoloJob
from saferun.env.profiles import Resolution
from saferun.errors import EXIT_INTERRUPTED, suppress
from saferun.launch.attempt_end import AttemptEnd
from saferun.launch.attempt_setup import AttemptSetup
from saferun.launch.console_part import ConsolePart
from saferun.launch.core_part import CorePart
from saferun.launch.event_log import EventLog, StoryFile
from saferun.launch.event_loop import EventLoop
from saferun.launch.idle_imports import FOR_SEVERAL_HOSTS, MODULES, IdleImports
from saferun.launch.investigation import Investigation
from saferun.launch.launch_context import LaunchContext
from saferun.launch.lint_part import LintPart
from saferun.launch.page_part import PagePart
from saferun.launch.passed_signals import PassedSignals
from saferun.launch.preflight_part import PreflightPart
from saferun.launch.rank_actions import RankActions
from saferun.launch.reaper_part import ReaperPart
from saferun.launch.signal_wakeup import Wakeup
from saferun.launch.torchrun_events import TorchrunEvents
from saferun.linux.children import await_exits
from saferun.linux.reaper import Reaper
from saferun.linux.small_files import has_own_processes, read_link
from saferun.model import ABORT_NO_FAILURES
from saferun.supervisor import actions
from saferun.supervisor.events import LaunchRequested
from saferun.text.wording import size_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.secret import JobSecret
    from saferun.files.inbox import Outbox
    from saferun.files.writer_client import WriterClient
    from saferun.linux.part import Part
    from saferun.linux.preforked import PreforkedProcesses
    from saferun.preflight.check_process import CheckProcess

# Processes that got SIGKILL end within milliseconds, unless they are in an uninterruptible sleep.
_HELPERS_S = 0.5
# With so many runs the user is shown how to remove old ones.
_MANY_RUNS = 200
_MANY_BYTES = 5 << 30


class HostLaunch:
    """Carries out one launch on this host.

    Args:
        context: the launch.
        resolution: what env profiles, --env and --unset come to.
        writer: the process that writes the files.
        older_children: children that this process had before the launch.
        reaper: ends the run if this process cannot.
        others_s: how long other hosts' evidence is waited for after a failure.
        checks: the check process, where it has been forked already.
        preforked: processes that may become ranks.
        secret: the job's.
    """

    def __init__(
        self,
        context: LaunchContext,
        *,
        resolution: Resolution,
        writer: WriterClient,
        older_children: frozenset[int],
        reaper: Reaper,
        others_s: float = 0.0,
        checks: CheckProcess | None = None,
        preforked: PreforkedProcesses | None = None,
        secret: JobSecret | None = None,
    ) -> None:
        self._writer = writer
        self._context = context
        self._reaper = reaper
        own_environ = {**context.environ, "SAFERUN_RUN_ID": context.run_id, "OMP_NUM_THREADS": "1"}
        context.log = EventLog(context)
        context.setup = AttemptSetup(context, resolution)
        context.attempt_end = AttemptEnd(context)
        context.checks = PreflightPart(context, checks)
        context.lint = LintPart(context)
        context.ranks = RankActions(context, older_children, reaper, preforked)
        self._make_imports(own_environ)
        context.job = self._open_job(own_environ, secret)
        context.torchrun_events = TorchrunEvents(context.config, context.job.client, context.guarded)
        reporters = self._make_reporters()
        context.investigation = Investigation(context, others_s)
        context.cores = CorePart(context)
        passed = PassedSignals(context, reaper.pid, reaper.witness_fd)
        self._reaper_part = ReaperPart(context, reaper, passed)
        self._wakeup = Wakeup(context, passed)
        self._ends_interrupted = False
        writer.attach(context.poller)
        self._console = ConsolePart(context)
        context.loop = EventLoop(context, self._console, *self._parts(passed, reporters))

    def _make_imports(self, environ: Mapping[str, str]) -> None:
        """What has modules read without waiting for files, and imports them."""
        context, outbox = self._context, self._outbox
        spans_hosts = context.config.hosts.spans_hosts
        context.imports = IdleImports(
            context.environ.get("PYTHONPATH", ""),
            self._on_imported,
            poller=context.guarded_poller,
            ask=lambda names, budget_s: context.examiner.ask("code", list(names), budget_s, is_urgent=False)[1],
            hurry=lambda: context.examiner.hurry(),  # noqa: PLW0108 - it is made below
            reader_runs=lambda: context.examiner.runs("modules"),
            wanted=MODULES + (FOR_SEVERAL_HOSTS if spans_hosts else ()),
        )
        context.examiner = Examiner(
            environ,
            context.guarded_poller,
            warn=context.warn,
            on_begun=context.imports.begin,
            on_ready=lambda: context.log.note("ExaminerReady"),
            outbox=outbox,
            kinds={"stacks": _read_ranks, "wrapped": _find_scripts},
            modules=("saferun.launch.host_stacks", *(("saferun.cluster.evidence",) if spans_hosts else ())),
        )

    def _make_reporters(self) -> list[Part]:
        """What tells people and programs how the launch goes."""
        context, config = self._context, self._context.config
        context.page = PagePart(
            context.run_dir,
            context.poller,
            outbox=self._outbox,
            warn=context.warn,
            is_wanted=config.output.report_html != "off",
        )
        if config.output.on_event and config.checks.preflight != "only":
            from saferun.launch.on_event_part import OnEventPart

            context.on_event = OnEventPart(context, config.output.on_event)
        task = config.hosts.task
        if config.output.metrics and (task is None or task.local_rank == 0):
            from saferun.launch.metrics_part import MetricsPart

            context.metrics = MetricsPart(context, config.output.metrics)
        if config.wraps:
            from saferun.launch.wrapped_ranks import WrappedRanks

            context.wrapped = WrappedRanks(context)
        port: Part | None = None
        if config.output.metrics_port is not None and config.checks.preflight != "only":
            from saferun.launch.metrics_port import MetricsPort

            port = MetricsPort(context, config.output.metrics_port)
        return [
            part
            for part in (context.page, context.on_event, context.metrics, context.wrapped, port)
            if part is not None
        ]

    def _parts(self, passed: PassedSignals, reporters: Sequence[Part]) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        """The parts in the order in which they are woken, and those of them that the launch can do without."""
        context = self._context
        ranks, story = context.ranks, StoryFile(context)
        parts: tuple[Part, ...] = (
            *(ranks, self._writer, ranks.intake, ranks.exec_wait, passed, context.investigation),
            *(context.cores, context.checks, context.job, context.lint, ranks.segments),
            *(context.imports, context.examiner, ranks.orphans, story, self._reaper_part),
            *reporters,
        )
        needed: tuple[Part, ...] = (ranks, self._writer, ranks.intake, ranks.exec_wait, context.checks, context.job)
        return parts, tuple(part for part in parts if part not in needed)

    def _outbox(self) -> Outbox:
        return self._writer.outbox

    def _actions(self) -> dict[type, Callable[[Any], object]]:
        """What carries out each kind of action."""
        context = self._context
        setup, ranks, attempt_end = context.setup, context.ranks, context.attempt_end
        return {
            actions.RunChecks: setup.check,
            actions.JoinHosts: setup.join,
            actions.ProbeHosts: context.checks.probe,
            actions.StartRanks: ranks.start,
            actions.ServeStore: ranks.serve_store,
            actions.CaptureEvidence: self._capture,
            actions.AwaitCause: context.investigation.await_cause,
            actions.ReportHang: context.investigation.report_hang,
            actions.SignalRanks: self._signal_ranks,
            actions.SweepOrphans: ranks.sweep,
            actions.Diagnose: attempt_end.diagnose,
            actions.HurryDiagnosis: context.investigation.hurry_diagnosis,
            actions.ReportFailure: attempt_end.report_failure,
            actions.BroadcastAbort: attempt_end.broadcast_abort,
            actions.BroadcastCause: attempt_end.broadcast_cause,
            actions.BroadcastRequest: attempt_end.broadcast_request,
            actions.BroadcastCheckpoint: attempt_end.broadcast_checkpoint,
            actions.RequestCheckpoint: ranks.request_checkpoint,
            actions.ReportRestart: attempt_end.report_restart,
            actions.NotifyDone: attempt_end.notify_done,
            actions.BroadcastDecision: attempt_end.broadcast_decision,
            actions.ReportDecision: attempt_end.report_decision,
            actions.PrintLine: context.print_line,
            actions.Finish: self._finish,
        }

    def _capture(self, action: actions.CaptureEvidence) -> None:
        self._context.ranks.capture(action)
        self._context.guarded("prepare report.html", self._prepare_page)  # while the ranks are captured

    def _signal_ranks(self, action: actions.SignalRanks) -> None:
        self._context.ranks.signal(action)
        self._context.guarded("prepare report.html", self._prepare_page)  # while they end

    def _prepare_page(self) -> None:
        """Have the modules of the page imported, once there is something to show on one."""
        context = self._context
        abort = context.job.abort_reason
        is_failure = abort is not None and abort.reason not in ABORT_NO_FAILURES
        if is_failure or context.investigation.log.has_incidents or context.current.first_failure() is not None:
            context.page.prepare()

    def run(self) -> actions.Finish:
        """Carry the launch out. Returns how saferun is to end.

        Raises:
            KeyboardInterrupt: it was stopped by a SIGINT that ``--signals-to-handle`` leaves out.
        """
        self._wakeup.open()
        self._context.post(LaunchRequested(time.monotonic(), 0))
        finish: actions.Finish | None = None
        try:
            self._context.guarded("see whether /proc is that of this namespace", self._warn_of_proc)
            finish = self._context.loop.run(self._actions())
        except Exception:
            self._context.supervisor.story.is_wanted = True
            raise
        finally:
            self._end(has_finished=finish is not None)
        if self._ends_interrupted:
            raise KeyboardInterrupt
        return finish

    def _finish(self, action: actions.Finish) -> None:
        if self._wakeup.is_interrupted and action.exit_code:
            self._ends_interrupted = True
            action = action._replace(exit_code=EXIT_INTERRUPTED)
        self._context.attempt_end.finish(action)

    def _warn_of_proc(self) -> None:
        if has_own_processes():
            return
        why = "is not mounted"
        if read_link("/proc/self"):
            why = "shows another PID namespace (unshare without --mount-proc, bwrap without --proc)"
        self._context.warn(
            f"/proc {why}: no hang is noticed, stacks are missing, and what ranks leave running is not ended"
        )

    def _end(self, *, has_finished: bool) -> None:
        """End the launch, for whatever reason: end all of its processes, and print everything.

        A step that fails does not keep the next ones from being taken; the reaper ends what is left after that, as it
        does where the loop has not finished: then ranks still run, with what they have started.
        """
        self._reaper.is_needed = True
        helpers = self._context.loop.pids - self._reaper_part.pids  # that one is dismissed later
        has_failed = not has_finished
        for part in self._context.loop.parts:
            has_failed |= not self._take_step(type(part).__name__, part.close)
        # Processes that are to be left must not be ended by the reaper either.
        self._reaper.is_needed = has_failed and not self._context.ranks.orphans.is_left
        self._take_step("run.json", self._context.log.describe)
        self._take_step("the files", self._finish_files)
        self._take_step("the console", lambda: self._console.drain(self._wakeup))
        self._take_step("signals", self._wakeup.close)
        self._take_step("the poller", self._context.poller.close)
        self._take_step("the helper processes", lambda: await_exits(helpers, _HELPERS_S))

    def _take_step(self, name: str, step: Callable[[], object]) -> bool:
        """Take one step of the end. Returns whether it could be taken; if not, that is reported."""
        try:
            step()
        except Exception as error:
            with suppress(Exception):
                self._context.report(f"the end of the run: {name}: {type(error).__name__}: {error}")
            return False
        return True

    def _finish_files(self) -> None:
        """Have everything written; a file system that does not answer is left to itself."""
        context = self._context

        def wait() -> None:
            self._writer.tick(time.monotonic())
            context.screen.flush()

        self._take_step("report.html", lambda: context.page.finish(self._wakeup.is_hurried, wait))
        if context.on_event is not None:
            on_event = context.on_event
            self._take_step("--on-event", lambda: on_event.finish(self._wakeup.is_hurried, wait))
        if context.metrics is not None:
            metrics, code = context.metrics, context.investigation.log.exit_code
            self._take_step("--metrics", lambda: metrics.finish(code, self._wakeup.is_hurried, wait))
        context.run_dir.close()
        context.events.clear()
        self._writer.finish(self._context.poller, self._wakeup.is_hurried, self._context.screen.flush)
        runs = self._writer.runs
        if runs and (runs["runs"] > _MANY_RUNS or runs["size_bytes"] > _MANY_BYTES):
            size = f" ({size_text(runs['size_bytes'])})" if runs["size_bytes"] else ""
            self._context.report(
                f"{runs['runs']} runs are kept{size}: saferunctl clean --keep 20 removes all but the newest"
            )

    def _open_job(self, environ: Mapping[str, str], secret: JobSecret | None) -> JobPort:
        context = self._context
        is_alone = not context.config.hosts.spans_hosts
        callbacks = JobCallbacks(
            post=context.post if is_alone else context.attempt_end.post_from_job,
            attempt=lambda: context.attempt,
            on_assigned=context.setup.on_assigned,
            on_prepared=context.setup.on_prepared,
            on_prepare_failed=context.setup.on_prepare_failed,
            on_preflight=context.checks.take_message,
            on_torch=lambda version: context.guarded("write run.json", context.log.write_torch_version, version),
            on_stderr=context.screen.err.put_message,
            print_line=context.screen.print_message,
            ranks=lambda: context.investigation.hangs.watched_ranks(),  # noqa: PLW0108
            set_status=context.show_wait,
        )
        if is_alone:
            return SoloJob(context.config, environ, context.poller, callbacks)
        from saferun.cluster.job import Job

        return Job(context.config, environ, context.poller, callbacks, run_dir=context.run_dir, secret=secret)

    def _on_imported(self) -> None:
        """No file is opened by this process any more."""
        with suppress(ImportError):
            from saferun.linux.locked_code import lock_code

            lock_code()
        context = self._context
        context.guarded("give memory back", _trim_heap)
        context.guarded("write events.jsonl", context.log.note, "ModulesImported")
        context.guarded("watch the ranks", context.investigation.imported)
        context.guarded("check this host", context.checks.imported)
        context.guarded("open the control socket", self._open_control)

    def _open_control(self) -> None:
        """Answer saferunctl from now on. A launch whose ranks end before has no control socket."""
        context = self._context
        if context.control is not None:
            return  # all is imported again where an examiner was lost
        from saferun.launch.control_part import ControlPart
        from saferun.linux.limits import check_spare_files

        check_spare_files()
        context.control = ControlPart(context)
        context.loop.add_watching(context.control)
        context.control.open()


def _read_ranks(value: Any) -> None:  # noqa: ANN401 - checked when it is decoded
    from saferun.launch.host_stacks import read_ranks

    read_ranks(value)


def _find_scripts(value: Any) -> None:  # noqa: ANN401 - as it was asked for, by this process
    from saferun.launch.wrapped_ranks import find_scripts

    find_scripts(value)


def _trim_heap() -> None:
    from saferun.linux.heap import trim_heap

    trim_heap()
