"""An exception about a value may quote the words of a GPU error, of a log or of the data: it is no GPU error."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CONTEXT = "During handling of the above exception, another exception occurred:"
TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB"
ILLEGAL = "CUDA error: an illegal memory access was encountered"


def found_in(*lines: str) -> Cause:
    evidence = evidence_of(ExitStatus(1, None), lines)
    return cause_of(read_failure(evidence, evidence.ends[0], evidence.outputs[0]))


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        (f"ValueError: cannot tokenize sample 'RuntimeError: {TRIED}': too long", "python_exception"),
        (f'ValueError: cannot tokenize the text "{TRIED}": too long', "python_exception"),
        (f"ValueError: worker 3 cannot tokenize sample '{TRIED}'", "python_exception"),
        (f"AssertionError: expected '', got '{ILLEGAL}'", "assertion_error"),
        ("KeyError: 'CUDA out of memory'", "python_exception"),
        ("KeyError: ('CUDA out of memory', 3)", "python_exception"),
        (f"KeyError: '{TRIED}'", "python_exception"),
        ("KeyError: 'CUDA error: device-side assert triggered'", "python_exception"),
        ("KeyError: 'no CUDA-capable device is detected'", "python_exception"),
        ("KeyError: 'uncorrectable ECC error encountered'", "python_exception"),
        ("KeyError: 'all CUDA-capable devices are busy or unavailable'", "python_exception"),
        ("KeyError: 'CUBLAS_STATUS_EXECUTION_FAILED'", "python_exception"),
        ("KeyError: 'HSA_STATUS_ERROR_EXCEPTION'", "python_exception"),
        ("TypeError: unexpected value 'cudaErrorIllegalAddress'", "python_exception"),
        # Lines are cut, a quotation may have no end then.
        (f"KeyError: '{ILLEGAL} {'x' * 2000}'", "python_exception"),
        (f"ValueError: {'x ' * 300}'a' and '{ILLEGAL} {'x' * 2000}'", "python_exception"),
        (f"ValueError: {'x ' * 200}'a' and '{ILLEGAL}': {'x ' * 200}", "python_exception"),
    ],
)
def test_a_value_that_quotes_a_gpu_error_is_no_gpu_error(message: str, class_name: str) -> None:
    """It is a fault of the program, and no reason to take a host out of use."""
    found = found_in(HEAD, STEP, "    check(sample)", message)
    assert found.class_name == class_name
    assert found.message.startswith(message[:80])
    assert message.startswith(found.proof.removesuffix("…"))


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        (f"RuntimeError: {ILLEGAL}", "cuda_illegal_memory_access"),
        (f"RuntimeError: '{ILLEGAL}'", "cuda_illegal_memory_access"),
        (f"ValueError: {ILLEGAL}", "cuda_illegal_memory_access"),
        (f"ValueError: RuntimeError('{ILLEGAL}')", "cuda_illegal_memory_access"),
        (f"ValueError: ('{ILLEGAL}', 700)", "cuda_illegal_memory_access"),
        (f"ValueError: the worker's step failed: '{ILLEGAL}'", "cuda_illegal_memory_access"),
        (f'AssertionError: engine crashed with "{TRIED}"', "cuda_out_of_memory"),
        (f"ValueError: bad batch 'a': {TRIED}", "cuda_out_of_memory"),
        (f"ValueError: {'x ' * 300}'a' is bad: {ILLEGAL}", "cuda_illegal_memory_access"),
        ("AssertionError: Torch not compiled with CUDA enabled", "missing_gpu"),
        ("ValueError: invalid device ordinal 'cuda:9'", "missing_gpu"),
        (f"Exception: Worker failed with error '{TRIED}'", "cuda_out_of_memory"),
        (f"vllm.ServerError: got '{TRIED}'", "cuda_out_of_memory"),
    ],
)
def test_a_gpu_error_that_is_wrapped_is_still_one(message: str, class_name: str) -> None:
    found = found_in(HEAD, STEP, "    run()", message)
    assert found.class_name == class_name
    assert message.startswith(found.proof.removesuffix("…"))


@pytest.mark.parametrize("link", [CONTEXT, "The above exception was the direct cause of the following exception:"])
def test_an_error_that_is_quoted_and_shown_above_is_the_cause(link: str) -> None:
    """The program has wrapped it."""
    for text in (TRIED, ILLEGAL):
        shown = (HEAD, STEP, f"RuntimeError: {text}", "", link, "", HEAD, STEP, f"ValueError: cannot go on: '{text}'")
        assert found_in(*shown).class_name in {"cuda_out_of_memory", "cuda_illegal_memory_access"}


def test_an_error_that_is_quoted_and_was_logged_before_is_the_cause() -> None:
    logged = (HEAD, STEP, f"RuntimeError: {ILLEGAL}", "cleaning up")
    assert found_in(*logged, HEAD, STEP, f"ValueError: got '{ILLEGAL}'").class_name == "cuda_illegal_memory_access"
    printed = f"next sample: RuntimeError: {ILLEGAL}"
    assert found_in(printed, HEAD, STEP, f"ValueError: got '{ILLEGAL}'").class_name == "python_exception"


def test_what_the_last_lines_quote_is_no_gpu_error_either() -> None:
    assert found_in(f"KeyError: '{ILLEGAL}'").class_name == "python_exit"
    assert found_in(f"RuntimeError: {ILLEGAL}").class_name == "cuda_illegal_memory_access"
