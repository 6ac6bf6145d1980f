"""Stacks of a living process by pystack, printed in py-spy's format.

A separate program, started by its path: pystack may block in the kernel on a process that cannot be stopped, and then
has to be killed.
"""

from __future__ import annotations

import json
import sys


def main(pid: int, *, stop_process: bool) -> None:
    """Print the stacks of a process as JSON. Errors go to stderr."""
    from pystack.engine import get_process_threads

    threads = []
    for thread in get_process_threads(pid, stop_process=stop_process):
        frames = [
            {"name": frame.code.scope, "filename": frame.code.filename, "line": frame.code.location.lineno}
            for frame in thread.frames
        ]
        # pystack's frames begin with the outermost call.
        frames.reverse()
        owns_gil = thread.holds_the_gil > 0
        threads.append(
            {
                "os_thread_id": thread.tid,
                "thread_name": thread.name or ("MainThread" if thread.tid == pid else ""),
                "active": owns_gil,
                "owns_gil": owns_gil,
                "frames": frames,
            }
        )
    print(json.dumps(threads))  # noqa: T201 - its answer


if __name__ == "__main__":
    main(int(sys.argv[1]), stop_process=sys.argv[2:] != ["--no-block"])
