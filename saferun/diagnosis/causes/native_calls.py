"""Which native call a process crashed in. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.diagnosis.frames import is_nameless, is_native, native_name
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.job_evidence import Frame

# Calls that a crash goes through before it ends the process, and those that only raise what others have found.
_CRASH_MACHINERY = LazyPattern(
    r"(?:__)?(?:GI_)?_{0,2}(?:pthread_kill|raise|gsignal|abort|kill|tgkill|syscall|restore_rt|libc_message|fortify_fail"
    r"|assert_fail|assert_fail_base|chk_fail|stack_chk_fail|sigaction)(?:_implementation|_internal|\.cold)?$"
    r"|<signal handler called>|faulthandler_|std::(?:terminate|rethrow_exception)|__cxxabiv1::|__gnu_cxx::__verbose_"
    r"|__cxa_|_Unwind_|__libc_fatal|malloc_printerr|_int_free|_int_malloc|os_abort|os_kill|signal_raise_signal"
)
# The C library has these once for each kind of processor. The caller with the bad address is the better name.
_MEMORY_CALL = LazyPattern(
    r"_{0,3}((?:mem|str|wcs|wmem)[a-z]{2,12})_(?:evex|avx|sse|erms|unaligned|ssse|generic)\w{0,40}$"
)
_INTERPRETER = LazyPattern(
    r"/libpython|(?:^|/)python[\d.]{0,12}$|(?:^|/)(?:Modules|Objects|Python)/|module\.c(?:\.h)?$|ceval\.c$"
)


def native_call(frames: Iterable[Frame]) -> tuple[str, str, str]:
    """What is put before the call's name (``memcpy, called by ``), its name, and its file; empty where unknown.

    Args:
        frames: of the thread that crashed, innermost first.
    """
    raised = False
    inner = ""
    for frame in frames:
        if not is_native(frame):
            break
        name = native_name(frame.function)
        if _CRASH_MACHINERY.match(name):
            raised = True
            continue
        if raised and _INTERPRETER.search(frame.file):
            # Python's own call of raise or abort: it was asked to.
            break
        if is_nameless(frame) or not name:
            continue
        memory = _MEMORY_CALL.match(name)
        if memory is not None and not inner:
            inner = memory[1]
            continue
        return f"{inner}, called by " if inner else "", name, frame.file
    return "", inner, ""
