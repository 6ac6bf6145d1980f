"""Tools that are known by a short name in ``--wrap``: how each is called, what it writes, and what it costs. Pure.

Options were chosen so that a tool ends with the script's exit code where it can, and writes into the rank's directory.
Sources: the manuals strace(1), gdb(1), valgrind(1), perf-record(1), the README of py-spy, Memray's and NVIDIA Nsight's
user guides, NVIDIA's Compute Sanitizer, AMD's ROCprofiler-SDK.
"""

from __future__ import annotations

from saferun.model import Value

# gdb stops at crashes only. After the stacks the script gets its signal, so that it ends, or goes on, as without gdb.
_GDB_CRASHES = "SIGSEGV SIGBUS SIGILL SIGFPE SIGABRT SIGSYS SIGTRAP"
_GDB_IGNORES = "nostop noprint pass"
# Where the script's own exit status is not known, that of gdb is reported: as a shell's, 128 + the signal.
_GDB_STATUS = "$_isvoid($_exitsignal) ? ($_isvoid($_exitcode) ? 127 : $_exitcode) : 128 + $_exitsignal"
_GDB_COMMANDS = (
    f"handle all {_GDB_IGNORES}",
    f"handle SIGINT {_GDB_IGNORES}",  # not among "all"
    f"handle {_GDB_CRASHES} stop print",
    "run",
    "thread apply all bt",
    f"handle all {_GDB_IGNORES}",
    f"handle SIGTRAP {_GDB_IGNORES}",
    # Not an error if the script has exited, as "continue" is. gdb 8.2 and older do not know -q.
    "thread apply all -q continue",
    "thread apply all continue",
    "set language c",  # that of the last frame may have no such expressions
    f"quit {_GDB_STATUS}",
)


class WrapTool(Value):
    """A known tool.

    Attributes:
        argv: how it is called, before the script's own command line.
        cost: what the rank and its job pay for it, for people.
        is_module: it is a module of Python that runs scripts: the rank's Python runs it in place of the script.
        always_costs: the cost is that of any of its command lines.
    """

    argv: tuple[str, ...]
    cost: str
    is_module: bool = False
    always_costs: bool = False


TOOLS = {
    "strace": WrapTool(
        ("strace", "-f", "-tt", "-o", "{rank_dir}/strace.txt"),
        "each of its system calls takes many times as long; its hangs are not detected while it is traced",
        always_costs=True,
    ),
    "gdb": WrapTool(
        (
            *("gdb", "-nx", "-batch", "-return-child-result", "-iex", "set auto-load no", "-iex", "set confirm off"),
            *(word for command in _GDB_COMMANDS for word in ("-ex", command)),
            "--args",
        ),
        "at a crash it prints the native stacks of all threads; hangs are not detected while it is traced",
    ),
    "valgrind": WrapTool(
        ("valgrind", "--log-file={rank_dir}/valgrind.txt"),
        "it runs 20 to 50 times slower, and the other ranks wait for it",
        always_costs=True,
    ),
    "perf": WrapTool(("perf", "record", "-g", "-o", "{rank_dir}/perf.data", "--"), "a few percent of its time"),
    "py-spy": WrapTool(
        ("py-spy", "record", "-f", "speedscope", "-o", "{rank_dir}/py-spy.speedscope.json", "--"),
        "a few percent of its time; where the script ends within its first second, its exit code is lost",
    ),
    "memray": WrapTool(
        ("-m", "memray", "run", "-q", "-f", "-o", "{rank_dir}/memray.bin"),
        "each of its allocations takes longer; the file grows with their number",
        is_module=True,
    ),
    "nsys": WrapTool(
        ("nsys", "profile", "-t", "cuda,nvtx,osrt", "-f", "true", "-o", "{rank_dir}/nsys"),
        "a few percent of its time; the report is written when the script has ended, which may take minutes",
    ),
    "ncu": WrapTool(
        ("ncu", "--target-processes", "all", "-f", "-o", "{rank_dir}/ncu"),
        "each kernel runs several times, hundreds of times slower in all: choose kernels with -k",
    ),
    "rocprofv3": WrapTool(
        ("rocprofv3", "--sys-trace", "-d", "{rank_dir}/rocprofv3", "--"),
        "a few percent of its time, and a trace that grows with it",
    ),
    "compute-sanitizer": WrapTool(
        ("compute-sanitizer", "--log-file", "{rank_dir}/compute-sanitizer.txt"),
        "each kernel runs many times slower, and the other ranks wait for it",
        always_costs=True,
    ),
}
