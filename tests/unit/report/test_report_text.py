"""What the user reads: the cause first, few lines, and nothing that a rank could send to the terminal."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.errors import SaferunError
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import HangVerdict, RankOutput
from saferun.report.console_text import failure_text, hang_goes_on_text, suspected_hang_text
from saferun.text.bounded_json import redacted_line
from saferun.text.wording import LONG_STEP, ranks_text
from tests.unit.report.report_samples import (
    EXCEPTION_EVERYWHERE,
    FILES,
    MISMATCH,
    OUT_OF_MEMORY,
    QUIET,
    SEGFAULT,
    dead,
    sleeping,
)
from tests.unit.report.report_texts import (
    HEADLINE,
    HOSTILE,
    TEXT,
    diagnosis_of,
    hang_text_of,
    text_of,
)

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
hint: find out why it sleeps at train.py:47 in load_batch: every rank must come to the same collectives in the \
same order
  files: saferun-runs/7
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
hint: find out why it sleeps at train.py:47 in load_batch: every rank must come to the same collectives in the \
same order
  files: saferun-runs/7
saferun: job left running; next hang check in 600 s (--on-hang report)"""

THE_WRONG_COLLECTIVE = """\
saferun: the job hangs: rank 3 called broadcast of shape [1024, 1024] as collective 5 of group default_pg where \
ranks 0-2 called all_reduce of shape [1024, 1024]
  no collective has made progress for 300 s, and all ranks are otherwise idle
  > rank 3         collective: broadcast   train.py:61 in share
    ranks 0-2 (3)  collective: all_reduce  train.py:52 in step
  calls of the ranks on node1, outermost first:
    ranks 0-3 (4)     <module> train.py:88 → main train.py:80
  > ├─ rank 3         share  train.py:61
    │                 broadcast  torch/…/distributed_c10d.py:2900
    └─ ranks 0-2 (3)  step  train.py:52
                      all_reduce  torch/…/distributed_c10d.py:3205
  cause: called a different collective
hint: compare the code of the ranks: no collective may stand behind a condition that differs between them
  files: saferun-runs/7
saferun: job left running; next hang check in 600 s (--on-hang report)"""

A_SEGFAULT = """\
saferun: rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: \
segmentation fault in at::native::embedding_lookup (libtorch_cpu.so), called from train.py:52 in step; killed \
by SIGSEGV
  the traceback of rank 2, in saferun-runs/7/node1/attempt_0/rank_2/stderr.log; 1 other in report.txt:
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
  failed because of it: rank 3 (lost its connection to another rank, train.py:52 in step)
  stopped because of it: ranks 0-1
hint: look at the native call: a compiled extension that does not fit this torch, or a bad size or pointer \
given to one
  core: deleted after it had been read (172 MiB); --cores keep keeps it
  files: saferun-runs/7"""

AN_EXCEPTION_EVERYWHERE = """\
saferun: rank 0 (node1, local rank 0, pid 4000) failed first at 03:15:33, 31.4 s after the start: KeyError: \
'labels', at train.py:52 in step; exit code 1; ranks 1-7 failed in the same way
  the traceback of ranks 0-7 (8), in saferun-runs/7/node1/attempt_0/rank_0/stderr.log:
  | Traceback (most recent call last):
  |   File "train.py", line 88, in <module>
  |     main()
  |   File "train.py", line 52, in step
  |     loss = model(batch["labels"])
  | KeyError: 'labels'
  failed after it: ranks 1-7 (exit code 1)
  files: saferun-runs/7"""

NO_MEMORY = """\
saferun: rank 2 (node1, local rank 2, pid 4002) failed first at 03:15:33, 31.4 s after the start: killed by \
the kernel's OOM killer (cgroup limit 64 GiB, it used 61 GiB); killed by SIGKILL
  the last lines of its stderr (saferun-runs/7/node1/attempt_0/rank_2/stderr.log):
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
hint: use fewer data-loader workers or ranks per host, load less at once, or ask for more memory
  files: saferun-runs/7"""


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
        "  files: saferun-runs/1",
        "saferun: starting all ranks again, restart 1 of 3",
    ]


def test_what_at_record_wrote_stands_in_for_an_empty_stderr() -> None:
    """Some scripts redirect their stderr; the exception is still there."""
    recorded = RankOutput(1, (), "", "ValueError: no", 0.0)
    assert "  it recorded: ValueError: no" in text_of(diagnosis_of(recorded))
    silent = RankOutput(1, (), "", "", 0.0)
    assert "  it wrote nothing to stderr" in text_of(diagnosis_of(silent))
    told = silent._replace(last_stdout_lines=("loading", "config error: /data/x is missing"))
    lines = text_of(diagnosis_of(told))
    start = lines.index("  it wrote nothing to stderr; the last lines of its stdout:")
    assert lines[start + 1 : start + 3] == ["  | loading", "  | config error: /data/x is missing"]


def test_a_single_line_of_output_that_the_headline_quotes_is_not_shown_again() -> None:
    """``sys.exit("config error: …")``: the rank has printed it, and the headline quotes it."""
    said = "config error: lr must be > 0"
    headline = f"rank 0 failed first: ended with exit code 1 and no traceback; its last line of output: {said}"
    output = RankOutput(0, (said,), "/run/stderr.log", "", 0.0)
    lines = text_of(diagnosis_of(output, headline))
    assert "\n".join(lines).count(said) == 1
    assert "  it wrote nothing else to stderr (/run/stderr.log)" in lines
    lines = text_of(diagnosis_of(output._replace(last_lines=(), last_stdout_lines=(said,)), headline))
    assert "\n".join(lines).count(said) == 1
    assert "  it wrote nothing to stderr, and nothing else to stdout" in lines
    # With more than that there is something to read.
    lines = text_of(diagnosis_of(output._replace(last_lines=("loading", said)), headline))
    assert lines[1:4] == ["  the last lines of its stderr (/run/stderr.log):", "  | loading", f"  | {said}"]


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
        (
            range(0, 80, 2),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, … (40)",
        ),
    ],
)
def test_ranks_in_words(ranks: Iterable[int], words: str) -> None:
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
    quoted = len([line for line in shown if line.startswith("  | ")])
    printed = redacted_line(headline)
    # A single line that stands in the headline is not quoted as well.
    assert quoted == min(len(lines), 12) or (
        len(lines) == 1 and not quoted and redacted_line(lines[0]).strip() in printed
    )


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
    ("headline", "advice", "lines"),
    [
        (COMPUTES, "see what it does", [f"saferun: {COMPUTES}; stacks in runs/7/report.txt"]),
        (
            "the job may hang: rank 3 (node1) is stopped",
            "continue it: kill -CONT 7",
            [
                "saferun: the job may hang: rank 3 (node1) is stopped; job left running, stacks in runs/7/report.txt",
                "hint: continue it: kill -CONT 7",
            ],
        ),
    ],
)
def test_a_suspected_hang_is_one_line_where_a_report_has_the_rest(headline: str, advice: str, lines: list[str]) -> None:
    """A table of all ranks says that something is wrong, and nothing may be."""
    diagnosis = sleeping(8)
    assert diagnosis.cause is not None
    diagnosis = diagnosis._replace(headline=headline, cause=diagnosis.cause._replace(advice=advice))
    assert suspected_hang_text(diagnosis, files="runs/7/") == lines


def test_why_a_suspected_hang_ends_nothing_is_said_to_who_wants_hangs_to_end_jobs() -> None:
    """Else it looks as if the option had been overlooked."""
    diagnosis = sleeping(8)._replace(headline="the job may hang: rank 3 is stopped")
    (line, *_) = suspected_hang_text(diagnosis, files="runs/7/", on_hang="stop")
    assert "; job left running (--on-hang stop acts on certain hangs only), stacks in " in line


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
    verdict = QUIET._replace(certain=certain, lasted_s=900.0)
    text = hang_goes_on_text(diagnosis, verdict, on_hang=on_hang, count=2, next_s=next_s)
    assert text == [f"saferun: {line}" for line in lines]
