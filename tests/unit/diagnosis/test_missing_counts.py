"""The number of parameters that another rank was to send, and that never came, is no difference between models."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.causes import Role, role_of
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

HEAD = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step', "    DDP(model)")
DIFFERS = (
    "RuntimeError: DDP expects same model across all ranks, but Rank 2 has 128 params, while rank 0 has inconsistent "
    "{} params."
)
WATCHDOG = (
    "[rank2]:[E1021 10:11:12.123456789 ProcessGroupNCCL.cpp:629] [Rank 2] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=1, OpType=ALLGATHER, NumelIn=1, NumelOut=8, Timeout(ms)=600000) ran for 600041 "
    "milliseconds before timing out."
)


def found_in(*lines: str) -> Cause:
    cause = diagnose(evidence_of(ExitStatus(1, None), lines)).cause
    assert cause is not None
    return cause


@pytest.mark.parametrize("count", ["0", "94577338389344", "-1163005939"])
def test_a_count_that_did_not_arrive_is_a_timeout(count: str) -> None:
    """Another start may succeed, and nothing is wrong with the model."""
    found = found_in(*HEAD, DIFFERS.format(count))
    assert (found.class_name, role_of(found)) == ("collective_timeout", Role.TIMEOUT)
    assert found.message == "the number of parameters of rank 0's model did not arrive"
    assert found.advice.startswith("rank 0 hangs, has ended or is not reached")


def test_a_count_that_a_script_prints_before_it_exits_is_one() -> None:
    assert found_in(f"training failed: {DIFFERS.format('0')}").class_name == "collective_timeout"
    assert found_in(DIFFERS.format("0"), "no valid data: exiting").class_name == "python_exit"


def test_where_the_watchdog_says_why_that_is_the_cause() -> None:
    found = found_in(WATCHDOG, *HEAD, DIFFERS.format("0"))
    assert found.class_name == "nccl_timeout"
    assert found.message == "NCCL timeout: ALLGATHER number 1 did not complete within 600 s"


@pytest.mark.parametrize("count", ["2", "127", "1280000"])
def test_a_count_that_a_model_may_have_is_another_model(count: str) -> None:
    """Whatever the watchdog has logged of an earlier collective."""
    for before in ((), (WATCHDOG,)):
        assert found_in(*before, *HEAD, DIFFERS.format(count)).class_name == "mismatched_collectives"
