"""What tools say, as values: py-spy's JSON and errors, faulthandler's text, strace's and /proc's words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.faulthandler_dump import threads_from_text
from saferun.captures.process_state import command_text
from saferun.captures.py_spy import failure_text, is_denied, is_no_python
from saferun.captures.py_spy_json import threads_from_json
from saferun.captures.tools import ToolEnd
from saferun.evidence.job_evidence import Frame


def spy_frame(name: str, line: int, module: str | None = None) -> dict[str, Any]:
    return {
        "name": name,
        "filename": module or "/a/train.py",
        "module": module,
        "short_filename": "train.py",
        "line": line,
        "locals": None,
    }


def spy_thread(name: str | None, tid: int | None, *frames: dict[str, Any]) -> dict[str, Any]:
    return {
        "pid": 71,
        "thread_id": 139689109653184,
        "thread_name": name,
        "os_thread_id": tid,
        "active": True,
        "owns_gil": False,
        "frames": list(frames),
    }


def test_the_main_thread_comes_first_and_is_told_by_its_number() -> None:
    """py-spy lists the newest thread first, and the script may give any thread any name."""
    content = [spy_thread("MainThread", 75, spy_frame("run", 9)), spy_thread("renamed", 71, spy_frame("step", 52))]
    main, other = threads_from_json(json.dumps(content).encode(), 71)
    assert (main.is_main, main.tid, main.name, main.active, main.owns_gil) == (True, 71, "renamed", True, False)
    assert main.frames == (Frame("step", "/a/train.py", 52),)
    assert (other.is_main, other.tid) == (False, 75)


def test_without_numbers_the_name_tells_the_main_thread() -> None:
    """py-spy cannot always match Python's threads with the kernel's."""
    content = [spy_thread("MainThread", None, spy_frame("step", 52)), spy_thread(None, None)]
    main, other = threads_from_json(json.dumps(content).encode(), 71)
    assert (main.is_main, other.is_main, other.name) == (True, False, "")


def test_native_frames_are_told_from_python_ones() -> None:
    """Only they have a library."""
    content = [spy_thread("MainThread", 71, spy_frame("nanosleep", 0, "/lib/libc.so.6"), spy_frame("step", 52))]
    (main,) = threads_from_json(json.dumps(content).encode(), 71)
    assert [frame.native for frame in main.frames] == [True, False]
    assert main.frames[0].file == "/lib/libc.so.6"


def test_of_an_endless_recursion_both_ends_stay() -> None:
    """Where it is, and who began."""
    frames = [spy_frame("f", line) for line in range(5000)]
    (main,) = threads_from_json(json.dumps([spy_thread("MainThread", 71, *frames)]).encode(), 71)
    assert len(main.frames) == 256
    assert (main.frames[0].line, main.frames[-1].line) == (0, 4999)


def test_threads_without_number_are_bounded() -> None:
    """A process may have thousands."""
    content = [spy_thread("x", tid, *[spy_frame("f", 1)] * 50) for tid in range(500)]
    threads = threads_from_json(json.dumps(content).encode(), 71)
    assert len(threads) <= 256
    assert sum(len(thread.frames) for thread in threads) <= 8192


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"[3]", b"null", b"\xff", b"[" * 100_000, b'{"frames": []}', b"[[]]"],
)
def test_what_is_no_dump_is_refused(content: bytes) -> None:
    """As one kind of error, whatever it is."""
    with pytest.raises(ValueError, match=r"."):
        threads_from_json(content, 71)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 64), 1 << 64) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["frames", "name", "line", "module", "os_thread_id"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(st.lists(st.fixed_dictionaries({"frames": JSON, "thread_name": JSON, "os_thread_id": JSON}), min_size=1))
def test_fields_may_hold_anything(content: list[Any]) -> None:
    """A field of another type counts as unknown."""
    assert threads_from_json(json.dumps(content).encode(), 71)


DENIED = b"""Error: Failed to get process executable name. Check that the process is running.

Caused by:
    0: Permission denied (os error 13)
    1: Permission denied (os error 13)

Stack backtrace:
   0: <E as anyhow::context::ext::StdError>::ext_context
"""


def test_an_error_of_py_spy_becomes_one_line() -> None:
    """Its first line and its last cause; the stack of py-spy itself interests nobody."""
    end = ToolEnd(1, b"", DENIED)
    assert failure_text(end) == (
        "Failed to get process executable name. Check that the process is running.: Permission denied (os error 13)"
    )
    assert is_denied(end)
    assert not is_no_python(end)


def test_other_failures_have_words_too() -> None:
    """Also where the tool says nothing at all."""
    assert failure_text(ToolEnd(-9, b"", b"", "py-spy took longer than 3 s", was_killed=True)) == (
        "py-spy took longer than 3 s"
    )
    assert failure_text(ToolEnd(3, b"", b"")) == "it ended with code 3"
    assert is_denied(ToolEnd(1, b"", b"Permission Denied: Try running again with elevated permissions"))
    no_python = ToolEnd(1, b"", b"Error: Failed to find python version from target process\n\nStack backtrace:\n")
    assert is_no_python(no_python)
    assert not is_denied(no_python)
    assert failure_text(no_python) == "Failed to find python version from target process"


FAULTHANDLER = b"""Current thread 0x00007f0be74276c0 (most recent call first):
  <no Python frame>

Thread 0x00007f0be7c286c0 [pt_loader] (most recent call first):
  File "/a/with "quotes", line 3 in x.py", line 4 in inner
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f0c0a490b80 (most recent call first):
  File "/a/train.py", line 4 in step
  File "/a/train.py", line ??? in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/lib/libc.so.6", at +0x1 [0x2]
Extension modules: numpy (total: 1)
"""


def test_faulthandlers_text_becomes_threads() -> None:
    """The last one is the oldest, the main thread; one without Python frames is the server's own."""
    main, loader = threads_from_text(FAULTHANDLER, 71)
    assert (main.is_main, main.name, main.tid) == (True, "MainThread", 71)
    assert main.frames == (Frame("step", "/a/train.py", 4), Frame("<module>", "/a/train.py", 0))
    assert (loader.is_main, loader.name, loader.tid) == (False, "pt_loader", 0)
    assert loader.frames[0] == Frame("inner", '/a/with "quotes", line 3 in x.py', 4)


@given(st.binary() | st.text().map(str.encode))
def test_any_text_may_come_instead(content: bytes) -> None:
    """The file is the rank's."""
    threads_from_text(FAULTHANDLER[:200] + content, 71)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["python", "train.py", "--lr=1", ""], "python train.py --lr=1"),
        (
            ["train.py", "--api-key=abc", "WANDB_API_KEY=abc", "x"],
            "train.py --api-key=<redacted> WANDB_API_KEY=<redacted> x",
        ),
        (["train.py", "--token", "abc", "x"], "train.py --token <redacted> x"),
        (["train.py", "--token", "--lr=1"], "train.py --token --lr=1"),
        (["train.py", "s3://me:abc@host/x"], "train.py s3://me:<redacted>@host/x"),
    ],
)
def test_a_command_is_shown_without_secrets(arguments: list[str], words: str) -> None:
    """Reports are passed on."""
    assert command_text(arguments) == words


def test_a_long_command_is_cut() -> None:
    """It stands in one line of a report."""
    assert len(command_text(["x" * 50] * 50)) == 200
