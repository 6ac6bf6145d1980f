"""Tracebacks as failed ranks print them, which tests of the diagnosis share."""

from __future__ import annotations

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
C10D = '  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9, in all_reduce'
RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4242"
TIMEOUT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv "
    "operation to complete"
)
LOST = (HEAD, STEP, C10D, f"RuntimeError: {RESET}")
"""Of a rank whose peer has ended."""
IN_TASK_GROUP = "unhandled errors in a TaskGroup"


def group(*errors: str, title: str = IN_TASK_GROUP, kind: str = "ExceptionGroup") -> tuple[str, ...]:
    """An exception group with these errors. ``title``: its message; ``kind``: its class."""
    lines = [
        f"  + Exception Group {HEAD}",
        '  |   File "/home/user/job/train.py", line 9, in main',
        f"  | {kind}: {title} ({len(errors)} sub-exceptions)",
    ]
    for number, error in enumerate(errors, 1):
        lines.append(f"  {'+-' if number == 1 else '  '}+---------------- {number} ----------------")
        lines += [f"    | {line}" for line in (HEAD, STEP, error)]
    return (*lines, "    +------------------------------------")
