"""What follows from the evidence: the diagnosis, with its parts. Values only; pure. Never loaded at start."""

from __future__ import annotations

from saferun.evidence.job_evidence import CoreDump, Frame, HostView, RankOutput
from saferun.model import RankEnd, Value


class Cause(Value):
    """Why it happened.

    Attributes:
        class_name: the cause class, an identifier that reports keep: ``cuda_out_of_memory``, ``segmentation_fault``,
            ``hang_lock``, ``unknown`` …
        message: the cause in short, to stand after ``rank 3 (node1): ``.
        ranks: the ranks that are the cause; empty where no rank is.
        proof: the line that proves it, of output or of a report; empty where the exit status is all.
        advice: one line: what to do.
        location: the last frame in the user's code, ``train.py:52 in step``; empty where unknown.
    """

    class_name: str
    message: str
    ranks: tuple[int, ...]
    proof: str
    advice: str
    location: str = ""


class StackNode(Value):
    """One node of the merged stacks: a call, the ranks whose stacks run through it, and the calls below it.

    ``ranks`` are sorted. ``processes`` counts processes where descendants of ranks are merged too.
    """

    frame: Frame
    ranks: tuple[int, ...]
    children: tuple[StackNode, ...]


class WaitGroup(Value):
    """Ranks that wait in the same thing.

    ``kind``: ``collective data_loading file_io compile lock sleep subprocess user_code dead stopped unanswering gpu
    interpreter uninterruptible network spinning debugger``. ``detail`` in words: ``all_reduce``, ``a connection to
    10.0.0.2:29500``.
    ``location``: the frame in the user's code, ``train.py:52 in step``.
    """

    kind: str
    detail: str
    ranks: tuple[int, ...]
    location: str


class Traceback(Value):
    """A traceback that several ranks printed alike."""

    ranks: tuple[int, ...]
    lines: tuple[str, ...]


class LostPeer(Value):
    """How ranks failed because another one had. ``call``: ``all_reduce``; empty where it is unknown."""

    ranks: tuple[int, ...]
    message: str
    call: str
    location: str


class Diagnosis(Value):
    """The cause of a failed or hanging attempt.

    Attributes:
        headline: the cause in one line.
        first_failure: the rank that failed first (None where no rank did, as in a hang).
        output: what that rank left behind.
        also_failed, stopped: those that failed by themselves after it, and those that saferun stopped because of it.
        abandoned: local ranks that could not be killed.
        hint: advice that the error itself came with.
        cause: why.
        victims: ranks that failed only because another one did.
        groups, tree: who waits in what, and the merged stacks of the ranks that lived.
        tracebacks: what failed ranks printed, each once.
        core: the core of the rank that is the cause.
        findings: further findings worth a line each: mismatched collectives, what was not ready, kernel messages.
        abandoned_ranks: ranks that could not be killed, where there are several hosts; ``abandoned`` is empty there.
        hosts: the hosts of the job, where there are several.
        start: how far the start had come, as in :class:`~saferun.evidence.job_evidence.Evidence`.
        lost_peers: how the victims failed, as far as they printed it.
    """

    headline: str
    first_failure: RankEnd | None
    output: RankOutput | None
    also_failed: tuple[RankEnd, ...]
    stopped: tuple[int, ...]
    abandoned: tuple[int, ...]
    hint: str = ""
    cause: Cause | None = None
    victims: tuple[int, ...] = ()
    groups: tuple[WaitGroup, ...] = ()
    tree: tuple[StackNode, ...] = ()
    tracebacks: tuple[Traceback, ...] = ()
    core: CoreDump | None = None
    findings: tuple[str, ...] = ()
    abandoned_ranks: tuple[int, ...] = ()
    hosts: tuple[HostView, ...] = ()
    start: str = ""

    @property
    def advice(self) -> str:
        """What to do: as the error itself says, else by the cause; empty: nothing is known."""
        return self.hint or (self.cause.advice if self.cause is not None else "")

    lost_peers: tuple[LostPeer, ...] = ()
