"""The output of ``py-spy dump --json`` as values. It is made of names that the rank chose, so everything is bounded."""

from __future__ import annotations

from typing import Any

from saferun.evidence import Frame, ThreadStack
from saferun.text.decoding import MALFORMED, loads

_THREADS = 1024
_FRAMES = 1024
_LENGTH = 512


def threads_from(content: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """The threads of the process; none where the text is no answer about it."""
    try:
        threads = loads(content)
        return tuple(_thread(thread, pid) for thread in threads[:_THREADS])
    except MALFORMED:
        return ()


def _thread(thread: dict[str, Any], pid: int) -> ThreadStack:
    tid = thread["os_thread_id"]
    number = tid if isinstance(tid, int) else int(thread["thread_id"])
    frames = tuple(
        Frame(str(frame["name"])[:_LENGTH], str(frame["filename"])[:_LENGTH], int(frame["line"]))
        for frame in thread["frames"][:_FRAMES]
    )
    name = str(thread.get("thread_name") or "")[:_LENGTH]
    is_main = number == pid or name == "MainThread"
    return ThreadStack(name, number, is_main, bool(thread.get("active")), bool(thread.get("owns_gil")), frames)
