"""Ranks that hang after an exception: what they have printed of it belongs to the verdict."""

from __future__ import annotations

import pytest

from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, Frame, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.recorded_hangs import C10D, dump_of, evidence, look_of, native

HEAD = "Traceback (most recent call last):"
PLAIN = (
    HEAD,
    '  File "/job/train.py", line 8, in <module>',
    '    raise ValueError("bad batch")',
    "ValueError: bad batch",
)
BY_HOOK = tuple(f"[rank1]: {line}" for line in PLAIN)
LOGGED = ("ERROR:root:training failed", HEAD, '  File "/job/train.py", line 52, in step', "KeyError: 'labels'")
RAISED = "ValueError: bad batch, at train.py:8"
PRINTED = "the stderr of rank 1 ends with a traceback: KeyError: 'labels', at train.py:52 in step"

ALL_REDUCE = (
    Frame("all_reduce", C10D, 3252),
    Frame("step", "/job/train.py", 52),
    Frame("<module>", "/job/train.py", 9),
)
MODULE = Frame("<module>", "/job/train.py", 99)
THREADING = "/usr/lib/python3.11/threading.py"
SHUTDOWN = (Frame("_shutdown", THREADING, 1590),)
POOL_EXIT = (
    Frame("_wait_for_tstate_lock", THREADING, 1116),
    Frame("join", THREADING, 1096),
    Frame("_python_exit", "/usr/lib/python3.11/concurrent/futures/thread.py", 31),
)
UPLOAD = (
    Frame("wait", THREADING, 327),
    Frame("finish", "/venv/lib/python3.11/site-packages/wandb/sdk/wandb_run.py", 2000),
)
EXIT_BARRIER = (Frame("barrier", C10D, 4000), Frame("_exit", "/venv/lib/python3.11/site-packages/lib/dist.py", 20))
BARRIER = (Frame("barrier", C10D, 4000), Frame("main", "/job/train.py", 90), MODULE)
LOCK = (Frame("acquire", THREADING, 160), Frame("main", "/job/train.py", 90), MODULE)


def hang(of_rank_1: tuple[Frame, ...], stderr: tuple[str, ...], **seen: str) -> Diagnosis:
    """Ranks 0 and 2 wait in an all_reduce, rank 1 elsewhere."""
    stacks = (dump_of(0, *ALL_REDUCE), dump_of(1, *of_rank_1), dump_of(2, *ALL_REDUCE))
    processes = (look_of(0), look_of(1, **seen), look_of(2))
    outputs = tuple(RankOutput(rank, stderr if rank == 1 else (), "", "", 0.0) for rank in (0, 1, 2))
    return diagnose_hang(evidence(Capture(processes=processes, stacks=stacks))._replace(outputs=outputs))


def test_an_uncaught_exception_is_the_verdict_where_a_thread_keeps_its_process() -> None:
    """Python waits for threads that are no daemons; the exception is why the rank has not come."""
    found = hang(SHUTDOWN, BY_HOOK)
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_after_error", (1,))
    assert (
        f"rank 1 (node1) has not called the all_reduce that ranks 0, 2 wait in: it has raised {RAISED}, and waits for"
        in (found.headline)
    )
    assert "daemon" in found.cause.advice


@pytest.mark.parametrize("frames", [SHUTDOWN, POOL_EXIT, (), (native("futex_wait"),)])
@pytest.mark.parametrize("stderr", [PLAIN, BY_HOOK])
def test_so_it_is_wherever_python_ends(frames: tuple[Frame, ...], stderr: tuple[str, ...]) -> None:
    """With torch's hook for uncaught exceptions and without."""
    assert f"it has raised {RAISED}, and" in hang(frames, stderr).headline


EVALUATES = (native("futex_wait"), native("PyThread_acquire_lock_timed"), native("_PyEval_EvalFrameDefault"))


def test_a_rank_of_which_only_the_interpreter_is_seen_may_still_run_its_script() -> None:
    """A debugger of native code does not show what Python runs; the error was logged, and the script goes on."""
    found = hang(EVALUATES, LOGGED)
    assert found.cause is not None
    assert found.cause.class_name != "hang_after_error"
    assert "has raised" not in found.headline
    at_end = hang((*EVALUATES, native("wait_for_thread_shutdown"), native("Py_FinalizeEx")), PLAIN)
    assert f"it has raised {RAISED}, and" in at_end.headline


@pytest.mark.parametrize("frames", [UPLOAD, EXIT_BARRIER])
def test_what_runs_at_exit_may_wait_for_anything(frames: tuple[Frame, ...]) -> None:
    """Where torch's hook has printed the exception, the script is through. A barrier at exit is no other collective."""
    found = hang(frames, BY_HOOK)
    assert found.cause is not None
    assert found.cause.class_name == "hang_after_error"
    assert RAISED in found.headline


@pytest.mark.parametrize("frames", [BARRIER, LOCK])
def test_an_error_that_a_rank_has_caught_is_a_finding_and_comes_first_in_the_advice(frames: tuple[Frame, ...]) -> None:
    """It need not be why it went another way."""
    found = hang(frames, LOGGED)
    assert found.cause is not None
    assert found.cause.class_name in {"hang_mismatched_collectives", "hang_lock"}
    assert "KeyError" not in found.headline
    assert PRINTED in found.findings
    assert found.cause.advice.startswith("look at the error that rank 1 printed last; else ")


@pytest.mark.parametrize(
    "stderr",
    [
        (*LOGGED, "step 41", "step 42", "step 43", "step 44"),
        ("Exception ignored in: <function Pool.__del__ at 0x7f>", *PLAIN),
        (),
    ],
)
def test_an_error_that_was_got_over_is_none(stderr: tuple[str, ...]) -> None:
    """Output that follows shows that the rank went on, and a destructor's error ends nothing."""
    found = hang(SHUTDOWN, stderr)
    assert found.cause is not None
    assert found.cause.class_name == "hang_lock"
    assert not any("traceback" in line for line in found.findings)
    assert "error that" not in found.cause.advice


def test_a_log_line_with_a_rank_before_it_does_not_end_the_script() -> None:
    """Torch's loggers put the same before a line as its hook; what is still in the script has gone on."""
    log = tuple(f"[rank1]:[E1126 12:00:00.000000 71 train.py:9] {line}" for line in LOGGED)
    assert "KeyError" not in hang(UPLOAD, log).headline
    assert "ValueError" not in hang((*UPLOAD, MODULE), BY_HOOK).headline


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_rank_that_is_stopped_is_named_for_that(state: str) -> None:
    """Whatever it has printed before."""
    found = hang(SHUTDOWN, BY_HOOK, state=state)
    assert found.cause is not None
    assert found.cause.class_name in {"hang_stopped", "hang_debugger"}
    assert "error that" not in found.cause.advice


def test_of_a_rank_that_has_ended_well_its_last_error_is_shown() -> None:
    """A script that logs its exception and ends with 0 leaves the others alone with it."""
    end = RankEnd(1, 1, 4001, ExitStatus(0, None), 100.0, 1.7e9, stopped_by_us=False)
    seen = Capture(processes=(look_of(0), look_of(2)), stacks=(dump_of(0, *ALL_REDUCE), dump_of(2, *ALL_REDUCE)))
    outputs = (RankOutput(0, (), "", "", 0.0), RankOutput(1, LOGGED, "", "", 0.0), RankOutput(2, LOGGED, "", "", 0.0))
    found = diagnose_hang(evidence(seen, ends=(end,))._replace(outputs=outputs))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("hang_early_exit", (1,))
    shown = [line for line in found.findings if "KeyError" in line]
    assert shown == [PRINTED.replace("rank 1 ", "rank 1, which has ended (exit code 0), ")]
    assert found.cause.advice.startswith("look at the error that rank 1 printed last")
