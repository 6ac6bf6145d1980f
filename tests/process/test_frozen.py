"""The file systems of ``frozen.py`` do what the tests that use them rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.frozen import FileSystem, frozen_disk, mirror, needs_mounts
from tests.process.launching import DEADLINE_S, state_of, until

pytestmark = needs_mounts

WRITE = "import os; open('file', 'a').write('more'); print('written', flush=True)"
READ = "print(open('file').read(), flush=True)"


def start(system: FileSystem, source: str) -> subprocess.Popen[bytes]:
    command = [*system.before(system.path), sys.executable, "-S", "-c", source]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_whoever_writes_to_a_frozen_disk_sleeps_until_it_is_thawed(tmp_path: Path) -> None:
    with frozen_disk(tmp_path) as disk:
        disk.inside(disk.path / "file").write_text("some, ")
        disk.freeze()
        with start(disk, WRITE) as process:
            until(lambda: state_of(process.pid) == "D", "the process sleeps uninterruptibly")
            disk.thaw()
            assert process.wait(DEADLINE_S) == 0
        assert disk.inside(disk.path / "file").read_text() == "some, more"
    assert not os.path.ismount(disk.path)


def test_a_test_that_ends_while_a_disk_is_frozen_leaves_nobody_asleep(tmp_path: Path) -> None:
    with frozen_disk(tmp_path) as disk:
        disk.freeze()
        process = start(disk, WRITE)
        until(lambda: state_of(process.pid) == "D", "the process sleeps uninterruptibly")
    with process:
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("thawed", [True, False])
def test_nothing_in_a_frozen_mirror_answers(tmp_path: Path, *, thawed: bool) -> None:
    """Not even SIGKILL ends the wait, as with NFS and Lustre."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("text")
    with mirror(tmp_path, tmp_path / "source") as system:
        with start(system, READ) as process:
            assert process.communicate(timeout=DEADLINE_S)[0] == b"text\n"
        assert sorted(path.name for path in system.inside(system.path).iterdir()) == ["file"]
        command = [*system.before(), sys.executable, "-S", "-c", f"import os; os.stat('{system.path}/file')"]
        system.freeze()
        process = subprocess.Popen(command)
        until(lambda: state_of(process.pid) in "DS" and asleep_in_fuse(process.pid), "the process waits")
        process.kill()
        until(lambda: state_of(process.pid) in {"D", ""}, "it waits on, or has not been heard yet")
        if thawed:
            system.thaw()
    with process:
        process.wait(DEADLINE_S)


def asleep_in_fuse(pid: int) -> bool:
    return "fuse" in Path(f"/proc/{pid}/stack").read_text()


def test_programs_run_from_a_mirror(tmp_path: Path) -> None:
    """Installations are put there, to be taken away later."""
    with mirror(tmp_path, Path(os.__file__).parent) as system:
        command = [*system.before(), sys.executable, "-S", "-c", "import decimal, email; print(email.__file__)"]
        environ = {**os.environ, "PYTHONPATH": str(system.path)}
        out = subprocess.run(command, capture_output=True, env=environ, timeout=DEADLINE_S, check=True).stdout
        assert out.decode().startswith(str(system.path))


def test_a_mirror_takes_what_saferun_and_ranks_write(tmp_path: Path) -> None:
    """Directories, files that grow and files that are replaced, links, FIFOs, sockets: all of it is in the source."""
    write = """
import os, socket
os.makedirs("a/b")
with open("a/b/file", "w") as file:
    file.write("x" * 300_000)
with open("a/b/file", "a") as file:
    file.write("end")
    os.fsync(file.fileno())
os.truncate("a/b/file", 200_000)
open("new", "w").write("new")
open("old", "w").write("old")
os.replace("new", "old")
open("new", "w").write("other")
os.symlink("old", "link")
os.replace("link", "latest")
os.rename("a", "c")
open("c/b/more", "w").close()
os.chmod("c/b/more", 0o640)
os.unlink("c/b/more")
os.mkdir("gone")
os.rmdir("gone")
os.mkfifo("fifo")
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("socket")
    listener.listen()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("socket")
print(open("latest").read(), os.path.getsize("c/b/file"), sorted(os.listdir()))
"""
    source = tmp_path / "source"
    source.mkdir()
    with mirror(tmp_path, source) as system:
        with start(system, write) as process:
            out = process.communicate(timeout=DEADLINE_S)[0].decode()
        assert out.split() == ["new", "200000", "['c',", "'fifo',", "'latest',", "'new',", "'old',", "'socket']"]
    assert (source / "c" / "b" / "file").read_text() == "x" * 200_000
    assert (source / "latest").read_text() == "new"
    assert (source / "new").read_text() == "other"
