"""The rank that the others wait for is named while the job runs; whatever goes wrong with that costs nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.captures.beside_slow import clock_lines, nic_lines
from saferun.watchdog.wait_sampler import WaitSampler, uses_gpu
from tests.breadth import slow_but
from tests.process.in_step import IN_STEP, table_of
from tests.process.launching import Job, customized, in_saferun, running, until

SLOW = " is slow: the other ranks spent "
WINDOW = ("--slow-window", "3")


def reports(job: Job, count: int) -> None:
    """Wait until the ranks have been compared so many times."""
    seen: set[float] = set()

    def compared() -> bool:
        if at := table_of(job).get("time"):
            seen.add(at)
        return len(seen) >= count

    until(compared, f"{count} comparisons")


@pytest.mark.parametrize("ranks", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_a_rank_that_is_30_percent_slower_is_named_once(tmp_path: Path, ranks: int) -> None:
    """On the console, in the events, in the report and in the table."""
    with running(tmp_path, IN_STEP, *WINDOW, nproc=ranks, arguments=["2", "1.3"], store=False) as job:
        job.hear("ready", ranks)
        until(lambda: SLOW in job.err, "it is named")
        until(lambda: table_of(job)["slow"] == [2], "it is in the table")
        table = table_of(job)
        assert [row["rank"] for row in table["ranks"]] == list(range(ranks))
        status = subprocess.run(
            [sys.executable, "-m", "saferun.ctl", "status", str(job.run_dir)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "  slow: the others wait for it" in status.stdout
        job.release("end")
        assert job.wait() == 0
    assert job.err.count(" is slow") == 1
    assert f"saferun: rank 2 ({table['ranks'][2]['host']}){SLOW}" in job.err
    assert "on the same host: " in job.err
    (event,) = (entry for entry in job.events() if entry["event"] == "RanksSlow")
    assert event["ranks"] == [2]
    report = json.loads((job.run_dir / "report.json").read_text())
    (row,) = report["slow_ranks"]
    assert (row["ranks"], row["console_lines"][0] in job.err) == ([2], True)
    assert report["incidents"] == []
    assert f"    rank 2 ({row['host']}){SLOW}" in (job.run_dir / "report.txt").read_text()


@pytest.mark.parametrize("ranks", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_even_ranks_are_not_named(tmp_path: Path, ranks: int) -> None:
    with running(tmp_path, IN_STEP, *WINDOW, nproc=ranks, arguments=["-1", "1"], store=False) as job:
        job.hear("ready", ranks)
        reports(job, 10)
        assert table_of(job)["slow"] == []
        job.release("end")
        assert job.wait() == 0
    assert " slow" not in job.err
    assert not (job.run_dir / "report.json").exists()


@pytest.mark.slow
def test_a_rank_that_computes_longer_is_named(tmp_path: Path) -> None:
    program = IN_STEP.replace(
        "    time.sleep(seconds)", "    end = time.thread_time() + seconds\n    while time.thread_time() < end: pass"
    )
    with running(tmp_path, program, *WINDOW, nproc=2, arguments=["1", "1.5"], store=False) as job:
        until(lambda: re.search(rf"saferun: rank 1 \(\S+\){re.escape(SLOW)}", job.err), "it is named")
        job.release("end")
        assert job.wait() == 0


def test_nothing_is_compared_with_a_window_of_0(tmp_path: Path) -> None:
    """Nor is the table written."""
    options = ("--slow-window", "0", "--hang-timeout", "2")
    with running(tmp_path, IN_STEP, *options, nproc=2, arguments=["1", "3"], store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("RanksStarted"), "the ranks run")
        job.release("end")
        assert job.wait() == 0
    assert " slow" not in job.err
    assert not (job.run_dir / "waits.json").exists()


@pytest.mark.slow
def test_ranks_that_are_stopped_or_hang_are_not_slow(tmp_path: Path) -> None:
    """The hang is reported, and no slow rank with it."""
    options = (
        *WINDOW,
        "--hang-timeout",
        "2",
        "--external-wait-timeout",
        "0",
        "--capture-budget",
        "2",
        "--on-hang",
        "stop",
    )
    program = IN_STEP.replace('tell("ready")', 'tell("ready")\nif RANK == 1: meet(); time.sleep(3600)')
    with running(tmp_path, program, *options, nproc=2, arguments=["1", "1"], store=False) as job:
        assert job.wait() == 1
    assert "the job hangs" in job.err
    assert " slow" not in job.err


def test_a_stopped_rank_is_not_slow(tmp_path: Path) -> None:
    """Whoever has stopped it knows why the others wait."""
    with running(tmp_path, IN_STEP, *WINDOW, nproc=2, arguments=["-1", "1"], store=False) as job:
        pids = {said.rank: said.pid for said in job.hear("ready", 2)}
        for _ in range(20):
            os.kill(pids[1], signal.SIGSTOP)
            until(lambda: Path(f"/proc/{pids[1]}/wchan").read_text() == "do_signal_stop", "it is stopped")
            reports(job, 1)
            os.kill(pids[1], signal.SIGCONT)
        job.release("end")
        assert job.wait() == 0
    assert " slow" not in job.err


# ------------------------------------------------------------------------------------------------------ what may break

BROKEN = {
    "a sample": "import saferun.watchdog.wait_watch as one\n    def broken(self): raise OSError(5, 'no')\n"
    "    one.WaitWatch._sample = broken",
    "a report": "import saferun.watchdog.stragglers as one\n    def broken(self): raise ValueError('no')\n"
    "    one.WaitCounter.report = broken",
    "the comparison": "import saferun.watchdog.stragglers as one\n    def broken(self, now): raise ValueError('no')\n"
    "    one.Stragglers.judge = broken",
    "the lines": "import saferun.report.slow_text as one\n    def broken(*_): raise ValueError('no')\n"
    "    one.slow_lines = broken",
}


@pytest.mark.parametrize("what", slow_but(BROKEN, next(iter(BROKEN))))
def test_what_breaks_costs_the_comparison_and_nothing_else(tmp_path: Path, what: str) -> None:
    """With one line."""
    environ = customized(tmp_path, in_saferun(BROKEN[what]))
    run = tmp_path / "run"
    with running(run, IN_STEP, *WINDOW, nproc=2, arguments=["1", "2"], environ=environ, store=False) as job:
        job.hear("ready", 2)
        until(lambda: "saferun: cannot compare the ranks: " in job.err, "it is said")
        job.release("end")
        assert job.wait() == 0
    assert job.err.count("cannot compare the ranks") == 1
    assert SLOW not in job.err


@pytest.mark.slow
def test_a_slow_rank_is_named_though_nothing_can_be_read_beside_it(tmp_path: Path) -> None:
    broken = (
        "import saferun.launch.slow_ranks as one\n    one._ANSWER_S = 0.5\n"
        "    one.SlowRankWatch._begin_beside = lambda self, pids: None"
    )
    environ = customized(tmp_path, in_saferun(broken))
    run = tmp_path / "run"
    with running(run, IN_STEP, *WINDOW, nproc=2, arguments=["1", "1.5"], environ=environ, store=False) as job:
        until(lambda: SLOW in job.err, "it is named")
        job.release("end")
        assert job.wait() == 0


# ------------------------------------------------------------------------------------------------------------- samples

WAITS = {
    "a lock": ("import threading; lock = threading.Lock(); lock.acquire(); go(); lock.acquire()", True),
    "another thread": (
        "import threading, time; t = threading.Thread(target=time.sleep, args=(60,)); t.start(); go(); t.join()",
        True,
    ),
    "a timer": ("import time; go(); time.sleep(60)", False),
    "a pipe": ("import os; r, w = os.pipe(); go(); os.read(r, 1)", False),
    "a poll": ("import select; go(); select.poll().poll(60000)", False),
    "a child": ("import subprocess; c = subprocess.Popen(['sleep', '60']); go(); c.wait()", False),
    "nothing": ("go()\nwhile True: pass", False),
}


@pytest.mark.parametrize("what", WAITS)
def test_only_a_futex_is_a_wait_for_others(what: str) -> None:
    source, expected = WAITS[what]
    program = f"import os\ndef go(): os.write(1, b'1')\n{source}"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    sampler = WaitSampler()
    try:
        assert process.stdout is not None
        process.stdout.read(1)
        if expected or what != "nothing":
            until(lambda: Path(f"/proc/{process.pid}/wchan").read_text() not in {"0", ""}, "it sleeps")
        assert sampler.waits(process.pid) is expected
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: sampler.waits(process.pid) is None, "it is stopped")
        assert not uses_gpu(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert sampler.waits(process.pid) is None
    sampler.close()


def test_a_process_with_a_gpus_device_open_uses_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control nodes do not count: they are open where a GPU was only looked for."""
    targets = {"0": "/dev/null", "1": "/dev/nvidiactl", "2": "socket:[7]"}
    monkeypatch.setattr(os, "listdir", lambda _path: list(targets))
    monkeypatch.setattr(os, "readlink", lambda path: targets[path.rpartition("/")[2]])
    assert not uses_gpu(1)
    targets["3"] = "/dev/nvidia3"
    assert uses_gpu(1)


def test_errors_of_interfaces_are_shown_and_nothing_else(tmp_path: Path) -> None:
    for name, errors in {"eth0": "7", "eth1": "0", "lo": "3"}.items():
        folder = tmp_path / "sys/class/net" / name / "statistics"
        folder.mkdir(parents=True)
        (folder / "rx_errors").write_text(errors)
    assert list(nic_lines(str(tmp_path))) == ["eth0: 7 rx_errors since it came up"]


def test_the_clock_of_the_ranks_own_gpu_is_shown() -> None:
    gpus = [
        {"index": 0, "clock_mhz": 990, "clock_max_mhz": 1980, "temperature_c": 91, "processes": [{"pid": 5}]},
        {"index": 1, "clock_mhz": 1980, "processes": [{"pid": 6}]},
        {"index": 2, "processes": [{"pid": 5}]},
    ]
    assert list(clock_lines({"gpus": gpus}, frozenset({5}))) == ["GPU 0: clock 990 of 1980 MHz, 91 °C"]


@pytest.mark.slow
def test_a_rank_in_an_announced_phase_is_not_named(tmp_path: Path) -> None:
    """Its script has said that it takes long (``saferun.expect``); after the phase it is compared again."""
    phase = (
        "import saferun\nfrom rank import *\nphase = saferun.expect(600, 'evaluating')\n"
        "if RANK == 2:\n    phase.__enter__()\n"
    )
    with running(tmp_path, phase + IN_STEP, *WINDOW, nproc=4, arguments=["2", "1.3"], store=False) as job:
        job.hear("ready", 4)
        reports(job, 12)
        assert table_of(job)["slow"] == []
        job.release("end")
        assert job.wait() == 0
    assert SLOW not in job.err
