"""STOPPING: a signal to the ranks, their grace, SIGKILL, and the sweep of what they left behind. Pure.

No other module makes a SignalRanks. The module that ends the attempt chooses the signal: ``running`` after a capture,
of a failure or a hang (SIGTERM, or the signal that this saferun or another one of the job got meanwhile);
``other_hosts`` if it ends on another host (SIGTERM, or the signal that it got there); ``requests`` for saferunctl;
``on_signal`` here for a signal to this saferun. They call ``stop``, ``stop_as_asked`` or ``kill``; ``fail``, for a
failure, captures first. When the ranks are captured, and when SIGKILL follows, is decided here.
"""

from __future__ import annotations

import signal

from saferun.model import signal_name
from saferun.supervisor.actions import (
    Action,
    CaptureEvidence,
    NotifyDone,
    PrintLine,
    SignalRanks,
    SweepOrphans,
)
from saferun.supervisor.deciding import (
    diagnose,
    end_well_alone,
    follow,
    hurry,
    name_of,
    regroup,
    signal_line,
    wait_for_others,
)
from saferun.supervisor.ending import Failed, Leave, Regroup, Stopped
from saferun.supervisor.launch_state import CutOff, LaunchState, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.model import AbortKind
    from saferun.supervisor.events import (
        CoreDumpSeen,
        DeadlineExpired,
        LoopStalled,
        OrphansGone,
        SignalReceived,
        ToolAtWork,
    )

# When a signal comes from outside, a job without progress for so long is taken to hang: the user will want its stacks,
# and a short delay for them costs nothing.
_HUNG_S = 10.0
# Two SIGINT within this time are one Ctrl-C.
_SAME_CTRL_C_S = 0.5
# The capture before ranks get a signal from outside, and what is left of a capture when one comes.
CAPTURE_BEFORE_SIGNAL_S = 2.0
# Ranks that were working get the signal at once, and are captured if they are still there after this part of their
# grace. The capture ends before they are killed.
_LATE_CAPTURE_AT = 0.5
_LATE_CAPTURE_SHARE = 0.8
# How soon a rank whose core is being written is checked again.
_CHECK_DUMP_S = 0.2
# How soon a tool whose script has ended is checked again.
_CHECK_TOOL_S = 1.0
# A process that a rank left behind and that has done nothing for so long is not waited for. Clients of storage services
# wait for up to a minute before they try again (https://cloud.google.com/storage/docs/retry-strategy).
_IDLE_S = 60.0
# How soon a host hears that its ranks were the last ones of the job, which is done then, whatever signal had come.
_ALL_DONE_S = 2.0
# States in which the other hosts take part in this attempt, and it is not ending yet.
TOGETHER = frozenset({State.PROBING, State.STARTING, State.RUNNING, State.CAPTURING, State.WAITING})


# --------------------------------------------------------------------------------------------------------------------
# Evidence, then the signal


def fail(launch: LaunchState, at: float, local_rank: int = -1) -> list[Action]:
    """A rank failed, or the ranks cannot go on. Evidence comes before signals."""
    launch.add_ending(Failed(local_rank))
    announced = launch.broadcast_abort("failure")
    if not launch.attempt.running:
        return [*announced, *sweep(launch, at)]
    return [*announced, *capture(launch, at)]


def capture(
    launch: LaunchState,
    at: float,
    verdict: HangVerdict | None = None,
    number: int = 0,
    *,
    at_most_s: float = float("inf"),
) -> list[Action]:
    """STARTING | RUNNING -> CAPTURING."""
    attempt = launch.attempt
    attempt.verdict = verdict
    attempt.has_moved = False
    budget_s = min(launch.limits.capture_s, at_most_s)
    launch.enter(State.CAPTURING, at + budget_s)
    return [CaptureEvidence(launch.number, attempt.ranks, budget_s, verdict, number)]


def is_captured_for_failure(launch: LaunchState) -> bool:
    """Whether the ranks are captured because one has failed, and for nothing else: their end is not waited for."""
    others = launch.attempt.others
    return (
        launch.attempt.verdict is None
        and isinstance(launch.attempt.ending, Failed)
        and launch.stop_signum is None
        and not others.is_stopped
        and others.cut_off is None
        and others.decision is None
    )


def end_cause_wait(launch: LaunchState, at: float) -> None:
    """Stop the ranks that were left alive to show the cause of a failure, or for a signal that may come here, too."""
    if launch.state is State.CAPTURING and (launch.attempt.awaits_cause or launch.attempt.awaits_signal):
        launch.enter(State.CAPTURING, at)


def stop(launch: LaunchState, at: float, signum: int, aborted: tuple[int, ...] = ()) -> list[Action]:
    """STARTING | RUNNING | CAPTURING -> STOPPING. ``aborted``: local ranks that get SIGABRT instead, for a core."""
    attempt, stopping, signum = launch.attempt, launch.attempt.stopping, launch.for_ranks(signum)
    if not attempt.running:
        return sweep(launch, at)
    kill_at = at + launch.limits.grace_s
    if stopping.scheduler_kill_at is not None:
        kill_at = max(min(kill_at, stopping.scheduler_kill_at), at)
    stopping.kill_at = kill_at
    stopping.stage, stopping.signum = "signalled", signum
    stopping.core_dump_deadline = at + launch.limits.grace_s + launch.limits.dump_s
    stopping.tools_deadline = kill_at + (launch.limits.tools_s if stopping.scheduler_kill_at is None else 0.0)
    launch.enter(State.STOPPING, kill_at if stopping.capture_at is None else min(stopping.capture_at, kill_at))
    asked = tuple(sorted(attempt.running.difference(aborted)))
    return [
        *([SignalRanks(launch.number, aborted, signal.SIGABRT)] if aborted else []),
        *([SignalRanks(launch.number, asked, signum)] if asked else []),
    ]


def stop_as_asked(launch: LaunchState, at: float, signum: int, idle_s: float) -> list[Action]:
    """The user or the scheduler wants the ranks to end; they get ``signum``.

    Ranks that make progress need their grace, for a checkpoint for instance, and get the signal at once. Where there
    has been no progress for ``idle_s``, a job that hangs is being cancelled, and its stacks come first.
    """
    if idle_s >= _HUNG_S:
        return capture(launch, at, at_most_s=CAPTURE_BEFORE_SIGNAL_S)
    if launch.limits.grace_s > 0:
        launch.attempt.stopping.capture_at = at + launch.limits.grace_s * _LATE_CAPTURE_AT
    return stop(launch, at, signum)


def expect_sigkill(launch: LaunchState, at: float) -> None:
    """A scheduler has sent a signal that SIGKILL will follow."""
    stopping = launch.attempt.stopping
    if launch.job.scheduler_kills_soon and stopping.scheduler_kill_at is None:
        stopping.scheduler_kill_at = at + launch.limits.grace_s


def on_deadline(launch: LaunchState, event: DeadlineExpired | LoopStalled | CoreDumpSeen | ToolAtWork) -> list[Action]:
    """The next step: the late capture, SIGKILL, giving a rank up, or the end of the sweep."""
    stopping = launch.attempt.stopping
    if stopping.stage == "signalled":
        if stopping.capture_at is not None and event.at < stopping.kill_at:
            return _capture_late(launch, event.at)
        return _kill(launch, event.at)
    if stopping.stage == "killed":
        # A process in an uninterruptible sleep cannot be killed: name it and leave it.
        stopping.abandoned = launch.attempt.ranks
        launch.attempt.has_failed_rank = True
        launch.add_ending(Failed())
        return sweep(launch, event.at)
    return _after_sweep(launch, event.at)


def on_stall(launch: LaunchState, event: LoopStalled) -> list[Action]:
    """Processes that are waited for have their time again; any other phase is over."""
    if not launch.attempt.stopping.awaits_orphans:
        return on_deadline(launch, event)
    launch.deadline = event.at + event.left_s + launch.limits.sweep_s
    return []


def _capture_late(launch: LaunchState, at: float) -> list[Action]:
    """Ranks have not ended after half of their grace: capture what they are doing."""
    attempt, stopping = launch.attempt, launch.attempt.stopping
    stopping.capture_at = None
    attempt.is_captured = True
    budget_s = min(launch.limits.capture_s, (stopping.kill_at - at) * _LATE_CAPTURE_SHARE)
    launch.enter(State.STOPPING, stopping.kill_at)
    return [CaptureEvidence(launch.number, attempt.ranks, budget_s)]


def on_core_dump(launch: LaunchState, event: CoreDumpSeen) -> list[Action]:
    """The kernel writes a core, which SIGKILL would cut off: extend the phase, within bounds."""
    if not launch.is_due(event.at):
        return []
    stopping = launch.attempt.stopping
    if stopping.stage == "sweeping" or event.at >= stopping.core_dump_deadline:
        return on_deadline(launch, event)
    launch.enter(State.STOPPING, min(event.at + _CHECK_DUMP_S, stopping.core_dump_deadline))
    return []


def on_tool(launch: LaunchState, event: ToolAtWork) -> list[Action]:
    """A tool writes its results, which SIGKILL would cut off: extend the phase for that rank only."""
    if not launch.is_due(event.at):
        return []
    attempt, stopping = launch.attempt, launch.attempt.stopping
    tools = attempt.running.intersection(event.local_ranks)
    if stopping.stage != "signalled" or not tools or event.at < stopping.kill_at or event.at >= stopping.tools_deadline:
        return on_deadline(launch, event)
    launch.enter(State.STOPPING, min(event.at + _CHECK_TOOL_S, stopping.tools_deadline))
    actions: list[Action] = []
    if not stopping.awaits_tools:
        stopping.awaits_tools = True
        whose = "the script of 1 rank" if len(tools) == 1 else f"the scripts of {len(tools)} ranks"
        has = "its tool has" if len(tools) == 1 else "their tools have"
        kill = f"SIGKILL follows in {stopping.tools_deadline - event.at:.0f} s, or at Ctrl-C"
        actions.append(PrintLine(f"{whose} ended, {has} not: {kill}"))
    others = tuple(sorted(attempt.running - tools))
    return [*actions, *([SignalRanks(launch.number, others, signal.SIGKILL)] if others else [])]


def kill(launch: LaunchState, at: float) -> list[Action]:
    """STARTING | RUNNING | CAPTURING | STOPPING -> STOPPING: SIGKILL now, whatever the ranks have been sent before."""
    stopping = launch.attempt.stopping
    if launch.state is State.STOPPING and stopping.stage == "sweeping":
        return _kill_orphans(launch, at)
    if not launch.attempt.running:
        return sweep(launch, at)
    return _kill(launch, at) if stopping.stage in {"none", "signalled"} else []


def _kill(launch: LaunchState, at: float) -> list[Action]:
    launch.enter(State.STOPPING, at + launch.limits.kill_s)
    launch.attempt.stopping.stage = "killed"
    return [SignalRanks(launch.number, launch.attempt.ranks, signal.SIGKILL)]


# --------------------------------------------------------------------------------------------------------------------
# Signals to saferun


def end_at_once(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """-> DONE: nothing runs yet, so the signal ends saferun as it would end any program."""
    launch.stop_signum = event.signum
    return launch.finish(1, reraise=event.signum, leaves=launch.leaves_by_signal)


def end_backoff(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """BACKOFF -> DONE: there is no other attempt on this host."""
    launch.stop_signum = event.signum
    return launch.finish(1, leaves=launch.leaves_by_signal)


def on_signal(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """PROBING | STARTING | RUNNING | WAITING -> STOPPING | DIAGNOSING."""
    if launch.stop_signum is not None:
        return []
    if launch.is_spare:
        # WAITING -> DONE: the others do not need it. If all hosts got the signal, each acts on its own.
        launch.stop_signum = event.signum
        placement = launch.attempt.placement
        where = f" on {placement.host}" if placement is not None else ""
        return [signal_line(event, f"{where}: this spare host ends"), *launch.finish(1, leaves=True)]
    if launch.state is State.WAITING and launch.may_end_alone:
        # WAITING -> DONE: nor the one whose ranks have ended well, as under torchrun.
        launch.stop_signum = event.signum
        line = ": all ranks of this host have ended well, and it does not wait for the others"
        return [signal_line(event, line), *launch.finish(1, leaves=True)]
    announced = _obey_signal(launch, event)
    if launch.state in {State.WAITING, State.PROBING}:
        return [*announced, *diagnose(launch, event.at)]
    return _begin_stop(launch, event, announced)


def _begin_stop(launch: LaunchState, event: SignalReceived, announced: list[Action]) -> list[Action]:
    """STARTING | RUNNING | CAPTURING -> STOPPING | CAPTURING: the ranks get the signal that this host got."""
    if event.signum == signal.SIGINT:
        # A user at the keyboard wants an end: this is the only signal that does not wait for evidence.
        return [_stopping_line(launch, event), *announced, *stop(launch, event.at, event.signum)]
    why = f"; no sign of progress for {event.idle_s:.0f} s, so their stacks are captured first"
    stopping = _stopping_line(launch, event, why if event.idle_s >= _HUNG_S else "")
    return [stopping, *announced, *stop_as_asked(launch, event.at, event.signum, event.idle_s)]


def on_signal_on_the_way_out(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """CAPTURING, STOPPING, DIAGNOSING: what follows heeds the signal; there is no restart.

    A second Ctrl-C, or one while saferun is stopping the ranks already, ends their grace. A wrapper that passes on the
    SIGINT which the terminal has sent to all processes makes two of one, though, at the same moment.
    """
    attempt, stopping, by_keyboard = launch.attempt, launch.attempt.stopping, event.signum == signal.SIGINT
    if launch.stop_signum is not None:
        if not by_keyboard or (launch.interrupted_at is not None and event.at - launch.interrupted_at < _SAME_CTRL_C_S):
            return []
        return hurry(launch, event) if launch.state is State.DIAGNOSING else _end_grace(launch, event.at)
    if launch.state is State.DIAGNOSING:
        return [*_obey_signal(launch, event), *hurry(launch, event)]
    if launch.state is State.STOPPING and stopping.stage == "sweeping" and attempt.ending is None:
        # Every rank ended well; there is nothing left to stop, but processes that are waited for.
        stopping.late_signal = event
        line = signal_line(event, ": processes that the ranks left behind are not waited for")
        return [line, *hurried] if (hurried := stop_waiting_for_orphans(launch, event.at)) else []
    if launch.state is State.CAPTURING:
        return _on_signal_in_capture(launch, event)
    if stopping.stage == "signalled" and attempt.others.announced_signum:
        return [*_obey_signal(launch, event), *_pass_on(launch, event)]
    is_another = _is_another_ctrl_c(launch, event)
    return [*_obey_signal(launch, event), *(_end_grace(launch, event.at) if is_another else [])]


def _on_signal_in_capture(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """CAPTURING -> CAPTURING | STOPPING: the time that is left belongs to the ranks."""
    attempt, by_keyboard, is_another = launch.attempt, event.signum == signal.SIGINT, _is_another_ctrl_c(launch, event)
    is_hang = attempt.verdict is not None and isinstance(attempt.ending, Regroup | None)
    is_elsewhere = isinstance(attempt.ending, Stopped) and attempt.others.announced_signum != 0
    announced = _obey_signal(launch, event)
    if attempt.awaits_signal:
        attempt.awaits_signal = False
        return _begin_stop(launch, event, announced)
    is_at_once = by_keyboard and (is_hang or is_elsewhere)  # a user at the keyboard does not wait for the capture
    if is_hang or is_at_once:
        announced.insert(0, _stopping_line(launch, event, "" if by_keyboard else "; their stacks are captured first"))
    if launch.deadline is not None:
        launch.enter(State.CAPTURING, min(launch.deadline, event.at + CAPTURE_BEFORE_SIGNAL_S))
    if attempt.awaits_cause or is_at_once:
        # Ranks that were left alive to show the cause of a failure need not.
        return [*announced, *stop(launch, event.at, event.signum)]
    return [*announced, *(_end_grace(launch, event.at) if is_another else [])]


def _is_another_ctrl_c(launch: LaunchState, event: SignalReceived) -> bool:
    """Whether a Ctrl-C comes while the ranks are stopped already, or about to be.

    A launcher sends one to every host, and another host's report of it may come before the signal itself.
    """
    is_failure = not isinstance(launch.attempt.ending, Regroup | None)
    return event.signum == signal.SIGINT and is_failure and launch.attempt.others.announced_signum != signal.SIGINT


def _pass_on(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """STOPPING, because of a signal to another host: this host now gets another one. The grace of the ranks stays."""
    attempt, stopping, signum = launch.attempt, launch.attempt.stopping, launch.for_ranks(event.signum)
    if not attempt.running or signum == stopping.signum or event.why:
        return []
    stopping.signum = signum
    replaced = f" as {signal_name(signum)}" if signum != event.signum else ""
    line = signal_line(event, f": passed on to {ranks_count(len(attempt.running))}{replaced}")
    return [line, SignalRanks(launch.number, attempt.ranks, signum)]


def _obey_signal(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """The user or the scheduler wants this host to stop: there is no other attempt, and the other hosts know of it."""
    ending, others = launch.attempt.ending, launch.attempt.others
    launch.stop_signum = event.signum
    if event.signum == signal.SIGINT:
        launch.interrupted_at = event.at
    expect_sigkill(launch, event.at)
    leaves = ending is None and launch.state in TOGETHER and (others.may_leave or _may_be_awaited(launch, event))
    launch.add_ending(Leave(event.signum) if leaves else Stopped(event.signum))
    if isinstance(ending, Regroup) and launch.job.spans_hosts:
        others.cut_off = others.cut_off or CutOff()  # the others meet again without this host, and decide nothing
    if launch.state not in TOGETHER or isinstance(ending, Regroup):
        return []
    reason: AbortKind = "leave" if leaves else "parent" if event.why else "signal"
    return launch.broadcast_abort(reason, name_of(event), event.signum)


def _may_be_awaited(launch: LaunchState, event: SignalReceived) -> bool:
    """Whether the others may meet again with whoever takes the place of this host, as under torchrun.

    Its node may be drained, or its pod evicted. A user at the keyboard wants an end.
    """
    placement = launch.attempt.placement
    has_others = launch.job.spans_hosts and placement is not None and placement.group_world_size > 1
    is_by_system = event.signum == signal.SIGTERM and not event.why
    return has_others and is_by_system and launch.job.awaits_replacement_host and launch.may_restart


def _end_grace(launch: LaunchState, at: float) -> list[Action]:
    if launch.state is State.STOPPING and launch.attempt.stopping.stage == "sweeping":
        return _kill_orphans(launch, at)
    if launch.attempt.stopping.stage == "killed":
        return []  # a rank that SIGKILL does not end is given up when it was to be
    line = PrintLine(f"SIGINT: killing {ranks_count(len(launch.attempt.running))}", of_signal=True)
    return [line, *_kill(launch, at)]


def _stopping_line(launch: LaunchState, event: SignalReceived, more: str = "") -> PrintLine:
    count, grace_s, placement = len(launch.attempt.running), launch.limits.grace_s, launch.attempt.placement
    on_host = f" on {placement.host}" if placement is not None and placement.host else ""
    line = f"{on_host}: stopping {ranks_count(count)}, SIGKILL follows in {grace_s:g} s"
    return signal_line(event, f"{line}{' or at the next Ctrl-C' if event.signum == signal.SIGINT else more}")


def ranks_count(count: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return "1 rank" if count == 1 else f"{count} ranks"


# --------------------------------------------------------------------------------------------------------------------
# The sweep


def sweep(launch: LaunchState, at: float) -> list[Action]:
    """-> STOPPING: no rank is left; end the processes that they left behind, or wait for their end."""
    attempt, stopping, limits = launch.attempt, launch.attempt.stopping, launch.limits
    # A rank may be a shell, which a signal ends before the training that it has started. After a failure, and for a
    # restart, there is no time for that: the next attempt needs the GPUs.
    is_to_end = stopping.stage == "signalled" and isinstance(attempt.ending, Stopped | Leave)
    grace_s = stopping.kill_at - at if is_to_end else 0.0
    if grace_s <= limits.sweep_term_s:
        grace_s = 0.0  # whatever is left has more time without it
    stopping.stage = "sweeping"
    if attempt.ending is not None or attempt.others.cut_off is not None:
        return _end_orphans(launch, at, grace_s)
    # All ranks ended well: processes that still work are the user's.
    wait_s = limits.orphans_s if launch.orphans == "wait" else 0.0
    stopping.awaits_orphans = launch.orphans != "leave"
    # Also where ranks have no grace at all (--shutdown-timeout 0).
    term_s = max(limits.grace_s, limits.sweep_term_s)
    launch.enter(State.STOPPING, at + wait_s + term_s + limits.sweep_s)
    if launch.orphans == "leave":
        return [SweepOrphans(launch.number, 0.0, leave=True)]
    if not wait_s:
        return [SweepOrphans(launch.number, term_s, ends_all=True)]
    return [SweepOrphans(launch.number, term_s, wait_s, _IDLE_S)]


def stop_waiting_for_orphans(launch: LaunchState, at: float) -> list[Action]:
    """Processes that the ranks left behind are not waited for any longer."""
    return _end_orphans(launch, at) if launch.attempt.stopping.awaits_orphans else []


def _end_orphans(launch: LaunchState, at: float, grace_s: float = 0.0) -> list[Action]:
    stopping = launch.attempt.stopping
    stopping.awaits_orphans = False
    launch.enter(State.STOPPING, at + grace_s + launch.limits.sweep_s)
    sweep = SweepOrphans(launch.number, launch.limits.sweep_term_s, ends_all=launch.orphans == "end")
    return [sweep._replace(signum=stopping.signum, grace_s=grace_s) if grace_s > 0 else sweep]


def _kill_orphans(launch: LaunchState, at: float) -> list[Action]:
    end_at = at + launch.limits.sweep_s
    launch.enter(State.STOPPING, end_at if launch.deadline is None else min(launch.deadline, end_at))
    return [SweepOrphans(launch.number, 0.0)]


def on_orphans_gone(launch: LaunchState, event: OrphansGone) -> list[Action]:
    """The sweep is done."""
    return _after_sweep(launch, event.at)


def _after_sweep(launch: LaunchState, at: float) -> list[Action]:
    attempt, others = launch.attempt, launch.attempt.others
    if attempt.stopping.stage != "sweeping":
        return []
    attempt.stopping.awaits_orphans = False
    _obey_late(launch, at)
    is_cut_off_for_good = others.cut_off is not None and not (others.cut_off.class_name or launch.job.outlives_leader)
    if isinstance(attempt.ending, Regroup) and not is_cut_off_for_good:
        if launch.is_to_end:
            return launch.finish(1, leaves=True)
        return regroup(launch, at, attempt.ending)
    if attempt.ending is not None:
        return diagnose(launch, at)
    if not launch.job.spans_hosts:
        # STOPPING -> DONE: every rank ended with exit code 0.
        return launch.finish(0)
    if others.cut_off is not None:
        return end_well_alone(launch, others.cut_off.what)
    if attempt.stopping.late_signal is not None:
        if launch.may_end_alone:
            # STOPPING -> DONE: as if the signal had come now.
            return [NotifyDone(launch.number), *launch.finish(1, leaves=True)]
        attempt.stopping.obey_at = at + _ALL_DONE_S
    # STOPPING -> WAITING: and others' have not yet.
    waits = wait_for_others(launch, at)
    if others.decision is not None:
        return follow(launch, others.decision, at)
    return [NotifyDone(launch.number), *waits]


def _obey_late(launch: LaunchState, at: float) -> None:
    """The attempt has failed elsewhere since a signal came to this host, without which a static job cannot go on."""
    stopping, is_static = launch.attempt.stopping, launch.job.spans_hosts and not launch.job.outlives_leader
    is_needed = is_static and not launch.may_end_alone
    if stopping.late_signal is not None and is_needed and launch.stop_signum is None and launch.attempt.ending:
        _obey_signal(launch, stopping.late_signal._replace(at=at))  # it announces nothing in STOPPING
