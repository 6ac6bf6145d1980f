"""A signal that a tool around the rank (``--wrap``) may have sent."""

from __future__ import annotations

import signal

import pytest

from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of


def advice(signum: int, *tools: str) -> str:
    evidence = evidence_of(ExitStatus(None, signum))
    output = evidence.outputs[0]._replace(tools=tools)
    return cause_of(read_failure(evidence, evidence.ends[0], output)).advice


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("tools", [("timeout 1",), ("nice -n 1", "timeout 1"), ("timeout 1", "mine")])
def test_the_tool_is_named_before_others(tools: tuple[str, ...], signum: int) -> None:
    """The outermost one; what others may have done remains to be said."""
    alone = advice(signum)
    assert advice(signum, *tools) == (
        f"it ran under timeout 1 (--wrap), which may have sent the signal; if not, {alone}"
    )


@pytest.mark.parametrize("tool", ["strace -f", "/usr/bin/perf record --", "gdb -nx", "nice", "numactl -l"])
def test_tools_that_send_no_signals_are_not_blamed(tool: str) -> None:
    assert advice(signal.SIGKILL, tool) == advice(signal.SIGKILL)


def test_a_signal_of_the_programs_own_is_not_the_tools() -> None:
    assert advice(signal.SIGSYS, "timeout 1") == advice(signal.SIGSYS)
    assert advice(signal.SIGSEGV, "timeout 1") == advice(signal.SIGSEGV)


def test_a_long_command_line_is_cut() -> None:
    assert len(advice(signal.SIGTERM, "tool " + "x" * 5000)) < 300
