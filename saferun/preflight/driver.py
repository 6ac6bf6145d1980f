"""The checks before the ranks of an attempt are started: this host's own, and those between the hosts of a job.

Nothing in here can fail a launch but what the checks find; what breaks is said in one line, and the launch goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun.config import LaunchConfig
from saferun.errors import printable
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject, Value
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.client import CheckProcess, CheckRun
from saferun.preflight.results import SEVERITY, CheckResult, HostCard, Preflight, Probe

if TYPE_CHECKING:
    from saferun.cluster.job import Job
    from saferun.cluster.job_values import Assignment, EvidenceChunk
    from saferun.preflight.bisect.driver import TrialSearch

# How long the hosts may try each other, and how much longer the one that leads waits for what came of it.
_PROBE_S = 12.0
_OTHERS_S = 5.0
_MOST_AGAIN = 64


class Failure(Value):
    """Why the ranks are not to be started. ``class_name``: where another try may help; else empty."""

    what: str
    hint: str
    class_name: str


class Outcome(Value):
    """What the checks came to. ``failure`` None: the ranks may be started."""

    failure: Failure | None
    preflight: Preflight
    cards: Mapping[int, HostCard]
    nics: tuple[str, ...] = ()


class PreflightRun:
    """The checks of one attempt.

    Args:
        config: the launch.
        poller: the loop's.
        job: the other hosts; None: there are none.
        say: takes whole lines for the user.
        environ: the environment that the ranks inherit.
        warn: takes one line about something that could not be done.
        process: a check process that has been forked already.
    """

    def __init__(
        self,
        config: LaunchConfig,
        poller: Poller,
        *,
        job: Job | None,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        warn: Callable[[str], None],
        process: CheckProcess | None = None,
    ) -> None:
        self._config = config
        self._environ = environ
        self._process = process
        self._poller = poller
        self._job = job
        self._say = say
        self._warn = warn
        self._run: CheckRun | None = None
        self._dying: list[CheckRun] = []
        self._trials: TrialSearch | None = None
        self._begin()

    def _begin(self) -> None:
        self._began_at = time.monotonic()
        self._alone_s = 0.0  # what this host's own checks took; the hosts' meeting is not among them
        self._results: list[CheckResult] = []
        self.card = ""
        self.door = ""
        self._on_checked: Callable[[Outcome], None] | None = None
        self._on_over: Callable[[Outcome], None] | None = None
        self._round = 0
        self._place: Assignment | None = None
        self._cards: dict[int, HostCard] = {}
        self._probes: list[Probe] = []
        self._missing: dict[int, str] = {}
        self._waits_for_own = False
        self._waits_for_others = False
        self._verdict: JsonObject | None = None
        self._is_over = False
        self._beside = False

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if self._trials is not None:
            return self._trials.deadline
        return self._run.deadline if self._run is not None else None

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._trials is not None:
            self._trials.tick(now)
        if self._run is not None and self._run.deadline is not None and self._run.deadline <= now:
            self._run.expire()

    @property
    def pids(self) -> set[int]:
        """Processes of the checks' own, which are no leftovers of the ranks."""
        runs = [*self._dying, *([self._run] if self._run is not None else [])]
        pids = {run.pid for run in runs if run.pid is not None}
        return pids | (self._trials.pids if self._trials is not None else set())

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped, ``words`` say how it ended. Whether it was one of the checks' own."""
        if self._trials is not None and self._trials.on_exit(pid, status.description):
            return True
        for run in (*self._dying, self._run):
            if run is not None and run.pid == pid:
                run.on_exit()
                if run in self._dying:
                    self._dying.remove(run)
                return True
        return False

    def close(self) -> None:
        """End the check process, and what is tried."""
        if self._process is not None:
            self._process.end()
            self._process = None
        if self._trials is not None:
            self._trials.close()
        run, self._run = self._run, None
        if run is not None:
            run.close()
            if run.pid is not None:
                self._dying.append(run)

    # ----------------------------------------------------------------------------------------------------------------
    # This host

    def check(self, context: CheckContext, on_checked: Callable[[Outcome], None], *, beside: bool = False) -> None:
        """Check this host; ``on_checked`` follows, with what it came to here.

        Args:
            context: the launch.
            on_checked: takes what it came to.
            beside: whether the ranks have been started: whatever is found is a warning then.
        """
        process, self._process = self._process, None
        self.close()
        self._begin()
        self._beside = beside
        self._on_checked = on_checked
        run = CheckRun(
            context,
            self._poller,
            opens_door=self._job is not None,
            on_message=self._on_message,
            on_lost=self._on_lost,
            process=process,
            beside=beside,
        )
        try:
            run.start()
        except OSError as error:
            self._on_lost(f"the check process cannot be started: {error.strerror}")
            return
        self._run = run

    def settle(self) -> None:
        """The launch is over: what has been found so far counts, where that is not known yet."""
        if not self._beside or self._on_checked is None:
            return
        if self._run is not None:
            self._run.take_in()
        if self._on_checked is not None:
            self._results.append(CheckResult("others", "skipped", "the launch was over before the other checks were"))
            self._checked()

    def _on_message(self, message: JsonObject) -> None:
        try:
            self._take(message)
        except (KeyError, TypeError, ValueError) as error:
            self._warn(f"what the checks say cannot be read: {type(error).__name__}: {error}")

    def _take(self, message: JsonObject) -> None:
        match message.get("op"):
            case "result":
                # From a fork of this process.
                self._results.append(CheckResult(*message["result"]))
            case "ready":
                self.card, self.door = str(message["card"]), str(message["door"])
                self._checked()
            case "probes" if message["number"] == self._round:
                self._own_probed(str(message["text"]))

    def _on_lost(self, words: str) -> None:
        """The check process can say no more: what it has found so far counts."""
        self.close()
        self._warn(f"checks before the start: {words}")
        if self._on_checked is not None:
            self._checked()
        elif self._waits_for_own:
            self._own_probed("")

    def _checked(self) -> None:
        on_checked, self._on_checked = self._on_checked, None
        self._alone_s = time.monotonic() - self._began_at
        if self._run is not None:
            self._run.expect_until(None)
        if self._job is None:
            self.close()
        self._results.sort(key=lambda result: (-SEVERITY[result.verdict], result.name))
        if on_checked is None:
            return
        if self._config.checks.collective and self._job is None:
            count = self._config.nproc_per_node

            def on_over(found: tuple[CheckResult, ...]) -> None:
                self._results[:0] = found
                on_checked(self._outcome(self._own_preflight(), {}))

            self._open_trials({0: range(count)}, {0: ""}, on_over).begin({0})
            return
        on_checked(self._outcome(self._own_preflight(), {}))

    def _open_trials(
        self,
        hosts: Mapping[int, Sequence[int]],
        labels: Mapping[int, str],
        on_over: Callable[[tuple[CheckResult, ...]], None],
    ) -> TrialSearch:
        from saferun.preflight.bisect.client import TrialPlace
        from saferun.preflight.bisect.driver import TrialSearch

        self.close()
        checks = self._config.checks
        vendor = _vendor(self._config.environ.vendor)
        backend = checks.backend if checks.backend != "auto" else "gloo" if vendor == "none" else "nccl"
        place = TrialPlace(self._job.host if self._job is not None else 0, backend)
        if self._place is not None:
            placement = self._place.placement
            place = place._replace(store_address=placement.master_addr, store_port=placement.master_port)
        self._trials = TrialSearch(
            place,
            self._environ,
            self._poller,
            hosts=hosts,
            labels=labels,
            interfaces=() if checks.nics == ("auto",) else checks.nics,
            timeout_s=checks.trial_timeout_s,
            job=self._job,
            say=self._say,
            on_over=on_over,
        )
        return self._trials

    def _own_preflight(self) -> Preflight:
        return Preflight(tuple(self._results), duration_s=self._alone_s)

    def tell_own(self) -> None:
        """Say what is wrong with this host."""
        self._tell(self._shown(self._results))

    # ----------------------------------------------------------------------------------------------------------------
    # Between hosts

    def probe(self, place: Assignment, on_over: Callable[[Outcome], None]) -> None:
        """Try the other hosts, hand in what came of it, and wait for the verdict; ``on_over`` follows.

        Its outcome has everything on the host that leads; on the others it says no more than whether to go on, and they
        are told of a failure in another way.
        """
        self._place = place
        self._on_over = on_over
        self._began_at = time.monotonic()
        if self._verdict is not None:
            self._end()
            return
        job = self._job
        if job is None or not job.is_head:
            return
        if place.leads:
            self._read_cards(place)
        self._next_round([(host, label, door) for host, label, door in place.probe_endpoints], hosts=None)

    def _read_cards(self, place: Assignment) -> None:
        assert self._job is not None  # noqa: S101 - it leads
        from saferun.preflight.wire import decode_card

        for host, (card, _) in enumerate(place.host_infos):
            peer = self._job.peers.get(host)
            label = peer.label if peer is not None else f"host {host}"
            found = decode_card(card) if card else None
            if found is None:
                self._missing[host] = "it was started without checks" if not card else "what it says cannot be read"
                found = HostCard()
            self._cards[host] = found._replace(label=label)

    def _next_round(self, doors: Sequence[tuple[int, str, str]], hosts: Sequence[int] | None) -> None:
        """Try hosts, or let them be tried.

        Args:
            doors: what this host is to try: number, label, door.
            hosts: those that hand something in, this one included; None: all that have cards.
        """
        assert self._job is not None  # noqa: S101 - there are others
        assert self._place is not None  # noqa: S101 - they have met
        self._round += 1
        self._waits_for_own = True
        name = f"probes-{self._round}"
        if self._place.leads:
            self._waits_for_others = True
            others = [host for host in self._cards if host not in self._missing] if hosts is None else hosts

            def on_pieces(pieces: list[EvidenceChunk]) -> None:
                self._others_probed(others, pieces)

            self._job.collect(name, _PROBE_S + _OTHERS_S, on_pieces, hosts=others)
        if self._run is None or not doors:
            self._own_probed("")
            return
        self._run.expect_until(time.monotonic() + _PROBE_S + 1.0)
        host = self._job.host
        order = {"op": "probe", "number": self._round, "host": host, "doors": list(doors), "within_s": _PROBE_S}
        self._run.send(order)

    def _own_probed(self, text: str) -> None:
        self._waits_for_own = False
        if self._run is not None:
            self._run.expect_until(None)
        assert self._job is not None  # noqa: S101 - there are others
        if self._place is not None and self._place.leads:
            self._take_probes(text, self._job.host)
            self._look()
        else:
            self._job.share(f"probes-{self._round}", text)

    def _take_probes(self, text: str, host: int) -> None:
        if text:
            from saferun.preflight.wire import decode_probes

            self._probes += decode_probes(text, host)

    def _others_probed(self, expected: Sequence[int], pieces: Sequence[EvidenceChunk]) -> None:
        assert self._job is not None  # noqa: S101 - there are others
        self._waits_for_others = False
        heard = {self._job.host}
        for piece in pieces:
            heard.add(piece.host)
            self._take_probes(piece.evidence, piece.host)
        for host in expected:
            if host not in heard:
                self._missing.setdefault(host, "it did not say what it found")
        self._look()

    def _look(self) -> None:
        """All that will be known is known: measure again, or judge."""
        if self._waits_for_own or self._waits_for_others or self._is_over:
            return
        preflight = self._judged(remeasured=self._round > 1)
        again = preflight.again[:_MOST_AGAIN]
        if again and self._round == 1:
            self._measure_again(again)
            return
        self._is_over = True
        if not self._config.checks.collective:
            self._conclude(preflight)
            return
        assert self._job is not None  # noqa: S101 - there are others

        def on_over(found: tuple[CheckResult, ...]) -> None:
            self._conclude(preflight._replace(results=(*found, *preflight.results)))

        peers = self._job.peers.values()
        ranks = {peer.host: range(peer.ranks) for peer in peers}
        self._open_trials(ranks, {peer.host: peer.label for peer in peers}, on_over).begin(ranks)

    def _conclude(self, preflight: Preflight) -> None:
        """Tell all hosts what follows."""
        assert self._job is not None  # noqa: S101 - there are others
        outcome = self._outcome(preflight, self._cards)
        ok = outcome.failure is None
        only = self._config.checks.preflight == "only"
        if not only:
            self._tell(self._shown(preflight.results))
        if ok and not only:
            self._job.broadcast_preflight({"ok": True, "nic": list(outcome.nics)})
            return  # which this host hears like the others
        if self._on_over is not None:
            self.close()
            self._on_over(outcome)

    def _judged(self, *, remeasured: bool) -> Preflight:
        from saferun.preflight.judge import judge

        own = self._cards.get(0)
        if own is not None:
            # Good results do not travel; this host's own are here.
            self._cards[0] = own._replace(results=tuple(self._results))
        return judge(
            self._cards,
            self._probes,
            missing=self._missing,
            nics=self._config.checks.nics,
            remeasured=remeasured,
            duration_s=self._alone_s + time.monotonic() - self._began_at,
        )

    def _measure_again(self, again: Sequence[tuple[int, int]]) -> None:
        assert self._place is not None  # noqa: S101 - they have met
        assert self._job is not None  # noqa: S101 - there are others
        pairs = [
            (source, target, self._cards[target].label, self._place.host_infos[target][1])
            for source, target in again
            if target < len(self._place.host_infos) and target in self._cards
        ]
        self._job.broadcast_preflight({"again": pairs})

    # ----------------------------------------------------------------------------------------------------------------
    # The verdict

    def hear(self, message: JsonObject) -> None:
        """What the host that leads has said to all."""
        if "again" in message:
            if self._run is None and not (self._place is not None and self._place.leads):
                return
            pairs = [(int(a), int(b), str(label), str(door)) for a, b, label, door in message["again"][:_MOST_AGAIN]]
            assert self._job is not None  # noqa: S101 - it says so
            doors = [(target, label, door) for source, target, label, door in pairs if source == self._job.host]
            sources = sorted({source for source, *_ in pairs})
            if doors or (self._place is not None and self._place.leads):
                self._next_round(doors, sources)
            return
        if "trial" in message:
            if self._place is not None and not self._place.leads:
                trials = self._trials or self._open_trials({}, {}, lambda _: None)
                trials.hear(message)
            return
        self._verdict = message
        if self._on_over is not None:
            self._end()

    def _end(self) -> None:
        on_over, self._on_over = self._on_over, None
        self.close()
        assert self._verdict is not None  # noqa: S101 - it has been heard
        nics = tuple(str(name) for name in self._verdict.get("nic") or ())[:8]
        preflight = self._judged(remeasured=True) if self._is_over else self._own_preflight()
        if on_over is not None:
            on_over(Outcome(None, preflight, self._cards, nics))

    def _outcome(self, preflight: Preflight, cards: Mapping[int, HostCard]) -> Outcome:
        failing = [result for result in self._shown(preflight.results) if result.verdict == "fail"]
        nics = preflight.nic if self._config.checks.nics == ("auto",) else ()
        if not failing:
            return Outcome(None, preflight, cards, nics)
        first = failing[0]
        same = _alike(first, failing)
        host = ""
        if len(same) > 1:
            from saferun.preflight.text import host_ranges

            host = f"{host_ranges(result.host for result in same)}: "
        elif first.host and not first.message.startswith(first.host):
            host = f"{first.host}: "
        more = f" (and {len(failing) - len(same)} more, above)" if len(failing) > len(same) else ""
        passing = all(result.transient for result in failing)
        failure = Failure(
            f"{host}{first.message}{more}", first.hint or "see the other lines", first.class_name if passing else ""
        )
        return Outcome(failure, preflight, cards)

    def _shown(self, results: Sequence[CheckResult]) -> list[CheckResult]:
        """What is to be told, in the terms of --preflight."""
        shown = [result for result in results if result.verdict in {"warn", "fail"}]
        if self._beside or self._config.checks.preflight == "warn":
            shown = [result._replace(verdict="warn") for result in shown]
        return shown

    def _tell(self, shown: Sequence[CheckResult]) -> None:
        """All of it but the failure that ends the launch and is told as its reason."""
        failing = [result for result in shown if result.verdict == "fail"]
        told = [result for result in shown if not failing or result not in _alike(failing[0], failing)]
        if told:
            from saferun.preflight.text import result_lines

            for line in result_lines(told):
                self._say(printable(line))


def _alike(first: CheckResult, failing: Sequence[CheckResult]) -> list[CheckResult]:
    """The same of other hosts."""
    return [result for result in failing if (result.name, result.message) == (first.name, first.message)]


def context_of(
    config: LaunchConfig,
    environ: Mapping[str, str],
    *,
    bound: Sequence[int],
    attempt: int,
    old_pids: Sequence[int],
    is_endpoint_here: bool = False,
) -> CheckContext:
    """What the checks of a launch are given. What only files tell the check process finds out by itself.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        bound: ports that this process has bound.
        attempt: from 0.
        old_pids: the ranks of the attempt before.
        is_endpoint_here: whether the endpoint of torch's rendezvous is this host, where several hosts meet there.
    """
    hosts, rendezvous = config.hosts, config.rendezvous
    task = hosts.task
    argv = config.command.argv
    python = os.path.basename(argv[0]) if argv else ""
    is_python = config.command.run_path or python.startswith("python") or "PYTHON_EXEC" in environ
    master = rendezvous.master_addr or (hosts.names[0] if hosts.names else "")
    serves = not hosts.together or hosts.node_rank == 0
    if hosts.together and rendezvous.backend != "static":
        from saferun.cluster.job_channel import split_endpoint

        master = split_endpoint(rendezvous.endpoint)[0]
        serves = is_endpoint_here
    return CheckContext(
        nproc=task.local_world_size if task is not None else config.nproc_per_node,
        environ=environ,
        together=hosts.most > 1,
        hosts=hosts.names,
        node_rank=-1 if hosts.node_rank is None else hosts.node_rank,
        master=master if hosts.most > 1 else "",
        ports=rendezvous.ports or ((rendezvous.master_port,) if rendezvous.master_port else ()),
        bound=tuple(bound),
        serves=serves,
        nics=config.checks.nics,
        run_dir=(config.output.run_dir or os.curdir) if config.output.keep_files else "",
        script=config.command.name if is_python else "",
        script_args=argv[argv.index(config.command.name) + 1 :] if config.command.name in argv else (),
        python=argv[0] if is_python and not config.command.run_path else "",
        vendor=config.environ.vendor,
        attempt=attempt,
        old_pids=tuple(old_pids),
    )


def _vendor(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    from saferun.linux.gpus import gpu_vendor

    return gpu_vendor() or "none"
