"""An exception about a value may quote the words of a GPU error, of a log or of the data: it is no GPU error."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes import cause_of, quotations
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

HEAD = "Traceback (most recent call last):"
STEP = '  File "/home/user/job/train.py", line 52, in step'
CONTEXT = "During handling of the above exception, another exception occurred:"
TRIED = "CUDA out of memory. Tried to allocate 2.00 GiB"
SIDE_ASSERT = "CUDA error: device-side assert triggered"
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
        ("ValueError: prompt 'CUDA out of memory' is too long", "python_exception"),
        # Of other accelerators and libraries.
        ("ValueError: prompt 'No CUDA GPUs are available' is too long", "python_exception"),
        (
            "ValueError: prompt 'RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes' is too long",
            "python_exception",
        ),
        ("ValueError: text 'NCCL error: unhandled system error' has no label", "python_exception"),
        ("ValueError: line 3 'NCCL error in: x.cpp:1, unhandled cuda error' has no label", "python_exception"),
        ("KeyError: 'NCCL error: remote process exited or there was a network error'", "python_exception"),
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
        (f'ValueError: Original exception: "torch.OutOfMemoryError: {TRIED}"', "cuda_out_of_memory"),
        (f'ValueError: Request aborted: "torch.OutOfMemoryError: {TRIED}"', "cuda_out_of_memory"),
        (f"ValueError: OOM: '{TRIED}'", "cuda_out_of_memory"),
        (f"ValueError: Trial 3 ended with error: `torch.OutOfMemoryError: {TRIED}`", "cuda_out_of_memory"),
        (f"ValueError: Pipeline 'gen' error: \"{TRIED}\"", "cuda_out_of_memory"),
        (f'ValueError: inference error: "{ILLEGAL}"', "cuda_illegal_memory_access"),
        (f"AssertionError: Model execution error: '{SIDE_ASSERT}'", "device_side_assert"),
        (f"ValueError: exception in thread: '{ILLEGAL}'", "cuda_illegal_memory_access"),
        (f"AssertionError: unexpected exception: \"OutOfMemoryError('{TRIED}')\"", "cuda_out_of_memory"),
        (f"ValueError: While executing %linear : [num_users=1] Original error: '{TRIED}'", "cuda_out_of_memory"),
        (f"ValueError: {{'error': '{ILLEGAL}'}}", "cuda_illegal_memory_access"),
        ("ValueError: all_reduce: 'NCCL error: unhandled system error'", "nccl_system_error"),
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


CHECK = (
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss: block: [0,0,0], thread: [1,0,0] Assertion `{}` failed."
)


def test_a_kernel_that_has_printed_its_own_check_proves_what_is_quoted() -> None:
    raised = (HEAD, STEP, "    run()", f"ValueError: step: '{SIDE_ASSERT}'")
    found = found_in(CHECK.format("t >= 0 && t < n_classes"), *raised)
    assert (found.class_name, found.message) == ("device_side_assert", "device-side assert: `t >= 0 && t < n_classes`")
    assert found_in(*raised).class_name == "python_exception"


def test_what_any_line_shows_and_an_exception_quotes_is_the_cause() -> None:
    raised = (HEAD, STEP, "    run()", f"ValueError: step: '{SIDE_ASSERT}'")
    for line in (f"[rank1]: {SIDE_ASSERT}", SIDE_ASSERT, f"2026-01-02 ERROR trainer: {SIDE_ASSERT}"):
        assert found_in(line, *raised).class_name == "device_side_assert"


@pytest.mark.parametrize(
    "line",
    [
        f"ValueError: step: '{SIDE_ASSERT}'",
        f"ERROR trainer: ValueError: step: {SIDE_ASSERT}",
        f"reading '{SIDE_ASSERT}'",
        f"    raise ValueError(f'step: {SIDE_ASSERT}')",
        f"sample 3: {SIDE_ASSERT}",
    ],
)
def test_data_and_the_source_of_the_program_prove_nothing(line: str) -> None:
    called = line if line.startswith(" ") else "    run()"
    raised = (HEAD, STEP, called, f"ValueError: step: '{SIDE_ASSERT}'")
    assert found_in(line, *raised).class_name == "python_exception"


def test_how_much_is_compared_does_not_grow_with_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand lines, half of them with fifty quotations each, took 16 s."""
    compared = []
    has = quotations.Shown.has

    def counted(shown: quotations.Shown, text: str) -> bool:
        compared.append(len(shown.exceptions) + len(shown.others))
        return has(shown, text)

    monkeypatch.setattr(quotations.Shown, "has", counted)
    sums = []
    for count in (50, 100, 400):
        shown = tuple(f"RuntimeError: {number} {'x' * 880}" for number in range(count))
        quotes = " ".join(f"'quoted {number:03}'" for number in range(50))
        values = tuple(f"ValueError: {number} {quotes}" for number in range(count))
        blocks = tuple(part for value in values for part in (HEAD, STEP, "    run()", value, "", CONTEXT, ""))
        for lines in ((HEAD, STEP, *shown, *values), (*shown, *blocks[:-3])):
            assert found_in(*lines).class_name in {"python_exception", "python_exit"}
            sums.append(len(compared))
            compared.clear()
    assert set(sums[:2]) == set(sums[2:])
    assert all(0 < one < 2000 for one in sums)


def test_of_an_output_a_limited_part_is_compared() -> None:
    lines = [f"RuntimeError: {number} {'x' * 880}" for number in range(500)]
    shown = quotations.Shown(lines, 64_000)
    assert len(shown.exceptions) + len(shown.others) < 65_000
    assert shown.has("RuntimeError: 0 ")
    for _ in range(quotations.MOST_COMPARED):
        shown.has("RuntimeError: 0 ")
    assert not shown.has("RuntimeError: 0 ")
