"""Which of several errors ended a rank: the one that was not caught, or one that was logged, or one of a group."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.causes.going_on import is_progress
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.tracebacks import find_python_error
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import RankOutput
from saferun.model import RankEnd
from tests.unit.diagnosis.failed_jobs import class_of, evidence
from tests.unit.diagnosis.printed_tracebacks import HEAD, IN_TASK_GROUP, LOST, RESET, STEP, group
from tests.unit.samples import end_of

MODULE = '  File "/home/user/job/train.py", line 90, in <module>'
LOST_ERROR = f"RuntimeError: {RESET}"
OOM_ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
OOM = (HEAD, STEP, OOM_ERROR)
KEY = (HEAD, STEP, "KeyError: 'labels'")
UNCAUGHT_OOM = (HEAD, MODULE, STEP, OOM_ERROR)
CONTEXT = "During handling of the above exception, another exception occurred:"
DIRECT = "The above exception was the direct cause of the following exception:"
TASK = ("Task exception was never retrieved", "future: <Task finished name='Task-1' exception=RuntimeError('x')>")
CALLBACK = ("Exception in callback Loop._read()", "handle: <Handle Loop._read()>")
THREAD = "Exception in thread Thread-3 (prefetch):"
AT_EXIT = "Error in atexit._run_exitfuncs:"
DESTRUCTOR = "Exception ignored in: <function Loader.__del__ at 0x7f>"
IN_LOGGING = "--- Logging error ---"


def output(rank: int, *lines: str, stdout: tuple[str, ...] = ()) -> RankOutput:
    return RankOutput(rank, lines, "", "", 0.0, stdout)


def judged_at(end: RankEnd, *lines: str, stdout: tuple[str, ...] = ()) -> Cause:
    one = output(0, *lines, stdout=stdout)
    return judged_failure(evidence(end, outputs=(one,)), end, one)[1]


def found_in(*lines: str, stdout: tuple[str, ...] = (), code: int = 1) -> Cause:
    return judged_at(end_of(0, code=code), *lines, stdout=stdout)


def job(one: RankOutput, other: RankOutput, *, code: int = 1, stopped: bool = False, later: float = 0.5) -> Diagnosis:
    """Rank 0 ended with that code, rank 1 later with code 1 or because it was stopped."""
    end = end_of(1, signum=15, at=100.0 + later, stopped=True) if stopped else end_of(1, code=1, at=100.0 + later)
    return diagnose(evidence(end_of(0, code=code, at=100.0), end, outputs=(one, other)))


def verdict(found: Diagnosis) -> tuple[str | None, tuple[int, ...], tuple[int, ...]]:
    return class_of(found), found.cause.ranks if found.cause is not None else (), found.victims


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("link", [CONTEXT, DIRECT])
@pytest.mark.parametrize("title", [IN_TASK_GROUP, "2 workers failed"])
@pytest.mark.parametrize("blank", [(), ("",)])
def test_an_error_that_was_raised_after_a_group_is_what_ended_the_rank(
    link: str, title: str, blank: tuple[str, ...]
) -> None:
    denied = (HEAD, MODULE, "PermissionError: [Errno 13] Permission denied: '/ckpt'")
    found = found_in(*group("ValueError: z", "KeyError: 'q'", title=title), *blank, link, *blank, *denied)
    assert found.class_name == "permission_denied"
    assert "ExceptionGroup" not in found.message


def test_of_a_group_that_followed_from_another_error_or_group_the_first_error_counts() -> None:
    for before in (KEY, group("ValueError: a", "ValueError: b")):
        found = found_in(*before, CONTEXT, *group("TypeError: first", "IndexError: second"))
        assert found.message == "TypeError: first (1 of 2 errors of an ExceptionGroup)"


@pytest.mark.parametrize("first", [LOST_ERROR, "ConnectionResetError: [Errno 104] Connection reset by peer"])
def test_the_order_of_a_group_that_a_script_has_built_means_nothing(first: str) -> None:
    lines = group(first, OOM_ERROR, title="2 workers failed")
    assert found_in(*lines).class_name == "cuda_out_of_memory"
    found = job(output(0, *lines), output(1, *LOST))
    assert verdict(found) == ("cuda_out_of_memory", (0,), (1,))


@pytest.mark.parametrize("title", [IN_TASK_GROUP, "Exceptions from Trio nursery", "tasks failed"])
@pytest.mark.parametrize(
    "cancelled", ["asyncio.exceptions.CancelledError", "trio.Cancelled: Cancelled", "GeneratorExit"]
)
def test_a_task_that_was_cancelled_is_not_why_a_group_ended(title: str, cancelled: str) -> None:
    for errors in ((cancelled, OOM_ERROR), (OOM_ERROR, cancelled)):
        assert found_in(*group(*errors, title=title, kind="BaseExceptionGroup")).class_name == "cuda_out_of_memory"


def test_the_order_in_a_nursery_counts() -> None:
    lines = group("ValueError: bad shard", "KeyError: 'x'", title="Exceptions from Trio nursery")
    assert found_in(*lines).message.startswith("ValueError: bad shard")


@pytest.mark.parametrize("message", ["Segmentation fault", "Aborted"])
@pytest.mark.parametrize("title", [IN_TASK_GROUP, "2 workers failed"])
def test_a_crash_while_python_ends_is_not_why_a_group_ended(message: str, title: str) -> None:
    signum = 11 if message == "Segmentation fault" else 6
    report = (
        f"Fatal Python error: {message}",
        "",
        "Thread 0x00007f12 (most recent call first):",
        "  <no Python frame>",
    )
    end = end_of(0, signum=signum)
    last = OOM_ERROR if title != IN_TASK_GROUP else "ValueError: b"
    first = OOM_ERROR if title == IN_TASK_GROUP else "ValueError: b"
    assert judged_at(end, *group(first, last, title=title), *report).class_name == "cuda_out_of_memory"
    three = group(OOM_ERROR, "ValueError: b", "KeyError: 'k'")
    assert judged_at(end, *three, *report).class_name == "cuda_out_of_memory"
    warned = ("WARNING could not write the cache", *KEY)
    assert judged_at(end, "ERROR training failed", *OOM, *warned, *report).class_name == "cuda_out_of_memory"


# ----------------------------------------------------------------------------------------- uncaught, below a warning


def test_a_warning_above_an_uncaught_error_is_another_message() -> None:
    logged = ("ERROR:root:index cache unreadable, rebuilding", HEAD, STEP, "FileNotFoundError: [Errno 2] No such: '/x'")
    warning = "WARNING:root:flash-attn not installed, using eager attention"
    assert found_in(*logged, warning, *UNCAUGHT_OOM).class_name == "cuda_out_of_memory"
    assert found_in("ERROR:root:index unreadable", *logged[1:], warning, *UNCAUGHT_OOM).class_name == (
        "cuda_out_of_memory"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ERROR attempt 1 failed", "WARNING attempt 2 failed, giving up"),
        ("ERROR upload failed, falling back to the disk", "WARNING not written"),
        ("ERROR upload failed", "WARNING Retry failed"),
        ("ERROR index unreadable, rebuilding", "WARNING not written"),
    ],
)
def test_an_error_after_which_a_program_tried_once_more_is_not_the_last_one(first: str, second: str) -> None:
    denied = (HEAD, STEP, "PermissionError: [Errno 13] Permission denied: '/ckpt'")
    assert found_in(first, HEAD, STEP, "TimeoutError: slow", second, *denied).class_name == "permission_denied"


def test_a_stopped_rank_with_an_uncaught_error_below_a_warning_is_the_culprit() -> None:
    one = output(1, "WARNING:root:flash-attn not installed", *UNCAUGHT_OOM)._replace(raised=True)
    found = job(output(0, *LOST), one, stopped=True)
    assert verdict(found) == ("cuda_out_of_memory", (1,), (0,))


# --------------------------------------------------------------------------------------------------- other exit codes

WARNINGS = (
    "[W501 12:00:00.123456789 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called",
    "/opt/venv/lib/python3.11/site-packages/torch/a.py:12: UserWarning: slow path",
    "  warnings.warn(",
    "/opt/venv/lib/python3.11/site-packages/torch/b.py:13: UserWarning: slow path",
    "  warnings.warn(",
)


@pytest.mark.parametrize("code", [2, 3, 255])
@pytest.mark.parametrize("before", [(), ("ERROR lost a rank",)])
def test_an_error_at_the_end_of_stdout_explains_more_than_one_above_lines_of_stderr(
    code: int, before: tuple[str, ...]
) -> None:
    stdout = ("2025-01-01 12:00:00 ERROR training failed", *OOM)
    found = found_in(*before, *LOST, *WARNINGS, stdout=stdout, code=code)
    assert (found.class_name, role_of(found)) == ("cuda_out_of_memory", Role.CULPRIT)
    whole = job(output(0, *before, *LOST, *WARNINGS, stdout=stdout), output(1, *LOST), code=code)
    assert verdict(whole) == ("cuda_out_of_memory", (0,), (1,))


@pytest.mark.parametrize("code", [2, 255])
def test_nor_does_another_error_on_stderr_hide_it(code: int) -> None:
    disk = (HEAD, STEP, "OSError: [Errno 5] Input/output error")
    found = found_in(*disk, *WARNINGS, stdout=("ERROR training failed", *KEY), code=code)
    assert (found.class_name, found.message) == ("python_exception", "KeyError: 'labels'")


def test_a_lost_peer_on_stderr_alone_still_makes_a_victim() -> None:
    informs = tuple(f"INFO closing {what}" for what in ("writers", "loaders", "the store", "the group", "the log"))
    found = found_in("ERROR training failed", *LOST, *informs, code=255)
    assert role_of(found) is Role.VICTIM
    assert "no traceback" not in found.message


# ----------------------------------------------------------------------------------------------- what ends no program


@pytest.mark.parametrize("code", [1, 2, 255])
@pytest.mark.parametrize("head", [TASK, CALLBACK, (AT_EXIT,), (DESTRUCTOR,)])
def test_a_peer_that_a_task_lost_makes_a_victim_where_nothing_else_is_printed(code: int, head: tuple[str, ...]) -> None:
    found = found_in(*head, *LOST, code=code)
    assert (found.class_name, role_of(found)) == ("peer_lost", Role.VICTIM)


@pytest.mark.parametrize("head", [TASK, CALLBACK, (AT_EXIT,), (DESTRUCTOR,), (IN_LOGGING,)])
@pytest.mark.parametrize("is_on_stderr", [False, True])
def test_lines_of_progress_do_not_say_why_a_rank_ends(head: tuple[str, ...], *, is_on_stderr: bool) -> None:
    steps = ("epoch 1", "step 5 loss 0.3")
    one = output(0, *steps, *head, *LOST) if is_on_stderr else output(0, *head, *LOST, stdout=steps)
    assert verdict(job(one, output(1, *KEY))) == ("python_exception", (1,), (0,))


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        ("step 101 loss 2.31 grad_norm inf", True),
        ("epoch 5 val_loss nan (not evaluated yet)", True),
        ("[rank 0] Iteration: 7, loss nan", True),
        ("2025-01-01 12:00:00,123 - train - Epoch 3/10 loss=nan", True),
        ("train | batch #12 | nan", True),
        ("Loss is NaN at step 8, aborting", False),
        ("step 8: loss is nan", False),
        ("step 8: loss nan, stopping", False),
        ("epoch 5: no improvement", False),
        ("ERROR: step 17 has 3 labels for 4 samples", False),
        ("ERROR step 8 loss nan", False),
        ("loss nan", False),
    ],
)
def test_what_is_progress(line: str, *, is_shown: bool) -> None:
    assert is_progress(line) is is_shown


@pytest.mark.parametrize("line", ["step 101 loss 2.31 grad_norm inf", "epoch 5 val_loss nan (not evaluated yet)"])
def test_a_step_with_such_numbers_is_no_reason(line: str) -> None:
    assert found_in(THREAD, *OOM, line).class_name == "cuda_out_of_memory"
    assert found_in(THREAD, *KEY, line).message.startswith("KeyError: 'labels'")
    assert role_of(found_in(THREAD, *LOST, line)) is Role.VICTIM
    steps = tuple(f"step {number} loss 2.3" for number in range(97, 101))
    assert role_of(found_in("WARNING all_reduce failed", *LOST, *steps, line)) is Role.VICTIM
    last = "Loss is NaN at step 8, aborting"
    assert found_in(THREAD, *OOM, line, last).proof == last
    assert role_of(found_in("WARNING all_reduce failed", *LOST, *steps, line, last)) is Role.CULPRIT


# ------------------------------------------------------------------------------------------- got over, and then ended

WHY = (
    "validation set is empty: 0 rows",
    "tokenizer vocab 32000 != model vocab 32001",
    "reward collapsed to 0",
    "license expired",
    "quota used up",
)
WENT_ON = ("INFO rebuilt the group with 7 ranks", "INFO resumed from step 100", "INFO evaluating")


@pytest.mark.parametrize("line", WHY)
@pytest.mark.parametrize(("code", "stream"), [(1, "stdout"), (2, "stdout"), (255, "stdout"), (2, "stderr")])
def test_a_lost_peer_that_was_got_over_does_not_come_before_last_words(line: str, code: int, stream: str) -> None:
    lines = ("ERROR lost a rank, rebuilding", *LOST, *WENT_ON, line)
    one = output(0, *lines) if stream == "stderr" else output(0, stdout=lines)
    found = job(one, output(1, *LOST), code=code)
    assert verdict(found) == ("python_exit", (0,), (1,))
    assert line in found.headline


@pytest.mark.parametrize(
    "line", ["giving up", "training failed", "saving the state", f"lost: {RESET}", "ERROR run aborted, exit code 2"]
)
@pytest.mark.parametrize("code", [2, 255])
def test_last_words_about_the_end_or_the_error_change_nothing(line: str, code: int) -> None:
    lines = ("ERROR lost a rank", *LOST, "INFO closing a", "INFO closing b", "INFO closing c", line)
    assert role_of(found_in(*lines, code=code)) is Role.VICTIM
    assert role_of(found_in(stdout=lines, code=code)) is Role.VICTIM


# -------------------------------------------------------------------------------- aborts while the interpreter ends

GPU_ADVICE = (
    "CUDA kernel errors might be asynchronously reported at some other API call.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
)
C10_ERROR = "terminate called after throwing an instance of 'c10::Error'"
UNLOADING = (
    C10_ERROR,
    "  what():  CUDA error: driver shutting down",
    *GPU_ADVICE,
    "",
    "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f in libc10.so)",
    "",
)
FREED = (C10_ERROR, "  what():  invalid device pointer: 0x5400000")
THREAD_RUNS = ("terminate called without an active exception",)
OVER = ("Fatal Python error: Aborted", "", "Thread 0x00007f51 (most recent call first):", "  <no Python frame>")
RUNS = (*OVER[:2], "Current thread 0x00007f51 (most recent call first):", STEP)
MODULE_STEP = (HEAD, MODULE, STEP)
# Nothing in them is about the end of a process.
OWN_ABORTS = (
    ("double free or corruption (out)",),
    ("free(): invalid pointer",),
    ("terminate called after throwing an instance of 'std::runtime_error'", "  what():  the reader lost its shard"),
    (C10_ERROR, "  what():  CUDA error: invalid device pointer", *GPU_ADVICE),
)


@pytest.mark.parametrize("report", [(), OVER])
@pytest.mark.parametrize("abort", [UNLOADING, FREED, THREAD_RUNS])
@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        (("ValueError: bad shape",), "python_exception"),
        ((OOM_ERROR,), "cuda_out_of_memory"),
        (("torch.AcceleratorError: CUDA error: device-side assert triggered", *GPU_ADVICE), "device_side_assert"),
    ],
)
def test_an_uncaught_error_is_the_cause_of_an_abort_at_exit(
    message: tuple[str, ...], class_name: str, abort: tuple[str, ...], report: tuple[str, ...]
) -> None:
    """Destructors of torch's objects, and threads that still run, abort an interpreter that an exception ends."""
    found = judged_at(end_of(0, signum=6), *MODULE_STEP, *message, *abort, *report)
    assert (found.class_name, found.location) == (class_name, "train.py:52 in step")


@pytest.mark.parametrize(
    "lines",
    [
        (*MODULE_STEP, "ValueError: bad shape", "going on without this sample", *FREED),
        (*MODULE_STEP, "ValueError: bad shape", "step 7 loss 2.3", *UNLOADING, *RUNS),
        ("ERROR:train:bad sample", *MODULE_STEP, "ValueError: bad shape", *THREAD_RUNS),
        (HEAD, STEP, "ValueError: bad shape", *THREAD_RUNS),
        (*MODULE_STEP, "ValueError: bad shape", *FREED, *RUNS),
        *((*MODULE_STEP, "ValueError: bad shape", *abort) for abort in OWN_ABORTS),
    ],
)
def test_an_error_that_was_got_over_is_not_the_cause_of_a_later_abort(lines: tuple[str, ...]) -> None:
    """Nothing shows that the interpreter was ending: the program had caught the error, and printed it.

    What it has written since may be on stdout.
    """
    assert "ValueError" not in judged_at(end_of(0, signum=6), *lines).message


@pytest.mark.parametrize("abort", [FREED, *OWN_ABORTS[:3]])
def test_an_error_that_was_recorded_is_the_cause_whatever_is_printed_at_exit(abort: tuple[str, ...]) -> None:
    lines = (HEAD, STEP, "ValueError: bad shape", "wrote the profile", "closed the logger", *abort)
    one = RankOutput(0, lines, "", "ValueError: bad shape", 0.0)
    end = end_of(0, signum=6)
    assert judged_failure(evidence(end, outputs=(one,)), end, one)[1].message == "ValueError: bad shape"


# ---------------------------------------------------------------------------------- lines below the end of a message


@pytest.mark.parametrize(
    "message",
    [
        "KeyError: 'labels'",
        "IndexError: list index out of range",
        "AttributeError: 'NoneType' object has no attribute 'shape'. Did you mean: 'shapes'?",
        "NameError: name 'modle' is not defined. Did you mean: 'model'?",
        "TypeError: forward() missing 1 required positional argument: 'mask'",
        "ZeroDivisionError: division by zero",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'",
        "ModuleNotFoundError: No module named 'flash_attn'",
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        "saving last.pt failed: [Errno 28] No space left on device",
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "Connection closed by peer [10.0.0.2]:4242",
    ],
)
def test_what_is_printed_below_a_message_of_one_line_is_not_its_cause(message: str, line: str) -> None:
    """Without the rank before each line nothing marks the end of a message; some of Python's own have one line."""
    alone = found_in(*MODULE_STEP, message)
    found = found_in(*MODULE_STEP, message, line)
    assert (found.class_name, found.message, found.advice) == (alone.class_name, alone.message, alone.advice)


@pytest.mark.parametrize(
    "line", ["[mov,mp4,m4a @ 0x55d0c8f3a2c0] moov atom not found", "double free or corruption (out)"]
)
def test_other_programs_lines_below_a_message_give_no_hint(line: str) -> None:
    assert found_in(*MODULE_STEP, "ValueError: bad shape", line).advice == ""


def test_a_message_of_several_lines_is_read_to_its_end() -> None:
    for message in (
        ("KeyError: tensor([1,", "        2])", "Tried to allocate 2.00 GiB: CUDA out of memory"),
        ("KeyError: Caught KeyError in DataLoader worker process 0.", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("RuntimeError: the engine failed:", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ):
        error = find_python_error((*MODULE_STEP, *message))
        assert error is not None
        assert error.last.message == message


# ------------------------------------------------------------------------------------------------- what trackers print


SUMMARY = ("wandb:", "wandb: Run summary:", *(f"wandb:   actor/metric_{number} 0.{number}" for number in range(80)))


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_an_error_above_the_summary_of_wandb_is_what_ended_the_rank(prefix: str) -> None:
    """It has a line for each metric: the rank was said to have ended without a traceback."""
    raised = tuple(f"{prefix}{line}" for line in OOM)
    assert found_in(*raised, *SUMMARY).class_name == "cuda_out_of_memory"
    lost = output(1, *(f"{prefix}{line}" for line in LOST))
    assert verdict(job(output(0, *raised, *SUMMARY), lost)) == ("cuda_out_of_memory", (0,), (1,))


def test_a_lost_peer_above_the_summary_of_wandb_makes_a_victim() -> None:
    found = job(output(0, *(f"[rank0]: {line}" for line in LOST), *SUMMARY), output(1, *OOM))
    assert verdict(found) == ("cuda_out_of_memory", (1,), (0,))


def test_an_error_above_so_many_lines_of_the_program_is_not_what_ended_it() -> None:
    lines = (*OOM, *(f"step {number} loss 0.25" for number in range(80)))
    assert found_in(*lines, *SUMMARY).class_name == "python_exit"


def test_with_another_exit_code_than_an_exceptions_the_summary_counts_as_any_lines() -> None:
    """The program may have caught the error long before."""
    assert found_in(*OOM, *SUMMARY, code=3).class_name == "python_exit"
