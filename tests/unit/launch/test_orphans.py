"""Orphaned processes: those that wait for a disk, so that whose they are cannot be read now, and those that live on."""

from __future__ import annotations

import os

import pytest

from saferun.launch import orphans, process_names, rank_processes
from saferun.launch.orphans import Orphans
from saferun.linux import activity, connections
from saferun.linux.procfs import Stat
from saferun.watchdog import wait_sampler

PID = 1 << 22  # one above the largest that Linux gives


class Processes:
    """One process that a rank has left, in a session of its own, and what is said of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.belongs: bool | None = None
        self.gone: list[tuple[int, ...]] = []
        self.said: list[str] = []
        monkeypatch.setattr(rank_processes, "descendants_of", lambda _pid, _leave_out: [PID])
        monkeypatch.setattr(rank_processes, "belongs_to_run", lambda _pid, _run_id: self.belongs)
        self.orphans = Orphans(
            "run",
            not_ours=frozenset(),
            exempt=set,
            on_gone=self.gone.append,
            report=self.said.append,
            report_wait=self.said.append,
            warn=self.said.append,
        )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_no_secret_is_in_the_name_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands on the console, and in the files of the run."""
    monkeypatch.setattr(process_names, "read_cmdline", lambda _pid: ["up", "--token=hidden"])
    assert process_names.process_name(1) == "up --token=<redacted>"


def test_one_that_waits_for_a_disk_is_at_work(processes: Processes) -> None:
    """An upload of what the rank has written is in state D most of the time: it is waited for like any other."""
    processes.orphans.begin(0.0, 0.1, wait_s=600.0, idle_s=30.0)
    for now in (1.0, 60.0, 599.0):
        processes.orphans.sweep(now)
    assert processes.gone == []
    processes.orphans.sweep(601.0)
    processes.orphans.sweep(604.0)
    assert processes.gone == [()]
    assert processes.said == ["may be left behind in uninterruptible sleep (state D): 1 process: " + named()]


def test_one_whose_state_never_changes_is_left_after_a_failure(processes: Processes) -> None:
    """The next attempt does not wait for it."""
    processes.orphans.begin(0.0, 0.1)
    processes.orphans.sweep(1.0)
    assert processes.gone == []
    processes.orphans.sweep(3.0)
    assert processes.gone == [()]


def test_one_that_has_been_known_stays_so(processes: Processes) -> None:
    """What it is called and whose it is was read once, while it did not wait."""
    processes.belongs = True
    processes.orphans.begin(0.0, 0.1, ends_all=True)
    processes.belongs = None
    for now in (1.0, 3.0, 30.0):
        processes.orphans.sweep(now)
    assert processes.gone == []


def named() -> str:
    """How a process without anything is called."""
    return f"a process without a command line (pid {PID})"


# What a rank gets of a launch with two ranks.
GIVEN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


class Detached(Processes):
    """Processes with the environment of a rank; ``killed`` are those that have got a signal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.belongs = True
        self.pids = [PID]
        self.environs: dict[int, dict[str, str]] = {}  # where it is another one
        self.parents: dict[int, int] = {}
        self.zombies: set[int] = set()
        self.names: dict[int, str] = {}
        self.tables: list[int] = []  # the tables that were given, by identity
        self.gpu_users: set[int] = set()
        self.listeners: set[int] = set()
        self.killed: list[int] = []
        self.session_of: dict[int, int] = {}
        monkeypatch.setattr(rank_processes, "descendants_of", lambda _pid, _leave_out: list(self.pids))
        monkeypatch.setattr(rank_processes, "read_environ_entries", lambda pid, _names: self.variables(pid))
        for module in (orphans, rank_processes):
            monkeypatch.setattr(module, "read_environ_entry", lambda pid, name: self.variables(pid).get(name, ""))
            monkeypatch.setattr(module, "is_reaper", lambda pid: self.names.get(pid) == "reaper")
            monkeypatch.setattr(module, "read_stat", self.stat)
        monkeypatch.setattr(wait_sampler, "uses_gpu", self.gpu_users.__contains__)
        monkeypatch.setattr(connections, "listens_on", self.listens_on)
        monkeypatch.setattr(os, "kill", self.kill)
        monkeypatch.setattr(os, "getsid", lambda pid: self.session_of.get(pid, pid))
        monkeypatch.setattr(rank_processes, "living_processes", lambda: list(self.pids))
        self.orphans.note_rank(PID + 100, 3, {**GIVEN, "PATH": "/bin"})

    def variables(self, pid: int) -> dict[str, str]:
        return dict(self.environs.get(pid, {"SAFERUN_RUN_ID": "run", **GIVEN}))

    def stat(self, pid: int | str) -> Stat | None:
        state = "Z" if pid in self.zombies else "S"
        return Stat(state, self.parents.get(int(pid), 1), 0.0, 1, 0) if pid in self.pids else None

    def listens_on(self, pid: int, port: str, tables: object) -> bool:
        self.tables.append(id(tables))
        return pid in self.listeners and port == "29500"

    def kill(self, pid: int, _signum: int) -> None:
        self.killed.append(pid)

    def sweep_s(self, seconds: float, *, begin: float = 0.0) -> None:
        """Sweep after a failure for so long."""
        for tick in range(int(seconds / 0.1) + 1):
            if not self.gone:
                self.orphans.sweep(begin + tick * 0.1)


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> Detached:
    return Detached(monkeypatch)


def test_after_a_failure_one_in_a_session_of_its_own_is_left(detached: Detached) -> None:
    """An upload of a checkpoint, from which the next attempt resumes; torchrun leaves it alone."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert (detached.gone, detached.killed) == ([()], [])
    assert detached.said == [f"rank 3 left 1 process in a session of its own: {named()}; it is not ended"]
    assert detached.orphans.is_left


def test_a_helper_that_ends_by_itself_is_not_reported(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.orphans.sweep(0.1)
    assert detached.gone == []
    detached.pids.clear()
    detached.orphans.sweep(0.2)
    assert (detached.gone, detached.said) == ([()], [])
    assert not detached.orphans.is_left


@pytest.mark.parametrize("why", ["gpu", "port", "option", "a rank's session"])
def test_what_is_in_the_way_of_the_next_attempt_is_ended(detached: Detached, why: str) -> None:
    if why == "gpu":
        detached.gpu_users.add(PID)
    elif why == "port":
        detached.listeners.add(PID)
    elif why == "a rank's session":
        detached.session_of[PID] = PID + 1
        detached.orphans.note_rank(PID + 1, 3, GIVEN)
    detached.orphans.begin(0.0, 2.0, ends_all=why == "option")
    detached.sweep_s(3.0)
    assert PID in detached.killed
    assert detached.said == [f"ending 1 process of rank 3: {named()}"]


def test_one_that_is_being_ended_is_not_left(detached: Detached) -> None:
    """It was idle after ranks that ended well, and a signal has come since."""
    detached.orphans.begin(0.0, 2.0, wait_s=600.0, idle_s=0.0)
    assert detached.killed == [PID]
    detached.orphans.begin(1.0, 2.0)
    detached.sweep_s(3.0, begin=1.0)
    assert len(detached.killed) > 1
    assert not any("session" in line for line in detached.said)


def test_one_that_waits_for_a_disk_for_a_moment_is_left_all_the_same(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.belongs = None
    detached.environs[PID] = {}
    detached.orphans.sweep(0.1)
    detached.belongs = True
    detached.environs.clear()
    detached.sweep_s(1.0, begin=0.2)
    assert (detached.gone, detached.killed) == ([()], [])


def test_what_an_attempt_has_left_is_none_of_the_next_one_s(detached: Detached) -> None:
    """Nor are its descendants; at the end of the launch it lives on."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.orphans.begin_attempt()
    assert detached.orphans.remaining() == []
    detached.session_of[PID + 1] = PID
    detached.pids.append(PID + 1)
    assert detached.orphans.remaining() == []
    detached.orphans.close()
    assert detached.killed == []


def test_a_rank_may_get_the_number_of_a_session_that_was_left(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.pids.clear()
    detached.orphans.begin_attempt()
    assert not detached.orphans.is_left
    detached.pids.append(PID)
    detached.orphans.note_rank(PID, 3, GIVEN)
    assert detached.orphans.remaining() == [PID]


def test_what_one_that_was_left_detaches_later_lives_on(detached: Detached) -> None:
    """A shell that begins an upload and ends: the launch goes on for seconds after the sweep."""
    upload = PID + 1
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.pids = [upload]
    detached.orphans.close()
    assert detached.killed == []
    # Nor does the reaper end it.
    assert detached.orphans.is_left


@pytest.mark.parametrize("why", ["option", "a rank's session", "nothing was left", "a new attempt", "a sweep"])
def test_at_the_end_of_the_launch_others_are_ended(
    detached: Detached, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    late = PID + 1
    monkeypatch.setattr(orphans, "_LAST_SWEEP_S", 0.1)
    if why == "nothing was left":
        detached.pids.clear()
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert detached.killed == []
    if why == "a rank's session":
        detached.session_of[late] = PID + 100
    elif why == "a new attempt":
        detached.orphans.begin_attempt()
        detached.orphans.note_rank(PID + 200, 3, GIVEN)
    elif why == "option":
        detached.orphans.begin(1.0, 2.0, ends_all=True)
    elif why == "a sweep":
        detached.session_of[late] = PID + 100
        detached.pids.append(late)
        detached.orphans.begin(1.0, 2.0)
        detached.session_of[late] = late
    detached.pids = [late]
    detached.orphans.close()
    assert set(detached.killed) == {late}


AGAIN = {**GIVEN, "WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29511"}


def test_what_one_that_was_left_detaches_in_the_next_attempt_is_none_of_that_one_s(detached: Detached) -> None:
    """Neither waited for, nor ended: it is known by what its rank was given."""
    first = {**GIVEN, "SAFERUN_HEARTBEAT_FILE": "/dev/shm/a0r3.heartbeat"}
    second = {**AGAIN, "SAFERUN_HEARTBEAT_FILE": "/dev/shm/a1r1.heartbeat"}
    detached.orphans.note_rank(PID + 100, 3, first)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.pids.clear()
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 1, second)
    upload, own = PID + 1, PID + 2
    detached.pids = [upload, own]
    detached.environs = {upload: {"SAFERUN_RUN_ID": "run", **first}, own: {"SAFERUN_RUN_ID": "run", **second}}
    assert detached.orphans.remaining() == [own]
    assert detached.orphans.is_left
    # It may wait for a disk from now on.
    detached.environs[upload] = {}
    assert detached.orphans.remaining() == [own]


def test_one_that_has_entered_a_session_of_this_attempt_is_this_attempt_s(detached: Detached) -> None:
    first = {**GIVEN, "SAFERUN_HEARTBEAT_FILE": "/dev/shm/a0r3.heartbeat"}
    detached.orphans.note_rank(PID + 100, 3, first)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 1, {**AGAIN, "SAFERUN_HEARTBEAT_FILE": "/dev/shm/a1r1.heartbeat"})
    detached.pids = [PID + 1]
    detached.environs = {PID + 1: {"SAFERUN_RUN_ID": "run", **first}}
    detached.session_of[PID + 1] = PID + 200
    assert detached.orphans.remaining() == [PID + 1]


def test_one_without_the_mark_of_an_attempt_is_no_earlier_one_s(detached: Detached) -> None:
    """The first attempt had no directory for it."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 1, {**AGAIN, "SAFERUN_HEARTBEAT_FILE": "/dev/shm/a1r1.heartbeat"})
    detached.pids = [PID + 1]
    assert detached.orphans.remaining() == [PID + 1]


def test_if_every_attempt_gives_the_same_nothing_is_taken_for_an_earlier_one_s(detached: Detached) -> None:
    """The user has set the variable, for instance."""
    given = {**GIVEN, "SAFERUN_HEARTBEAT_FILE": "/tmp/same"}
    detached.orphans.note_rank(PID + 100, 3, given)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 3, given)
    detached.pids = [PID + 1]
    detached.environs = {PID + 1: {"SAFERUN_RUN_ID": "run", **given}}
    assert detached.orphans.remaining() == [PID + 1]


def test_with_another_number_of_ranks_an_earlier_attempt_s_process_is_no_other_launcher_s_rank(
    detached: Detached,
) -> None:
    """In an elastic job; nothing but what its rank was given says whose it is."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.pids.clear()
    detached.gone.clear()
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 1, AGAIN)
    detached.pids = [PID + 1]
    detached.orphans.begin(10.0, 2.0)
    detached.sweep_s(1.0, begin=10.0)
    assert (detached.gone, detached.killed) == ([()], [])


def test_in_a_later_attempt_the_ranks_of_another_launcher_are_ended_as_well(detached: Detached) -> None:
    detached.pids.clear()
    detached.orphans.begin_attempt()
    detached.orphans.note_rank(PID + 200, 1, AGAIN)
    detached.pids = [PID + 1]
    detached.environs = {PID + 1: INNER}
    detached.orphans.begin(10.0, 2.0)
    detached.sweep_s(1.0, begin=10.0)
    assert set(detached.killed) == {PID + 1}


# What `torchrun --standalone --nproc-per-node 2` gives its ranks within that rank; some differ for every launcher.
INNER = {
    "SAFERUN_RUN_ID": "run",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "41873",
    "TORCHELASTIC_RUN_ID": "3a8e2f0c",
}


@pytest.mark.parametrize(
    "environ",
    [
        INNER,
        {**INNER, **GIVEN, "MASTER_PORT": "41873"},
        {**INNER, **GIVEN, "LOCAL_RANK": "0"},
        {**INNER, **GIVEN, "TORCHELASTIC_RUN_ID": "3a8e2f0c"},
    ],
    ids=["torchrun", "port", "local rank", "run"],
)
def test_the_ranks_of_another_launcher_are_ended_with_their_descendants(
    detached: Detached, environ: dict[str, str]
) -> None:
    """An inner torchrun was killed: its ranks, in sessions of their own, would train beside the next attempt."""
    detached.pids = [PID, PID + 1, PID + 2]
    detached.environs = {PID: environ, PID + 1: {"SAFERUN_RUN_ID": "run"}, PID + 2: {"SAFERUN_RUN_ID": "run"}}
    detached.session_of[PID + 1] = PID
    detached.parents[PID + 2] = PID + 1
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert set(detached.killed) == {PID, PID + 1, PID + 2}
    assert not any("session" in line for line in detached.said)


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "RANK"])
def test_an_upload_from_whose_environment_some_was_removed_is_left(detached: Detached, missing: str) -> None:
    detached.environs[PID] = {name: value for name, value in detached.variables(PID).items() if name != missing}
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert (detached.gone, detached.killed) == ([()], [])


def test_a_launcher_that_a_rank_has_detached_is_left_with_its_ranks(detached: Detached) -> None:
    """``setsid torchrun evaluate.py &``: torchrun leaves both."""
    detached.pids = [PID, PID + 1, PID + 2]
    detached.environs = {PID + 1: INNER, PID + 2: INNER}
    detached.parents = {PID + 1: PID, PID + 2: PID + 1}
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert (detached.gone, detached.killed) == ([()], [])


def nested(detached: Detached) -> tuple[int, int]:
    """The reaper of a saferun that a rank has started, and an upload that one of that saferun's ranks has detached."""
    reaper, upload = PID, PID + 1
    detached.pids = [reaper, upload]
    detached.names[reaper] = "reaper"
    detached.session_of[reaper] = PID + 100
    detached.environs[upload] = {**INNER, "SAFERUN_RUN_ID": "inner", "SAFERUN_OUTER_RUNS": "run"}
    return reaper, upload


def test_what_an_inner_saferun_has_left_is_left(detached: Detached) -> None:
    """It has said that it does not end it."""
    reaper, upload = nested(detached)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert (detached.gone, detached.killed) == ([], [reaper])
    detached.pids.remove(reaper)
    detached.sweep_s(1.0, begin=1.1)
    assert (detached.gone, upload in detached.killed) == ([(reaper,)], False)


def test_if_the_reaper_of_an_inner_saferun_has_to_be_killed_the_inner_ranks_are_ended_as_well(
    detached: Detached,
) -> None:
    """Its saferun has been killed, and nothing else would end them."""
    reaper, upload = nested(detached)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(5.0)
    assert {reaper, upload} <= set(detached.killed)
    detached.pids.remove(reaper)
    detached.sweep_s(2.0, begin=5.1)
    assert detached.gone == []
    assert not any("session" in line for line in detached.said)


def test_what_is_in_the_way_is_asked_once_and_with_one_reading_of_the_tables(detached: Detached) -> None:
    """It was asked every 50 ms of every process, and each time all connections of the host were read."""
    detached.pids = list(range(PID, PID + 64))
    detached.orphans.begin(0.0, 2.0)
    detached.orphans.sweep(0.4)
    assert (detached.tables, detached.killed) == ([], [])
    detached.sweep_s(1.0, begin=0.5)
    assert len(detached.tables) == 64
    assert len(set(detached.tables)) == 1


def test_one_that_has_ended_since_is_not_named(detached: Detached) -> None:
    detached.pids = [PID, PID + 1]
    detached.zombies.add(PID + 1)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert detached.said == [f"rank 3 left 1 process in a session of its own: {named()}; it is not ended"]


def test_if_all_have_ended_since_nothing_is_said(detached: Detached) -> None:
    detached.zombies.add(PID)
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert detached.said == []


def test_a_rank_that_is_no_number_is_not_named(detached: Detached) -> None:
    detached.environs[PID] = {"SAFERUN_RUN_ID": "run", "RANK": "²"}
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert detached.said == [f"the ranks left 1 process in a session of its own: {named()}; it is not ended"]


class Idle(Detached):
    """One that is waited for, and idle for as long as nothing else is said; the loop wakes up twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(activity, "read_stat", self.stat)
        monkeypatch.setattr(activity, "waits_uninterruptibly", lambda _pid: False)
        nothing = connections.Connections(frozenset(), frozenset())
        monkeypatch.setattr(connections, "connections_of", lambda _pids, _others: nothing)

    def run(self, begin: float, end: float) -> None:
        for tick in range(int((end - begin) / 0.5)):
            self.orphans.tick(begin + tick * 0.5)


def test_time_in_which_the_whole_job_was_suspended_is_none_in_which_an_upload_was_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``scontrol suspend`` for an hour: the wait and its limit go on where they stopped, and so does a SIGTERM."""
    idle = Idle(monkeypatch)
    idle.orphans.begin(0.0, 10.0, wait_s=100.0, idle_s=60.0)
    idle.run(0.0, 30.0)
    idle.run(3600.0, 3629.0)
    assert (idle.killed, idle.gone) == ([], [])
    assert idle.orphans.awaited_until == pytest.approx(3680.0, abs=2.0)
    idle.run(3629.0, 3632.0)
    assert idle.killed == [PID]
    idle.run(7200.0, 7205.0)
    assert idle.killed == [PID]
    idle.run(7205.0, 7212.0)
    assert len(idle.killed) > 1


def test_a_process_that_is_being_ended_has_no_more_time_after_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep is over then: SIGKILL that came later would never come."""
    idle = Idle(monkeypatch)
    idle.orphans.begin(0.0, 2.0, ends_all=True)
    idle.run(0.0, 1.0)
    assert idle.killed == [PID]
    idle.run(3600.0, 3600.5)
    assert idle.killed == [PID, PID]
