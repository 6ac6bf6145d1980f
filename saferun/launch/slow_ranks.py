"""Names the rank that the others wait for while the job runs, with likely reasons on its host.

On each host the ranks are sampled several times a second (``watchdog.wait_watch``). The counts go to the leader, which
compares all ranks of the job (``watchdog.stragglers``). Ranks that use GPUs are compared by their Flight Recorders, if
the user wants that (``launch.recorder_rounds``). If a rank is slow, the examiner on its host reads the clocks of its
GPU and the errors of its interfaces, once, and the leader reports it. A job of one host is its own leader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from saferun.errors import suppress
from saferun.launch.attempt_record import AttemptRecord, InvestigationContext
from saferun.model import JsonObject

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.captures.examiner import Answer
    from saferun.launch.recorder_rounds import RecorderRounds
    from saferun.watchdog.monitor import WatchedRank
    from saferun.watchdog.recorded_stragglers import RecordedStragglers
    from saferun.watchdog.stragglers import Straggler, Stragglers
    from saferun.watchdog.wait_watch import WaitWatch

# How long the leader waits for what another host reads: longer than the examiner may take there.
_BESIDE_S = 10.0
_ANSWER_S = 13.0
_LONGEST_LINE = 160
_MOST_LINES = 5
# The ranks in a report, which is part of a state of 4 KiB at most. If there are more, they take turns.
_MOST_ROWS = 56
_LONGEST_REPORT = 2500
# Hosts ask their ranks for their recorders at the same time, and not all of them are as fast.
_RECORDERS_S = 20.0


class SlowRankWatch:
    """Watches the ranks of one attempt; on the leader it compares those of the whole job.

    Args:
        context: of the launch.
        record: of the attempt.
    """

    def __init__(self, context: InvestigationContext, record: AttemptRecord) -> None:
        self._context = context
        self._record = record
        self._window_s = context.launch.config.watch.slow_window_s
        self._watch: WaitWatch | None = None
        self._dumps_s = context.launch.config.watch.slow_dumps_s
        self._stragglers: Stragglers | None = None
        self._rounds: RecorderRounds | None = None
        self._recorded: RecordedStragglers | None = None
        self._judge_recorded_at: float | None = None
        self._is_paused = False
        self._hosts: dict[int, str] = {}
        self._judge_at = 0.0
        self._reports = 0
        self._reported_at = 0.0
        self._pids: dict[int, int] = {}
        self._beside: Answer | None = None
        self._found: Straggler | None = None  # to be reported once its host has answered
        self._found_in: Stragglers | None = None
        self._found_until = 0.0
        if self._is_wanted:
            context.launch.job.reports.subscribe_waits(self._take_report, self._take_slow, self._take_beside)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [self._watch.deadline if self._watch is not None else None]
        moments.append(self._found_until if self._found is not None else None)
        moments += [self._rounds.deadline if self._rounds is not None else None, self._judge_recorded_at]
        return min((moment for moment in moments if moment is not None), default=None)

    @property
    def earliest(self) -> float | None:
        """The earliest moment at which ``tick`` has something to do, for a loop that is awake anyway."""
        sample_at = self._watch.earliest if self._watch is not None else None
        return min((moment for moment in (self.deadline, sample_at) if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._found is not None and self._found_until <= now:
            self._print(())
        if self._rounds is not None:
            self._rounds.tick(now)
        if self._judge_recorded_at is not None and self._judge_recorded_at <= now:
            self._judge_recorded_at = None
            if self._recorded is not None and not self._is_paused:
                self._judge(self._recorded, now)
        if self._watch is not None:
            self._watch.tick(now)

    def begin(self, now: float, ranks: Sequence[WatchedRank], process_of: Callable[[int], int | None]) -> None:
        """Watch these ranks. ``process_of``: the process that does the work of a local rank, where that is known."""
        self._pids = {rank.rank: rank.pid for rank in ranks}
        if self._dumps_s > 0:
            from saferun.launch.recorder_rounds import RecorderRounds

            self._rounds = RecorderRounds(self._context, self._dumps_s, self._share)
            self._rounds.begin(now, ranks)
        if self._window_s <= 0:
            return
        from saferun.watchdog.wait_watch import SampledRank, WaitWatch

        def process(rank: WatchedRank) -> int:
            return process_of(rank.local_rank) or rank.pid

        self._watch = WaitWatch(
            self._window_s,
            self._record.world_size,
            is_alone=not self._context.launch.config.hosts.spans_hosts,
            on_report=self._share,
            most_rows=_MOST_ROWS if self._context.launch.config.hosts.spans_hosts else 1 << 20,
        )
        self._watch.begin(now, {rank.local_rank: SampledRank(rank.rank, partial(process, rank)) for rank in ranks})

    def disable(self) -> None:
        """Stop comparing ranks in this attempt."""
        self._window_s = self._dumps_s = 0.0
        self._stragglers = self._recorded = self._found = self._judge_recorded_at = None
        beside, self._beside = self._beside, None
        watch, self._watch = self._watch, None
        rounds, self._rounds = self._rounds, None
        for close in (one for one in (beside and beside.close, watch and watch.end, rounds and rounds.end) if one):
            with suppress(OSError):
                close()

    def rank_ended(self, local_rank: int) -> None:
        """A rank has been reaped: the job ends, or is about to."""
        if self._rounds is not None:
            self._rounds.end()
        if self._watch is not None:
            self._watch.rank_ended(local_rank)

    def pause(self) -> None:
        """The job hangs, or its ranks are being captured."""
        self._found = self._judge_recorded_at = None
        self._is_paused = True
        if self._rounds is not None:
            self._rounds.pause()
        if self._watch is not None:
            self._watch.pause()
        for stragglers in (self._stragglers, self._recorded):
            if stragglers is not None:
                stragglers.forget()

    def resume(self, now: float) -> None:
        """The job goes on."""
        self._is_paused = False
        if self._rounds is not None:
            self._rounds.resume(now)
        if self._watch is not None:
            self._watch.resume(now)

    def end(self) -> None:
        """No rank is left."""
        self.pause()
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
        rounds, self._rounds = self._rounds, None
        if rounds is not None:
            rounds.end()

    @property
    def _is_wanted(self) -> bool:
        return self._window_s > 0 or self._dumps_s > 0

    # ---------------------------------------------------------------------------------------------------- on each host

    def _share(self, rows: list[list[int]]) -> None:
        rows = self._context.launch.guarded("see who is in a long phase", self._without_phases, rows) or rows
        self._reports += 1
        if len(repr(rows)) <= _LONGEST_REPORT or not self._context.launch.config.hosts.spans_hosts:
            self._context.launch.job.reports.share_waits({"n": self._reports, "rows": rows})

    def _without_phases(self, rows: list[list[int]]) -> list[list[int]]:
        """A rank that has announced a long phase (``saferun.expect``) cannot be compared with the others."""
        from saferun.watchdog.stragglers import empty_rows

        hook, attempt, since = self._context.hook, self._context.launch.attempt, self._reported_at
        self._reported_at = time.monotonic()
        excused = {rank for rank in self._pids if hook.was_in_phase(attempt, rank, since)}
        return [*(row for row in rows if row[0] not in excused), *empty_rows(sorted(excused))] if excused else rows

    def _take_slow(self, ranks: Sequence[int]) -> None:
        """These ranks are slow: have the likely reasons read for those of this host."""
        pids = [pid for rank, pid in self._pids.items() if rank in ranks]
        watches = self._watch is not None or self._rounds is not None
        if pids and watches and self._beside is None:
            self._context.launch.guarded("look for what slows a rank down", self._begin_beside, pids)

    def _begin_beside(self, pids: list[int]) -> None:
        from saferun.captures.examiner import Answer

        launch = self._context.launch
        poller = launch.guarded_poller
        try:
            self._beside = Answer(
                launch.examiner, poller, "beside", pids, _BESIDE_S, self._share_beside, is_urgent=False
            )
        except OSError:
            self._share_beside(b"")

    def _share_beside(self, content: bytes) -> None:
        from saferun.text.decoding import MALFORMED, loads

        self._beside = None
        try:
            lines = [str(line)[:_LONGEST_LINE] for line in loads(content)[:_MOST_LINES]]
        except MALFORMED:
            lines = []
        self._context.launch.job.reports.share_beside({"n": self._reports, "lines": lines})

    # --------------------------------------------------------------------------------------------------- on the leader

    def _take_report(self, host: str, ranks: range, rows: object) -> None:
        """A saferun has reported how often its ranks waited."""
        if self._is_wanted:
            self._context.launch.guarded("compare the ranks", self._take_counts, host, ranks, rows)

    def _take_counts(self, host: str, ranks: range, rows: object) -> None:
        if self._dumps_s > 0:
            self._take_recorded(host, ranks, rows)
        if self._window_s <= 0:
            return
        from saferun.watchdog.stragglers import REPORTS, Stragglers, counts_from
        from saferun.watchdog.wait_watch import report_interval_s

        now, world_size = time.monotonic(), self._record.world_size
        interval_s = report_interval_s(self._window_s, world_size)
        if self._stragglers is None:
            self._stragglers = Stragglers(interval_s * REPORTS, world_size)
        counts = counts_from(rows, ranks)
        self._stragglers.take(host, counts, now)
        self._hosts |= {count.rank: host or self._context.log.host for count in counts}
        # Once for all hosts, whose reports come at different times.
        if now >= self._judge_at and self._watch is not None and self._watch.deadline is not None:
            self._judge_at = now + interval_s * 0.9
            self._judge(self._stragglers, now)

    def _take_recorded(self, host: str, ranks: range, rows: object) -> None:
        from saferun.watchdog.recorded_stragglers import RecordedStragglers, recorded_rows

        recorded = recorded_rows(rows)
        if not recorded or self._is_paused:
            return
        now = time.monotonic()
        if self._recorded is None:
            self._recorded = RecordedStragglers(self._dumps_s, self._record.world_size)
        self._recorded.take_rows(host, recorded, ranks, now)
        self._hosts |= dict.fromkeys(ranks, host or self._context.log.host)
        if self._judge_recorded_at is None:
            alone = not self._context.launch.config.hosts.spans_hosts
            self._judge_recorded_at = now if alone else now + _RECORDERS_S

    def _judge(self, stragglers: Stragglers, now: float) -> None:
        found = stragglers.judge(now) if self._found is None else None
        self._write_table(stragglers)
        if found is None:
            return
        self._found, self._found_in, self._found_until = found, stragglers, now + _ANSWER_S
        self._context.launch.job.reports.broadcast_slow(found.ranks)

    def _take_beside(self, ranks: range, lines: Sequence[str]) -> None:
        if self._found is not None and self._found.ranks[0] in ranks:
            self._context.launch.guarded("compare the ranks", self._print, lines)

    def _print(self, beside: Sequence[str]) -> None:
        found, self._found = self._found, None
        if found is None or self._found_in is None:
            return
        from saferun.report.slow_text import slow_lines

        counts = self._found_in.counts(time.monotonic(), found.window_s)
        lines = slow_lines(found, counts, self._hosts, beside)
        self._context.print_lines(lines)
        row = self._context.log.add_slow(
            found, self._hosts.get(found.ranks[0], ""), lines, self._context.launch.attempt
        )
        self._context.launch.log.add_slow(row)

    def _write_table(self, stragglers: Stragglers) -> None:
        """Write what ``saferunctl status`` shows of ranks that are compared by their recorders, if any are."""
        if self._context.launch.run_dir.files.is_stalled:
            return  # the next one replaces it, and all of them would wait in memory
        now = time.monotonic()
        if self._recorded not in {None, stragglers} and self._recorded.counts(now, self._recorded.window_s):
            return
        counts = stragglers.counts(now, stragglers.window_s)
        ranks: list[JsonObject] = [
            {"rank": rank, "host": self._hosts.get(rank, ""), "waited": round(count.share, 3)}
            for rank, count in sorted(counts.items())
        ]
        launch = self._context.launch
        table = {
            "time": time.time(),
            "attempt": launch.attempt,
            "window_s": stragglers.window_s,
            "by": stragglers.by,
            "ranks": ranks,
        }
        launch.run_dir.write_json("waits.json", {**table, "slow": stragglers.slow})
