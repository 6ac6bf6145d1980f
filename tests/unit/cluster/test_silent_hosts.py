"""The control path as a supervisor sees it: what it says, tells and decides. The ranks are what the test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster import silent_hosts as silent_hosts_module
from saferun.cluster.silence import Progress
from saferun.cluster.silent_hosts import SilenceLimits, SilentHosts, ThisHost
from saferun.linux.poller import Poller
from tests.unit.cluster.nics import stand_in_for_nics

TIMEOUT_S = 10.0
GOES_ON = "the ranks make progress, so the job goes on"


class Ranks:
    """Stands in for what is seen of the ranks."""

    def __init__(self, _span_s: float, _poller: Poller) -> None:
        self.deadline: float | None = None
        self.seen = Progress(runs=True, watched_s=0.0, still_s=0.0, quiet_s=0.0)

    def begin(self, now: float) -> None:
        if self.deadline is None:
            self.deadline = now

    def end(self) -> None:
        self.deadline = None

    def tick(self, now: float, _ranks: object) -> None:
        assert self.deadline is not None
        self.deadline = now + 1.0

    def progress(self, _now: float, *, runs: bool) -> Progress:
        return self.seen._replace(runs=runs)


class World:
    """One host's view."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        leads: bool,
        patience_after_s: float = float("inf"),
        hang_timeout_s: float = 0.0,
    ) -> None:
        self.now = 1000.0
        self.others = False  # whether there are other hosts with ranks
        self.ended = False  # whether all ranks of this one have ended well
        self.said: list[str] = []
        self.lost: list[tuple[int, str, str]] = []
        self.notices: list[str] = []
        self.silent: list[str] = []
        self.reports: list[tuple[int, int]] = []
        self.nics: dict[str, str] = {"eth0": "", "eth1": ""}
        monkeypatch.setattr(silent_hosts_module, "ProgressWatch", Ranks)
        stand_in_for_nics(monkeypatch, self.nics)
        monkeypatch.setattr("saferun.cluster.silent_hosts.time", SimpleNamespace(monotonic=lambda: self.now))
        self.silent_hosts = SilentHosts(
            Poller(),
            SilenceLimits(TIMEOUT_S, hang_timeout_s, patience_after_s),
            ThisHost("node3", "node1", leads=leads, is_head=True, addresses=("10.77.0.1", "10.78.0.1")),
            ranks=lambda: [] if self.ended else [object()],  # type: ignore[list-item]
            print_line=self.said.append,
            on_lost=lambda *lost: self.lost.append(lost),
            on_notice=self.notices.append,
            on_leader_silence=self.silent.append,
            ask_others=lambda: self.others,
            on_progress=lambda *counts: self.reports.append(counts),
            has_ended=lambda: self.ended,
            is_done=lambda _: False,
        )

    @property
    def ranks(self) -> Ranks:
        watch: Any = self.silent_hosts._watch
        return watch  # type: ignore[no-any-return]

    def hear(self, op: str, **fields: Any) -> None:
        self.silent_hosts.hear({"op": op, **fields})

    def miss(self, host: int, why: str = "unreachable") -> None:
        self.hear("silent", host=host, label=f"node{host + 1}", why=why, text="no address answers")

    def see(self, *, watched_s: float, still_s: float, unannounced_s: float = float("inf")) -> None:
        """What is seen of the ranks from now on."""
        self.ranks.seen = Progress(
            runs=True, watched_s=watched_s, still_s=still_s, quiet_s=still_s, unannounced_s=unannounced_s
        )
        self.now += 1.0
        self.silent_hosts.tick(self.now)


def test_a_doubt_that_comes_to_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are watched for a while, and then no more."""
    world = World(monkeypatch, leads=True)
    due = [world.silent_hosts.deadline]
    world.hear("late")
    due.append(world.silent_hosts.deadline)
    world.see(watched_s=1.0, still_s=0.0)
    due.append(world.silent_hosts.deadline)
    world.now += 3 * TIMEOUT_S
    world.see(watched_s=31.0, still_s=0.0)
    due.append(world.silent_hosts.deadline)
    assert due == [None, 1000.0, 1002.0, None]
    assert not world.said


def test_ranks_that_move_are_one_warning_and_hosts_that_are_silent_together_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often the coordinator looks again."""
    world = World(monkeypatch, leads=True)
    world.hear("late")
    for host in (1, 2):
        world.miss(host)
    assert not world.said
    world.see(watched_s=3.0, still_s=0.0)
    for host in (1, 2):
        world.miss(host)
    world.see(watched_s=9.0, still_s=0.0)
    assert world.said == ["saferun: warning: no heartbeat received from node2, node3 (no address answers); " + GOES_ON]
    assert world.silent_hosts.silent_but_tolerated == {1, 2}
    assert not world.lost
    world.hear("returned", host=1)
    assert world.said[1:] == ["saferun: node2 answers again after 2 s"]
    assert world.silent_hosts.silent_but_tolerated == {2}


def test_a_host_that_may_come_back_is_waited_for_until_the_job_counts_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning, and not a second one when the ranks have stood still for longer than a host may be silent."""
    world = World(monkeypatch, leads=True, patience_after_s=0.0, hang_timeout_s=60.0)
    world.hear("late")
    world.see(watched_s=5.0, still_s=5.0)
    world.miss(2)
    sequel = "the job ends if no rank makes progress for 60 s (sooner with --host-timeout)"
    assert world.said == [f"saferun: warning: no heartbeat received from node3 (no address answers); {sequel}"]
    world.see(watched_s=59.0, still_s=59.0)
    assert not world.lost
    world.hear("returned", host=2)
    assert world.said[1:] == ["saferun: node3 answers again after 1 s"]
    world.miss(2)
    world.see(watched_s=61.0, still_s=61.0)
    assert world.lost == [(2, "unreachable", "no address answers")]


def test_who_is_silent_as_the_start_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic job tries it again without that host."""
    world = World(monkeypatch, leads=True, patience_after_s=120.0, hang_timeout_s=300.0)
    world.hear("late")
    world.see(watched_s=12.0, still_s=12.0)
    world.miss(2)
    assert world.lost == [(2, "unreachable", "no address answers")]
    world.now += 120.0
    world.miss(1)
    assert world.lost[1:] == []


def test_without_a_hang_timeout_it_is_waited_for_as_long_as_the_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, leads=True, patience_after_s=0.0)
    world.hear("late")
    world.see(watched_s=5.0, still_s=5.0)
    world.miss(2, "frozen")
    world.see(watched_s=5000.0, still_s=5000.0)
    assert not world.lost
    sequel = "no rank makes progress, and the job waits"
    assert world.said == [f"saferun: warning: no heartbeat received from node3 (no address answers); {sequel}"]


def test_a_host_whose_saferun_is_gone_is_lost_at_once_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, leads=True, patience_after_s=0.0, hang_timeout_s=60.0)
    world.hear("late")
    world.miss(2, "gone")
    assert world.lost == [(2, "gone", "no address answers")]
    # Also where that is found later: it has started again.
    world.see(watched_s=5.0, still_s=5.0)
    world.miss(1)
    world.see(watched_s=12.0, still_s=12.0)
    world.miss(1, "gone")
    assert world.lost[1:] == [(1, "gone", "no address answers")]


def test_ranks_that_stand_still_are_a_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the words of what was found."""
    world = World(monkeypatch, leads=True)
    world.hear("late")
    world.see(watched_s=5.0, still_s=5.0)
    world.miss(2)
    assert world.lost == [(2, "unreachable", "no address answers")]
    assert not world.said


def test_a_host_whose_own_interface_is_cut_does_not_blame_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows that its own has no carrier; while it goes on, and where it ends."""
    world = World(monkeypatch, leads=False)
    world.hear("late")
    world.nics["eth0"] = "has no carrier"
    world.miss(0)
    world.see(watched_s=3.0, still_s=0.0)
    assert world.said == ["saferun: warning: node3: eth0 has no carrier; node1 cannot be reached; " + GOES_ON]
    assert world.silent == ["node1 cannot be reached"]
    world.see(watched_s=30.0, still_s=TIMEOUT_S)
    assert world.lost == [(0, "nic", "eth0 has no carrier")]


def test_a_way_that_has_moved_is_reported_with_the_interface_that_is_amiss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host that leads tells its user; this one says nothing itself."""
    world = World(monkeypatch, leads=False)
    world.nics["eth0"] = "has no carrier"
    world.hear("returned", host=0, was="node1", now="10.78.0.1")
    assert world.notices == ["eth0 has no carrier; messages to node1 go over eth1 (10.78.0.1) now"]
    assert not world.said


def test_a_line_that_is_there_again_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to where it led before."""
    world = World(monkeypatch, leads=False)
    world.hear("returned", host=0, was="node1", now="node1")
    assert [*world.notices, *world.said, *world.silent] == []


@pytest.mark.parametrize("leads", [True, False])
def test_where_its_ranks_ended_well_a_host_waits_for_the_one_that_it_cannot_hear(
    monkeypatch: pytest.MonkeyPatch, leads: bool
) -> None:
    """There is nothing to be seen that could tell whether that is at work; torchrun would wait, too."""
    world = World(monkeypatch, leads=leads)
    world.ended = True
    world.see(watched_s=30.0, still_s=30.0)
    world.miss(0 if not leads else 2)
    world.see(watched_s=99.0, still_s=99.0)
    assert not world.lost
    assert world.silent_hosts.silent_but_tolerated == {0 if not leads else 2}
    said = [
        "warning: no heartbeat received from node3 (no address answers)",
        "warning: node3: node1 cannot be reached (no",
    ]
    (line,) = world.said
    assert line.removeprefix("saferun: ").startswith(said[0] if leads else said[1])
    assert GOES_ON not in line


def test_a_host_that_is_asked_reports_a_phase_that_a_rank_announced_as_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first host has no ranks that could show it, and asks others."""
    for unannounced_s, reports in ((0.0, [(1, 1)]), (float("inf"), [])):
        world = World(monkeypatch, leads=False)
        world.silent_hosts.watch()
        world.see(watched_s=9.0, still_s=9.0, unannounced_s=unannounced_s)
        assert world.reports == reports


def test_ranks_of_other_hosts_are_asked_where_those_of_this_one_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """While those stand still, the host that is not heard is lost; once they have ended as well, it is waited for."""
    for still_running in (True, False):
        world = World(monkeypatch, leads=True)
        world.ended = world.others = True
        world.hear("late")
        world.see(watched_s=4.0, still_s=4.0)
        world.miss(2)
        world.others = still_running
        world.now += 4.0
        world.see(watched_s=9.0, still_s=9.0)
        assert bool(world.lost) is still_running
        assert world.silent_hosts.silent_but_tolerated == (set() if still_running else {2})
