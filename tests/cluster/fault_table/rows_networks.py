"""Networks and hosts that fail while the ranks train, or before they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.cluster.fault_table.stage import Right, Row
from tests.cluster.faulted import GLOO, GLOO_UNTIL_RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.cluster.fault_table.stage import Stage

QUICK = ("--hang-timeout", 15, "--host-timeout", 10)
ENV = {"OMP_NUM_THREADS": "1"}
DATA = {**ENV, "GLOO_SOCKET_IFNAME": "eth1"}


def cut_data(how: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.by_hand(GLOO, *QUICK, "--on-hang", "stop", env=DATA)
        stage.steps()
        stage.fault()
        stage.host("node3").cut("eth1", how=how)  # type: ignore[arg-type]  # one of its three words

    return play


def cut_management(name: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.by_hand(GLOO_UNTIL_RELEASED, *QUICK, env=DATA)
        stage.steps()
        stage.fault()
        stage.host(name).cut("eth0", how="cable")
        stage.await_said("no carrier")
        stage.for_a_while(20)
        stage.release("end")

    return play


def power_off(name: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        stage.by_hand(GLOO, *QUICK, env=ENV)
        stage.steps()
        stage.fault()
        stage.host(name).power_off()

    return play


def block(stage: Stage) -> None:
    stage.by_hand(GLOO, *QUICK, "--on-hang", "stop", env=DATA)
    stage.steps()
    stage.fault()
    stage.host("node2").block_peer(stage.host("node3"))


def before(fault: Callable[[Stage], None], env: dict[str, str], *options: object) -> Callable[[Stage], None]:
    """Make a fault, then start a job that would train for three steps."""

    def play(stage: Stage) -> None:
        fault(stage)
        stage.by_hand(GLOO_UNTIL_RELEASED, *QUICK, *options, env=env)
        stage.await_said("^saferun: ")
        stage.release("end")

    return play


def blocked_at_start(stage: Stage) -> None:
    stage.host("node2").block_peer(stage.host("node3"))


def slow(stage: Stage) -> None:
    stage.host("node3").slow("eth1", delay_ms=20)


def lossy(stage: Stage) -> None:
    stage.host("node3").slow("eth1", delay_ms=20, loss=0.02)


def cut(stage: Stage) -> None:
    stage.host("node3").cut("eth1")


def firewalled(stage: Stage) -> None:
    stage.host("node3").firewall(None, "drop", nic="eth1")


def with_docker(stage: Stage) -> None:
    """Nothing: the interface is there on every host."""


def loopback(*names: str) -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        for name in names:
            stage.host(name).break_name(name, "127.0.1.1")

    return play


NODE_3 = ("node1", "node2", "node3")
ROWS = (
    *(
        Row(
            f"data-cut-{how}",
            f"node3's data NIC is cut while it trains ({words}), hang timeout 15 s",
            "by hand",
            cut_data(how),
            right=Right(says, "eth1|cable|ip link", words_s=30, end_s=35, sentences=3),
            torchrun="nothing in 180 s; with a group timeout a healthy host is blamed",
        )
        for how, words, says in (
            ("cable", "no carrier", r".*node3.*eth1 has no carrier"),
            (
                "network",
                "behind the switch",
                r".*nothing gets through between node3 and node1, node2: its network is cut \(rank 2\)",
            ),
        )
    ),
    Row(
        "management-cut",
        "node3's management NIC is cut (no carrier), the ranks use the other",
        "by hand",
        cut_management("node3"),
        right=Right(
            r"node3: eth0 has no carrier; .*the job goes on",
            None,
            on=("node1",),
            codes=0,
            words_s=20,
            end_s=90,
            sentences=1,
            hints=1,
            never=("is lost",),
        ),
        torchrun="its output stops; training goes on",
    ),
    Row(
        "management-cut-first",
        "the same on node1",
        "by hand",
        cut_management("node1"),
        right=Right(
            r"node1: eth0 has no carrier; .*the job goes on",
            None,
            on=("node1",),
            codes=0,
            words_s=20,
            end_s=90,
            sentences=1,
            hints=1,
            never=("is lost",),
        ),
        torchrun="its output stops; training goes on",
    ),
    Row(
        "host-dies",
        "node3 loses its power",
        "by hand",
        power_off("node3"),
        right=Right(
            r"node3 is lost \(rank 2\): none of its addresses answers: it has no power",
            "node3",
            on=("node1", "node2"),
            codes={"node3": -9},
            words_s=25,
            end_s=30,
            left=True,
        ),
        torchrun="nothing in 180 s",
    ),
    Row(
        "first-host-dies",
        "node1 loses its power",
        "by hand",
        power_off("node1"),
        right=Right(
            r"node1, which had the job's store, is lost: none of its addresses answers",
            "node1",
            on=("node2", "node3"),
            codes={"node1": -9},
            words_s=25,
            end_s=30,
            left=True,
        ),
        torchrun="nothing in 180 s",
    ),
    Row(
        "pair-blocked",
        "nothing passes between node2 and node3 while they train",
        "by hand",
        block,
        right=Right(
            r".*node2 and node3 do not reach each other",
            "node2|node3",
            words_s=30,
            end_s=35,
            never=("is lost", r"node1.*cut"),
        ),
        torchrun="73 s with a group timeout of 60 s: healthy ranks time out",
    ),
    Row(
        "pair-blocked-start",
        "the same before the start",
        "by hand",
        before(blocked_at_start, DATA),
        right=Right(
            r"node2 and node3 do not reach each other",
            "node2|node3|eth1",
            codes=2,
            words_s=20,
            end_s=22,
            sentences=1,
            never=("node1 .*not reach",),
        ),
        torchrun="healthy ranks blamed",
    ),
    Row(
        "slow-nic",
        "node3's data NIC is slow: 20 ms a frame",
        "by hand",
        before(slow, DATA),
        right=Right(r"node3: eth1 is slow", "", on=("node1",), codes=0, words_s=30, end_s=90, sentences=1),
        torchrun="nothing",
    ),
    Row(
        "lossy-nic",
        "the same, and 2 % of all frames are lost",
        "by hand",
        before(lossy, DATA),
        right=Right(
            r"node3: eth1 (is slow|loses packets)",
            "",
            on=("node1",),
            codes=0,
            words_s=30,
            end_s=120,
            sentences=2,
            hints=2,
        ),
        torchrun="nothing; 27 times slower",
    ),
    Row(
        "cut-unused",
        "node3's data NIC is cut before the start; the ranks use the other",
        "by hand",
        before(cut, ENV),
        right=Right(
            r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
            "cable",
            on=("node1",),
            codes=0,
            words_s=25,
            end_s=90,
            sentences=1,
        ),
        torchrun="nothing",
    ),
    Row(
        "cut-used",
        "the same; the ranks use it",
        "by hand",
        before(cut, DATA),
        right=Right(
            r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
            "--nic eth0",
            codes=2,
            words_s=25,
            end_s=26,
            sentences=1,
        ),
        torchrun="nothing in 180 s",
    ),
    Row(
        "data-firewalled",
        "node3's firewall drops what comes in on the data NIC",
        "by hand",
        before(firewalled, DATA),
        right=Right(
            r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
            "firewall",
            codes=2,
            words_s=25,
            end_s=26,
            sentences=1,
        ),
        torchrun="150 s, an address and a port; some ranks hang",
    ),
    Row(
        "docker0",
        "GLOO_SOCKET_IFNAME=docker0",
        "by hand",
        before(with_docker, {**ENV, "GLOO_SOCKET_IFNAME": "docker0"}),
        right=Right(
            r"docker0 has the same address on several hosts \(172\.17\.0\.1\)",
            "--nic eth",
            codes=2,
            words_s=15,
            end_s=16,
            sentences=1,
        ),
        torchrun="an address only; > 180 s",
    ),
    Row(
        "ib0",
        "GLOO_SOCKET_IFNAME=ib0, which there is not",
        "by hand",
        before(with_docker, {**ENV, "GLOO_SOCKET_IFNAME": "ib0"}),
        right=Right(
            r"node1, node2, node3: GLOO_SOCKET_IFNAME names ib0, which|.*ib0",
            "eth0 and eth1",
            codes=2,
            words_s=15,
            end_s=16,
            sentences=1,
        ),
        torchrun="10 s: Unable to find address for: ib0",
    ),
    Row(
        "loopback-name",
        "node3's own name resolves to 127.0.1.1",
        "by hand",
        before(loopback("node3"), ENV),
        right=Right(
            r"node3: its own name node3 resolves to 127\.0\.1\.1",
            "/etc/hosts",
            codes=2,
            words_s=15,
            end_s=16,
            sentences=1,
        ),
        torchrun="refused [127.0.1.1]; the first host hangs",
    ),
    Row(
        "loopback-names",
        "the same on all hosts",
        "by hand",
        before(loopback(*NODE_3), ENV),
        right=Right(
            r"node1-node3 \(3 hosts\): its own name <host> resolves to 127\.0\.1\.1",
            "/etc/hosts",
            codes=2,
            words_s=15,
            end_s=16,
            sentences=1,
        ),
        torchrun="refused [127.0.1.1]; the first host hangs",
    ),
)
