"""A disk that is full for a while, under the files of ranks; and a writer that is killed while it writes them."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import Job, in_mounts, kill, running, until

# Fills the disk that the run directory is on, prints on, and makes room again when it may.
FILLS_THE_DISK = """
from rank import *
disk, count = sys.argv[1], int(sys.argv[2])
print("before", flush=True)
tell("ready")
await_release("fill")
if RANK == 0:
    make_room = fill(disk)
    for number in range(count):
        print("line", number, "x" * 50, flush=True)
    tell("full")
    await_release("room")
    make_room()
    tell("room")
await_release("end")
print("after", flush=True)
"""


def full_lines(count: int) -> str:
    """What the first rank prints in all."""
    return "".join(["before\n", *(f"line {number} {'x' * 50}\n" for number in range(count)), "after\n"])


@pytest.mark.parametrize("count", slow_but([2000, 20000], "20000"), ids=["fits into memory", "does not"])
def test_a_full_disk_costs_at_most_a_noted_gap(tmp_path: Path, count: int) -> None:
    """The console has everything, the exit code is the ranks', and the files say what they miss."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    keep = ["sh", "-c", f"\"$@\"; code=$?; cp -r '{disk}' '{copy}'; exit $code", "sh"]
    before = [*in_mounts((str(disk), "size=8m")), *keep]
    arguments = [str(disk), str(count)]
    options = ("--run-dir", f"{disk}/run")
    with running(
        tmp_path / "t", FILLS_THE_DISK, *options, nproc=2, before=before, arguments=arguments, store=False
    ) as job:
        job.hear("ready", 2)
        run = Path(f"/proc/{job.process.pid}/root{disk}/run")
        until(lambda: len(list(run.glob("*/attempt_0/rank_*/stdout.log"))) == 2, "the files are there")
        job.release("fill")
        job.hear("full")
        until(lambda: "No space left on device" in job.err, "it is said")
        until(lambda: job.out.count("x" * 50) == count, "the console has everything")
        job.release("room")
        job.hear("room")
        until(lambda: "files are written again" in job.err, "that is said, too")
        job.release("end")
        assert job.wait() == 0
    whole = full_lines(count)
    loud, quiet = ((path).read_text() for path in sorted(copy.glob("run/*/attempt_0/rank_*/stdout.log")))
    assert quiet == "before\nafter\n"
    note = re.search(r"\n?\[saferun: (\d+) bytes of this stream are missing here: No space left on device", loud)
    if count == 2000:
        assert "nothing is missing" in job.err
        assert loud == whole
        return
    assert note is not None
    assert f"{note[1]} bytes are missing in them, which they note" in job.err
    head, tail = loud[: note.start()], loud[loud.index("\n", note.end()) + 1 :]
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + int(note[1]) + len(tail) in {len(whole), len(whole) - 1}


# Its output and its checkpoint together are larger than the disk.
SAVES = """
from rank import *
path = sys.argv[1]
for number in range(60_000):
    print("line", number, "x" * 100)
sys.stdout.flush()
for _ in range(60):
    try:
        with open(path, "wb") as file:
            file.write(bytes(4 << 20))
    except OSError as error:
        print("not saved", error, flush=True)
        time.sleep(0.5)
    else:
        print("saved", flush=True)
        break
else:
    sys.exit(3)
"""


def test_a_copy_of_the_output_makes_room_for_a_checkpoint(tmp_path: Path) -> None:
    """Under torchrun there is no copy on that disk."""
    disk = tmp_path / "disk"
    disk.mkdir()
    before, options = in_mounts((str(disk), "size=8m")), ("--run-dir", f"{disk}/run")
    arguments = [f"{disk}/checkpoint"]
    with running(tmp_path / "t", SAVES, *options, before=before, arguments=arguments, store=False) as job:
        assert job.wait() == 0, job.err
        assert job.out.endswith(" saved\n")
        assert job.out.count("x" * 100) == 60_000


TALK = """
from rank import *
for number in range(400_000):
    print(number, flush=not number % 100)
    if number == 100_000:
        tell("half")
"""


def writer_of(job: Job) -> int:
    """The pid of the process that writes the files."""
    return until(lambda: job.called("sr-writer"), "the writer is there")[0]


def test_a_writer_that_is_killed_while_it_writes_costs_no_line(tmp_path: Path) -> None:
    """The next one goes on where it was."""
    with running(tmp_path, TALK, store=False) as job:
        job.hear("half")
        kill(writer_of(job), signal.SIGKILL)
        assert job.wait(60) == 0
        assert "is replaced" in job.err
        text = job.rank_file(0, "stdout.log").decode()
    assert text == "".join(f"{number}\n" for number in range(400_000))
