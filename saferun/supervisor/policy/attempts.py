"""Whether there is another attempt: retries of a start, restarts, hosts that are left out. Pure."""

from __future__ import annotations

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence
    from typing import Literal

    # A launch without failures never makes one.
    from saferun.supervisor.policy.faulty_hosts import FaultyHost, FaultyHosts
    from saferun.supervisor.policy.step_progress import StepProgress

__all__ = [
    "INCOMPARABLE",
    "PERMANENT",
    "SETTLED",
    "TRANSIENT",
    "AttemptPolicy",
    "AttemptProgress",
    "Decision",
    "FailureFacts",
    "Fingerprint",
]

TRANSIENT = frozenset(
    {
        "gpu_busy",
        "master_unreachable",
        "name_resolution",
        "nccl_system_error",
        "port_in_use",
        "rendezvous_store_failure",
        "stale_file_handle",
        "store_lost",
    }
)
"""Causes in the environment that may pass: a failed start is tried again, even if it fails in the same way."""

PERMANENT = frozenset(
    {
        "assertion_error",
        "cuda_illegal_memory_access",
        "cuda_out_of_memory",
        "data_loader_worker_killed",
        "device_side_assert",
        "disk_full",
        "early_exit",
        "file_missing",
        "gpu_hardware_error",
        "hip_illegal_memory_access",
        "host_oom_kill",
        "host_out_of_memory",
        "illegal_instruction",
        "import_error",
        "killed_from_outside",
        "mismatched_collectives",
        "missing_gpu",
        "name_unknown",
        "network_interface",
        "parent_gone",
        "scheduler_timeout",
        "shared_memory_exhausted",
        "start_failed",
        "stopped_by_signal",
        "syntax_error",
        "too_many_open_files",
        "usage_error",
    }
)
"""Causes that another start does not change, or that were an order: a failed start is not tried again."""

INCOMPARABLE = frozenset(
    {
        "broken_pipe",
        "communicator_aborted",
        "connection_lost",
        "fabric_error",
        "host_lost",
        "killed_from_outside",
        "membership",
        "network_between_hosts",
        "network_cut",
        "parent_gone",
        "peer_lost",
        "scheduler_timeout",
        "ssh_unreachable",
        "stopped_by_signal",
        "store_host_lost",
        "worker_stopped",
    }
)
"""Ends that came from outside or from other ranks: they say nothing about the next attempt."""

SETTLED = frozenset({"syntax_error", "usage_error"})
"""Causes in the source and the command line: no time changes them. A module that is missing may come yet."""

LONGEST_WAIT_S = 60.0
# More changes nothing: the first wait cannot be that short.
_DOUBLED_AT_MOST = 30
# How much longer or shorter the same start may take, depending on the load.
_SAME_LIFE_S = 3.0
_MOST_RANKS_SHOWN = 4


class Fingerprint(Value):
    """Identifies a failure across attempts.

    Attributes:
        class_name: of the cause.
        ranks: those that failed so; which ones are seen to depends on their timing.
        location: the last call in the user's code; if there is none, the message without its numbers. Empty: there is
            nothing to compare, and it is never the same as another.
        is_frame: whether ``location`` is a call.
    """

    class_name: str = ""
    ranks: tuple[int, ...] = ()
    location: str = ""
    is_frame: bool = False

    def is_same(self, other: Fingerprint | None) -> bool:
        """Whether both are of the same failure: the same class at the same location, in some rank that both have."""
        return self.is_alike(other) and other is not None and (not self.ranks or bool({*self.ranks} & {*other.ranks}))

    def is_alike(self, other: Fingerprint | None) -> bool:
        """The same, whichever ranks it was in."""
        if other is None or not self.location or bool(self.ranks) != bool(other.ranks):
            return False
        return (self.class_name, self.location) == (other.class_name, other.location)

    @property
    def description(self) -> str:
        """``import_error, rank 3, train.py:12``."""
        ranks = ", ".join(map(str, self.ranks[:_MOST_RANKS_SHOWN]))
        more = ", …" if len(self.ranks) > _MOST_RANKS_SHOWN else ""
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {ranks}{more}" if self.ranks else ""
        return ", ".join(filter(None, (self.class_name, who, self.location if self.is_frame else "")))


class AttemptProgress(Value):
    """How far an attempt had come, as far as that is known.

    Attributes:
        lived_s: from the start of its ranks to the end of the last one, in seconds; 0: no rank was started.
        in_window: whether it failed within ``--start-window``.
        has_sent_heartbeat: whether a rank has called ``saferun.heartbeat``.
        collectives: how many the furthest rank had begun in one group, by the Flight Recorder; -1: unknown.
    """

    lived_s: float = 0.0
    in_window: bool = True
    has_sent_heartbeat: bool = False
    collectives: int = -1

    def is_no_further_than(self, before: AttemptProgress) -> bool:
        """Whether an attempt that ended so cannot have got beyond the end of the previous one.

        A checkpoint may lie between two failures at the same line that are alike in every other way.
        """
        return (
            self.in_window
            and not self.has_sent_heartbeat
            and self.collectives <= before.collectives
            and self.lived_s <= before.lived_s + _SAME_LIFE_S
        )


class FailureFacts(Value):
    """The facts about a failed attempt on which the next one depends.

    Attributes:
        class_name: of the cause; ``unknown`` where there is none.
        fingerprint: identifies the failure.
        is_start_over: whether the start was over; None: unknown, which counts as over.
        in_init: whether it failed within ``init_process_group``: only then is it retried for an unknown reason.
        of_start: whether the meeting of the ranks failed, or a GPU was busy: only then is a transient cause retried.
        transient_override: whether the cause may go away by itself; None: its class tells.
        host: the number of the host at fault; None: none, or several.
        host_label: its name in the job.
        restarting_allowed: False where the user, a scheduler or the state of the job wants an end.
        stop_reason: why, if so: ``stopped by SIGTERM``.
        message: the cause in a few words: ``port 29500 is in use``.
        port_is_free: whether another port may be taken for the store.
        progress: how far the attempt had come; None: unknown, and it may have made progress.
        may_differ: whether the cause may be gone the next time although it is the same: input and output, networks.
        unreadable: whether Python could not read the script itself, so that none of it ran, and no restart can help. An
            exception that the script raises never counts as that.
        faulty: the hosts that are themselves at fault, the worst first.
        step: the last step that a rank has reported; -1: none has reported any.
    """

    class_name: str
    fingerprint: Fingerprint = Fingerprint()
    is_start_over: bool | None = None
    in_init: bool = False
    of_start: bool = True
    transient_override: bool | None = None
    host: int | None = None
    host_label: str = ""
    restarting_allowed: bool = True
    stop_reason: str = ""
    message: str = ""
    port_is_free: bool = False
    progress: AttemptProgress | None = None
    may_differ: bool = False
    unreadable: bool = False
    faulty: tuple[FaultyHost, ...] = ()
    step: int = -1

    @property
    def is_transient(self) -> bool:
        """Whether the cause may go away by itself."""
        return self.transient_override if self.transient_override is not None else self.class_name in TRANSIENT

    def is_bound_to_repeat(self, before: FailureFacts | None) -> bool:
        """Whether the next attempt is known to end like this one and the previous one.

        That takes the same failure; a cause that time does not change; and two attempts of which neither can have got
        beyond the other: both ended before a rank was started, or within ``init_process_group``, or by what stands in
        the script itself. Anywhere else the line of code shows nothing: nearly every transient failure of training is
        raised at the same few lines.
        """
        if before is None or self.is_transient or self.may_differ or self.progress is None or before.progress is None:
            return False
        if not self.fingerprint.is_same(before.fingerprint):
            return False
        if 0 in {self.progress.lived_s, before.progress.lived_s}:
            return self.progress.lived_s == before.progress.lived_s
        return (self.in_init or self.class_name in SETTLED) and self.progress.is_no_further_than(before.progress)


class Decision(Value):
    """What follows a failed attempt.

    Attributes:
        next_step: ``retry`` (the start is tried again), ``restart`` (it uses up a restart), ``replace`` (spares take
            the places of hosts, which uses up neither) or ``finish``.
        wait_s: how long to wait before it.
        message: what and why, in one line, to stand after ``saferun: ``.
        new_port: the store is to be served on another port.
        exclude: the number of a host that is left out from now on, and has to hear of it.
        reason: the same line without what follows: only why.
        retry: which of the start's retries this is, from 1; 0: none.
        is_plain: whether nothing was to be decided, and no other attempt asked for. The line may be left out.
        faulty: the hosts whose places spares take.
        is_counted: whether the ranks see one more restart (TORCHELASTIC_RESTART_COUNT).
    """

    next_step: Literal["retry", "restart", "replace", "finish"]
    wait_s: float
    message: str
    new_port: bool = False
    exclude: int | None = None
    reason: str = ""
    retry: int = 0
    is_plain: bool = False
    faulty: tuple[FaultyHost, ...] = ()
    is_counted: bool = False


class AttemptPolicy:
    """Decides what follows each failed attempt of a launch; it remembers the previous one.

    * A failed start is tried again ``start_retries`` times where its cause may pass (:data:`TRANSIENT`, or a check says
      so) and the start itself failed (``of_start``); never where another try changes nothing (:data:`PERMANENT`);
      once where the cause is unknown, if it failed within ``init_process_group``.
    * Anything else, and a start whose retries are used up, is restarted ``max_restarts`` times.
    * The same failure twice in a row ends both only where it is bound to come again, and no attempt can have made
      progress (:meth:`FailureFacts.is_bound_to_repeat`). Otherwise ``max_restarts`` is what it is for torchrun.
    * A host that caused the same failure twice in a row may be left out instead, if the others suffice.
    * A host that is itself at fault is left out where a spare can take its place, or where the others suffice.

    Args:
        max_restarts: torchrun's ``--max-restarts``.
        start_retries: how often a failed start is tried again; counted from the last start that went well.
        retry_wait_s: before the first retry, in seconds; each further one waits twice as long, up to a minute. Up to
            ``retry_wait_s`` is added to each as jitter (:meth:`take_waits`), so that jobs that failed together do not
            all come back at once.
        always: the same failure twice in a row is no reason to stop, and unknown causes have all retries.
        exclude_bad_hosts: whether hosts may be left out.
        by_progress: whether only restarts in a row are limited after which no rank had got further.
        wait: the wait in seconds by the number of the retry (the first is 1), for tests; None: by ``retry_wait_s``.
    """

    def __init__(
        self,
        max_restarts: int = 0,
        start_retries: int = 0,
        retry_wait_s: float = 1.0,
        *,
        always: bool = False,
        exclude_bad_hosts: bool = False,
        by_progress: bool = False,
        wait: Callable[[int], float] | None = None,
    ) -> None:
        self._max_restarts = max_restarts
        self._start_retries = start_retries
        self._retry_wait_s = retry_wait_s
        self._always = always
        self._exclude_bad_hosts = exclude_bad_hosts
        self._progress: StepProgress | None = None
        if by_progress:
            from saferun.supervisor.policy.step_progress import StepProgress

            self._progress = StepProgress()
        self._faults: FaultyHosts | None = None
        self.replaced = 0  # restarts that the ranks have seen, and that used up none
        self._wait = wait or self._backoff_s
        self._waits_s: tuple[float, ...] = ()
        self._retries = 0  # of this start
        self._before: FailureFacts | None = None
        self._blamed: dict[str, FailureFacts] = {}  # hosts that were left out, and what for

    def may_restart(self, restarts: int, *, leads: bool = True) -> bool:
        """Whether there are restarts left after so many; by progress, only the host that ``leads`` can tell."""
        progress = self._progress
        if progress is not None and (progress.is_known or not leads):
            return not leads or progress.has_advanced or progress.in_row <= self._max_restarts
        return restarts - self.replaced < self._max_restarts

    def decide(
        self,
        facts: FailureFacts,
        *,
        restarts: int = 0,
        hosts: int = 1,
        least_hosts: int = 1,
        spares: Sequence[str] = (),
        moves_leader: bool = False,
        needed: Container[int] = (),
        at: float = 0.0,
    ) -> Decision:
        """What follows a failed attempt. To be called once for each, in order.

        Args:
            facts: of the attempt.
            restarts: how many restarts there have been; retries of starts do not count.
            hosts: how many hosts take part.
            least_hosts: how many hosts the job needs at least.
            spares: the names of the hosts that can take the place of one.
            moves_leader: whether they can take that of the leader, too.
            needed: the hosts, beside the leader, without which the others cannot meet.
            at: when it failed, in monotonic seconds.
        """
        before, self._before = self._before, facts
        at_fault = self._at_fault(facts, at) if facts.faulty else ()
        if self._progress is not None:
            self._progress.note(facts.step)
        is_start = facts.is_start_over is False
        if not is_start:
            self._retries = 0
        if not facts.restarting_allowed:
            return _finish(facts.stop_reason or facts.message, is_plain=True)
        if at_fault:
            from saferun.supervisor.policy.faulty_hosts import may_replace

            if may_replace(at_fault, spares, moves_leader=moves_leader):
                return self._replace(facts, at_fault, spares)
        limit = self._retry_limit(facts) if is_start else 0
        is_retry = self._retries < limit
        has_next = is_retry or self.may_restart(restarts)
        if has_next and facts.unreadable and not self._always:
            return _finish(f"another attempt would not change it ({facts.message or facts.class_name})")
        kept = needed if hosts - 1 >= least_hosts else None
        exclude, note = self._excluded(facts, before, at_fault, kept) if has_next else (None, "")
        if exclude is None and not self._always and facts.is_bound_to_repeat(before):
            return _finish(f"{_same(facts)}{note}")
        if not has_next:
            return self._exhausted(facts, restarts, limit, is_start=is_start)
        reason = note if exclude is not None else f"{facts.message or facts.class_name}{note}"
        return self._again(facts, reason, exclude, restarts, limit if is_retry else 0, alone=hosts == 1)

    def _at_fault(self, facts: FailureFacts, at: float) -> tuple[FaultyHost, ...]:
        """The hosts that are not to take part in another attempt."""
        if self._faults is None:
            from saferun.supervisor.policy.faulty_hosts import FaultyHosts

            self._faults = FaultyHosts()
        return self._faults.at_fault(facts.faulty, at)

    def _replace(self, facts: FailureFacts, at_fault: Sequence[FaultyHost], spares: Sequence[str]) -> Decision:
        """Another attempt in which spares have the places of these hosts."""
        from saferun.supervisor.policy.faulty_hosts import one_living, replaced_text

        counts = facts.is_start_over is not False
        self.replaced += counts
        faulty, living = one_living(at_fault)
        reason, message = replaced_text(faulty, spares)
        return Decision("replace", 0.0, message, exclude=living, reason=reason, faulty=faulty, is_counted=counts)

    def _again(
        self, facts: FailureFacts, reason: str, exclude: int | None, restarts: int, retry_limit: int, *, alone: bool
    ) -> Decision:
        """Another attempt: a retry where ``retry_limit`` is not 0, else a restart. ``alone``: on one host."""
        wait_s = 0.0
        if retry_limit or (facts.is_start_over is False and facts.of_start and facts.is_transient):
            # A restart that follows the last retry goes on waiting.
            self._retries += 1
            wait_s = max(0.0, self._wait(self._retries))
        of = f"retry {self._retries} of {retry_limit}" if retry_limit else self._restart_text(restarts)
        when = f" in {wait_s:.1f} s" if wait_s > 0 else ""
        if not when and alone:
            when = " at once"  # several hosts have to meet first
        return Decision(
            "retry" if retry_limit else "restart",
            wait_s,
            f"starting again{when} ({of}): {reason}",
            new_port=facts.class_name == "port_in_use" and facts.port_is_free,
            exclude=exclude,
            reason=reason,
            retry=self._retries if retry_limit else 0,
            is_counted=not retry_limit,
        )

    def _restart_text(self, restarts: int) -> str:
        number, progress = restarts - self.replaced + 1, self._progress
        if progress is None or not progress.is_known:
            return f"restart {number} of {self._max_restarts}"
        return progress.restart_text(number, self._max_restarts)

    def _retry_limit(self, facts: FailureFacts) -> int:
        """How often a start that failed so is tried again."""
        if facts.is_transient:
            return self._start_retries if facts.of_start else 0
        if facts.transient_override is False or facts.class_name in PERMANENT or not facts.in_init:
            return 0
        return self._start_retries if self._always else min(1, self._start_retries)

    def _exhausted(self, facts: FailureFacts, restarts: int, limit: int, *, is_start: bool) -> Decision:
        """There is no other attempt: none is left, or none was asked for."""
        what = facts.message or facts.class_name
        restarts -= self.replaced
        progress = self._progress
        if progress is not None and progress.is_known and not is_start:
            return _finish(f"{progress.end_text} (--restart-limit progress): {what}")
        if is_start and self._retries and limit:
            counted = "the retry is" if self._retries == 1 else f"all {self._retries} retries are"
            return _finish(f"{counted} used up: {what}")
        if restarts:
            counted = "the restart is" if restarts == 1 else f"all {restarts} restarts are"
            return _finish(f"{counted} used up: {what}")
        if not is_start or (facts.is_transient and not facts.of_start):
            why = "no restarts were asked for (--max-restarts)"
        elif facts.is_transient:
            why = "no retries were asked for (--start-retries)"
        elif facts.class_name in PERMANENT:
            why = "another try would not change it"
        else:
            why = "the cause is not known to be transient"
        return _finish(f"{why}: {what}", is_plain=True)

    def _excluded(
        self,
        facts: FailureFacts,
        before: FailureFacts | None,
        at_fault: Sequence[FaultyHost],
        needed: Container[int] | None,  # None: all are
    ) -> tuple[int | None, str]:
        """The number of a host to be left out, and why; or None and, to follow another text, why not."""
        fault = next((fault for fault in at_fault if not fault.is_lost), None)
        if fault is not None and needed is not None and fault.host > 0 and fault.host not in needed:
            return fault.host, f"without {fault.label}: {fault.why}"
        label = facts.host_label
        if before is None or facts.host is None or not label or not self._exclude_bad_hosts:
            return None, ""
        again = facts.class_name == before.class_name and label == before.host_label
        if not again:
            return None, ""
        if facts.host == 0:
            return None, f"; {label} leads the job and cannot be left out"
        if any(facts.fingerprint.is_alike(blamed.fingerprint) for blamed in self._blamed.values()):
            # One host after the other would be left out, and none of them is at fault.
            return None, f", also without {', '.join(self._blamed)}"
        if needed is None or facts.host in needed:
            return None, f"; the job needs {label}, which cannot be left out"
        self._blamed[label] = facts
        return facts.host, f"without {label}, which caused the same failure twice ({facts.fingerprint.description})"

    def take_waits(self, waits_s: Sequence[float]) -> None:
        """Wait so long before the first retry, the second one, and so on: as ``policy.backoff`` has it."""
        self._waits_s = tuple(waits_s)

    def _backoff_s(self, retry: int) -> float:
        """The wait before a retry, from 1; without a schedule, the wait without its jitter."""
        if retry <= len(self._waits_s):
            return self._waits_s[retry - 1]
        first_s = self._retry_wait_s
        return min(first_s * 2.0 ** min(retry - 1, _DOUBLED_AT_MOST), max(first_s, LONGEST_WAIT_S))


def _finish(reason: str, *, is_plain: bool = False) -> Decision:
    return Decision("finish", 0.0, f"not started again: {reason}", reason=reason, is_plain=is_plain)


def _same(facts: FailureFacts) -> str:
    return f"the same failure twice in a row ({facts.fingerprint.description})"
