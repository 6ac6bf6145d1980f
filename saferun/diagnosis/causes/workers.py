"""Processes that a rank has started itself, and that it dies of. Pure.

Sources: messages of vLLM's engine and executors; ``ray.exceptions``; ``torch.multiprocessing``; Python's process pools.
"""

from __future__ import annotations

import signal
from itertools import takewhile

from saferun.diagnosis.causes.failure import Failure, cause
from saferun.diagnosis.causes.texts import TextRule, by_text, first_line
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_ABOVE = "look at the first error of its worker processes, further up in the rank's output"
_ENGINE = (
    TextRule(
        "collective_timeout",
        LazyPattern(r"RPC call to (\w{1,60}) timed out"),
        "a worker process of the engine did not answer the call {0}",
        "look at the worker's stack: it waits for another worker in a collective, in most cases",
        in_last_lines=True,
    ),
    TextRule(
        "worker_failed",
        LazyPattern(
            r"\bEngineDeadError\b|Engine core initialization failed"
            r"|WorkerProc (?:initialization failed|failed to start)"
            r"|\b(?:EngineCore|[Ee]ngine core|[Ss]cheduler|[Mm]odel ?[Rr]unner) (?:failed to start"
            r"|(?:has )?(?:encountered|hit|met) an? (?:fatal |unhandled )?(?:error|exception))"
            r"|\b(?:[Ss]cheduler|[Ee]ngine|[Dd]etokenizer|[Tt]okenizer manager) (?:process )?(?:is|was) (?:dead"
            r"|killed)\b"
            r"|\b[Dd]ata reader rais(?:es|ed) an exception|got fatal signal from worker processes"
            r"|[Ww]orker (?:proc )?\S{1,60} (?:pid \d{1,10} )?died\b"
            r"|\b(?:[Ee]ngine|[Ss]cheduler|[Ee]xecutor|[Mm]odel|[Bb]ackground|[Ss]erver) (?:loop|process|client|thread)"
            r"\b(?!.{0,12}\bnot\b).{0,12}\b(?:died|(?:is|was) (?:dead|killed)|failed|errored|crashed)\b"
            r"|\b\w{0,12}Engine has (?:failed|died|crashed)\b|\bAsyncEngineDeadError\b"
            r"|\b[Ww]orker failed with (?:an? )?(?:error|exception)\b|\bScheduler hit an exception\b"
            r"|\b[Rr]eceived sigquit from a child process\b|\b[Ss]hard \d{1,4} failed to start\b|\bShardCannotStart\b"
        ),
        "a worker process of the engine failed",
        _ABOVE,
        in_last_lines=True,
    ),
    TextRule(
        "worker_failed",
        LazyPattern(
            r"\b(?:[Bb]ackground|[Ww]orker|[Cc]hild|[Ss]ub|[Ss]pawned|[Hh]elper) ?(?:workers?|process(?:es)?)?\b.{0,40}"
            r"\b(?:no longer alive|not alive any ?more|(?:died|crashed|exited|terminated|quit) (?:unexpectedly"
            r"|prematurely"
            r"|abruptly|abnormally))\b|\btrying to connect to the Java server\b"
        ),
        "a worker process that it had started failed",
        _ABOVE,
        must_be_last=True,
    ),
    TextRule(
        "worker_failed",
        LazyPattern(
            r"\bray\.exceptions\.\w{0,20}(?:RayTaskError\()?(?:Actor|Worker|Node|RayletDied)\w{0,20}Error\b"
            r"|\bactor (?:is dead because|died (?:unexp|beca))"
            r"|worker died or was killed while executing a task|\b[Pp]rocess(?:es)?\b(?! /).{0,60}\bterminated with "
            r"(?:signal (?:SIG[A-Z]|[1-9])|exit code [1-9])|\bBrokenProcessPool\b|\bProcessExitedException\b"
            r"|\bWorkerLostError\b"
        ),
        "a worker process that it had started failed",
        _ABOVE,
        in_last_lines=True,
    ),
)
# What launchers, `make` and `time` say of what they had started.
_LAUNCHED = TextRule(
    "worker_failed",
    LazyPattern(
        r"\bBAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\b"
        r"|^YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .{1,80}"
        r"|^(?:prterun|mpirun|mpiexec|orterun|jsrun)\S{0,20} noticed that process rank \d{1,8} .{1,160}"
        r"|^Primary job {1,2}terminated normally, but \d{1,6} process.{0,60}"
        r"|^\S{1,20} detected that one or more processes exited with non-zero status"
        r"|^Command (?:terminated by signal \d{1,3}|exited with non-zero status \d{1,3})$"
        r"|^make(?:\[\d{1,3}\])?: \*\*\* \[.{1,200}\] (?:Error [1-9]|Killed|Aborted|Segmentation fault).{0,40}"
        r"|\bflux-shell\[\d{1,8}\]: FATAL: (?:task-exit|doom): .{1,160}"
        r"|^(?:Error: )?[Ff]ailed to run (?:torchrun|deepspeed|accelerate|python\S{0,8}|mpirun|srun)\b.{0,200}"
        # DeepSpeed's launcher, torchrun.
        r"|\bexits with return code = -?[1-9]\d{0,2}$"
        r"|\bfailed \(exitcode: -?[1-9]\d{0,2}\) local_rank: \d{1,6} \(pid: \d{1,10}\)"
        r"|\bssh exited with exit code [1-9]\d{0,2}$|\bChildFailedError\b|\bdied with <Signals\.\w{1,12}: \d{1,3}>"
    ),
    lambda _, match: f"a process that it had started failed: {match[0].strip('= ')}",
    _ABOVE,
    in_last_lines=True,
)
_KILLED = "check dmesg for the OOM killer; else another process or user sent SIGKILL"
_LOST = (
    "look at what its worker processes have written; one that leaves nothing was killed (the kernel log shows the OOM "
    "killer: dmesg) or crashed"
)
_SIGKILL = LazyPattern(r"\bterminated with signal SIGKILL\b|<Signals\.SIGKILL: 9>|\(exitcode: -9\)|\breturn code = -9$")
# What torchrun reports of its workers: the first failure last, before it those that it may have killed itself.
_CHILD_FAILED = "ChildFailedError"
_FIRST_FAILURE = "Root Cause (first observed failure)"
_OF_CHILD = LazyPattern(r"\bSignal (\d{1,3}) \(SIG\w{1,12}\) received by PID \d")
# What vLLM's workers put before each line.
_OF_WORKER = LazyPattern(r"(?:ERROR|CRITICAL) .{0,60}\] ((?:[A-Za-z_][\w.]{0,120})?(?:Error|Exception): .{1,300})")


def engine_worker(failure: Failure) -> Cause | None:
    """An inference engine whose worker process failed; the worker has written why, in most cases."""
    found = by_text(failure, _ENGINE)
    if found is None or found.class_name != "worker_failed":
        return found
    if _SIGKILL.search(found.proof):
        return found._replace(advice=_KILLED)
    if "BrokenProcessPool" in found.proof:
        return found._replace(advice=_LOST)
    why = first_line(_OF_WORKER, failure.lines)
    if why is None:
        return found
    return cause(failure, found.class_name, f"{found.message}: {why[1][1]}", _ABOVE, proof=why[0])


def launched_process(failure: Failure) -> Cause | None:
    """A launcher or a tool that reports how a process of its own ended, where nothing else says why."""
    found = by_text(failure, (_LAUNCHED,))
    if found is None:
        return None
    is_killed = _SIGKILL.search(found.proof) is not None
    if not is_killed and _CHILD_FAILED in found.proof:
        below = takewhile(lambda line: _FIRST_FAILURE not in line, reversed(failure.lines))
        child = first_line(_OF_CHILD, below) if any(_FIRST_FAILURE in line for line in failure.lines) else None
        is_killed = child is not None and int(child[1][1]) == signal.SIGKILL
    return found._replace(advice=_KILLED) if is_killed else found
