"""``--wrap 'RANKS:COMMAND ...'``: which ranks run under which tool."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.config import RankChoice, WrapConfig
from saferun.errors import UsageError, printable

_EXAMPLE = "write RANKS:COMMAND, for example --wrap '0:strace -f -o {rank_dir}/strace.txt' or --wrap local:0:nsys"
_LARGEST_RANK = 10_000_000


def read_wraps(texts: Sequence[str]) -> tuple[WrapConfig, ...]:
    """Read the option's values, in their order.

    Args:
        texts: ``0:nsys``, ``3,5-7:perf record``, ``*:...``, ``local:0:...``, ``host:node3:...``.

    Raises:
        UsageError: one of them cannot be read.
    """
    return tuple(map(_read, texts))


def _read(text: str) -> WrapConfig:
    import shlex

    from saferun.launch.wrap_tools import TOOLS

    kind, _, rest = text.partition(":")
    if kind in {"local", "host"}:
        who, separator, command = rest.partition(":")
    else:
        kind, (who, separator, command) = "rank", text.partition(":")
    if not separator or not command.strip():
        raise _error(text, "there is no command")
    try:
        argv = tuple(shlex.split(command))
    except ValueError as error:
        raise _error(text, f"the command cannot be read ({error})") from None
    ranks = _ranks(text, kind, who.strip())
    tool = TOOLS.get(argv[0].rpartition("/")[2])
    if tool is not None and argv[0] in TOOLS and len(argv) == 1:
        return WrapConfig(argv[0], ranks, tool.argv, tool.cost, is_module=tool.is_module)
    cost = tool.cost if tool is not None and tool.always_costs else ""
    return WrapConfig(argv[0], ranks, argv, cost)


def _ranks(text: str, kind: str, who: str) -> RankChoice:
    if kind == "host":
        if not who:
            raise _error(text, "no host is named")
        return RankChoice(host=who)
    if who == "*":
        return RankChoice(is_local=kind == "local", ranges=((0, _LARGEST_RANK),), may_miss=True)
    ranges = []
    for item in who.split(","):
        first, dash, last = item.strip().partition("-")
        if not (first.isascii() and first.isdecimal() and len(first) <= 7):  # noqa: PLR2004 - 10 million ranks
            raise _error(text, f"{item.strip()!r} is no rank")
        if dash and not (last.isascii() and last.isdecimal() and len(last) <= 7 and int(last) >= int(first)):  # noqa: PLR2004
            raise _error(text, f"{item.strip()!r} is no range of ranks")
        ranges.append((int(first), int(last) if dash else int(first)))
    return RankChoice(is_local=kind == "local", ranges=tuple(ranges))


def _error(text: str, why: str) -> UsageError:
    return UsageError(f"--wrap {printable(text)}: {why}", _EXAMPLE)
