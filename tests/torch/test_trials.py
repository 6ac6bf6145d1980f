"""Real gloo trials on loopback: what each member's outcome says, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from saferun.linux.poller import Poller
from saferun.preflight.bisect import LOOPBACK, Bisection, Group, Member, Trial, TrialResult
from saferun.preflight.bisect.finding_text import reason
from saferun.preflight.bisect.trial_process import TrialPlace, TrialRun

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "saferun" / "coordinator" / "trial_server.py"
# A passing test takes a small part of it, on a busy machine too.
PATIENCE_S = 120.0
# Of trials that end by it.
SHORT_S = 5.0


class Host:
    """One host's side, as its supervisor has it."""

    def __init__(self, number: int, poller: Poller, store_port: int, environ: dict[str, str]) -> None:
        self.poller = poller
        self.ready: list[str] = []
        self.done: list[tuple[Trial, tuple[TrialResult, ...]]] = []
        self.pids: set[int] = set()
        place = TrialPlace(number, "gloo", "127.0.0.1", store_port)
        self.run = TrialRun(
            place,
            environ,
            poller,
            on_ready=self.ready.append,
            on_done=lambda trial, outcomes: self.done.append((trial, outcomes)),
        )

    def start(self, trial: Trial, **pretend: str) -> None:
        """Start a trial; ``r1="hangs"``: what local rank 1 pretends."""
        self.run.start(trial, {int(name[1:]): what for name, what in pretend.items()})
        self.note_pid()

    def note_pid(self) -> None:
        self.pids |= self.run.pids

    def outcomes(self) -> dict[Member, TrialResult]:
        """How the next trial goes."""
        wait_until(self.poller, lambda: bool(self.done))
        _, outcomes = self.done.pop(0)
        return {outcome.member: outcome for outcome in outcomes}

    def members(self) -> list[int]:
        """The processes of the members that there are now."""
        return [child for pid in self.run.pids for child in children_of(pid)]


def wait_until(poller: Poller, condition: Any) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_at, "it never came"
        poller.wait(0.02)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kinds(outcomes: dict[Member, TrialResult]) -> list[str]:
    return [outcomes[member].kind for member in sorted(outcomes)]


def trial(*groups: Group, interface: str = LOOPBACK, deadline_s: float = PATIENCE_S, number: int = 1) -> Trial:
    return Trial(number, "a trial", groups, interface, deadline_s)


def group(*members: tuple[int, int]) -> Group:
    return tuple(Member(*member) for member in members)


@pytest.fixture(scope="module")
def store_port() -> Iterator[int]:
    """A store that outlives all trials, as the coordinator of the master has one."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield store.port
    del store


@contextmanager
def host(number: int, store_port: int, environ: dict[str, str] | None = None) -> Iterator[Host]:
    """A host whose process is gone afterwards, and so are its members."""
    with ExitStack() as closing:
        poller = Poller()
        closing.callback(poller.close)
        one = Host(number, poller, store_port, dict(os.environ if environ is None else environ))
        try:
            yield one
        finally:
            one.note_pid()
            left = [child for pid in one.pids for child in children_of(pid) if pid in one.run.pids]
            one.run.close()
            for pid in one.pids:
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)
            wait_until(poller, lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))


@pytest.fixture(scope="module")
def shared(store_port: int) -> Iterator[Host]:
    """Importing torch is what takes time: most tests share one process, as trials do."""
    with host(0, store_port) as one:
        one.run.prepare()
        wait_until(one.poller, lambda: bool(one.ready))
        assert one.ready == [""]
        yield one


# ------------------------------------------------------------------------------------------------------------- one host


def test_members_of_one_host_work_together(shared: Host) -> None:
    """A healthy trial is told as such, and its processes are gone when it is."""
    shared.start(trial(group((0, 0), (0, 1), (0, 2))))
    outcomes = shared.outcomes()
    assert outcomes == {Member(0, rank): TrialResult(Member(0, rank), "ok") for rank in range(3)}
    assert shared.members() == []
    assert shared.run.deadline is None


def test_a_member_alone_is_a_group(shared: Host) -> None:
    """Each GPU is tried for itself."""
    shared.start(trial(group((0, 0)), group((0, 1))))
    assert kinds(shared.outcomes()) == ["ok", "ok"]


@pytest.mark.slow
def test_local_groups_need_nobody_else() -> None:
    """A host that cannot reach the master still tells whether it is whole itself."""
    # The store of this place is never asked: nobody listens on port 1.
    with host(0, 1) as one:
        one.start(trial(group((0, 0), (0, 1))))
        assert kinds(one.outcomes()) == ["ok", "ok"]


def test_a_stopped_member_has_timed_out_where_it_stands(shared: Host) -> None:
    """SIGSTOP is what a hung GPU driver looks like to the others; SIGKILL ends it all the same."""
    shared.start(trial(group((0, 0), (0, 1)), deadline_s=SHORT_S), r1="stops")
    outcomes = shared.outcomes()
    stopped, other = outcomes[Member(0, 1)], outcomes[Member(0, 0)]
    assert (stopped.kind, stopped.where) == ("timeout", "in barrier")
    assert (other.kind, other.where) == ("timeout", "in barrier")
    assert "Timed out waiting" in other.message
    assert shared.members() == []


def test_a_member_that_never_joins_is_told_apart_from_those_who_wait_for_it(shared: Host) -> None:
    """Where each stood says who was missing."""
    shared.start(trial(group((0, 0), (0, 1), (0, 2)), deadline_s=SHORT_S), r2="never_joins")
    outcomes = shared.outcomes()
    assert kinds(outcomes) == ["timeout"] * 3
    assert [outcomes[Member(0, rank)].where for rank in range(3)] == [
        "in init_process_group",
        "in init_process_group",
        "before joining",
    ]
    assert shared.members() == []


@pytest.mark.slow
def test_a_hung_group_does_not_hurt_another(shared: Host) -> None:
    """Groups are disjoint, and run at the same time."""
    shared.start(trial(group((0, 0), (0, 1)), group((0, 2), (0, 3)), deadline_s=SHORT_S), r3="hangs")
    assert kinds(shared.outcomes()) == ["ok", "ok", "timeout", "timeout"]


def test_an_interface_that_is_not_there_is_named(shared: Host) -> None:
    """Gloo's own words, without the places in its sources."""
    shared.start(trial(group((0, 0), (0, 1)), interface="nope0"))
    outcomes = shared.outcomes()
    assert kinds(outcomes) == ["error", "error"]
    assert outcomes[Member(0, 0)].where == "in init_process_group"
    assert outcomes[Member(0, 0)].message.endswith("Unable to find address for: nope0")
    assert "[" not in outcomes[Member(0, 0)].message


def test_a_crash_is_told_with_its_signal_and_ends_the_group(shared: Host) -> None:
    """Its peers see broken connections and need not wait for the deadline."""
    shared.start(trial(group((0, 0), (0, 1))), r0="crashes")
    outcomes = shared.outcomes()
    assert outcomes[Member(0, 0)].kind == "error"
    assert outcomes[Member(0, 0)].message.startswith("killed by SIGSEGV")
    assert outcomes[Member(0, 1)].kind != "ok"
    assert "killed by SIGSEGV" in reason(tuple(reversed(outcomes.values())), ()), "whoever was heard first"


def test_a_wrong_sum_is_an_error(shared: Host) -> None:
    """A GPU that computes wrongly does not hang."""
    shared.start(trial(group((0, 0), (0, 1))), r1="adds_wrongly")
    outcome = shared.outcomes()[Member(0, 0)]
    assert (outcome.kind, outcome.where) == ("error", "in all_reduce of 4 bytes")
    assert outcome.message == "a wrong sum: 4 to 4 instead of 3"


def test_a_trial_that_is_overtaken_is_given_up(shared: Host) -> None:
    """What the leader asks for now is what counts."""
    shared.start(trial(group((0, 0), (0, 1)), number=1), r1="hangs")
    # With the process that keeps their store.
    wait_until(shared.poller, lambda: len(shared.members()) == 3)
    shared.start(trial(group((0, 0)), number=2))
    assert set(kinds(shared.outcomes())) == {"error"}
    assert kinds(shared.outcomes()) == ["ok"]
    assert shared.members() == []


def test_a_trial_without_members_here_is_done_at_once(shared: Host) -> None:
    """Every host hears of every trial."""
    shared.start(trial(group((1, 0), (2, 0))))
    assert shared.outcomes() == {}


def test_the_search_names_the_rank_that_crashes(shared: Host) -> None:
    """The plan and what carries it out, together."""
    search = Bisection({0: [0, 1, 2]}, {0: "node0"}, [LOOPBACK], part="rank", deadline_s=PATIENCE_S)
    while wanted := search.next_trial():
        shared.start(wanted, r1="crashes")
        search.feed(wanted, list(shared.outcomes().values()))
    [found] = search.finding().sets
    assert (found.kind, found.members) == ("gpu", (Member(0, 1),))
    assert found.line == "node0: rank 1 fails alone (error in barrier: killed by SIGSEGV)"


# -------------------------------------------------------------------------------------------------------- several hosts


def test_members_of_two_hosts_meet_in_the_store(shared: Host, store_port: int) -> None:
    """And once more under another number, in the same store."""
    with host(1, store_port) as other:
        for number in (101, 102):
            wanted = trial(group((0, 0), (1, 0), (1, 1)), number=number)
            shared.start(wanted)
            other.start(wanted)
            assert kinds(other.outcomes()) == ["ok", "ok"]
            assert kinds(shared.outcomes()) == ["ok"]


def test_a_host_that_does_not_come_leaves_the_others_waiting_in_a_known_place(shared: Host) -> None:
    """They say that they could not meet, not that their part is broken."""
    shared.start(trial(group((0, 0), (1, 0)), deadline_s=SHORT_S, number=201))
    outcome = shared.outcomes()[Member(0, 0)]
    assert (outcome.kind, outcome.where) == ("timeout", "in init_process_group")


@pytest.mark.slow
def test_a_store_that_is_not_there_is_told() -> None:
    """Refused is not the same as silent."""
    with host(0, 1) as one:
        one.start(trial(group((0, 0), (1, 0)), deadline_s=SHORT_S))
        outcome = one.outcomes()[Member(0, 0)]
        assert outcome.kind in {"error", "timeout"}
        assert outcome.where == "connecting to the store"


# ---------------------------------------------------------------------------------------------------------- the process


@pytest.mark.slow
def test_members_die_with_their_server(store_port: int) -> None:
    """SIGKILL of the server leaves nothing, and the trial is told to have failed."""
    with host(0, store_port) as one:
        one.start(trial(group((0, 0), (0, 1))), r0="hangs", r1="never_joins")
        # The third one serves the store of a group within one host.
        wait_until(one.poller, lambda: len(one.members()) == 3)
        members = [os.pidfd_open(pid) for pid in one.members()]
        (pid,) = one.run.pids
        os.kill(pid, signal.SIGKILL)
        outcomes = one.outcomes()
        assert kinds(outcomes) == ["error", "error"]
        assert "the trial process ended" in outcomes[Member(0, 0)].message
        for member in members:
            assert select.select([member], [], [], PATIENCE_S)[0], "a member has outlived its server"
            os.close(member)
        # The next trial starts another process.
        one.start(trial(group((0, 0)), number=2))
        assert kinds(one.outcomes()) == ["ok"]


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up_with_what_it_told(store_port: int) -> None:
    """The supervisor's own deadline."""
    with host(0, store_port) as one:
        one.start(trial(group((0, 0), (0, 1))), r1="hangs")
        wait_until(one.poller, lambda: len(one.run._where) == 2 and set(one.run._where.values()) == {"in barrier"})
        (pid,) = one.run.pids
        os.kill(pid, signal.SIGSTOP)
        assert one.run.deadline is not None
        assert one.run.deadline > time.monotonic() + PATIENCE_S / 2
        one.run.tick(one.run.deadline)
        outcomes = one.outcomes()
        assert {(outcome.kind, outcome.where) for outcome in outcomes.values()} == {("timeout", "in barrier")}


@pytest.mark.slow
def test_a_torch_that_cannot_be_imported_is_told(store_port: int, tmp_path: Path) -> None:
    """Once as the reason why no trial can be run, and for each member of a trial that was asked for."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')\n")
    with host(0, store_port, {**os.environ, "PYTHONPATH": str(tmp_path)}) as one:
        one.start(trial(group((0, 0))))
        outcome = one.outcomes()[Member(0, 0)]
        assert one.ready == ["torch cannot be imported: libcudart.so.12: cannot open shared object file"]
        assert (outcome.kind, outcome.message) == ("error", one.ready[0])


@pytest.mark.slow
def test_the_server_can_be_forked_and_goes_with_its_supervisor() -> None:
    """A lock that another thread held would be held forever in a child, and CUDA does not survive a fork."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server = subprocess.Popen([sys.executable, "-P", PROGRAM, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        try:
            theirs.close()
            ours.settimeout(PATIENCE_S)
            [line] = ours.recv(1 << 16).splitlines()
            ready = json.loads(line)
            assert (ready["op"], ready["threads"], ready["cuda"]) == ("ready", 1, False)
            ours.close()
            assert server.wait(PATIENCE_S) == 0
        finally:
            server.kill()
            server.wait()
