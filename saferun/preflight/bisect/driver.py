"""Trials over all hosts of a job: real collectives on ever smaller sets, until what makes them fail is found.

The host that leads searches (``isolation``), tells each trial to all, and collects how their members did. Every host's
head runs its share in a process of its own (``trial_run``).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.cluster.messages import MOST_HOSTS
from saferun.errors import printable
from saferun.linux.poller import Poller
from saferun.preflight.bisect import Group, Isolation, Member, Outcome, Trial, check_results
from saferun.preflight.bisect.client import IMPORT_S, MARGIN_S, TrialPlace, TrialRun
from saferun.text.decoding import MALFORMED, loads, measure, number, words

if TYPE_CHECKING:
    from saferun.cluster.job import Job
    from saferun.cluster.job_values import EvidenceChunk
    from saferun.model import JsonObject
    from saferun.preflight.results import CheckResult

_COLLECT_S = 10.0
_PREPARED = "trial-0"
_MOST_OUTCOMES = 4096
_MOST_RANKS = 1 << 16
_MOST_MEMBERS = 1 << 20
_LONGEST_TRIAL_S = 86400.0
_LONGEST_WORDS = 500
_KINDS = ("ok", "timeout", "error")


class TrialSearch:
    """This host's part in the search.

    Args:
        place: where the members meet.
        environ: that of the ranks.
        poller: the loop's.
        hosts: the local ranks of every host, on the host that leads; else empty.
        labels: the hosts' names.
        interfaces: to be tried one after the other; none: what the hosts use by themselves.
        timeout_s: of each trial.
        job: the other hosts; None: there are none.
        say: takes one line for the user about what is going on.
        on_over: told what was found, on the host that leads.
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
        job: Job | None,
        say: Callable[[str], None],
        on_over: Callable[[tuple[CheckResult, ...]], None],
    ) -> None:
        self._job = job
        self._host = place.host
        self._say = say
        self._on_over = on_over
        part = "GPU" if place.backend == "nccl" else "rank"
        self._isolation = Isolation(hosts, labels, interfaces, part=part, deadline_s=timeout_s) if hosts else None
        self._run = TrialRun(place, environ, poller, on_ready=self._on_ready, on_done=self._on_done)
        self._dying: set[int] = set()
        self._outcomes: list[Outcome] = []
        self._waits_for_own = False
        self._waits_for_others = False
        self._is_prepared = False
        self._is_over = False

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return self._run.deadline

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._run.deadline is not None and self._run.deadline <= now:
            self._expect_end()
            self._run.expire()

    @property
    def pids(self) -> set[int]:
        """Processes of the search's own."""
        return self._dying | ({self._run.pid} if self._run.pid is not None else set())

    def on_exit(self, pid: int, words: str) -> bool:
        """A child has been reaped. Whether it was one of the search's."""
        if pid in self._dying:
            self._dying.discard(pid)
            return True
        if pid == self._run.pid:
            self._run.on_exit(words)
            return True
        return False

    def close(self) -> None:
        """End the process and its members."""
        self._is_over = True
        self._expect_end()
        self._run.close()

    def _expect_end(self) -> None:
        if self._run.pid is not None:
            self._dying.add(self._run.pid)

    def _on_ready(self, words: str) -> None:
        """Torch is imported here, or cannot be: which the first trial shows."""
        if self._is_over:
            return
        if words:
            self._say(f"saferun: {printable(words)}")
        if self._is_prepared:
            return
        self._is_prepared = True
        if self._isolation is not None:
            self._waits_for_own = False
            self._begin_trials()
        elif self._job is not None:
            self._job.share(_PREPARED, "")

    # ----------------------------------------------------------------------------------------------------------------
    # The host that leads

    def begin(self, hosts: Collection[int]) -> None:
        """Search; ``on_over`` follows. The first trial waits until torch is imported on all ``hosts``."""
        self._waits_for_own = True
        self._waits_for_others = self._job is not None
        if self._job is not None:
            self._job.broadcast_preflight({"trial": {}})
            self._job.collect(_PREPARED, IMPORT_S + _COLLECT_S, self._others_prepared, hosts=hosts)
        self._run.prepare(time.monotonic())

    def _others_prepared(self, _pieces: list[EvidenceChunk]) -> None:
        self._waits_for_others = False
        self._begin_trials()

    def _begin_trials(self) -> None:
        if not self._waits_for_own and not self._waits_for_others:
            self._next()

    def _next(self) -> None:
        trial = self._isolation.next_trial() if self._isolation is not None else None
        if self._isolation is None or trial is None:
            self._is_over = True
            self._on_over(check_results(self._isolation.finding()) if self._isolation is not None else ())
            return
        self._say(f"saferun: trial {trial.number:d}: {printable(trial.name)}")
        self._outcomes = []
        hosts = {member.host for group in trial.groups for member in group}
        self._waits_for_own = True
        self._waits_for_others = self._job is not None
        if self._job is not None:
            self._job.broadcast_preflight({"trial": encode_trial(trial)})
            timeout_s = trial.deadline_s + MARGIN_S + IMPORT_S + _COLLECT_S

            def on_pieces(pieces: list[EvidenceChunk]) -> None:
                for piece in pieces:
                    self._outcomes += decode_outcomes(piece.evidence, piece.host)
                self._waits_for_others = False
                self._look(trial)

            self._job.collect(f"trial-{trial.number}", timeout_s, on_pieces, hosts=hosts - {self._host})
        self._run.start(trial, time.monotonic())

    def _look(self, trial: Trial) -> None:
        if self._isolation is None or self._waits_for_own or self._waits_for_others or self._is_over:
            return
        self._isolation.feed(trial, self._outcomes)
        self._next()

    # ----------------------------------------------------------------------------------------------------------------
    # Every host

    def hear(self, message: JsonObject) -> None:
        """The host that leads has told a trial to all."""
        if self._isolation is not None:
            return  # it runs it already
        if not message["trial"]:
            self._run.prepare(time.monotonic())
            return
        trial = decode_trial(message["trial"])
        if trial is not None and any(member.host == self._host for group in trial.groups for member in group):
            self._run.start(trial, time.monotonic())

    def _on_done(self, trial: Trial, outcomes: tuple[Outcome, ...]) -> None:
        if self._is_over:
            return
        if self._isolation is not None:
            self._outcomes += outcomes
            self._waits_for_own = False
            self._look(trial)
        elif self._job is not None:
            self._job.share(f"trial-{trial.number}", encode_outcomes(outcomes))


# -------------------------------------------------------------------------------------------------------------- as JSON


def encode_trial(trial: Trial) -> JsonObject:
    """A trial as others are told of it; members in a row take one entry: host, first local rank, how many."""
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
    """The trial that another host tells; None where it tells none."""
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
            words(raw["name"], _LONGEST_WORDS),  # type: ignore[index]
            tuple(groups),
            words(raw["interface"], _LONGEST_WORDS),  # type: ignore[index]
            measure(raw["deadline_s"], 0.0, _LONGEST_TRIAL_S),  # type: ignore[index]
        )
    except MALFORMED:
        return None


def encode_outcomes(outcomes: Sequence[Outcome]) -> str:
    """How the members of a host did."""
    return json.dumps([[one.member.local_rank, one.kind, one.words, one.where] for one in outcomes])


def decode_outcomes(text: str, host: int) -> list[Outcome]:
    """What a host says of its own members, whatever else it says."""
    found = []
    try:
        for local_rank, kind, said, where in loads(text)[:_MOST_OUTCOMES]:
            if kind in _KINDS:
                member = Member(host, number(local_rank, 0, _MOST_RANKS))
                found.append(Outcome(member, kind, words(said, _LONGEST_WORDS), words(where, _LONGEST_WORDS)))
    except MALFORMED:
        return found
    return found
