"""A rank that raises, and then calls a collective in its ``finally``: what it had raised is the cause."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import Capture, Frame, RankOutput
from tests.unit.diagnosis.failed_jobs import class_of, dump_of, evidence, said
from tests.unit.samples import end_of

HEAD = "Traceback (most recent call last):"
CONTEXT = "During handling of the above exception, another exception occurred:"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CLEANUP = '  File "/home/user/job/train.py", line 60, in step'
LIBRARY = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in barrier'
RESET = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection reset by peer [10.0.0.2]:4"
TIMEOUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for "
    "recv operation to complete"
)
BAD = "ValueError: the loss is nan"


def handled(rank: int, error: str = BAD, then: str = RESET, location: str = STEP, *more: str) -> RankOutput:
    """What a rank prints that raised an error and then, while it handled that, another one."""
    lines = (HEAD, location, error, "", CONTEXT, "", HEAD, CLEANUP, LIBRARY, then, *more)
    return RankOutput(rank, tuple(f"[rank{rank}]: {line}" for line in lines), "", "", 0.0)


def lost(rank: int, message: str = RESET) -> RankOutput:
    return RankOutput(rank, (HEAD, STEP, LIBRARY, message), "", "", 0.0)


def judged(*outputs: RankOutput, capture: Capture | None = None) -> Diagnosis:
    """The ranks of these outputs failed in this order."""
    ends = [end_of(one.local_rank, code=1, at=100.0 + index / 10) for index, one in enumerate(outputs)]
    return diagnose(evidence(*ends, outputs=outputs)._replace(capture=capture or Capture()))


def test_what_a_rank_had_raised_comes_before_the_connection_that_it_lost_meanwhile() -> None:
    found = judged(handled(2), lost(0), lost(1))
    assert found.headline == (
        "rank 2 (node3, local rank 2, pid 4002) failed first, 10.0 s after the start: ValueError: the loss is nan, at "
        "train.py:52 in step (while it handled that, it lost its connection to another rank); exit code 1"
    )
    assert (class_of(found), found.cause and found.cause.ranks, found.victims) == ("python_exception", (2,), (0, 1))
    assert found.tracebacks[0].ranks == (2,)
    assert CONTEXT in found.tracebacks[0].lines


def test_the_same_holds_for_a_timeout() -> None:
    found = judged(lost(0, TIMEOUT), lost(1, TIMEOUT), handled(2, then=TIMEOUT))
    assert "ValueError: the loss is nan, at train.py:52 in step (while it handled that: gloo timeout" in found.headline
    assert (found.cause and found.cause.ranks, found.victims) == ((2,), (0, 1))


def test_the_nearest_error_of_its_own_counts() -> None:
    """The first one was expected, and led to another."""
    lines = (HEAD, STEP, "KeyError: 'cached'", CONTEXT, HEAD, STEP, BAD, CONTEXT, HEAD, CLEANUP, LIBRARY, RESET)
    found = judged(RankOutput(2, lines, "", "", 0.0), lost(0))
    assert "failed first, 10.0 s after the start: ValueError: the loss is nan" in found.headline


def test_a_rank_that_saferun_stopped_while_it_showed_its_error_is_no_victim() -> None:
    ends = (end_of(0, code=1, at=100.0), end_of(2, signum=15, at=101.0, stopped=True))
    outputs = (lost(0), handled(2)._replace(raised=True))
    found = diagnose(evidence(*ends, outputs=outputs))
    assert (found.cause and found.cause.ranks, found.victims, found.stopped) == ((2,), (0,), ())


@pytest.mark.parametrize(
    "error",
    ["_queue.Empty", "queue.Empty", "StopIteration", "KeyboardInterrupt", "SystemExit: 1"],
)
def test_an_error_that_programs_expect_is_no_cause(error: str) -> None:
    assert class_of(judged(handled(2, error), lost(0))) == "peer_lost"


def test_an_error_that_all_ranks_had_got_over_is_no_cause() -> None:
    """They take that path each time; nor is one that a library has got over, or that of a single rank."""
    assert class_of(judged(handled(0), handled(1), handled(2))) == "peer_lost"
    assert class_of(judged(handled(2, location=LIBRARY), lost(0))) == "peer_lost"
    assert class_of(judged(handled(2))) == "peer_lost"


def test_a_timeout_that_a_late_rank_explains_needs_no_other_cause() -> None:
    """Rank 1 sleeps; rank 0 went on without a file, as it may."""
    sleeps = (
        Frame("clock_nanosleep", "/lib/x86_64-linux-gnu/libc.so.6", 0, native=True),
        Frame("pause", "/home/user/job/train.py", 61),
    )
    outputs = (handled(0, "FileNotFoundError: [Errno 2] No such file: 'last.pt'", TIMEOUT), lost(2, TIMEOUT))
    found = judged(*outputs, capture=Capture(stacks=(dump_of(1, sleeps),)))
    assert found.headline.startswith("rank 1 (node3) did not come to barrier: it sleeps at train.py:61 in pause")
    assert judged(*outputs).cause == judged(*outputs, capture=Capture()).cause
    assert class_of(judged(*outputs)) == "file_missing"


def test_an_error_that_explains_the_job_without_it_is_left_alone() -> None:
    found = judged(handled(2), said(1, "key_error"))
    assert (class_of(found), found.cause and found.cause.ranks) == ("python_exception", (1,))
