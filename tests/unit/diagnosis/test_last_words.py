"""Ranks that exit: their own last words come before what they had got over, and warnings are no last words."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.diagnosis.causes.reasons import gives_reason
from saferun.diagnosis.judged_failures import judged_failure
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import Capture, RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, dump_of, evidence
from tests.unit.diagnosis.test_timeouts import SLEEPS
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
C10D = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'
RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"
OWN = "ERROR: validation loss is NaN at step 100, giving up"
NAN = "Loss is nan, stopping training"
LEFT_OPEN = (
    "[W1126 12:00:00.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called before "
    "program exit, which can leak resources."
)
MESHGRID = (
    (
        "/opt/venv/lib/python3.11/site-packages/torch/functional.py:504: UserWarning: torch.meshgrid: in an upcoming "
        "release, it will be required to pass the indexing argument."
    ),
    "  return _VF.meshgrid(tensors, **kwargs)",
)


def output(rank: int, *lines: str, stdout: tuple[str, ...] = ()) -> RankOutput:
    return RankOutput(rank, lines, "", "", 0.0, stdout)


def found_in(*lines: str, stdout: tuple[str, ...] = (), code: int = 1) -> Cause:
    one = output(0, *lines, stdout=stdout)
    end = end_of(0, code=code)
    return judged_failure(evidence(end, outputs=(one,)), end, one)[1]


def test_a_rank_that_has_printed_nothing_gets_no_advice() -> None:
    """Where it ended is not known, and everybody knows that a program can call sys.exit."""
    found = found_in(code=3)
    assert (found.class_name, found.message) == ("python_exit", "ended with exit code 3 and no message")
    assert not found.advice
    assert not diagnose(evidence(end_of(0, code=3), outputs=(output(0),))).hint


# ------------------------------------------------------------------------------------------ which line is the last one


@pytest.mark.parametrize("stderr", [MESHGRID, (LEFT_OPEN,), (*MESHGRID, LEFT_OPEN)])
def test_a_warning_on_stderr_does_not_hide_the_last_words_on_stdout(stderr: tuple[str, ...]) -> None:
    found = found_in(*stderr, stdout=("epoch 1", NAN))
    beside = f"; of stderr: {MESHGRID[0][:119]}…" if stderr[0] == MESHGRID[0] else ""
    assert found.message == f"ended with exit code 1 and no traceback; its last line of output: {NAN}{beside}"
    assert found.proof == NAN


@pytest.mark.parametrize(("count", "length"), [(200, 40), (100, 640)])
def test_where_earlier_lines_of_stderr_are_not_known_only_the_last_ones_have_no_traceback(
    count: int, length: int
) -> None:
    """A message of 288 lines ("size mismatch for …") had pushed out the beginning of its traceback."""
    lines = tuple(f"size mismatch for layer {number}".ljust(length, ".") for number in range(count))
    expected = f"ended with exit code 1 and no traceback in the last {count} lines of its stderr; its last line"
    assert found_in(*lines).message.startswith(expected)
    assert found_in(*lines[:50]).message.startswith("ended with exit code 1 and no traceback; its last line")


def test_ranks_that_wrote_more_and_less_and_then_ended_with_the_same_words_failed_alike() -> None:
    more = tuple(f"step {number} loss 0.25" for number in range(199))
    ends = (end_of(0, code=1), end_of(1, code=1))
    found = diagnose(evidence(*ends, outputs=(output(0, *more, OWN), output(1, OWN))))
    assert "no traceback in the last 200 lines of its stderr" in found.headline
    assert found.headline.endswith("rank 1 failed in the same way")


@pytest.mark.parametrize("after", [(LEFT_OPEN,), MESHGRID, ("INFO:root:closing the log",)])
def test_a_warning_does_not_hide_the_last_words_on_stderr_either(after: tuple[str, ...]) -> None:
    found = found_in("ERROR: loss is NaN, giving up", *after, stdout=("step 7",))
    assert found.message.endswith("its last line of output: ERROR: loss is NaN, giving up")


def test_a_log_line_that_may_be_the_reason_is_shown_beside_the_words_on_stdout() -> None:
    found = found_in("INFO:root:loss is NaN, stopping", stdout=("step 7 loss nan",))
    assert found.message.endswith(
        "its last line of output: step 7 loss nan; of stderr: INFO:root:loss is NaN, stopping"
    )


def test_where_there_are_but_warnings_the_last_is_shown() -> None:
    assert found_in(*MESHGRID).message.endswith(MESHGRID[0][-30:] if len(MESHGRID[0]) < 160 else "…")
    assert found_in(LEFT_OPEN).proof == LEFT_OPEN
    found = found_in("run.sh: line 3: foo: command not found", stdout=("step 7",), code=127)
    assert found.message == "exit code 127: run.sh: line 3: foo: command not found"


# --------------------------------------------------------------------------------------------- what had been got over

GOT_OVER = (
    "WARNING:feature-store: Connection closed by peer, opened a new one",
    "ssh: connect to host logger port 22: Connection timed out",
    "| WARNING: ran out of memory with exception: CUDA out of memory. Tried to allocate 2.00 GiB; it is left out",
    (
        "2026-11-26 12:00:00.1: E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to "
        "cuInit: INTERNAL: CUDA error: Failed call to cuInit: UNKNOWN ERROR (303)"
    ),
    "WARNING:root:CUDA is not available: No CUDA GPUs are available",
    "No CUDA GPUs are available for the renderer; rendering on the CPU",
    "cp: error writing '/tmp/x': No space left on device",
    "make: *** [Makefile:3: helpers_cpp.so] Error 127",
    "FATAL: could not listen on port 6006: Address already in use",
    "Waiting for checkpoint: shared memory (shm) cache is warm",
)


@pytest.mark.parametrize("line", GOT_OVER)
@pytest.mark.parametrize("between", [(), ("step 1 loss 0.1", "step 2 loss 0.1")])
def test_a_line_that_a_reason_of_the_programs_own_follows_is_no_cause(line: str, between: tuple[str, ...]) -> None:
    found = found_in(line, *between, OWN)
    assert (found.class_name, found.proof) == ("python_exit", OWN)


def test_the_rank_with_such_a_line_is_the_culprit() -> None:
    words = "validation loss is NaN, giving up"
    lost = output(1, *(f"[rank1]: {line}" for line in (HEAD, STEP, C10D, f"RuntimeError: {RESET}")))
    ends = (end_of(0, code=1, at=100.0), end_of(1, code=1, at=100.3))
    found = diagnose(evidence(*ends, outputs=(output(0, GOT_OVER[0], words), lost)))
    assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exit", (0,), (1,))
    assert words in found.headline


ARGPARSE = "train.py: error: unrecognized arguments: --learning-rate 0.1"


@pytest.mark.parametrize("line", [GOT_OVER[3], GOT_OVER[4]])
@pytest.mark.parametrize(
    "words",
    [
        ("usage: train.py [-h] [--lr LR]", ARGPARSE),
        (ARGPARSE,),
        ("Usage: train.py [OPTIONS]", "Try 'train.py --help' for help.", "Error: No such option: --learning-rate"),
    ],
)
def test_what_a_parser_of_arguments_says_last_is_the_cause(line: str, words: tuple[str, ...]) -> None:
    assert found_in(line, *words, LEFT_OPEN, code=2).class_name == "usage_error"


def test_an_error_of_a_tool_that_ends_with_2_is_none_of_arguments() -> None:
    assert found_in("srun: error: Unable to allocate resources: Invalid account", code=2).class_name == (
        "scheduler_error"
    )
    assert found_in("cp: error writing '/data/x': No space left on device", code=2).class_name == "disk_full"


LAST = (
    "CUDA out of memory. Tried to allocate 2.00 GiB",
    "RuntimeError: No CUDA GPUs are available",
    "cp: error writing '/tmp/x': No space left on device",
    "make: *** [Makefile:3: helpers_cpp.so] Error 127",
    "FATAL: could not listen on port 6006: Address already in use",
    "Connection closed by peer",
)
CLOSING = (
    "giving up",
    "rank 3 failed at step 17 of epoch 2",
    "ERROR: training failed, exiting",
    "ERROR:root:the job failed on rank 3; see the log above",
    "[2026-11-26 12:00:00,123][__main__][ERROR] - training failed",
    "2026-11-26 12:00:00 ERROR trainer: exiting with code 1",
    "saving an emergency checkpoint to /data/step7.pt",
    "run.sh: line 3: 4711 Aborted                 python train.py",
    "srun: error: n1: task 0: Exited with exit code 1",
    "make: *** [Makefile:9: train] Error 1",
    LEFT_OPEN,
)


@pytest.mark.parametrize("line", LAST)
@pytest.mark.parametrize("after", CLOSING)
def test_words_that_say_no_more_than_that_it_ends_hide_nothing(line: str, after: str) -> None:
    found = found_in("step 1", line, after).class_name
    assert found == found_in("step 1", line).class_name != "python_exit"


def test_which_words_say_why() -> None:
    assert not any(map(gives_reason, CLOSING[:-1]))
    assert all(map(gives_reason, (OWN, NAN, "error: no data below /data", "ValueError: bad batch")))
    assert gives_reason("validation loss is NaN: saving a checkpoint and exiting")


@pytest.mark.parametrize(
    "line",
    [
        f"training failed: {RESET}",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: an illegal memory access was encountered",
    ],
)
@pytest.mark.parametrize("after", ["rank 3: the batch 17 could not be reduced", "Error at step 7 of the last shard"])
def test_what_torch_reports_may_be_followed_by_one_line_of_the_programs_own(line: str, after: str) -> None:
    """A script that catches the exception, prints it, and adds something."""
    assert found_in("step 1", line, after).class_name == found_in("step 1", line).class_name != "python_exit"
    assert found_in("step 1", line, "step 2", OWN).class_name == "python_exit"


def test_a_rank_that_lost_another_and_tidies_up_is_still_a_victim() -> None:
    assert role_of(found_in("Socket recv error", "ERROR: could not reach the other ranks")) is Role.VICTIM
    lines = (f"rank 3: {RESET}", "saving an emergency checkpoint", "saved step 7 in 2 s", "closing the log", "exiting")
    assert role_of(found_in(*lines)) is Role.VICTIM


def test_what_torchs_threads_log_counts_whatever_the_main_thread_has_still_printed() -> None:
    watchdog = (
        "[E1126 12:00:00.1 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
    )
    assert found_in(watchdog, "saving a checkpoint", "saved step 7", "rank 3 gives up at step 7").class_name == (
        "nccl_timeout"
    )


def test_a_message_of_several_lines_is_read_to_its_end() -> None:
    lines = (
        "CUDA error: device-side assert triggered",
        (
            "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
            "might be incorrect."
        ),
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    )
    assert found_in(*lines, "training failed").class_name == "device_side_assert"


# --------------------------------------------------------------------------------------- an exit that follows from one

OF_THE_SCRIPT = (HEAD, STEP, "    self.data.recv()", "ConnectionResetError: [Errno 104] Connection reset by peer")


def judged(
    words: str,
    *,
    at: float = 114.0,
    lost: tuple[str, ...] = OF_THE_SCRIPT,
    stdout: tuple[str, ...] = (f"step 7 failed: {RESET}",),
    code: int = 1,
) -> Diagnosis:
    """Rank 2 lost a data server; rank 1 exits with a code and these words, after that or before."""
    ends = (end_of(2, code=1, at=100.0), end_of(1, code=code, at=at), end_of(0, code=1, at=at + 0.5))
    victim = output(0, HEAD, STEP, C10D, f"RuntimeError: {RESET}")
    outputs = (victim, output(1, *filter(None, (words,)), stdout=stdout), output(2, *lost))
    return diagnose(evidence(*ends, outputs=outputs))


@pytest.mark.parametrize("words", ["training failed on this rank, shutting down", "giving up"])
def test_an_exit_without_a_reason_does_not_hide_an_earlier_error_of_another_rank(words: str) -> None:
    found = judged(words)
    assert (class_of(found), found.cause and found.cause.ranks) == ("connection_lost", (2,))
    assert "ConnectionResetError: [Errno 104] Connection reset by peer, at train.py:52 in step" in found.headline
    assert found.victims == (0, 1)


@pytest.mark.parametrize("words", ["training failed on this rank, shutting down", "Aborting", ""])
def test_a_rank_that_does_not_say_that_it_lost_another_may_have_been_the_first(words: str) -> None:
    """Its connections are closed while it ends."""
    for at in (100.6, 104.9, 114.0):
        found = judged(words, at=at, stdout=())
        assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exit", (1,), (0, 2))


def test_nor_is_one_a_victim_that_ends_soon_after_or_with_a_code_of_its_own() -> None:
    assert class_of(judged("Aborting", at=104.9)) == "python_exit"
    assert class_of(judged("Aborting", code=3)) == "python_exit"


def test_an_exit_with_a_reason_does_and_one_that_came_first_does() -> None:
    """A rank that gives up may close what others had been connected to before it has ended."""
    assert class_of(judged("validation loss is NaN, giving up")) == "python_exit"
    assert class_of(judged("training failed", at=99.9)) == "python_exit"
    assert class_of(judged("training failed", at=100.2)) == "python_exit"
    of_torch = (HEAD, STEP, C10D, "RuntimeError: Connection reset by peer")
    assert class_of(judged("training failed", lost=of_torch)) == "python_exit"


# ----------------------------------------------------------------------------------------------- words that are quoted


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        ("ValueError: cannot parse the sample 'sshd: Connection closed by peer 10.0.0.1 port 22'", "python_exception"),
        (
            "RuntimeError: tokenizer failed on sample 'urlopen error [Errno -2] Name or service not known'",
            "python_exception",
        ),
        ('AssertionError: the log has the line "Address already in use"', "assertion_error"),
        ("KeyError: 'Connection closed by peer'", "python_exception"),
        ('RuntimeError: bad line 17: "recv failed: Connection closed by peer" (train.txt)', "python_exception"),
    ],
)
def test_what_an_exception_quotes_of_the_data_is_not_what_happened(message: str, class_name: str) -> None:
    found = found_in(HEAD, STEP, message)
    assert (found.class_name, role_of(found)) == (class_name, Role.CULPRIT)


URLLIB = '  File "/usr/lib/python3.11/urllib/request.py", line 1348, in do_open'


@pytest.mark.parametrize(
    ("lines", "class_name"),
    [
        ((STEP, C10D, "ValueError: the store says 'Connection closed by peer'"), "peer_lost"),
        ((STEP, URLLIB, "ValueError: 'Name or service not known'"), "name_unknown"),
        ((STEP, "ValueError: host not found: Name or service not known"), "name_unknown"),
        ((STEP, f"ValueError: step failed: RuntimeError('{RESET}')"), "peer_lost"),
        ((STEP, f"RuntimeError: {RESET}"), "peer_lost"),
        ((STEP, "OSError: [Errno 98] Address already in use"), "port_in_use"),
        ((STEP, "RuntimeError: cannot serve 'metrics': Address already in use"), "port_in_use"),
    ],
)
def test_what_a_library_that_connects_says_is(lines: tuple[str, ...], class_name: str) -> None:
    assert found_in(HEAD, *lines).class_name == class_name


# ----------------------------------------------------------------------------------------- names of services elsewhere

HUB = (
    HEAD,
    '  File "/opt/venv/lib/python3.11/site-packages/urllib3/connection.py", line 205, in _new_conn',
    (
        "urllib3.exceptions.NameResolutionError: <urllib3.connection.HTTPSConnection object at 0x7f>: Failed to "
        "resolve 'huggingface.co' ([Errno {number}] {text})"
    ),
    "During handling of the above exception, another exception occurred:",
    HEAD,
    STEP,
    (
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the "
        "cached files."
    ),
)


@pytest.mark.parametrize(
    ("number", "text", "class_name"),
    [
        ("-2", "Name or service not known", "name_unknown"),
        ("-3", "Temporary failure in name resolution", "name_resolution"),
    ],
)
def test_a_host_without_internet_is_not_sent_to_its_own_names(number: str, text: str, class_name: str) -> None:
    found = found_in(*(line.format(number=number, text=text) for line in HUB))
    assert found.class_name == class_name
    assert "huggingface.co" in found.message
    assert "download once before the job" in found.advice
    assert "HF_HUB_OFFLINE=1" in found.advice
    assert "MASTER_ADDR" not in found.advice


@pytest.mark.parametrize(
    "message",
    [
        "RuntimeError: http://node0:8000/join: Name or service not known",
        (
            "requests.exceptions.ConnectionError: HTTPConnectionPool(host='node0.cluster.local', port=8000): Max "
            "retries exceeded (Caused by: [Errno -2] Name or service not known)"
        ),
        "socket.gaierror: [Errno -2] Name or service not known",
    ],
)
def test_a_name_of_the_clusters_own_is_still_looked_for_there(message: str) -> None:
    """Which name it is only the script knows: nothing shows that it is the one of the store's host."""
    advice = found_in(HEAD, STEP, message).advice
    assert advice.startswith("look at that name, and whether this host knows it (getent hosts NAME)")
    assert "/etc/resolv.conf" in advice
    assert "MASTER_ADDR" not in advice


UNKNOWN_NAME = "socket.gaierror: [Errno -2] Name or service not known"
RENDEZVOUS = (
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/rendezvous.py", line 191, in _create_store'
)
CHECKPOINT = (
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/checkpoint/_fsspec.py", line 44, in create'
)


def test_a_name_that_cannot_be_looked_up_is_the_stores_where_torch_meets_the_ranks() -> None:
    assert "MASTER_ADDR" in found_in(HEAD, STEP, RENDEZVOUS, UNKNOWN_NAME).advice
    other = found_in(HEAD, STEP, CHECKPOINT, UNKNOWN_NAME)
    assert "MASTER_ADDR" not in other.advice
    assert other.message == f"a host's name is not known ({UNKNOWN_NAME})"


def test_an_exception_that_has_the_name_is_not_quoted_as_well() -> None:
    found = found_in(HEAD, STEP, "ConnectionError: Failed to resolve 'node7' ([Errno -2] Name or service not known)")
    assert found.message == "a host's name is not known: node7"


# --------------------------------------------------------------------------------------------------- a timer of its own

TIMER = "Timeout (0:00:30)!"
THREADS = (
    "Thread 0x00007fb44a853b80 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
    "Thread 0x00007fb44b000b80 (most recent call first):",
    '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2937 in all_reduce',
    '  File "/home/user/job/train.py", line 52 in step',
    '  File "/home/user/job/train.py", line 80 in <module>',
)
NAMED_THREADS = tuple(line.replace(" (most", " [python3] (most") for line in THREADS)


@pytest.mark.parametrize(
    ("timer", "threads", "lasted"),
    [
        (TIMER, THREADS, "30 s"),
        ("Timeout (0:01:02.500000)!", NAMED_THREADS, "62.5 s"),
        (TIMER, (*THREADS[:2], *THREADS[3:]), "30 s"),
    ],
)
def test_a_rank_that_its_own_timer_ended_waited(timer: str, threads: tuple[str, ...], lasted: str) -> None:
    found = found_in("step 7", timer, *threads)
    assert found.message == f"its own timer (faulthandler) ended it after {lasted}"
    assert (role_of(found), found.location) == (Role.TIMEOUT, "train.py:52 in step")


def test_the_rank_that_did_not_come_is_blamed_for_that() -> None:
    ends = (end_of(0, code=1, at=100.0), end_of(1, signum=15, at=100.4, stopped=True))
    facts = evidence(*ends, outputs=(output(0, TIMER, *THREADS),))
    found = diagnose(facts._replace(capture=Capture(stacks=(dump_of(1, SLEEPS),))))
    assert found.cause is not None
    assert (found.cause.ranks, found.victims) == ((1,), (0,))
    assert found.headline.startswith("rank 1 (node3, local rank 1, pid 4001) did not come")
    assert "timed out" in found.headline


@pytest.mark.parametrize("waiting_at", [100.0, 100.2, 101.0])
def test_of_ranks_whose_timers_ran_out_the_one_that_did_not_wait_is_shown(waiting_at: float) -> None:
    """They were set at about the same time."""
    loading = (*THREADS[:3], '  File "/home/user/job/data.py", line 9 in load_batch', *THREADS[4:])
    ends = (end_of(0, code=1, at=waiting_at), end_of(1, code=1, at=100.1))
    outputs = (output(0, TIMER, *THREADS), output(1, TIMER, *loading))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert found.headline.startswith("rank 1 (node3, local rank 1, pid 4001) failed first")
    assert "its own timer (faulthandler) ended it after 30 s, at data.py:9 in load_batch" in found.headline


@pytest.mark.parametrize(
    "lines",
    [
        (TIMER, *THREADS, OWN),
        (TIMER, "step 8", *THREADS, "giving up: the loss is NaN"),
        (TIMER,),
        ("Timeout (0:00:30)! no answer", *THREADS),
    ],
)
def test_a_timer_that_only_prints_is_no_end(lines: tuple[str, ...]) -> None:
    """Without exit=True the program goes on."""
    assert found_in(*lines).class_name == "python_exit"


def test_an_exit_with_another_code_is_not_the_timers() -> None:
    end = end_of(0, code=3)
    facts = evidence(end, outputs=(output(0, TIMER, *THREADS),))
    assert cause_of(read_failure(facts, end, facts.outputs[0])).class_name == "python_exit"
