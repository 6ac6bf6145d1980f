"""GPUs and NVSwitches that have failed, by the kernel log, as the cause of a hang."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.hang import diagnose_hang
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.gpu_evidence import RankGpu
from saferun.evidence.job_evidence import Evidence, Frame, HangVerdict, HostView
from tests.unit.diagnosis.recorded_hangs import C10D
from tests.unit.diagnosis.test_hang_precedence import SLEEPS, job, recorder

STEP = Frame("step", "/job/train.py", 52)
IN_STEP = (Frame("all_reduce", C10D, 3252), STEP)
GPUS = tuple(RankGpu(rank, f"0000:{bus}:00.0") for rank, bus in enumerate(("1b", "43", "52")))
OFF_THE_BUS = "NVRM: Xid (PCI:0000:43:00): 79, pid=101, name=python, GPU has fallen off the bus."
NOT_FATAL = "NVRM: Xid (PCI:0000:43:00): 63, pid=101, name=python, Row Remapper: New row marked for remapping"
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 20034, Fatal, Link 12 LTSSM Fault Up"
STUCK = tuple(recorder(rank, "all_reduce", "all_reduce", completed=1) for rank in range(3))


def cause_of(found: Diagnosis) -> Any:
    assert found.cause is not None
    return found.cause


def stuck(*lines: str, **fields: Any) -> Evidence:
    """All ranks wait in a collective that all have called."""
    evidence = job(IN_STEP, IN_STEP, IN_STEP, recorders=STUCK, gpus=GPUS, **fields)
    return evidence._replace(kernel_lines=lines)


def test_without_an_error_in_the_kernel_log_no_rank_is_named() -> None:
    assert cause_of(diagnose_hang(stuck())).ranks == ()


def test_a_fatal_error_of_a_rank_s_gpu_is_the_cause_with_its_meaning_and_advice() -> None:
    """The line is the proof."""
    found = diagnose_hang(stuck("something else", OFF_THE_BUS))
    cause = cause_of(found)
    assert (cause.class_name, cause.ranks, cause.proof) == ("hang_gpu", (1,), OFF_THE_BUS)
    assert found.headline == (
        "the job hangs: rank 1 (node1) cannot go on: its GPU has failed, as the kernel log says: "
        "the GPU has fallen off the PCIe bus (Xid 79)"
    )
    assert cause.advice.startswith("reboot the host")


def test_the_gpu_leads_to_the_rank_where_the_line_has_no_process() -> None:
    line = OFF_THE_BUS.replace("pid=101, name=python, ", "")
    assert cause_of(diagnose_hang(stuck(line))).ranks == (1,)
    # Nor is it known whose it is where no rank was seen on it.
    assert cause_of(diagnose_hang(stuck(line.replace("43", "9a")))).ranks == ()


def test_of_several_suspects_the_one_whose_gpu_has_failed_is_named() -> None:
    """The call has ended on rank 0; ranks 1 and 2 are suspects by that."""
    recorders = (recorder(0, "all_reduce", "all_reduce", completed=2), *STUCK[1:])
    evidence = job(IN_STEP, IN_STEP, IN_STEP, recorders=recorders, gpus=GPUS)
    assert cause_of(diagnose_hang(evidence)).ranks == (1, 2)
    found = diagnose_hang(evidence._replace(kernel_lines=(OFF_THE_BUS,)))
    assert cause_of(found).ranks == (1,)


@pytest.mark.parametrize("line", [NOT_FATAL, "NVRM: Xid (PCI:0000:43:00): 145, RLW_RXPIPE Nonfatal XC1 i0 Link 2"])
def test_an_error_that_is_not_fatal_changes_nothing(line: str) -> None:
    assert cause_of(diagnose_hang(stuck(line))) == cause_of(diagnose_hang(stuck()))


def test_another_rank_s_gpu_does_not_explain_why_a_rank_sleeps() -> None:
    """Rank 2 has left the path, and that is what the others wait for."""
    asleep = (Frame("sleep", "~", 0), STEP)
    evidence = job(IN_STEP, IN_STEP, asleep, looks={2: SLEEPS}, gpus=GPUS)._replace(kernel_lines=(OFF_THE_BUS,))
    assert cause_of(diagnose_hang(evidence)).ranks == (2,)
    assert cause_of(diagnose_hang(evidence)).class_name != "hang_gpu"


def test_a_fatal_error_of_an_nvswitch_is_told_and_no_rank_is_blamed_for_it() -> None:
    found = diagnose_hang(stuck(SWITCH))
    assert (cause_of(found).ranks, cause_of(found).proof) == ((), SWITCH)
    assert found.headline.endswith(
        "; the kernel log has a fatal error: an NVLink of an NVSwitch went down (SXid 20034); "
        "NVSwitches connect the GPUs of ranks 0-2"
    )
    assert "nvidia-fabricmanager" in cause_of(found).advice


def test_of_several_hosts_each_has_its_own_kernel_log() -> None:
    """The same address is another GPU on each host, and so is a pid."""
    hosts = (
        HostView(0, "node1", (0,), has_evidence=True),
        HostView(1, "node2", (1, 2), has_evidence=True, kernel_lines=(OFF_THE_BUS.replace("pid=101", "pid=7"),)),
    )
    gpus = (RankGpu(0, "0000:43:00.0"), RankGpu(1, "0000:1b:00.0"), RankGpu(2, "0000:43:00.0"))
    evidence = job(IN_STEP, IN_STEP, IN_STEP, recorders=STUCK, gpus=gpus)._replace(hosts=hosts)
    assert cause_of(diagnose_hang(evidence)).ranks == (2,)


def test_a_suspected_hang_stays_one() -> None:
    verdict = HangVerdict("spinning", (1,), 300.0, certain=False)
    assert diagnose_hang(stuck(OFF_THE_BUS, verdict=verdict)).headline.startswith("the job may hang: rank 1")
