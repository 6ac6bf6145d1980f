"""What inspections of a quiet rank say: transfers and other threads' work against heartbeats, queries and monitors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.inspection_values import Connection, JobInspection, NcclCalls, RankInspection, Thread
from saferun.watchdog.quiet_work import QuietWork, inspection_from

INTERVAL_S = 1.2
EVERY_S = 60.0
PATIENCE_S = 1200.0


class Looks:
    """Looks at a rank of which one connection and one thread do the same all the time, since ``began_s``.

    Rates are per second; ``burst_s`` is how far bursts are apart.
    """

    def __init__(
        self,
        *,
        taken: float = 0,
        sent: float = 0,
        burst_s: float = 0.0,
        accepted: bool = False,
        run: float = 0,
        io: float = 0,
        wakes: float = 1,
        began_s: float = -1000.0,
        worked_before: bool = True,
        internal: bool = False,
        **thread: Any,
    ) -> None:
        self.taken, self.sent, self.burst_s, self.accepted = taken, sent, burst_s, accepted
        self.run, self.io, self.wakes, self.began_s = run, io, wakes, began_s
        self.worked_before = worked_before
        self.internal = internal
        self.thread = thread
        self.quiet_work = QuietWork()

    def _total(self, rate: float, at: float) -> int:
        done_s = at - self.began_s
        if self.burst_s:
            done_s = done_s // self.burst_s * self.burst_s
        return int(rate * done_s)

    def take(self, at: float, still_since_s: float = 0.0) -> str:
        """What is said at a time."""
        moments_s = tuple(at + INTERVAL_S * number for number in range(4))
        connection = Connection(
            7,
            self.accepted,
            tuple(self._total(self.taken, at) for at in moments_s),
            tuple(self._total(self.sent, at) for at in moments_s),
        )
        worked_s = moments_s[-1] - (self.began_s if self.worked_before else max(self.began_s, 0.0))
        thread = Thread(
            12,
            100,
            moments_s[-1] - self.began_s,
            "python3",
            False,
            int(self.run * worked_s * 1e9),
            tuple(int(self.wakes * (at - self.began_s)) for at in moments_s),
            int(self.io * worked_s),
            0,
            0,
            (),
        )
        connection = connection._replace(may_be_internal=self.internal)
        look = RankInspection(0, (connection,), (thread._replace(**self.thread),))
        return self.quiet_work.take(moments_s, look, still_s=moments_s[-1] - still_since_s, patience_s=PATIENCE_S)

    def all(self, count: int = 4) -> list[str]:
        """One look after the other."""
        return [self.take(EVERY_S * number) for number in range(1, count + 1)]


WORKS, MAY_WORK, WAITS = "works", "may work", "waits"


@pytest.mark.parametrize(
    "does",
    [
        pytest.param({"taken": 1000}, id="a slow download"),
        pytest.param({"taken": 1e6, "sent": 1000}, id="a fast download"),
        pytest.param({"sent": 1e6}, id="an upload"),
        pytest.param({"taken": 3e6, "sent": 1e6}, id="answers of a database"),
        pytest.param({"taken": 1000, "sent": 20, "burst_s": 0.5}, id="progress of a query"),
    ],
)
def test_transfers_are_seen_in_one_look(does: dict[str, Any]) -> None:
    assert Looks(**does).all() == [WORKS] * 4


@pytest.mark.parametrize(
    "does",
    [
        pytest.param({"taken": 1000, "burst_s": 10.0}, id="pushed in bursts"),
        pytest.param({"taken": 100_000, "sent": 3000, "burst_s": 15.0}, id="fetched in pieces"),
        pytest.param({"sent": 100_000, "burst_s": 15.0}, id="sent in pieces"),
    ],
)
def test_bursts_are_seen_between_looks(does: dict[str, Any]) -> None:
    assert Looks(**does).all()[1:] == [WORKS] * 3


def test_calls_that_nccl_launches_between_inspections_are_work() -> None:
    """Each communicator counts for itself, and one that was not there before says nothing."""

    def inspections(*counts: dict[str, int]) -> list[str]:
        quiet_work = QuietWork()
        return [
            quiet_work.take(
                (60.0 * number, 60.0 * number + 1),
                RankInspection(
                    0, (), (), (), nccl_calls=tuple(NcclCalls(name, launched) for name, launched in one.items())
                ),
                still_s=60.0 * number,
                patience_s=PATIENCE_S,
            )
            for number, one in enumerate(counts, 1)
        ]

    assert inspections({"a": 5}, {"a": 6}, {"a": 6}) == [WAITS, WORKS, WAITS]
    assert inspections({"a": 5}, {"a": 5, "b": 9}, {"b": 9, "a": 4}) == [WAITS] * 3
    assert inspections({}, {"a": 5}, {}, {"a": 6}) == [WAITS] * 4


@pytest.mark.parametrize(
    "does",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"taken": 20}, id="keep-alives"),
        pytest.param({"taken": 150, "sent": 200, "burst_s": 2.0}, id="a query every two seconds"),
        pytest.param({"taken": 600, "sent": 150, "burst_s": 3.0}, id="long answers every three seconds"),
        pytest.param({"taken": 600, "sent": 400, "burst_s": 10.0}, id="a heartbeat with a handshake"),
        pytest.param({"sent": 1000, "burst_s": 10.0}, id="metrics that are pushed"),
        pytest.param({"sent": 1e5, "taken": 200, "burst_s": 15.0, "accepted": True}, id="metrics that are fetched"),
    ],
)
def test_what_a_hang_does_not_stop_is_no_work(does: dict[str, Any]) -> None:
    assert Looks(**does).all() == [WAITS] * 4


@pytest.mark.parametrize(
    "does", [{"taken": 1000}, {"sent": 1000}, {"taken": 1000, "sent": 20, "burst_s": 0.5}], ids=["from", "to", "bursts"]
)
def test_a_slow_transfer_is_believed_for_some_time_and_never_denied(does: dict[str, Any]) -> None:
    """One that sends heartbeats forever would hide a hang forever."""
    looks = Looks(**does)
    assert looks.all(19) == [WORKS] * 19
    assert {looks.take(1210.0), looks.take(36_000.0)} == {MAY_WORK}
    fast = Looks(taken=50e3)
    assert {fast.take(60.0), fast.take(36_000.0)} == {WORKS}


@pytest.mark.parametrize("does", [{"taken": 1e6}, {"sent": 1e6}, {"taken": 1000}, {"taken": 100e3, "burst_s": 20.0}])
def test_what_hosts_of_the_job_send_each_other_may_be_the_ranks_own(does: dict[str, Any]) -> None:
    """Or a download from a service there: it leaves a verdict uncertain, and no more."""
    looks = Looks(**does, internal=True)
    assert looks.all()[1:] == [MAY_WORK] * 3
    assert looks.take(36_000.0) == MAY_WORK
    assert Looks(taken=20, internal=True).all() == [WAITS] * 4


def test_a_socket_whose_number_was_given_again_is_another_one() -> None:
    """Its totals begin at nothing, which is no progress backwards."""
    looks = Looks(taken=100e3, burst_s=15.0)
    looks.take(60.0)
    looks.began_s, looks.burst_s, looks.taken = 100.0, 25.0, 150e3
    assert looks.take(120.0) == WAITS
    assert looks.take(180.0) == WORKS


@pytest.mark.parametrize(
    "does",
    [
        pytest.param({"run": 0.02}, id="works a little"),
        pytest.param({"io": 1000}, id="writes slowly"),
        pytest.param({"io": 1e6}, id="writes"),
    ],
)
def test_a_thread_that_begins_to_work_when_the_main_thread_waits_is_work(does: dict[str, Any]) -> None:
    """It was there before: a pool, or a thread that writes checkpoints."""
    assert Looks(**does, worked_before=False).all()[1:] == [WORKS] * 3


@pytest.mark.parametrize(
    "does",
    [
        pytest.param({"run": 0.02}, id="a monitor"),
        pytest.param({"run": 0.006, "wakes": 95}, id="polls"),
        pytest.param({"io": 1000}, id="a log"),
        pytest.param({"run": 0.002, "began_s": 0.0}, id="a heartbeat"),
        pytest.param({"run": 0.006, "worked_before": False, "name": "pt_gloo_runloop"}, id="gloo"),
        pytest.param({"run": 0.9, "worked_before": False, "name": "NCCL Progress 0"}, id="NCCL"),
    ],
)
def test_what_a_thread_does_always_is_no_work(does: dict[str, Any]) -> None:
    """As far as can be known, and what it does is little."""
    assert Looks(**does).all() == [WAITS] * 4


def test_a_thread_that_is_busy_may_busy_loop() -> None:
    """Its stacks decide. Until then no verdict is certain, unless it has always been so busy."""
    assert Looks(run=0.9, worked_before=False).all() == [WAITS, *[MAY_WORK] * 3]
    assert Looks(run=0.9, began_s=1.0).all() == [MAY_WORK] * 4
    assert Looks(run=0.9).all() == [WAITS] * 4


def test_of_a_thread_that_is_new_it_is_not_known() -> None:
    """Neither that it works, forever, nor that it does not."""
    looks = Looks(run=0.02, began_s=1.0)
    assert looks.all(19) == [WORKS] * 19
    assert looks.take(1210.0) == MAY_WORK
    assert looks.take(3610.0) == WAITS


def test_a_thread_that_waits_for_a_disk_again_and_again_works() -> None:
    """One that waits for a dead disk is not woken up between."""
    assert Looks(in_disk_waits=3, wakes=5).all() == [WORKS] * 4
    # That may as well be a single long write.
    assert Looks(in_disk_waits=4, wakes=0).all() == [MAY_WORK] * 4


def test_a_thread_that_data_wakes_up_in_each_interval_works() -> None:
    """Where nothing else counts what it receives."""
    assert Looks(data_wakes=(3, 1, 2), is_main=True).all() == [WORKS] * 4
    assert Looks(data_wakes=(3, 0, 2), is_main=True).all() == [WAITS] * 4


def test_a_server_of_this_host_at_work_is_work() -> None:
    """A rank that waits for its compile server shows nothing itself. One that idles is no reason to wait."""
    moments_s = (60.0, 61.2, 62.4, 63.6)
    for busy_s, does in (((5.0, 6.0, 7.0, 8.0), WORKS), ((5.0, 5.0, 5.1, 5.1), WAITS), ((), WAITS)):
        look = RankInspection(0, (), (), busy_s)
        assert QuietWork().take(moments_s, look, still_s=60.0, patience_s=PATIENCE_S) == does


def test_what_was_before_the_rank_moved_is_forgotten() -> None:
    """The next time that it stands still other threads wait."""
    looks = Looks(run=0.02, worked_before=False)
    assert [looks.take(60.0), looks.take(120.0)] == [WAITS, WORKS]
    looks = Looks(sent=100_000, burst_s=15.0)
    assert [looks.take(60.0), looks.take(120.0, still_since_s=115.0)] == [WAITS, WAITS]


COUNTS = st.integers(0, 1 << 62)
FOUR = st.tuples(COUNTS, COUNTS, COUNTS, COUNTS)
THREADS = st.builds(
    Thread,
    tid=st.integers(1, 3),
    start_ticks=st.integers(0, 2),
    age_s=st.floats(-1e6, 1e9),
    name=st.sampled_from(["python3", "pt_gloo", ""]),
    is_main=st.booleans(),
    run_ns=COUNTS,
    wakes=FOUR | st.just(()),
    io_bytes=COUNTS,
    major_faults=COUNTS,
    in_disk_waits=st.integers(0, 5),
    data_wakes=st.lists(COUNTS, max_size=3).map(tuple),
)
CONNECTIONS = st.builds(Connection, st.integers(0, 3), st.booleans(), FOUR, FOUR, st.booleans())
RANKS = st.builds(
    RankInspection,
    local_rank=st.just(0),
    connections=st.lists(
        st.builds(Connection, st.integers(0, 3), st.booleans(), FOUR, FOUR, st.booleans()), max_size=3
    ),
    threads=st.lists(THREADS, max_size=3),
    servers_busy_s=st.just(()) | st.tuples(*[st.floats(0, 1e9)] * 4),
    is_frozen=st.booleans(),
)


@given(st.lists(st.tuples(RANKS, st.floats(0, 1e9), st.floats(0, 1e6)), max_size=4))
def test_counters_may_say_anything(inspections: list[tuple[RankInspection, float, float]]) -> None:
    """They may go backwards, where a number is given again; what is found is one of three things, and no exception."""
    quiet_work = QuietWork()
    for found, at, still_s in inspections:
        moments_s = (at, at + 1, at + 2, at + 3)
        does = quiet_work.take(moments_s, found, still_s=still_s, patience_s=PATIENCE_S)
        assert does in {WORKS, MAY_WORK, WAITS}


@pytest.mark.parametrize("content", [b"", b"[]", b"[[1.0],[]]", b'[["a","b"],[]]', b"{", b"[[1.0,2.0],[[0,[[7]],[]]]]"])
def test_an_answer_that_is_none_is_no_look(content: bytes) -> None:
    """The process that answers may have been killed in the middle."""
    assert inspection_from(content) is None


def test_a_look_survives_its_journey() -> None:
    thread = Thread(5, 6, 7.5, "python3", True, 8, (1, 2), 9, 0, 1, (1,))
    look = JobInspection((1.0, 2.0), (RankInspection(0, (Connection(3, True, (1, 2), (3, 4)),), (thread,)),))
    assert inspection_from(json.dumps(look).encode()) == look
