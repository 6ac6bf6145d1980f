"""The run directory: it is all that a launch leaves, and nothing about it can fail a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, Job, command_line, in_mounts, is_in_write, running, until, without

QUICK = "print('done')"


def assert_one_warning(text: str) -> None:
    """Exactly one line of saferun's own, and nothing else."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("saferun: ")


def test_a_file_in_place_of_the_run_directory_is_a_warning(tmp_path: Path) -> None:
    program = "from rank import *\nprint('done')"
    before = ["sh", "-c", 'touch saferun-runs; exec "$@"', "sh"]
    with running(tmp_path, program, nproc=2, before=before, store=False) as job:
        assert job.wait() == 0
        assert job.out.count("done") == 2
        assert_one_warning(job.err)


def test_a_run_directory_without_permission_is_a_warning(tmp_path: Path) -> None:
    with running(
        tmp_path, QUICK, "--run-dir", "locked/run", nproc=2, before=[*locked("locked"), *without([1, 2])], store=False
    ) as job:
        assert job.wait() == 0
        assert job.out.count("done") == 2
        assert_one_warning(job.err)


def locked(path: str) -> list[str]:
    """A command before saferun that makes a directory nobody may write to."""
    return ["sh", "-c", f'mkdir {path} && chmod 500 {path}; exec "$@"', "sh"]


@pytest.mark.parametrize("options", slow_but(["size=4k", "size=8k", "size=16k", "size=64k"], "size=8k"))
def test_a_full_run_directory_is_one_warning(tmp_path: Path, options: str) -> None:
    """A disk that fills up in the middle of a week's training may not end it."""
    program = (
        "import sys\nfor stream in (sys.stdout, sys.stderr):\n for number in range(2000): print('x' * 100, file=stream)"
    )
    runs = tmp_path / "runs"
    runs.mkdir()
    before = in_mounts((str(runs), options))
    # The preflight checks would have said so, too.
    wanted = ("--run-dir", str(runs / "run"), "--preflight", "off")
    with running(tmp_path, program, *wanted, nproc=2, before=before, store=False) as job:
        assert job.wait() == 0
        assert job.out.count("x" * 100) == 4000
        assert job.err.count("x" * 100) == 4000
        assert_one_warning("\n".join(line for line in job.err.splitlines() if not line.endswith("x" * 100)))


@pytest.mark.parametrize("inodes", slow_but(range(1, 11), "2", "5", "8"))
def test_a_run_directory_without_room_for_another_file_is_one_warning(tmp_path: Path, inodes: int) -> None:
    """Quotas count files too: the directory of a rank, or its second file, may be the one that is too many."""
    runs = tmp_path / "runs"
    runs.mkdir()
    before = in_mounts((str(runs), f"size=1m,nr_inodes={inodes}"))
    # The preflight checks would have said so, too.
    wanted = ("--run-dir", str(runs / "run"), "--preflight", "off")
    with running(tmp_path, QUICK, *wanted, nproc=2, before=before, store=False) as job:
        assert job.wait() == 0
        assert job.out.count("done") == 2
        assert_one_warning(job.err)


def test_a_run_directory_that_is_removed_under_a_running_job_is_no_failure(tmp_path: Path) -> None:
    program = "from rank import *\nprint('one', flush=True)\nawait_release('end')\nprint('two')\nsys.exit(ATTEMPT == 0)"
    with running(tmp_path, program, "--max-restarts", "1", store=False) as job:
        path = "*/attempt_0/rank_0/stdout.log"
        until(lambda: "one" in job.out and any(job.run_dir.glob(path)), "the rank runs, and its file is there")
        subprocess.run(["rm", "-r", str(tmp_path / "job" / "saferun-runs")], check=True)
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("two") == 2


def test_a_run_directory_that_is_removed_is_made_again_for_the_report_only(tmp_path: Path) -> None:
    """The console has everything: lines are left out there only if a file has them, and a removed file has nothing."""
    program = """
from rank import *
tell("ready")
number = 0
while not os.path.exists(FOLDER + "/release.end"):
    sys.stdout.write(f"line {number}\\n")
    sys.stdout.flush()
    number += 1
    time.sleep(0.01)
sys.exit(3)
"""
    with running(tmp_path, program, "--run-dir", "out", store=False) as job:
        job.hear("ready")
        folder = tmp_path / "job" / "out"
        log = "*/attempt_0/rank_0/stdout.log"
        until(lambda: [path for path in folder.glob(log) if path.read_bytes()], "its output is kept")
        subprocess.run(["rm", "-r", str(folder)], check=True)
        until(lambda: "the file was removed; what files do not keep is on the console" in job.err, "it is noticed")
        assert not folder.exists()
        job.release("end")
        assert job.wait() == 1
        assert json.loads((folder / "report.json").read_text())["incidents"]
        assert json.loads((folder / "run.json").read_text())["end"]["exit_code"] == 1
        assert not list(folder.glob(log))
        numbers = [int(line.split()[-1]) for line in job.out.splitlines() if " line " in line]
        assert numbers == list(range(len(numbers)))
        assert job.err.count("the file was removed") == 1


def test_a_rank_that_clears_the_directory_of_its_log_files_finds_it_empty(tmp_path: Path) -> None:
    """With torchrun it does, whose ranks write on into removed files; one that is made again there ends the rank."""
    program = """
from rank import *
def print_for(seconds):
    for _ in range(int(seconds * 10)):
        print("line", flush=True)
        time.sleep(0.1)
if RANK == 1:
    print_for(0.1)
    tell("printed")
    await_release("removed")
    print_for(4)
    tell("printed")
else:
    import glob, shutil
    await_release("removal")
    for launch in glob.glob("out/logs/*"):
        shutil.rmtree(launch)
    tell("removed")
    await_release("end")
    os.rmdir("out/logs")
    os.rmdir("out")
"""
    out = tmp_path / "job" / "out"
    options = ("-r", "3", "--log-dir", "out/logs", "--run-dir", "none")
    with running(tmp_path, program, *options, nproc=2, store=False) as job:
        job.hear("printed")
        until(lambda: [path for path in out.glob("*/*/*/1/stdout.log") if path.read_bytes()], "its line is kept")
        job.release("removal")
        job.hear("removed")
        job.release("removed")
        until(lambda: "the file was removed" in job.err, "it is noticed")
        job.hear("printed")
        job.release("end")
        assert job.wait() == 0
        assert not out.exists()


@pytest.mark.parametrize("program", slow_but(["import os", "import torch.distributed"], "import os"))
def test_a_launch_leaves_its_run_directory_and_nothing_else(tmp_path: Path, program: str) -> None:
    """A start of torchrun leaves a directory in /tmp at each start."""
    before = in_mounts(("/mnt", "size=1m"), ("/dev/shm", "size=1m"))
    listing = 'd="$1"; shift; "$@"; status=$?; ls -A /dev/shm /mnt >"$d"; exit $status'
    before += ["sh", "-c", listing, "sh", str(tmp_path / "listing")]
    environ = {"TMPDIR": "/mnt", "TMP": "/mnt", "TEMP": "/mnt"}
    with running(tmp_path, program, before=before, environ=environ) as job:
        assert job.wait() == 0
        assert (tmp_path / "listing").read_text().split() == ["/dev/shm:", "/mnt:"]
        assert sorted(path.name for path in (tmp_path / "job").iterdir() if path.name != "__pycache__") == [
            "rank.py",
            "saferun-runs",
            "train.py",
        ]


def test_two_launches_in_one_directory_keep_their_files_apart(tmp_path: Path) -> None:
    program = "from rank import *\nprint(os.getpid())"
    with running(tmp_path, program, store=False) as job:
        assert job.wait() == 0
        again = subprocess.run(
            job.process.args, cwd=tmp_path / "job", env=job.environ, capture_output=True, timeout=DEADLINE_S, check=True
        )
        assert again.stdout
        runs = [
            path for path in (tmp_path / "job" / "saferun-runs").iterdir() if not path.is_symlink() and path.is_dir()
        ]
        assert len(runs) == 2
        assert (tmp_path / "job" / "saferun-runs" / ".gitignore").read_text() == "*\n"


def test_nothing_is_skipped_on_the_console_where_no_file_keeps_it(tmp_path: Path) -> None:
    """A slow reader then makes the ranks wait, as under torchrun."""
    program = "for number in range(200000): print(number, 'x' * 90)"
    read_end, write_end = os.pipe()
    with running(tmp_path, program, "--run-dir", "/proc/nope", store=False, stdout=write_end) as job:
        os.close(write_end)
        until(lambda: has_stalled(job), "the reader is waited for")
        with open(read_end, "rb") as pipe:
            assert pipe.read().count(b"x") == 200000 * 90
        assert job.wait() == 0
        assert "skipped" not in job.err


def has_stalled(job: Job) -> bool:
    """Whether the rank waits for room in its pipe."""
    ranks = [pid for pid in job.processes() if command_line(pid).endswith(" -u train.py")]
    return bool(ranks) and all(is_in_write(pid) for pid in ranks)


def test_ranks_that_write_nothing_leave_hardly_a_file(tmp_path: Path) -> None:
    """Quotas count files: the directory, its description, the host's directory, events, and that of the attempt."""
    command = (sys.executable, "-m", "saferun")
    with running(tmp_path, "", "--no-python", nproc=8, script=("true",), launcher=command, store=False) as job:
        assert job.wait() == 0
        assert len([job.run_dir.resolve(), *job.run_dir.resolve().rglob("*")]) <= 6


def test_an_error_file_is_kept_where_its_rank_wrote_nothing_else(tmp_path: Path) -> None:
    """Only empty directories are removed."""
    program = "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('{}')"
    with running(tmp_path, program, nproc=2, store=False) as job:
        assert job.wait() == 0
        assert len(list(job.run_dir.glob("*/attempt_0/rank_*/error.json"))) == 2


def test_of_what_a_rank_writes_no_more_is_kept_than_was_asked_for(tmp_path: Path) -> None:
    """Its beginning and its end, also if the writer process is replaced meanwhile."""
    program = """
from rank import *
for number in range(30000): print(f"{number:09d}", flush=False)
sys.stdout.flush()
tell("ready")
await_release("more")
for number in range(30000, 60000): print(f"{number:09d}")
"""
    with running(tmp_path, program, "--keep-output", "64K", store=False) as job:
        job.hear("ready")
        (file,) = until(lambda: list(job.run_dir.glob("*/attempt_0/rank_0/stdout.log")), "the file is there")
        until(lambda: file.read_bytes().endswith(b"000029999\n"), "the file has all")
        (writer,) = until(lambda: job.called("sr-writer"), "the writer is there")
        os.kill(writer, signal.SIGKILL)
        job.release("more")
        assert job.wait() == 0
        lines = file.read_text().splitlines()
        assert file.stat().st_size <= 70_000
        assert (lines[0], lines[1000], lines[-1]) == (f"{0:09d}", f"{1000:09d}", f"{59999:09d}")
        assert sum("are left out here: --keep-output" in line for line in lines) in {1, 2}


def test_a_directory_that_is_named_again_shows_the_new_run_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    """A job that is requeued: its report was the failure of the run before, and its logs were half of each."""
    program = "from rank import *\nfailed = os.path.exists(f'{FOLDER}/failed')\n"
    program += "open(f'{FOLDER}/failed', 'w').close()\nprint('run', failed)\nif not failed: raise ValueError('first')"
    with running(tmp_path, program, "--run-dir", "out", store=False) as job:
        assert job.wait() == 1
        out = tmp_path / "job" / "out"
        (out / "mine.txt").write_text("mine")
        again = subprocess.run(
            job.process.args, cwd=tmp_path / "job", env=job.environ, capture_output=True, timeout=DEADLINE_S, check=True
        )
        assert json.loads((out / "run.json").read_text())["end"]["outcome"] == "succeeded"
        assert not list(out.glob("report.*"))
        (earlier,) = out.glob("earlier-*")
        assert f"had the files of an earlier run: they are in out/{earlier.name} now" in again.stderr.decode()
        assert "ValueError: first" in (earlier / "report.txt").read_text()
        logs = {path.parts[-5]: path.read_text() for path in out.rglob("stdout.log")}
        assert logs == {"out": "run True\n", earlier.name: "run False\n"}
        assert (out / "mine.txt").read_text() == "mine"
        assert not (out / ".gitignore").exists()


def test_files_of_the_user_s_own_with_names_of_saferun_s_are_kept(tmp_path: Path) -> None:
    """``--run-dir $OUTPUT_DIR``, or ``.``: trainers write a run.json and reports, which the script may read."""
    own = {name: f"my {name}" for name in ("run.json", "report.json", "report.txt", "report.html", "waits.json")}
    out = tmp_path / "out"
    out.mkdir()
    for name, content in {**own, "mine.txt": "mine"}.items():
        (out / name).write_text(content)
    program = "print(open('../out/report.json').read())\nraise ValueError('first')"
    with running(tmp_path, program, "--run-dir", "../out", store=False) as job:
        assert job.wait() == 1
        (kept,) = out.glob("earlier-*")
        assert "my report.json" in job.out
        kept_there = f"they are kept in ../out/{kept.name}, too"
        assert f"../out has files with names that saferun writes to: {kept_there}" in job.err
        assert {path.name: path.read_text() for path in kept.iterdir()} == own
        assert (out / "mine.txt").read_text() == "mine"
        assert json.loads((out / "run.json").read_text())["end"]["outcome"] == "failed"
        assert "ValueError: first" in (out / "report.txt").read_text()


@pytest.mark.parametrize("links", [True, False])
def test_a_file_of_the_user_s_own_that_saferun_has_not_replaced_stays_for_every_run(
    tmp_path: Path, *, links: bool
) -> None:
    """Also where there are no hard links: the script reads it."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "report.json").write_text("mine")
    program = f"print(open('{out}/report.json').read())"
    refuse = (
        "" if links else "import os\ndef link(*_, **__): raise OSError(1, 'Operation not permitted')\nos.link = link"
    )
    launcher = (sys.executable, "-c", f"{refuse}\nfrom saferun.__main__ import main\nmain()")
    for number in range(2):
        with running(tmp_path / str(number), program, "--run-dir", str(out), launcher=launcher, store=False) as job:
            assert job.wait() == 0
            assert "mine" in job.out
    first, second = sorted(out.glob("earlier-*"), key=lambda path: path.stat().st_mtime_ns)
    assert sorted(path.name for path in first.iterdir()) == ["report.json"]
    assert "run.json" in {path.name for path in second.iterdir()}
    assert (out / "report.json").read_text() == "mine"


def test_a_directory_that_another_run_uses_is_left_as_it_is(tmp_path: Path) -> None:
    program = "from rank import *\ntell('ran')\nawait_release('end')"
    with running(tmp_path, program, "--run-dir", "out", store=False) as job:
        job.hear("ran")
        until((tmp_path / "job" / "out" / "run.json").exists, "the first run is described")
        (tmp_path / "job" / "train.py").write_text("")
        again = subprocess.run(
            job.process.args, cwd=tmp_path / "job", env=job.environ, capture_output=True, timeout=DEADLINE_S, check=True
        )
        assert "another run writes to out: they overwrite each other's files" in again.stderr.decode()
        assert not list((tmp_path / "job" / "out").glob("earlier-*"))
        job.release("end")
        assert job.wait() == 0


def test_a_directory_that_is_moved_while_it_is_used_is_not_made_anew(tmp_path: Path) -> None:
    """``mv work final`` at the end of a job: what comes later goes nowhere, and not to where it was."""
    program = "from rank import *\nprint('before')\ntell('ran')\nawait_release('end')\nprint('after')"
    with running(tmp_path, program, store=False) as job:
        job.hear("ran")
        logs = "saferun-runs/2*/*/attempt_0/rank_0/stdout.log"
        until(lambda: [log for log in (tmp_path / "job").glob(logs) if log.read_bytes()], "its output is kept")
        (tmp_path / "job").rename(tmp_path / "moved")
        job.release("end")
        assert job.wait() == 0
        assert not (tmp_path / "job").exists()
        (log,) = (tmp_path / "moved").glob(logs)
        assert log.read_text() == "before\nafter\n"
