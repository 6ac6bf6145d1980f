"""``saferun … > log.txt``: a file that takes nothing for a while costs nothing, and holds nothing up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.process.frozen import frozen_disk, needs_mounts
from tests.process.launching import Job, in_mounts, kill, read_stat, running, state_of, until

if TYPE_CHECKING:
    from collections.abc import Sequence


def consoles(job: Job) -> list[int]:
    """The processes that write the console's files."""
    names = {pid: Path(f"/proc/{pid}/comm") for pid in job.processes()}
    return [pid for pid, path in names.items() if path.exists() and path.read_text().strip() == "sr-console"]


def into(log: str, copy: str = "") -> list[str]:
    """A command before saferun that sends its console to a file, and copies that in the end to where it can be read."""
    end = f"code=$?; cp '{log}' '{copy}'; exit $code" if copy else ""
    return ["sh", "-c", f"\"$@\" > '{log}' 2>&1; {end}" if end else f"exec \"$@\" > '{log}' 2>&1", "sh"]


# Fills the disk that the console is on, prints on, and makes room again when it is told to.
FILLS_THE_DISK = """
from rank import *
disk = sys.argv[1]
print("before", flush=True)
await_release("fill")
make_room = fill(disk)
for number in range(2000):
    print("line", number, "x" * 50, flush=True)
tell("full")
await_release("room")
make_room()
sys.exit(3)
"""


@pytest.mark.parametrize("mode", slow_but([">", ">>"], ">"))
def test_a_full_disk_costs_the_console_nothing_once_there_is_room(tmp_path: Path, mode: str) -> None:
    """Every line that was written meanwhile is there, and so is the verdict."""
    disk = tmp_path / "disk"
    disk.mkdir()
    log, copy = str(disk / "log"), str(tmp_path / "copy")
    before = [*in_mounts((str(disk), "size=1m")), *into(log, copy)]
    before = [part.replace(f"> '{log}'", f"{mode} '{log}'") for part in before]
    options = ("--run-dir", "none", "--shutdown-timeout", "5")
    with running(tmp_path / "run", FILLS_THE_DISK, *options, before=before, arguments=[str(disk)], store=False) as job:
        job.release("fill")
        job.hear("full")
        job.release("room")
        assert job.wait(60) == 1
    text = Path(copy).read_text()
    lines = [line.split()[2] for line in text.splitlines() if line.startswith("[") and " line " in line]
    assert lines == [str(number) for number in range(2000)], text[-2000:]
    assert "failed first" in text
    assert "skipped" not in text


@needs_mounts
def test_a_console_on_a_frozen_disk_does_not_keep_the_job_from_being_stopped(tmp_path: Path) -> None:
    """Lustre under the Slurm output file, for one: saferun goes on, and the file has everything when it wakes."""
    program = "from rank import *\ntell_signals(signal.SIGTERM)\ntell('ready')\nawait_release('speak')\n"
    program += "print('words', flush=True)\ntell('spoken')\nawait_release('end')"
    (tmp_path / "disks").mkdir()
    with frozen_disk(tmp_path / "disks") as disk:
        log = disk.path / "log"
        before = [*disk.before(), *into(str(log))]
        with running(tmp_path / "run", program, "--run-dir", "none", before=before, store=False) as job:
            job.hear("ready")
            disk.freeze()
            job.release("speak")
            job.hear("spoken")
            until(lambda: any(state_of(pid) == "D" for pid in consoles(job)), "the file is being written")
            job.send(signal.SIGTERM)
            job.hear("SIGTERM")
            assert state_of(job.process.pid) != "D"
            job.release("end")
            disk.thaw()
            assert job.wait(60) == 1
        text = disk.inside(log).read_text()
        assert "words" in text
        assert "stopped by SIGTERM" in text


def test_a_console_whose_writer_is_killed_goes_on(tmp_path: Path) -> None:
    """What was in the pipe is not lost with it."""
    program = (
        "from rank import *\nprint('one', flush=True)\ntell('ready')\nawait_release('on')\nprint('two', flush=True)\n"
    )
    program += "tell('spoken')\nawait_release('end')"
    with running(tmp_path, program, store=False) as job:
        job.hear("ready")
        until(lambda: "one" in job.out, "the first line is there")
        killed = consoles(job)
        assert len(killed) == 2
        for pid in killed:
            kill(pid, signal.SIGKILL)
        until(lambda: all(read_stat(pid) is None for pid in killed), "the writers are gone")
        job.release("on")
        job.hear("spoken")
        job.release("end")
        assert job.wait() == 0
        assert [line.split()[-1] for line in job.out.splitlines()] == ["one", "two"]


def raw(folder: Path, program: str, *, nproc: int = 1, options: Sequence[str] = ()) -> bytes:
    """What is in a file after a launch with ``--prefix none``."""
    with running(folder, program, "--prefix", "none", *options, nproc=nproc, store=False) as job:
        assert job.wait(60) == 0
        return (folder / "stdout").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--run-dir", "none"), marks=pytest.mark.slow),
        pytest.param(("--tee", "3", "--run-dir", "none"), marks=pytest.mark.slow),
    ],
)
def test_without_a_prefix_a_line_in_two_halves_stays_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    """However long its rank thinks between them."""
    program = "import os, time\nos.write(1, b'{\"a\": ')\ntime.sleep(1.6)\nos.write(1, b'1}\\n')\nos.write(1, b'end')"
    assert raw(tmp_path, program, options=options) == b'{"a": 1}\nend'


def test_without_a_prefix_every_byte_passes_unchanged(tmp_path: Path) -> None:
    """Lines of any length and content, in pieces of any size: bars, carriage returns, bytes that are no text."""
    program = r"""
import os, random
content = random.Random(7).randbytes(300_000) + b"\r\n\r\r" + b"x" * 3_000_000 + b"\n\n" + b"\r10%\r20%\n" + b"open"
while content:
    size = os.write(1, content[:random.choice((1000, 5000, 70_000))])
    content = content[size:]
"""
    expected = Random(7).randbytes(300_000)  # noqa: S311 - any bytes
    expected += b"\r\n\r\r" + b"x" * 3_000_000 + b"\n\n" + b"\r10%\r20%\n" + b"open"
    assert raw(tmp_path, program) == expected


def test_without_a_prefix_lines_of_two_ranks_are_not_mixed(tmp_path: Path) -> None:
    """Each writes its JSON in pieces, at the same time as the other."""
    program = r"""
import json, os, random
for number in range(300):
    text = json.dumps({"rank": os.environ["RANK"], "number": number, "x": "y" * random.choice((1, 100, 100_000))})
    cut = random.randrange(len(text))
    os.write(1, text[:cut].encode())
    rest = text[cut:].encode() + b"\n"
    while rest:
        rest = rest[os.write(1, rest):]
"""
    lines = raw(tmp_path, program, nproc=2).splitlines()
    found = [json.loads(line) for line in lines]
    for rank in "01":
        assert [one["number"] for one in found if one["rank"] == rank] == list(range(300))


def test_a_reader_that_is_gone_is_still_no_reason_to_end(tmp_path: Path) -> None:
    """``saferun … | head``: the ranks do not care."""
    read_end, write_end = os.pipe()
    program = "from rank import *\ntell('ready')\nawait_release('on')\nprint('x' * 100000)\ntell('done')"
    with running(tmp_path, program, "--prefix", "none", store=False, stdout=write_end) as job:
        os.close(write_end)
        job.hear("ready")
        os.close(read_end)
        job.release("on")
        job.hear("done")
        assert job.wait() == 0


def test_where_no_writer_can_be_had_the_file_is_written_all_the_same(tmp_path: Path) -> None:
    """Nothing that saferun adds may cost the log: without the process it is as it was before there was one."""
    code = (
        "import saferun.console.target as target, sys\n"
        "def fails(fd): raise OSError(11, 'no process')\n"
        "target.ConsoleFile = fails\n"
        "from saferun.cli.main import main\nmain()"
    )
    (tmp_path / "train.py").write_text("print('words')")
    (tmp_path / "start.py").write_text(code)
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, str(tmp_path / "start.py"), "--run-dir", "none", "train.py"]
        environ = {**os.environ, "TMPDIR": str(tmp_path), "SAFERUN_LINT": "off"}
        done = subprocess.run(
            command, check=False, cwd=tmp_path, env=environ, stdout=log, stderr=subprocess.PIPE, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "log").read_text().endswith("words\n")


def test_at_the_end_a_full_disk_is_said_and_ctrl_c_does_not_wait_for_it(tmp_path: Path) -> None:
    """A healthy job waited for a minute without a word, and lost its last lines without one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    program = "from rank import *\nroom = fill(sys.argv[1])\nfor _ in range(2000):\n    print('x' * 50, flush=True)\n"
    only_stdout = ["sh", "-c", f"exec \"$@\" > '{disk}/log'", "sh"]
    before = [*in_mounts((str(disk), "size=64k")), *only_stdout]
    with running(tmp_path / "run", program, before=before, arguments=[str(disk)], store=False) as job:
        until(lambda: "stdout cannot be written: waiting " in job.err, "it is said")
        job.send(signal.SIGINT)
        assert job.wait() == 0
        assert "stdout could not be written to its end: " in job.err
        assert " bytes are missing there; all of it is in " in job.err
