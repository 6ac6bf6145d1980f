"""Why nothing moves: evidence of a hang -> diagnosis. Pure.

A rank that waits in a collective waits for another rank. So the cause is among those that do not: first the
Flight Recorder is asked who called something else or has not called at all, then who does something else than wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.blind_spots import blind_spots, unfinished
from saferun.diagnosis.collectives import CollectiveFindings, Stuck, compare
from saferun.diagnosis.different_groups import in_different_groups
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.hang_classes import (
    ALL_ADVICE,
    CIRCLE_ADVICE,
    CLASSES,
    MISMATCH_ADVICE,
    OTHER_WAY,
    RECEIVE_ADVICE,
    STORE_ADVICE,
    STUCK_ADVICE,
    HangClass,
    class_of,
    severity_of,
)
from saferun.diagnosis.hang_gpus import with_failed_gpus
from saferun.diagnosis.job_end import lost_hosts, silent_lines
from saferun.diagnosis.job_hosts import Hosts, hosts_text
from saferun.diagnosis.judgement import Judgement
from saferun.diagnosis.merged_stacks import merge
from saferun.diagnosis.nccl_ranks import NcclFindings
from saferun.diagnosis.network_faults import broken_between, link_complaints
from saferun.diagnosis.peer_rules import ANY, STORE
from saferun.diagnosis.printed_errors import LastErrors, after_errors, dead_threads, printed_last, raising
from saferun.diagnosis.rank_waits import Wait, group_waits, located_waits, rank_waits
from saferun.diagnosis.wait_rules import IS_AT
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import Evidence, HangVerdict
from saferun.text.wording import LONG_STEP, duration_text, ranks_text

_SHOWN_WAITS = 4
_VERDICTS_ABOUT_RANKS = frozenset({"heartbeat", "overdue", "spinning", "stopped", "uninterruptible"})
_MAYBE_OF_PEERS = frozenset({"gpu", "lock", "user_code"})
# By these a rank is not known to do something else than wait for others.
_UNSURE = frozenset({"dead", "gpu", "interpreter", "unanswering", "user_code"})
_RECEIVES = frozenset({"recv", "irecv"})
_LEFT_THE_PATH = frozenset({"hang_sleep", "hang_missing_collective"})


def diagnose_hang(evidence: Evidence) -> Diagnosis:
    """Name the ranks that hold up the others, and what they do.

    Args:
        evidence: what is known; ``hang`` and ``capture`` are set, ``ends`` has the ranks that ended before.
    """
    dead = {end.rank: end.status.description for end in evidence.ends if not end.stopped_by_us}
    capture = evidence.capture
    hosts = Hosts(evidence)
    seen = {dump.rank for dump in capture.stacks} | {process.rank for process in capture.processes}
    # Of several hosts not everything may have come, and who is not known of is not the odd one.
    known = seen | {one.rank for one in capture.collectives if not one.failure}
    ranks = sorted(known | {*dead} if hosts.are_several else {*evidence.ranks, *dead} or seen)
    findings = compare(capture.collectives, ranks)
    user = UserCode(evidence.script, evidence.cwd)
    waits = rank_waits(
        capture,
        findings,
        ranks=ranks,
        dead=dead,
        hang=evidence.hang,
        user=user,
        store_port=evidence.store_port,
    )
    waits = located_waits(waits, hosts)
    nccl = NcclFindings(evidence, hosts)
    errors = LastErrors(evidence)
    case = _Case(evidence, hosts, findings, after_errors(waits, errors, evidence))
    judgement = nccl.quoted(with_failed_gpus(case.judge(), hosts, ranks))
    cause = judgement.cause
    cause = cause._replace(proof=cause.proof or nccl.proof(cause.ranks))
    cause, printed = printed_last(evidence, errors, cause, judgement.headline)
    lines = [*silent_lines(hosts, judgement.headline)]
    in_headline = {circle.message for circle in findings.circles if circle.steps in judgement.headline}
    in_headline.update(line for line in findings.shown_lines if line in judgement.headline)
    lines += [*judgement.findings, *(line for line in findings.shown_lines if line not in in_headline)]
    lines += [line for line in nccl.lines if line not in judgement.headline]
    lines += [
        *printed,
        *dead_threads(evidence, cause.ranks),
        *raising(evidence),
        *blind_spots(evidence, waits),
        *unfinished(evidence),
    ]
    return Diagnosis(
        headline=_headline(evidence.hang, judgement.headline),
        first_failure=None,
        output=None,
        also_failed=(),
        stopped=(),
        abandoned=evidence.abandoned,
        cause=cause,
        groups=group_waits(waits),
        tree=merge(capture.stacks, evidence.script, evidence.cwd),
        findings=tuple(dict.fromkeys(line for line in lines if line != cause.proof)),
        hosts=evidence.hosts,
    )


def _headline(hang: HangVerdict | None, found: str) -> str:
    """The first line of the report: a suspected hang is worded as one."""
    overdue = hang.overdue if hang is not None else ""
    if hang is not None and hang.kind == "overdue" and overdue:
        return f"{overdue}: {found}"
    if LONG_STEP in found:
        return found
    phase = f"; {overdue}" if overdue else ""
    return f"the job {'hangs' if hang is None or hang.certain else 'may hang'}: {found}{phase}"


class _Case:
    """What the ranks of one hang do, and who of them is to be named."""

    def __init__(self, evidence: Evidence, hosts: Hosts, findings: CollectiveFindings, waits: Sequence[Wait]) -> None:
        self._evidence = evidence
        self._hosts = hosts
        self._findings = findings
        self._waits = {wait.rank: wait for wait in waits}
        self._processes = {process.rank: process for process in evidence.capture.processes if process.is_rank}
        self._held_up = [wait for wait in waits if wait.found.of_peers]

    def judge(self) -> Judgement:
        """The first of these that finds a culprit."""
        return (
            self._lost()
            or self._of(self._kind("stopped"))
            or self._mismatch()
            or self._absent()
            or self._early_exit()
            or self._of([wait for wait in self._waits.values() if not wait.found.of_peers])
            or self._in_store_while_others_are_not()
            or self._different_collectives()
            or self._unheard()
            or self._network()
            or self._stuck()
            or in_different_groups(self._findings, self._waits, self._all_ranks)
            or self._none_odd()
        )

    def _kind(self, kind: str) -> list[Wait]:
        return [wait for wait in self._waits.values() if wait.found.kind == kind]

    # ---------------------------------------------------------------------------------------------------------- hosts

    def _lost(self) -> Judgement | None:
        """Hosts that are silent hold up all others."""
        return lost_hosts(self._evidence, self._hosts)

    def _unheard(self) -> Judgement | None:
        """All known ranks wait for others, and there is no evidence of some hosts."""
        unheard = [host for host in self._hosts.all if not host.has_evidence]
        if not unheard or not self._held_up:
            return None
        names = hosts_text(unheard)
        ranks = tuple(sorted(rank for host in unheard for rank in host.ranks))
        what = _what_they_wait_in(self._held_up)
        message = f"no evidence from {names}"
        advice = f"look at {names}: at the ranks and the saferun process there, and at the network to it"
        cause = Cause("hang_host_silent", message, ranks, "", advice)
        return Judgement(cause, f"no evidence from {names} ({ranks_text(ranks)}), and all others wait in {what}")

    def _network(self) -> Judgement | None:
        """All ranks wait for each other, and none is missing: the network."""
        links = link_complaints(self._evidence.capture.links)
        return broken_between(links, self._hosts, self._findings, timed_out=True)

    # ------------------------------------------------------------------------------------------------ Flight Recorder

    def _mismatch(self) -> Judgement | None:
        if not self._findings.mismatched:
            return None
        first = self._findings.mismatched[0]
        ranks = tuple(sorted({rank for mismatch in self._findings.mismatched for rank in mismatch.ranks}))
        location = next((self._waits[rank].location for rank in first.ranks if rank in self._waits), "")
        message = "called a different collective"
        cause = Cause("hang_mismatched_collectives", message, ranks, first.message, MISMATCH_ADVICE, location)
        return Judgement(cause, first.message)

    def _absent(self) -> Judgement | None:
        """Who has not called, by the Flight Recorder."""
        absent = [self._waits[rank] for rank in self._findings.culprits if rank in self._waits]
        if not absent:
            return None
        idle = [wait for wait in absent if not wait.found.of_peers]
        if idle:
            return self._of(idle)
        # All of them wait for another rank themselves: for one that has ended, or that does something else.
        if any(not wait.found.of_peers for wait in self._waits.values()):
            return None
        return self._circle(absent) or self._named(
            absent, CLASSES["collective"], self._findings.lines[0] if self._findings.lines else ""
        )

    def _circle(self, absent: Sequence[Wait]) -> Judgement | None:
        """Ranks that wait for each other, and none of which is odd: they have entered groups in different orders."""
        ranks = tuple(wait.rank for wait in absent)
        circle = next((one for one in self._findings.circles if one.ranks == ranks), None)
        if circle is None:
            return None
        locations = dict.fromkeys(wait.location for wait in absent if wait.location)
        at = f" ({', '.join(list(locations)[:_SHOWN_WAITS])})" if locations else ""
        peers = [wait for wait in self._held_up if wait.rank not in ranks]
        others = f"; {ranks_text(wait.rank for wait in peers)} {_waits(peers)} for them" if peers else ""
        cause = Cause("hang_missing_collective", "wait for each other", ranks, "", CIRCLE_ADVICE, absent[0].location)
        return Judgement(cause, f"{self._names(ranks)} {cause.message}: {circle.steps}{at}{others}")

    def _stuck(self) -> Judgement | None:
        """A call that all its members have made, and that ends on none of these; the others wait for them."""
        suspects = tuple(rank for rank in self._findings.suspects if rank in self._waits)
        stuck = next((one for one in self._findings.stuck if set(suspects).intersection(one.waiting)), None)
        if stuck is None or len(suspects) >= len(self._held_up):
            return None
        what = f"collective {stuck.seq} ({stuck.op})" if stuck.op != "send" else "send"
        if not stuck.is_complete:
            return self._stuck_among_unknown(suspects, stuck)
        verb = "is" if len(suspects) == 1 else "are"
        message = f"{verb} stuck in a call that all have made ({what} of group {stuck.group})"
        advice = STUCK_ADVICE.format(ranks=ranks_text(suspects))
        location = self._waits[suspects[0]].location
        cause = Cause("hang_stuck_collective", message, suspects, stuck.message, advice, location)
        return Judgement(cause, f"{self._names(suspects)} {message}, and all others wait for {_them(suspects)}")

    def _stuck_among_unknown(self, suspects: tuple[int, ...], stuck: Stuck) -> Judgement:
        """The same, where it is not known who else is to make the call."""
        waits = [self._waits[rank] for rank in suspects]
        locations = dict.fromkeys(wait.location for wait in waits if wait.location)
        at = f" at {', '.join(list(locations)[:_SHOWN_WAITS])}" if locations else ""
        what = _what_they_wait_in(waits)
        unknown = f"nothing is known of {ranks_text(stuck.unknown)}" if stuck.unknown else "whose members are not known"
        message = f"{_waits(waits)} in {what}{at}, in groups {unknown}"
        if stuck.unknown:
            message = f"{_waits(waits)} in {what}{at}, and {unknown}"
        cause = Cause("hang_stuck_collective", message, suspects, stuck.message, CIRCLE_ADVICE, waits[0].location)
        return Judgement(cause, f"{self._names(suspects)} {message}; all others wait for {_them(suspects)}")

    # ---------------------------------------------------------------------------------------------- what the ranks do

    def _early_exit(self) -> Judgement | None:
        dead = self._kind("dead")
        if not dead or not self._held_up or self._needs_none_that_ended():
            return None
        ranks = tuple(wait.rank for wait in dead)
        names = self._names(ranks)
        how = dead[0].found.detail if len({wait.found.detail for wait in dead}) == 1 else "each by itself"
        peers = ranks_text(wait.rank for wait in self._held_up)
        what = _what_they_wait_in(self._held_up)
        headline = f"{names} {_has(ranks)} ended ({how}), and {peers} {_waits(self._held_up)} in {what}"
        cause = Cause("hang_early_exit", f"ended ({how}) while others wait for it", ranks, "", CLASSES["dead"].advice)
        # One that ended well may have had nothing left to do: then a living one that stays away holds them up.
        living = [one for one in self._waits.values() if not one.found.of_peers and one.found.kind not in _UNSURE]
        if not living:
            return Judgement(cause, headline)
        away = tuple(wait.rank for wait in living)
        groups: dict[str, list[int]] = {}
        for wait in living:
            groups.setdefault(wait.description, []).append(wait.rank)
        doing = [f"{ranks_text(some)}{_joint(some, does)}{does}" for does, some in groups.items()]
        cause = cause._replace(
            ranks=tuple(sorted({*ranks, *away})),
            advice=f"{cause.advice}; else look at what keeps {ranks_text(away)} away",
            location=living[0].location,
        )
        return Judgement(cause, "; ".join([headline, *doing[:_SHOWN_WAITS]]), findings=tuple(doing[_SHOWN_WAITS:]))

    def _needs_none_that_ended(self) -> bool:
        """Whether all that wait are in calls which all members have made, and no member has ended."""
        dead = {wait.rank for wait in self._kind("dead")}
        made = {
            (one.group, one.seq)
            for one in self._findings.stuck
            if one.is_complete and not dead.intersection((*one.waiting, *one.completed))
        }
        held_up = {wait.rank for wait in self._held_up}
        waiting = [one for one in self._findings.waiting if one.rank in held_up]
        return held_up == {one.rank for one in waiting} and all((one.group, one.seq) in made for one in waiting)

    def _of(self, odd: Sequence[Wait]) -> Judgement | None:
        """Name those among ranks that do not wait for others that are the likeliest cause."""
        living = [wait for wait in odd if wait.found.kind != "dead"]
        if not living:
            return None
        suspects = self._suspects(living)
        worst = min(map(severity_of, suspects))
        culprits = [wait for wait in suspects if severity_of(wait) == worst]
        others = [f"{self._names([wait.rank])} {wait.description}" for wait in living if wait not in culprits]
        proof = next((line for line in self._findings.lines if line in self._missing_lines(culprits)), "")
        judgement = self._named(culprits, class_of(culprits[0]), proof)
        return judgement._replace(findings=tuple(others[:_SHOWN_WAITS]))

    def _suspects(self, living: Sequence[Wait]) -> Sequence[Wait]:
        """Ranks that are not seen to wait for others, less those that probably do."""
        verdict = self._evidence.hang
        if verdict is not None and verdict.kind in _VERDICTS_ABOUT_RANKS:
            named = [wait for wait in living if wait.rank in verdict.ranks]
            if named:
                return named
        if self._held_up:
            return living
        # An asynchronous collective is waited for in the user's own line: then it is most ranks that stand there.
        locations: dict[tuple[str, str], list[Wait]] = {}
        for wait in living:
            locations.setdefault((wait.found.kind, wait.location), []).append(wait)
        (kind, _), most = max(locations.items(), key=lambda item: len(item[1]))
        if kind in _MAYBE_OF_PEERS and len(living) > len(most) > len(living) / 2:
            return [wait for wait in living if wait not in most]
        return living

    def _missing_lines(self, culprits: Sequence[Wait]) -> set[str]:
        ranks = {wait.rank for wait in culprits}
        return {missing.message for missing in self._findings.missing if ranks.intersection(missing.ranks)}

    def _named(self, culprits: Sequence[Wait], cause_class: HangClass, proof: str) -> Judgement:
        ranks = tuple(wait.rank for wait in culprits)
        first = culprits[0]
        peers = [wait for wait in self._held_up if wait.rank not in ranks]
        if cause_class.name == "hang_spinning":
            headline = self._computing(culprits, peers)
            advice = cause_class.advice.format(at=f" at {first.location}" if first.location else "")
            proof = proof or self._kernel_proof(first)
            message = f"{_has(ranks)} been computing"
            cause = Cause(cause_class.name, message, ranks, proof, advice, first.location)
            return Judgement(cause, headline)
        alike = len({wait.description for wait in culprits}) == 1
        if not peers:
            does = first.description if alike else _in_different_places(culprits)
            headline = f"{self._names(ranks)}{_joint(ranks, does)}{does}"
        else:
            it = "it" if len(ranks) == 1 else "each" if alike else f"rank {first.rank}"
            does = (
                first.description
                if first.description.startswith("its ") and len(ranks) == 1
                else f"{it} {first.description}"
            )
            headline = f"{self._names(ranks)} {self._keeps(ranks, peers)}: {does}"
        if peers and cause_class.name in _LEFT_THE_PATH:
            cause_class = cause_class._replace(advice=f"{cause_class.advice}: {OTHER_WAY}")
        name = cause_class.name
        if name == "hang_unknown" and self._missing_lines(culprits):
            name = "hang_missing_collective"
        at = f" at {first.location}" if first.location else ""
        advice = cause_class.advice.format(at=at, what=first.found.detail or "it", ranks=ranks_text(ranks))
        return Judgement(
            Cause(name, first.found.description, ranks, proof or self._kernel_proof(first), advice, first.location),
            headline,
        )

    def _computing(self, culprits: Sequence[Wait], peers: Sequence[Wait]) -> str:
        """Ranks whose CPU time grows while their stacks stay the same: nothing proves that it is no long step."""
        ranks = [wait.rank for wait in culprits]
        locations = dict.fromkeys(wait.location for wait in culprits if wait.location)
        at = f" at {next(iter(locations))}" if len(locations) == 1 else ""
        hang = self._evidence.hang
        lasted = f" for {duration_text(hang.lasted_s)}" if hang is not None else ""
        headline = f"{self._names(ranks)} {_has(ranks)} been computing{at}{lasted}"
        if peers:
            who, it = ranks_text(wait.rank for wait in peers), "it" if len(ranks) == 1 else "them"
            headline += f"; {who} {_waits(peers)} for {it} in {_what_they_wait_in(peers)}"
        elif len(self._waits) > len(ranks):
            headline += ", and no other rank makes progress"
        return f"{headline} ({LONG_STEP})"

    def _keeps(self, ranks: Sequence[int], peers: Sequence[Wait]) -> str:
        """What the culprits owe the others."""
        who = ranks_text(wait.rank for wait in peers)
        what = _what_they_wait_in(peers)
        kinds = {wait.found.kind for wait in peers}
        if kinds == {"collective"} and len({wait.found.detail for wait in peers}) == 1 and self._can_be_called(what):
            return f"{_has(ranks)} not called {_the(what)} that {who} {_waits(peers)} in"
        if kinds == {"network"}:
            return f"{_has(ranks)} not come to {what}, where {who} {_waits(peers)}"
        return f"{'keeps' if len(ranks) == 1 else 'keep'} {who} waiting in {what}"

    @staticmethod
    def _can_be_called(what: str) -> bool:
        return what.partition(" ")[0] not in {"send", "recv", "isend", "irecv", "wait", "batch_isend_irecv"}

    # -------------------------------------------------------------------------------- all ranks wait for others

    def _in_store_while_others_are_not(self) -> Judgement | None:
        """Ranks that wait in the store while others are in a collective: they have not come to it."""
        in_store = [wait for wait in self._held_up if wait.found.kind == "network"]
        if not in_store or len(in_store) == len(self._held_up):
            return None
        return self._named(in_store, CLASSES["collective"], "")

    def _different_collectives(self) -> Judgement | None:
        """Without a Flight Recorder: a mismatch by the stacks."""
        recorded = {one.rank for one in self._evidence.capture.collectives if not one.failure and one.groups}
        parties: dict[str, list[Wait]] = {}
        for wait in self._held_up:
            parties.setdefault(wait.found.detail, []).append(wait)
        ordered = sorted(parties.values(), key=len)
        if recorded or len(ordered) < 2 or ANY in parties or not all(map(self._can_be_called, parties)):  # noqa: PLR2004
            return None
        sides = [f"{ranks_text(wait.rank for wait in side)} in {side[0].found.detail}" for side in reversed(ordered)]
        is_tie = len(ordered[0]) == len(ordered[1])
        culprits = self._held_up if is_tie else ordered[0]
        ranks = tuple(sorted(wait.rank for wait in culprits))
        headline = f"the ranks wait in different collectives: {', '.join(sides[:_SHOWN_WAITS])}"
        message = "waits in a different collective"
        cause = Cause("hang_mismatched_collectives", message, ranks, "", MISMATCH_ADVICE, ordered[0][0].location)
        return Judgement(cause, headline)

    def _none_odd(self) -> Judgement:
        if not self._held_up:
            message = "the state of the ranks is unknown"
            return Judgement(Cause("hang_unknown", message, (), "", CLASSES["unanswering"].advice), message)
        first = self._held_up[0]
        same_location = len({wait.location for wait in self._held_up}) == 1
        at = f" at {first.location}" if same_location and first.location else ""
        what = _what_they_wait_in(self._held_up)
        dead = self._kind("dead")
        who = self._names([wait.rank for wait in self._held_up]) if dead else self._all_ranks
        headline = f"{who} {_waits(self._held_up) if dead else 'wait'} in {what}{at}"
        is_store = first.found.kind == "network"
        stuck = self._findings.stuck[0] if self._findings.stuck else None
        if stuck is not None and (stuck.is_complete or {*stuck.waiting} >= {*self._waits}):
            headline += ", and none of them is missing there"
        elif not is_store:
            headline += "; the rank they wait for is unknown"
        if dead:
            how = dead[0].found.detail if len({wait.found.detail for wait in dead}) == 1 else "each by itself"
            ranks = [wait.rank for wait in dead]
            is_in = "is not in their group" if len(dead) == 1 else "are not in their groups"
            headline += f"; {ranks_text(ranks)}, which {_has(ranks)} ended ({how}), {is_in}"
        advice = STORE_ADVICE if is_store else ALL_ADVICE
        if {wait.found.detail for wait in self._held_up} <= _RECEIVES:
            advice = RECEIVE_ADVICE
        proof = stuck.message if stuck is not None else ""
        cause = Cause("hang_all_in_collective", f"all ranks wait in {what}", (), proof, advice, at.removeprefix(" at "))
        return Judgement(cause, headline)

    # ------------------------------------------------------------------------------------------------------- messages

    @property
    def _all_ranks(self) -> str:
        return "all ranks" if self._hosts.are_several else f"all ranks of {self._evidence.host}"

    def _names(self, ranks: Sequence[int]) -> str:
        return self._hosts.names(ranks, all_ranks=len(self._waits))

    def _kernel_proof(self, wait: Wait) -> str:
        """The state of a rank in /proc."""
        process = self._processes.get(wait.rank)
        if process is None or process.state not in {"S", "D", "T", "t", "R"}:
            return ""
        call = f", system call {process.syscall.removeprefix('system call ')}" if process.syscall else ""
        where = f" in {process.wchan}" if process.wchan else ""
        target = f", on {process.waits_on}" if process.waits_on else ""
        return f"/proc of rank {wait.rank}: state {process.state}{call}{where}{target}"


def _what_they_wait_in(waits: Iterable[Wait]) -> str:
    """``all_reduce``, ``init_process_group``, ``all_reduce and broadcast``."""
    whats = dict.fromkeys(wait.found.detail for wait in waits)
    names = [what.removeprefix(f"{STORE} (").removesuffix(")") if "(" in what else what for what in whats]
    return " and ".join(names[:_SHOWN_WAITS])


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _joint(ranks: Sequence[int], does: str) -> str:
    """What stands between ranks and what each of them does."""
    return ": each " if len(ranks) > 1 else ": " if does.startswith("its ") else " "


def _in_different_places(waits: Sequence[Wait]) -> str:
    """What each of these does, without its place."""
    doing = waits[0].found.doing
    if doing == IS_AT:
        return "is in a different place"
    like = "" if len({wait.found.doing for wait in waits}) == 1 else " or the like"
    return f"{doing}{like}, in different places"


def _them(ranks: Sequence[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _waits(waits: Sequence[Wait]) -> str:
    return "waits" if len(waits) == 1 else "wait"


def _the(what: str) -> str:
    return what if what.startswith(("a ", "the ", "DDP's", "torch's", "Horovod")) else f"the {what}"
