"""The examples of docs/several-hosts.md are what the code prints today."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.cli.rank_command import rank_command
from saferun.coordinator.dial import SILENT
from saferun.coordinator.host_probe import ProbedHost
from saferun.coordinator.search_text import PortResult, search_text
from saferun.diagnosis import diagnose
from saferun.diagnosis.host_fault import host_faults
from saferun.errors import UsageError
from saferun.evidence.job_evidence import Evidence, HostView
from saferun.launch.hosts_at_fault import faulty_hosts
from saferun.supervisor.policy.faulty_hosts import replaced_text

PAGE = (Path(__file__).parents[2] / "docs" / "several-hosts.md").read_text(encoding="utf-8")
PRINTED = tuple(line for line in PAGE.splitlines() if line.startswith(("saferun: ", "hint: ")))


def hosts_with(line: str) -> tuple[HostView, ...]:
    """Five hosts with one rank each, of which the last one has this line in its kernel log."""
    hosts = [HostView(number, f"node{number + 1}", (number,), has_evidence=True) for number in range(5)]
    return (*hosts[:-1], hosts[-1]._replace(kernel_lines=(line,)))


def test_a_port_that_a_firewall_closes() -> None:
    """With the time for which it has been tried."""
    found = {29500: PortResult(SILENT, "node1:29500 (10.77.0.1) does not answer node2")}
    probed = ProbedHost((22, 29501), is_up=True, addresses=("10.77.0.1",))
    assert f"saferun: {search_text('node1', (29500,), found, 'node2', probed)} (5 s)" in PRINTED


def test_a_host_without_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same two lines on every host."""
    monkeypatch.chdir(tmp_path)
    values = SimpleNamespace(
        training_script="train.py", training_script_args=(), run_path=False, no_python=False, module=False
    )
    with pytest.raises(UsageError) as raised:
        rank_command(values, {})
    assert f"saferun: node3 cannot start: {raised.value.what}" in PRINTED
    assert f"hint: {raised.value.hint}" in PRINTED


def test_a_host_that_lost_its_power() -> None:
    """By what the first host finds out about it."""
    lost = HostView(2, "node3", (2,), has_evidence=False, lost_reason="unreachable", lost_message="no answer")
    hosts = (HostView(0, "node1", (0,), has_evidence=True), HostView(1, "node2", (1,), has_evidence=True), lost)
    evidence = Evidence("node1", 0.0, (), (), (), None, hosts=hosts)
    assert f"saferun: {diagnose(evidence).headline}" in PRINTED


def test_a_host_whose_gpu_has_failed_and_the_spare_for_it() -> None:
    """From the line of the kernel log to that of saferun."""
    line = "NVRM: Xid (PCI:0000:3b:00): 79, pid=101, name=python, GPU has fallen off the bus."
    hosts = hosts_with(line)
    faults = faulty_hosts(host_faults(Evidence("node1", 0.0, (), (), (), None, hosts=hosts)), hosts)
    assert f"saferun: {replaced_text(faults, ('node65', 'node66'))[1]}" in PRINTED


def test_the_page_has_no_other_examples() -> None:
    """One that nothing compares would become false without notice."""
    assert len(PRINTED) == 5
    assert not re.search(r"^\s+saferun: ", PAGE, re.MULTILINE)
