"""A list of hosts that launches of several users and hosts add to at the same time."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from saferun.files import exclude_list
from saferun.files.exclude_list import add_here, add_hosts, is_host_name


def test_a_host_is_added_once_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "bad-hosts"
    assert add_here(str(path), ["node3"])
    assert not add_here(str(path), ["node3"])
    assert add_here(str(path), ["node30"])
    assert path.read_text() == "node3\nnode30\n"


@pytest.mark.parametrize("before", ["node1,node2", "node1 node2\n", "# by hand\nnode1\nnode2", "node1\r\nnode2\r\n"])
def test_what_people_have_written_stays_as_it_is(tmp_path: Path, before: str) -> None:
    """The list may have been begun by hand, in any form that Slurm takes, and without an end of line."""
    path = tmp_path / "bad-hosts"
    path.write_bytes(before.encode())
    assert not add_here(str(path), ["node2"])
    assert add_here(str(path), ["node3"])
    after = path.read_bytes().decode()
    assert after.startswith(before)
    assert after.splitlines()[-1] == "node3"


def test_several_launches_add_to_it_at_the_same_time(tmp_path: Path) -> None:
    path = str(tmp_path / "bad-hosts")
    names = [f"node{number}" for number in range(40)]
    threads = [threading.Thread(target=lambda: [add_here(path, [name]) for name in names]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(Path(path).read_text().split("\n")) == sorted([*names, ""])


def test_a_lock_that_somebody_keeps_is_not_waited_for(tmp_path: Path) -> None:
    """The writer process has the output of the ranks to write."""
    path = tmp_path / "bad-hosts"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert add_here(str(path), ["node3"])
    assert path.read_text() == "node3\n"


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a\nb", "-x", "../x", "#x", "x" * 300, "\x1b[2J", "node[1-4]"])
def test_what_is_no_name_of_a_host_is_not_written(tmp_path: Path, name: str) -> None:
    """Names come from other hosts; a range would exclude hosts that nobody has found bad."""
    assert not is_host_name(name)
    with pytest.raises(OSError, match="is not the name of a host"):
        add_here(str(tmp_path / "bad-hosts"), [name])
    assert not (tmp_path / "bad-hosts").exists()


def test_no_link_is_followed_and_nothing_but_a_file_is_written_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine\n")
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "fifo", "no/such/directory"):
        with pytest.raises(OSError):  # noqa: PT011 - each has its own
            add_here(str(tmp_path / name), ["node3"])
    assert target.read_text() == "mine\n"


def test_a_list_on_a_file_system_that_hangs_costs_a_moment_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer process has the files of the run to write, which may lie on another file system."""

    def hang(path: str, _names: list[str]) -> list[str]:
        with asked.open("a") as file:
            file.write(".")
        signal.pause()
        return [path]

    asked = tmp_path / "asked"
    monkeypatch.setattr(exclude_list, "add_here", hang)
    monkeypatch.setattr(exclude_list, "_APART_S", 2.0)
    path = str(tmp_path / "bad-hosts")
    for _ in range(2):
        with pytest.raises(OSError, match="does not answer"):
            add_hosts(path, ["node3"])
    assert asked.read_text() == "."


def test_a_process_of_its_own_adds_several_and_says_why_it_cannot(tmp_path: Path) -> None:
    path = tmp_path / "bad-hosts"
    assert add_hosts(str(path), ["node3", "node4"]) == ["node3", "node4"]
    assert add_hosts(str(path), ["node4", "no name", "node5"]) == ["node5"]
    assert path.read_text() == "node3\nnode4\nnode5\n"
    with pytest.raises(OSError, match="No such file or directory"):
        add_hosts(str(tmp_path / "no" / "such"), ["node3"])


def test_half_a_name_is_never_left_in_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk is full in the middle of node12, and node1 is well."""
    path = tmp_path / "bad-hosts"
    path.write_text("node7\n")
    whole = os.write
    monkeypatch.setattr(os, "write", lambda fd, line: whole(fd, line[:5]))
    with pytest.raises(OSError, match="No space left"):
        add_here(str(path), ["node12"])
    assert path.read_text() == "node7\n"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00n\x00o" * 1000, b"x" * (5 << 20), b"\n" * (5 << 20), b"\0" * 4096])
def test_a_list_that_is_binary_or_huge_gets_the_name_behind_it(tmp_path: Path, content: bytes) -> None:
    """Whatever the option names by mistake: nothing of it is changed, and it is read within bounds."""
    path = tmp_path / "bad-hosts"
    path.write_bytes(content)
    assert add_here(str(path), ["node3"])
    assert path.read_bytes()[: len(content)] == content
    assert path.read_bytes().endswith(b"\nnode3\n")
