"""The output of ``py-spy dump --json`` as values. It has names that the rank chose, so everything is bounded. Pure."""

from __future__ import annotations

from typing import Any

from saferun.evidence.job_evidence import Frame, ThreadStack
from saferun.text.decoding import MALFORMED, loads, number_or, text_or_empty

_THREADS_LIMIT = 256
_FRAMES_LIMIT = 256
_ALL_FRAMES_LIMIT = 8192
_INNERMOST_KEPT = 192
# Thousands of threads are decoded, of which some are left out.
_ITEMS_LIMIT = 4 << 20
_LENGTH_LIMIT_BYTES = 64 << 20
_NAME_LIMIT = 512
_PATH_LIMIT = 1024
_HIGHEST = (1 << 31) - 1


def threads_from(content: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """The same as ``threads_from_json``, each thread with a number of its own; none if no thread has a frame."""
    try:
        threads = threads_from_json(content, pid, numbers_all=True)
    except MALFORMED:
        return ()
    return threads if any(thread.frames for thread in threads) else ()


def threads_from_json(content: bytes, pid: int, *, numbers_all: bool = False) -> tuple[ThreadStack, ...]:
    """Parse the output of ``py-spy dump --json``, the main thread first.

    Args:
        content: the output.
        pid: the process.
        numbers_all: a thread whose number in the kernel py-spy does not know gets that of pthread, not 0.

    Raises:
        ValueError: it is malformed.
    """
    raw_threads = loads(content, longest=_LENGTH_LIMIT_BYTES, most=_ITEMS_LIMIT)
    if not isinstance(raw_threads, list):
        raise ValueError("it is not a list of threads")  # noqa: TRY004 - what was read is wrong, not the caller
    threads = []
    left = _ALL_FRAMES_LIMIT
    found = [raw for raw in raw_threads if isinstance(raw, dict)]
    # The main thread comes last, and of hundreds of threads some are left out.
    for raw in sorted(found, key=lambda raw: not _is_main(raw, pid))[:_THREADS_LIMIT]:
        if left > 0:
            thread = _thread(raw, pid, left)
            if numbers_all and thread.tid == 0:
                thread = thread._replace(tid=number_or(0, raw.get("thread_id")))
            left -= len(thread.frames)
            threads.append(thread)
    if not threads:
        raise ValueError("there is no thread in it")
    return tuple(threads)


def _is_main(raw: dict[str, Any], pid: int) -> bool:
    tid = number_or(0, raw.get("os_thread_id"), 0, _HIGHEST)
    return tid == pid if tid else raw.get("thread_name") == "MainThread"


def _thread(raw: dict[str, Any], pid: int, left: int) -> ThreadStack:
    frames = raw.get("frames")
    kept: list[Any] = frames if isinstance(frames, list) else []
    if len(kept) > _FRAMES_LIMIT:
        # Of an endless recursion keep both ends: where it is, and how it began.
        kept = kept[:_INNERMOST_KEPT] + kept[_INNERMOST_KEPT - _FRAMES_LIMIT :]
    return ThreadStack(
        text_or_empty(raw.get("thread_name"), _NAME_LIMIT),
        number_or(0, raw.get("os_thread_id"), 0, _HIGHEST),
        _is_main(raw, pid),
        raw.get("active") is True,
        raw.get("owns_gil") is True,
        tuple(_frame(frame) for frame in kept[:left] if isinstance(frame, dict)),
    )


def _frame(raw: dict[str, Any]) -> Frame:
    # Only native frames have a module: their library.
    module = raw.get("module")
    file = text_or_empty(raw.get("filename") or module, _PATH_LIMIT)
    return Frame(
        text_or_empty(raw.get("name"), _NAME_LIMIT),
        file,
        number_or(0, raw.get("line"), 0, _HIGHEST),
        isinstance(module, str),
    )
