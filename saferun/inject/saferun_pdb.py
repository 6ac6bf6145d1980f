"""A post-mortem debugger in a rank, for ``--pdb``. The hook (``sitecustomize.py``) loads it where that is asked for.

The first rank of a host with an exception that ends it opens pdb where it was raised; others that fail meanwhile wait
until it has ended, so that their end does not stop the rank in the debugger. The exit code is that of the exception.

As little as possible is imported before there is an exception: a script that asks what is in ``sys.modules`` gets the
same answer as without.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_LONGEST_WAIT_S = 12 * 3600.0
_CHECK_S = 0.2


def begin(prefix: str) -> None:
    """Have an exception that ends this process debugged. ``prefix``: ``SAFERUN_HOOK``, as ``…/a0r3``."""
    directory, _, name = prefix.rpartition("/")
    path = f"{directory}/{name.partition('r')[0]}.pdb"
    pid = os.getpid()
    shown_before = sys.excepthook

    def debug(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
        if os.getpid() != pid or not issubclass(kind, Exception):
            shown_before(kind, error, trace)
            return
        # torch shows the traceback by way of a buffer, which it would print after the debugger.
        shown, sys.stderr = sys.stderr, sys.__stderr__ or sys.stderr
        try:
            shown_before(kind, error, trace)
            sys.stderr.flush()
        finally:
            sys.stderr = shown
        try:
            _debug(path, trace)
        except BaseException:  # noqa: S110 - whatever it is, the failure goes its usual way
            pass

    sys.excepthook = sys.__excepthook__ = debug


def _debug(path: str, trace: "TracebackType | None") -> None:
    import fcntl
    import time

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        give_up_at = time.monotonic() + _LONGEST_WAIT_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    return
            time.sleep(_CHECK_S)
        if os.fstat(descriptor).st_size or trace is None or not os.isatty(0):
            return  # it is not the first one
        os.write(descriptor, b"%d\n" % os.getpid())
        import pdb  # noqa: T100 - what the user has asked for

        sys.stdout.write(f"saferun: rank {os.environ.get('RANK', '?')} is in the debugger; q or Ctrl-D ends it\n")
        sys.stdout.flush()
        pdb.post_mortem(trace)
    finally:
        os.close(descriptor)
