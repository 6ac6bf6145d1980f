"""What the user reads: the cause first, few lines, and nothing that a rank could send to the terminal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.errors import SaferunError
from saferun.evidence import Diagnosis, HangVerdict, RankOutput, StackNode, Traceback, WaitGroup
from saferun.report.console_text import failure_text, hang_goes_on_text, hang_text, recovery_text
from saferun.text.wording import LONG_STEP, ranks_text
from tests.unit.report.report_samples import (
    CORE,
    EXCEPTION_EVERYWHERE,
    FILES,
    LOAD,
    MISMATCH,
    OUT_OF_MEMORY,
    QUIET,
    SEGFAULT,
    STEP,
    TRACEBACK,
    dead,
    merged,
    sleeping,
)

HEADLINE = "rank 1 (node3, local rank 1, pid 4001) failed first, 2.0 s after the start: exit code 1"
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x1b[31mred\r\x00\x08\x7f\x9b31m\u202egnp.exe\u2028next\nline"
TEXT = st.text(st.characters(codec=None, categories=None), max_size=400)
RANKS = st.sets(st.integers(0, 9999), max_size=60).map(lambda ranks: tuple(sorted(ranks)))

# Whole texts, as they stand on the console. `\x20` is a space at the end of a line.
ONE_SLEEPS = """\
saferun: the job hangs: rank 3 (node1) has not called the all_reduce that ranks 0-2, 4-7 wait in: it sleeps \
at train.py:47 in load_batch
  no rank has made progress for 300 s (CPU, I/O, output)
  > rank 3             sleep: time.sleep       train.py:47 in load_batch
    ranks 0-2,4-7 (7)  collective: all_reduce  train.py:52 in step
  calls of the ranks on node1, outermost first:
    ranks 0-7 (8)         <module> train.py:88 → main train.py:80
  > ├─ rank 3             load_batch  train.py:47
    └─ ranks 0-2,4-7 (7)  step  train.py:52
                          all_reduce  torch/…/distributed_c10d.py:3205
  proof: rank 3 has not called collective 5 (all_reduce) of group default_pg that ranks 0-2, 4-7 wait in; it \
is 1 behind
  captures timed out: strace of rank 5
hint: look at why it sleeps at train.py:47 in load_batch: every rank must come to the same collectives in the \
same order
  files: saferun_runs/7
saferun: job left running; next hang check in 600 s (--on-hang report)"""

ONE_OF_64_SLEEPS = """\
saferun: the job hangs: rank 3 (node1) has not called the all_reduce that ranks 0-2, 4-63 wait in: it sleeps \
at train.py:47 in load_batch
  no rank has made progress for 300 s (CPU, I/O, output)
  > rank 3               sleep: time.sleep       train.py:47 in load_batch
    ranks 0-2,4-63 (63)  collective: all_reduce  train.py:52 in step
  calls of the ranks on node1, outermost first:
    ranks 0-63 (64)         <module> train.py:88 → main train.py:80
  > ├─ rank 3               load_batch  train.py:47
    └─ ranks 0-2,4-63 (63)  step  train.py:52
                            all_reduce  torch/…/distributed_c10d.py:3205
  proof: rank 3 has not called collective 5 (all_reduce) of group default_pg that ranks 0-2, 4-63 wait in; it \
is 1 behind
  captures timed out: strace of rank 5
hint: look at why it sleeps at train.py:47 in load_batch: every rank must come to the same collectives in the \
same order
  files: saferun_runs/7
saferun: job left running; next hang check in 600 s (--on-hang report)"""

THE_WRONG_COLLECTIVE = """\
saferun: the job hangs: rank 3 called broadcast [[1024, 1024]] as collective 5 of group default_pg where \
ranks 0-2 called all_reduce [[1024, 1024]]
  no collective has made progress for 300 s, and all ranks are otherwise idle
  > rank 3         collective: broadcast   train.py:61 in share
    ranks 0-2 (3)  collective: all_reduce  train.py:52 in step
  calls of the ranks on node1, outermost first:
    ranks 0-3 (4)     <module> train.py:88 → main train.py:80
  > ├─ rank 3         share  train.py:61
    │                 broadcast  torch/…/distributed_c10d.py:2900
    └─ ranks 0-2 (3)  step  train.py:52
                      all_reduce  torch/…/distributed_c10d.py:3205
  cause: called another collective than the others
hint: compare the code of the ranks: no collective may stand behind a condition that differs between them
  files: saferun_runs/7
saferun: job left running; next hang check in 600 s (--on-hang report)"""

A_SEGFAULT = """\
saferun: rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: \
segmentation fault in at::native::embedding_lookup (libtorch_cpu.so), called from train.py:52 in step; killed \
by SIGSEGV
  the traceback of rank 2, in saferun_runs/7/node1/attempt_0/rank_2/stderr.log; 1 other in report.txt:
  | Fatal Python error: Segmentation fault
  |   … 3 lines …
  |   File "/home/me/project/train.py", line 52 in step
  |   File "/home/me/project/train.py", line 80 in main
  |   File "/home/me/project/train.py", line 88 in <module>
  |\x20
  where it crashed (from its core, read by pystack, address 0x10; innermost call first):
  | at::native::embedding_lookup  libtorch_cpu.so [native]
  | THPVariable_embedding  libtorch_python.so [native]
  | cfunction_call  libpython3.11.so [native]
  | embedding  torch/…/functional.py:2210
  | forward  torch/…/sparse.py:190
  | … 2 calls …  step  train.py:52
  where the others were:
    ranks 0-1 (2)  collective: all_reduce  train.py:52 in step
  failed because of it: rank 3
  stopped because of it: ranks 0-1
hint: look at the native call: a compiled extension that does not fit this torch, or a bad size or pointer \
given to one
  core: deleted after it had been read (172 MiB); --cores keep keeps it
  files: saferun_runs/7"""

AN_EXCEPTION_EVERYWHERE = """\
saferun: rank 0 (node1, local rank 0, pid 4000) failed first at 03:15:33, 31.4 s after the start: KeyError: \
'labels', at train.py:52 in step; exit code 1; ranks 1-7 failed in the same way
  the traceback of ranks 0-7 (8), in saferun_runs/7/node1/attempt_0/rank_0/stderr.log:
  | Traceback (most recent call last):
  |   File "train.py", line 88, in <module>
  |     main()
  |   File "train.py", line 52, in step
  |     loss = model(batch["labels"])
  | KeyError: 'labels'
  failed after it: ranks 1-7 (exit code 1)
hint: read the traceback from its end to the first line of your own code
  files: saferun_runs/7"""

NO_MEMORY = """\
saferun: rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: killed by \
the kernel's OOM killer (cgroup limit 64 GiB, it used 61 GiB); killed by SIGKILL
  the last lines of its stderr (saferun_runs/7/node1/attempt_0/rank_2/stderr.log):
  | step 99  loss 2.31
  proof: /sys/fs/cgroup/memory.events
  where the others were:
    rank 3         data loading: its workers  train.py:47 in load_batch
    ranks 0-1 (2)  collective: all_reduce     train.py:52 in step
  their calls, outermost first:
    ranks 0-1,3 (3)   <module> train.py:88 → main train.py:80
    ├─ rank 3         load_batch  train.py:47
    │                 _try_get_data  torch/…/dataloader.py:1275
    └─ ranks 0-1 (2)  step  train.py:52
                      all_reduce  torch/…/distributed_c10d.py:3205
  stopped because of it: ranks 0-1, 3
hint: use fewer data-loader workers or ranks a host, load less at once, or ask for more memory
  files: saferun_runs/7"""


def diagnosis_of(output: RankOutput | None = None, headline: str = HEADLINE) -> Diagnosis:
    return Diagnosis(headline, dead(1, code=1), output, (), (), ())


def text_of(diagnosis: Diagnosis, *, files: str | None = "saferun_runs/1", restarting: bool = False) -> list[str]:
    return failure_text(diagnosis, files=files, attempt=0, max_restarts=3, restarting=restarting)


def hang_text_of(
    diagnosis: Diagnosis,
    verdict: HangVerdict = QUIET,
    *,
    files: str | None = FILES,
    on_hang: str = "report",
    count: int = 1,
    next_s: float | None = 600.0,
) -> list[str]:
    return hang_text(diagnosis, verdict, host="node1", files=files, on_hang=on_hang, count=count, next_s=next_s)


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (hang_text_of(sleeping(8)), ONE_SLEEPS),
        (hang_text_of(sleeping(64)), ONE_OF_64_SLEEPS),
        (hang_text_of(MISMATCH, QUIET._replace(kind="stuck_collective")), THE_WRONG_COLLECTIVE),
        (failure_text(SEGFAULT, files=FILES, attempt=0, max_restarts=0, restarting=False), A_SEGFAULT),
        (
            failure_text(EXCEPTION_EVERYWHERE, files=FILES, attempt=0, max_restarts=0, restarting=False),
            AN_EXCEPTION_EVERYWHERE,
        ),
        (failure_text(OUT_OF_MEMORY, files=FILES, attempt=0, max_restarts=0, restarting=False), NO_MEMORY),
    ],
    ids=["one sleeps", "one of 64 sleeps", "mismatch", "segfault", "exception everywhere", "out of memory"],
)
def test_the_whole_text(lines: list[str], text: str) -> None:
    """The words are the product: a change of any of them is made on purpose."""
    assert "\n".join(lines) == text


def test_a_report_from_top_to_bottom() -> None:
    """The cause, the evidence, the others, the files, what happens next."""
    output = RankOutput(1, ("Traceback (most recent call last):", "  File ...", "ValueError: no"), "r/err.log", "", 0.0)
    diagnosis = Diagnosis(HEADLINE, dead(1, code=1), output, (dead(2, signum=6),), (0, 3, 4), (5,), "buy memory")
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
    assert ranks_text(ranks) == words


def test_failures_of_the_same_kind_are_told_together() -> None:
    """Five hundred ranks that died of SIGABRT are one piece of news."""
    others = (*(dead(i, signum=6) for i in range(2, 500)), dead(500, code=3))
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
    """Few lines, whatever has happened; what happens next is among them."""
    diagnosis = Diagnosis(
        headline,
        dead(1, code=1),
        RankOutput(1, tuple(lines), "err.log", message, 0.0),
        tuple(dead(rank, signum=signum) for rank, signum in others),
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


def test_a_rank_that_waits_for_nothing_more_to_say_names_its_place_once() -> None:
    """The picture has already said where the culprit is."""
    text = "\n".join(hang_text_of(sleeping(8)))
    assert text.count("sleep: time.sleep       train.py:47 in load_batch") == 1
    assert not any(line.startswith("  at ") for line in text.split("\n"))


@pytest.mark.parametrize(
    ("on_hang", "certain", "next_s", "words"),
    [
        ("report", True, 600.0, "job left running; next hang check in 600 s (--on-hang report)"),
        ("report", True, None, "job left running; no further hang checks (--on-hang report)"),
        ("stop", True, None, "stopping all ranks (--on-hang stop)"),
        ("restart", True, None, "stopping all ranks, to start them again (--on-hang restart)"),
        ("stop", False, 600.0, "job left running; next hang check in 600 s (suspected hangs are only reported)"),
        ("restart", False, None, "job left running; no further hang checks (suspected hangs are only reported)"),
    ],
)
def test_a_hang_ends_with_what_happens_next(on_hang: str, certain: bool, next_s: float | None, words: str) -> None:
    """Whoever reads it at night wants to know whether to get up."""
    lines = hang_text_of(sleeping(8), QUIET._replace(certain=certain), on_hang=on_hang, next_s=next_s)
    assert lines[-1] == f"saferun: {words}"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("quiescent", "no rank has made progress for 4.2 s (CPU, I/O, output)"),
        ("stuck_collective", "no collective has made progress for 4.2 s, and all ranks are otherwise idle"),
        ("spinning", "rank 3 in a busy loop for 4.2 s, and no other rank made progress"),
        ("stopped", "rank 3 in state T (stopped by a signal) for 4.2 s"),
        ("uninterruptible", "rank 3 in state D (uninterruptible sleep) for 4.2 s"),
        ("heartbeat", "no heartbeat from rank 3 for 4.2 s"),
        ("another", "another for 4.2 s"),
    ],
)
def test_the_second_line_of_a_hang_is_what_was_seen(kind: str, words: str) -> None:
    """A verdict can be wrong: what it rests on is said."""
    verdict = HangVerdict(kind, (3,), 4.2, certain=True)
    assert hang_text_of(sleeping(8), verdict)[1] == f"  {words}"
    assert hang_text_of(sleeping(8), verdict._replace(certain=False))[1] == f"  suspected: {words}"
    assert hang_text_of(sleeping(8), verdict, count=3)[1] == f"  {words}; reported 3 times"


COMPUTES = f"rank 0 (node1) has been computing at eval.py:22 for 300 s; ranks 1-3 wait for it in barrier ({LONG_STEP})"


def test_a_rank_that_computes_for_long_is_reported_as_that() -> None:
    """The first line says all that is known, and no line says that anything hangs."""
    computes = sleeping(8)._replace(headline=COMPUTES)
    verdict = QUIET._replace(kind="spinning", ranks=(0,), certain=False)
    lines = hang_text_of(computes, verdict, on_hang="stop")
    assert lines[0] == f"saferun: {COMPUTES}"
    assert not any("suspected:" in line or "busy loop" in line for line in lines)
    assert lines[-1] == "saferun: job left running; next hang check in 600 s (suspected hangs are only reported)"


@pytest.mark.parametrize(
    ("headline", "certain", "on_hang", "next_s", "lines"),
    [
        (
            "the job hangs: rank 3 sleeps",
            True,
            "report",
            600.0,
            ["the job still hangs after 900 s: rank 3 sleeps; reported 2 times, next hang check in 600 s"],
        ),
        (
            "the job hangs: rank 3 sleeps",
            True,
            "stop",
            None,
            ["the job still hangs after 900 s: rank 3 sleeps", "stopping all ranks (--on-hang stop)"],
        ),
        (
            "the job may hang: rank 3 (node1) is stopped",
            False,
            "stop",
            None,
            ["the job may still hang after 900 s: rank 3 (node1) is stopped; reported 2 times, no further hang checks"],
        ),
        (COMPUTES, False, "stop", 1200.0, [f"{COMPUTES}; reported 2 times, next hang check in 1200 s"]),
    ],
)
def test_a_hang_that_goes_on_is_one_line(
    headline: str, certain: bool, on_hang: str, next_s: float | None, lines: list[str]
) -> None:
    """Twelve equal lines each time say nothing new. What is done about it stands for itself."""
    diagnosis = sleeping(8)._replace(headline=headline)
    verdict = QUIET._replace(certain=certain, quiet_s=900.0)
    text = hang_goes_on_text(diagnosis, verdict, on_hang=on_hang, count=2, next_s=next_s)
    assert text == [f"saferun: {line}" for line in lines]


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
