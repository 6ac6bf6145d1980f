"""Which hosts, GPUs and interfaces to try together, so that the smallest sets that fail are found. Pure.

``Bisection`` says what to try next and gets the result. It begins with all, and is done where that works.
Otherwise: each host alone over loopback, and the GPUs of those that fail there, down to the smallest sets; then, for
every interface over which all failed, each host alone and hosts with each other. A trial in which a group fails is
repeated once, with the groups that failed: what works then counts as failing sometimes. The number of trials is
bounded.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TypeVar

from saferun.preflight.bisect.finding_text import Names, Tally, describe_all_alone, describe_hosts, describe_parts, over
from saferun.preflight.bisect.halving import Explained, Search, TrialRequest, explain, merge, side_by_side
from saferun.preflight.bisect.trial_values import (
    LOOPBACK,
    BisectFinding,
    FailingSet,
    Group,
    Member,
    Trial,
    TrialResult,
)
from saferun.preflight.results import CheckResult

__all__ = [
    "LOOPBACK",
    "BisectFinding",
    "Bisection",
    "FailingSet",
    "Group",
    "Member",
    "Trial",
    "TrialResult",
    "check_results",
]

DEADLINE_S = 30.0

_T = TypeVar("_T")
_Plan = Generator[Trial, Sequence[TrialResult], None]


class _TrialsSpentError(Exception):
    """The bound is reached."""


class Bisection:
    """The search for the parts that make a collective fail.

    Call ``next_trial`` and ``feed`` in turn until there is no next trial. ``finding`` can be asked at any time.

    Args:
        hosts: the local ranks (GPUs) of every host, by host number; at least one of each.
        labels: the hosts' names; hosts without one are called by their number.
        interfaces: to be tried one after the other; none: what the hosts use by themselves.
        part: what a member is called: ``GPU``, or ``rank`` where there are none.
        deadline_s: of each trial.
    """

    def __init__(
        self,
        hosts: Mapping[int, Sequence[int]],
        labels: Mapping[int, str] | None = None,
        interfaces: Sequence[str] = (),
        *,
        part: str = "GPU",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._hosts = {host: tuple(Member(host, gpu) for gpu in sorted(set(hosts[host]))) for host in sorted(hosts)}
        self._names = Names(dict(labels or {}), part, {host: len(group) for host, group in self._hosts.items()})
        self._interfaces = tuple(dict.fromkeys(interfaces)) or ("",)
        self._deadline_s = deadline_s
        self._tallies: dict[tuple[Group, str], Tally] = {}
        self._trials = 0
        self._sets: list[FailingSet] = []
        self._works: list[str] = []
        self._fails: list[str] = []
        self._left_works: dict[str, Group] = {}
        self._is_cut_short = False
        self._plan = self._make_plan()
        self._trial: Trial | None = next(self._plan, None)

    @property
    def limit(self) -> int:
        """The number of trials that is never passed."""
        parts = max((len(group) for group in self._hosts.values()), default=1)
        return 2 * (_bound(parts) + len(self._interfaces) * _bound(len(self._hosts)))

    def next_trial(self) -> Trial | None:
        """What to try now; None: the search is over. The same until ``feed`` is called."""
        return self._trial

    def feed(self, trial: Trial, outcomes: Sequence[TrialResult]) -> None:
        """What came of a trial. Members without an outcome have failed; those that were not asked do not count.

        A trial that is not the one that ``next_trial`` gave is ignored.
        """
        if self._trial is None or trial.number != self._trial.number:
            return
        try:
            self._trial = self._plan.send(outcomes)
        except StopIteration:
            self._trial = None

    def finding(self) -> BisectFinding:
        """What is known by now."""
        is_complete = self._trial is None and not self._is_cut_short
        count, parts = len(self._hosts), sum(len(group) for group in self._hosts.values())
        all_hosts = (
            f"all {count} hosts ({parts} {self._names.part}s)" if count > 1 else f"all {parts} {self._names.part}s"
        )
        if parts == 1:
            all_hosts = f"the only {self._names.part}"
        ways = ", ".join(filter(None, self._works))
        good = f"{all_hosts} work{'s' * (parts == 1)}{' together' * (parts > 1)}{f' over {ways}' if ways else ''}"
        if not self._works and not self._fails:
            return BisectFinding("unknown", "nothing was tried yet", "", (), 0, is_complete)
        if not self._fails:
            return BisectFinding("ok", good, "", (), self._trials, is_complete)
        sets = tuple(self._sets)
        lines = [found.line for found in sets]
        if not lines:
            lines = [f"{all_hosts} fail{'s' * (parts == 1)}{over(self._fails[0])}"]
            lines += ["nothing smaller was found"] if self._trial is None else []
        lines += [good] if self._works else []
        for interface, members in self._left_works.items():
            lines.append(f"without the bad ones, {self._names.hosts([members])} work{over(interface)}")
        if self._is_cut_short:
            lines.append(f"the search was ended after {self._trials} trials")
        always = not sets or not all(found.sometimes for found in sets)
        hint = sets[0].hint if sets else ""
        return BisectFinding("fail" if always else "sometimes", "; ".join(lines), hint, sets, self._trials, is_complete)

    # --------------------------------------------------------------------------------------------------------- the plan

    def _make_plan(self) -> _Plan:
        try:
            yield from self._bisect()
        except _TrialsSpentError:
            self._is_cut_short = True

    def _bisect(self) -> _Plan:
        all_hosts = merge(list(self._hosts.values()))
        if not all_hosts:
            return
        for interface in self._interfaces:
            [failed] = yield from self._try(TrialRequest("all", (all_hosts,)), interface)
            (self._fails if failed else self._works).append(interface)
        if not self._fails:
            return
        left = yield from self._over_loopback()
        for interface in self._fails:
            # What one host does over loopback is known by now.
            if left and (interface != LOOPBACK or len(left) > 1):
                yield from self._over_interface(interface, left)

    def _over_loopback(self) -> Generator[Trial, Sequence[TrialResult], dict[int, Group]]:
        """Find the parts that fail within their host. Returns what is left of every host."""
        groups = tuple(self._hosts.values())
        failed = yield from self._try(TrialRequest("each host alone over loopback", groups), LOOPBACK)
        left = dict(self._hosts)
        bad = [group for group, is_bad in zip(groups, failed, strict=True) if is_bad]
        if not bad:
            return left
        noun = f"{self._names.part}s"
        searches = [explain([(member,) for member in group], noun, known_to_fail=True) for group in bad]

        def tally(group: Group) -> Tally:
            return self._tally(group, LOOPBACK)

        explained: list[Explained] = yield from self._search(side_by_side(searches), LOOPBACK)
        for group, found in zip(bad, explained, strict=True):
            host = group[0].host
            left[host] = tuple(member for unit in found.rest for member in unit)
            everything = sum(len(blame.units) for blame in found.blames if blame.kind == "alone") == len(group)
            for blame in found.blames:
                described = describe_parts(blame, host, self._names, tally, everything=everything)
                self._sets.append(described)
        if len(self._sets) == len(groups) > 1 and all(found.kind == "host" for found in self._sets):
            self._sets = [describe_all_alone(groups, self._names, tally)]
        return {host: group for host, group in left.items() if group}

    def _over_interface(self, interface: str, left: dict[int, Group]) -> _Plan:
        """Find the hosts that fail over one interface."""
        units = list(left.values())
        all_hosts = merge(units) == merge(list(self._hosts.values()))
        found: Explained = yield from self._search(explain(units, "hosts", known_to_fail=all_hosts), interface)
        works_over = self._works[0] if self._works else ""
        sometimes = self._tally(merge(units), interface)
        for blame in found.blames:
            self._sets.append(
                describe_hosts(
                    blame,
                    interface,
                    works_over,
                    self._names,
                    lambda group: self._tally(group, interface),
                    sometimes=sometimes.failed < sometimes.of,
                )
            )
        rest = merge(found.rest)
        if found.works and rest and len(found.rest) > 1:
            self._left_works[interface] = rest

    def _search(self, search: Search[_T], interface: str) -> Generator[Trial, Sequence[TrialResult], _T]:
        """Have the requests of a search tried."""
        try:
            request = next(search)
            while True:
                failed = yield from self._try(request, interface)
                request = search.send(failed)
        except StopIteration as end:
            result: _T = end.value
            return result

    def _try(self, request: TrialRequest, interface: str) -> Generator[Trial, Sequence[TrialResult], list[bool]]:
        """Try groups, and those that fail once more. Returns which failed at least once."""
        if not request.groups:
            return []
        first = yield from self._try_once(request, interface)
        failed = tuple(group for group, is_bad in zip(request.groups, first, strict=True) if is_bad)
        if failed:
            yield from self._try_once(TrialRequest(f"{request.name}, again", failed), interface)
        return first

    def _try_once(self, request: TrialRequest, interface: str) -> Generator[Trial, Sequence[TrialResult], list[bool]]:
        if self._trials >= self.limit:
            raise _TrialsSpentError
        outcomes = yield Trial(self._trials + 1, request.name, request.groups, interface, self._deadline_s)
        by_member = {outcome.member: outcome for outcome in outcomes}
        failed = []
        for group in request.groups:
            answers = [by_member.get(member) or TrialResult(member, "timeout", "no answer") for member in group]
            bad = tuple(answer for answer in answers if answer.kind != "ok")
            before = self._tally(group, interface)
            self._tallies[group, interface] = Tally(before.failed + bool(bad), before.of + 1, bad or before.outcomes)
            failed.append(bool(bad))
        self._trials += 1
        return failed

    def _tally(self, group: Group, interface: str) -> Tally:
        return self._tallies.get((group, interface), Tally(0, 0))


def _bound(units: int) -> int:
    """More than a search among so many units should ever need before its trials are repeated."""
    return 16 + 8 * units.bit_length()


def check_results(finding: BisectFinding) -> tuple[CheckResult, ...]:
    """The finding as results of a check called ``collective``, for the tables of ``doctor``."""
    facts = (("trials", str(finding.trials)),)
    if finding.verdict == "unknown":
        return (CheckResult("collective", "skipped", finding.message, facts=facts),)
    if not finding.sets:
        verdict = "ok" if finding.verdict == "ok" else "fail"
        return (CheckResult("collective", verdict, finding.message, finding.hint, facts),)
    return tuple(
        CheckResult(
            "collective",
            "warn" if found.sometimes else "fail",
            found.message,
            found.hint,
            (
                ("kind", found.kind),
                ("interface", found.interface),
                ("members", " ".join(f"{member.host}:{member.local_rank}" for member in found.members)),
                *([("failed", f"{found.failed} of {found.of}")] if found.of else []),
                *facts,
            ),
            host=found.host,
        )
        for found in finding.sets
    )
