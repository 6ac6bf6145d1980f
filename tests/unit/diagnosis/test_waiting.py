"""What each rank waits in, from recorded stacks and from single calls, system calls and states."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.collectives import compare
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.rank_waits import rank_waits, wait_groups
from saferun.evidence.diagnosis_values import WaitGroup
from saferun.evidence.job_evidence import Capture, Frame, HangVerdict, ProcessSnapshot, StackDump, ThreadStack
from tests.unit.diagnosis.recorded_hangs import (
    C10D,
    CWD,
    NAMES,
    RANKS,
    SCRIPT,
    SITE,
    capture_of,
    ends_of,
    look_of,
)
from tests.unit.diagnosis.waiting_steps import (
    CONNECTION,
    STEP,
    one,
    recorded,
)


def groups_of(name: str, **how: bool) -> list[tuple[str, str, tuple[int, ...], str]]:
    dead = {end.rank: end.status.description for end in ends_of(name)}
    groups = wait_groups(capture_of(name, **how), ranks=RANKS, dead=dead, script=SCRIPT, cwd=CWD)
    return [(group.kind, group.detail, group.ranks, group.location) for group in groups]


# ----------------------------------------------------------------------------------------------------------- recordings

IN_ALL_REDUCE = ("collective", "all_reduce", (0, 2), "train.py:36 in reduce_loss")


@pytest.mark.parametrize(
    ("name", "kind", "what", "location"),
    [
        ("sleep", "sleep", "time.sleep", "train.py:41 in bad_sleep"),
        ("poll", "sleep", "time.sleep", "train.py:45 in bad_poll"),
        ("c_holding_the_gil", "sleep", "sleep", "train.py:64 in bad_cgil"),
        ("lock", "lock", "a lock", "train.py:49 in bad_lock"),
        ("event", "lock", "an event", "train.py:141 in bad_event"),
        ("queue", "lock", "a queue", "train.py:53 in bad_queue"),
        ("process_queue", "lock", "a queue between processes", "train.py:56 in bad_mpqueue"),
        ("fifo", "file_io", "the FIFO /scratch/fifo", "train.py:68 in bad_fifo"),
        ("fifo_save", "file_io", "the FIFO /scratch/ckpt.pt", "train.py:73 in bad_fifosave"),
        ("stopped", "stopped", "state T", "train.py:76 in bad_stop"),
        ("uninterruptible", "uninterruptible", "vfork in kernel_clone", "train.py:81 in bad_dstate"),
        ("subprocess", "subprocess", "sleep 100000", "train.py:84 in bad_subprocess"),
        ("system", "subprocess", "sh -c sleep 100000", "train.py:87 in bad_system"),
        ("forked_child", "subprocess", "a forked child", "train.py:138 in bad_fork"),
        ("process_pool", "subprocess", "a process pool", "train.py:130 in bad_mppool"),
        ("network", "network", "a connection to 127.0.0.1:41235 (ESTABLISHED)", "train.py:93 in bad_network"),
        ("connect", "network", "a connection to 127.0.0.1:41235 (SYN_SENT)", "train.py:98 in bad_connect"),
        ("store_wait", "network", "the rendezvous store", "train.py:108 in bad_store"),
        ("debugger", "debugger", "pdb", "train.py:144 in bad_pdb"),
        ("mismatched", "collective", "broadcast", "train.py:101 in bad_broadcast"),
        ("spin", "user_code", "", "train.py:60 in bad_spin"),
        ("thread", "sleep", "time.sleep, in another thread", "train.py:41 in bad_sleep"),
        ("thread_pool", "sleep", "time.sleep, in another thread", "train.py:45 in bad_poll"),
        (
            "loader_deadlocked",
            "data_loading",
            "a lock at dataset.py:15 in a worker",
            "train.py:111 in bad_loader",
        ),
    ],
)
def test_the_rank_that_stays_away_and_those_that_wait_for_it(name: str, kind: str, what: str, location: str) -> None:
    """Each way to hang is told by its own kind, and the others are seen to be in the collective."""
    assert groups_of(name) == [IN_ALL_REDUCE, (kind, what, (1,), location)]


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (
            "init_missing_rank",
            [
                ("network", "the rendezvous store (init_process_group)", (0, 2), "train.py:215 in main"),
                ("sleep", "time.sleep", (1,), "train.py:214 in main"),
            ],
        ),
        (
            "early_exit",
            [
                ("network", "the rendezvous store (init_process_group)", (0, 2), "train.py:215 in main"),
                ("dead", "exit code 0", (1,), ""),
            ],
        ),
        (
            "evaluating",
            [
                ("user_code", "", (0,), "train.py:24 in forward"),
                ("collective", "barrier", (1, 2), "train.py:180 in evaluate_and_barrier"),
            ],
        ),
        (
            "ddp_backward",
            [
                ("collective", "all_reduce in DDP's backward", (0, 2), "train.py:172 in ddp"),
                ("sleep", "time.sleep", (1,), "train.py:169 in ddp"),
            ],
        ),
        (
            "ddp_forward",
            [
                ("collective", "all_reduce in DDP's backward", (0, 2), "train.py:172 in ddp"),
                ("sleep", "time.sleep", (1,), "train.py:31 in forward"),
            ],
        ),
        (
            "async_wait",
            [
                ("collective", "all_reduce", (0, 2), "train.py:189 in many"),
                ("sleep", "time.sleep", (1,), "train.py:187 in many"),
            ],
        ),
        ("all_asleep", [("sleep", "time.sleep", (0, 1, 2), "train.py:41 in bad_sleep")]),
        ("all_in_lock", [("lock", "a lock", (0, 1, 2), "train.py:49 in bad_lock")]),
    ],
)
def test_other_recorded_hangs(name: str, groups: list[tuple[str, str, tuple[int, ...], str]]) -> None:
    assert groups_of(name) == groups


@pytest.mark.parametrize("op", ["all_gather", "all_gather_object", "monitored_barrier", "recv"])
def test_a_collective_is_called_what_the_user_called(op: str) -> None:
    """``all_gather_object`` is made of others, which nobody would find in the script."""
    assert groups_of(op)[0][:3] == ("collective", op, (0, 2))


@pytest.mark.parametrize(
    "name",
    sorted({*NAMES} - {"store_wait", "thread", "thread_pool"}),
)
@pytest.mark.parametrize("recorder", [True, False])
def test_native_calls_and_the_flight_recorder_are_a_help_and_no_condition(name: str, recorder: bool) -> None:
    """With many ranks, or under a strict kernel, neither is there; Python's calls and the system call are."""
    with_all = {group[2]: group[0] for group in groups_of(name)}
    with_less = {group[2]: group[0] for group in groups_of(name, native=False, recorder=recorder)}
    if name == "async_wait" and not recorder:
        with_all[0, 2] = "lock"  # all that can be seen
    assert with_less == with_all


def test_native_calls_of_one_rank_speak_for_those_that_stand_in_the_same_line() -> None:
    """They are taken of one of many alike."""
    capture = capture_of("async_wait", recorder=False)
    stacks = tuple(dump for dump in capture.stacks if "native" not in dump.tool or dump.rank == 0)
    groups = wait_groups(capture._replace(stacks=stacks), ranks=RANKS, dead={}, script=SCRIPT, cwd=CWD)
    assert [group[:3] for group in groups] == [("collective", "a collective", (0, 2)), ("sleep", "time.sleep", (1,))]


def test_a_rank_without_python_code_on_its_stack_is_starting_or_ending() -> None:
    """Survivors of a crash are often looked at while their interpreter shuts down; they do answer."""
    bare = ThreadStack("MainThread", 7, is_main=True, active=True, owns_gil=True, frames=())
    dump = StackDump(0, 7, is_rank=True, name="python", tool="py-spy", threads=(bare,))
    (group,) = wait_groups(Capture(stacks=(dump,)), ranks=[0], dead={}, script=SCRIPT, cwd=CWD)
    assert group.kind == "interpreter"
    (group,) = wait_groups(Capture(stacks=(dump._replace(failure="denied"),)), ranks=[0], dead={})
    assert group[:2] == ("unanswering", "denied")


def test_a_connection_to_the_store_is_known_by_its_port() -> None:
    """Without native frames Python's stack ends at the user's line."""
    look = ProcessSnapshot(0, 7, 1, True, "python", "", "S", "", "poll", 1, 0, False, 0, "", 0.0)
    asks = look._replace(waits_on="a connection to 10.0.0.2:29500 (ESTABLISHED)")
    frames = (Frame("evaluate", SCRIPT, 95),)
    thread = ThreadStack("MainThread", 7, is_main=True, active=False, owns_gil=False, frames=frames)
    dump = StackDump(0, 7, is_rank=True, name="python", tool="py-spy", threads=(thread,))
    capture = Capture(processes=(asks,), stacks=(dump,))
    user = UserCode(SCRIPT, CWD)
    findings = compare((), [0])
    for port, of_peers in ((29500, True), (2950, False), (0, False)):
        (wait,) = rank_waits(capture, findings, ranks=[0], dead={}, hang=None, user=user, store_port=port)
        assert wait.found.of_peers is of_peers


# --------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize(
    ("look", "kind", "what"),
    [
        ({"state": "T"}, "stopped", "state T"),
        ({"state": "T", "tracer_pid": 7}, "debugger", "traced by process 7"),
        ({"state": "t", "tracer_pid": 7}, "debugger", "traced by process 7"),
        (
            {"state": "D", "syscall": "openat", "wchan": "nfs_wait", "waits_on": "the file /nfs/x"},
            "uninterruptible",
            "openat in nfs_wait, the file /nfs/x",
        ),
        ({"state": "D", "syscall": "", "wchan": ""}, "uninterruptible", "state D"),
    ],
)
def test_the_state_of_the_process_comes_before_what_it_calls(look: dict[str, Any], kind: str, what: str) -> None:
    """A rank that is stopped inside a collective does not wait for others: they wait for it."""
    found = one(Frame("all_reduce", C10D, 3), STEP, look=look_of(0, **look))
    assert (found.kind, found.detail) == (kind, what)


def test_a_busy_rank_in_state_d_reads_a_disk() -> None:
    """A glance may find anybody in D for a moment; the verdict has looked for longer."""
    verdict = HangVerdict("stuck_collective", (0,), 300.0, certain=True, busy=(0,))
    look = look_of(0, state="D", syscall="read", wchan="folio_wait", waits_on="the file /data/x")
    assert one(STEP, look=look, hang=verdict).kind == "file_io"


def test_a_rank_that_dumps_its_core_is_dead() -> None:
    found = one(look=look_of(0, core_dumping=True))
    assert (found.kind, found.detail) == ("dead", "the kernel writes its core")


@pytest.mark.parametrize("state", ["Z", "X", "?"])
def test_a_rank_that_ended_meanwhile_is_dead(state: str) -> None:
    assert one(look=look_of(0, state=state, syscall="", wchan="")).kind == "dead"


def test_a_rank_of_which_nothing_is_known_does_not_answer() -> None:
    """And is not forgotten."""
    assert one() == WaitGroup("unanswering", "no stacks of it", (0,), "")
    failed = StackDump(0, 100, True, "python", "", (), "ptrace is denied by Yama (scope 2)")
    look = look_of(0, syscall="", wchan="")
    assert one(look=look, dumps=(failed,)).detail == "ptrace is denied by Yama (scope 2)"


@pytest.mark.parametrize(
    ("look", "kind"),
    [
        ({"syscall": "clock_nanosleep", "wchan": "hrtimer_nanosleep"}, "sleep"),
        ({"syscall": "wait4", "wchan": "do_wait"}, "subprocess"),
        ({"syscall": "openat", "wchan": "wait_for_partner"}, "file_io"),
        (
            {"syscall": "recvfrom", "wchan": "wait_woken", "waits_on": CONNECTION},
            "network",
        ),
        ({"syscall": "futex"}, "lock"),
    ],
)
def test_without_stacks_the_system_call_tells(look: dict[str, Any], kind: str) -> None:
    """Where ptrace is denied, /proc is what is left."""
    assert one(look=look_of(0, **look)).kind == kind


def test_without_stacks_a_pending_collective_tells_more_than_a_futex() -> None:
    """The Flight Recorder needs no ptrace."""
    found = one(look=look_of(0), collectives=(recorded(0, 3, 2), recorded(1, 2, 2)))
    assert (found.kind, found.detail) == ("collective", "all_reduce")


def test_of_two_looks_at_a_process_the_later_counts() -> None:
    """The second one knows the command and the other end."""
    looks = (
        look_of(0, syscall="read", wchan="pipe_read"),
        look_of(0, syscall="read", wchan="pipe_read", waits_on="the FIFO /x"),
    )
    assert one(STEP, looks=looks).detail == "the FIFO /x"


@pytest.mark.parametrize("certain", [True, False])
def test_in_a_stuck_collective_it_does_not_matter_in_which_library_a_rank_spins(certain: bool) -> None:
    """A victim reads a value of its GPU in the optimizer, in FSDP or elsewhere, and is busy there."""
    verdict = HangVerdict("stuck_collective", (0, 1), 300.0, certain=certain, busy=(0,))
    recorders = (recorded(0, 3, 2), recorded(1, 3, 2))
    look = look_of(0, state="R", syscall="", wchan="")
    for file, function in (
        ("torch/nn/utils/clip_grad.py", "clip_grad_norm_"),
        ("torch/amp/grad_scaler.py", "step"),
        ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", "wait_for_unshard"),
    ):
        frame = Frame(function, f"{SITE}/{file}", 9)
        found = one(frame, STEP, look=look, active=True, collectives=recorders, hang=verdict, ranks=(0, 1))
        assert (found.kind == "collective") is certain, frame
