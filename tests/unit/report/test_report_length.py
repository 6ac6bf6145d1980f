"""Tracebacks, cores and survivors in the text of a report, which is never long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.evidence.diagnosis_values import StackNode, Traceback, WaitGroup
from saferun.report.console_text import failure_text, recovery_text
from tests.unit.report.report_samples import (
    CORE,
    EXCEPTION_EVERYWHERE,
    FILES,
    LOAD,
    QUIET,
    SEGFAULT,
    STEP,
    TRACEBACK,
    dead,
    merged,
    sleeping,
)
from tests.unit.report.report_texts import (
    HOSTILE,
    TEXT,
    diagnosis_of,
    hang_text_of,
    text_of,
)

RANKS = st.sets(st.integers(0, 9999), max_size=60).map(lambda ranks: tuple(sorted(ranks)))


def test_a_job_that_moves_again_says_after_how_long() -> None:
    assert recovery_text(312.4) == "saferun: job resumed after 312 s"


def test_a_text_is_as_long_for_a_thousand_ranks_as_for_eight() -> None:
    """The height of a terminal does not grow with the job."""
    assert len(hang_text_of(sleeping(8))) == len(hang_text_of(sleeping(64))) == len(hang_text_of(sleeping(1000)))


def test_the_traceback_stands_in_for_the_last_lines() -> None:
    """They would be the same lines twice."""
    lines = text_of(EXCEPTION_EVERYWHERE)
    assert sum(TRACEBACK[-1] in line for line in lines if line.startswith("  | ")) == 1
    assert not any("the last lines" in line for line in lines)


def test_a_long_traceback_keeps_its_end_and_says_what_is_missing() -> None:
    """The exception stands at the end."""
    long = Traceback(
        (1,), ("Traceback (most recent call last):", *(f"  line {i}" for i in range(60)), "ValueError: no")
    )
    lines = [line for line in text_of(diagnosis_of()._replace(tracebacks=(long,))) if line.startswith("  | ")]
    assert len(lines) == 14
    assert lines[0] == "  | Traceback (most recent call last):"
    assert lines[1] == "  |   … 49 lines …"
    assert lines[2] == "  |   line 49"
    assert lines[-1] == "  | ValueError: no"


def test_a_long_traceback_keeps_the_frames_of_the_user() -> None:
    """Those of libraries are left out first, wherever they are."""
    library = [f'  File "/v/lib/python3.12/site-packages/torch/x{i}.py", line {i}, in x{i}' for i in range(40)]
    own = ['  File "/home/me/train.py", line 2, in <module>', "    init()"]
    long = Traceback((1,), ("Traceback (most recent call last):", *library[:20], *own, *library[20:], "ValueError: no"))
    lines = [line[4:] for line in text_of(diagnosis_of()._replace(tracebacks=(long,))) if line.startswith("  | ")]
    assert len(lines) <= 14
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[2:4] == own
    assert lines[-2:] == [library[-1], "ValueError: no"]


def test_a_traceback_that_is_on_the_console_is_not_quoted_again() -> None:
    """Only the one that is there."""
    for is_above in (False, True):
        text = failure_text(
            EXCEPTION_EVERYWHERE,
            files=FILES,
            attempt=0,
            max_restarts=0,
            restarting=False,
            is_above=lambda _, is_above=is_above: is_above,  # type: ignore[misc]
        )
        assert any(line.startswith("  | ") for line in text) is not is_above
        assert any(line.startswith("  above: the traceback of") for line in text) is is_above
        assert not any(line.startswith("  cause:") for line in text)


def test_other_tracebacks_are_said_to_be_elsewhere() -> None:
    """Only where there is a file they can be read in."""
    ours, other = Traceback((1,), TRACEBACK), Traceback((2,), ("OSError: reset",))
    diagnosis = diagnosis_of()._replace(tracebacks=(other, ours))
    assert any(line.startswith("  the traceback of rank 1; 1 other in report.txt:") for line in text_of(diagnosis))
    assert "report.txt" not in "\n".join(text_of(diagnosis, files=None))


@pytest.mark.parametrize(
    ("core", "words"),
    [
        (CORE, "deleted after it had been read (172 MiB); --cores keep keeps it"),
        (CORE._replace(kept=True, path="/tmp/core.7"), "kept in /tmp/core.7 (172 MiB)"),
        (CORE._replace(kept=True, path="/tmp/core.7", size_bytes=0), "kept in /tmp/core.7"),
        (CORE._replace(threads=(), failure="piped to systemd-coredump"), "none: piped to systemd-coredump"),
    ],
)
def test_what_became_of_the_core_is_told(core: object, words: str) -> None:
    lines = text_of(SEGFAULT._replace(core=core))  # type: ignore[arg-type]
    assert f"  core: {words}" in lines


def test_victims_are_not_named_as_failures() -> None:
    """A connection that was reset is the consequence."""
    diagnosis = diagnosis_of()._replace(also_failed=(dead(2, code=1), dead(3, code=1)), victims=(3,))
    lines = text_of(diagnosis)
    assert "  failed after it: rank 2 (exit code 1)" in lines
    assert "  failed because of it: rank 3" in lines


def test_survivors_that_wait_in_the_same_thing_need_no_tree() -> None:
    """One line says it all; of several it is worth seeing where they parted."""
    tree = merged({0: (STEP,), 2: (LOAD,)})
    groups = (WaitGroup("collective", "all_reduce", (0,), ""), WaitGroup("sleep", "", (2,), ""))
    one = diagnosis_of()._replace(groups=groups[:1], tree=tree)
    two = diagnosis_of()._replace(groups=groups, tree=tree)
    assert not any("outermost first" in line for line in text_of(one))
    assert any("outermost first" in line for line in text_of(two))


def test_advice_is_given_once() -> None:
    """The trouble's own hint and the cause's may be the same."""
    cause = sleeping(8).cause
    assert cause is not None
    lines = text_of(diagnosis_of()._replace(hint=cause.advice, cause=cause))
    assert [line for line in lines if line.startswith("hint: ")] == [f"hint: {cause.advice}"]


NODES = st.recursive(
    st.builds(lambda ranks, frame: StackNode(frame, ranks, ()), RANKS, st.sampled_from([STEP, LOAD])),
    lambda below: st.builds(
        lambda ranks, children: StackNode(STEP, ranks, tuple(children)), RANKS, st.lists(below, max_size=6)
    ),
    max_leaves=60,
)

GROUPS = st.builds(WaitGroup, TEXT, TEXT, RANKS, TEXT)


@given(
    groups=st.lists(GROUPS, max_size=40),
    tree=st.lists(NODES, max_size=5),
    lines=st.lists(TEXT, max_size=20),
    tracebacks=st.lists(st.builds(Traceback, RANKS, st.lists(TEXT, max_size=60).map(tuple)), max_size=4),
    headline=TEXT,
    hostile=TEXT,
    restarting=st.booleans(),
)
def test_no_diagnosis_fills_more_than_a_terminal(
    groups: list[WaitGroup],
    tree: list[StackNode],
    lines: list[str],
    tracebacks: list[Traceback],
    headline: str,
    hostile: str,
    *,
    restarting: bool,
) -> None:
    """Fewer than 40 lines whatever has happened, the cause first, what happens next last, and no control characters."""
    cause = sleeping(8).cause
    assert cause is not None
    diagnosis = SEGFAULT._replace(
        headline=headline,
        hint=hostile,
        abandoned=(1,),
        groups=tuple(groups),
        tree=tuple(tree),
        findings=tuple(lines),
        tracebacks=tuple(tracebacks),
        cause=cause._replace(message=hostile, proof=hostile, advice=hostile, location=hostile),
    )
    failure = text_of(diagnosis, restarting=restarting)
    hang = hang_text_of(diagnosis, QUIET._replace(kind=hostile))
    for text in (failure, hang):
        assert len(text) < 40
        assert all(line.isprintable() for line in text)
        assert text[0].startswith("saferun: ")
    assert ("restart 1 of 3" in failure[-1]) == restarting
    assert hang[-1].startswith("saferun: job left running")


def test_what_was_decided_is_the_last_line() -> None:
    """It says why, which a mere count of restarts does not; and it is one line whatever its words are."""
    decided = "starting again in 1.2 s (retry 1 of 3): port 29500 is in use"
    lines = failure_text(SEGFAULT, files=FILES, attempt=0, max_restarts=3, restarting=True, decided=decided)
    assert lines[-1] == f"saferun: {decided}"
    assert not any("starting all ranks again" in line for line in lines)
    assert len(lines) < 40
    hostile = failure_text(SEGFAULT, files=FILES, attempt=0, max_restarts=3, restarting=False, decided=HOSTILE)
    assert all(line.isprintable() for line in hostile)
