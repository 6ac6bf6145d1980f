"""The command lines of ranks that run under a tool (``--wrap``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from saferun.config import Command, RankChoice, WrapConfig
from saferun.errors import UsageError
from saferun.linux.small_files import read_pairs, read_text
from saferun.model import Placement, RankAssignment, Value

_MAY_MEASURE = 1 << 21 | 1 << 38  # CAP_SYS_ADMIN, CAP_PERFMON
_MOST_OPEN_LEVEL = 2
_OWN_TOOLS = frozenset({"py-spy"})
_PLACEHOLDERS = ("rank", "local_rank", "rank_dir", "host")
# Words of a few letters easily have most of them in common: cost, host.
_SHORT = 4
_SHORT_ALIKE, _ALIKE = 0.8, 0.65


class Wrapper(Value):
    """A tool that a rank runs under. ``is_module``: its Python runs this in place of the script (``-m memray run``)."""

    name: str
    argv: tuple[str, ...]
    is_module: bool = False

    def around(self, argv: Sequence[str]) -> list[str]:
        """The command line of a rank under it."""
        if not self.is_module:
            return [*self.argv, *argv]
        # Behind the options of the interpreter, each of which is one word.
        after = next((at for at, word in enumerate(argv) if at and (word == "-m" or word[:1] != "-")), len(argv))
        return [*argv[:after], *self.argv, *argv[after:]]


def is_meant(ranks: RankChoice, assignment: RankAssignment, host: str) -> bool:
    """Whether a rank is among those that ``--wrap`` names. ``host``: its name; the option may leave the domain out."""
    if ranks.host:
        return ranks.host in {host, host.partition(".")[0]}
    number = assignment.local_rank if ranks.is_local else assignment.rank
    return any(first <= number <= last for first, last in ranks.ranges)


def wrappers_of(
    wraps: Sequence[WrapConfig],
    placement: Placement,
    host: str,
    rank_dirs: Sequence[str | None],
    command: Command,
) -> tuple[tuple[Wrapper, ...], ...]:
    """What each rank of this host runs under, the outermost tool first.

    Args:
        wraps: as they were asked for.
        placement: of this host's ranks.
        host: its name.
        rank_dirs: the directory of each rank; None where there is no run directory.
        command: what the ranks run.

    Raises:
        UsageError: the job has no such rank, the output has no directory, or the command is not a Python interpreter.
    """
    for wrap in wraps:
        if (error := missing_rank(wrap, placement)) is not None:
            raise error
    python = sys.executable if command.run_path else command.argv[0]
    return tuple(
        tuple(
            _wrapper(wrap, assignment, host, rank_dir, python)
            for wrap in wraps
            if is_meant(wrap.ranks, assignment, host)
        )
        for assignment, rank_dir in zip(placement.ranks, rank_dirs, strict=True)
    )


def usable_wrappers(
    wraps: Sequence[WrapConfig],
    placement: Placement,
    host: str,
    rank_dirs: Sequence[str | None],
    command: Command,
    environs: Sequence[Mapping[str, str]],
) -> tuple[tuple[Wrapper, ...], ...]:
    """The same for tools that are on this host.

    Args:
        wraps: as they were asked for.
        placement: of this host's ranks.
        host: its name.
        rank_dirs: the directory of each rank; None where there is no run directory.
        command: what the ranks run.
        environs: the environment of each rank.

    Raises:
        UsageError: as ``wrappers_of``, or a tool is not here.
    """
    wrappers = with_own_tools(wrappers_of(wraps, placement, host, rank_dirs, command), environs)
    if (error := missing_tool(wrappers, environs)) is not None:
        raise error
    return wrappers


def with_own_tools(
    wrappers: Sequence[tuple[Wrapper, ...]], environs: Sequence[Mapping[str, str]]
) -> tuple[tuple[Wrapper, ...], ...]:
    """The same with the path of a tool that is installed with saferun, if it is not on the PATH of the ranks.

    saferun may be called without its environment being activated.
    """
    return tuple(
        tuple(_from_own_environment(wrapper, environ) for wrapper in of_rank)
        for of_rank, environ in zip(wrappers, environs, strict=True)
    )


def missing_rank(wrap: WrapConfig, placement: Placement) -> UsageError | None:
    """The error for a rank that the job does not have, if there is one."""
    largest = max((last for _, last in wrap.ranks.ranges), default=0)
    count = (placement.local_world_size or len(placement.ranks)) if wrap.ranks.is_local else placement.world_size
    if wrap.ranks.may_miss or wrap.ranks.host or largest < count:
        return None
    what = "local rank" if wrap.ranks.is_local else "rank"
    return UsageError(
        f"--wrap: there is no {what} {largest} to run under {wrap.name}",
        f"the largest is {count - 1} here; * names all of them",
    )


def missing_tool(wrappers: Sequence[Sequence[Wrapper]], environs: Sequence[Mapping[str, str]]) -> UsageError | None:
    """The error for a tool that is not here, if there is one."""
    for of_rank, environ in zip(wrappers, environs, strict=True):
        for wrapper in of_rank:
            if not wrapper.is_module and not _is_here(wrapper.argv[0], environ.get("PATH", os.defpath)):
                return UsageError(
                    f"--wrap: {wrapper.argv[0]} is not installed here, or not on the PATH of the ranks",
                    "install it, or write where it is: --wrap 'RANKS:/path/to/tool ...'",
                )
    return None


def misspelt_lines(wraps: Sequence[WrapConfig]) -> list[str]:
    """A line for each word in braces that looks like a misspelt placeholder.

    Other words are the tool's own: ``awk '{print}'``, ``xargs -I{}``; and ``${rank}`` is a variable of a shell.
    """
    import re

    from saferun.env.profiles.quoting import nearest

    lines = []
    for wrap in wraps:
        for word in re.findall(r"(?<!\$)\{([A-Za-z][A-Za-z_-]*)\}", " ".join(wrap.argv)):
            near = nearest(word, _PLACEHOLDERS, likeness=_SHORT_ALIKE if len(word) <= _SHORT else _ALIKE)
            if near is not None and word != near:
                lines.append(f"--wrap: {{{word}}} goes to {wrap.name} as it is; did you mean {{{near}}}?")
    return list(dict.fromkeys(lines))


def cost_lines(wraps: Sequence[WrapConfig], placement: Placement, host: str) -> list[str]:
    """What is said of it before the ranks of this host start, one line a tool."""
    lines = []
    for wrap in wraps:
        ranks = [assignment.rank for assignment in placement.ranks if is_meant(wrap.ranks, assignment, host)]
        if ranks:
            who = f"rank {ranks[0]} runs" if len(ranks) == 1 else f"{len(ranks)} ranks run"
            lines.append(f"{who} under {wrap.name}{': ' if wrap.cost else ''}{wrap.cost}")
            if os.path.basename(wrap.argv[0]) == "perf" and (why := _perf_refusal()):
                lines.append(f"{wrap.name} may be refused here: {why}")
    return lines


def _perf_refusal(root: str = "/") -> str:
    """Why the kernel may not let perf measure; empty: nothing is known.

    Source: perf_event_open(2); values above 2 are Debian's and Ubuntu's own.
    """
    level = read_text(f"{root}proc/sys/kernel/perf_event_paranoid").strip()
    try:
        is_privileged = bool(int(read_pairs(f"{root}proc/self/status").get("CapEff", "0"), 16) & _MAY_MEASURE)
        is_refused = int(level) > _MOST_OPEN_LEVEL and not is_privileged
    except ValueError:
        return ""
    return f"sysctl kernel.perf_event_paranoid is {level}, and users may measure up to 2" if is_refused else ""


def _wrapper(wrap: WrapConfig, assignment: RankAssignment, host: str, rank_dir: str | None, python: str) -> Wrapper:
    if wrap.is_module and not os.path.basename(python).startswith("python"):
        raise UsageError(
            f"--wrap: {wrap.name} runs Python scripts only, and the ranks run {python}",
            "give its whole command, or leave out --no-python",
        )
    if rank_dir is None and any("{rank_dir}" in item for item in wrap.argv):
        raise UsageError(
            f"--wrap: {wrap.name} is to write into {{rank_dir}}, and there is no run directory",
            "leave out --run-dir none, or name another file",
        )
    values = {
        "rank": str(assignment.rank),
        "local_rank": str(assignment.local_rank),
        "rank_dir": rank_dir or "",
        "host": host,
    }
    argv = []
    for item in wrap.argv:
        text = item
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", value)
        argv.append(text)
    return Wrapper(wrap.name, tuple(argv), wrap.is_module)


def _from_own_environment(wrapper: Wrapper, environ: Mapping[str, str]) -> Wrapper:
    program = wrapper.argv[0]
    if wrapper.is_module or program not in _OWN_TOOLS or _is_here(program, environ.get("PATH", os.defpath)):
        return wrapper
    from saferun.captures.tools import find_tool

    return wrapper._replace(argv=(find_tool(program) or program, *wrapper.argv[1:]))


def _is_here(program: str, path: str) -> bool:
    directories = [""] if "/" in program else path.split(os.pathsep)
    return any(os.access(os.path.join(directory, program), os.X_OK) for directory in directories)
