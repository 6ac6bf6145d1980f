"""Lines below an error that say nothing of why a rank ends: the verdict stays that of the error."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.causes.reasons import gives_reason, only_ends
from saferun.diagnosis.judged_failures import judged_failure
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, evidence
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
C10D = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'
RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"
OOM = "Error: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB"
RAISED = (HEAD, STEP, "    lr = config['lr']", "KeyError: 'lr'")


def found_in(*lines: str, stdout: tuple[str, ...] = (), code: int = 1, error_message: str = "") -> Cause:
    one = RankOutput(0, lines, "", error_message, 0.0, stdout)
    end = end_of(0, code=code)
    return judged_failure(evidence(end, outputs=(one,)), end, one)[1]


def judged(*lines: str, code: int = 1, stdout: tuple[str, ...] = (), other: tuple[str, ...] = RAISED) -> Diagnosis:
    """Rank 0 ends with these lines, rank 1 a little later with an error."""
    ends = (end_of(0, code=code, at=100.0), end_of(1, code=1, at=100.05))
    outputs = (RankOutput(0, lines, "", "", 0.0, stdout), RankOutput(1, other, "", "", 0.0))
    return diagnose(evidence(*ends, outputs=outputs))


def ranks_of(found: Diagnosis) -> tuple[int, ...]:
    return found.cause.ranks if found.cause is not None else ()


# -------------------------------------------------------------------------------------------------- words of a program

HARMLESS = (
    "Training failed, exiting",
    "Terminating.",
    "Trainer failed",
    "Done.",
    "Goodbye",
    "ERROR",
    "***",
    "Total training time: 0:10:03",
    "Something went wrong!",
    "ERROR: Something went wrong!",
    "Output dir: /runs/12",
    "Consider reducing batch size",
    "Consider a smaller batch size",
    "Try a smaller batch",
    "Peak memory: 78 GiB",
    "See https://pytorch.org/docs/stable/notes/cuda.html",
    "Please increase shared memory of the docker container",
    "Writing crash report to /runs/12/crash.txt",
    "Crash report written.",
    "Sending failure notification",
    "Notification sent",
    "Stopping profiler",
    "Profiler stopped",
    "Final loss: 0.31",
    "Checkpoint is at /ckpt/emergency",
    "Restart with --resume /ckpt/7",
    "error: not enough memory on the GPU",
    "ERROR: lost the connection to another rank, no data",
    "notify.py: error: unrecognized arguments: --channel",
    "exiting because of an unexpected error",
)
ERRORS = (
    (OOM, "cuda_out_of_memory"),
    ("RuntimeError: No CUDA GPUs are available", "missing_gpu"),
    (
        "unable to write to file </torch_123>: No space left on device (28)",
        "shared_memory_exhausted",
    ),
    (f"Error in training loop: {RESET}", "peer_lost"),
    ("ERROR in training: Connection closed by peer [10.0.0.2]:4242", "peer_lost"),
)


@pytest.mark.parametrize("after", HARMLESS)
@pytest.mark.parametrize(("line", "class_name"), ERRORS)
def test_a_line_that_gives_no_reason_hides_no_error(line: str, class_name: str, after: str) -> None:
    assert found_in("step 1", line, after).class_name == class_name
    assert found_in("step 1", line, "Writing crash report", after).class_name == class_name


def test_which_lines_give_none() -> None:
    assert not [line for line in HARMLESS if gives_reason(line)]
    for line in (
        "validation loss is NaN: saving a checkpoint and exiting",
        "ValueError: bad batch",
        "giving up because the labels are missing",
        "ERROR: step 17 has 3 labels for 4 samples",
        "CRITICAL:train:no data below /data",
        "2026-11-26T12:00:00Z ERROR trainer: labels not found",
        "stopping: check --labels",
    ):
        assert gives_reason(line), line


@pytest.mark.parametrize("line", ["Training failed, exiting", "Terminating", "2026-11-26T12:00:00Z training failed"])
def test_a_line_that_begins_with_a_letter_of_a_time_is_whole(line: str) -> None:
    assert only_ends(line)


@pytest.mark.parametrize("line", [line for line, name in ERRORS if name == "peer_lost"])
def test_a_rank_that_reports_a_lost_peer_and_ends_is_no_cause(line: str) -> None:
    found = judged(line, "Total training time: 0:00:03", "Training failed, exiting")
    assert (ranks_of(found), found.victims) == ((1,), (0,))


def test_nor_where_the_other_has_ended_with_code_0() -> None:
    lines = (f"Error in training loop: {RESET}", "Total training time: 0:00:03", "Training failed, exiting")
    ends = (end_of(1, code=0, at=99.0), end_of(0, code=1, at=100.0))
    outputs = (RankOutput(0, lines, "", "", 0.0), RankOutput(1, (), "", "", 0.0))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert (ranks_of(found), found.victims) == ((1,), (0,))


def test_a_warning_of_memory_is_over_where_an_error_of_the_programs_own_follows() -> None:
    line = "| WARNING: ran out of memory with exception: CUDA out of memory. Tried to allocate 2.00 GiB; it is left out"
    assert found_in(line, "step 7", "ERROR: loss is inf, giving up").class_name == "python_exit"
    line = "WARNING:root:CUDA is not available: No CUDA GPUs are available"
    assert found_in(line, "step 7", "ERROR: step 17 has 3 labels for 4 samples").class_name == "python_exit"


def test_what_a_plugin_of_nccl_warns_of_is_not_over_for_any_error_below() -> None:
    line = "WARN: Function: create_nccl_ofi_component Line: 459: NET/OFI Couldn't open AV. RC: -22"
    assert found_in(line, "ERROR: step 17 did not finish").class_name == "nccl_system_error"


# ------------------------------------------------------------------------------------------------------ its own timer

TIMER = "Timeout (0:10:00)!"
STACK = (
    "Thread 0x00007fb44b000b80 (most recent call first):",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2937 in all_reduce',
    '  File "/home/user/job/train.py", line 52 in step',
)
LOADS = (STACK[0], '  File "/home/user/job/data.py", line 9 in load', STACK[2])
STEPS = tuple(f"INFO:train:step {number}00" for number in range(1, 4))
BARS = tuple(f"Training:  {number}%|####5     | {number}/100 [00:02<00:02, 20.0it/s]" for number in range(11, 14))
LOST = tuple(f"[rank1]: {line}" for line in (HEAD, STEP, C10D, f"RuntimeError: {RESET}"))


@pytest.mark.parametrize(
    ("lines", "stdout"),
    [
        ((TIMER, *STACK, *STEPS), ("Loss is nan, stopping training",)),
        ((TIMER, *STACK), ("Loss is nan, stopping training",)),
        ((TIMER, *STACK, *BARS), ()),
        ((TIMER, *LOADS), ()),
    ],
)
def test_a_timer_that_did_not_end_the_rank_or_not_in_a_collective_makes_no_wait(
    lines: tuple[str, ...], stdout: tuple[str, ...]
) -> None:
    found = judged(*lines, stdout=stdout, other=LOST)
    assert (class_of(found), ranks_of(found), found.victims) == ("python_exit", (0,), (1,))


def test_an_error_above_the_timers_report_is_the_reason() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    assert "faulthandler" not in found_in(line, TIMER, *STACK).message


def test_what_a_tracker_prints_below_the_report_is_not_the_program_s() -> None:
    tracker = (
        "/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: 1 leaked objects",
        "  warnings.warn('resource_tracker: There appear to be %d '",
    )
    assert found_in("step 7", TIMER, *STACK, *tracker, stdout=("step 7",)).class_name == "collective_timeout"


# ------------------------------------------------------------------------------------------------ below an exception


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        (("RuntimeError: worker 3 reported", f"ERROR: {RESET}"), "peer_lost"),
        (("RuntimeError: checkpoint could not be written", "ERROR: [Errno 28] No space left on device"), "disk_full"),
    ],
)
def test_an_error_that_a_message_quotes_belongs_to_it(message: tuple[str, ...], class_name: str) -> None:
    assert found_in(HEAD, STEP, *message).class_name == class_name
    assert found_in(HEAD, STEP, message[0], f"CRITICAL{message[1].removeprefix('ERROR')}").class_name == class_name
    assert found_in(HEAD, STEP, message[0], f"INFO{message[1].removeprefix('ERROR')}").class_name == "python_exception"


LOGGED_OOM = (
    "ERROR:train:failed",
    HEAD,
    STEP,
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
)


@pytest.mark.parametrize(
    "after",
    [
        (*(f"INFO:mem:GPU {number}: 70.1 GiB" for number in range(5)), "Try a smaller batch"),
        (*(f"INFO:ckpt:rank 0 shard {number} persisted" for number in range(5)), "Checkpoint is at /ckpt/emergency"),
        (*(f"INFO:dl:worker {number} done" for number in range(5)), "Restart with --resume /ckpt/7"),
        (*(f"INFO Removing temp file {number}" for number in range(5)), "Removed all temp files"),
        (*(f"2026-11-26 12:00:0{number} lr: {number}" for number in range(5)), "Sent notification to slack"),
        (*BARS, "Emergency checkpoint is at /ckpt/7"),
        (*BARS, *BARS, "the last shard is 3"),
        (*STEPS, "ERROR: training failed, exiting"),
    ],
)
def test_how_a_program_tidies_up_hides_no_error(after: tuple[str, ...]) -> None:
    assert found_in(*LOGGED_OOM, *after).class_name == "cuda_out_of_memory"


def test_a_reason_after_steps_still_does() -> None:
    for why in ("ERROR:train:validation loss is NaN", "validation loss is NaN, giving up", "CRITICAL:train:no labels"):
        assert found_in(*LOGGED_OOM, *STEPS, why).class_name == "python_exit"


BOOTSTRAP = '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap'


def test_a_line_of_the_programs_own_is_no_mark_of_a_child() -> None:
    caught = (HEAD, STEP, "OSError: read failed 1")
    found = judged(*caught, "Process exited due to:", HEAD, STEP, C10D, f"RuntimeError: {RESET}")
    assert (ranks_of(found), found.victims) == ((1,), (0,))


@pytest.mark.parametrize(
    "error", ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "ValueError: x"]
)
@pytest.mark.parametrize(
    "before",
    [
        ("ERROR:root:metrics upload", HEAD, STEP, "TimeoutError: x"),
        (HEAD, STEP, "EOFError"),
        (HEAD, STEP, "_queue.Empty"),
    ],
)
def test_a_child_that_fails_of_its_own_is_the_cause(before: tuple[str, ...], error: str) -> None:
    child = ("Process Worker-1:", HEAD, BOOTSTRAP, STEP, error)
    assert found_in(*before, *child).proof == error


def test_a_child_that_lost_its_pipe_below_an_error_that_was_logged_is_still_the_last() -> None:
    for error in ("EOFError", "BrokenPipeError: [Errno 32] Broken pipe"):
        child = ("Process Worker-1:", HEAD, BOOTSTRAP, STEP, error)
        assert found_in(*RAISED, *child).proof == "KeyError: 'lr'"
        assert found_in("ERROR:root:metrics upload", *RAISED, *child).proof.startswith(error[:8])


def test_a_record_is_not_believed_over_a_later_error_of_the_rank() -> None:
    later = (HEAD, STEP, "RuntimeError: gave up")
    assert found_in(*RAISED, *later, error_message="KeyError: 'lr'").message == "RuntimeError: gave up"
    logged = ("ERROR:root:metrics upload", *later)
    assert found_in(*RAISED, *logged, error_message="KeyError: 'lr'").message == "KeyError: 'lr'"


# ---------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("lines", "class_name"),
    [
        (("usage: train.py [-h]", f"train.py: error: could not start: {RESET}"), "peer_lost"),
        (
            ("usage: train.py [-h]", "train.py: error: CUDA out of memory. Tried to allocate 2 GiB"),
            "cuda_out_of_memory",
        ),
        (
            (OOM, "usage: notify.py", "notify.py: error: the following arguments are required: --channel"),
            "cuda_out_of_memory",
        ),
        ((OOM, "usage: train.py [-h]", "train.py: error: unrecognized arguments: --x"), "usage_error"),
        (("usage: tool [-h]", "tool: error: unrecognized arguments: --x"), "usage_error"),
    ],
)
def test_what_a_parser_reports_for_others_is_no_error_of_arguments(lines: tuple[str, ...], class_name: str) -> None:
    assert found_in(*lines, code=2).class_name == class_name


# ------------------------------------------------------------------------------------------------------ last of stderr


@pytest.mark.parametrize(
    "line",
    [
        "WARNING:train:validation loss is NaN for 3 epochs: stopping",
        "train.py:33: UserWarning: no samples left after filtering, exiting",
        "2026-11-26 12:00:00 | WARNING | train:main:9 - dataset is empty, giving up",
        "wandb: ERROR Run initialization has timed out after 90.0 sec.",
    ],
)
def test_a_warning_that_may_be_the_reason_is_shown_beside_stdout(line: str) -> None:
    left_open = "[W1126 12:00:00.1 ProcessGroupNCCL.cpp:1496] Warning: destroy_process_group() was not called"
    for after in ((), ("  warnings.warn('x')",), (left_open,)):
        found = found_in(line, *after, stdout=("epoch 12 done",))
        assert found.message.endswith(f"its last line of output: epoch 12 done; of stderr: {line}")
    assert found_in(left_open, stdout=("epoch 12 done",)).message.endswith("output: epoch 12 done")


# ------------------------------------------------------------------------------------------------- services and names


@pytest.mark.parametrize(
    ("before", "class_name"),
    [
        ("epoch 3: val loss 0.3 (no improvement)", "remote_service_error"),
        ("the loss is above 0.3", "remote_service_error"),
        ("stopping at epoch 3", "python_exit"),
        ("ERROR: no data", "python_exit"),
    ],
)
def test_what_wandb_reports_is_the_cause_unless_the_script_has_ended(before: str, class_name: str) -> None:
    line = "wandb: ERROR Error while calling W&B API: permission denied (<Response [403]>)"
    assert found_in(before, line).class_name == class_name


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        ("AssertionError: all_reduce failed: 'Connection closed by peer [10.0.0.2]:4242'", "peer_lost"),
        (
            "ValueError: broadcast of config failed: RuntimeError('Connection closed by peer [10.0.0.2]:4242')",
            "peer_lost",
        ),
        ("ValueError: bad state RuntimeError('Connection closed by peer [10.0.0.2]:4242')", "peer_lost"),
        ("ValueError: cannot start server on 'tcp://0.0.0.0:5555': 'Address already in use'", "port_in_use"),
        ("ValueError: cannot resolve 'node1': '[Errno -2] Name or service not known'", "name_unknown"),
        ("ValueError: cannot resolve 'node1': 'Name or service not known'", "name_unknown"),
        ("ValueError: 'a' is lost: Connection closed by peer: 'b'", "peer_lost"),
        ("ValueError: tokenizer failed on sample 'recv failed: Connection closed by peer'", "python_exception"),
        ("KeyError: 'it isn't here: Connection closed by peer'", "python_exception"),
    ],
)
def test_what_a_wrapper_quotes_of_its_connection_counts(message: str, class_name: str) -> None:
    found = found_in(HEAD, STEP, message)
    assert found.class_name == class_name
    assert (role_of(found) is Role.VICTIM) is (class_name == "peer_lost")


NO_NAME = (
    "torch.distributed.DistNetworkError: The client socket has failed to connect: The IPv4 network addresses of "
    "(node1, 29500) cannot be retrieved (gai error: -2 - Name or service not known)."
)


def test_an_address_in_another_message_makes_no_service_of_a_host() -> None:
    context = (HEAD, STEP, "OSError: see https://pytorch.org/docs")
    during = "During handling of the above exception, another exception occurred:"
    found = found_in(*context, during, HEAD, STEP, NO_NAME)
    assert found.class_name == "name_unknown"
    assert "MASTER_ADDR" in found.advice


@pytest.mark.parametrize(
    ("pool", "is_outside"),
    [
        ("HTTPConnectionPool(host='etcd.hpc.example.org', port=2379)", False),
        ("HTTPSConnectionPool(host='huggingface.co', port=443)", True),
    ],
)
def test_a_server_with_a_port_of_its_own_is_none_of_the_internet(pool: str, *, is_outside: bool) -> None:
    found = found_in(HEAD, STEP, f"RuntimeError: {pool}: (Caused by: [Errno -2] Name or service not known)")
    assert ("no internet" in found.advice) is is_outside
