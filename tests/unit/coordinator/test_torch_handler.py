"""Calls of torch's rendezvous handlers: a store that stands still for a while ends no job."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.coordinator import control_search, handler_rendezvous, rendezvous_round, torch_handler
from saferun.coordinator.arrivals import Waiting
from saferun.coordinator.assignments import HostAssignment, HostRecord, assign
from saferun.coordinator.handler_rendezvous import HandlerRendezvous
from saferun.coordinator.host_record_collection import left_error, missing_error
from saferun.coordinator.join_answers import join_answers
from saferun.coordinator.rendezvous_round import (
    CancelledError,
    JoinFailedError,
    JoinFailure,
    RendezvousResult,
    RendezvousRound,
)
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.torch_handler import handler_conf
from saferun.text.typed_json import fit
from tests.unit.coordinator.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

JOIN: dict[str, Any] = {
    "backend": "c10d",
    "node_rank": None,
    "least": 2,
    "most": 2,
    "run_id": "job7",
    "timeout_s": 900.0,
    "probe_after_s": 1,
    "name": "node1",
    "tasks": 1,
}


class DistStoreError(RuntimeError):
    """As torch's: a wait timeout."""


class DistNetworkError(RuntimeError):
    """As torch's: the connection is gone."""


class RendezvousConnectionError(Exception):
    """As torch's."""


class Handler:
    """A handler whose store fails so many times, for a reason."""

    def __init__(self, failures: int, reason: Exception) -> None:
        self.calls = 0
        self._failures = failures
        self._reason = reason

    def next_rendezvous(self) -> str:
        self.calls += 1
        if self.calls <= self._failures:
            raise RendezvousConnectionError("see inner exception") from self._reason
        return "met"


def raising(error: Exception) -> Callable[[], None]:
    """A function that does nothing else."""

    def fail() -> None:
        raise error

    return fail


def meeting(remaining_s: float = 60.0, conf: dict[str, str] | None = None, connect_s: float = 0.0) -> Any:
    """A rendezvous under way."""
    request = SimpleNamespace(backend="c10d", endpoint="node1", conf=conf or {}, connect_s=connect_s, attempt=0)
    return SimpleNamespace(
        request=request,
        run_id="job",
        name="node2",
        least=2,
        most=2,
        timeout_s=900.0,
        remaining_s=remaining_s,
        is_over=False,
        is_torchs=False,
        check=lambda: None,
        set_status=lambda _text, **_more: None,
        wait_for=lambda _whom: None,
        endpoint_address=("node1", 29400),
        allow=lambda _seconds: None,
    )


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> HandlerRendezvous:
    """A rendezvous whose pauses are short."""
    monkeypatch.setattr(torch_handler, "_PAUSE_S", 0.001)
    monkeypatch.setattr(handler_rendezvous, "_RECHECK_S", 0.01)
    stores: Any = SimpleNamespace(store_class=object)
    return HandlerRendezvous(stores, -1)


def met(rendezvous: HandlerRendezvous, handler: Handler, rdzv: Any) -> Any:
    """What the next rendezvous comes to."""
    rendezvous._handler = handler
    return rendezvous._next_rendezvous(rdzv)


def test_a_store_that_stands_still_while_the_hosts_meet_ends_no_job(rendezvous: HandlerRendezvous) -> None:
    """Torch's client has given up as the store went on; whoever fails would close the rendezvous for all."""
    handler = Handler(3, DistStoreError("wait timeout after 60000ms, keys: /torch.rendezvous.job"))
    assert met(rendezvous, handler, meeting()) == "met"
    assert handler.calls == 4


@pytest.mark.parametrize(
    ("reason", "remaining_s"),
    [(DistNetworkError("Connection reset by peer"), 60.0), (DistStoreError("wait timeout"), -1.0)],
    ids=["the connection is gone", "the time is over"],
)
def test_what_another_try_does_not_mend_is_not_tried_again(
    rendezvous: HandlerRendezvous, reason: Exception, remaining_s: float
) -> None:
    handler = Handler(1, reason)
    with pytest.raises(JoinFailedError):
        met(rendezvous, handler, meeting(remaining_s))
    assert handler.calls == 1


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("here", [["node2"], ["node1", "node2"]], ids=["alone", "with others"])
@pytest.mark.parametrize("answers", [True, False])
def test_a_connection_that_is_gone_is_not_taken_for_the_end_of_a_store_that_answers(
    rendezvous: HandlerRendezvous, attempt: int, here: list[str], *, answers: bool
) -> None:
    """Nor for hosts that did not come, though some are missing still."""
    names = Waiting(here, is_all=True)
    rendezvous._arrivals = SimpleNamespace(store_answers=lambda: answers)  # type: ignore[assignment]
    rdzv = meeting()
    rdzv.request.attempt, rdzv.request.expected, rdzv.least = attempt, (), 3
    error = RendezvousConnectionError("see inner exception")
    error.__cause__ = DistNetworkError("Connection reset by peer")
    failed = rendezvous._explain(rdzv, error, names)
    assert ("this host's connection to the rendezvous 'job' at node1 broke" in failed.what) is answers
    assert ("start saferun on this host again" in failed.hint) is answers
    if not answers and here == ["node2"]:
        assert ("does not answer any more" in failed.what) is bool(attempt)


@pytest.mark.parametrize(("backend", "kind"), [("c10d", "gone"), ("etcd-v2", "gone"), ("mine", "")])
def test_a_first_host_that_dies_before_it_has_written_its_address_is_gone(
    rendezvous: HandlerRendezvous, backend: str, kind: JoinFailure
) -> None:
    """Torch waits for it within its rendezvous, which is complete: the others can meet again without it."""
    timeout = LookupError if backend == "etcd-v2" else DistStoreError
    handler: Any = SimpleNamespace(next_rendezvous=raising(timeout("wait timeout after 60000ms, keys: /MASTER_ADDR")))
    rdzv = meeting()
    rdzv.request.backend = backend
    with pytest.raises(JoinFailedError) as raised:
        met(rendezvous, handler, rdzv)
    assert raised.value.kind == kind
    assert ("the first host came to the rendezvous 'job' at node1" in raised.value.what) is bool(kind)


def test_nothing_is_tried_again_when_the_rendezvous_is_over(rendezvous: HandlerRendezvous) -> None:
    """A user has ended the job meanwhile."""
    rdzv = meeting()
    rdzv.is_over = True
    handler = Handler(1, DistStoreError("wait timeout"))
    with pytest.raises(JoinFailedError):
        met(rendezvous, handler, rdzv)
    assert handler.calls == 1


@pytest.mark.parametrize(
    ("backend", "conf", "expected"),
    [
        ("c10d", {}, {"timeout": 600, "join_timeout": 600}),
        ("etcd-v2", {"join_timeout": "7"}, {"timeout": 600, "join_timeout": "7"}),
        ("etcd", {}, {"timeout": 600}),
        ("etcd", {"timeout": "5"}, {"timeout": "5"}),
        ("mine", {"key": "value"}, {"timeout": 600, "key": "value"}),
        ("mine", {"timeout": "5", "join_timeout": "10m"}, {"timeout": "5", "join_timeout": "10m"}),
    ],
)
def test_a_handler_is_given_what_torchrun_gives_it(
    backend: str, conf: dict[str, str], expected: dict[str, object]
) -> None:
    """One that is registered may know no other time than ``timeout``."""
    assert handler_conf(backend, 600.4, conf) == expected


class Store:
    """torch's store, as far as its timeout is concerned."""

    def __init__(self) -> None:
        self.timeout = timedelta(seconds=15)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


@pytest.mark.parametrize(("connect_s", "expected_s"), [(0.0, 60), (120.0, 120), (2.0, 60), (1e9, 10**9)])
def test_the_store_of_a_handler_waits_as_long_as_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, connect_s: float, expected_s: int
) -> None:
    """``read_timeout``, a minute where it is not given."""
    store = Store()
    found: Callable[..., StoreClient] = lambda *_: StoreClient(store, ("node1", 29400))  # noqa: E731
    monkeypatch.setattr(handler_rendezvous, "find_endpoint_store", found)
    monkeypatch.setattr(StoreClient, "another", lambda client: client)
    backend = SimpleNamespace(C10dRendezvousBackend=lambda *_: None)
    dynamic = SimpleNamespace(create_handler=lambda given, *_: given)
    module = SimpleNamespace(c10d_rendezvous_backend=backend, dynamic_rendezvous=dynamic)
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed.elastic.rendezvous", module)
    assert rendezvous._open_c10d(meeting(connect_s=connect_s), None, ()) is store
    assert store.timeout == timedelta(seconds=expected_s)


@pytest.mark.parametrize(
    ("backend", "connect_s", "hosts", "most_s"),
    [
        ("c10d", 0.0, 2, 180.5),
        ("etcd-v2", 0.0, 2, 180.5),
        ("etcd", 0.0, 2, 180.5),
        ("c10d", 300.0, 2, 600.5),
        ("c10d", 0.0, 2048, 692.0),
        ("mine", 0.0, 2, 900.0),
    ],
)
def test_a_host_that_dies_as_torchs_rendezvous_completes_is_not_waited_for_until_the_start_timeout(
    monkeypatch: pytest.MonkeyPatch,
    rendezvous: HandlerRendezvous,
    backend: str,
    connect_s: float,
    hosts: int,
    most_s: float,
) -> None:
    """It was there a moment ago, so it has no reason to come late; in a handler of somebody else it may have one."""
    monkeypatch.setattr(rendezvous_round, "time", SimpleNamespace(monotonic=lambda: 0.0))
    request = {**JOIN, "backend": backend, "connect_s": connect_s, "least": hosts, "most": hosts}
    rdzv = RendezvousRound(fit(JoinRequest, request))
    assert rdzv.add(0, rdzv.request)
    monkeypatch.setattr(rendezvous, "_handler", SimpleNamespace(next_rendezvous=lambda: (object(), 0, hosts)))
    monkeypatch.setattr(rendezvous, "_lead", lambda rdzv, *_, **__: rdzv.remaining_s)
    remaining_s: Any = rendezvous.meet(rdzv)
    assert remaining_s == most_s
    assert rdzv.answer_s == (None if backend == "mine" else most_s)
    says = f"came to the rendezvous and then did not answer for {most_s:.0f} s"
    says = says if backend != "mine" else "did not come within 900 s"
    error = missing_error("1 of 2 hosts: node rank 1", rdzv.timeout_s, rdzv.answer_s)
    assert error.what == f"1 of 2 hosts {says}: node rank 1"


def test_a_limit_gives_no_time_that_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start timeout is the user's."""
    monkeypatch.setattr(rendezvous_round, "time", SimpleNamespace(monotonic=lambda: 0.0))
    rdzv = RendezvousRound(fit(JoinRequest, {**JOIN, "timeout_s": 60.0}))
    rdzv.limit(180.0)
    assert rdzv.remaining_s == rdzv.answer_s == 60.0


@pytest.mark.parametrize(
    ("attempt", "elastic", "kind", "times"),
    [
        (1, True, "usage", 4),
        (0, True, "usage", 1),
        (1, False, "usage", 1),
        (1, True, "", 1),
        (0, True, "again", 4),
    ],
    ids=["a running job", "no job has run", "all hosts are needed", "nobody was started wrongly", "the leader says so"],
)
def test_a_running_elastic_job_does_not_end_for_a_newcomer_that_was_started_wrongly(
    monkeypatch: pytest.MonkeyPatch,
    rendezvous: HandlerRendezvous,
    attempt: int,
    kind: JoinFailure,
    times: int,
    *,
    elastic: bool,
) -> None:
    """The hosts meet again without it, three times at most."""
    record = {"nproc": 1, "role": "default", "pid": 7, "addresses": [], "port": 0, "files": ""}
    request = {**JOIN, "least": 1, "elastic": elastic, "attempt": attempt, "record": record}
    rdzv = RendezvousRound(fit(JoinRequest, request))
    assert rdzv.add(0, rdzv.request)
    meetings: list[bool] = []

    def fail(*_: object, goes_on: bool) -> None:
        meetings.append(goes_on)
        raise JoinFailedError("node2 has no secret", "pass one", kind=kind)

    monkeypatch.setattr(rendezvous, "_handler", SimpleNamespace(next_rendezvous=lambda: (object(), 0, 2)))
    monkeypatch.setattr(rendezvous, "_lead", fail)
    with pytest.raises(JoinFailedError, match="node2 has no secret"):
        rendezvous.meet(rdzv)
    goes_on = attempt > 0 and elastic
    assert meetings == [goes_on, goes_on, goes_on, False][:times]


def reported_waiting(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, handler: SimpleNamespace, backend: str
) -> list[str]:
    """What an elastic job of at most two hosts hears of hosts that wait, once it has met."""
    rdzv = RendezvousRound(fit(JoinRequest, {**JOIN, "backend": backend, "least": 1, "most": 2}))
    rdzv.add(0, rdzv.request)
    monkeypatch.setattr(handler_rendezvous, "_POLL_S", 300.0)
    monkeypatch.setattr(rendezvous, "_handler", handler)
    monkeypatch.setattr(rendezvous, "_lead", lambda *_, **__: None)
    monkeypatch.setattr(rendezvous, "_run_id", lambda _: "")
    rendezvous.meet(rdzv)
    found: list[str] = []
    rendezvous.watch_membership(found.append)
    rendezvous._poll()
    rendezvous.watch_membership(None)
    rendezvous._ask(lambda: None)  # its thread ends no wait in another test
    return found


@pytest.mark.parametrize(("backend", "hosts", "restarts"), [("c10d", 2, False), ("c10d", 1, True), ("mine", 2, True)])
def test_a_job_with_as_many_hosts_as_it_takes_does_not_start_again_for_one_that_waits(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, backend: str, hosts: int, *, restarts: bool
) -> None:
    """After a restart torch counts a host beyond MAX among those that wait: the job would start again without end.

    Another handler may have a limit of its own.
    """
    handler = SimpleNamespace(next_rendezvous=lambda: (object(), 0, hosts), num_nodes_waiting=lambda: 1)
    found = reported_waiting(monkeypatch, rendezvous, handler, backend)
    assert found == (["1 host waits to join"] if restarts else [])


@pytest.mark.parametrize(("participants", "restarts"), [(2, False), (1, True)])
def test_a_job_that_met_in_full_takes_the_host_that_waits_once_torch_has_missed_one_of_its_own(
    rendezvous: HandlerRendezvous, monkeypatch: pytest.MonkeyPatch, *, participants: int, restarts: bool
) -> None:
    """A host that loses power says nothing: the others would wait for it until the hang timeout."""
    handler = SimpleNamespace(
        next_rendezvous=lambda: (object(), 0, 2),
        num_nodes_waiting=lambda: 1,
        settings=SimpleNamespace(max_nodes=2),
        _state_holder=SimpleNamespace(state=SimpleNamespace(participants=dict.fromkeys(range(participants), 0))),
    )
    found = reported_waiting(monkeypatch, rendezvous, handler, "c10d")
    assert found == (["1 host waits to join"] if restarts else [])


class RendezvousTimeoutError(Exception):
    """As torch's: the join timeout is over."""


class FullHandler:
    """torch's handler of a host that is late in each of its calls but the last.

    Args:
        late: in how many of them.
        others: the hosts that torch's rendezvous has during each of these calls.
    """

    def __init__(self, late: int, others: list[list[str]]) -> None:
        self.calls = 0
        self.settings = SimpleNamespace(max_nodes=2)
        self.observed = threading.Event()
        self._late, self._others = late, others
        self._this_node = "node2"
        self._state_holder = self

    @property
    def state(self) -> Any:
        self.observed.set()
        others = self._others[min(self.calls, len(self._others)) - 1] if self.calls else []
        return SimpleNamespace(complete=True, participants=dict.fromkeys(others, 0))

    def next_rendezvous(self) -> str:
        self.calls += 1
        if self.calls > self._late:
            return "met"
        self.observed.clear()
        assert self.observed.wait(30.0)
        raise RendezvousTimeoutError


@pytest.mark.parametrize(
    ("others", "calls"),
    [
        ([["node1", "node3"]], 4),
        ([["node1", "node3"], ["node1"]], 2),
        ([["node1"]], 1),
        ([["node1", "node2"]], 1),
    ],
    ids=["the job is full", "it was", "hosts are missing", "this host has its place"],
)
def test_a_host_for_which_a_running_job_has_no_room_waits_until_it_is_needed(
    rendezvous: HandlerRendezvous, others: list[list[str]], calls: int
) -> None:
    """After a restart, too: torch has it wait as long as for a missing host, and whoever gives up closes the job."""
    handler: Any = FullHandler(3, others)
    if calls == 4:
        assert met(rendezvous, handler, meeting(-1.0)) == "met"
    else:
        with pytest.raises(JoinFailedError, match="did not come to the rendezvous"):
            met(rendezvous, handler, meeting(-1.0))
    assert handler.calls == calls


@pytest.mark.parametrize("serves", [True, False])
def test_a_host_that_serves_torchs_rendezvous_says_so_to_the_leader(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, *, serves: bool
) -> None:
    """The leader would leave it out where it is at fault, and with its store gone no other host could meet again."""
    rdzv = RendezvousRound(fit(JoinRequest, JOIN))
    rdzv.add(0, rdzv.request)
    other = rdzv.wait_for_tasks()

    def lead(_rdzv: object, own: HostRecord, *_: object, **__: object) -> RendezvousResult:
        records = [other, own]
        return RendezvousResult(assign(records)[0], MemoryStore().client(), "job", "a0/", records, "node1", 29500)

    def opened(*_: object) -> object:
        rendezvous._serves = serves
        return SimpleNamespace(next_rendezvous=lambda: (object(), 0, 2))

    monkeypatch.setattr(rendezvous, "_open", opened)
    monkeypatch.setattr(rendezvous, "_lead", lead)
    result = rendezvous.meet(rdzv)
    assert result.needed == ((1,) if serves else ())
    joined = join_answers(result, 0, result.assignment.tasks[0])[-1]
    assert joined["needed"] == result.needed


@pytest.mark.parametrize(("backend", "kind"), [("c10d", "gone"), ("etcd", "gone"), ("mine", "")])
def test_hosts_of_which_one_is_gone_when_torchs_rendezvous_is_complete_can_meet_again(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, backend: str, kind: JoinFailure
) -> None:
    """It has left, its store has, or it does not answer. Of another handler it is not known what follows."""
    rdzv = RendezvousRound(fit(JoinRequest, {**JOIN, "backend": backend}))
    rdzv.add(0, rdzv.request)
    monkeypatch.setattr(rendezvous, "_handler", SimpleNamespace(next_rendezvous=lambda: (object(), 0, 2)))

    def fail(*_: object, **__: object) -> None:
        raise StoreBrokenError("connection reset")

    monkeypatch.setattr(rendezvous, "_lead", fail)
    with pytest.raises(JoinFailedError, match="a store broke") as raised:
        rendezvous.meet(rdzv)
    late = missing_error("1 of 2 hosts: node2", rdzv.timeout_s, rdzv.answer_s)
    assert [raised.value.kind, left_error("node2", rdzv).kind] == [kind, kind]
    assert late.kind == (kind or "incomplete")
    before = RendezvousRound(fit(JoinRequest, JOIN))
    assert not left_error("node2", before).kind, "it may come until the start timeout"


def test_a_host_that_stood_still_while_the_others_met_can_meet_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torch's rendezvous counts it in."""
    now = 0.0
    monkeypatch.setattr(rendezvous_round, "time", SimpleNamespace(monotonic=lambda: now))
    counted_in, other = (RendezvousRound(fit(JoinRequest, JOIN)) for _ in range(2))
    counted_in.limit(180.0)
    now = 1000.0
    errors = [rdzv.overdue() for rdzv in (counted_in, other)]
    assert [error.kind for error in errors if error is not None] == ["gone", ""]


class Leader:
    """Finds the control store of the leader, whose connections break."""

    def __init__(self, memory: MemoryStore) -> None:
        self.found = 0
        self._memory = memory

    def find(self, _rdzv: object, *, moved: bool) -> tuple[StoreClient, Any, str]:
        assert not moved
        self.found += 1
        return self._memory.client(), SimpleNamespace(job="job", ranks_port=29500), "node0"


@pytest.mark.parametrize("job", ["job", "another", None])
def test_a_connection_that_breaks_while_the_hosts_meet_is_made_again_where_the_leader_is_there(
    monkeypatch: pytest.MonkeyPatch, rendezvous: HandlerRendezvous, job: str | None
) -> None:
    """The leader has this host's record, and the others wait for its ranks."""
    rdzv = RendezvousRound(fit(JoinRequest, JOIN))
    rdzv.add(0, rdzv.request)
    memory, tries = MemoryStore(), list[str]()
    leader = Leader(memory)
    if job is not None:
        memory.write("saferun/job", job)
    assignment = assign([rdzv.wait_for_tasks()] * 2)[1]

    def await_assignment(*_: object) -> HostAssignment:
        tries.append("")
        if len(tries) < 3:
            raise StoreBrokenError("connection reset")
        return assignment

    monkeypatch.setattr(handler_rendezvous, "LeaderSearch", lambda *_: leader)
    monkeypatch.setattr(handler_rendezvous, "await_assignment", await_assignment)
    monkeypatch.setattr(control_search, "_JOB_TIMEOUT_S", 0.1)
    stores: Any = SimpleNamespace(store_class=object, drop_control=lambda: None, drop_ranks=lambda: None)
    monkeypatch.setattr(rendezvous, "_stores", stores)
    if job == "job":
        assert rendezvous._follow(rdzv, rdzv.wait_for_tasks(), None, 1).assignment is assignment
        assert leader.found == 3
    else:
        with pytest.raises(StoreBrokenError):
            rendezvous._follow(rdzv, rdzv.wait_for_tasks(), None, 1)


def test_a_rendezvous_that_is_over_touches_no_store(rendezvous: HandlerRendezvous) -> None:
    """Another one may be under way, or its attempt: the thread of this one had stood still."""
    rdzv = RendezvousRound(fit(JoinRequest, JOIN))
    rdzv.add(0, rdzv.request)
    own = rdzv.wait_for_tasks()
    rdzv.is_over = True
    with pytest.raises(CancelledError):
        rendezvous._lead(rdzv, own, None, 2, None, goes_on=False)
    with pytest.raises(CancelledError):
        rendezvous._follow(rdzv, own, None, 1)
