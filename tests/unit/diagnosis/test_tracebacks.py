"""Tracebacks, reports of faulthandler and C++ exceptions among the last lines of a process."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.diagnosis.alike_tracebacks import likeness, merge_tracebacks
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.tracebacks import (
    LONGEST_LINE,
    clean_lines,
    find_cpp_error,
    find_fatal_report,
    find_python_error,
    recorded_error,
)
from saferun.evidence.job_evidence import Frame

USER = UserCode("train.py", "/home/user/job")
HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
LIBRARY = '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py", line 9, in relu'
DIRECT = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"


# ----------------------------------------------------------------------------------------------------------- tracebacks


@pytest.mark.parametrize("name", ["RayTaskError(ValueError)", "ray.exceptions.RayTaskError(OutOfMemoryError)"])
def test_an_exception_whose_class_is_named_after_a_cause_is_one(name: str) -> None:
    """Ray derives such a class from the exception of the task."""
    error = find_python_error([HEAD, STEP, "    ray.get(task)", f"{name}: ray::step() (pid=7, ip=10.0.0.1)"])
    assert error is not None
    assert error.messages == (f"{name}: ray::step() (pid=7, ip=10.0.0.1)",)


def test_the_place_is_the_last_call_in_the_users_code() -> None:
    """Most tracebacks end in torch."""
    error = find_python_error([HEAD, STEP, "    y = relu(x)", LIBRARY, "    return f(x)", "ValueError: bad"])
    assert error is not None
    assert error.last.exception == "ValueError"
    assert error.messages == ("ValueError: bad",)
    assert error.location(USER) == "train.py:52 in step"


def test_a_traceback_in_libraries_alone_has_its_last_call_as_the_place() -> None:
    """Better than nothing."""
    error = find_python_error([HEAD, LIBRARY, "ValueError: bad"])
    assert error is not None
    assert error.location(USER) == "functional.py:9 in relu"


def test_what_record_could_not_write_is_not_what_ended_the_process() -> None:
    """A script that clears /dev/shm removes the directory of the error file, too."""
    errors = "/opt/venv/lib/python3.11/site-packages/torch/distributed/elastic/multiprocessing/errors"
    failed = [HEAD, f'  File "{errors}/__init__.py", line 367, in wrapper', STEP, "KeyError: 'labels'"]
    unwritten = [
        HEAD,
        '  File "/home/user/job/train.py", line 60, in <module>',
        f'  File "{errors}/__init__.py", line 390, in wrapper',
        f'  File "{errors}/error_handler.py", line 87, in record_exception',
        "FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/saferun-1/attempt_0/rank_1/error.json'",
    ]
    error = find_python_error([*failed, "", CONTEXT, "", *unwritten])
    assert error is not None
    assert error.messages[0] == "KeyError: 'labels'"
    assert error.location(USER) == "train.py:52 in step"
    assert error.lines_after == 0
    assert not any("error.json" in line for line in error.lines)
    # Where nothing else is known, it is what there is.
    alone = find_python_error(unwritten)
    assert alone is not None
    assert alone.last.exception == "FileNotFoundError"


def test_only_the_last_traceback_counts() -> None:
    """Those before were got over."""
    error = find_python_error([HEAD, STEP, "KeyError: 'old'", "going on", HEAD, STEP, "ValueError: new"])
    assert error is not None
    assert error.messages == ("ValueError: new",)
    assert error.lines == (HEAD, STEP, "ValueError: new")


def test_torchs_tag_is_known_behind_a_nul() -> None:
    """What torch prints of a signal in a data-loader worker ends with one, after the end of the line."""
    tagged = [f"[rank1]: {line}" for line in (HEAD, STEP, "KeyError: 'a'")]
    error = find_python_error(
        ["ERROR: Unexpected segmentation fault encountered in worker.", "\0" + tagged[0], *tagged[1:]]
    )
    assert error is not None
    assert error.is_uncaught
    assert error.lines == (HEAD, STEP, "KeyError: 'a'")


def test_a_chain_is_one_error() -> None:
    """What it was raised from belongs to what it says; what it was raised beside is context."""
    direct = find_python_error([HEAD, STEP, "KeyError: 'a'", DIRECT, HEAD, STEP, "RuntimeError: b"])
    assert direct is not None
    assert direct.messages == ("RuntimeError: b", "KeyError: 'a'")
    assert direct.last.exception == "RuntimeError"
    beside = find_python_error([HEAD, STEP, "KeyError: 'a'", CONTEXT, HEAD, STEP, "RuntimeError: b"])
    assert beside is not None
    assert beside.messages == ("RuntimeError: b",)
    assert beside.context == ("KeyError: 'a'",)


def test_a_quoted_traceback_is_where_it_began() -> None:
    """A data-loader worker's exception is raised again in the rank."""
    lines = [HEAD, STEP, "ValueError: Caught ValueError in DataLoader worker process 1.", f"Original {HEAD}"]
    lines += ['  File "/home/user/job/data.py", line 7, in __getitem__', "ValueError: bad sample"]
    error = find_python_error(lines)
    assert error is not None
    assert error.messages[0] == "ValueError: bad sample"
    assert error.innermost.link == "nested"
    assert error.last.message[0].startswith("ValueError: Caught")
    assert error.location(USER) == "data.py:7 in __getitem__"


def test_what_torch_puts_before_each_line_shows_that_nobody_caught_it() -> None:
    """Torch's hook writes the rank before the lines of exceptions that end the process."""
    lines = [f"[rank12]: {line}" for line in (HEAD, STEP, "ValueError: bad", "second line")]
    error = find_python_error([*lines, "not part of it", "nor this"])
    assert error is not None
    assert error.is_uncaught
    assert error.messages == ("ValueError: bad", "second line")
    assert error.lines_after == 2
    assert error.lines[0] == HEAD


def test_lines_that_may_or_may_not_be_the_message_count_as_lines_after_it() -> None:
    """A message has no end of its own."""
    error = find_python_error([HEAD, STEP, "ValueError: bad", "step 1", "step 2"])
    assert error is not None
    assert not error.is_uncaught
    assert error.lines_after == 2


def test_threads_and_destructors_do_not_end_a_process() -> None:
    """Their tracebacks count only where there is no other."""
    main = [HEAD, STEP, "ValueError: main"]
    thread = ["Exception in thread Thread-1 (poll):", HEAD, STEP, "OSError: thread"]
    ignored = ["Exception ignored in: <function Pool.__del__ at 0x7f>", HEAD, STEP, "TypeError: late"]
    error = find_python_error([*main, *thread, *ignored])
    assert error is not None
    assert error.messages[0] == "ValueError: main"
    alone = find_python_error(thread)
    assert alone is not None
    assert alone.messages[0] == "OSError: thread"


TRUE = ("[rank1]: " + HEAD, "[rank1]: " + STEP, "[rank1]: ValueError: main")


@pytest.mark.parametrize(
    "head",
    [
        ("Error in atexit._run_exitfuncs:",),
        ("Process Process-2:",),
        ("Process SpawnProcess-1:2:",),
        ("Task exception was never retrieved", "future: <Task finished name='Task-1' exception=OSError('late')>"),
        ("Exception in callback poll()", "handle: <Handle poll()>"),
        ("--- Logging error ---",),
        (),
    ],
)
def test_what_is_printed_at_exit_does_not_replace_what_ended_the_rank(head: tuple[str, ...]) -> None:
    """Torch's hook has printed that."""
    late = (*head, HEAD, STEP, "OSError: late")
    error = find_python_error([*TRUE, *late])
    assert error is not None
    assert error.messages == ("ValueError: main",)
    assert error.is_uncaught


@pytest.mark.parametrize("head", ["Error in atexit._run_exitfuncs:", "--- Logging error ---"])
def test_what_no_process_ends_by_is_passed_over_without_torchs_prefix_too(head: str) -> None:
    error = find_python_error([HEAD, STEP, "ValueError: main", head, HEAD, STEP, "OSError: late"])
    assert error is not None
    assert error.messages == ("ValueError: main",)


def test_a_traceback_of_torchs_loggers_is_not_preferred() -> None:
    """They put the rank before their lines too, and the program goes on."""
    logged = [f"[rank1]:W1121 11:40:54.259000 77 torch/_dynamo/x.py:9] {line}" for line in (HEAD, STEP, "KeyError: 7")]
    error = find_python_error([*logged, HEAD, STEP, "ValueError: main"])
    assert error is not None
    assert error.messages == ("ValueError: main",)


def test_a_traceback_behind_a_loggers_prefix_is_read_too() -> None:
    """Ray and vLLM write one before every line."""
    lines = [f"(RayWorker pid=4009) {line}" for line in (HEAD, STEP, "ValueError: bad")]
    error = find_python_error([*lines, "something else"])
    assert error is not None
    assert error.messages == ("ValueError: bad",)
    assert error.lines[0] == HEAD


def test_an_exception_group_shows_what_is_in_it() -> None:
    """Each of them has a traceback behind a margin."""
    lines = [
        "  + Exception Group Traceback (most recent call last):",
        '  |   File "/home/user/job/train.py", line 9, in main',
        "  | ExceptionGroup: two (2 sub-exceptions)",
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        '    |   File "/home/user/job/train.py", line 5, in load',
        "    | ValueError: one",
        "    +------------------------------------",
    ]
    error = find_python_error(lines)
    assert error is not None
    assert error.innermost.message[0] == "ValueError: one"


def test_a_syntax_error_has_its_place() -> None:
    """Its last frame has no function."""
    error = find_python_error([HEAD, STEP, '  File "bad.py", line 1', "    def f(:", "          ^", "SyntaxError: no"])
    assert error is not None
    assert error.last.frames[-1] == Frame("", "bad.py", 1)


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [HEAD],
        [HEAD, "step 1", "loss 3"],
        [f"the word {HEAD} in the middle of a line"],
        ["ValueError: without a traceback"],
        ['  File "/home/user/job/train.py", line 52, in step'],
    ],
)
def test_what_is_no_traceback_is_none(lines: list[str]) -> None:
    """Scripts print what they like."""
    assert find_python_error(lines) is None


def test_a_traceback_that_is_cut_off_names_no_exception() -> None:
    """The process was killed while it wrote."""
    error = find_python_error([HEAD, STEP, "    y = relu(x)"])
    assert error is not None
    assert error.innermost.exception == ""
    assert error.messages == ()


def test_a_recorded_message_is_an_error_without_frames() -> None:
    """Error files have no more."""
    error = recorded_error("torch.OutOfMemoryError: CUDA out of memory. Tried")
    assert error is not None
    assert error.last.exception == "torch.OutOfMemoryError"
    assert error.location(USER) == ""
    assert recorded_error("") is None
    assert recorded_error("three words only") is None


# --------------------------------------------------------------------------------------------------------------- deaths

FATAL = [
    "Fatal Python error: Segmentation fault",
    "",
    "Thread 0x00007f5be77fe6c0 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 327 in wait',
    "",
    "Current thread 0x00007f5c0cddcb80 (most recent call first):",
    '  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at',
    '  File "/home/user/job/train.py", line 40 in step',
    "",
    "Extension modules: torch._C (total: 1)",
]


def test_a_report_of_faulthandler_has_the_thread_that_crashed() -> None:
    """It is not always the first that is listed."""
    report = find_fatal_report(FATAL)
    assert report is not None
    assert report.message == "Segmentation fault"
    assert report.frames[1] == Frame("step", "/home/user/job/train.py", 40)
    assert report.is_python
    assert report.lines[-1].strip() == ""


def test_a_process_whose_python_was_over_has_no_frames() -> None:
    """It died while the interpreter was taken down."""
    report = find_fatal_report(
        ["Fatal Python error: Aborted", "Thread 0x1 (most recent call first):", "  <no Python frame>"]
    )
    assert report is not None
    assert not report.is_python
    assert report.main_frames == ()


def test_a_thread_that_knows_no_python_leaves_the_main_thread_to_be_told() -> None:
    """Faulthandler lists the main thread last."""
    report = find_fatal_report(["Fatal Python error: Aborted", *FATAL[2:4], FATAL[2], FATAL[7]])
    assert report is not None
    assert not report.is_python
    assert report.main_frames == (Frame("step", "/home/user/job/train.py", 40),)


def test_native_calls_in_the_report_are_read() -> None:
    """Python 3.14 writes them."""
    lines = [
        *FATAL[:1],
        "Current thread 0x1 [python] (most recent call first):",
        FATAL[7],
        "Current thread's C stack trace (most recent call first):",
        '  Binary file "/opt/libdecode.so", at decode_frame+0x1f [0x7f12]',
        '  Binary file "/lib/libc.so.6", at +0x3fd10 [0x7f13]',
    ]
    report = find_fatal_report(lines)
    assert report is not None
    assert report.frames[0] == Frame("decode_frame", "/opt/libdecode.so", 0, native=True)
    assert report.is_python


def test_a_cpp_exception_has_its_type_and_its_words() -> None:
    """The words may have several lines."""
    error = find_cpp_error(
        [
            "terminate called after throwing an instance of 'c10::Error'",
            "  what():  CUDA error: unspecified launch failure",
            "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
            "Exception raised from foo at bar.cpp:1 (most recent call first):",
            "frame #0: nothing",
        ]
    )
    assert error is not None
    assert error.type_name == "c10::Error"
    assert error.message == (
        "CUDA error: unspecified launch failure",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    )
    bare = find_cpp_error(["terminate called without an active exception"])
    assert bare is not None
    assert (bare.type_name, bare.message) == ("", ())
    assert find_cpp_error(["nothing of the kind"]) is None


# -------------------------------------------------------------------------------------------------------------- merging


def test_ranks_that_print_the_same_are_shown_once() -> None:
    """Addresses, ports, numbers of ranks and processes differ."""
    texts = [
        (
            rank,
            [f"rank {rank} pid {4000 + rank} at 0x7f{rank}: closed by peer [127.0.0.1]:{1000 + rank}", "</torch_9_1>"],
        )
        for rank in range(4)
    ]
    merged = merge_tracebacks(texts)
    assert [traceback.ranks for traceback in merged] == [(0, 1, 2, 3)]
    assert merged[0].lines == tuple(texts[0][1])


def test_lines_of_code_and_values_are_differences() -> None:
    """``line 52`` and ``line 53`` are different places."""
    assert likeness(["line 52 in step"]) != likeness(["line 53 in step"])
    assert likeness(["KeyError: 7"]) != likeness(["KeyError: 8"])


def test_a_long_traceback_loses_its_middle() -> None:
    """A recursion without end is not worth a thousand lines."""
    merged = merge_tracebacks([(0, [f"line {number}" for number in range(1000)])])
    assert len(merged[0].lines) == 60
    assert merged[0].lines[0] == "line 0"
    assert merged[0].lines[-1] == "line 999"
    assert "… 941 lines …" in merged[0].lines[12]


# ---------------------------------------------------------------------------------------------------------- bad company


def test_lines_are_cleaned_and_cut() -> None:
    """Colours, links and megabytes."""
    link = "\x1b]8;;http://x\x1b\\here\x1b]8;;\x1b\\"
    assert clean_lines(["\x1b[1;31mred\x1b[0m", link, "x" * 1_000_000]) == ["red", "here", "x" * LONGEST_LINE]


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[" * 5000,
        "\x1b]" + "x" * 20_000,
        '  File "' * 3000,
        "[rank" * 4000,
        "A." * 10_000,
        "block: [" * 3000 + "Assertion ",
        "gloo/" * 5000,
        "0x" * 9000,
        "pid " * 9000,
        "CUDA error: " * 3000,
        "Timeout waiting for key: " * 1000,
        "store->get(" * 2000,
        HEAD * 600,
    ],
)
def test_no_line_can_keep_it_busy(line: str) -> None:
    """A rank writes what it likes, two hundred lines of it."""
    from saferun.diagnosis import diagnose
    from saferun.evidence.job_evidence import Evidence, RankOutput
    from saferun.model import ExitStatus, RankEnd

    lines = (line,) * 200
    outputs = (
        RankOutput(0, (HEAD, STEP, *lines[2:]), "", line, 0.0, lines),
        RankOutput(1, (*lines[:100], HEAD, STEP, f"RuntimeError: {line}", *lines[:50]), "", "", 0.0, lines),
        RankOutput(
            2, (*lines[:100], "terminate called after throwing an instance of 'x'", f"  what():  {line}"), "", "", 0.0
        ),
    )
    statuses = (ExitStatus(None, 6), ExitStatus(1, None), ExitStatus(None, 6))
    ends = tuple(RankEnd(rank, rank, rank + 9, status, 1.0, 1.7e9, False) for rank, status in enumerate(statuses))
    diagnose(Evidence("node1", 0.0, ends, outputs, (), None, kernel_lines=lines[:50]))


ANY_LINE = st.one_of(
    st.text(max_size=40), st.sampled_from([HEAD, STEP, LIBRARY, DIRECT, CONTEXT, "ValueError: x", "ValueError", *FATAL])
)


@given(st.lists(ANY_LINE, max_size=40))
def test_whatever_stands_there_is_read_without_an_error(lines: list[str]) -> None:
    """Binary, half lines, nonsense."""
    error = find_python_error(lines)
    if error is not None:
        assert error.blocks
        assert 0 <= error.lines_after <= len(lines)
        assert isinstance(error.location(USER), str)
        assert len(error.messages) + len(error.context) <= len(lines) * 2
    find_fatal_report(lines)
    find_cpp_error(lines)
    merge_tracebacks([(0, lines), (1, lines)])
