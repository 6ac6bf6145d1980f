"""A post-mortem debugger in a rank, for ``--pdb``. The hook (``saferun_hook.py``) loads it where that is asked for.

The first rank of the job with an exception that ends it opens pdb where it was raised; others that fail meanwhile wait
until it has ended, so that their end does not stop the rank in the debugger. The exit code is that of the exception.
Which rank of a host is the first is decided by a file lock, which host is by the ranks' store: whose key is there.

As little as possible is imported before there is an exception: a script that asks what is in ``sys.modules`` gets the
same answer as without. A rank without torch asks the store by way of a process of its own.
"""  # noqa: INP001 - the directory stands on PYTHONPATH; a package it is not

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

_LONGEST_WAIT_S = 12 * 3600.0
_CHECK_S = 0.2
# A store that does not answer by then decides nothing: each host has a debugger of its own.
_STORE_S = 10.0
# The same where torch has to be imported for that.
_IMPORT_S = 30.0
_LONGEST_RANK = 10
_LARGEST_ANSWER = 1 << 16
# An import of torch may end the process that it is tried in.
_ASK = """
import sys
sys.path[:] = [path for path in sys.path if path]
from datetime import timedelta
from torch.distributed import TCPStore
address, port, key, own, seconds = sys.argv[1:]
store = TCPStore(address, int(port), None, False, timedelta(seconds=float(seconds)), wait_for_workers=False)
print("first:", store.compare_set(key, "", own).decode(), flush=True)
"""


def begin(prefix: str) -> None:
    """Have an exception that ends this process debugged. ``prefix``: ``SAFERUN_HOOK``, as ``…/a0r3``."""
    directory, _, name = prefix.rpartition("/")
    attempt = name.partition("r")[0]
    path = f"{directory}/{attempt}.pdb"
    pid = os.getpid()
    is_debugged = False

    def debugging(shown_before: "Callable[..., Any]") -> "Callable[..., Any]":
        def debug(kind: "type[BaseException]", error: BaseException, trace: "TracebackType | None") -> None:
            nonlocal is_debugged
            # The one hook may call the other.
            if is_debugged or os.getpid() != pid or not issubclass(kind, Exception) or not _is_uncaught(error, trace):
                shown_before(kind, error, trace)
                return
            is_debugged = True
            # torch shows the traceback by way of a buffer, which it would print after the debugger.
            shown, sys.stderr = sys.stderr, sys.__stderr__ or sys.stderr
            try:
                shown_before(kind, error, trace)
                sys.stderr.flush()
            finally:
                sys.stderr = shown
            try:
                _debug(path, attempt, trace)
            except BaseException:  # noqa: S110 - whatever it is, the failure goes its usual way
                pass

        # It can be pickled, as the one in its place.
        debug.__module__, debug.__qualname__, debug.__name__ = "sys", "excepthook", "excepthook"
        return debug

    is_plain = sys.excepthook is sys.__excepthook__
    sys.__excepthook__ = debugging(sys.__excepthook__)
    sys.excepthook = sys.__excepthook__ if is_plain else debugging(sys.excepthook)


def _is_uncaught(error: BaseException, trace: "TracebackType | None") -> bool:
    """Whether Python calls the hook, or a hook of the script's with its own exception in place of that one.

    Python notes both ahead of its call; a script that prints an exception which it handles does not.
    """
    # Not by comparing, which is code of the script's.
    if error is getattr(sys, "last_exc", None) or error is getattr(sys, "last_value", None):
        return True
    return trace is not None and trace is getattr(sys, "last_traceback", None)


def _debug(path: str, attempt: str, trace: "TracebackType | None") -> None:
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
        own = os.environ.get("RANK", "?")
        first = _first_of_job(f"saferun/pdb/{attempt}", own)
        if first != own:
            sys.stdout.write(f"saferun: rank {own} has failed, too, and waits: rank {first} is in the debugger\n")
            sys.stdout.flush()
            while time.monotonic() < give_up_at:  # the end of that rank ends this one
                time.sleep(_CHECK_S)
            return
        import pdb  # noqa: T100 - what the user has asked for

        sys.stdout.write(f"saferun: rank {own} is in the debugger; q or Ctrl-D ends it\n")
        sys.stdout.flush()
        pdb.post_mortem(trace)
    finally:
        os.close(descriptor)


def _first_of_job(key: str, own: str) -> str:
    """The rank whose host was the first to ask; this one where there is no other host, or no store to ask."""
    distributed = sys.modules.get("torch.distributed")
    store_class: Any = getattr(distributed, "TCPStore", None)
    environ = os.environ
    is_alone = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    # A store that one of the ranks serves may be gone with that rank.
    if is_alone or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own
    if distributed is None:
        first = _asked_without_torch(key, own)
    elif store_class is None:
        return own
    else:
        first = _asked(store_class, key, own)
    return first if first.isdecimal() and len(first) <= _LONGEST_RANK else own


def _asked(store_class: "Callable[..., Any]", key: str, own: str) -> str:
    """What the store answers; empty: nothing in time."""
    import threading
    from datetime import timedelta

    found: list[str] = []

    def ask() -> None:
        try:
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = store_class(address, port, None, False, timedelta(seconds=_STORE_S / 2), wait_for_workers=False)
            found.append(store.compare_set(key, "", own).decode())
        except Exception:  # noqa: S110 - as if there were none
            pass

    # A name service that does not answer holds up that thread only.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_STORE_S)
    return found[0] if found else ""


def _asked_without_torch(key: str, own: str) -> str:
    """The same by a Python of its own, whatever becomes of that; it is killed after a time, and not waited for."""
    import select
    import subprocess
    import time

    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (sys.executable and address and port.isdecimal()):
        return ""
    sys.stdout.write(f"saferun: rank {own} asks which rank of the job failed first\n")
    sys.stdout.flush()
    command = [sys.executable, "-c", _ASK, address, port, key, own, str(_STORE_S / 2)]
    quiet = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet)
    except OSError:
        return ""
    content, give_up_at = b"", time.monotonic() + _IMPORT_S
    try:
        out = child.stdout.fileno() if child.stdout is not None else -1
        poll = select.poll()  # `select` takes no descriptor beyond 1023
        poll.register(out, select.POLLIN)
        while len(content) < _LARGEST_ANSWER:
            block = os.read(out, 4096) if poll.poll(max(give_up_at - time.monotonic(), 0.0) * 1000) else b""
            if not block:
                break
            content += block
            if b"first:" in content and content.endswith(b"\n"):
                break
    finally:
        child.kill()
        _unwaited.append(child)
        if child.stdout is not None:
            child.stdout.close()
    answers = [line for line in content.decode(errors="replace").splitlines() if line.startswith("first: ")]
    return answers[-1].partition(" ")[2] if answers else ""


# Its end may take forever, and who forgets it is warned of that.
_unwaited: "list[Any]" = []
