"""Errors of destructors, functions at exit, tasks and threads; groups of errors; errors that were warned of."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.lost_peers import stopped_failures
from saferun.diagnosis.pending_cause import is_victim
from saferun.diagnosis.tracebacks import find_python_error
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, evidence
from tests.unit.diagnosis.printed_tracebacks import C10D, HEAD, LOST, RESET, STEP, TIMEOUT, group
from tests.unit.samples import end_of

RAISED = (HEAD, STEP, "KeyError: 'labels'")
DESTRUCTOR = "Exception ignored in: <function Loader.__del__ at 0x7f>"
AT_EXIT = "Error in atexit._run_exitfuncs:"
TASK = ("Task exception was never retrieved", "future: <Task finished name='Task-1' exception=OSError('late')>")
LOCATION = '  File "/opt/venv/lib/python3.11/site-packages/torch/utils/data/dataloader.py", line 1604, in __del__'
LATE = "AssertionError: can only test a child process"
BROKEN_PIPE = "BrokenPipeError: [Errno 32] Broken pipe"
EMPTY = "validation set is empty: 0 rows"
ASIDES = ((DESTRUCTOR,), ("Exception ignored while calling deallocator Loader.__del__:",), (AT_EXIT,), TASK)
CLOSING = tuple(f"INFO closing {what}" for what in ("writers", "loaders", "the store", "the group", "the log"))


def output(rank: int, *lines: str, stdout: tuple[str, ...] = (), failure: tuple[str, ...] = ()) -> RankOutput:
    return RankOutput(rank, lines, "", "", 0.0, stdout, failure=failure)


def found_in(*lines: str, stdout: tuple[str, ...] = (), code: int = 1) -> Cause:
    one, end = output(0, *lines, stdout=stdout), end_of(0, code=code)
    return judged_failure(evidence(end, outputs=(one,)), end, one)[1]


def headline(*lines: str, stdout: tuple[str, ...] = (), code: int = 1) -> str:
    return diagnose(evidence(end_of(0, code=code), outputs=(output(0, *lines, stdout=stdout),))).headline


def judged(*lines: str, stdout: tuple[str, ...] = (), code: int = 1, is_shown: bool = False) -> Diagnosis:
    """Rank 0 failed first; rank 1, which had raised a KeyError, was stopped for it or failed by itself."""
    raised = output(1, *(f"[rank1]: {line}" for line in RAISED))._replace(raised=True)
    other = end_of(1, code=1, at=100.4) if is_shown else end_of(1, signum=15, at=100.4, stopped=True)
    return diagnose(evidence(end_of(0, code=code, at=100.0), other, outputs=(output(0, *lines, stdout=stdout), raised)))


def ranks_of(found: Diagnosis) -> tuple[int, ...]:
    return found.cause.ranks if found.cause is not None else ()


# ---------------------------------------------------------------------------------------- what never ends a process


@pytest.mark.parametrize("head", ASIDES)
@pytest.mark.parametrize("error", [LATE, BROKEN_PIPE, "TypeError: 'NoneType' object is not callable"])
@pytest.mark.parametrize("code", [1, 2, 255])
def test_an_error_at_exit_is_not_why_a_rank_exits(head: tuple[str, ...], error: str, code: int) -> None:
    """Python prints the message of ``sys.exit`` before that."""
    found = found_in(EMPTY, *head, HEAD, LOCATION, error, code=code)
    assert found.class_name == "python_exit"
    assert found.message == f"ended with exit code {code}; its last line of output: {EMPTY}"
    assert found.advice.startswith(f"an error that it printed before need not be the reason: {error}")


def test_nor_are_several_of_them() -> None:
    aside = (DESTRUCTOR, HEAD, LOCATION, LATE)
    found = found_in(EMPTY, *aside, *aside, AT_EXIT, HEAD, LOCATION, BROKEN_PIPE)
    assert found.message == f"ended with exit code 1; its last line of output: {EMPTY}"
    assert found_in(DESTRUCTOR, HEAD, LOCATION, LATE, stdout=("epoch 1", EMPTY)).message.endswith(f"output: {EMPTY}")


def test_an_error_on_stdout_comes_before_one_of_a_destructor() -> None:
    found = found_in(DESTRUCTOR, HEAD, LOCATION, LATE, stdout=("ERROR training failed", *RAISED))
    assert (found.class_name, found.message) == ("python_exception", "KeyError: 'labels'")


def test_where_nothing_else_is_known_it_is_mentioned() -> None:
    found = found_in(DESTRUCTOR, HEAD, LOCATION, LATE)
    assert (found.class_name, found.message) == (
        "python_exit",
        f"ended with exit code 1; its last line of output: {DESTRUCTOR}",
    )
    assert LATE in found.advice


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_rank_that_reports_a_lost_peer_before_a_destructor_fails_is_a_victim(*, is_shown: bool) -> None:
    aside = (DESTRUCTOR, HEAD, '  File "/home/user/job/train.py", line 4, in __del__', "AttributeError: x")
    lines = (f"lost peers: {RESET}", *aside)
    found = judged(*lines, is_shown=is_shown)
    assert (class_of(found), ranks_of(found), found.victims) == ("python_exception", (1,), (0,))
    assert is_victim(evidence(end_of(0, code=1), outputs=(output(0, *lines),)), 0)


def test_a_peer_that_is_lost_at_exit_makes_no_victim_of_a_rank_that_says_why_it_ends() -> None:
    aside = (AT_EXIT, *LOST)
    assert role_of(found_in(EMPTY, *aside)) is Role.CULPRIT
    assert role_of(found_in(*aside, stdout=(EMPTY,))) is Role.CULPRIT
    assert found_in(*aside).class_name == "peer_lost"


def test_a_destructor_does_not_make_a_stopped_rank_a_culprit() -> None:
    lines = (DESTRUCTOR, HEAD, LOCATION, LATE)
    ends = (end_of(0, code=1), end_of(1, signum=15, stopped=True))
    one = evidence(*ends, outputs=(output(0, *LOST), output(1, *lines)._replace(raised=True)))
    assert not list(stopped_failures(one, Hosts(one)))


def test_what_ended_the_rank_is_still_preferred_to_what_it_prints_at_exit() -> None:
    assert found_in(*RAISED, DESTRUCTOR, HEAD, LOCATION, LATE).message == "KeyError: 'labels'"
    thread = ("Exception in thread Thread-1 (poll):", *RAISED)
    assert found_in(*thread, DESTRUCTOR, HEAD, LOCATION, LATE).message.startswith("KeyError: 'labels'")


# ------------------------------------------------------------------------------------------- logged before a shutdown


@pytest.mark.parametrize("code", [1, 2, 255])
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_lost_peer_that_was_logged_before_a_shutdown_makes_a_victim(code: int, *, is_shown: bool) -> None:
    found = judged("ERROR training failed", *LOST, *CLOSING, code=code, is_shown=is_shown)
    assert (class_of(found), ranks_of(found), found.victims) == ("python_exception", (1,), (0,))


@pytest.mark.parametrize("code", [2, 255])
def test_another_error_is_mentioned_then(code: int) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    found = found_in("ERROR training failed", HEAD, STEP, oom, *CLOSING, code=code)
    assert found.class_name == "python_exit"
    assert "no traceback" not in found.message
    assert f"an error that it printed before need not be the reason: {oom}, at train.py:52" in found.advice


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("ERROR training failed", (*CLOSING, "ERROR: validation loss is NaN")),
        ("ERROR lost a rank", (*CLOSING, "ERROR: step 17 has 3 labels for 4 samples")),
        ("WARNING lost a rank, going on", (*CLOSING, "giving up")),
        ("ERROR training failed", tuple(f"INFO step {number}" for number in range(100))),
        ("ERROR lost a rank", tuple(f"INFO step {number} loss 0.1" for number in range(9))),
        ("ERROR lost a rank", tuple(f"step {number} loss 0.1" for number in range(9))),
    ],
)
def test_one_that_it_had_got_over_makes_none_with_another_exit_code(before: str, after: tuple[str, ...]) -> None:
    """As before: with such a code nothing shows that the error has ended it."""
    assert role_of(found_in(before, *LOST, *after, code=255)) is Role.CULPRIT


@pytest.mark.parametrize("is_shown", [False, True])
def test_a_lost_peer_that_was_logged_on_stdout_before_a_shutdown_makes_a_victim(*, is_shown: bool) -> None:
    stdout = ("ERROR training failed", *LOST, *CLOSING, "INFO bye")
    found = judged(stdout=stdout, is_shown=is_shown)
    assert (class_of(found), ranks_of(found), found.victims) == ("python_exception", (1,), (0,))
    assert role_of(found_in("INFO:root:step 7", stdout=stdout)) is Role.VICTIM


@pytest.mark.parametrize(
    ("stderr", "stdout"),
    [
        ((), ("ERROR lost a rank", *LOST, *(f"INFO step {number} loss 0.1" for number in range(9)))),
        ((), ("WARNING lost a rank", *LOST, *CLOSING)),
        ((), ("ERROR lost a rank", *LOST, *CLOSING, "loss is NaN")),
        (("loss is NaN",), ("ERROR lost a rank", *LOST, *CLOSING)),
        ((), ("ERROR lost a rank", *LOST, *(f"step {number} loss 0.1" for number in range(9)))),
        ((), ("ERROR no labels", *RAISED, *CLOSING)),
    ],
)
def test_one_on_stdout_that_it_had_got_over_makes_none(stderr: tuple[str, ...], stdout: tuple[str, ...]) -> None:
    assert found_in(*stderr, stdout=stdout).class_name == "python_exit"


@pytest.mark.parametrize("code", [1, 255])
def test_a_connection_of_any_kind_is_no_lost_peer_there(code: int) -> None:
    reset = ("ERROR upload failed", HEAD, STEP, "ConnectionResetError: [Errno 104] Connection reset by peer")
    assert found_in(stdout=(*reset, *CLOSING), code=code).class_name == "python_exit"
    if code == 255:
        assert found_in(*reset, *CLOSING, code=code).class_name == "python_exit"


# ----------------------------------------------------------------------------------------------------- warned of

WARNED = ("WARNING:root:metrics not sent, going on", HEAD, STEP, "ConnectionError: metrics server refused: 503")


def test_what_a_living_rank_had_warned_of_is_not_the_cause() -> None:
    """It was stopped because others had failed."""
    ends = (end_of(2, code=0, at=99.0), end_of(0, code=1, at=100.0), end_of(1, signum=15, at=101.0, stopped=True))
    outputs = (output(0, *LOST), output(1, *WARNED)._replace(raised=True))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert (class_of(found), ranks_of(found)) == ("early_exit", (2,))


def test_nor_does_it_explain_a_timeout() -> None:
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=15, at=101.0, stopped=True))
    full = ("WARNING:root:cache not written", HEAD, STEP, "OSError: [Errno 28] No space left on device")
    timeout = output(0, HEAD, STEP, C10D, f"RuntimeError: {TIMEOUT}")
    for lines, failure, name in (
        (full, (), "collective_timeout"),
        (("ERROR:root:cache not written", *full[1:]), (), "disk_full"),
        # A line before an exception that ended it may be any.
        (tuple(f"[rank1]: {line}" for line in full), (), "disk_full"),
        (full, ("memory then: process 1 GiB",), "disk_full"),
    ):
        stopped = output(1, *lines, failure=failure)._replace(raised=True)
        assert class_of(diagnose(evidence(*ends, outputs=(timeout, stopped)))) == name, lines


NO_LOCK = ("WARNING:root:could not remove the lock", HEAD, STEP, "FileNotFoundError: [Errno 2] No such file: '/x'")
CRASHED = ("ERROR:root:training crashed", HEAD, STEP, "ValueError: bad batch")


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_an_error_comes_before_a_warning_of_the_clean_up_below_it(stream: str) -> None:
    lines = (*CRASHED, *NO_LOCK)
    found = found_in(*lines) if stream == "stderr" else found_in(stdout=lines)
    assert (found.class_name, found.message) == ("python_exception", "ValueError: bad batch")
    oom = ("ERROR:root:training crashed", HEAD, STEP, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2")
    assert found_in(*oom, "WARNING: could not upload logs", *WARNED[1:]).class_name == "cuda_out_of_memory"
    assert found_in(*CRASHED, *NO_LOCK, *NO_LOCK).message == "ValueError: bad batch"


@pytest.mark.parametrize("code", [1, 255])
@pytest.mark.parametrize("is_shown", [False, True])
def test_a_warning_of_the_clean_up_makes_no_culprit_of_a_victim(code: int, *, is_shown: bool) -> None:
    found = judged("ERROR training failed", *LOST, *NO_LOCK, code=code, is_shown=is_shown)
    assert (class_of(found), ranks_of(found), found.victims) == ("python_exception", (1,), (0,))


@pytest.mark.parametrize(
    "lines",
    [
        # Below the first error the program went on.
        (*CRASHED, *(f"step {number}" for number in range(9)), *NO_LOCK),
        ("INFO:root:retrying", *CRASHED[1:], *NO_LOCK),
        (*CRASHED, "ERROR:root:could not remove the lock", *NO_LOCK[1:]),
        (*CRASHED, NO_LOCK[0], *(f"[rank0]: {line}" for line in NO_LOCK[1:])),
    ],
)
def test_the_last_of_two_errors_is_still_the_cause(lines: tuple[str, ...]) -> None:
    assert found_in(*lines).class_name == "file_missing"


def test_with_another_exit_code_and_lines_below_both_all_is_as_before() -> None:
    oom = ("ERROR:root:training crashed", HEAD, STEP, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2")
    assert found_in(*oom, *NO_LOCK, *CLOSING, code=255).class_name == "cuda_out_of_memory"
    assert found_in(*oom, *NO_LOCK, *CLOSING).class_name == "cuda_out_of_memory"


def test_a_record_shows_that_the_last_one_was_not_caught() -> None:
    end, one = end_of(0, code=1), output(0, *CRASHED, *NO_LOCK, failure=("memory then: process 1 GiB",))
    assert judged_failure(evidence(end, outputs=(one,)), end, one)[1].class_name == "file_missing"


def test_an_error_got_over_does_not_come_before_numbers_that_are_the_reason() -> None:
    reset = ("WARNING:root:metrics not sent", HEAD, STEP, "ConnectionResetError: [Errno 104] Connection reset by peer")
    steps = tuple(f"INFO:root:step {number}" for number in range(2, 8))
    found = found_in(*reset, *steps, "Loss is NaN at step 8, aborting")
    assert (found.class_name, role_of(found)) == ("python_exit", Role.CULPRIT)
    lost = found_in("WARNING:root:lost a rank", *LOST, *steps, "lost another rank, aborting")
    assert role_of(lost) is Role.VICTIM


# ------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_of_a_group_the_first_error_counts(prefix: str) -> None:
    lines = [prefix + line for line in group("ValueError: bad shard 3", "KeyError: 'x'", "ConnectionResetError: reset")]
    found = found_in(*lines)
    assert (found.class_name, found.message) == (
        "python_exception",
        "ValueError: bad shard 3 (1 of 3 errors of an ExceptionGroup)",
    )
    error = find_python_error(lines)
    assert error is not None
    assert error.lines == (HEAD, STEP, "ValueError: bad shard 3")
    assert error.lines_after <= 1
    assert found_in(*lines, code=255).class_name == "python_exception"


def test_a_group_that_begins_with_a_lost_peer_makes_a_victim() -> None:
    found = judged(*group(f"RuntimeError: {RESET}", "KeyError: 'x'"))
    assert (ranks_of(found), found.victims) == ((1,), (0,))


def test_the_only_error_of_a_group_and_one_below_a_group_are_as_ever() -> None:
    assert found_in(*group("ValueError: bad shard 3")).message == "ValueError: bad shard 3"
    lines = (*group("ValueError: a", "ValueError: b"), "going on", *RAISED)
    assert found_in(*lines).message == "KeyError: 'labels'"


def test_of_groups_within_a_group_the_first_error_counts() -> None:
    inner = [
        f"    {line}".replace("    + Exception", "    | Exception") for line in group("KeyError: 'a'", "KeyError: 'b'")
    ]
    lines = [*group("ValueError: first")[:-1], "    +---------------- 2 ----------------", *inner]
    assert found_in(*lines).message.startswith("ValueError: first")


# ------------------------------------------------------------------------------------------------- lines of libraries


@pytest.mark.parametrize(
    "after",
    [
        ("wandb: ", "wandb: 🚀 View run x at: https://wandb.ai/x", "wandb:"),
        ("wandb:",),
        (
            (
                "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. "
                "Disabling parallelism to avoid deadlocks..."
            ),
            "To disable this warning, you can either:",
            "\t- Avoid using `tokenizers` before the fork if possible",
            "\t- Explicitly set the environment variable TOKENIZERS_PARALLELISM=(true | false)",
        ),
        ("🏃 View run calm-1 at: http://mlflow:5000/#/experiments/0", "🧪 View experiment at: http://mlflow:5000/#/x"),
        (
            (
                "E0000 00:00:1732618800.123456    4242 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting "
                "to register factory for plugin cuDNN when one has already been registered"
            ),
        ),
    ],
)
def test_lines_of_libraries_are_no_last_words(after: tuple[str, ...]) -> None:
    lines = tuple(line.rstrip() for line in after)
    for reason in (EMPTY, "Loss is NaN, stop"):
        assert found_in(reason, *lines).message.endswith(f"its last line of output: {reason}")
    assert role_of(found_in(*lines, stdout=(f"lost a peer: {RESET}",))) is Role.VICTIM


# ------------------------------------------------------------------------------------------------------------ threads

THREAD = ("Exception in thread Thread-1 (push):", HEAD, STEP, "ConnectionRefusedError: [Errno 111] Connection refused")
NAN = "loss is nan, aborting"


def test_numbers_that_are_the_reason_come_before_a_threads_error() -> None:
    found = found_in(*THREAD, NAN)
    assert (found.class_name, found.proof, role_of(found)) == ("python_exit", NAN, Role.CULPRIT)
    assert "ConnectionRefusedError" in found.advice
    lost = found_in(THREAD[0], *LOST, "lost another rank: loss is nan, aborting")
    assert role_of(lost) is Role.VICTIM


def test_of_a_threads_error_it_is_said_that_it_ended_a_thread_only() -> None:
    text = headline(*THREAD, stdout=("epoch 5", "early stopping: no improvement for 5 epochs"))
    assert "(it ended a thread only; the process ended with exit code 1)" in text
    assert text.endswith("; its last line of output: early stopping: no improvement for 5 epochs")
