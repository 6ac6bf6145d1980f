"""What the user reads: the cause first, few lines, and nothing that a rank could send to the terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.errors import SaferunError
from saferun.model import Diagnosis, RankOutput
from saferun.report.text import failure_text, rank_words
from tests.unit.samples import end_of

HEADLINE = "rank 1 (node3, local rank 1, pid 4001) failed first, 2.0 s after the start: exit code 1"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b[31mred\r\x00\x08\x7f\x9b31m\u202egnp.exe\u2028next\nline"
TEXT = st.text(st.characters(codec=None, categories=None), max_size=400)


def diagnosis_of(output: RankOutput | None = None, headline: str = HEADLINE) -> Diagnosis:
    return Diagnosis(headline, end_of(1, code=1), output, (), (), ())


def text_of(diagnosis: Diagnosis, *, files: str | None = "saferun_runs/1", restarting: bool = False) -> list[str]:
    return failure_text(diagnosis, files=files, attempt=0, max_restarts=3, restarting=restarting)


def test_a_report_from_top_to_bottom() -> None:
    """The cause, the evidence, the others, the files, what happens next."""
    output = RankOutput(1, ("Traceback (most recent call last):", "  File ...", "ValueError: no"), "r/err.log", "", 0.0)
    diagnosis = Diagnosis(HEADLINE, end_of(1, code=1), output, (end_of(2, signum=6),), (0, 3, 4), (5,), "buy memory")
    assert text_of(diagnosis, restarting=True) == [
        f"saferun: {HEADLINE}",
        "hint: buy memory",
        "  the last lines of its stderr (r/err.log):",
        "  | Traceback (most recent call last):",
        "  |   File ...",
        "  | ValueError: no",
        "  failed after it: rank 2 (killed by SIGABRT)",
        "  stopped because of it: ranks 0, 3-4",
        "  could not be killed (uninterruptible, state D): local rank 5; left behind",
        "  files: saferun_runs/1",
        "saferun: starting all ranks again, restart 1 of 3",
    ]


def test_what_at_record_wrote_stands_in_for_an_empty_stderr() -> None:
    """Some scripts redirect their stderr; the exception is still there."""
    recorded = RankOutput(1, (), "", "ValueError: no", 0.0)
    assert "  it recorded: ValueError: no" in text_of(diagnosis_of(recorded))
    silent = RankOutput(1, (), "", "", 0.0)
    assert "  it wrote nothing to stderr" in text_of(diagnosis_of(silent))


def test_without_files_none_are_named() -> None:
    """``--run-dir none``."""
    assert not any("files:" in line for line in text_of(diagnosis_of(), files=None))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([5, 0, 2, 1], "ranks 0-2, 5"),
        (range(1000), "ranks 0-999"),
        ([7, 9], "ranks 7, 9"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    """A thousand ranks fit into a line."""
    assert rank_words(ranks) == words


def test_failures_of_the_same_kind_are_told_together() -> None:
    """Five hundred ranks that died of SIGABRT are one piece of news."""
    others = (*(end_of(i, signum=6) for i in range(2, 500)), end_of(500, code=3))
    diagnosis = diagnosis_of()._replace(also_failed=others)
    assert "  failed after it: ranks 2-499 (killed by SIGABRT); rank 500 (exit code 3)" in text_of(diagnosis)


def test_the_words_of_a_rank_never_reach_the_terminal_as_control_characters() -> None:
    """Not in our name: not colours, not titles, not a text that reads from right to left."""
    output = RankOutput(1, (HOSTILE, "x" * 10_000, "\ud800"), "r/err.log", HOSTILE, 0.0)
    for diagnosis in (diagnosis_of(output), diagnosis_of(output._replace(last_lines=()))):
        lines = text_of(diagnosis)
        assert all(line.replace("\t", "").isprintable() for line in lines)
        assert all(len(line) <= 320 for line in lines if line.startswith("  |"))


def test_a_headline_from_outside_is_one_line() -> None:
    """A plug-in's exception may have many lines, and a host name is whatever the host says."""
    lines = text_of(diagnosis_of(headline=HOSTILE)._replace(hint=HOSTILE))
    assert all(line.isprintable() for line in lines)


def test_names_of_files_are_shown_and_not_sent() -> None:
    """A directory may be called anything."""
    name = "runs/\x1b[31m\n7"
    lines = text_of(diagnosis_of(RankOutput(1, ("x",), name, "", 0.0)), files=name)
    assert all(line.isprintable() for line in lines)


@given(
    headline=TEXT,
    hint=TEXT,
    lines=st.lists(TEXT, max_size=40),
    message=TEXT,
    others=st.lists(st.tuples(st.integers(0, 9999), st.integers(1, 64)), max_size=60),
    stopped=st.sets(st.integers(0, 9999), max_size=60),
    abandoned=st.sets(st.integers(0, 99), max_size=20),
    restarting=st.booleans(),
)
def test_a_report_is_short_and_begins_with_the_cause(
    headline: str,
    hint: str,
    lines: list[str],
    message: str,
    others: list[tuple[int, int]],
    stopped: set[int],
    abandoned: set[int],
    *,
    restarting: bool,
) -> None:
    """At most 25 lines of a terminal, whatever has happened; what happens next is among them."""
    diagnosis = Diagnosis(
        headline,
        end_of(1, code=1),
        RankOutput(1, tuple(lines), "err.log", message, 0.0),
        tuple(end_of(rank, signum=signum) for rank, signum in others),
        tuple(stopped),
        tuple(abandoned),
        hint,
    )
    report = text_of(diagnosis, restarting=restarting)
    shown = "\n".join(report).split("\n")
    assert len(shown) <= 25
    assert shown[0].startswith("saferun: ")
    assert ("restart 1 of 3" in shown[-1]) == restarting
    assert len([line for line in shown if line.startswith("  | ")]) == min(len(lines), 12)


@given(TEXT, TEXT)
def test_an_error_is_two_lines_whatever_it_quotes(what: str, hint: str) -> None:
    """What happened, then what to do."""
    lines = str(SaferunError(what, hint)).split("\n")
    assert len(lines) == 2
    assert lines[0].startswith("saferun: ")
    assert lines[1].startswith("hint: ")
    assert all(line.isprintable() for line in lines)
