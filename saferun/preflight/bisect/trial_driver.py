"""Trials over all hosts of a job: real collectives on ever smaller sets, until what makes them fail is found.

The leader searches, broadcasts each trial, and collects how its members did. Every host runs its share in a process of
its own (``bisect/client.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.cluster.messages import MOST_HOSTS
from saferun.errors import printable
from saferun.linux.poller import Poller
from saferun.preflight.bisect import Bisection, Group, Member, Trial, TrialResult, check_results
from saferun.preflight.bisect.trial_process import IMPORT_S, MARGIN_S, TrialPlace, TrialRun
from saferun.text.decoding import MALFORMED, display_text, loads, measure, number

if TYPE_CHECKING:
    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.job_values import EvidenceChunk
    from saferun.model import JsonObject
    from saferun.preflight.results import CheckResult

_COLLECT_S = 10.0
_PREPARED = "trial-0"
_MOST_OUTCOMES = 4096
_MOST_RANKS = 1 << 16
_MOST_MEMBERS = 1 << 20
_LONGEST_TRIAL_S = 86400.0
_LONGEST_MESSAGE = 500
_KINDS = ("ok", "timeout", "error")


class TrialShare(TrialRun):
    """This host's share in the trials that the leader asks for.

    Args:
        place: where the members meet.
        environ: that of the ranks.
        poller: the loop's.
        job: the hosts of the job.
        print_message: takes one line for the user about what is going on.
    """

    def __init__(
        self,
        place: TrialPlace,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        job: JobPort,
        print_message: Callable[[str], None],
    ) -> None:
        super().__init__(place, environ, poller, on_ready=self._torch_imported, on_done=self._trial_done)
        self._job = job
        self._host = place.host
        self._print_message = print_message
        self._is_prepared = False
        self._is_over = False

    def hear(self, message: JsonObject) -> None:
        """The leader has broadcast a trial; an empty one says that they are about to begin."""
        trial = decode_trial(message) if message else None
        if not message:
            self.prepare()
        elif trial is not None and any(member.host == self._host for group in trial.groups for member in group):
            self.start(trial)

    def close(self) -> None:
        """End the process and its members, and answer no more."""
        self._is_over = True
        super().close()

    def _torch_imported(self, failure: str) -> None:
        """Torch is imported here, or cannot be: which the first trial shows."""
        if self._is_over:
            return
        if failure:
            self._print_message(f"saferun: {printable(failure)}")
        if not self._is_prepared:
            self._is_prepared = True
            self._answer(_PREPARED, ())

    def _trial_done(self, trial: Trial, outcomes: tuple[TrialResult, ...]) -> None:
        if not self._is_over:
            self._answer(_name(trial), outcomes)

    def _answer(self, name: str, outcomes: Sequence[TrialResult]) -> None:
        self._job.share(name, encode_outcomes(outcomes))


class TrialSearch(TrialShare):
    """The leader's search, with its own share.

    Args:
        place: where the members meet.
        environ: that of the ranks.
        poller: the loop's.
        hosts: the local ranks of every host.
        labels: the hosts' names.
        interfaces: to be tried one after the other; none: what the hosts use by themselves.
        timeout_s: of each trial.
        job: the hosts of the job.
        print_message: takes one line for the user about what is going on.
        on_over: takes what was found.
    """

    def __init__(
        self,
        place: TrialPlace,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        hosts: Mapping[int, Sequence[int]],
        labels: Mapping[int, str],
        interfaces: Sequence[str],
        timeout_s: float,
        job: JobPort,
        print_message: Callable[[str], None],
        on_over: Callable[[tuple[CheckResult, ...]], None],
    ) -> None:
        super().__init__(place, environ, poller, job=job, print_message=print_message)
        part = "GPU" if place.backend == "nccl" else "rank"
        self._bisection = Bisection(hosts, labels, interfaces, part=part, deadline_s=timeout_s)
        self._on_over = on_over
        self._tried: Trial | None = None
        self._collected: list[TrialResult] = []
        self._waits_for_own = False
        self._waits_for_others = False

    def begin(self, hosts: Collection[int]) -> None:
        """Search; ``on_over`` follows. The first trial waits until torch is imported on all ``hosts``."""
        self._ask({}, _PREPARED, IMPORT_S + _COLLECT_S, hosts)
        self.prepare()

    def _next(self) -> None:
        trial = self._tried = self._bisection.next_trial()
        if trial is None:
            self._is_over = True
            self._on_over(check_results(self._bisection.finding()))
            return
        self._print_message(f"saferun: trial {trial.number:d}: {printable(trial.name)}")
        hosts = {member.host for group in trial.groups for member in group}
        timeout_s = trial.deadline_s + MARGIN_S + IMPORT_S + _COLLECT_S
        self._ask(encode_trial(trial), _name(trial), timeout_s, hosts - {self._host})
        self.start(trial)

    def _ask(self, message: JsonObject, name: str, timeout_s: float, hosts: Collection[int]) -> None:
        """Let all hosts know; it goes on when this one and those that take part have answered."""
        self._collected = []
        self._waits_for_own = self._waits_for_others = True
        self._job.broadcast_preflight({"trial": message})
        self._job.collect(name, timeout_s, self._others_answered, hosts=hosts)

    def _others_answered(self, chunks: list[EvidenceChunk]) -> None:
        for chunk in chunks:
            self._collected += decode_outcomes(chunk.evidence, chunk.host)
        self._waits_for_others = False
        self._go_on()

    def _answer(self, name: str, outcomes: Sequence[TrialResult]) -> None:
        del name
        self._collected += outcomes
        self._waits_for_own = False
        self._go_on()

    def _go_on(self) -> None:
        if self._waits_for_own or self._waits_for_others or self._is_over:
            return
        if self._tried is not None:
            self._bisection.feed(self._tried, self._collected)
        self._next()


def _name(trial: Trial) -> str:
    """What the answers to a trial are called."""
    return f"trial-{trial.number}"


# -------------------------------------------------------------------------------------------------------------- as JSON


def encode_trial(trial: Trial) -> JsonObject:
    """A trial as it is broadcast; members in a row take one entry: host, first local rank, how many."""
    groups = []
    for group in trial.groups:
        runs: list[list[int]] = []
        for host, local_rank in group:
            if runs and runs[-1][0] == host and sum(runs[-1][1:]) == local_rank:
                runs[-1][2] += 1
            else:
                runs.append([host, local_rank, 1])
        groups.append(runs)
    return {**trial._asdict(), "groups": groups}


def decode_trial(raw: object) -> Trial | None:
    """The trial that the leader has broadcast; None where it is malformed."""
    try:
        groups: list[Group] = []
        room = _MOST_MEMBERS
        for runs in raw["groups"]:  # type: ignore[index]
            counted = [
                (number(host, 0, MOST_HOSTS), number(first, 0, _MOST_RANKS), number(count, 0, _MOST_OUTCOMES))
                for host, first, count in runs
            ]
            room -= sum(count for _, _, count in counted)
            if room < 0:
                return None
            groups.append(tuple(Member(host, first + i) for host, first, count in counted for i in range(count)))
        return Trial(
            number(raw["number"]),  # type: ignore[index]
            display_text(raw["name"], _LONGEST_MESSAGE),  # type: ignore[index]
            tuple(groups),
            display_text(raw["interface"], _LONGEST_MESSAGE),  # type: ignore[index]
            measure(raw["deadline_s"], 0.0, _LONGEST_TRIAL_S),  # type: ignore[index]
        )
    except MALFORMED:
        return None


def encode_outcomes(outcomes: Sequence[TrialResult]) -> str:
    """How the members of a host did."""
    return json.dumps([[one.member.local_rank, one.kind, one.message, one.where] for one in outcomes])


def decode_outcomes(text: str, host: int) -> list[TrialResult]:
    """What a host says of its own members, whatever else it says."""
    found = []
    try:
        for local_rank, kind, details, where in loads(text)[:_MOST_OUTCOMES]:
            if kind in _KINDS:
                member = Member(host, number(local_rank, 0, _MOST_RANKS))
                found.append(
                    TrialResult(
                        member, kind, display_text(details, _LONGEST_MESSAGE), display_text(where, _LONGEST_MESSAGE)
                    )
                )
    except MALFORMED:
        return found
    return found
