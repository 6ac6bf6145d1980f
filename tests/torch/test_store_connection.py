"""The connection to a store that needs no torch, beside torch's own client of the same server."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from saferun.cluster.store_askers import GREETING
from saferun.coordinator import store_search, torch_store
from saferun.coordinator.prefix_store import prefix_class
from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.store_connection import KNOWN_RELEASES, MAGIC, VALIDATE, StoreConnection
from saferun.coordinator.torch_store import open_store
from saferun.linux.small_files import read_bytes
from tests.ports import own_port
from tests.torch.coordinating import until

REPOSITORY = Path(__file__).parents[2]
LONG = timedelta(seconds=30)
SHORT = timedelta(milliseconds=30)
# More than one packet and more than one piece of reading; beside it what no text has.
VALUES = (b"", b"\0", b"1", "größer".encode(), bytes(range(256)) * 16_384)


def connect(port: int, timeout: timedelta = LONG) -> StoreConnection:
    return StoreConnection("127.0.0.1", port, None, False, timeout, wait_for_workers=False)


@pytest.fixture(params=[True, False], ids=["libuv", "plain"])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server of torch's, of each kind that it has."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = int(listener.getsockname()[1])
        served = TCPStore(
            "127.0.0.1",
            number,
            is_master=True,
            timeout=LONG,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            use_libuv=request.param,
        )
        yield number
        del served


@pytest.fixture
def stores(port: int) -> tuple[StoreConnection, Any]:
    """Ours, and torch's client."""
    return connect(port), TCPStore("127.0.0.1", port, is_master=False, timeout=LONG, wait_for_workers=False)


@pytest.mark.parametrize("value", VALUES, ids=[str(len(value)) for value in VALUES])
def test_what_one_sets_the_other_reads(stores: tuple[StoreConnection, Any], value: bytes) -> None:
    ours, theirs = stores
    ours.set("ours", value)
    theirs.set("theirs", value)
    assert (theirs.get("ours"), ours.get("theirs")) == (value, value)
    assert ours.multi_get(["theirs", "ours", "theirs"]) == [value] * 3


def test_every_call_answers_as_torchs_does(stores: tuple[StoreConnection, Any]) -> None:
    """The same calls on keys of their own, and the answers side by side."""

    def answers(store: Any, prefix: str) -> list[Any]:
        def key(name: str) -> str:
            return prefix + name

        asked: list[Callable[[], Any]] = [
            lambda: store.check([key("a")]),
            lambda: store.add(key("n"), 3),
            lambda: store.add(key("n"), -5),
            lambda: store.get(key("n")),
            lambda: store.set(key("a"), "text"),
            lambda: store.check([key("a")]),
            lambda: store.check([key("a"), key("b")]),
            lambda: store.check([key("a"), key("n")]),
            lambda: store.compare_set(key("c"), "", "first"),
            lambda: store.compare_set(key("c"), "wrong", "second"),
            lambda: store.compare_set(key("c"), b"first", b"second"),
            lambda: store.compare_set(key("none"), "some", "second"),
            lambda: store.delete_key(key("c")),
            lambda: store.delete_key(key("c")),
            lambda: store.check([key("c")]),
            lambda: store.wait([key("a"), key("n")], LONG),
        ]
        return [ask() for ask in asked]

    ours, theirs = stores
    assert answers(ours, "ours/") == answers(theirs, "theirs/")


def test_a_key_that_comes_ends_the_wait(stores: tuple[StoreConnection, Any]) -> None:
    ours, theirs = stores
    seen = threading.Event()

    def wait() -> None:
        ours.wait(["a", "b"], LONG)
        seen.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.1)
    theirs.set("a", "1")
    assert theirs.check(["a"])
    assert not seen.wait(0.1)
    theirs.set("b", "1")
    assert seen.wait(30)
    waiting.join()


def test_what_one_creates_is_read_at_once_whichever_server_there_is(port: int) -> None:
    """The plain one wakes nobody for what ``compare_set`` sets: a job of two releases once ended two minutes late."""
    reader, writer = (StoreClient.connect(StoreConnection, ("127.0.0.1", port)) for _ in range(2))
    read: list[bytes | None] = []
    reading = threading.Thread(target=lambda: read.append(reader.get("a0/log/0", 60.0)), daemon=True)
    reading.start()
    time.sleep(0.2)  # it waits by now, as a rule
    assert writer.create("a0/log/0", "an entry") == b"an entry"
    reading.join(30)
    assert read == [b"an entry"]
    assert writer.create("a0/log/0", "another") == b"an entry"


def test_a_wait_in_vain_leaves_the_connection_usable(stores: tuple[StoreConnection, Any]) -> None:
    ours, theirs = stores
    for _ in range(3):
        with pytest.raises(TimeoutError, match="did not exist within"):
            ours.wait(["never"], SHORT)
    theirs.set("a", "1")
    assert ours.get("a") == b"1"
    short = connect(theirs.port, SHORT)
    with pytest.raises(TimeoutError):
        short.get("never")
    with pytest.raises(TimeoutError):
        short.multi_get(["a", "never"])
    assert short.get("a") == b"1"


def test_keys_that_come_while_their_wait_is_cancelled_confuse_nothing(stores: tuple[StoreConnection, Any]) -> None:
    """Whichever of the two comes first, the next answer belongs to the next query."""
    ours, theirs = stores
    for number in range(300):
        key = f"k{number}"
        setting = threading.Timer(0.002, theirs.set, (key, str(number)))
        setting.start()
        with contextlib.suppress(TimeoutError):
            ours.wait([key], timedelta(milliseconds=2))
        assert ours.add("count", 1) == number + 1
        setting.join()
        assert ours.get(key) == str(number).encode()


def test_a_key_that_comes_with_the_cancellation_counts_as_come() -> None:
    port, thread = answering(b"nonce", b"", b"\0\1", struct.pack("=q", 7))
    store = connect(port)
    store.wait(["late"], SHORT)
    assert store.add("count", 7) == 7
    del store
    thread.join(20)


def test_a_server_that_ends_is_an_error_at_once_and_ever_after() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = open_store(TCPStore, listener.fileno())
        store = connect(listener.getsockname()[1])
    store.set("a", "1")
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait(["never"], LONG)
        except ConnectionError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    time.sleep(0.1)
    del served
    waiting.join(20)
    assert len(raised) == 1
    for call in (lambda: store.get("a"), lambda: store.check(["a"]), lambda: store.set("a", "1")):
        with pytest.raises(ConnectionError, match="closed"):
            call()


def test_a_port_that_nobody_serves_is_told_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionError, match="refuses connections"):
            connect(unused.getsockname()[1])


def answering(*answers: bytes, resets: int = 0) -> tuple[int, threading.Thread]:
    """A server that sends this, one piece for each that it receives, and closes. ``nonce``: what it was sent.

    ``resets``: how many connections it resets before that.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listener:
            for _ in range(resets):
                connection, _ = listener.accept()
                connection.recv(1)  # it has connected
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            connection, _ = listener.accept()
        with connection:
            for answer in answers:
                query = connection.recv(1 << 16)
                connection.sendall(query[-4:] if answer == b"nonce" else answer)
            with contextlib.suppress(OSError):  # who has not read everything resets the connection
                connection.shutdown(socket.SHUT_WR)
                connection.recv(1 << 16)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return int(listener.getsockname()[1]), thread


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "no store"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "no store"),
        (b"\0\0", "closed the connection"),
    ],
)
def test_what_is_no_store_is_told(answer: bytes, message: str) -> None:
    port, thread = answering(answer)
    with pytest.raises(ConnectionError, match=message):
        connect(port, SHORT)
    thread.join(20)


@pytest.mark.parametrize(
    ("call", "answers", "message"),
    [
        (lambda store: store.check(["a"]), (b"\x07",), "has answered 7"),
        (lambda store: store.wait(["a"], LONG), (b"\x01",), "has answered 1"),
        (lambda store: store.get("a"), (b"\0", struct.pack("=Q", 1 << 60)), f"a value of {1 << 60} bytes"),
        (lambda store: store.get("a"), (b"\0", struct.pack("=Q", 9) + b"half"), "closed the connection"),
        (lambda store: store.add("a", 1), (b"\0\0\0",), "closed the connection"),
    ],
    ids=["check", "wait", "huge", "half", "number"],
)
def test_a_wrong_answer_is_an_error_and_the_connection_ends(
    call: Callable[[StoreConnection], Any], answers: tuple[bytes, ...], message: str
) -> None:
    port, thread = answering(b"nonce", *answers)
    store = connect(port)
    with pytest.raises(ConnectionError, match=message):
        call(store)
    thread.join(20)
    with pytest.raises(ConnectionError, match="closed"):
        store.check(["a"])


def test_a_server_that_resets_connections_at_first_is_tried_again() -> None:
    """As one does whose backlog is full."""
    port, thread = answering(b"nonce", b"\0", resets=3)
    assert connect(port).check(["a"])
    thread.join(20)


def test_a_connection_that_there_is_is_used() -> None:
    """Those that were closed have a place in the backlog of a leader that still imports torch."""
    port, thread = answering(b"nonce", b"\0")  # it accepts one
    dialled = socket.create_connection(("127.0.0.1", port))
    for store_class in (StoreConnection, prefix_class(StoreConnection)):
        assert store_class.takes_connection
    client = StoreClient.connect(StoreConnection, ("127.0.0.1", port), connection=dialled)
    assert client.check("a")
    thread.join(20)


def test_a_connection_is_closed_for_a_class_that_makes_its_own() -> None:
    """As torch's does."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        StoreClient.connect(Closing, ("127.0.0.1", 1), connection=ours)
        assert ours.fileno() < 0
        assert theirs.recv(1) == b""


class Closing:
    """A class that makes connections of its own, as torch's does."""

    def __init__(self, *_arguments: Any, **more: Any) -> None:
        assert "connection" not in more


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_store_that_speaks_otherwise_is_asked_by_torchs_own_client(
    port: int, part: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A torch that somebody has changed has a client that knows how: the hosts meet, if later."""

    def fail(_store: StoreConnection) -> None:
        raise ConnectionError("what listens there is no store")

    monkeypatch.setattr(StoreConnection, "_greet", fail)
    monkeypatch.setattr(store_search, "_DOUBT_S", 0.2)
    monkeypatch.setattr(torch_store, "import_store_class", lambda _parts: (TCPStore, "2.13.0"))
    search = store_search.StoreSearch(
        prefix_class(StoreConnection) if part else StoreConnection, "127.0.0.1", [port], lambda _client: None
    )
    client = search.wait(30.0)
    search.end()
    assert client is not None
    assert client.create("a", "1") == b"1"
    assert TCPStore("127.0.0.1", port, is_master=False, timeout=LONG).check(["saferun/own/a" if part else "a"])


def test_a_store_is_served_by_torch_alone() -> None:
    with pytest.raises(ValueError, match="only torch"):
        StoreConnection("127.0.0.1", 1, None, True, LONG, wait_for_workers=False)


PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from saferun.coordinator import torch_store
if sys.argv[3]:
    torch_store._version = lambda location: sys.argv[3]
store_class, _ = torch_store.import_store_class(sys.argv[2], serves=sys.argv[4] == "serves")
print(store_class.__module__, "torch._C" in sys.modules, "torch" in sys.modules)
"""
UNKNOWN = f"{KNOWN_RELEASES[1][0]}.{KNOWN_RELEASES[1][1] + 1}.0"


OURS = "saferun.coordinator.store_connection False False"
TORCHS = "torch._C._distributed_c10d True True"


@pytest.mark.parametrize(
    ("parts", "version", "serves", "wanted"),
    [
        ("store", "", "", OURS),
        ("store", "2.5.0+cu124", "", OURS),
        ("store", "2.6.0a0+git1234", "", OURS),
        ("store", "2.5.0.dev20240615+cu121", "", TORCHS),
        ("store", "2.5.0a0+872d972e41.nv24.08", "", TORCHS),
        ("store", UNKNOWN, "", TORCHS),
        ("store", "2.4.1", "", TORCHS),
        ("store", "unknown", "", TORCHS),
        ("store", "", "serves", TORCHS),
        ("c10d", "", "", TORCHS),
    ],
)
def test_a_host_that_serves_nothing_imports_no_torch_whose_queries_are_known(
    parts: str, version: str, serves: str, wanted: str
) -> None:
    asked = [sys.executable, "-c", PROGRAM, str(REPOSITORY), parts, version, serves]
    assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip() == wanted


def test_a_host_that_serves_nothing_has_no_torch_in_its_coordinator(tmp_path: Path) -> None:
    """Two hosts in the middle of their job; the first one serves its stores with torch."""
    ready = [tmp_path / f"ready{number}" for number in range(2)]
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready' + os.environ['RANK']).touch()\n"
        f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists():\n    time.sleep(0.02)\n"
    )
    place = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(own_port())]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "saferun", *place, "--node-rank", str(number), str(script)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.DEVNULL,
        )
        for number in range(2)
    ]
    try:
        until(lambda: all(path.exists() for path in ready), "both ranks run")
        assert [_maps_torch(job.pid) for job in jobs] == [True, False]
    finally:
        (tmp_path / "go").touch()
        codes = [job.wait(60) for job in jobs]
    assert codes == [0, 0]


def _maps_torch(pid: int) -> bool:
    """Whether the coordinator of a saferun has torch's libraries in memory."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (coordinator,) = (child for child in children if b"coordinator/__main__.py" in read_bytes(f"/proc/{child}/cmdline"))
    return "libtorch_cpu" in Path(f"/proc/{coordinator}/maps").read_text()


def test_a_rank_that_asks_for_a_store_is_known_by_what_it_sends_first() -> None:
    """By a supervisor whose store is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def ask() -> None:
            with contextlib.suppress(Exception):
                TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1), wait_for_workers=False)

        rank = threading.Thread(target=ask)
        rank.start()
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(len(GREETING)) == GREETING
    rank.join()
    assert struct.pack("=BI", VALIDATE, MAGIC) == GREETING
