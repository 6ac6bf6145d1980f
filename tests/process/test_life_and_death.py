"""Ranks, what they start, and saferun itself begin and end in every way there is; nothing ever lives on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun.linux.children import SpawnError, spawn
from tests.breadth import slow_but
from tests.process.launching import (
    DEADLINE_S,
    END_AS_TOLD,
    REPOSITORY,
    SAFERUN,
    STAY,
    kill,
    read_stat,
    running,
    state_of,
    until,
)

if TYPE_CHECKING:
    pass

# ----------------------------------------------------------------------------------------------------- ranks that end


def test_ranks_that_end_well_end_saferun_with_0(tmp_path: Path) -> None:
    with running(tmp_path, "print('done')", nproc=2) as job:
        assert job.wait() == 0
        assert job.err == ""
        assert job.out.count("done\n") == 2


@pytest.mark.slow
def test_thirty_two_ranks_start_and_end(tmp_path: Path) -> None:
    """A host with many GPUs, or a CPU job: each rank costs descriptors and a place in every loop."""
    with running(tmp_path, "import os; print('rank', os.environ['RANK'])", nproc=32) as job:
        assert job.wait() == 0
        assert sorted(line.split("rank ")[1] for line in job.out.splitlines()) == sorted(map(str, range(32)))


@pytest.mark.slow
def test_a_failed_rank_has_the_others_asked_to_end(tmp_path: Path) -> None:
    program = """
from rank import *
tell_signals(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: (tell("SIGTERM"), sys.exit(0)))
tell("ready")
if RANK == 1:
    await_release("end")
    sys.exit(3)
stay()
"""
    with running(tmp_path, program, nproc=3, store=False) as job:
        job.hear("ready", 3)
        job.release("end")
        assert job.wait() == 1
        assert sorted(said.rank for said in job.said("SIGTERM")) == [0, 2]
        first = job.err.splitlines()[0]
        assert "rank 1 " in first
        assert "failed first" in first
        assert "exit code 3" in first
        assert "stopped because of it: ranks 0, 2" in job.err


def test_stubborn_ranks_are_killed_when_their_grace_is_over(tmp_path: Path) -> None:
    """With torchrun the option is ignored when a rank fails, and waits half a minute."""
    arguments = ["1", "stubborn", "stubborn"]
    options = ("--shutdown-timeout", "1")
    with running(tmp_path, END_AS_TOLD, *options, nproc=3, arguments=arguments, store=False) as job:
        job.hear("ready", 3)
        job.release("end")
        assert job.wait() == 1


@pytest.mark.slow
def test_without_any_grace_the_ranks_are_killed_at_once(tmp_path: Path) -> None:
    arguments = ["1", "stubborn"]
    options = ("--shutdown-timeout", "0")
    with running(tmp_path, END_AS_TOLD, *options, nproc=2, arguments=arguments, store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "stopped because of it: rank 1" in job.err


@pytest.mark.parametrize(
    ("how", "words"),
    slow_but([("SIGSEGV", "killed by SIGSEGV"), ("SIGKILL", "(SIGKILL)"), ("7", "exit code 7")], "SIGSEGV"),
)
def test_the_end_says_who_failed_first_how_and_who_was_stopped(tmp_path: Path, how: str, words: str) -> None:
    with running(tmp_path, END_AS_TOLD, nproc=3, arguments=["stay", how, "stay"]) as job:
        pid = next(said.pid for said in job.hear("ready", 3) if said.rank == 1)
        job.release("end")
        assert job.wait() == 1
        # What the rank itself says of its end (faulthandler does of a SIGSEGV) comes before.
        lines = job.err[job.err.index("saferun: ") :].splitlines()
        assert lines[0].startswith("saferun: rank 1 (")
        assert f"pid {pid}" in lines[0]
        assert "failed first" in lines[0]
        assert words in lines[0]
        assert "  stopped because of it: ranks 0, 2" in lines
        assert len(lines) <= 25


@pytest.mark.slow
def test_a_stopped_rank_does_not_outlive_another_ranks_failure(tmp_path: Path) -> None:
    """SIGTERM waits for SIGCONT, SIGKILL does not."""
    options = ("--shutdown-timeout", "1")
    with running(tmp_path, END_AS_TOLD, *options, nproc=2, arguments=["stay", "1"], store=False) as job:
        pid = next(said.pid for said in job.hear("ready", 2) if said.rank == 0)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "the rank is stopped")
        job.release("end")
        assert job.wait() == 1
        assert "stopped because of it: rank 0" in job.err


def test_restarts_count_and_end(tmp_path: Path) -> None:
    program = """
from rank import *
tell(f"of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
if RANK == 0:
    open(f"{FOLDER}/release.told{ATTEMPT}", "w")
await_release(f"told{ATTEMPT}")
sys.exit(ATTEMPT < 2 and RANK == 1)
"""
    with running(tmp_path, program, "--max-restarts", "3", nproc=2) as job:
        assert job.wait() == 0
        assert {(said.rank, said.attempt) for said in job.said("of 3")} == {(r, a) for r in range(2) for a in range(3)}
        assert "starting again at once (restart 2 of 3)" in job.err
        assert "restart 3 of 3" not in job.err
        assert any(job.run_dir.glob("*/attempt_2"))


@pytest.mark.slow
def test_when_every_attempt_fails_the_last_one_is_reported(tmp_path: Path) -> None:
    program = "from rank import *\ntell('began')\nprint('attempt', ATTEMPT, file=sys.stderr)\nsys.exit(4 + ATTEMPT)"
    with running(tmp_path, program, "--max-restarts", "2", store=False) as job:
        assert job.wait() == 1
        assert [said.attempt for said in job.said("began")] == [0, 1, 2]
        report = job.err[job.err.rindex("saferun: rank 0 ") :]
        assert "exit code 6" in report
        assert "attempt 2" in report


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--run-dir", "none", "--prefix", "none"), marks=pytest.mark.slow)]
)
def test_a_restart_works_after_a_rank_that_ended_before_the_coordinator_began(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    """The number of an ended rank's descriptor is soon another's: the line to the coordinator has to survive that."""
    program = """
from rank import *
if ATTEMPT == 0 and RANK > 0:
    await_release("end")
    sys.exit(1)
"""
    with running(tmp_path, program, "--max-restarts", "1", *options, nproc=3) as job:
        until(lambda: is_serving(job.coordinator()), "the store is served")
        job.release("end")
        assert job.wait() == 0


def is_serving(coordinator: int | None) -> bool:
    """Whether a coordinator serves the store: torch does so in threads of its own, while the main thread waits."""
    if coordinator is None:
        return False
    stat = read_stat(coordinator)
    return stat is not None and stat.state == "S" and len(os.listdir(f"/proc/{coordinator}/task")) > 1


@pytest.mark.parametrize("where", slow_but(["family", "session"], "family"))
def test_leftovers_of_one_attempt_are_gone_before_the_next(tmp_path: Path, where: str) -> None:
    """A data loader of the attempt before would hold GPU memory, ports and files."""
    program = """
from rank import *
if ATTEMPT == 0:
    if os.fork() == 0:
        if "session" in sys.argv:
            os.setsid()
        ignore(signal.SIGTERM)
        tell("leftover")
        stay()
    await_release("end")
    sys.exit(1)
pid = int(open(FOLDER + "/leftover").read())
tell("alone" if not os.path.exists(f"/proc/{pid}") else "not alone")
"""
    options = ("--max-restarts", "1", *(("--leftovers", "end") if where == "session" else ()))
    with running(tmp_path, program, *options, nproc=1, arguments=[where], store=False) as job:
        (leftover,) = job.hear("leftover")
        (tmp_path / "leftover").write_text(str(leftover.pid))
        job.release("end")
        assert job.wait() == 0
        assert len(job.said("alone")) == 1


@pytest.mark.parametrize("limit", slow_but([46, 51], "46"))
def test_too_few_descriptors_for_the_streams_of_all_ranks_start_them_all_the_same(tmp_path: Path, limit: int) -> None:
    """As under torchrun, which opens no streams: some write to the console themselves, and it is said."""
    before = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"]
    # The preflight checks would say it sooner.
    with running(tmp_path, STAY, "--preflight", "off", nproc=32, before=before) as job:
        job.hear("ready", 32)
        until(lambda: "the limit on open files leaves no room" in job.err, "it is said")
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "Traceback" not in job.err


@pytest.mark.parametrize("limit", slow_but([30, 34], "30"))
def test_too_few_descriptors_for_all_of_saferun_cost_no_restart(tmp_path: Path, limit: int) -> None:
    """The process of a rank begins with those of the supervisor, and may have none to spare."""
    fails = "RANK == 1 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    program = f"from rank import *\nawait_release('end')\nsys.exit(3 if {fails} else 0)\n"
    before = ["sh", "-c", f'ulimit -n {limit}; exec "$@"', "sh"]
    options = ("--run-dir", "none", "--max-restarts", "1")
    with running(tmp_path, program, *options, nproc=2, before=before, store=False) as job:
        time.sleep(2)  # everything that saferun has open is open by then
        job.release("end")
        assert job.wait() == 0
        assert not re.search(r"rank \d cannot be started", job.err)
        # What is held for the restart leaves room for reading the code of the verdict.
        assert "ended with exit code 3 and no message" in job.err
        assert "not in memory" not in job.err


# ------------------------------------------------------------------------------------------------ signals to saferun


COUNT = """
from rank import *
tell_signals(*(getattr(signal, name) for name in sys.argv[1].split(",")))
tell("ready")
await_release("end")
"""


@pytest.mark.parametrize("name", slow_but(["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"], "SIGTERM"))
def test_a_signal_reaches_each_rank_exactly_once(tmp_path: Path, name: str) -> None:
    """A rank that counts its signals (two Ctrl-C are a hard stop in many scripts) may not see one for two."""
    everything = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    with running(tmp_path, COUNT, nproc=3, arguments=[everything]) as job:
        job.hear("ready", 3)
        job.send(getattr(signal, name))
        assert {said.rank for said in job.hear(name, 3)} == {0, 1, 2}
        job.release("end")
        assert job.wait() == 1
        assert [said for other in everything.split(",") for said in job.said(other)] == []
        assert f"saferun: {name}: stopping 3 ranks" in job.err
        assert f"stopped by {name}" in job.err


@pytest.mark.slow
def test_a_signal_to_be_handled_by_option_is_passed_on_once(tmp_path: Path) -> None:
    options = ("--signals-to-handle", "SIGUSR1")
    with running(tmp_path, COUNT, *options, nproc=2, arguments=["SIGUSR1,SIGTERM"], store=False) as job:
        job.hear("ready", 2)
        job.send(signal.SIGUSR1)
        job.hear("SIGUSR1", 2)
        job.release("end")
        assert job.wait() == 1
        assert not job.said("SIGUSR1")
        assert not job.said("SIGTERM")


@pytest.mark.parametrize("first", slow_but([signal.SIGINT, signal.SIGTERM], "SIGINT"))
def test_a_second_ctrl_c_kills_at_once(tmp_path: Path, first: signal.Signals) -> None:
    program = "from rank import *\nignore(signal.SIGINT, signal.SIGTERM)\ntell('ready')\nstay()"
    with running(tmp_path, program, "--shutdown-timeout", "600", nproc=2, store=False) as job:
        job.hear("ready", 2)
        job.send(first)
        until(lambda: f"{first.name}: stopping" in job.err, "the first signal is taken in")
        time.sleep(0.6)  # two at the same moment are one
        job.send(signal.SIGINT)
        assert job.wait() == 1
        assert "SIGINT: killing 2 ranks" in job.err


@pytest.mark.slow
def test_ctrl_c_while_ranks_are_being_stopped_does_not_hide_why(tmp_path: Path) -> None:
    """Whoever is tired of waiting for the stubborn ranks of a failed job still wants to know what failed."""
    options = ["--shutdown-timeout", "600"]
    with running(tmp_path, END_AS_TOLD, *options, nproc=2, arguments=["3", "stubborn"], store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        until(lambda: job.has_happened("EvidenceCaptured"), "the ranks are being stopped")
        job.send(signal.SIGINT)
        assert job.wait() == 1
        assert "rank 0 (" in job.err
        assert "failed first" in job.err
        assert "exit code 3" in job.err


@pytest.mark.parametrize(
    "inherited",
    slow_but(
        ["signal.signal(17, signal.SIG_IGN)", "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})"],
        "signal.signal(17, signal.SIG_IGN)",
    ),
)
def test_ends_are_seen_although_sigchld_was_ignored_or_blocked(tmp_path: Path, inherited: str) -> None:
    """Some daemons and cron wrappers start their children so."""
    before = [sys.executable, "-c", f"import os, signal, sys; {inherited}; os.execv(sys.argv[1], sys.argv[1:])"]
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["stay", "3"], before=before) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "exit code 3" in job.err


def test_torch_is_asked_although_sigchld_was_ignored(tmp_path: Path) -> None:
    """Its answer would be taken for silence where the kernel keeps to itself how a process has ended."""
    package = tmp_path / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "run.py").write_text("def determine_local_world_size(kind):\n    return len(kind)\n")
    ignoring = "import os, signal, sys; signal.signal(17, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", ignoring, *SAFERUN, "--nproc-per-node", "odd", "--dry-run", "--no-python", "true"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rank 2" in done.stdout
    assert "rank 3" not in done.stdout


def test_why_a_program_cannot_be_started_is_known_although_sigchld_is_ignored() -> None:
    """The kernel has reaped the process that was to become it."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(SpawnError, match="No such file"):
            spawn(["/no/such/program"], {})
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_under_nohup_sighup_ends_nothing(tmp_path: Path) -> None:
    """The job started before going home runs on when the terminal closes; so do its ranks."""
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["0", "0"], before=["nohup"]) as job:
        ranks = job.hear("ready", 2)
        for pid in (job.process.pid, *(said.pid for said in ranks)):
            os.kill(pid, signal.SIGHUP)
        job.release("end")
        assert job.wait() == 0


@pytest.mark.parametrize("ignored", ["", "HUP", "USR1"])
def test_ranks_begin_with_the_signal_dispositions_that_saferun_was_given(tmp_path: Path, ignored: str) -> None:
    """A rank that ignores SIGPIPE, as Python does, or begins with SIGTERM blocked is a mystery to its user."""
    trap = f"trap '' {ignored}; " if ignored else ""
    before = ["sh", "-c", f'{trap}exec "$@"', "sh"]
    source = "grep -E 'Sig(Ign|Blk):' /proc/self/status"
    # What surrounds the tests may ignore signals of its own.
    alone = subprocess.run([*before, "sh", "-c", source], capture_output=True, text=True, check=True).stdout
    launcher = [*SAFERUN, "--no-python", "--prefix", "none"]
    with running(tmp_path, "", launcher=launcher, before=before, script=("sh", "-c", source)) as job:
        assert job.wait() == 0
        assert job.out == alone
        wanted = 1 << getattr(signal, "SIG" + ignored) - 1 if ignored else 0
        assert int(alone.split()[-1], 16) & wanted == wanted


@pytest.mark.parametrize("attempt", [0, 1])
def test_ranks_ignore_sigchld_where_saferun_was_to_ignore_it(tmp_path: Path, attempt: int) -> None:
    """As under torchrun, whose ranks inherit it. The first attempt has ranks that were forked early."""
    ignoring = "import os, signal, sys; signal.signal(17, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    program = f"""
import os, signal, sys
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < {attempt}:
    sys.exit(3)
print("ignored:", signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN)
"""
    with running(tmp_path, program, "--max-restarts", "1", before=[sys.executable, "-c", ignoring]) as job:
        assert job.wait() == 0
        assert "ignored: True" in job.out


@pytest.mark.parametrize("ignored", slow_but(["INT", "QUIT", "TERM"], "INT"))
@pytest.mark.parametrize("attempt", [0, 1])
def test_a_signal_that_stops_a_job_is_not_ignored_by_its_ranks(tmp_path: Path, ignored: str, attempt: int) -> None:
    """As torchrun has it.

    A shell starts what it puts into the background with SIGINT ignored, and a rank may save its state on
    KeyboardInterrupt.
    """
    before = ["sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh"]
    source = f"[ $TORCHELASTIC_RESTART_COUNT -ge {attempt} ] || exit 3; grep SigIgn: /proc/self/status"
    launcher = [*SAFERUN, "--no-python", "--prefix", "none", "--max-restarts", "1"]
    with running(tmp_path, "", launcher=launcher, before=before, script=("sh", "-c", source)) as job:
        assert job.wait() == 0
        ignores = int(job.out.split()[-1], 16)
        assert not ignores & 1 << getattr(signal, "SIG" + ignored) - 1


# ------------------------------------------------------------------------------------------------------ the coordinator


@pytest.mark.slow
def test_ranks_that_need_no_store_outlive_the_coordinator(tmp_path: Path) -> None:
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["0", "0"]) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("StoreServed"), "the store is served")
        coordinator = job.coordinator()
        assert coordinator is not None
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: read_stat(coordinator) is None, "the coordinator is gone")
        job.release("end")
        assert job.wait() == 0


@pytest.mark.slow
def test_a_coordinator_killed_before_it_serves_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, END_AS_TOLD, nproc=1, arguments=["0"]) as job:
        job.hear("ready")
        coordinator = until(job.coordinator, "the coordinator begins")
        assert coordinator is not None
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: job.has_happened("StoreServed"), "the store is served by another")
        job.release("end")
        assert job.wait() == 0


def test_a_rank_that_asks_for_a_lost_store_ends_the_job_with_the_reason(tmp_path: Path) -> None:
    """It would wait for five minutes, and then blame the network."""
    program = """
import socket
from rank import *
tell("ready")
await_release("ask")
asked = socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
asked.sendall(bytes(1) + (0x3C85F7CE).to_bytes(4, sys.byteorder))  # as torch's client of the store does
stay()
"""
    with running(tmp_path, program, "--start-retries", "0", nproc=2) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("StoreServed"), "the store is served")
        coordinator = job.coordinator()
        assert coordinator is not None
        os.kill(coordinator, signal.SIGKILL)
        until(lambda: read_stat(coordinator) is None, "the coordinator is gone")
        job.release("ask")
        assert job.wait() == 1
        assert "the store's process ended (killed by SIGKILL)" in job.err


def test_a_stopped_rank_is_let_go_on_to_take_the_signal_that_ends_it(tmp_path: Path) -> None:
    """It would sit out the whole grace otherwise, and be killed without having cleaned up."""
    program = "from rank import *\ntell_signals(signal.SIGTERM)\ntell('ready')\nawait_release('end')\n"
    with running(tmp_path, program, "--shutdown-timeout", "60", nproc=1, store=False) as job:
        (ready,) = job.hear("ready")
        kill(ready.pid, signal.SIGSTOP)
        until(lambda: state_of(ready.pid) == "T", "the rank is stopped")
        job.send(signal.SIGTERM)
        job.hear("SIGTERM")
        job.release("end")
        assert job.wait() == 1
