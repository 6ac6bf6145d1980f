"""The end of a failed attempt in words: the cause first, at most 25 lines. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.model import Diagnosis, RankEnd

_MOST_LINES = 25
_QUOTED_LINES = 12
_LONGEST_LINE = 300


def failure_text(
    diagnosis: Diagnosis, *, files: str | None, attempt: int, max_restarts: int, restarting: bool
) -> list[str]:
    """What the user reads when an attempt has failed.

    Args:
        diagnosis: the cause.
        files: the run directory, if there is one.
        attempt: 0 for the first.
        max_restarts: how often the ranks may be started again.
        restarting: whether they are.
    """
    lines = [f"saferun: {_shortened(diagnosis.headline)}"]
    if diagnosis.hint:
        lines.append(f"hint: {_shortened(diagnosis.hint)}")
    output = diagnosis.output
    if output is not None:
        quoted = output.last_lines[-_QUOTED_LINES:]
        if quoted:
            place = f" ({_shortened(output.stderr_path)})" if output.stderr_path else ""
            lines.append(f"  the last lines of its stderr{place}:")
            lines.extend(f"  | {_shortened(line)}" for line in quoted)
        elif output.error_message:
            lines.append(f"  it recorded: {_shortened(output.error_message)}")
        else:
            lines.append("  it wrote nothing to stderr")
    if diagnosis.also_failed:
        lines.append(f"  failed after it: {_failures(diagnosis.also_failed)}")
    if diagnosis.stopped:
        lines.append(f"  stopped because of it: {rank_words(diagnosis.stopped)}")
    if diagnosis.abandoned:
        lines.append(
            f"  could not be killed (uninterruptible, state D): local {rank_words(diagnosis.abandoned)}; left behind"
        )
    if files:
        lines.append(f"  files: {_shortened(files)}")
    if restarting:
        lines.append(f"saferun: starting all ranks again, restart {attempt + 1} of {max_restarts}")
    return lines[:_MOST_LINES]


def rank_words(ranks: Iterable[int]) -> str:
    """``rank 3``; ``ranks 0-2, 5``."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
    return f"rank{'s' if len(ordered) > 1 else ''} {words}"


def _failures(ends: tuple[RankEnd, ...]) -> str:
    by_words: dict[str, list[int]] = {}
    for end in ends:
        by_words.setdefault(end.status.words, []).append(end.rank)
    return "; ".join(f"{rank_words(ranks)} ({words})" for words, ranks in by_words.items())


def _shortened(line: str) -> str:
    # Tracebacks keep their indentation; control characters of the rank do not reach the terminal in our name.
    shown = "".join(char if char.isprintable() else "?" for char in line.expandtabs())
    return shown if len(shown) <= _LONGEST_LINE else shown[: _LONGEST_LINE - 1] + "…"
