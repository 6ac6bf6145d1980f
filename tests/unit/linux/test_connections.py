"""Whose TCP connections lead where."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from saferun.linux import connections as module
from saferun.linux import quiet_sockets as quiet_module
from saferun.linux import sock_diag
from saferun.linux.connections import connections_of, listens_on


@contextmanager
def holding(*held: socket.socket, port: str = "") -> Iterator[int]:
    """A child that has these sockets open, and no other; its environment has a MASTER_PORT."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = {one.fileno() for one in held} | {written}
            for fd in range(3, 256):
                if fd not in kept:
                    try:
                        os.close(fd)
                    except OSError:
                        pass
            for fd in kept:
                os.set_inheritable(fd, True)
            code = f"import os, signal; os.write({written}, b'.'); signal.pause()"
            os.execve(sys.executable, [sys.executable, "-S", "-E", "-c", code], {"MASTER_PORT": port})
        finally:
            os._exit(1)
    os.close(written)
    try:
        assert os.read(ready, 1)
        yield pid
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        served, _ = server.accept()
        with client, served:
            yield client, served


def test_a_connection_to_a_process_of_the_host_that_is_not_the_job_s() -> None:
    """A proxy through which the host reaches the network."""
    with connected() as (client, served), holding(client) as uploader, holding(served) as proxy:
        client.close()
        served.close()
        assert connections_of([uploader]).outside == {uploader}
        assert connections_of([uploader], [proxy]).outside == frozenset()


def test_two_processes_of_the_job_that_are_connected_with_each_other() -> None:
    with connected() as (client, served), holding(client) as one, holding(served) as other:
        client.close()
        served.close()
        found = connections_of([one, other])
        assert found.outside == frozenset()
        assert found.pairs == {(one, other), (other, one)}


def test_a_connection_whose_other_end_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another host's end is in no table of this one."""
    real = module._parsed

    def only_first(content: bytes) -> dict[int, module._Socket]:
        return {inode: one for inode, one in real(content).items() if inode == wanted}

    with connected() as (client, _served), holding(client) as uploader:
        wanted = os.fstat(client.fileno()).st_ino
        client.close()
        monkeypatch.setattr(module, "_parsed", only_first)
        assert connections_of([uploader]).outside == {uploader}


def test_a_connection_that_the_other_end_has_closed_is_none() -> None:
    """What a pool of connections keeps after an upload."""
    with connected() as (client, served), holding(client) as idle:
        client.close()
        served.close()
        assert connections_of([idle]).outside == frozenset()


def test_a_connection_to_the_job_s_store_is_none() -> None:
    """A process that a rank has forked still has the rank's connections."""
    with connected() as (client, served):
        port = str(served.getsockname()[1])
        with holding(client, port=port) as worker, holding(served):
            client.close()
            served.close()
            assert connections_of([worker]).outside == frozenset()


def test_who_listens_on_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        with holding(server) as listener, holding() as other:
            server.close()
            assert listens_on(listener, port, {})
            assert not listens_on(listener, "1", {})
            assert not listens_on(listener, "", {})
            assert not listens_on(other, port, {})


def test_both_ends_are_found_where_one_has_the_address_in_ipv6() -> None:
    """A server that listens on ``::`` has the other end's IPv4 address in an IPv6 one."""
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        with socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client:
            served, _ = server.accept()
            with served, holding(client) as one, holding(served) as other:
                assert connections_of([one, other]).pairs == {(one, other), (other, one)}
                assert connections_of([one, other]).outside == frozenset()


def test_a_client_of_a_server_is_no_connection_of_the_server() -> None:
    """A browser that shows TensorBoard, or Prometheus, keeps its connection: a finished job held its GPUs for it."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as served,
        holding(server, served) as exporter,
        holding(client) as uploader,
        holding(served) as worker,
    ):
        server.close()
        served.close()
        client.close()
        assert connections_of([exporter]).outside == frozenset()
        # A child of the server's, which has no listening socket itself.
        assert connections_of([exporter, worker]).outside == frozenset()
        assert connections_of([uploader]).outside == {uploader}


def test_a_server_s_own_connection_to_elsewhere_counts() -> None:
    with (
        connected() as (client, served),
        socket.create_server(("127.0.0.1", 0)) as server,
        holding(server, client) as one,
        holding(served),
    ):
        client.close()
        served.close()
        assert connections_of([one]).outside == {one}


def test_of_a_long_table_only_the_beginning_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is unknown who is connected, and a process of which it is unknown works."""
    with connected() as (client, served), holding(client) as uploader, holding() as other, holding(served):
        client.close()
        served.close()
        monkeypatch.setattr(module, "_MOST_LINES", 1)
        assert connections_of([uploader, other]).outside == {uploader}
    assert len(module._parsed(b"head\n" + b"".join(b"%d: a b 01 e f g h i %d\n" % (i, i + 1) for i in range(9)))) == 1


@pytest.mark.parametrize("count", [100, 10_000])
def test_of_the_sockets_of_a_busy_host_only_those_of_the_processes_are_examined(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """However many there are, and however many processes share a table."""
    ends = {(b"%08X:1F90" % i, b"0100007F:%04X" % (i % 1000)): i for i in range(1, count)}
    sockets = {inode: module._Socket(local, remote, b"01") for (local, remote), inode in ends.items()}
    table, examined, port = module._Table(sockets, ends, is_whole=True), list[bytes](), module._port

    def counted(end: bytes) -> int:
        examined.append(end)
        return port(end)

    monkeypatch.setattr(module, "_table_of", lambda _pid, _tables: table)
    monkeypatch.setattr(module, "_socket_inodes", lambda pid: {pid} if pid < 50 else set())
    monkeypatch.setattr(module, "read_environ_entry", lambda _pid, _name: "")
    monkeypatch.setattr(module, "_port", counted)
    assert connections_of(range(1, 50)).outside == set(range(1, 50))
    assert len(examined) == 3 * 49


@pytest.mark.parametrize("namespaces", [1, 20])
def test_who_listens_is_asked_once_of_each_process(monkeypatch: pytest.MonkeyPatch, namespaces: int) -> None:
    """Not again for each of the others: with a thousand processes that took a second, every two seconds."""
    looked_up = list[int]()

    class Counted(dict[int, module._Socket]):
        def __getitem__(self, inode: int) -> module._Socket:
            looked_up.append(inode)
            return super().__getitem__(inode)

    count = 200
    listening = module._Socket(b"0100007F:1F90", b"00000000:0000", b"0A")
    tables = [
        module._Table(Counted({pid: listening for pid in range(1, count + 1) if pid % namespaces == i}), {}, True)
        for i in range(namespaces)
    ]
    monkeypatch.setattr(module, "_table_of", lambda pid, _tables: tables[pid % namespaces])
    monkeypatch.setattr(module, "_socket_inodes", lambda pid: {pid} if pid <= count else set())
    monkeypatch.setattr(module, "read_environ_entry", lambda _pid, _name: "")
    assert connections_of(range(1, count + 1)).outside == frozenset()
    assert len(looked_up) <= 3 * count


def test_the_processes_are_not_gone_through_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[None]()

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            begun.append(None)
            return super().__iter__()

    count = 50
    sockets = {pid: module._Socket(b"%08X:1F90" % pid, b"0100007F:1F91", b"01") for pid in range(1, count + 1)}
    table = module._Table(sockets, {}, is_whole=True)
    monkeypatch.setattr(module, "_table_of", lambda _pid, _tables: table)
    monkeypatch.setattr(module, "_socket_inodes", lambda pid: {pid} if pid <= count else set())
    monkeypatch.setattr(module, "read_environ_entry", lambda _pid, _name: "")
    pids = Counted(range(1, count + 1))
    assert connections_of(pids).outside == set(range(1, count + 1))
    assert len(begun) < 10


@pytest.mark.parametrize("what", ["the list", "a link"])
def test_a_process_whose_descriptors_may_not_be_read_counts_as_connected(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An upload under sudo. In a container without CAP_SYS_PTRACE root may read the list, and not the links."""
    with holding() as hidden, holding() as other:
        of = f"/proc/{hidden}/fd"
        real_list, real_link = os.listdir, os.readlink

        def list_or_fail(path: str) -> list[str]:
            if what == "the list" and path == of:
                raise PermissionError
            return real_list(path)

        def link_or_fail(path: str) -> str:
            if path.startswith(f"{of}/"):
                raise PermissionError
            return real_link(path)

        monkeypatch.setattr(os, "listdir", list_or_fail)
        monkeypatch.setattr(os, "readlink", link_or_fail)
        assert connections_of([hidden, other]).outside == {hidden}
        assert not listens_on(hidden, "29500", {})


def test_one_of_the_job_s_own_that_may_not_be_read_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    real = module._socket_inodes
    with holding() as one, holding() as own:
        monkeypatch.setattr(module, "_socket_inodes", lambda pid: None if pid == own else real(pid))
        assert connections_of([one], [own]).outside == frozenset()


def test_of_one_that_ends_nothing_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's list of descriptors may not be read then, either."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        monkeypatch.setattr(module, "_socket_inodes", lambda _pid: None)
        assert connections_of([pid]).outside == frozenset()
    finally:
        os.waitpid(pid, 0)


def test_a_descriptor_that_is_closed_meanwhile_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (client, served), holding(client) as uploader, holding(served):
        client.close()
        served.close()
        real = os.listdir
        monkeypatch.setattr(os, "listdir", lambda path: ["99", *real(path)] if path.endswith("/fd") else real(path))
        assert connections_of([uploader]).outside == {uploader}


@pytest.fixture
def quiet_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is quiet at once."""
    monkeypatch.setattr(quiet_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(quiet_module, "_late", [])


@pytest.mark.usefixtures("quiet_after")
def test_a_connection_over_which_nothing_moves_is_none() -> None:
    """The master of ssh's ControlPersist, a tunnel: it held a finished job for ten minutes, and was killed then."""
    with connected() as (client, served), holding(client) as tunnel, holding(served):
        client.close()
        served.close()
        assert connections_of([tunnel]).outside == frozenset()


def test_a_connection_over_which_something_has_moved_lately_counts() -> None:
    with connected() as (client, served), holding(client) as uploader, holding(served):
        client.sendall(b"x")
        client.close()
        served.close()
        assert connections_of([uploader]).outside == {uploader}


@pytest.mark.usefixtures("quiet_after")
def test_a_connection_with_data_that_the_other_end_has_not_taken_counts() -> None:
    """An upload that a server keeps waiting."""
    with connected() as (client, served), holding(client) as uploader, holding(served):
        client.setblocking(False)
        while True:
            try:
                client.send(bytes(1 << 16))
            except BlockingIOError:
                break
        client.close()
        served.close()
        assert connections_of([uploader]).outside == {uploader}


@pytest.mark.usefixtures("quiet_after")
def test_without_socket_diagnosis_a_connection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sock_diag, "_NETLINK_SOCK_DIAG", 31)  # there is no such protocol
    with connected() as (client, served), holding(client) as uploader, holding(served):
        client.close()
        served.close()
        assert connections_of([uploader]).outside == {uploader}


@pytest.mark.usefixtures("quiet_after")
def test_where_socket_diagnosis_does_not_answer_a_connection_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a kernel module on a file system that is dead, and is waited for once."""
    asked = list[float]()

    def late(_serve: object, timeout_s: float, _name: str) -> tuple[bytes, None]:
        asked.append(timeout_s)
        return b"", None

    monkeypatch.setattr(quiet_module, "run_forked", late)
    with connected() as (client, served), holding(client) as uploader, holding(served):
        client.close()
        served.close()
        assert connections_of([uploader]).outside == {uploader}
        assert connections_of([uploader]).outside == {uploader}
    assert len(asked) == 1


def test_a_malformed_port_is_none() -> None:
    for port in (b"zzzz", b"+123", b" 1a", b"1_23", b""):
        assert module._port(b"0100007F:" + port) == -1
    assert module._port(b"0100007F:1F90") == 8080
    for number in ("²", "٣", "-1", "", "123456"):
        assert module._number(number) == -1


def test_malformed_lines_of_a_table_are_skipped() -> None:
    content = b"  sl  local\n" + b"0: x\n" * 3 + b"1: a b c d e f g h not 0\n" + b"\xff" * 40
    assert module._parsed(content) == {}


def test_a_process_that_has_exited_has_none() -> None:
    assert connections_of([1 << 22]).outside == frozenset()
    assert not listens_on(1 << 22, "29500", {})
