"""What the ranks wrote last: readable lines without secrets, alike ones once, tracebacks folded. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from saferun.model import Value
from saferun.report.page.page_model import LABEL_CHARACTERS, OutputPiece, RankOutputs
from saferun.report.page.run_contents import RankTail
from saferun.report.page.timeline import hosts_text
from saferun.report.text_diagram import rank_ranges
from saferun.text.bounded_json import shown
from saferun.text.redaction import redacted_text
from saferun.text.wording import count_text, size_text

_MOST_LINES, _CULPRITS_LINES = 40, 100
_LONGEST_LINE = 500
_ROOM_CHARACTERS = 420_000
_CULPRITS_CHARACTERS = 48_000
_LEAST_CHARACTERS, _BLOCK_CHARACTERS = 160, 160
_MOST_BLOCKS = 1200
# ECMA-48: control sequences, and operating system commands, which end with BEL or ST.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]{0,16}[@-~]?|\][^\x07\x1b]{0,4096}(?:\x07|\x1b\\)?|.?)")
_TRACEBACK = re.compile(r"(?:\[rank[0-9]+\]:?\s*)?(?:Traceback \(most recent call last\):|Fatal Python error: )")
_RANK_PREFIX = re.compile(r"\[rank[0-9]{1,8}\]:? ?")
_LEAST_TRACEBACK = 3
# Besides twice the room: most characters are a byte, and control sequences are left out.
_SLACK_BYTES = 1024


class Outputs(Value):
    """The blocks of output that there is room for, and what is said of the others."""

    blocks: tuple[RankOutputs, ...]
    omitted: str


def build_outputs(tails: Sequence[RankTail], culprits: frozenset[int], scale: float = 1.0) -> Outputs:
    """The last output of the ranks; that of the cause first, and with more lines.

    Args:
        tails: the ends of their files.
        culprits: the ranks that are the cause.
        scale: how much of what there is room for is used.
    """
    # Hundreds of culprits are none that anyone reads one by one.
    blamed = culprits if len(culprits) <= 8 else frozenset(sorted(culprits)[:8])  # noqa: PLR2004 - a screenful
    others = sum(tail.rank not in blamed for tail in tails)
    share = int(max(_ROOM_CHARACTERS * scale / max(others, 1) - _BLOCK_CHARACTERS, _LEAST_CHARACTERS))
    groups: dict[tuple[str, bool, tuple[str, ...]], list[RankTail]] = {}
    for tail in tails:
        is_culprit = tail.rank in blamed
        room = int(_CULPRITS_CHARACTERS * max(scale, 0.1)) if is_culprit else min(share, _CULPRITS_CHARACTERS)
        lines = tail_lines(tail, room, _CULPRITS_LINES if is_culprit else _MOST_LINES)
        # Ranks that write the same but for their number are one.
        alike = tuple(_RANK_PREFIX.sub("", line, count=1) for line in lines)
        if alike:
            groups.setdefault((tail.stream, is_culprit, alike), []).append(tail)
    blocks = [
        _block(stream, lines, alike, is_culprit=is_culprit) for (stream, is_culprit, lines), alike in groups.items()
    ]
    blocks.sort(key=lambda block: (not block.is_culprit, block.stream, block.ranks[0]))
    room_left = _ROOM_CHARACTERS * scale + len(blamed) * _CULPRITS_CHARACTERS
    kept: list[RankOutputs] = []
    for block in blocks[:_MOST_BLOCKS]:
        room_left -= sum(len(line) + 8 for piece in block.pieces for line in piece.lines) + _BLOCK_CHARACTERS
        if room_left < 0 and kept:
            break
        kept.append(block)
    left = {rank for block in blocks[len(kept) :] for rank in block.ranks}
    omitted = f"There is no room for the output of {rank_ranges(left, 60)}; it is in the run directory." if left else ""
    return Outputs(tuple(kept), omitted)


def tail_lines(tail: RankTail, room: int, most: int) -> list[str]:
    """The last lines of a rank's output, without control characters and secrets, in so many characters at most."""
    text = tail.content[-2 * room - _SLACK_BYTES :].decode(errors="replace")
    text = _ESCAPES.sub("", text).replace("\r\n", "\n")
    # A secret may span lines.
    lines = redacted_text(text).split("\n")
    is_cut = tail.omitted_bytes > 0 or len(tail.content) > 2 * room + _SLACK_BYTES
    if is_cut and len(lines) > 1:
        del lines[0]  # it is not whole
    if lines and not lines[-1]:
        del lines[-1]
    found: list[str] = []
    used = 0
    for line in reversed(lines[-most:]):
        # Of a line that a progress bar has written again and again, the last state counts.
        last = line.rstrip("\r").rpartition("\r")[2]
        readable = shown(last, _LONGEST_LINE)
        used += len(readable) + 1
        if used > room and found:
            break
        found.append(readable[:room])
    return found[::-1]


def _block(stream: str, lines: Sequence[str], tails: Sequence[RankTail], *, is_culprit: bool) -> RankOutputs:
    ranks = tuple(sorted({tail.rank for tail in tails}))
    first = tails[0]
    come = "comes" if first.omitted_bytes == 1 else "come"
    omitted = f"{size_text(first.omitted_bytes)} {come} before" if first.omitted_bytes else ""
    return RankOutputs(
        rank_ranges(ranks, LABEL_CHARACTERS),
        hosts_text(tail.host for tail in tails),
        ranks,
        stream,
        is_culprit,
        tuple(pieces_of(lines)),
        omitted,
        len(lines),
    )


def pieces_of(lines: Sequence[str]) -> Iterator[OutputPiece]:
    """Lines, with each traceback as a piece of its own."""
    plain: list[str] = []
    at = 0
    while at < len(lines):
        end = _end_of_traceback(lines, at) if _TRACEBACK.match(lines[at]) else at
        if end - at < _LEAST_TRACEBACK:
            plain.append(lines[at])
            at += 1
            continue
        if plain:
            yield OutputPiece("", tuple(plain))
            plain = []
        whole = tuple(lines[at:end])
        yield OutputPiece(traceback_summary(whole), whole)
        at = end
    if plain:
        yield OutputPiece("", tuple(plain))


def traceback_summary(lines: Sequence[str]) -> str:
    """The last line of a traceback: the exception."""
    bare = [_RANK_PREFIX.sub("", line, count=1) for line in lines]
    heads = [line for line in bare if line and not line[0].isspace() and not _TRACEBACK.match(line)]
    fatal = next((line for line in bare if line.startswith("Fatal Python error")), "")
    text = fatal or (heads[-1] if heads else bare[-1])
    return shown(f"{text}  ({count_text(len(lines), 'line')})", 300)


def _end_of_traceback(lines: Sequence[str], start: int) -> int:
    """After its last line: indented ones belong to it, and the exception, which is the first that is not."""
    at = start + 1
    while at < len(lines):
        bare = _RANK_PREFIX.sub("", lines[at], count=1)
        if bare and not bare[0].isspace() and not bare.startswith(("Current thread", "Thread 0x")):
            return at + 1
        at += 1
    return at


def rank_numbers(ranks: Iterable[int]) -> str:
    """Ranks for a script: ``0-7,9``."""
    from saferun.text.wording import rank_spans

    return ",".join(rank_spans(ranks)[0][:2000])
