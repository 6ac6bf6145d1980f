"""What is tried to find a bad part, what comes of it, and what follows. Pure."""

from __future__ import annotations

from saferun.model import Value

LOOPBACK = "lo"


class Member(Value):
    """One taker in a trial: a host's number in the job, and a local rank, which is a GPU where there are GPUs."""

    host: int
    local_rank: int


Group = tuple[Member, ...]
"""Members that communicate with each other; the place in it is the rank."""


class Trial(Value):
    """Disjoint groups that each run a barrier and an all_reduce, all at the same time.

    Attributes:
        number: from 1; no two trials of a search have the same.
        name: what it tries, for people: ``halves of 8 hosts``.
        groups: who is with whom.
        interface: that all members use; empty: what they would use by themselves.
        deadline_s: after which whoever is not done has failed.
        compute_s: for how long each member multiplies matrices before that; 0: not at all.
    """

    number: int
    name: str
    groups: tuple[Group, ...]
    interface: str
    deadline_s: float
    compute_s: float = 0.0


class TrialResult(Value):
    """How one member did.

    Attributes:
        member: who.
        kind: ``ok``, ``timeout`` or ``error``.
        message: what it said: ``Unable to find address for: ib0``; empty where there is nothing to say.
        where: where it stood when it ended: ``in all_reduce of 4 MiB``.
    """

    member: Member
    kind: str
    message: str = ""
    where: str = ""


class FailingSet(Value):
    """A set of parts that fails, of which no smaller one is known to fail.

    Attributes:
        kind: ``gpu`` (alone), ``gpus`` (several of one host, together), ``host`` (alone, over loopback too),
            ``interface`` (the host alone works over loopback and not over it), ``network`` (the host alone works, and
            fails with others), ``pair`` (of hosts, each of which works with others), ``parted`` (two parts of the job
            that do not reach each other), ``no_pair`` (no two work together), ``together`` (nothing smaller than all
            of these fails).
        members: its members.
        interface: over which it failed; ``lo`` where the network has nothing to do with it.
        message: one sentence, without a full stop, that does not begin with the name of ``host``.
        hint: what to do about it.
        host: the name of the host that it is about; empty: it is about several.
        failed, of: how often it failed in how many tries.
    """

    kind: str
    members: Group
    interface: str
    message: str
    hint: str
    host: str = ""
    failed: int = 1
    of: int = 1

    @property
    def sometimes(self) -> bool:
        """Whether it worked at other times."""
        return self.failed < self.of

    @property
    def line(self) -> str:
        """The sentence, with the host's name before it."""
        return f"{self.host}: {self.message}" if self.host else self.message


class BisectFinding(Value):
    """What the trials so far say.

    Attributes:
        verdict: ``ok``, ``fail``, ``sometimes`` (there are failures, and none of them came every time), or ``unknown``
            (nothing was tried yet).
        message: one line that sums it up.
        hint: what to do first; empty where there is nothing to do.
        sets: the smallest failing sets.
        trials: how many there were.
        is_complete: whether the search came to its end.
    """

    verdict: str
    message: str
    hint: str
    sets: tuple[FailingSet, ...]
    trials: int
    is_complete: bool
