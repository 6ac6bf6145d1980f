"""Causes that a rank prints in other places, or in other words, than the message of its last exception."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, OomKill, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.diagnosis.jobs_of_hosts import lost_peer
from tests.unit.host_samples import job

HEAD = "Traceback (most recent call last):"
CONTEXT = "During handling of the above exception, another exception occurred:"
STEP = '  File "/home/user/job/train.py", line 52, in step'
GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for "
    "recv operation to complete"
)
NCCL = (
    "torch.distributed.DistBackendError: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
TORCH = "site-packages/torch/distributed/distributed_c10d.py"
OWN = "train.errors.TrainingError: step 7 failed"


def found_in(*lines: str, code: int = 1) -> Cause:
    end = RankEnd(1, 1, 4001, ExitStatus(code, None), 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, lines, "", "", 0.0)
    evidence = Evidence(
        "node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job"
    )
    return cause_of(read_failure(evidence, end, output))


# ----------------------------------------------------------------------------------------------------------- tracebacks


@pytest.mark.parametrize(("message", "class_name"), [(GLOO, "collective_timeout"), (NCCL, "nccl_timeout")])
def test_a_timeout_whose_handler_raises_is_still_one(message: str, class_name: str) -> None:
    """The program's own error says no more than that something failed."""
    found = found_in(HEAD, STEP, message, CONTEXT, HEAD, STEP, OWN)
    assert (found.class_name, role_of(found)) == (class_name, Role.TIMEOUT)


@pytest.mark.parametrize(
    "message", [GLOO, "RuntimeError: Rank 0 timed out: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms"]
)
def test_a_timeout_that_a_script_prints_before_it_exits_is_one(message: str) -> None:
    assert found_in(f"training failed: {message}").class_name == "collective_timeout"


def boxed(*below: str) -> tuple[str, ...]:
    """A traceback as rich prints it into a file."""
    return (
        "╭───────────────────── Traceback (most recent call last) ──────────────────────╮",
        "│ /home/user/job/train.py:52 in step                                           │",
        "│                                                                              │",
        "│ ❱ 52 │   dist.all_reduce(loss)                                               │",
        "╰──────────────────────────────────────────────────────────────────────────────╯",
        *below,
    )


def test_a_message_that_rich_has_broken_is_read_as_one() -> None:
    """It breaks lines at 80 columns where there is no terminal."""
    message = (
        "RuntimeError: ",
        "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out",
        "waiting 8000ms for recv operation to complete",
    )
    found = found_in(*boxed(*message))
    assert (found.class_name, role_of(found)) == ("collective_timeout", Role.TIMEOUT)
    assert found.message == "gloo timeout: another rank did not come to the collective within 8 s"


def test_what_stands_below_a_box_far_from_the_end_is_left_alone() -> None:
    """The program went on after it."""
    message = ("Timed out", "waiting 8000ms for recv operation to complete")
    assert found_in(*boxed(*message), *(f"step {number}" for number in range(30))).class_name == "python_exit"


def test_a_traceback_in_a_box_is_one() -> None:
    found = found_in(*boxed("KeyError: 'labels'"))
    assert (found.message, found.location) == ("KeyError: 'labels'", "train.py:52 in step")
    assert "and no traceback" in found_in("giving up").message


def test_a_traceback_of_logurus_is_read() -> None:
    """It marks the frame in which the exception was caught."""
    lines = (
        "2026-11-21 11:40:54.259 | ERROR    | __main__:<module>:80 - An error has been caught",
        HEAD,
        '> File "/home/user/job/train.py", line 80, in <module>',
        "    main()",
        "    └ <function main at 0x7f0b4f549446>",
        STEP,
        "    labels = batch['labels']",
        "             └ {'images': 7}",
        "KeyError: 'labels'",
    )
    found = found_in(*lines)
    assert (found.class_name, found.message, found.location) == (
        "python_exception",
        "KeyError: 'labels'",
        "train.py:52 in step",
    )


# ------------------------------------------------------------------------------------------------ networks and services

NO_ANSWER = (
    "socketProgressOpt: Call to recv from {address}<45123> failed : Connection timed out",
    "misc/socket.cc:518 NCCL WARN Net : Call to send to {address}<45123> failed : No route to host",
)

QUOTED = "Last error:\nsocketProgressOpt: Call to recv from 10.0.0.{host}<45123> failed : Connection timed out"


@pytest.mark.parametrize("line", NO_ANSWER)
def test_a_network_that_breaks_below_nccls_sockets_is_not_this_ranks_fault(line: str) -> None:
    """Neither /dev/shm nor the limit of locked memory has to do with it."""
    head = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled system error"
    quoted = ("ncclSystemError: System call failed.", "Last error:", line.format(address="10.0.0.1"))
    found = found_in(HEAD, STEP, head, *quoted)
    assert (found.class_name, role_of(found)) == ("fabric_error", Role.TIMEOUT)


def test_the_hosts_between_which_it_broke_are_named() -> None:
    """Each rank names the other end."""
    head = (
        "torch.distributed.DistBackendError: NCCL error: unhandled system error\nncclSystemError: System call failed."
    )
    parts = {host: lost_peer(host, 1 - host, message=f"{head}\n{QUOTED}") for host in (0, 1)}
    found = diagnose(job({host: split(part) for host, part in parts.items()}))
    assert found.cause is not None
    assert (found.cause.class_name, found.cause.ranks) == ("network_between_hosts", ())
    assert found.headline.startswith("the ranks of node1 and node2 do not reach each other; ")


def split(part: Evidence) -> Evidence:
    """The same with one line of output for each line of a message."""
    return part._replace(
        outputs=tuple(
            output._replace(last_lines=tuple(line for text in output.last_lines for line in text.splitlines()))
            for output in part.outputs
        )
    )


HUB = "HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /models/500 (Caused by "
UNREACHED = "huggingface.co was not reached or did not answer: "
UNDONE = "huggingface.co refused or failed a request: "


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"requests.exceptions.ConnectionError: {HUB}NewConnectionError('Failed to establish it'))", UNREACHED),
        ("requests.exceptions.ReadTimeout: HTTPConnectionPool(host='huggingface.co', port=443): Timed out", UNREACHED),
        (f"requests.exceptions.RetryError: {HUB}ResponseError('too many 503 error'))", "huggingface.co answered 503: "),
        ("huggingface_hub.errors.GatedRepoError: Cannot access gated repo for url https://huggingface.co/404.", UNDONE),
        (f"requests.exceptions.SSLError: {HUB}SSLError('certificate verify failed'))", UNDONE),
        (
            "botocore.exceptions.HTTPClientError: the API returned status:503",
            "a service outside the job answered 503: ",
        ),
    ],
)
def test_a_port_is_no_answer_of_a_service(message: str, expected: str) -> None:
    """Nor is a number in a path."""
    found = found_in(HEAD, STEP, message)
    assert found.class_name == "remote_service_error"
    assert found.message.startswith(expected), found.message


# --------------------------------------------------------------------------------- children that the OOM killer takes

POOL = (
    "concurrent.futures.process.BrokenProcessPool: A process in the process pool was terminated abruptly while the "
    "future was running or pending."
)
KILLED = "subprocess.CalledProcessError: Command '['tokenize']' died with <Signals.SIGKILL: 9>."
LOADER = "RuntimeError: DataLoader worker (pid(s) 7123) exited unexpectedly"
SPAWNED = "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL"
OOM = OomKill("cgroup", 64 << 30, 0, (), 1, "memory.events")


def with_oom(oom: OomKill | None, *lines: str) -> Cause:
    end = RankEnd(1, 1, 4001, ExitStatus(1, None), 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, lines, "", "", 0.0)
    evidence = Evidence("node1", 90.0, (end,), (output,), (), None, ranks=(1,), script="train.py", oom=oom)
    return cause_of(read_failure(evidence, end, output))


@pytest.mark.parametrize("message", [POOL, KILLED, LOADER, SPAWNED])
def test_a_child_that_is_lost_while_the_oom_killer_is_at_work_is_lost_to_it(message: str) -> None:
    """Not every child reports how it was ended. That it was this one is likely, not known, and is worded so."""
    found = with_oom(OOM, HEAD, STEP, message)
    assert found.class_name == "host_oom_kill"
    assert "meanwhile (cgroup limit 64 GiB)" in found.message
    assert "ask for more memory" in found.advice


@pytest.mark.parametrize(
    ("oom", "message"),
    [
        (None, POOL),
        (OOM._replace(kills=0), POOL),
        (OOM._replace(scope="host"), POOL),
        (OOM._replace(pids=(4001,)), POOL),
        (OOM, "RuntimeError: DataLoader worker (pid 7123) exited unexpectedly with exit code 1. Details are lost."),
        (OOM, "subprocess.CalledProcessError: Command '['tokenize']' died with <Signals.SIGSEGV: 11>."),
        (OOM, "KeyError: 'labels'"),
    ],
)
def test_what_the_oom_killer_did_elsewhere_explains_no_other_end(oom: OomKill | None, message: str) -> None:
    """Another process than a child, another host's count, or a child that has ended in another way."""
    assert with_oom(oom, HEAD, STEP, message).class_name != "host_oom_kill"


@pytest.mark.parametrize("message", [POOL, KILLED, LOADER, SPAWNED])
def test_without_that_the_advice_is_to_ask_the_kernel_log(message: str) -> None:
    """There is no error further up in the output: SIGKILL leaves none."""
    found = with_oom(None, HEAD, STEP, message)
    assert "dmesg" in found.advice
    assert "further up" not in found.advice


def test_an_array_that_is_too_large_is_shown_with_its_size_and_shape() -> None:
    """A host with memory left has none for an array of a wrong shape either."""
    name = "numpy._core._exceptions._ArrayMemoryError"
    line = f"{name}: Unable to allocate 3.73 TiB for an array with shape (1000000, 512000) and data type float64"
    found = found_in(HEAD, STEP, line)
    assert found.class_name == "host_out_of_memory"
    assert "tried to allocate 3.73 TiB for an array of shape (1000000, 512000)" in found.message
    assert "host has no memory" not in found.message
    assert found.advice.startswith("check whether that shape is meant")


def test_a_process_that_gets_no_memory_is_still_one() -> None:
    found = found_in(HEAD, STEP, "RuntimeError: unable to allocate 64 GiB")
    assert (found.class_name, found.message) == ("host_out_of_memory", "the host has no memory left")


# ------------------------------------------------------------------------------------ words in exceptions of the user


@pytest.mark.parametrize(
    "message",
    [
        "KeyError: 'Not Found'",
        "KeyError: 'Conflict'",
        "ValueError: Gone",
        "TypeError: Bad Request",
        "AssertionError: Forbidden",
        "ValueError: shape mismatch at status code 500",
        "RuntimeError: the other worker has failed to produce a batch",
        "ValueError: CUDA out of memory handling must be 'skip' or 'raise'",
    ],
)
def test_a_word_of_a_layer_in_an_exception_of_the_users_own_is_no_failure_of_that_layer(message: str) -> None:
    found = found_in(HEAD, STEP, message)
    assert found.class_name in {"python_exception", "assertion_error"}
    assert message.partition(": ")[2] in found.message


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        ("HfHubHTTPError: Not Found", "remote_service_error"),
        ("HTTPException: b'Too Many Requests'", "remote_service_error"),
        ("ValueError: 404 Not Found", "remote_service_error"),
        ("RuntimeError: got status code 503", "remote_service_error"),
        ("ValueError: Request to the API failed with status code 429", "remote_service_error"),
        ("ValueError: CUDA out of memory. Tried to allocate 2.00 GiB", "cuda_out_of_memory"),
        ("ValueError: evaluation failed: CUDA error: out of memory", "cuda_out_of_memory"),
        ("RuntimeError: MPI: another process has failed", "peer_lost"),
    ],
)
def test_what_a_layer_reports_stays_its_failure(message: str, class_name: str) -> None:
    """Also where a program has wrapped it into an exception of another type."""
    assert found_in(HEAD, STEP, message).class_name == class_name


def test_plain_words_about_another_rank_count_where_a_library_that_connects_ranks_raises_them() -> None:
    """And the words stay in the message: they may be all that is known."""
    words = "RuntimeError: the remote worker has failed"
    found = found_in(HEAD, STEP, f'  File "/venv/lib/python3.11/{TORCH}", line 9, in all_reduce', words)
    assert found.class_name == "peer_lost"
    assert "the remote worker has failed" in found.message
    assert found_in("MPI: the other process exited unexpectedly").class_name == "peer_lost"
    assert found_in("the other process exited unexpectedly").class_name == "python_exit"
