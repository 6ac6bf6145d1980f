"""A rank that writes down everything it was given, and then does what the case says.

The harness copies this file into a scratch folder and launches it there, as a script, as a module, or from a shell
script. It reads three variables: ``PROBE_JOB`` (the scratch folder), ``PROBE_DOES`` (JSON: what the ranks do, by
``"rank@attempt"``, ``"rank"`` or ``"*"``), and those of torchrun. What it imports, it imports fast: it runs hundreds
of times. Where ``PROBE_ALONE`` is set there is no launcher, and the probe only writes down what it sees.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
from typing import NoReturn

JOB = os.environ["PROBE_JOB"]
IS_ALONE = os.environ.pop("PROBE_ALONE", "") != ""
RANK = os.environ.get("RANK", "without a number")
ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "without a number")
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2]
PATIENCE_S = 45.0
# How long a rank listens for a second signal after the first: "exactly once" has no other sign.
ECHO_S = 0.3


def streams() -> dict[str, object]:
    """Where the standard streams lead, as far as a rank can tell and care."""
    found: dict[str, object] = {}
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        is_terminal = os.isatty(fd)
        found[f"{name} is a terminal"] = is_terminal
        found[f"{name} blocks"] = os.get_blocking(fd)
        if is_terminal:
            found[f"{name} terminal size"] = list(os.get_terminal_size(fd))
    found["stdin"] = os.readlink("/proc/self/fd/0")
    return found


def signals() -> dict[str, object]:
    """Dispositions as the rank inherited them, with what Python itself sets."""
    return {
        "signals ignored": sorted(s.name for s in signal.valid_signals() if is_ignored(s)),
        "signals blocked": sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    }


def is_ignored(signum: int | signal.Signals) -> bool:
    """Whether a named signal is ignored; real-time signals have no name and no use here."""
    return isinstance(signum, signal.Signals) and signal.getsignal(signum) is signal.SIG_IGN


def process() -> dict[str, object]:
    """What the kernel keeps about this process and hands on from its parent."""
    pid = os.getpid()
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/cmdline") as file:
        command_line = file.read().split("\0")[:-1]
    with open("/proc/self/stat") as file:
        terminal = int(file.read().rpartition(")")[2].split()[4])
    with open("/proc/self/oom_score_adj") as file:
        oom_score_adj = int(file.read())
    return {
        "command line": command_line,
        "cwd": os.getcwd(),
        "parent": os.getppid(),
        "leads its session": os.getsid(0) == pid,
        "leads its process group": os.getpgid(0) == pid,
        "has a controlling terminal": terminal != 0,
        "umask": umask,
        "niceness": os.nice(0),
        "cpus": sorted(os.sched_getaffinity(0)),
        "oom_score_adj": oom_score_adj,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "open files": open_files(),
    }


def open_files() -> list[str]:
    """What is open besides the standard streams. An interpreter started with ``-m`` or a script has nothing."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the folder that was just listed
        # saferun's start-up hook keeps a file open, out of the way of the numbers that a script counts on.
        is_the_hooks = int(fd) >= 200 and target.endswith(".stacks")
        if int(fd) > 2 and not target.endswith("/fd") and not is_the_hooks:
            found.append(target.partition(":[")[0])
    return sorted(found)


def interpreter() -> dict[str, object]:
    """What Python was told, and what the script can see of how it was started."""
    return {
        "argv": sys.argv,
        "executable": sys.executable,
        "flags": {name: getattr(sys.flags, name) for name in dir(sys.flags) if is_flag(name)},
        "warnings": sys.warnoptions,
        "path": sys.path,
        "module": [__name__, __file__, __package__, getattr(__spec__, "name", None)],
        "faulthandler": faulthandler.is_enabled(),
        "stdout encoding": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering],
    }


def is_flag(name: str) -> bool:
    """Whether a member of ``sys.flags`` is one of the interpreter's flags."""
    return not name.startswith(("_", "n_")) and name not in {"count", "index"}


def error_file() -> dict[str, object]:
    """Whether a report can be written where torchrun's variable says."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    return {"error file can be written": bool(path) and os.access(os.path.dirname(path), os.W_OK)}


def path_of(rank: str) -> str:
    """Where a rank of this attempt writes its record."""
    return os.path.join(JOB, "records", f"attempt_{ATTEMPT}-rank_{rank}.json")


def write(record: dict[str, object]) -> None:
    """Put the record in place in one step: who sees it, sees it whole."""
    unfinished = f"{path_of(RANK)}.{os.getpid()}"
    with open(unfinished, "w") as file:
        json.dump(record, file)
    os.replace(unfinished, path_of(RANK))


def say(fd: int, word: str) -> None:
    """Write one line in one piece. The semicolon ends it where two ranks' lines run together."""
    os.write(fd, f"probe: rank {RANK} attempt {ATTEMPT} {word};\n".encode())


def wait_for_peers() -> None:
    """Return once every rank of this attempt has written its record: the end of one ends all."""
    deadline = time.monotonic() + PATIENCE_S
    while not all(os.path.exists(path_of(str(rank))) for rank in range(int(os.environ["WORLD_SIZE"]))):
        if time.monotonic() > deadline:
            raise TimeoutError("a peer wrote no record")
        time.sleep(0.01)


def do(action: str, record: dict[str, object]) -> None:
    """Carry out one action of the case."""
    verb, _, argument = action.partition(" ")
    match verb:
        case "say":
            os.write(1, argument.encode())
        case "read":
            record["read"] = sys.stdin.readline()
        case "wait" | "stubborn":
            record["received"] = received = []
            wait_s = PATIENCE_S
            while (info := signal.sigtimedwait(SIGNALS, wait_s)) is not None:
                received.append(signal.Signals(info.si_signo).name)
                write(record)
                wait_s = PATIENCE_S if verb == "stubborn" else ECHO_S
        case "connect":
            record["store answers"] = store_answers()
        case "reduce":
            record["sum"] = reduced()
        case _:
            wait_for_peers()
            end(verb, argument)


def end(verb: str, argument: str) -> NoReturn:
    """End this rank the way the case says, after an error file where it says so."""
    match verb:
        case "exit":
            sys.exit(int(argument))
        case "kill":
            os.kill(os.getpid(), signal.Signals[argument])
        case "report":
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                file.write(argument)
            sys.exit(1)
        case "record":
            from torch.distributed.elastic.multiprocessing.errors import record as recorded

            recorded(fail)()
        case "raise":
            fail()
    raise AssertionError(verb)


def fail() -> NoReturn:
    """Fail as a training script does."""
    raise RuntimeError("the probe was told to fail")


def store_answers() -> bool:
    """Whether something accepts connections at the address the ranks are to meet at."""
    import socket

    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
    except OSError:
        return False
    return True


def reduced() -> float:
    """Meet the other ranks in a real process group and add up all ranks."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo")
    total = torch.tensor([float(RANK)])
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return float(total.item())


def main() -> None:
    """Speak, write the record, report as ready, act, and complete the record."""
    record: dict[str, object] = {"environment": dict(os.environ)}
    for part in (streams, signals, process, interpreter, error_file):
        record.update(part())
    plan = {} if IS_ALONE else json.loads(os.environ.get("PROBE_DOES", "{}"))
    actions = plan.get(f"{RANK}@{ATTEMPT}", plan.get(RANK, plan.get("*", [])))
    if any(action in {"wait", "stubborn"} for action in actions):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for fd, word in ((1, "stdout"), (1, "stdout apple"), (2, "stderr"), (2, "stderr pear")):
        say(fd, word)
    write(record)
    ready = os.open(os.path.join(JOB, "ready"), os.O_RDWR)  # which does not wait for a reader
    os.write(ready, b"ready\n")
    os.close(ready)
    for action in actions:
        do(action, record)
    record["ended by itself"] = True
    write(record)


if __name__ == "__main__":
    main()
