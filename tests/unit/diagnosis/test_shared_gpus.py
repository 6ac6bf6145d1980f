"""Whether a GPU that is full is full of others: only then are they to be looked for."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes.shared_gpus import others_use_it
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of, found_in

HEAD = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 524.00 MiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 176.38 MiB is free. "
)
OF_TORCH = "Of the allocated memory {} is allocated by PyTorch, and 403.78 MiB is reserved by PyTorch but unallocated."


def listed(*sizes: str) -> str:
    return "".join(f"Process {360061 + index} has {size} memory in use. " for index, size in enumerate(sizes))


ITSELF = "Including non-PyTorch memory, this process has 77.90 GiB memory in use. "
XORG = "149.00 MiB"


@pytest.mark.parametrize(
    "text",
    [
        listed("78.98 GiB") + OF_TORCH.format("77.09 GiB"),
        listed("78.98 GiB", XORG) + OF_TORCH.format("77.09 GiB"),
        listed("78.98 GiB", XORG),
        listed("78.98 GiB"),
        listed(XORG) + ITSELF + OF_TORCH.format("76.09 GiB"),
        ITSELF + OF_TORCH.format("76.09 GiB"),
        # NCCL's buffers and the context.
        listed("21.00 GiB") + OF_TORCH.format("18.50 GiB"),
        OF_TORCH.format("77.09 GiB"),
        "CUDA out of memory",
    ],
)
def test_a_rank_that_torch_lists_by_a_number_of_the_host_is_no_other_process(text: str) -> None:
    """In a container torch does not recognize the process itself; nor does a screen take the memory of a rank."""
    assert not others_use_it(HEAD + text)


@pytest.mark.parametrize(
    "text",
    [
        listed("39.89 GiB") + ITSELF + OF_TORCH.format("38.00 GiB"),
        listed("39.89 GiB", "39.20 GiB") + OF_TORCH.format("38.00 GiB"),
        listed("39.89 GiB", "39.20 GiB"),
        # The context of each rank of the host.
        listed(*["530.00 MiB"] * 7) + ITSELF,
        listed("66.20 GiB", "12.00 GiB") + OF_TORCH.format("10.00 GiB"),
        listed("520.00 MiB", "78.00 GiB") + OF_TORCH.format("0 bytes").replace("403.78", "0"),
        listed("78.98 GiB") + OF_TORCH.format("10.00 GiB"),
    ],
)
def test_others_that_have_much_of_it_are_named(text: str) -> None:
    assert others_use_it(HEAD + text)


def test_a_number_that_is_none_is_nothing() -> None:
    assert not others_use_it(HEAD + listed("7.8.9 GiB", "1.2.3 GiB"))


def test_what_is_advised_depends_on_whose_the_memory_is() -> None:
    for sizes, words in (((), "use a smaller batch"), (("39.89 GiB",), "other processes use this GPU too")):
        message = HEAD + listed("78.98 GiB", *sizes) + OF_TORCH.format("77.09 GiB")
        lines = ("Traceback (most recent call last):", '  File "train.py", line 5, in step', message)
        assert words in found_in(evidence_of(ExitStatus(1, None), lines)).advice
