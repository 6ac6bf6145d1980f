"""What is known about a hang or a failure of a job. Values only; pure. Never loaded at start."""

from __future__ import annotations

from saferun.evidence.call_evidence import RankCalls
from saferun.evidence.gpu_evidence import NcclOutlier, RankGpu
from saferun.evidence.wait_evidence import JobPorts, ThreadWait
from saferun.model import RankEnd, Value


class Frame(Value):
    """One call. ``line`` is 0 where unknown; ``file`` is a library's path for native frames."""

    function: str
    file: str
    line: int
    native: bool = False


class ThreadStack(Value):
    """One thread's stack, innermost frame first. ``tid`` is the kernel's number, 0 where unknown."""

    name: str
    tid: int
    is_main: bool
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]


class StackDump(Value):
    """The stacks of one process.

    ``rank`` is the rank that it is, or descends from. ``tool`` took them: ``py-spy``, ``py-spy --native``,
    ``faulthandler``, ``worker server``, ``pystack``, ``gdb``. ``failure`` is why there are none.
    """

    rank: int
    pid: int
    is_rank: bool
    name: str
    tool: str
    threads: tuple[ThreadStack, ...]
    failure: str = ""


class ProcessSnapshot(Value):
    """One process as /proc shows it.

    Attributes:
        rank: the rank that it is, or descends from.
        pid: its number.
        ppid: its parent's.
        is_rank: whether it is the rank itself.
        name: its ``comm``.
        command: its command line, shortened, secrets replaced.
        state: the letter of proc(5): ``R S D T t Z``; ``?`` where it is gone.
        wchan: the kernel function that it sleeps in; empty where it does not, or may not be read.
        syscall: name of the system call that its main thread is in; empty where it is not known.
        threads: how many it has.
        tracer_pid: the process that traces it; 0: none.
        core_dumping, rss_bytes: whether the kernel is writing its core; its resident memory.
        waits_on: what the system call waits for: ``the FIFO /tmp/x``; empty where it is not known.
        cpu_s: CPU time of all its threads.
        waits: who could end the waits of its threads, the main thread's first; empty where nothing is known.
        unreadable: whether neither its I/O nor its system call nor its kernel function may be read.
    """

    rank: int
    pid: int
    ppid: int
    is_rank: bool
    name: str
    command: str
    state: str
    wchan: str
    syscall: str
    threads: int
    tracer_pid: int
    core_dumping: bool
    rss_bytes: int
    waits_on: str
    cpu_s: float
    waits: tuple[ThreadWait, ...] = ()
    unreadable: bool = False


class CollectiveCall(Value):
    """One entry of the Flight Recorder, or all members of a batch of sends and receives to one peer.

    Attributes:
        seq: its number: of collectives and of calls between two ranks each count for themselves.
        op: ``all_reduce``; of a call between two ranks ``send 0->1``, by their places in the group.
        sizes: of the inputs, as text: ``[[1024, 1024]]``.
        retired: whether it is over.
        is_p2p: whether it is between two ranks.
        created_ns: when it was called, since the epoch.
        frames: where it was called, where that is known.
        output_sizes: like ``sizes``.
        dtypes: of inputs and outputs: ``Float -> Float``; empty where unknown.
        started: whether its kernel is known to have begun; hardly any job has that recorded.
        failed: whether torch has given it up: it timed out or failed.
        order: its place among all calls of the process; -1: unknown.
        nth: of a send or receive, its place among those to or from that peer, from 1; -1: unknown.
        elements: how many are handed in, of all tensors together, where these are more than a few; else -1.
        output_elements: like ``elements``.
    """

    seq: int
    op: str
    sizes: str
    retired: bool
    is_p2p: bool
    created_ns: int
    frames: tuple[Frame, ...] = ()
    output_sizes: str = ""
    dtypes: str = ""
    started: bool = False
    failed: bool = False
    order: int = -1
    nth: int = -1
    elements: int = -1
    output_elements: int = -1


class GroupProgress(Value):
    """How far one rank has come in one process group. Sequence numbers are -1 where nothing happened yet.

    ``calls`` are the newest entries and the oldest of those that are not over, oldest first; ``ranks`` the group's
    members where known; ``number`` is the rank's own number of the group, in the order in which it made them.
    ``timeout_ms``: the longest timeout of the calls that are not over; -1: unknown.
    """

    group: str
    description: str
    ranks: tuple[int, ...]
    enqueued: int
    started: int
    completed: int
    calls: tuple[CollectiveCall, ...]
    number: int = -1
    timeout_ms: int = -1


class RankCollectives(Value):
    """The Flight Recorder of one rank.

    ``failure`` is the reason in one line where there is none, ``incomplete`` what is missing in it and why: a GPU that
    has failed, a process that is gone and whose last dump this is. ``has_failed``: whether it answered with an error,
    as where the GPU has failed; one that only does not answer may be slow.
    """

    rank: int
    groups: tuple[GroupProgress, ...]
    failure: str = ""
    incomplete: str = ""
    has_failed: bool = False


class CoreDump(Value):
    """What became of the core of one dead process.

    ``path`` is empty where there is none to be read, and then ``failure`` is why. ``threads`` has the crashing thread
    first. ``sender_pid`` is who sent the signal (0: the kernel, or unknown). ``address`` the faulting address as text.
    """

    rank: int
    pid: int
    signum: int
    path: str
    size_bytes: int
    kept: bool
    tool: str
    threads: tuple[ThreadStack, ...]
    sender_pid: int = 0
    address: str = ""
    failure: str = ""


class OomKill(Value):
    """The kernel's OOM killer was at work while the ranks ran.

    ``scope``: ``cgroup`` or ``host``. ``limit_bytes`` and ``rss_bytes`` (of the killed process) are 0 where unknown.
    ``pids``: the killed ones as the kernel log has them. ``source``: where it was read. ``host``: the label
    of the host where it was; empty: this one.
    """

    scope: str
    limit_bytes: int
    rss_bytes: int
    pids: tuple[int, ...]
    kills: int
    source: str
    host: str = ""


class StuckLink(Value):
    """A connection between hosts on which a rank has sent what the other end does not acknowledge.

    Attributes:
        rank: whose it is.
        local: its own address, ``10.0.0.1:40123``.
        remote: the other end's.
        state: TCP's, ``ESTABLISHED``, ``SYN_SENT``.
        unsent_bytes: how much waits in the kernel.
        retries: how often the kernel has sent it again.
    """

    rank: int
    local: str
    remote: str
    state: str
    unsent_bytes: int
    retries: int


class CaptureNote(Value):
    """What became of one capture. ``rank`` is -1 and ``pid`` 0 for the host. ``path`` is its file, or empty.

    ``host`` is the label of the host where it was taken; empty: this one.
    """

    capture: str
    rank: int
    pid: int
    path: str
    elapsed_s: float
    failure: str = ""
    host: str = ""


class Capture(Value):
    """Everything that was seen at one moment."""

    processes: tuple[ProcessSnapshot, ...] = ()
    stacks: tuple[StackDump, ...] = ()
    collectives: tuple[RankCollectives, ...] = ()
    host_lines: tuple[str, ...] = ()
    """The state of GPUs and lines of the kernel log, ready to be shown."""
    notes: tuple[CaptureNote, ...] = ()
    timed_out: tuple[str, ...] = ()
    """What was not ready when the budget was spent, named."""
    elapsed_s: float = 0.0
    links: tuple[StuckLink, ...] = ()
    gpus: tuple[RankGpu, ...] = ()
    """The GPUs that the living ranks had."""
    kernel_lines: tuple[str, ...] = ()
    """Of the kernel log, since the start."""
    nccl: tuple[NcclOutlier, ...] = ()
    ports: tuple[JobPorts, ...] = ()
    """Of each saferun's ranks, where they are known."""
    calls: tuple[RankCalls, ...] = ()


class HangVerdict(Value):
    """Nothing moves any more.

    Attributes:
        kind: ``quiescent`` (every process of every rank is quiet), ``stuck_collective``, ``spinning`` (one busy-loops
            while the others wait), ``stopped`` (state T), ``uninterruptible`` (D), ``heartbeat``, ``overdue``.
        ranks: the ranks that it is about: the stopped, the spinning, …; all of them for ``quiescent``.
        lasted_s: how long it has lasted.
        certain: whether it may be acted upon; a suspected hang is only reported.
        busy: ranks that use their processor, in an NCCL job often those that wait.
        overdue: the phase that takes longer than its script has said (``saferun.expect``), and the core that is being
            written, as text; empty: there is none.
    """

    kind: str
    ranks: tuple[int, ...]
    lasted_s: float
    certain: bool
    busy: tuple[int, ...] = ()
    overdue: str = ""


class RankOutput(Value):
    """What a rank left behind: last lines of stderr and stdout, and the error file of ``@record``.

    ``rank`` is -1 where only the local rank is known. ``raised``: it had printed a traceback last when saferun stopped
    it. ``last_step``: of ``saferun.step``; ``failure``: of its failure record; ``traceback``: of that too, where it has
    printed none. ``tools``: the command lines of those that it ran under (``--wrap``), the outermost first.
    ``uncaught_time``: when it had printed the exception that nothing handled in its main thread, since the epoch; 0.0:
    unknown.
    """

    local_rank: int
    last_lines: tuple[str, ...]
    stderr_path: str
    error_message: str
    error_time: float
    last_stdout_lines: tuple[str, ...] = ()
    rank: int = -1
    raised: bool = False
    last_step: str = ""
    failure: tuple[str, ...] = ()
    traceback: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    uncaught_time: float = 0.0


class HostView(Value):
    """One host of several, as the host that judges sees it.

    Attributes:
        host, label: its number in the job, and the name under which the job knows it.
        ranks: its ranks; the place in it is not the local rank where some are missing.
        addresses: its own addresses, as far as they are known.
        cwd, script: the working directory of its ranks, and what they run.
        has_evidence: whether its evidence has come.
        lost_reason: ``gone`` (it is up, its saferun is not), ``unreachable``, ``cut`` (it is up, its connection to the
            store is not), ``frozen`` (its saferun makes no progress), ``unknown``; empty: it is not lost.
        lost_message: the same as a sentence.
        supervisor_pids: of its saferun processes. ``stop_signum``: the signal to stop that one of them got.
        oom, kernel_lines: what the OOM killer did there, and lines of its kernel log.
        abandoned_ranks: its ranks that could not be killed.
        nics: what has become of interfaces that worked when the hosts met: ``eth1 has no carrier``.
    """

    host: int
    label: str
    ranks: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    cwd: str = ""
    script: str = ""
    has_evidence: bool = False
    lost_reason: str = ""
    lost_message: str = ""
    supervisor_pids: tuple[int, ...] = ()
    oom: OomKill | None = None
    kernel_lines: tuple[str, ...] = ()
    abandoned_ranks: tuple[int, ...] = ()
    stop_signum: int | None = None
    nics: tuple[str, ...] = ()


class AbortReason(Value):
    """Why one host stopped the job on all hosts.

    Attributes:
        reason: one of ``model.AbortKind``, or what another release of saferun has beside these.
        label: the host that it is about where known (the lost one for ``store_lost``), else the one that reported it.
        message: as that host reported it; of a signal its name, of a parent what it was, of a request who asked.
        rank: the rank that it is about; None where it is about none.
        lost_reason: of ``store_lost``, as in :class:`HostView`. ``hint``: of ``start``: what to do, as that host says.
    """

    reason: str
    label: str = ""
    message: str = ""
    rank: int | None = None
    lost_reason: str = ""
    hint: str = ""


class Evidence(Value):
    """All that is known of an attempt that failed or hangs, when it is diagnosed.

    ``started_at`` is in monotonic seconds. ``ranks`` maps local rank (the index) to rank. ``capture`` was taken before
    any rank was signalled. ``hang`` is the verdict that led to it, where the job hung. ``kernel_lines`` are lines of
    the kernel log since the start (Xid, OOM). ``supervisor_pid`` distinguishes our own signals from others,
    ``store_port`` connections to the store. ``is_checked``: ``error`` is what the checks of all hosts found before the
    ranks. ``start`` is how far the start had come: ``before`` (no rank had come to ``init_process_group``), ``inside``
    (not all had got through it), ``through``; empty: not known. ``started_time``: the start, since the epoch. Of
    several hosts: ``hosts`` are all of them, ``host`` judges, and times are its own. What is one host's
    (``supervisor_pid``, ``oom``, ``abandoned``, ``nics``, ``bridges`` of containers) is in ``hosts``; ``kernel_lines``
    are all hosts' with labels. ``abort_reason`` made all hosts stop.
    """

    host: str
    started_at: float
    ends: tuple[RankEnd, ...]
    outputs: tuple[RankOutput, ...]
    abandoned: tuple[int, ...]
    stop_signum: int | None
    error: str = ""
    error_hint: str = ""
    ranks: tuple[int, ...] = ()
    capture: Capture = Capture()
    hang: HangVerdict | None = None
    cores: tuple[CoreDump, ...] = ()
    oom: OomKill | None = None
    kernel_lines: tuple[str, ...] = ()
    supervisor_pid: int = 0
    script: str = ""
    cwd: str = ""
    store_port: int = 0
    hosts: tuple[HostView, ...] = ()
    started_time: float = 0.0
    world_size: int = 0
    abort_reason: AbortReason | None = None
    start: str = ""
    is_checked: bool = False
    nics: tuple[str, ...] = ()
    bridges: tuple[str, ...] = ()

    @property
    def outputs_by_rank(self) -> dict[int, RankOutput]:
        """What each rank left behind, by rank."""
        ranks = {end.local_rank: end.rank for end in self.ends}
        known = {}
        for index, output in enumerate(self.outputs):
            rank = output.rank if output.rank >= 0 else ranks.get(output.local_rank, -1)
            if rank < 0:
                rank = self.ranks[index] if index < len(self.ranks) else output.local_rank
            known[rank] = output
        return known
