"""Causes of ranks that end with an exit code: what they print on stdout, and errors that they had got over before."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.pending_cause import is_victim
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, evidence
from tests.unit.diagnosis.printed_tracebacks import C10D, HEAD, RESET, STEP, TIMEOUT
from tests.unit.samples import end_of

LOGGED = "[2026-11-26 12:00:00,123][__main__][ERROR] - training failed"
BAR = "Training:  45%|####5     | 45/100 [00:02<00:02, 20.0it/s]"
STEPS = tuple(f"step {number} loss 0.1" for number in range(20))


def output(rank: int, *lines: str, stdout: tuple[str, ...] = (), failure: tuple[str, ...] = ()) -> RankOutput:
    return RankOutput(rank, lines, "", "", 0.0, stdout, failure=failure)


def cause_of_rank(one: RankOutput, code: int = 1) -> Cause:
    end = end_of(one.local_rank, code=code)
    return judged_failure(evidence(end, outputs=(one,)), end, one)[1]


def judged(one: RankOutput, *, is_shown: bool = False) -> Diagnosis:
    """Rank 0 failed first; rank 1, which had raised a KeyError, was stopped for it or failed by itself."""
    raised = output(1, *(f"[rank1]: {line}" for line in (HEAD, STEP, "KeyError: 'labels'")))._replace(raised=True)
    other = end_of(1, code=1, at=100.4) if is_shown else end_of(1, signum=15, at=100.4, stopped=True)
    return diagnose(evidence(end_of(0, code=1, at=100.0), other, outputs=(one, raised)))


# -------------------------------------------------------------------------------------------------------------- stdout


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize(
    "stdout",
    [
        ("epoch 1", f"rank 0 failed: {RESET}"),
        (LOGGED, HEAD, STEP, C10D, f"RuntimeError: {RESET}"),
        ("INFO: step 7", HEAD, STEP, C10D, f"RuntimeError: {RESET}"),
        (LOGGED, HEAD, STEP, C10D, f"RuntimeError: {RESET}", "node1:7:9 [0] NCCL INFO comm 0x1 - Abort COMPLETE"),
    ],
)
@pytest.mark.parametrize("stderr", [(), (BAR,), ("INFO:root:step 7",)])
def test_a_rank_that_reports_on_stdout_that_it_lost_another_is_a_victim(
    stdout: tuple[str, ...], stderr: tuple[str, ...], *, is_shown: bool
) -> None:
    """Loggers of Hydra's and of many examples write there."""
    found = judged(output(0, *stderr, stdout=stdout), is_shown=is_shown)
    assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exception", (1,), (0,))
    assert "KeyError: 'labels'" in found.headline


def test_the_error_of_the_others_is_waited_for_then() -> None:
    one = output(0, stdout=(f"rank 0 failed: {RESET}",))
    assert is_victim(evidence(end_of(0, code=1), outputs=(one,)), 0)
    assert not is_victim(evidence(end_of(0, code=1), outputs=(output(0, stdout=("rank 0 failed: no data",)),)), 0)


def test_a_timeout_on_stdout_is_one() -> None:
    found = cause_of_rank(output(0, stdout=(LOGGED, HEAD, STEP, C10D, f"RuntimeError: {TIMEOUT}")))
    assert (found.class_name, role_of(found), found.location) == (
        "collective_timeout",
        Role.TIMEOUT,
        "train.py:52 in step",
    )


def test_a_traceback_at_the_end_of_stdout_is_the_cause_where_stderr_has_no_words() -> None:
    stdout = (LOGGED, HEAD, STEP, "KeyError: 'labels'")
    assert cause_of_rank(output(0, stdout=("INFO: step 7", *stdout[1:]))).message == "KeyError: 'labels'"
    for stderr in ((), (BAR,), ("[W1126 12:00:00.1 ProcessGroup.cpp:9] Warning: not destroyed",)):
        found = cause_of_rank(output(0, *stderr, stdout=stdout))
        assert (found.class_name, found.message, found.location) == (
            "python_exception",
            "KeyError: 'labels'",
            "train.py:52 in step",
        )


def test_what_stderr_says_comes_before_an_error_on_stdout() -> None:
    """Which of the two streams was written to last is not known."""
    stdout = (LOGGED, HEAD, STEP, "KeyError: 'labels'")
    found = cause_of_rank(output(0, "the loss is worse than the baseline: stopping", stdout=stdout))
    assert found.message == (
        "ended with exit code 1; its last line of output: the loss is worse than the baseline: stopping"
    )
    found = cause_of_rank(output(0, HEAD, STEP, "ValueError: bad batch", stdout=(f"lost a rank: {RESET}",)))
    assert found.message == "ValueError: bad batch"


@pytest.mark.parametrize(
    "stdout",
    [
        (HEAD, STEP, "KeyError: 'cache'", *STEPS),
        ("[2026-11-26 12:00:00,123][__main__][WARNING] - no cache", HEAD, STEP, "KeyError: 'cache'"),
        (f"rank 0: {RESET}; retrying",),
        (f"rank 0: {RESET}", *STEPS),
        ("node1:7:9 [0] transport.cc:9 NCCL WARN Call to recv from 10.0.0.2<1> failed : Connection reset by peer",),
    ],
)
def test_what_a_rank_had_got_over_on_stdout_is_no_cause(stdout: tuple[str, ...]) -> None:
    assert cause_of_rank(output(0, stdout=stdout)).class_name == "python_exit"


OWN = "error: validation loss is NaN at step 100, giving up"
PEER_WORDS = (
    "Connection closed by peer",
    "heartbeat: worker 3 stopped sending heartbeats",
    "gloo: Timed out waiting 1000ms for recv operation to complete",
    "[/x/gloo/transport/tcp/pair.cc:9] Connection closed by peer [10.0.0.2]:9",
    "sample: the node crashed and the other process died",
)


@pytest.mark.parametrize("words", PEER_WORDS)
@pytest.mark.parametrize("is_on_stdout", [False, True])
def test_a_program_s_own_last_words_come_before_words_about_a_peer(words: str, *, is_on_stdout: bool) -> None:
    """It had printed the others before, on stdout: a rank that says itself why it gives up is no victim."""
    if is_on_stdout:
        one = output(0, stdout=("step 1", words, "step 2", OWN))
    else:
        one = output(0, OWN, stdout=("step 1", words, "step 2"))
    found = judge_with_victim(one)
    assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exit", (0,), (1,))
    assert OWN in found.headline


def judge_with_victim(one: RankOutput) -> Diagnosis:
    """Rank 1 lost rank 0, 0.3 s after that one had ended."""
    lost = output(1, *(f"[rank1]: {line}" for line in (HEAD, STEP, C10D, f"RuntimeError: {RESET}")))
    return diagnose(evidence(end_of(0, code=1, at=100.0), end_of(1, code=1, at=100.3), outputs=(one, lost)))


def test_a_lost_peer_in_a_traceback_on_stdout_counts_whatever_stderr_says() -> None:
    for before, role in ((LOGGED, Role.VICTIM), ("WARNING: no peer, going on", Role.CULPRIT)):
        one = output(0, OWN, stdout=(before, HEAD, STEP, C10D, f"RuntimeError: {RESET}"))
        assert role_of(cause_of_rank(one)) is role


@pytest.mark.parametrize(
    "stdout",
    [
        (
            "step 1",
            f"failed: {RESET}",
            "Exception raised from recv at pair.cc:9 (most recent call first):",
            "frame #0: x",
        ),
        ("step 1", "╭─ Traceback ─╮", "│ train.py:9 │", "╰─────────────╯", f"RuntimeError: {RESET[:90]}", RESET[90:]),
        ("step 1", f"failed: {RESET}", "[W1126 12:00:00.1 ProcessGroup.cpp:9] Warning: not destroyed"),
    ],
)
def test_what_belongs_to_a_message_or_gives_no_reason_may_follow_it_on_stdout(stdout: tuple[str, ...]) -> None:
    assert role_of(cause_of_rank(output(0, stdout=stdout))) is Role.VICTIM


def test_plain_words_about_another_process_count_of_a_library_alone() -> None:
    assert cause_of_rank(output(0, "sample: the other process died")).class_name == "python_exit"
    assert cause_of_rank(output(0, "gloo: another process died")).class_name == "peer_lost"


# ---------------------------------------------------------------------------------------------- errors got over before


@pytest.mark.parametrize(
    "before", ["WARNING:root:no cache, building it", "Exception in thread Thread-1 (poll):", "WARNING:root:no cache"]
)
def test_an_error_far_before_the_last_words_need_not_be_the_cause(before: str) -> None:
    lines = (before, HEAD, STEP, "OSError: [Errno 28] No space left on device", *STEPS, "Error: 8 GPUs are needed")
    found = cause_of_rank(output(0, *lines))
    assert (found.class_name, found.message) == (
        "python_exit",
        "ended with exit code 1; its last line of output: Error: 8 GPUs are needed",
    )
    assert found.advice == (
        "an error that it printed before need not be the reason: OSError: [Errno 28] No space left on device, at "
        "train.py:52 in step"
    )


def test_an_exception_that_the_hook_has_recorded_is_the_cause_whatever_follows() -> None:
    lines = ("WARNING:root:no cache", HEAD, STEP, "KeyError: 'cache'", *STEPS)
    assert cause_of_rank(output(0, *lines)).class_name == "python_exit"
    assert cause_of_rank(output(0, *lines, failure=("memory then: process 1 GiB",))).message == "KeyError: 'cache'"
    marked = [f"[rank0]: {line}" for line in lines[1:4]]
    assert cause_of_rank(output(0, lines[0], *marked, *STEPS)).message == "KeyError: 'cache'"


@pytest.mark.parametrize(
    "after",
    [
        (),
        tuple(f"wandb: {number}" for number in range(9)),
        tuple(f"INFO:root:saving {number}" for number in range(9)),
        ("/x/y.py:7: UserWarning: there were leaked objects", *("  warnings.warn('leaked')",) * 5),
    ],
)
def test_what_programs_print_at_exit_makes_no_doubt(after: tuple[str, ...]) -> None:
    one = output(0, "ERROR:root:training failed", HEAD, STEP, "KeyError: 'labels'", *after)
    found = diagnose(evidence(end_of(0, code=1), outputs=(one,)))
    assert found.headline.endswith("KeyError: 'labels', at train.py:52 in step; exit code 1")


def test_words_after_an_error_are_shown_with_it() -> None:
    """A traceback that the script had printed itself may be one that it got over."""
    one = output(0, HEAD, STEP, "KeyError: 'cache'", *STEPS, "the loss is worse: stopping")
    found = diagnose(evidence(end_of(0, code=1), outputs=(one,)))
    assert found.headline.endswith(
        "KeyError: 'cache', at train.py:52 in step; its last line of output: the loss is worse: stopping; exit code 1"
    )


def test_a_thread_that_lost_another_rank_still_makes_a_victim() -> None:
    """The main thread ends because of it, in words of its own."""
    lines = ("Exception in thread Thread-1 (recv):", HEAD, STEP, C10D, f"RuntimeError: {RESET}", *STEPS, "giving up")
    found = judged(output(0, *lines))
    assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exception", (1,), (0,))


IN_DESTRUCTOR = (
    "Exception ignored in: <function Pool.__del__ at 0x7f>",
    HEAD,
    '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 268, in __del__',
    "    self._change_notifier.put(None)",
    "AttributeError: 'NoneType' object has no attribute 'put'",
)
AT_EXIT = ("closing files", "saving the state", "final statistics: 3 4", "elapsed 12 s", "bye")
STARTS = "2026-01-01 12:00:00 INFO trainer: starting step 100"


@pytest.mark.parametrize("before", [STARTS, "DEBUG:root:step 7", "WARNING:root:slow"])
@pytest.mark.parametrize("after", [IN_DESTRUCTOR, (*IN_DESTRUCTOR, *IN_DESTRUCTOR), AT_EXIT])
def test_a_log_line_before_an_exception_and_words_at_exit_do_not_hide_it(before: str, after: tuple[str, ...]) -> None:
    found = judge_with_victim(output(0, before, HEAD, STEP, "KeyError: 'labels'", *after))
    if before.startswith("WARNING") and after is AT_EXIT:
        assert class_of(found) == "python_exit"
        assert found.cause is not None
        assert "an error that it printed before need not be the reason: KeyError: 'labels'" in found.cause.advice
    else:
        assert (class_of(found), found.cause and found.cause.ranks) == ("python_exception", (0,))
        assert "KeyError: 'labels'" in found.headline


@pytest.mark.parametrize("before", [STARTS, "WARNING:root:slow"])
def test_nor_do_they_hide_that_it_lost_another_rank(before: str) -> None:
    found = judged(output(0, before, HEAD, STEP, C10D, f"RuntimeError: {RESET}", *AT_EXIT))
    assert (found.cause and found.cause.ranks, found.victims) == ((1,), (0,))


def test_words_after_a_destructors_traceback_are_the_programs_own() -> None:
    lines = ("WARNING:root:no cache", HEAD, STEP, "KeyError: 'x'", *IN_DESTRUCTOR, *STEPS, "Error: 8 GPUs are needed")
    assert cause_of_rank(output(0, *lines)).message.endswith("Error: 8 GPUs are needed")


@pytest.mark.parametrize(
    ("lines", "class_name"),
    [
        (
            (
                "ERROR - CUDA error: an illegal memory access was encountered",
                "ERROR - cleanup failed: AttributeError: x",
            ),
            "cuda_illegal_memory_access",
        ),
        (
            (
                "CUDA error: an illegal memory access was encountered",
                "AttributeError: 'NoneType' object has no attribute 'x'",
            ),
            "cuda_illegal_memory_access",
        ),
        (
            ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "ValueError: cannot continue"),
            "cuda_out_of_memory",
        ),
        ((f"ERROR - training failed: {RESET}", "ERROR - cleanup failed: AttributeError: x"), "peer_lost"),
        ((f"training failed: {RESET}", "ValueError: cannot continue"), "peer_lost"),
    ],
)
def test_an_error_that_follows_from_a_fault_does_not_hide_it(lines: tuple[str, ...], class_name: str) -> None:
    assert cause_of_rank(output(0, *lines)).class_name == class_name


# ------------------------------------------------------------------------------------------------------- got-over words


@pytest.mark.parametrize(
    "lines",
    [
        ("WARNING:root:CUDA out of memory at batch size 64, trying 8", "giving up"),
        ("WARNING:root:CUDA out of memory at batch size 64, trying 32", "giving up"),
        ("CUDA out of memory, halving the batch size to 32", "epoch 3 done", "validation failed: 0.1"),
        ("CUDA out of memory; reducing batch size", "validation failed: 0.1"),
        ("Connection closed by peer; will try again in 5 s", "epoch 3 done", "stopping"),
        ("CUDA out of memory", "main: ValueError: no such optimizer: adan"),
    ],
)
def test_words_of_an_error_that_the_script_got_over_are_no_cause(lines: tuple[str, ...]) -> None:
    assert cause_of_rank(output(0, *lines)).class_name == "python_exit"


@pytest.mark.parametrize(
    "lines",
    [
        ("CUDA out of memory. Try reducing the batch size.",),
        ("CUDA out of memory. Consider halving the batch size to 32",),
        ("CUDA out of memory. Reducing the batch size may help",),
        ("CUDA out of memory", "Error: training failed"),
        ("RuntimeError: CUDA out of memory",),
        ("torch.OutOfMemoryError: CUDA out of memory; reducing batch size and x",),
        ("step 7", "CUDA out of memory; reducing batch size", BAR),
    ],
)
def test_advice_is_no_word_of_an_error_got_over(lines: tuple[str, ...]) -> None:
    assert cause_of_rank(output(0, *lines)).class_name == "cuda_out_of_memory"


# --------------------------------------------------------------------------------------------------------------- Hydra

HYDRA = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (
            ("Could not override 'model.foo'.", "To append use +model.foo=1", "Key 'foo' is not in struct", "    a: b"),
            "Could not override 'model.foo'.",
        ),
        (("Primary config directory not found.", "Check that the config directory exists"), "Primary config directory"),
        (("In 'config': Could not find 'db/foo'", "", "Available options in 'db':", "\tmysql"), "In 'config': Could"),
        (
            (
                "Error executing job with overrides: ['a=1']",
                "Error in call to target 'torch.nn.Linear':",
                "TypeError('bad')",
            ),
            "Error in call to target 'torch.nn.Linear': TypeError('bad')",
        ),
    ],
)
def test_of_hydras_errors_the_first_line_is_quoted(lines: tuple[str, ...], why: str) -> None:
    found = cause_of_rank(output(0, "train.py:7: UserWarning: version_base", *lines, HYDRA))
    assert found.message.startswith(f"ended with exit code 1; Hydra reports: {why}")
    assert found.advice.startswith("look at the configuration and at the overrides")


def test_a_line_of_a_list_is_not_the_last_line_of_output() -> None:
    found = cause_of_rank(output(0, "these options are missing:", "  data.path", "  data.size"))
    assert found.message.endswith("its last line of output: these options are missing:")
    found = cause_of_rank(output(0, "  indented"))
    assert found.message.endswith("its last line of output: indented")


def test_a_traceback_that_hydra_shortens_is_read_as_ever() -> None:
    found = cause_of_rank(output(0, "Error executing job with overrides: []", HEAD, STEP, "KeyError: 'x'", HYDRA))
    assert found.message == "KeyError: 'x'"


# ------------------------------------------------------------------------------------- an error that the script caught

CAUGHT = (HEAD, STEP, "ValueError: bad batch")
IN_DOUBT = "ValueError: bad batch (printed before its last lines; it may not be why the process ended with exit code 5)"


def test_an_error_after_which_a_script_went_on_is_not_claimed_to_have_ended_it() -> None:
    """The code is the script's own, and nothing shows how long it went on."""
    found = cause_of_rank(output(0, *CAUGHT, "recovered"), code=5)
    assert (found.class_name, found.message, found.location) == ("python_exception", IN_DOUBT, "train.py:52 in step")


@pytest.mark.parametrize(
    ("one", "code"),
    [
        (output(0, *CAUGHT), 5),
        (output(0, *CAUGHT, "recovered"), 1),
        (output(0, *CAUGHT, "recovered", failure=("locals of step (train.py:52): n = 3",)), 5),
        (output(0, *(f"[rank0]: {line}" for line in CAUGHT), "closing the log"), 5),
    ],
)
def test_an_error_that_ends_the_output_or_is_recorded_is_the_cause(one: RankOutput, code: int) -> None:
    assert cause_of_rank(one, code=code).message.startswith("ValueError: bad")
    assert "may not be why" not in cause_of_rank(one, code=code).message
