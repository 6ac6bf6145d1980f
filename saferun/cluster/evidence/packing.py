"""One host's part as text: bounded by who writes it, checked by who reads it. Pure."""

from __future__ import annotations

import base64
import json
import zlib
from itertools import chain, repeat

from saferun.cluster.evidence.sizes import REDUCTIONS
from saferun.evidence.job_evidence import (
    CoreDump,
    Evidence,
    Frame,
    GroupProgress,
    RankCollectives,
    StackDump,
    ThreadStack,
)
from saferun.model import Value
from saferun.text.decoding import loads
from saferun.text.evidence_redaction import evidence_without_secrets
from saferun.text.typed_json import fit

__all__ = ["decode_part", "encode_part"]

_VERSION = 1
_LONGEST_TEXT = 16 << 20
_LONGEST_JSON = 8 << 20
_MOST_PROCESSES = 16384
_MOST_THREADS = 1 << 17


class _Thread(Value):
    """A thread whose calls are in a table."""

    name: str
    is_main: bool
    active: bool
    owns_gil: bool
    stack: int


class _Dump(Value):
    """Processes of the same stacks. ``owners``: rank and pid of each, and where it helps the numbers of its threads."""

    owners: tuple[tuple[int, ...], ...]
    is_rank: bool
    name: str
    tool: str
    failure: str
    threads: tuple[_Thread, ...]


class _Recorder(Value):
    """Ranks of the same Flight Recorder."""

    ranks: tuple[int, ...]
    failure: str
    groups: tuple[GroupProgress, ...]
    incomplete: str = ""
    has_failed: bool = False


class _Core(Value):
    dump: CoreDump
    threads: tuple[_Thread, ...]


class _Part(Value):
    """A part as it travels. ``evidence`` is without what the others hold."""

    version: int
    evidence: Evidence
    frames: tuple[Frame, ...] = ()
    stacks: tuple[tuple[int, ...], ...] = ()
    dumps: tuple[_Dump, ...] = ()
    recorders: tuple[_Recorder, ...] = ()
    cores: tuple[_Core, ...] = ()


class _Tables:
    """Calls and stacks, each distinct one once."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {}

    def thread(self, thread: ThreadStack, pid: int) -> _Thread:
        calls = tuple(self.frames.setdefault(frame, len(self.frames)) for frame in thread.frames)
        stack = self.stacks.setdefault(calls, len(self.stacks))
        # Thread numbers differ between processes that are alike; the main thread's is the process's.
        is_main = thread.is_main or (thread.tid == pid and pid > 0)
        return _Thread(thread.name, is_main, thread.active, thread.owns_gil, stack)


def encode_part(evidence: Evidence, limit_bytes: int) -> str:
    """What this host hands to the leader, as text of ASCII.

    What tells of the cause stays longest: how ranks ended, the last words of those that failed by themselves, the
    verdict, the main threads' calls, the collectives' numbers, the crashing thread of a core. What others said and did
    is shortened first.

    Args:
        evidence: what this host knows.
        limit_bytes: how long the text may be; where not even the least finds room, it is empty.
    """
    outputs = evidence.outputs_by_rank
    evidence = evidence._replace(
        outputs=tuple(output._replace(rank=rank) for rank, output in outputs.items()), hosts=(), abort_reason=None
    )
    evidence = evidence_without_secrets(evidence)
    for reduce in REDUCTIONS:
        evidence = reduce(evidence)
        text = _packed(evidence)
        if text and len(text) <= limit_bytes:
            return text
    return ""


def _packed(evidence: Evidence) -> str:
    tables = _Tables()
    dumps: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
    # Numbers are of use only where it is known what some threads wait for.
    known = {
        (one.rank, one.pid) for one in evidence.capture.processes if any(wait.tid != one.pid for wait in one.waits)
    }
    for dump in evidence.capture.stacks:
        threads = tuple(tables.thread(thread, dump.pid) for thread in dump.threads)
        likeness = (dump.is_rank, dump.name, dump.tool, dump.failure, threads)
        tids = tuple(thread.tid for thread in dump.threads) if (dump.rank, dump.pid) in known else ()
        # (Numbers of a namespace are of no use either.)
        tids = tids if dump.pid in tids else ()
        dumps.setdefault(likeness, []).append((dump.rank, dump.pid, *tids))
    recorders: dict[tuple[object, ...], list[int]] = {}
    for one in evidence.capture.collectives:
        recorders.setdefault((one.failure, one.groups, one.incomplete, one.has_failed), []).append(one.rank)
    cores = [
        (core._replace(threads=()), tuple(tables.thread(thread, core.pid) for thread in core.threads))
        for core in evidence.cores
    ]
    rest = evidence._replace(capture=evidence.capture._replace(stacks=(), collectives=()), cores=())
    part = (
        _VERSION,
        rest,
        tuple(tables.frames),
        tuple(tables.stacks),
        tuple((owners, *likeness) for likeness, owners in dumps.items()),
        tuple((ranks, *likeness) for likeness, ranks in recorders.items()),
        cores,
    )
    try:
        content = json.dumps(part, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return ""
    if len(content) > _LONGEST_JSON:
        return ""
    return base64.b85encode(zlib.compress(content, 9 if len(content) < 1 << 17 else 6)).decode()


def decode_part(text: str) -> Evidence | None:
    """The other end of :func:`encode_part`; None where the text is no part.

    Threads have lost their numbers where it is not known what any but the main thread waits for.
    """
    if not 0 < len(text) <= _LONGEST_TEXT:
        return None
    try:
        content = zlib.decompressobj().decompress(base64.b85decode(text), _LONGEST_JSON)
        part: _Part = fit(_Part, loads(content))
    except (ValueError, TypeError, zlib.error):
        return None
    return _unpacked(part) if part.version == _VERSION else None


def _unpacked(part: _Part) -> Evidence:
    frames = part.frames
    stacks = [tuple(frames[index] for index in calls if 0 <= index < len(frames)) for calls in part.stacks]

    def thread(packed: _Thread, pid: int, tid: int = 0) -> ThreadStack:
        calls = stacks[packed.stack] if 0 <= packed.stack < len(stacks) else ()
        number = pid if packed.is_main else max(tid, 0)
        return ThreadStack(packed.name, number, packed.is_main, packed.active, packed.owns_gil, calls)

    dumps: list[StackDump] = []
    room = _MOST_THREADS
    for dump in part.dumps:
        for owner in dump.owners[: _MOST_PROCESSES - len(dumps)]:
            room -= len(dump.threads)
            if len(owner) >= 2 and room >= 0:  # noqa: PLR2004 - rank and pid
                rank, pid, *tids = owner
                threads = tuple(map(thread, dump.threads, repeat(pid), chain(tids, repeat(0))))
                dumps.append(StackDump(rank, pid, dump.is_rank, dump.name, dump.tool, threads, dump.failure))
    recorders: list[RankCollectives] = []
    for recorder in part.recorders:
        alike = recorder.ranks[: _MOST_PROCESSES - len(recorders)]
        values = (recorder.groups, recorder.failure, recorder.incomplete, recorder.has_failed)
        recorders += [RankCollectives(rank, *values) for rank in alike]
    cores = tuple(
        core.dump._replace(threads=tuple(thread(packed, core.dump.pid) for packed in core.threads))
        for core in part.cores
    )
    evidence = part.evidence
    return evidence._replace(
        capture=evidence.capture._replace(stacks=tuple(dumps), collectives=tuple(recorders)),
        cores=cores,
        hosts=(),
        abort_reason=None,
    )
