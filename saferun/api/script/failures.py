"""``saferun.record``: what ends a function, or this process, by an exception is recorded, and goes on as ever."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from threading import ExceptHookArgs
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar, overload

    P = ParamSpec("P")
    R = TypeVar("R")

__all__ = ["record"]

_HEARTBEAT = ".heartbeat"
_HOOK = "_TorchWatcher"


def _rank_process() -> tuple[int, bool]:
    """The rank's process, also where this is imported in a child that it has forked: as its hook has it.

    And whether it is a rank's where it has no hook: that leads a session, and what it starts does not.
    """
    for one in sys.meta_path:
        found = getattr(one, "process", None) if type(one).__name__ == _HOOK else None
        if type(found) is int:
            return found, True
    try:
        return os.getpid(), os.getsid(0) == os.getpid()
    except OSError:
        return os.getpid(), True


_process, _is_rank = _rank_process()
_installed: list[str] = []
"""Files of excepthooks that are installed, at most one: the last one's counts."""

if TYPE_CHECKING:

    @overload
    def record(function: Callable[P, R], *, file: str = "") -> Callable[P, R]: ...

    @overload
    def record(function: None = None, *, file: str = "") -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def record(function: Callable[..., Any] | None = None, *, file: str = "") -> Any:
    """Record exceptions, as a decorator or for the whole process.

    ``@saferun.record`` records what leaves the function, also where the caller handles it. ``saferun.record()`` records
    what nothing handles, in all threads. Under saferun the hook in the ranks does that for the main thread anyway. The
    exception goes on unchanged, with its traceback and exit code; SystemExit is none. No call of this raises, and
    nothing is written outside saferun unless a file is named.

    Args:
        function: what is decorated; None: the whole process, and the result is a decorator.
        file: where the record is written, too: a path, with ``{rank}`` for the variable RANK. It is written by this
            process, which waits two seconds for the file system at most.

    Returns:
        The function; a coroutine function stays one.
    """
    if function is None:
        _install(file)
        return lambda decorated: record(decorated, file=file)
    from functools import wraps
    from inspect import iscoroutinefunction

    if iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the function
            try:
                return await function(*arguments, **named)
            except BaseException as error:
                _keep(error, file)
                raise

        return awaited

    @wraps(function)
    def called(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - as the function
        try:
            return function(*arguments, **named)
        except BaseException as error:
            _keep(error, file)
            raise

    return called


def _install(file: str) -> None:
    """Record what nothing handles; a second time changes the file only."""
    is_first = not _installed
    _installed[:] = [file]
    if not is_first:
        return
    try:
        import threading

        printed, of_thread = sys.excepthook, threading.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            printed(kind, error, trace)
            # Python sets it ahead of its call; a script that prints an exception which it handles does not.
            last = getattr(sys, "last_exc", None)
            last = getattr(sys, "last_value", None) if last is None else last
            _keep(error, _installed[0], uncaught=error is last)

        def thread_excepthook(arguments: ExceptHookArgs, /) -> None:
            of_thread(arguments)
            if arguments.exc_value is not None:
                name = arguments.thread.name if arguments.thread is not None else ""
                _keep(arguments.exc_value, _installed[0], thread=name or "?")

        # They can be pickled, as those in whose place they are.
        excepthook.__module__, excepthook.__qualname__ = "sys", "excepthook"
        thread_excepthook.__module__, thread_excepthook.__qualname__ = "threading", "excepthook"
        sys.excepthook, threading.excepthook = excepthook, thread_excepthook
    except Exception:  # noqa: S110 - it may not disturb the script
        pass


def _keep(error: BaseException, file: str, thread: str = "", *, uncaught: bool | None = None) -> None:
    """Write the record; silent. A forked child is no rank, nor is one that multiprocessing has started."""
    if issubclass(type(error), (SystemExit, GeneratorExit)) or os.getpid() != _process:
        return
    if getattr(sys.modules.get("multiprocessing.process"), "_parent_process", None) is not None:
        return
    heartbeat = os.environ.get("SAFERUN_HEARTBEAT_FILE", "")
    prefix = heartbeat[: -len(_HEARTBEAT)] if _is_rank and heartbeat.endswith(_HEARTBEAT) else ""
    paths = [f"{prefix}.failure"] if prefix else []
    if file:
        paths.append(file.replace("{rank}", os.environ.get("RANK", "0")))
    if not paths:
        return
    try:
        from saferun.inject import saferun_failure, saferun_rings, saferun_written

        is_secret, as_json = saferun_written.is_secret, saferun_written.as_json
        content = saferun_failure.described(
            error,
            thread,
            is_secret=is_secret,
            as_json=as_json,
            uncaught=uncaught,
            calls=(lambda: saferun_rings.last_calls(prefix)) if prefix else None,
        )
    except Exception:
        return
    for path in paths:
        try:
            saferun_written.write(path, content)
        except Exception:  # noqa: S110 - as above
            pass
