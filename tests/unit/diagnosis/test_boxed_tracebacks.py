"""Tracebacks that rich has drawn into boxes: the exception below is read as one, whatever the terminal's width."""

from __future__ import annotations

import pytest

from saferun.diagnosis.boxed_tracebacks import find_boxed_error
from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

TOP = "╭───────────────────── Traceback (most recent call last) ──────────────────────╮"
BOTTOM = "╰──────────────────────────────────────────────────────────────────────────────╯"
FRAMES = (
    "│ /home/user/job/train.py:90 in <module>                                       │",
    "│                                                                              │",
    "│   89 │   batch = {'path': 'a.py:7 in x'}                                     │",
    "│ ❱ 90 main()                                                                  │",
    "│                                                                              │",
    "│ /home/user/job/train.py:52 in step                                           │",
    "│                                                                              │",
    "│ ❱ 52 │   load(path)                                                          │",
    "│ ╭────── locals ──────╮                                                       │",
    "│ │ path = 'data.py:8' │                                                       │",
    "│ ╰────────────────────╯                                                       │",
)
DIRECT = "The above exception was the direct cause of the following exception:"
STEPS = tuple(f"2026-11-26 12:00:0{number} INFO step {number} loss 2.3" for number in range(9))


def boxed(*below: str) -> tuple[str, ...]:
    return (TOP, *FRAMES, BOTTOM, *below)


def found_in(*lines: str, code: int = 1) -> Cause:
    evidence = evidence_of(ExitStatus(code, None), lines)
    return cause_of(read_failure(evidence, evidence.ends[0], evidence.outputs[0]))


@pytest.mark.parametrize(
    ("below", "class_name", "message"),
    [
        (
            (
                "FileNotFoundError: [Errno 2] No such file or directory: ",
                "'/data/very/long/path/to/some/file/that/is/wrapped/by/rich/at/eighty/chars/shard",
                "-00000.tar'",
            ),
            "file_missing",
            "'/data/very/long/path/to/some/file/that/is/wrapped/by/rich/at/eighty/chars/shard-00000.tar'",
        ),
        (
            (
                "ImportError: cannot import name 'AutoModelForCausalLMXYZ' from 'transformers' ",
                "(/usr/lib/python3/site-packages/transformers/__init__.py)",
            ),
            "import_error",
            "from 'transformers' (/usr/lib/python3/site-packages/transformers/__init__.py)",
        ),
        (("ModuleNotFoundError: No module named 'flash_attn'",), "import_error", "No module named 'flash_attn'"),
        (
            (
                "HTTPError: 429 Client Error: Too Many Requests for url: ",
                "https://huggingface.co/api/models/meta-llama/Llama-2-7b-hf/resolve/main/config.j",
                "son",
            ),
            "remote_service_error",
            "resolve/main/config.json",
        ),
        (
            (
                "OSError: You are trying to access a gated repo.",
                "Make sure to have access to it at ",
                "https://hf.co/x",
            ),
            "remote_service_error",
            "You are trying to access a gated repo.",
        ),
        (("KeyError: 'labels'", "saving failed: No space left on device"), "python_exception", "KeyError: 'labels'"),
        (("KeyboardInterrupt",), "killed_from_outside", "interrupted (SIGINT)"),
    ],
)
def test_the_exception_below_a_box_is_read_as_one(below: tuple[str, ...], class_name: str, message: str) -> None:
    found = found_in(*boxed(*below))
    assert found.class_name == class_name
    assert message in found.message
    assert found.location == "train.py:52 in step"


def test_only_a_line_that_had_no_room_is_the_rest_of_the_one_above() -> None:
    """A message may have several lines, and other lines may follow it."""
    below = ("ValueError: bad shape", "of the batch " + "x" * 67, "y" * 80, "z", "another line")
    error = find_boxed_error(boxed(*below))
    assert error is not None
    assert error.last.message == ("ValueError: bad shape", f"of the batch {'x' * 67} {'y' * 80}z", "another line")


def test_a_box_that_is_narrower_than_the_terminal_tells_no_width() -> None:
    below = ("ValueError: " + "word " * 35, "word word")
    error = find_boxed_error(boxed(*below))
    assert error is not None
    assert len(error.last.message) == 1


def test_what_an_exception_was_raised_from_counts_in_boxes_too() -> None:
    oom = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    lines = (*boxed(oom), "", DIRECT, "", *boxed("TrainingError: step 7 failed"))
    assert found_in(*lines).class_name == "cuda_out_of_memory"
    assert found_in(*boxed(oom), "step 7", *boxed("TrainingError: step 7 failed")).class_name == "python_exception"


def test_a_box_that_a_program_has_printed_and_got_over_is_not_its_cause() -> None:
    lines = (*boxed("FileNotFoundError: [Errno 2] No such file or directory: '/cache'"), *STEPS)
    assert found_in(*lines, "ERROR: loss is NaN since step 8").class_name == "python_exit"
    assert found_in(*lines, code=3).class_name == "python_exit"


@pytest.mark.parametrize(
    ("below", "status", "class_name"),
    [
        ((), ExitStatus(None, 11), "segmentation_fault"),
        (("terminate called after throwing an instance of 'E'", "  what():  no shard"), ExitStatus(None, 6), "abort"),
        (("train.py: error: argument --lr: invalid float value: 'x'",), ExitStatus(2, None), "usage_error"),
    ],
)
def test_a_box_is_not_the_cause_of_an_end_that_no_exception_brings_about(
    below: tuple[str, ...], status: ExitStatus, class_name: str
) -> None:
    """The program had caught the exception and printed it, and its other output may be on stdout."""
    evidence = evidence_of(status, (*boxed("ModuleNotFoundError: No module named 'flash_attn'"), *below))
    assert cause_of(read_failure(evidence, evidence.ends[0], evidence.outputs[0])).class_name == class_name


def test_a_traceback_that_was_recorded_is_more_exact_than_a_box() -> None:
    evidence = evidence_of(ExitStatus(1, None), boxed("KeyError: 'labels'"))
    output = evidence.outputs[0]._replace(
        traceback=("Traceback (most recent call last):", '  File "train.py", line 7, in load', "KeyError: 'labels'")
    )
    assert cause_of(read_failure(evidence, evidence.ends[0], output)).location == "train.py:7 in load"


@pytest.mark.parametrize("lines", [(TOP,), (TOP, *FRAMES), boxed(), boxed("the end"), (BOTTOM, "ValueError: x"), ()])
def test_a_box_without_an_exception_is_none(lines: tuple[str, ...]) -> None:
    assert find_boxed_error(lines) is None
