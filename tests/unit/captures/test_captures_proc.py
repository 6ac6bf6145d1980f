"""What /proc tells of sockets, system calls and what a process waits for."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures import waiting
from saferun.captures.process_state import read_snapshot, read_thread_states
from saferun.captures.ptrace import _reason
from saferun.captures.waiting import Ends
from saferun.linux.sockets import (
    Socket,
    SocketTables,
    TcpState,
    from_inet_table,
    from_tcp_table,
    from_unix_table,
    sending_again,
    socket_text,
)
from saferun.linux.syscalls import SystemCall, before_restart, descriptor_of, from_proc_syscall

ME = os.getpid()
TCP = b"""  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7350 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100000A:C001 0200000A:733C 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1
   2: 0100000A:C001 0200000A:733C 02 00000000:00000000 00:00000000 00000000     0        0 0 1 0 20 4 30 10 -1
"""
TCP6 = b"""head
 0: 00000000000000000000000001000000:7350 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 4713 1
 1: 0000000000000000FFFF00000100000A:7350 0000000000000000FFFF00000200000A:C001 08 0:0 00:0 0 0 0 4714 1
"""


def test_the_tables_of_tcp_are_read() -> None:
    """Addresses stand in them in the host's order of bytes; an inode of 0 belongs to nobody."""
    assert from_inet_table(TCP, "tcp") == {
        4711: Socket("tcp", "127.0.0.1:29520", "0.0.0.0:0", "LISTEN"),
        4712: Socket("tcp", "10.0.0.1:49153", "10.0.0.2:29500", "ESTABLISHED"),
    }
    assert from_inet_table(TCP6, "tcp") == {
        4713: Socket("tcp", "[::1]:29520", "[::]:0", "LISTEN"),
        4714: Socket("tcp", "10.0.0.1:29520", "10.0.0.2:49153", "CLOSE_WAIT"),
    }


def test_connections_that_are_sent_again_are_read() -> None:
    """What the other end acknowledges late is no fault: the kernel's count tells."""
    stuck = TCP + (
        b"   3: 0100000A:C001 0300000A:733C 01 00001000:00000000 01:0000002A 00000008 0 0 4715 4 0\n"
        b"   4: 0100000A:C002 0300000A:733C 02 00000001:00000000 01:0000002A 00000003 0 0 4716 4 0\n"
        b"   5: 0100000A:C003 0300000A:733C 01 00000001:00000000 01:0000002A 00000002 0 0 4717 4 0\n"
    )
    assert from_tcp_table(stuck, 3) == {
        4715: TcpState("10.0.0.1:49153", "10.0.0.3:29500", "ESTABLISHED", 4096, 8),
        4716: TcpState("10.0.0.1:49154", "10.0.0.3:29500", "SYN_SENT", 1, 3),
    }


def test_the_kernels_own_table_of_connections_is_read() -> None:
    """On loopback nothing is sent again, and the fields are where they are expected."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        inode = os.fstat(client.fileno()).st_ino
        assert inode in sending_again(ME, 0)
        assert sending_again(ME, 0)[inode].state == "ESTABLISHED"
        assert inode not in sending_again(ME, 3)


@given(st.binary())
def test_no_table_raises(content: bytes) -> None:
    """Kernels change their formats."""
    from_tcp_table(b"head\n" + content, 0)
    from_tcp_table(TCP[:90] + content, 0)
    from_inet_table(b"head\n" + content, "tcp")
    from_inet_table(TCP6[:90] + content, "tcp")
    from_unix_table(b"head\n" + content)


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (Socket("tcp", "10.0.0.1:1", "10.0.0.2:2", "SYN_SENT"), "a connection to 10.0.0.2:2 (SYN_SENT)"),
        (Socket("tcp", "[::]:29500", "[::]:0", "LISTEN"), "connections to [::]:29500"),
        (Socket("unix", "/run/x", "", ""), "the Unix socket /run/x"),
        (Socket("unix", "", "", ""), "a Unix socket"),
        (Socket("udp", "10.0.0.1:1", "", ""), "a UDP socket on 10.0.0.1:1"),
    ],
)
def test_a_socket_has_words(one: Socket, words: str) -> None:
    """They stand after ``waits on``."""
    assert socket_text(one) == words


def inode_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def test_both_ends_of_own_connections_are_found() -> None:
    """TCP by its addresses, Unix sockets by the kernel's own knowledge."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        server = stack.enter_context(listener.accept()[0])
        left, right = map(stack.enter_context, socket.socketpair())
        tables = SocketTables()
        found = tables.find(ME, inode_of(client))
        assert found is not None
        assert found.peer_inode == inode_of(server)
        assert found.remote == f"127.0.0.1:{listener.getsockname()[1]}"
        pair = tables.find(ME, inode_of(left))
        assert pair is not None
        assert pair.peer_inode in {inode_of(right), 0}  # 0 where the kernel has no unix_diag
        assert tables.find(ME, 1) is None


def test_a_system_call_has_its_name() -> None:
    """By the architecture's own numbers."""
    content = "230 0x1 0x1 0x7ffedbdcb9b0 0x0 0x0 0x0 0x7ffedbdcb970 0x7f0c09ced545"
    assert from_proc_syscall(content, "x86_64") == SystemCall("clock_nanosleep", (1, 1, 0x7FFEDBDCB9B0, 0, 0, 0))
    names = [from_proc_syscall(f"{number} 0x3", "aarch64") for number in (63, 98, 73, 441, 9999)]
    assert [call.name for call in names if call] == ["read", "futex", "ppoll", "epoll_pwait2", "system call 9999"]
    assert from_proc_syscall("0 0x3", "riscv64") == SystemCall("system call 0", (3,))
    for content in ("running", "-1 0x0 0x0", "", "x", "1 y"):
        assert from_proc_syscall(content, "x86_64") is None


def test_a_restarted_call_is_named_by_where_it_waits() -> None:
    """Otherwise everybody who has ever been stopped would be in ``restart_syscall``."""
    call = SystemCall("restart_syscall", (1000, 1))
    assert before_restart(call, "poll_schedule_timeout.constprop.0") == SystemCall("poll", (1000, 1))
    assert before_restart(call, "futex_do_wait") == SystemCall("futex", (1000, 1))
    assert before_restart(call, "do_syscall_64") == SystemCall("clock_nanosleep", (1000, 1))
    assert before_restart(call, "") == call
    assert before_restart(SystemCall("read", (3,)), "poll_schedule") == SystemCall("read", (3,))
    assert before_restart(None, "futex_do_wait") is None


def test_only_calls_with_a_descriptor_have_one() -> None:
    """The first argument of others is something else, and that of these may have a dirty upper half."""
    assert descriptor_of(SystemCall("read", (5, 0, 0))) == 5
    assert descriptor_of(SystemCall("read", (0xAAAA_AAAA_0000_0005,))) == 5
    assert descriptor_of(SystemCall("read", (0xFFFF_FFFF,))) is None
    assert descriptor_of(SystemCall("futex", (5,))) is None
    assert descriptor_of(SystemCall("read", ())) is None


@pytest.fixture
def descriptors(tmp_path: Path) -> Iterator[dict[str, int]]:
    """One descriptor of each sort, of this process."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        os.mkfifo(tmp_path / "fifo")
        found = {
            "fifo": os.open(tmp_path / "fifo", os.O_RDWR),
            "file": os.open(tmp_path, os.O_RDONLY),
            "null": os.open(os.devnull, os.O_RDONLY),
            "event": os.eventfd(0),
        }
        found["pipe"], found["pipe_write"] = os.pipe()
        for fd in found.values():
            stack.callback(os.close, fd)
        yield found | {"listener": listener.fileno(), "client": client.fileno(), "port": listener.getsockname()[1]}


def test_what_a_call_waits_for_is_named(descriptors: dict[str, int], tmp_path: Path) -> None:
    """From descriptors alone, without a look into the process."""
    ends = Ends()
    port = descriptors["port"]
    for name, wchan, words in (
        ("fifo", "fifo_pipe_read", f"the FIFO {tmp_path}/fifo"),
        ("file", "", f"the file {tmp_path}"),
        ("null", "", "the device /dev/null"),
        ("event", "", "an eventfd descriptor"),
        ("pipe", "anon_pipe_read", "a pipe"),
        ("client", "", f"a connection to 127.0.0.1:{port} (ESTABLISHED)"),
        ("listener", "", f"connections to 127.0.0.1:{port}"),
    ):
        assert ends.quick(ME, SystemCall("read", (descriptors[name], 0, 0)), wchan) == words
    assert ends.quick(ME, SystemCall("read", (99999, 0, 0)), "") == ""
    assert ends.quick(ME, SystemCall("flock", (descriptors["file"], 2)), "") == f"a lock on the file {tmp_path}"
    assert ends.quick(ME, SystemCall("wait4", (os.getppid(), 0)), "").startswith(f"process {os.getppid()} (")
    assert ends.quick(ME, SystemCall("wait4", (0xFFFF_FFFF, 0)), "") == "one of its children to end"
    assert ends.quick(ME, SystemCall("openat", (0, 0)), "wait_for_partner") == "a FIFO to be opened at its other end"
    assert ends.quick(ME, None, "") == ""


def test_who_holds_the_other_end_is_told(descriptors: dict[str, int]) -> None:
    """A data-loader worker and its rank: the one waits for the other."""
    read_end = descriptors["pipe"]
    child = os.fork()
    if not child:
        os.read(read_end, 1)
        os._exit(0)
    try:
        ends = Ends([(0, ME, "python"), (0, child, "pt_data_worker")])
        words = ends.describe(ME, read_end, holders=True)
        assert words == f"a pipe, shared with pt_data_worker (pid {child}) of rank 0"
        assert ends.describe(ME, read_end) == "a pipe"
    finally:
        os.write(descriptors["pipe_write"], b".")
        os.waitpid(child, 0)


def test_what_poll_and_select_watch_is_listed(
    descriptors: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stands in the memory of the process. What only wakes a loop up is left out."""
    fds = [descriptors["event"], descriptors["client"], descriptors["file"]]
    polled = b"".join(fd.to_bytes(4, "little") + b"\1\0\0\0" for fd in fds)
    selected = sum(1 << fd for fd in fds).to_bytes(128, "little")
    memory = {1000: polled, 2000: selected}
    monkeypatch.setattr(waiting, "read_memory", lambda _pid, address, size: memory.get(address, b"")[:size])
    ends = Ends()
    listed = {f"a connection to 127.0.0.1:{descriptors['port']} (ESTABLISHED)", f"the file {tmp_path}"}
    for call in (SystemCall("poll", (1000, 3, 0)), SystemCall("select", (1024, 2000, 0, 0, 0))):
        assert set(ends.deep(ME, call, "").split(", or ")) == listed
    assert ends.deep(ME, SystemCall("poll", (0, 3, 0)), "") == ""
    monkeypatch.setattr(waiting, "read_memory", lambda *_: b"/tmp/x\0rest")
    assert ends.deep(ME, SystemCall("openat", (0, 8, 0)), "wait_for_partner") == "the FIFO /tmp/x"
    assert ends.deep(ME, SystemCall("openat", (0, 8, 0)), "") == "the file /tmp/x"


def test_a_process_that_is_gone_has_a_look_too() -> None:
    """They come and go meanwhile."""
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert read_snapshot(0, child, is_rank=True).state == "Z"
    os.waitpid(child, 0)
    look = read_snapshot(0, child, is_rank=True)
    assert (look.state, look.name, look.threads, look.syscall, look.waits_on) == ("?", "", 0, "", "")
    assert read_thread_states(child) == {}


def test_a_look_at_this_process() -> None:
    """All that there is to be seen of a living one."""
    look = read_snapshot(7, ME, is_rank=True)
    assert (look.rank, look.pid, look.ppid, look.state, look.tracer_pid) == (7, ME, os.getppid(), "R", 0)
    assert look.rss_bytes > 1 << 20
    assert look.threads >= 1
    assert look.cpu_s > 0
    assert ME in read_thread_states(ME)


ALL, NONE, PTRACE = "000001ffffffffff", "0000000000000000", 1 << 19


@pytest.mark.parametrize(
    ("scope", "own", "target", "reason"),
    [
        (0, {}, {"TracerPid": "99"}, "process 99 traces it already"),
        (3, {"CapEff": ALL}, {}, "Yama allows it to no process (kernel.yama.ptrace_scope=3)"),
        (2, {}, {}, "Yama allows it to CAP_SYS_PTRACE only (kernel.yama.ptrace_scope=2)"),
        (1, {}, {}, "Yama allows it to ancestors only (kernel.yama.ptrace_scope=1)"),
        (1, {}, {"Uid": "0 0 0 0"}, "the process belongs to user 0"),
        (0, {}, {"CapPrm": f"{PTRACE:016x}"}, "the process has capabilities that saferun lacks"),
        (0, {"Seccomp": "2"}, {}, "a seccomp filter, as of a container, forbids it"),
        (1, {"CapEff": ALL, "Seccomp": "2"}, {"Uid": "0 0 0 0"}, "a seccomp filter, as of a container, forbids it"),
    ],
)
def test_the_setting_that_denies_ptrace_is_named(
    monkeypatch: pytest.MonkeyPatch, scope: int, own: dict[str, str], target: dict[str, str], reason: str
) -> None:
    """There are many, and the one that denies is the one to be changed."""
    usual = {"Uid": "1000\t1000\t1000\t1000", "CapEff": NONE, "CapPrm": NONE, "TracerPid": "0"}
    monkeypatch.setattr("saferun.captures.ptrace._yama_scope", lambda: scope)
    assert _reason(usual | own, usual | target, ME) == reason
