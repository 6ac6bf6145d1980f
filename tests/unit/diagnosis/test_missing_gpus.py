"""What to do about a GPU that the rank cannot use."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

HEAD = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step', "    model.cuda()")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040). Please update your GPU", "a newer driver"),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", "a newer driver"),
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", "nvidia-smi"),
        ('device >= 0 && device < num_gpus INTERNAL ASSERT FAILED at "CUDAContext.cpp":49, please', "fewer GPUs than"),
    ],
)
def test_what_helps_depends_on_what_is_missing(message: str, words: str) -> None:
    """A driver that is too old works, and nvidia-smi shows nothing wrong with it."""
    found = diagnose(evidence_of(ExitStatus(1, None), (*HEAD, f"RuntimeError: {message}"))).cause
    assert found is not None
    assert found.class_name == "missing_gpu"
    assert words in found.advice
