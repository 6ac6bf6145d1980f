"""The classes of causes of a hang, by what the rank that holds up the others waits in. Pure."""

from __future__ import annotations

from saferun.diagnosis.rank_waits import Wait
from saferun.diagnosis.wait_rules import KERNEL_LOCK_FILE, LOCK_FILE, OWN_GIL
from saferun.model import Value
from saferun.text.wording import NOT_PYTHON


class HangClass(Value):
    """A class of causes; ``advice`` may hold ``{at}``, ``{what}`` and ``{ranks}``."""

    name: str
    advice: str


OTHER_WAY = "every rank must come to the same collectives in the same order"
# In order of how sure it is that a rank in such a state is the one that holds up the others.
CLASSES: dict[str, HangClass] = {
    "stopped": HangClass("hang_stopped", "find out who sent SIGSTOP or pressed Ctrl-Z; kill -CONT lets {ranks} go on"),
    "raised": HangClass(
        "hang_after_error",
        "look at that exception; Python exits only when its exit handlers and all non-daemon threads have ended: make"
        " them daemon threads (threading.Thread(..., daemon=True)), or end them in a finally",
    ),
    "uninterruptible": HangClass(
        "hang_uninterruptible",
        "the kernel waits for a disk, a network file system or a driver: look at dmesg and at the mounts of this host",
    ),
    "spinning": HangClass("hang_spinning", "if it is no long step: look at what the loop{at} waits for"),
    "debugger": HangClass("hang_debugger", "leave the debugger, or remove the breakpoint{at}"),
    "file_io": HangClass("hang_file_io", "look at {what}: is its other end, or the file system that it is on, alive?"),
    "data_loading": HangClass(
        "hang_data_loading",
        "check what the worker waits for; locks held at fork stay locked: multiprocessing_context='spawn'",
    ),
    "lock": HangClass("hang_lock", "look at who holds, or should feed, what it waits for{at}"),
    "sleep": HangClass("hang_sleep", "find out why it sleeps{at}"),
    "subprocess": HangClass("hang_subprocess", "look at what {what} does, and give the wait for it a timeout"),
    "network": HangClass("hang_network", "look at the other end of {what}, and give the wait for it a timeout"),
    "compile": HangClass(
        "hang_compile", "compilers may take minutes; compile before the first collective, or on one rank"
    ),
    "user_code": HangClass("hang_missing_collective", "check the code path that it took{at}"),
    "gpu": HangClass("hang_gpu", "look at the GPU's state in the captures, and at the kernel log for Xid messages"),
    "interpreter": HangClass(
        "hang_interpreter",
        "look at what it printed last: imports run at its start, exit handlers and destructors at its end; saferunctl"
        " stacks shows its native stack, by gdb",
    ),
    "unanswering": HangClass(
        "hang_unknown", "allow saferun to look into the ranks (ptrace), or look at the ranks' output"
    ),
    "collective": HangClass("hang_missing_collective", "compare the ranks' code paths"),
    "dead": HangClass("hang_early_exit", f"a rank may end only when all collectives are over: {OTHER_WAY}"),
}
_SEVERITY = {kind: order for order, kind in enumerate(CLASSES)}
_FIFO = HangClass("hang_fifo", "start the process that opens the other end of {what}")
_LOCK_FILE_ADVICE = "look for a lock file that a killed process has left behind, and remove it"
# filelock and its like lock by flock(2): to remove a file that is locked lets two processes write the same cache.
_KERNEL_LOCK_ADVICE = (
    "find who holds it (lsof or fuser on the lock file, on every host that has it), and do not remove the file while a"
    " process has it: such a lock ends with its holder; a SoftFileLock alone is left behind by a process that is killed"
)
_OWN_GIL_ADVICE = (
    "a deadlock within torch: keep the tensors of the last collectives until the process group has been destroyed, or"
    " use a newer torch"
)
_NO_PYTHON_ADVICE = "saferunctl stacks shows the native stacks of such processes, by gdb"
MISMATCH_ADVICE = "compare the code of the ranks: no collective may stand behind a condition that differs between them"
CIRCLE_ADVICE = "every rank must enter its groups in the same order: compare the order of their calls at these lines"
STUCK_ADVICE = (
    "look at the GPUs of {ranks} (nvidia-smi, Xid messages in the kernel log) and at the network between them; a kernel"
    " of the job's own that never ends looks alike, and TORCH_NCCL_ENABLE_TIMING=1 shows whose it is"
)
ALL_ADVICE = (
    "look at the GPUs in the captures and, in a job of several hosts, at the ranks of the others and the network "
    "between them"
)
RECEIVE_ADVICE = "each waits for a message that no rank sends: compare the order of their sends and receives"
STORE_ADVICE = "check whether all ranks were started, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE"
_FORKED = frozenset({"a forked child", "a process pool"})
_FORK_ADVICE = "check what the child waits for; locks held at fork stay locked: start children with spawn"


def severity_of(wait: Wait) -> int:
    """The place in that order; the lesser is the surer."""
    return _SEVERITY.get(wait.found.kind, len(_SEVERITY))


def class_of(wait: Wait) -> HangClass:
    """The class of what one rank waits in."""
    kind, what = wait.found.kind, wait.found.detail
    if kind == "file_io" and "FIFO" in what:
        return _FIFO
    if kind == "subprocess" and what in _FORKED:
        return CLASSES["subprocess"]._replace(advice=_FORK_ADVICE)
    if kind == "lock" and what.startswith(KERNEL_LOCK_FILE):
        return CLASSES["lock"]._replace(advice=_KERNEL_LOCK_ADVICE)
    if kind == "lock" and what.startswith(LOCK_FILE):
        return CLASSES["lock"]._replace(advice=_LOCK_FILE_ADVICE)
    if what == OWN_GIL:
        return CLASSES["lock"]._replace(advice=_OWN_GIL_ADVICE)
    if kind == "unanswering" and what.endswith(NOT_PYTHON):
        return CLASSES["unanswering"]._replace(advice=_NO_PYTHON_ADVICE)
    return CLASSES.get(kind, CLASSES["unanswering"])
