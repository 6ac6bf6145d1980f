"""How much work it is to find the cause of a rank's failure: a job may have a thousand of them, and its end waits."""

from __future__ import annotations

from saferun.diagnosis.alike_tracebacks import merge_tracebacks
from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import Failure, read_failure
from saferun.diagnosis.causes.stdout_errors import read_stdout
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judged_failures import judged_failure
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd
from tests.unit.operations import operations

END = RankEnd(0, 0, 100, ExitStatus(1, None), 10.0, 1000.0, stopped_by_us=False)


def work_for(exception: str) -> int:
    """The work for a rank that ended with this exception after 200 lines of other output."""
    lines = (
        *(f"step {number} loss 0.25" for number in range(200)),
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 7, in step',
        exception,
    )
    output = RankOutput(0, lines, "", "", 0.0, tuple(f"epoch {number}" for number in range(40)))
    evidence = Evidence("vm", 0.0, (END,), (output,), (), None)
    return operations(lambda: cause_of(read_failure(evidence, END, output)))


def test_warnings_of_nccl_are_looked_for_once_and_not_for_each_rule() -> None:
    """Ranks that lost a peer are the many: their output is not searched again for each of the known causes."""
    lost = "RuntimeError: NCCL error: remote process exited or there was a network error"
    assert work_for(lost) < 2 * work_for("RuntimeError: no such luck")


def failure_of(message: tuple[str, ...], ranks: int) -> Failure:
    """One of so many ranks that failed alike."""
    lines = ("Traceback (most recent call last):", '  File "/job/train.py", line 7, in step', *message)
    ends = tuple(END._replace(rank=rank, local_rank=rank) for rank in range(ranks))
    return read_failure(Evidence("vm", 0.0, ends, (), (), None), END, RankOutput(0, lines, "", "", 0.0, ()))


def test_what_all_ranks_have_written_is_searched_up_to_a_limit_for_all_together() -> None:
    """Sixty lines of a thousand characters that nearly match took 80 ms a rank, 40 s for 512 of them."""
    message = (f"RuntimeError: {'CUDA GPU cuda ' * 70}", *["CUDA GPU cuda " * 70] * 59)
    for ranks in (1, 8, 64, 512, 1024):
        failure = failure_of(message, ranks)
        assert sum(map(len, failure.messages)) * ranks <= max(1_000_000, 2_000 * ranks)
    printed = failure_of(("CUDA GPU cuda " * 70,) * 60, 512)._replace(error=None)
    assert 0 < sum(map(len, printed.closing_lines)) <= 2_000


def test_of_a_usual_message_nothing_is_left_out() -> None:
    message = ("RuntimeError: CUDA out of memory. " + "x" * 900, "and more " * 100)
    assert failure_of(message, 1024).messages == tuple(line.rstrip() for line in message)


def test_of_a_long_message_only_what_may_match_is_searched() -> None:
    """Of a thousand ranks that fail alike each line was searched for each of the known causes."""
    short, long = (failure_of(("RuntimeError: no such luck", *lines), 1) for lines in ((), (f"{'x ' * 150}.",) * 59))
    for failure in (short, long):
        # Literals are looked for once much was searched.
        for _ in range(20):
            cause_of(failure)
    assert operations(lambda: cause_of(long)) < 3 * operations(lambda: cause_of(short))


def work_to_judge(stderr: tuple[str, ...], stdout: tuple[str, ...]) -> int:
    """The work for one of a thousand ranks that ended with these lines."""
    output = RankOutput(0, stderr, "", "", 0.0, stdout)
    ends = tuple(END._replace(rank=rank, local_rank=rank) for rank in range(1024))
    known = Evidence("vm", 0.0, ends, (output,), (), None)
    hosts = Hosts(known)
    for _ in range(20):
        # Literals are looked for once much was searched.
        judged_failure(known, END, output, hosts)
    return operations(lambda: judged_failure(known, END, output, hosts))


def test_what_a_rank_has_written_on_stdout_costs_no_second_search_of_it_all() -> None:
    """Ranks that exit without a word of why were searched twice for each of the known causes."""
    steps = tuple(f"iteration {number} | lm loss: 2.3 | other processes on the worker: 3 |" for number in range(200))
    on_stderr = work_to_judge(steps, ())
    assert work_to_judge((), steps) < 1.7 * on_stderr
    assert work_to_judge(steps, steps) < 1.7 * on_stderr
    assert work_to_judge(steps, tuple(f"{line} x" for line in steps)) < 1.7 * on_stderr


def test_of_stdout_without_a_traceback_the_last_line_alone_is_searched() -> None:
    lines = tuple(f"iteration {number} | lm loss: 2.3 |" for number in range(200))
    output = RankOutput(0, (), "", "", 0.0, lines)
    failure = read_failure(Evidence("vm", 0.0, (END,), (output,), (), None), END, output)
    assert read_stdout(failure, output).closing_lines == lines[-1:]


def test_the_last_lines_are_gathered_once_and_not_for_each_rule() -> None:
    failure = failure_of(("x " * 60,) * 60, 1)._replace(error=None)
    first = failure.closing_lines
    assert operations(lambda: failure.closing_lines) < 20
    assert failure.closing_lines is first


def test_tracebacks_that_are_not_kept_are_not_compared_line_by_line() -> None:
    """Of a thousand ranks that fail in a thousand ways three tracebacks are shown."""
    texts = [(rank, (*("  at a place" for _ in range(100)), f"ValueError: {'x' * rank}")) for rank in range(1, 513)]
    assert operations(lambda: merge_tracebacks(texts)) < 30 * len(texts)
