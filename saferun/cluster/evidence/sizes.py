"""Reduces a host's part that would be too large, step by step. Pure.

Each reduction works on the result of the previous one. What helps least to find a cause is left out first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from saferun.evidence.job_evidence import (
    CollectiveCall,
    CoreDump,
    Evidence,
    ProcessSnapshot,
    RankOutput,
    StackDump,
    StuckLink,
    ThreadStack,
)
from saferun.evidence.wait_evidence import JobPorts
from saferun.model import RankEnd, Value

__all__ = ["REDUCTIONS"]

Reduction = Callable[[Evidence], Evidence]

# The longest list in a part: shorter than what its reader accepts.
_MOST_ITEMS = 4096
_MOST_LINKS = 256
_LONGEST_TEXT = 2000
_MOST_STREAMS = 32
_MOST_TOOLS = 4
_BEGINNING = "Traceback (most recent call last):"
_FATAL = "Fatal Python error:"
_BEGINNING_LINES = 3
_OTHER_THREADS = 4
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen")


class _Cut(Value):
    """How much of a rank's output is kept. ``longest``: characters of a line."""

    stderr_lines: int
    stdout_lines: int
    longest: int


_NOTHING = _Cut(stderr_lines=0, stdout_lines=0, longest=0)


# ----------------------------------------------------------------------------------------------------- parts of it all


def failed_ranks(ends: Iterable[RankEnd]) -> list[RankEnd]:
    """Those that failed by themselves, the first first."""
    failed = [end for end in ends if not end.status.ok and not end.stopped_by_us]
    return sorted(failed, key=lambda end: end.time)


def _texts(lines: Sequence[str], most: int, longest: int) -> tuple[str, ...]:
    """The last lines, each cut, and the beginning of the report that they are the end of."""
    kept = [*lines[-most:]] if most > 0 else []
    begins = next((index for index in range(len(lines) - 1, -1, -1) if _BEGINNING in lines[index]), -1)
    fatal = next((index for index in range(len(lines) - 1, -1, -1) if _FATAL in lines[index]), -1)
    begins = max(begins, fatal)
    if 0 <= begins < len(lines) - most and most > 2 * _BEGINNING_LINES:
        kept = [*lines[begins : begins + _BEGINNING_LINES], *lines[_BEGINNING_LINES - most :]]
    return tuple(line[:longest] for line in kept)


def _output(output: RankOutput, cut: _Cut) -> RankOutput:
    return output._replace(
        last_lines=_texts(output.last_lines, cut.stderr_lines, cut.longest),
        last_stdout_lines=_texts(output.last_stdout_lines, cut.stdout_lines, cut.longest),
        error_message=output.error_message[: 4 * cut.longest],
        failure=_texts(output.failure, min(cut.stderr_lines, 4), cut.longest),
        traceback=_texts(output.traceback, cut.stderr_lines, cut.longest),
        stderr_path=output.stderr_path[:_LONGEST_TEXT],
        tools=_texts(output.tools, _MOST_TOOLS, cut.longest),
    )


def _outputs(evidence: Evidence, *, own: _Cut, others: _Cut, most: int) -> Evidence:
    """The outputs, cut: ``own`` for the first ``most`` failed ranks, ``others`` for all other ranks."""
    failed_first = {end.rank for end in failed_ranks(evidence.ends)[:most]}
    outputs = [
        _output(output, own if output.rank in failed_first else others)
        for output in evidence.outputs
        if output.rank in failed_first or others.stderr_lines or others.stdout_lines
    ]
    return evidence._replace(outputs=tuple(outputs))


def _stacks(evidence: Evidence, change: Callable[[StackDump], StackDump | None]) -> Evidence:
    changed = (change(dump) for dump in evidence.capture.stacks)
    kept = tuple(dump for dump in changed if dump is not None)
    return evidence._replace(capture=evidence.capture._replace(stacks=kept))


def _with_processes(evidence: Evidence, change: Callable[[ProcessSnapshot], ProcessSnapshot | None]) -> Evidence:
    changed = (change(process) for process in evidence.capture.processes)
    kept = tuple(process for process in changed if process is not None)
    return evidence._replace(capture=evidence.capture._replace(processes=kept))


def _calls(evidence: Evidence, *, most: int) -> Evidence:
    """The newest calls of every process group, and the oldest of each stream that are not over.

    They are without stacks and times, which differ between ranks that are alike.
    """

    def bare(call: CollectiveCall) -> CollectiveCall:
        return call._replace(frames=(), created_ns=0, sizes=call.sizes[:200])

    def kept(calls: Sequence[CollectiveCall]) -> Iterator[CollectiveCall]:
        waiting: set[str] = set()
        for index, call in enumerate(calls):
            stream = call.op if call.is_p2p else ""
            is_oldest = not call.retired and stream not in waiting and len(waiting) < _MOST_STREAMS
            if is_oldest:
                waiting.add(stream)
            if is_oldest or index >= len(calls) - most:
                yield bare(call)

    collectives = tuple(
        one._replace(groups=tuple(progress._replace(calls=tuple(kept(progress.calls))) for progress in one.groups))
        for one in evidence.capture.collectives
    )
    return evidence._replace(capture=evidence.capture._replace(collectives=collectives))


def _cores(evidence: Evidence, *, threads: int, calls: int) -> Evidence:
    def cut(core: CoreDump) -> CoreDump:
        return core._replace(threads=tuple(_shorter(thread, calls) for thread in core.threads[:threads]))

    return evidence._replace(cores=tuple(map(cut, evidence.cores)))


def _shorter(thread: ThreadStack, most: int) -> ThreadStack:
    """A stack without its middle: the innermost calls tell what it does, the outermost which part of the program."""
    frames = thread.frames
    if len(frames) > most:
        outer = most // 3
        frames = (*frames[: most - outer], *(frames[-outer:] if outer else ()))
    return thread._replace(frames=frames)


def _host_lines(evidence: Evidence, *, most: int) -> Evidence:
    capture = evidence.capture
    return evidence._replace(
        kernel_lines=_texts(evidence.kernel_lines, most, 400),
        nics=_texts(evidence.nics, most, 100),
        bridges=_texts(evidence.bridges, most, 100),
        capture=capture._replace(host_lines=tuple(line[:400] for line in capture.host_lines[:most])),
    )


def _one_a_way(links: Sequence[StuckLink]) -> tuple[StuckLink, ...]:
    """Of the connections to one address, the one that was tried most often."""
    best: dict[str, StuckLink] = {}
    for link in sorted(links, key=lambda link: -link.retries):
        best.setdefault(link.remote.rpartition(":")[0], link)
    return tuple(best.values())


def _last_calls(evidence: Evidence, *, main: int, others: int) -> Evidence:
    """So many of the last calls of main threads and of other threads, without functions that are not called in them."""
    capture = evidence.capture
    return evidence._replace(capture=capture._replace(calls=tuple(one.newest(main, others) for one in capture.calls)))


def _is_main(thread: ThreadStack, pid: int) -> bool:
    return thread.is_main or thread.tid == pid or thread.name == "MainThread"


def _is_users(thread: ThreadStack) -> bool:
    return any(not frame.native and not any(part in frame.file for part in _LIBRARIES) for frame in thread.frames)


# ---------------------------------------------------------------------------------------------------------- reductions


def _within_reason(evidence: Evidence) -> Evidence:
    """Only what the reader accepts. Numbers that differ between similar ranks are rounded, so that they pack well."""
    capture = evidence.capture
    ends = tuple(end._replace(at=round(end.at, 4), time=round(end.time, 4)) for end in evidence.ends[:_MOST_ITEMS])
    evidence = evidence._replace(
        ends=ends,
        error=evidence.error[:_LONGEST_TEXT],
        error_hint=evidence.error_hint[:_LONGEST_TEXT],
        capture=capture._replace(
            processes=tuple(
                process._replace(cpu_s=round(process.cpu_s, 1)) for process in capture.processes[:_MOST_ITEMS]
            ),
            stacks=capture.stacks[:_MOST_ITEMS],
            collectives=capture.collectives[:_MOST_ITEMS],
            notes=tuple(note._replace(elapsed_s=round(note.elapsed_s, 2)) for note in capture.notes[:_MOST_ITEMS]),
            links=capture.links[:_MOST_LINKS],
            nccl=capture.nccl[:16],
            ports=tuple(_fewer_ports(one, _MOST_ITEMS) for one in capture.ports[:1]),
            timed_out=tuple(name[:200] for name in capture.timed_out[:_MOST_ITEMS]),
        ),
    )
    whole = _Cut(stderr_lines=400, stdout_lines=100, longest=_LONGEST_TEXT)
    evidence = _host_lines(evidence, most=200)
    evidence = _outputs(evidence, own=whole, others=whole, most=_MOST_ITEMS)
    evidence = _last_calls(evidence, main=256, others=16)
    evidence = _calls(evidence, most=32)
    return _cores(evidence, threads=256, calls=400)


def _without_notes(evidence: Evidence) -> Evidence:
    """Without the texts of captures that worked, and without most of the host's lines."""
    notes = tuple(note for note in evidence.capture.notes if note.failure)
    evidence = evidence._replace(capture=evidence.capture._replace(notes=notes[:50]))
    evidence = _last_calls(evidence, main=256, others=4)
    evidence = _host_lines(evidence, most=40)
    own = _Cut(stderr_lines=200, stdout_lines=20, longest=1000)
    return _outputs(evidence, own=own, others=_Cut(stderr_lines=30, stdout_lines=5, longest=400), most=64)


def _telling_threads(evidence: Evidence) -> Evidence:
    """Main threads, threads that hold the GIL, those in the user's code, and those that wait for what is known."""
    known = _waiting_threads(evidence)

    def change(dump: StackDump) -> StackDump:
        waiting = known.get((dump.rank, dump.pid), ())
        threads = (
            thread
            for thread in dump.threads
            if _is_main(thread, dump.pid)
            or thread.owns_gil
            or len(dump.threads) == 1
            or thread.tid in waiting
            or _is_users(thread)
        )
        return dump._replace(threads=tuple(threads)[:32])

    evidence = _stacks(evidence, change)
    evidence = _with_waits(evidence, most=16)
    evidence = _last_calls(evidence, main=64, others=0)
    evidence = _calls(evidence, most=12)
    return _cores(evidence, threads=2, calls=120)


def _fewer_ports(found: JobPorts, most: int) -> JobPorts:
    """The lowest ones: those that programs have chosen."""
    return found._replace(ports=found.ports[:most], is_whole=found.is_whole and len(found.ports) <= most)


def _waiting_threads(evidence: Evidence) -> dict[tuple[int, int], set[int]]:
    """Which threads of each process wait for something that is known."""
    return {(one.rank, one.pid): {wait.tid for wait in one.waits} for one in evidence.capture.processes}


def _with_waits(evidence: Evidence, *, most: int) -> Evidence:
    """So many waits of each process, the main thread's and those of threads whose stacks are there first."""
    stacked = {(dump.rank, dump.pid): {thread.tid for thread in dump.threads} for dump in evidence.capture.stacks}

    def change(process: ProcessSnapshot) -> ProcessSnapshot:
        there = stacked.get((process.rank, process.pid), set()) | {process.pid}
        waits = sorted(process.waits, key=lambda wait: (wait.tid != process.pid, wait.tid not in there))
        return process._replace(waits=tuple(waits[:most]))

    return _with_processes(evidence, change)


def _short_messages(evidence: Evidence) -> Evidence:
    capture = evidence.capture
    ports = tuple(_fewer_ports(one, 256) for one in capture.ports)
    evidence = evidence._replace(capture=capture._replace(notes=capture.notes[:10], ports=ports))
    evidence = _host_lines(evidence, most=15)
    own = _Cut(stderr_lines=80, stdout_lines=5, longest=500)
    return _outputs(evidence, own=own, others=_Cut(stderr_lines=10, stdout_lines=0, longest=200), most=16)


def _main_threads(evidence: Evidence) -> Evidence:
    """Main threads, and where a few others stand of which it is known what they wait for."""
    evidence = _with_waits(evidence, most=1 + _OTHER_THREADS)
    known = _waiting_threads(evidence)

    def change(dump: StackDump) -> StackDump:
        main = ([thread for thread in dump.threads if _is_main(thread, dump.pid)] or [*dump.threads[:1]])[:1]
        waiting = known.get((dump.rank, dump.pid), ())
        others = [thread for thread in dump.threads if thread not in main and thread.tid in waiting]
        kept = (*(_shorter(thread, 60) for thread in main), *(_shorter(thread, 6) for thread in others))
        return dump._replace(threads=kept)

    def slim(process: ProcessSnapshot) -> ProcessSnapshot:
        return process._replace(
            command=process.command[:60],
            rss_bytes=process.rss_bytes >> 20 << 20,
            cpu_s=float(round(process.cpu_s)),
        )

    evidence = _stacks(evidence, change)
    evidence = _with_processes(evidence, slim)
    evidence = _last_calls(evidence, main=16, others=0)
    evidence = _calls(evidence, most=4)
    return _cores(evidence, threads=1, calls=60)


def _ranks_only(evidence: Evidence) -> Evidence:
    """Without what descends from ranks."""
    evidence = _stacks(evidence, lambda dump: dump if dump.is_rank else None)
    evidence = _with_processes(
        evidence,
        lambda process: (
            process._replace(command="", rss_bytes=0, cpu_s=0.0, threads=0, ppid=0) if process.is_rank else None
        ),
    )
    capture = _last_calls(evidence, main=4, others=0).capture
    ports = tuple(_fewer_ports(one, 32) for one in capture.ports)
    capture = capture._replace(
        ports=ports, notes=(), timed_out=capture.timed_out[:8], links=_one_a_way(capture.links)[:16]
    )
    capture = capture._replace(nccl=tuple(one for one in capture.nccl if one.is_timed)[:8])
    evidence = _host_lines(evidence._replace(capture=capture), most=5)
    return _outputs(evidence, own=_Cut(stderr_lines=40, stdout_lines=0, longest=300), others=_NOTHING, most=4)


def _shallow(evidence: Evidence) -> Evidence:
    evidence = _stacks(
        evidence, lambda dump: dump._replace(threads=tuple(_shorter(thread, 24) for thread in dump.threads))
    )
    evidence = _calls(evidence, most=1)
    own = _Cut(stderr_lines=20, stdout_lines=0, longest=240)
    evidence = _outputs(evidence, own=own, others=_NOTHING, most=2)
    return _cores(evidence, threads=1, calls=24)


def _odd_ones(evidence: Evidence) -> Evidence:
    """Of ranks that wait alike, the details of two only."""
    seen: dict[tuple[str, ...], int] = {}

    def is_new(process: ProcessSnapshot) -> bool:
        likeness = (process.state, process.wchan, process.syscall, process.waits_on)
        seen[likeness] = seen.get(likeness, 0) + 1
        return seen[likeness] <= 2  # noqa: PLR2004 - one alone would be the odd one

    evidence = _with_processes(evidence, lambda process: process if is_new(process) else None)
    evidence = _stacks(
        evidence, lambda dump: dump._replace(threads=tuple(_shorter(thread, 12) for thread in dump.threads))
    )
    # Ranks without a stack are distinguished by their recorders.
    evidence = _host_lines(evidence, most=2)
    own = _Cut(stderr_lines=12, stdout_lines=0, longest=200)
    evidence = _outputs(evidence, own=own, others=_NOTHING, most=1)
    return _cores(evidence, threads=1, calls=12)


def _numbers_only(evidence: Evidence) -> Evidence:
    ends = failed_ranks(evidence.ends)
    rest = [end for end in evidence.ends if end not in ends[:8]]
    capture = evidence.capture._replace(
        processes=(),
        calls=(),
        stacks=evidence.capture.stacks[:16],
        timed_out=(),
        ports=(),
        host_lines=(),
        notes=(),
        links=evidence.capture.links[:4],
        nccl=evidence.capture.nccl[:2],
    )
    evidence = evidence._replace(capture=capture, ends=(*ends[:8], *rest[:24]), cores=evidence.cores[:1])
    evidence = _calls(evidence, most=0)
    return _outputs(evidence, own=_Cut(stderr_lines=8, stdout_lines=0, longest=160), others=_NOTHING, most=1)


def _ends_only(evidence: Evidence) -> Evidence:
    ends = (failed_ranks(evidence.ends) or [*evidence.ends])[:4]
    hang = evidence.hang
    return Evidence(
        host=evidence.host,
        started_at=evidence.started_at,
        ends=tuple(ends),
        outputs=tuple(
            _output(output, _Cut(stderr_lines=4, stdout_lines=0, longest=120)) for output in evidence.outputs[:1]
        ),
        abandoned=evidence.abandoned[:8],
        stop_signum=evidence.stop_signum,
        error=evidence.error[:200],
        hang=hang._replace(ranks=hang.ranks[:32], busy=()) if hang is not None else None,
        supervisor_pid=evidence.supervisor_pid,
        started_time=evidence.started_time,
        start=evidence.start,
    )


def _least(evidence: Evidence) -> Evidence:
    return evidence._replace(outputs=(), error="", abandoned=(), ends=evidence.ends[:1])


REDUCTIONS: tuple[Reduction, ...] = (
    _within_reason,
    _without_notes,
    _telling_threads,
    _short_messages,
    _main_threads,
    _ranks_only,
    _shallow,
    _odd_ones,
    _numbers_only,
    _ends_only,
    _least,
)
