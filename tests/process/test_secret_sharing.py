"""A job secret gets to the processes of this user on other hosts, and to nobody else."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saferun.cluster import secret_sharing
from saferun.cluster.secret_sharing import (
    SECRET_BYTES,
    NoSecretError,
    binding,
    make_offer,
    pack,
    serve,
    take_offer,
    unpack,
)
from saferun.coordinator.secret_process import SecretProcess
from saferun.files.private_file import new_name, read_private, remove_private, write_private
from saferun.linux.munge import Munge
from saferun.linux.ownership import NotOursError
from saferun.linux.prctl import die_with_parent
from tests.ports import own_port
from tests.process.munge_daemons import credential_of, munge_hosts, needs_munge
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root

SECRET = bytes(range(SECRET_BYTES))
NAMES = ("job", "0123")
JOB = binding(*NAMES)

Share = Callable[..., SecretProcess]


@pytest.fixture(name="hosts", scope="module")
def _hosts() -> Iterator[list[Munge]]:
    with munge_hosts(2) as hosts:
        yield hosts


@pytest.fixture(name="share")
def _share() -> Iterator[Share]:
    """Starts the process of a host."""
    started: list[SecretProcess] = []

    def share(munge: Munge | None = None, **more: Callable[[socket.socket], None]) -> SecretProcess:
        process = more.get("serve") or functools.partial(serve, munge=munge)
        started.append(SecretProcess(serve=process))
        return started[-1]

    yield share
    for one in started:
        one.close()


@pytest.fixture(name="base")
def _base(tmp_path: Path) -> str:
    """Where the run directories of all hosts are."""
    return str(tmp_path / "saferun-runs")


# -------------------------------------------------------------------------------------------------------- the two ways


@needs_munge
def test_a_secret_gets_to_other_hosts_by_munge(hosts: list[Munge], share: Share, base: str) -> None:
    """Where munge is there, no file is made."""
    offer = share(hosts[0]).offer(SECRET, *NAMES, 300, base)
    assert list(json.loads(offer["text"])) == ["munge"]
    assert SECRET.hex() not in offer["text"]
    assert not os.path.exists(base)
    others = [share(hosts[1]), share(hosts[1]), share(hosts[0])]
    assert [other.take(offer["text"], *NAMES, "") for other in others] == [(SECRET, "")] * 3


def test_a_secret_gets_to_other_hosts_by_a_file_in_a_private_directory(share: Share, base: str) -> None:
    """Where munge is not there, a shared file system may be."""
    leader = share()
    offer = leader.offer(SECRET, *NAMES, 300, base)
    assert list(json.loads(offer["text"])) == ["file"]
    path, device, inode = offer["made"]
    assert os.path.dirname(path) == base
    status = os.stat(path)
    assert (status.st_dev, status.st_ino, status.st_mode & 0o777) == (device, inode, 0o700)
    assert [os.stat(os.path.join(path, name)).st_mode & 0o777 for name in os.listdir(path)] == [0o600]
    assert [share().take(offer["text"], *NAMES, base) for _ in range(3)] == [(SECRET, "")] * 3
    leader.withdraw()
    assert os.listdir(base) == [".gitignore"]
    assert share().take(offer["text"], *NAMES, base) == (b"", "the run directory: No such file or directory")


@needs_munge
def test_a_daemon_that_does_not_answer_leaves_the_other_way(share: Share, base: str, tmp_path: Path) -> None:
    """Its socket is there, and the daemon is gone."""
    munge = Munge("/usr/bin/munge", "/usr/bin/unmunge", str(tmp_path / "socket"))
    offer = share(munge).offer(SECRET, *NAMES, 300, base)
    assert list(json.loads(offer["text"])) == ["file"]
    assert share(munge).take(offer["text"], *NAMES, base) == (SECRET, "")


def test_without_a_channel_there_is_no_offer(share: Share) -> None:
    """Nothing is made then; the reason is in one line."""
    offer = share().offer(SECRET, *NAMES, 300, "")
    assert (offer["text"], offer["made"]) == ("", None)
    assert offer["why"] == "there is no munge; there is no run directory"


def test_a_directory_that_cannot_be_had_is_no_channel(share: Share, tmp_path: Path) -> None:
    """A file is in its place."""
    (tmp_path / "saferun-runs").write_text("")
    offer = share().offer(SECRET, *NAMES, 300, str(tmp_path / "saferun-runs"))
    assert (offer["text"], offer["made"]) == ("", None)
    assert "the run directory: Not a directory" in offer["why"]


def test_a_host_without_the_channel_has_no_secret(share: Share, base: str, tmp_path: Path) -> None:
    """The directory is not shared, or not known there."""
    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    secret, why = share().take(offer, *NAMES, str(tmp_path / "elsewhere"))
    assert (secret, why) == (b"", "the run directory: No such file or directory")
    assert share().take(offer, *NAMES, "") == (b"", "the run directory: this host has none")
    assert share().take(json.dumps({"munge": "MUNGE:A:"}), *NAMES, base) == (
        b"",
        "munge: it is not installed on this host",
    )


# ----------------------------------------------------------------------------------------------------- hostile offers


@needs_munge
def test_a_secret_of_somebody_else_is_not_taken(hosts: list[Munge], share: Share, base: str) -> None:
    """Somebody has overwritten the offer with one of their own, by either way."""
    theirs = credential_of(hosts[0], pack(SECRET, JOB), uid=SOMEBODY, readable_for=os.geteuid())
    secret, why = share(hosts[1]).take(json.dumps({"munge": theirs}), *NAMES, base)
    assert (secret, why) == (b"", "munge: the credential was made by user 54321")


@needs_root
def test_a_file_of_somebody_else_is_not_taken(share: Share) -> None:
    """The directory of the run directories may be one that everybody can write."""
    with directory_for_all(0o777) as directory:
        base, name, content = str(directory), new_name(), pack(SECRET, JOB)
        as_user(lambda: write_theirs(base, name, content))
        assert (directory / name / "content").read_bytes() == content
        (directory / name).chmod(0o700)
        secret, why = share().take(json.dumps({"file": name}), *NAMES, base)
        assert secret == b""
        assert "it belongs to user 54321" in why


def write_theirs(base: str, name: str, content: bytes) -> None:
    os.mkdir(f"{base}/{name}", 0o700)
    fd = os.open(f"{base}/{name}/content", os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, content)
    os.close(fd)


@needs_root
def test_nobody_else_reads_the_file(share: Share) -> None:
    """Its name is published, and the directory above may be open to all."""
    with directory_for_all(0o755) as directory:
        base = str(directory)
        offer = share().offer(SECRET, *NAMES, 300, base)["text"]
        name = json.loads(offer)["file"]

        def read() -> str:
            try:
                return os.listdir(f"{base}/{name}")[0]
            except PermissionError:
                return "refused"

        assert as_user(read) == "refused"
        assert share().take(offer, *NAMES, base) == (SECRET, "")


@pytest.mark.parametrize("change", ["mode", "file mode", "link", "file link", "hard link", "fifo", "long", "folder"])
def test_a_file_that_is_not_private_is_not_taken(base: str, change: str) -> None:
    """It is this user's, and yet others can read it, or have led there."""
    os.mkdir(base)
    name, other = new_name(), new_name()
    write_private(base, name, pack(SECRET, JOB))
    assert unpack(read_private(base, name, 1024), JOB) == SECRET
    folder, file = Path(base, name), Path(base, name, "content")
    match change:
        case "mode":
            folder.chmod(0o750)
        case "file mode":
            file.chmod(0o640)
        case "link":
            folder.rename(Path(base, other))
            folder.symlink_to(other)
        case "file link":
            file.rename(Path(base, "content"))
            file.symlink_to("../content")
        case "hard link":
            os.link(file, Path(base, "content"))
        case "fifo":
            file.unlink()
            os.mkfifo(file, 0o600)
        case "long":
            file.write_bytes(bytes(1 << 20))
        case "folder":
            file.unlink()
            file.mkdir(0o700)
    with pytest.raises((OSError, NotOursError)):
        read_private(base, name, 1024)


HOSTILE_NAMES = [
    "",
    ".",
    "..",
    "content",
    "/etc/passwd",
    "/proc/self/environ",
    "../.private-" + "0" * 32,
    ".private-" + "0" * 31 + "/",
    ".private-" + "0" * 32 + "\0",
    ".private-" + "0" * 32 + "\n",
    ".private-" + "0" * 32 + "/../x",
    ".private-" + "G" * 32,
]


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_no_name_leads_out_of_the_directory(base: str, name: str) -> None:
    """An automounter could mount the attacker's file system, where files belong to whomever the attacker says."""
    os.mkdir(base)
    with pytest.raises(OSError, match="not the name of a private directory"):
        read_private(base, name, 1024)


@pytest.mark.parametrize(
    "offer",
    [
        "",
        "{}",
        "[]",
        "null",
        "\0\xff" * 100,
        "[" * 4000,
        "1e999",
        "x" * (1 << 20),
        '{"munge": 1, "file": []}',
        '{"munge": "' + "A" * 5000 + '"}',
        '{"munge": "MUNGE:A:", "file": "/dev/tty"}',
        '{"file": "' + "A" * 3000 + '"}',
        '{"file": ".private-' + "0" * 32 + '"}',
    ],
)
def test_an_offer_that_makes_no_sense_is_no_secret(share: Share, base: str, offer: str) -> None:
    """Whoever can write to the store chooses it."""
    sharing = share()
    secret, why = sharing.take(offer, *NAMES, base)
    assert secret == b""
    assert why
    assert why.isprintable()
    assert len(why) < 500
    # and the process is still there
    assert sharing.take(sharing.offer(SECRET, *NAMES, 300, base)["text"], *NAMES, base) == (SECRET, "")


@needs_munge
def test_an_offer_of_another_job_is_not_taken(hosts: list[Munge], share: Share, base: str) -> None:
    """It has been recorded when another job of this user began."""
    for munge in (hosts[0], None):
        old = share(munge).offer(SECRET, "job", "4567", 300, base)["text"]
        secret, why = share(munge).take(old, *NAMES, base)
        assert secret == b""
        assert why.endswith("it holds the secret of another job")


def test_a_binding_is_one_jobs_alone() -> None:
    """Neither the name of the job nor its number can be taken for a part of the other."""
    assert len({binding(*names) for names in [("a", "bc"), ("ab", "c"), ("", "abc"), ('a", "b', "c")]}) == 4


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b"\xff", b"{" * 1000, bytes(2000)])
def test_what_is_no_secret_is_refused(content: bytes) -> None:
    """A credential or a file of this user's that is for something else."""
    with pytest.raises(NoSecretError):
        unpack(content, JOB)
    for secret in (b"", SECRET[1:], SECRET + b"x"):
        with pytest.raises(NoSecretError):
            unpack(pack(secret, JOB), JOB)


# ------------------------------------------------------------------------------------------------ the process, and ends


def until_gone(path: str) -> None:
    while os.path.exists(path):
        time.sleep(0.01)


def test_the_file_is_removed_when_the_process_ends(share: Share, base: str) -> None:
    """The run is over."""
    leader = share()
    leader.offer(SECRET, *NAMES, 300, base)
    leader.close()
    assert os.listdir(base) == [".gitignore"]


def test_the_file_is_removed_when_the_coordinator_is_killed(base: str) -> None:
    """Nobody closes anything then but the kernel."""
    read_end, write_end = os.pipe()
    test_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(test_pid)
            sharing = SecretProcess(serve=functools.partial(serve, munge=None))  # which ends when nobody refers to it
            os.write(write_end, sharing.offer(SECRET, *NAMES, 300, base)["made"][0].encode())
            signal.pause()
        finally:
            os._exit(0)
    path = os.read(read_end, 4096).decode()
    assert os.path.exists(path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until_gone(path)
    os.close(read_end)
    os.close(write_end)


def test_what_others_plant_beside_it_stays(share: Share, base: str, tmp_path: Path) -> None:
    """Only what was made is removed."""
    leader = share()
    path = leader.offer(SECRET, *NAMES, 300, base)["made"][0]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("")
    os.rename(path, tmp_path / "moved")
    os.symlink(tmp_path / "precious", path)
    leader.close()
    assert (tmp_path / "precious" / "file").exists()
    assert os.path.islink(path)


def test_a_file_system_that_does_not_answer_costs_its_time_and_no_more(
    share: Share, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may lie on a server that is gone. The process that waits is lost, not the one that asks."""
    monkeypatch.setattr(secret_sharing, "_FILE_S", 0.3)
    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    monkeypatch.setattr(secret_sharing, "read_private", lambda *_: signal.pause())
    monkeypatch.setattr(secret_sharing, "write_private", lambda *_: signal.pause())
    sharing = share()
    assert sharing.take(offer, *NAMES, base) == (
        b"",
        "the run directory: its file system did not answer within 0 s",
    )
    # From now on it costs no time: restarts meet again and again.
    answer = sharing.offer(SECRET, *NAMES, 300, base)
    assert answer["text"] == ""
    assert answer["why"].endswith("the run directory: its file system does not answer")
    leader = share()
    answer = leader.offer(SECRET, *NAMES, 300, base)
    assert answer["why"].endswith("the run directory: its file system did not answer within 0 s")


def test_a_process_that_is_gone_is_no_secret(share: Share, base: str) -> None:
    """It may be killed at any time, also by lack of memory."""
    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    sharing = share()
    os.kill(sharing.pid, signal.SIGKILL)
    assert sharing.take(offer, *NAMES, base) == (b"", "the process that shares the secret does not answer")
    assert sharing.take(offer, *NAMES, base) == (b"", "the process that shares the secret is gone")
    assert "gone" in sharing.offer(SECRET, *NAMES, 300, base)["why"]
    sharing.withdraw()
    sharing.close()
    sharing.close()


def until_reaped(sharing: SecretProcess) -> None:
    until_gone(f"/proc/{sharing.pid}")


def sharing_that_exits_soon(share: Share) -> SecretProcess:
    sharing = share(serve=functools.partial(serve, munge=None, idle_s=0.01))
    sharing._serve = functools.partial(serve, munge=None)  # of the next one, which stays
    return sharing


def test_a_process_that_nobody_asks_exits_and_the_next_request_starts_another_one(share: Share, base: str) -> None:
    """The hosts have met: it is needed no more, until they meet again."""
    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    sharing = sharing_that_exits_soon(share)
    first = sharing.pid
    until_reaped(sharing)
    assert sharing.take(offer, *NAMES, base) == (SECRET, "")
    second = sharing.pid
    assert second not in {first, -1}
    assert sharing.take(offer, *NAMES, base) == (SECRET, "")
    assert sharing.pid == second
    sharing.close()
    until_gone(f"/proc/{second}")


def test_a_process_that_has_a_file_to_remove_waits_for_it(share: Share, base: str) -> None:
    """The last host may come after minutes."""
    leader = share(serve=functools.partial(serve, munge=None, idle_s=0.01))
    offer = leader.offer(SECRET, *NAMES, 300, base)
    path, pid = offer["made"][0], leader.pid
    time.sleep(0.1)
    assert share().take(offer["text"], *NAMES, base) == (SECRET, "")
    assert leader.pid == pid
    leader.withdraw()
    assert not os.path.exists(path)
    until_reaped(leader)


def test_the_next_process_stays_when_the_thread_that_has_asked_exits(share: Share, base: str) -> None:
    """Each rendezvous has a thread of its own, and the kernel ends a process with the thread that has forked it."""
    sharing = sharing_that_exits_soon(share)
    until_reaped(sharing)
    made: list[str] = []
    thread = threading.Thread(target=lambda: made.append(sharing.offer(SECRET, *NAMES, 300, base)["made"][0]))
    thread.start()
    thread.join()
    second = sharing.pid
    assert share().take(json.dumps({"file": os.path.basename(made[0])}), *NAMES, base) == (SECRET, "")
    sharing.withdraw()
    assert os.listdir(base) == [".gitignore"]
    assert sharing.pid == second


def test_where_no_other_process_can_be_started_there_is_no_secret(
    share: Share, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit on processes has been reached since."""
    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    sharing = sharing_that_exits_soon(share)
    until_reaped(sharing)

    def fail() -> int:
        raise BlockingIOError

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", fail)
        assert sharing.take(offer, *NAMES, base) == (b"", "the process that shares the secret is gone")
    assert sharing.pid == -1


def test_where_no_thread_can_be_started_for_another_process_there_is_no_secret(
    share: Share, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above."""
    sharing = sharing_that_exits_soon(share)
    until_reaped(sharing)

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert sharing.offer(SECRET, *NAMES, 300, base) == {"why": "the process that shares the secret is gone"}


def test_a_request_that_comes_as_the_process_exits_is_asked_again(share: Share, base: str) -> None:
    """Its last line is no answer."""

    def exit_when_asked(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b'{"exits": true}\n')

    offer = share().offer(SECRET, *NAMES, 300, base)["text"]
    sharing = share(serve=exit_when_asked)
    sharing._serve = functools.partial(serve, munge=None)
    assert sharing.take(offer, *NAMES, base) == (SECRET, "")
    sharing = share(serve=exit_when_asked)
    assert sharing.take(offer, *NAMES, base) == (b"", "the process that shares the secret exits at once")


@pytest.mark.parametrize("said", [b"null\n", b"{}\n", b'{"id": 7}\n', b"\xff\n", b"x" * (1 << 20), b""])
def test_an_answer_that_makes_no_sense_is_no_secret(share: Share, base: str, said: bytes) -> None:
    """The process reads what others have written."""

    def answer(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(said)

    assert share(serve=answer).take("{}", *NAMES, base) == (b"", "the process that shares the secret does not answer")


def test_where_no_process_can_be_made_there_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on processes is reached."""

    def fail() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", fail)
    sharing = SecretProcess()
    assert sharing.take("{}", *NAMES, "")[0] == b""
    sharing.close()


def test_where_there_are_no_descriptors_for_the_process_there_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that ends would end the job."""

    def fail() -> tuple[socket.socket, socket.socket]:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", fail)
    sharing = SecretProcess()
    assert sharing.pid == -1
    assert sharing.take("{}", *NAMES, "")[0] == b""
    sharing.close()


def test_the_process_keeps_no_port() -> None:
    """A port that stays bound would break the next job; the process may hang for long."""

    def hang(connection: socket.socket) -> None:
        connection.send(b"\n")
        signal.pause()

    named, inherited = (socket.create_server(("127.0.0.1", own_port())) for _ in range(2))
    sharing = SecretProcess([named.fileno()], serve=hang)
    assert sharing._line is not None
    assert sharing._line.recv(1) == b"\n"
    for one in (named, inherited):
        port = one.getsockname()[1]
        one.close()
        socket.create_server(("127.0.0.1", port)).close()
    os.kill(sharing.pid, signal.SIGKILL)
    sharing.close()


def test_the_process_is_none_that_is_ended_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has its file to remove when everything of a killed run is ended, and ends by itself."""
    monkeypatch.setenv("SAFERUN_RUN_ID", "0123")  # which a process inherits, as the coordinator has it
    program = (
        "import os, socket\n"
        "from saferun.coordinator.secret_process import SecretProcess\n"
        "from saferun.linux.procfs import belongs_to_run\n"
        "sharing = SecretProcess(serve=lambda line: (line.send(b'x'), line.recv(1)))\n"
        "sharing._line.recv(1)\n"
        "print(belongs_to_run(os.getpid(), '0123'), belongs_to_run(sharing.pid, '0123'))\n"
        "sharing.close()\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["True", "False"]


def test_removing_what_is_not_there_is_fine(tmp_path: Path) -> None:
    """The user may have deleted it."""
    assert remove_private(str(tmp_path / "none"), new_name())
    assert remove_private(str(tmp_path), new_name())
    write_private(str(tmp_path / "base"), name := new_name(), b"x")
    shutil.rmtree(tmp_path / "base")
    assert remove_private(str(tmp_path / "base"), name)
    assert make_offer(SECRET, JOB, 300, "", None).text == ""
    with pytest.raises(NoSecretError):
        take_offer("{}", JOB, "", None)


def test_without_a_file_the_process_dies_with_the_coordinator(base: str) -> None:
    """By the kernel, at the same moment: a process of a killed run that is found later is told to the user."""
    del base
    read_end, write_end = os.pipe()
    test_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(test_pid)

            def hang(connection: socket.socket) -> None:
                connection.send(b"\n")
                signal.pause()

            sharing = SecretProcess(serve=hang)
            assert sharing._line is not None
            sharing._line.recv(1)
            os.write(write_end, str(sharing.pid).encode())
            signal.pause()
        finally:
            os._exit(0)
    helper = os.read(read_end, 64).decode()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    until_gone(f"/proc/{helper}")
    os.close(read_end)
    os.close(write_end)
