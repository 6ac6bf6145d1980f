"""Which ports a host of a job listens on, and what it does where one is in use. The sockets are the test's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from saferun.cluster import host_ports as host_ports_module
from saferun.cluster.host_ports import HostPorts
from saferun.config import HostsConfig, LaunchConfig, TaskConfig
from saferun.errors import SaferunError
from tests.unit.samples import CONFIG

FREE = 40000  # the first port that the kernel chooses


class Listener:
    """Stands in for a listening socket; its descriptor has the number of its port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_closed = False

    def getsockname(self) -> tuple[str, int]:
        return "::", self.port

    def fileno(self) -> int:
        return self.port

    def close(self) -> None:
        self.is_closed = True


class TaskSockets:
    """Stands in for the place where the tasks of a host meet."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.squatted = ["/tmp/saferun-0: it belongs to bob\x1b; the tasks of this job meet elsewhere"]
        self.refused: list[tuple[object, str]] = []

    def listen(self) -> tuple[Listener, str]:
        return Listener(7), "/tasks.sock"

    def refuse(self, listener: object, path: str) -> None:
        self.refused.append((listener, path))


@pytest.fixture(name="used")
def _used(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ports that other processes have."""
    used: set[int] = set()
    chosen = iter(range(FREE, FREE + 100))

    def hold_port(port: int | None, *, source: str = "") -> Listener:
        if port in used:
            raise SaferunError(f"port {port} is in use", source)
        return Listener(port or next(chosen))

    def hold_first(ports: Sequence[int], source: str) -> Listener:
        free = [port for port in ports if port not in used]
        return hold_port((free or ports)[0], source=source)

    monkeypatch.setattr(host_ports_module, "hold_port", hold_port)
    monkeypatch.setattr(host_ports_module, "hold_first", hold_first)
    monkeypatch.setattr(host_ports_module, "TaskSockets", TaskSockets)
    return used


def bound(config: LaunchConfig, *, is_head: bool = True, is_endpoint_here: bool = False) -> HostPorts:
    ports = HostPorts(config, lambda _: None, is_head=is_head)
    ports.bind(is_endpoint_here=is_endpoint_here)
    return ports


def static(node_rank: int, control: str = "auto", *, spares: int = 0, task: TaskConfig | None = None) -> LaunchConfig:
    hosts = HostsConfig(2, 2, node_rank, spares=spares, task=task)
    rendezvous = CONFIG.rendezvous._replace(master_port=29500, control=control)
    return CONFIG._replace(hosts=hosts, rendezvous=rendezvous)


def c10d(*conf: tuple[str, str]) -> LaunchConfig:
    rendezvous = CONFIG.rendezvous._replace(backend="c10d", address=("node1", 29400), conf=conf)
    return CONFIG._replace(hosts=HostsConfig(2, 2, None), rendezvous=rendezvous)


@pytest.mark.usefixtures("used")
def test_the_first_host_of_a_static_job_listens_for_the_ranks_store() -> None:
    """On the master's port; the other hosts have none but their own for liveness probes."""
    assert bound(static(0)).fds == {"store": 29500, "control": FREE}
    first, second = bound(static(0)), bound(static(1))
    assert (first.store, first.control) == (29500, FREE + 1)
    assert (second.fds, second.store, second.control) == ({"control": FREE + 2}, 0, FREE + 2)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_host_that_may_lead_one_day_has_a_port_for_the_store_as_well(used: set[int], *, is_used: bool) -> None:
    """With the number that it has elsewhere, if that is free here."""
    used |= {29500} if is_used else set()
    assert bound(static(1, spares=1)).store == (FREE if is_used else 29500)


@pytest.mark.usefixtures("used")
def test_any_host_of_an_elastic_job_may_serve_the_ranks_store() -> None:
    """And the one that is the endpoint serves that as well."""
    assert bound(c10d()).fds == {"store": FREE, "control": FREE + 1}
    assert bound(c10d(), is_endpoint_here=True).fds["endpoint"] == 29400


def test_an_endpoint_that_another_process_serves_is_no_fault(used: set[int]) -> None:
    """It may be the saferun of another task of this host; unless the options say that this one is to serve it."""
    used.add(29400)
    assert "endpoint" not in bound(c10d(), is_endpoint_here=True).fds
    with pytest.raises(SaferunError, match="port 29400 is in use"):
        bound(c10d(("is_host", "1")), is_endpoint_here=True)


def test_the_port_of_messages_is_the_given_one_where_the_others_look_for_it(used: set[int]) -> None:
    """On the first host; elsewhere any port will do, as several hosts may be on one machine."""
    assert [bound(static(node_rank, "29600")).control for node_rank in (0, 1)] == [29600, FREE]
    used.add(29600)
    with pytest.raises(SaferunError, match="port 29600 is in use") as caught:
        bound(static(0, "29600"))
    assert caught.value.hint == "stop that process, or pass another --control-port"


@pytest.mark.usefixtures("used")
def test_the_first_task_of_a_host_listens_for_the_others() -> None:
    """Who has taken its name is printed, and cannot do anything to a terminal."""
    lines: list[bytes] = []
    ports = HostPorts(static(0, task=TaskConfig(0, 2, "key")), lines.append, is_head=True)
    ports.bind(is_endpoint_here=False)
    (line,) = lines
    assert line.endswith(b"it belongs to bob\\x1b; the tasks of this job meet elsewhere\n")
    assert ports.fds["tasks"] == 7
    ports.refuse_tasks()
    sockets: Any = ports.task_sockets
    assert [path for _, path in sockets.refused] == ["/tasks.sock"]


def test_the_other_tasks_can_come_before_a_port_that_cannot_be_had(
    used: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hear there why the first task gives up; and the next try binds all other ports again."""
    answered: list[Any] = []
    monkeypatch.setattr(host_ports_module, "answer_tasks", lambda _listener, *more: answered.append(more))
    used.add(29600)
    ports = HostPorts(static(0, "29600", task=TaskConfig(0, 4, "key")), lambda _: None, is_head=True)
    with pytest.raises(SaferunError, match="port 29600 is in use"):
        ports.bind(is_endpoint_here=False)
    assert ports.fds == {"tasks": 7}
    used.remove(29600)
    ports.bind(is_endpoint_here=False)
    assert ports.fds == {"tasks": 7, "store": 29500, "control": 29600}
    ports.refuse_tasks({"op": "join_failed"}, 3.0)
    # Those that are there and those that come within this time; then those that have come since.
    assert answered == [({"op": "join_failed"}, 3, 3.0), ({"op": "join_failed"},)]


@pytest.mark.usefixtures("used")
def test_another_task_of_a_host_listens_nowhere() -> None:
    """It looks for the socket of the first one."""
    ports = bound(static(0, task=TaskConfig(1, 2, "key")), is_head=False)
    sockets: Any = ports.task_sockets
    assert (sockets.key, ports.fds) == ("key", {})
    ports.refuse_tasks()
    assert not sockets.refused


@pytest.mark.usefixtures("used")
def test_other_hosts_look_for_this_one_at_its_store_and_at_its_control_port() -> None:
    """Until the ports are given back."""
    ports = bound(c10d(), is_endpoint_here=True)
    listeners: Any = ports.known_to_others
    assert [listener.port for listener in listeners] == [ports.store, ports.control]
    ports.close()
    assert all(listener.is_closed for listener in listeners)
    assert ports.fds == {}
