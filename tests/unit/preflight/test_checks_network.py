"""The store's port, the way to the master, RDMA ports: what is told of each, and what is not."""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.errors import SaferunError
from saferun.linux.listen_port import hold_first
from saferun.linux.netlink import Route
from saferun.linux.nic import Nic
from saferun.preflight.checks import fabric, master, name_resolution
from saferun.preflight.checks.all_checks import CHECKS
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.fabric import check_fabric, read_ports
from saferun.preflight.checks.master import check_master, try_ports
from saferun.preflight.checks.name_resolution import Lookup
from saferun.preflight.checks.ports import check_ports
from saferun.preflight.results import CheckResult
from saferun.text.master_port import DEFAULT, GIVEN
from tests.ports import own_port

LO = Nic("lo", ("127.0.0.1", "::1"), kind="loopback", mtu=65536)
ETH0 = Nic("eth0", ("10.1.0.3",))
HOSTS = ("node0", "node1", "node2", "node3")


def test_all_checks_have_names_of_their_own_and_deadlines() -> None:
    assert [check.name for check in CHECKS[:6]] == ["names", "ports", "interfaces", "fabric", "rdma", "master"]
    assert all(0 < check.deadline_s <= 5 for check in CHECKS[:6])


# --------------------------------------------------------------------------------------------------------------- ports


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_port_in_use_is_told_with_its_holder(taken: int) -> None:
    result = check_ports(CheckContext(ports=(taken,)))
    assert (result.verdict, result.class_name, result.transient) == ("fail", "port_in_use", True)
    assert result.message.startswith(f"port {taken} is in use by pid {os.getpid()} (")
    assert "--master-port" in result.hint


def test_what_to_do_about_a_port_depends_on_where_its_number_is_from(taken: int) -> None:
    """By hand on several hosts, nobody has chosen the default port, and no free one would be chosen either."""
    result = check_ports(CheckContext(ports=(taken,), port_source=DEFAULT))
    default = f"this is the default port {taken}, because no --master-port was given"
    assert result.hint == f"stop that process, or pass a free --master-port to all hosts: {default}"
    with pytest.raises(SaferunError) as caught:
        hold_first([taken], DEFAULT)
    assert caught.value.hint == result.hint
    result = check_ports(CheckContext(ports=(taken,), port_source=GIVEN))
    assert result.hint == "stop that process, or pass another --master-port to all hosts"


def test_one_free_port_of_several_is_enough(taken: int) -> None:
    """The first free one is taken."""
    port = own_port()
    result = check_ports(CheckContext(ports=(taken, port)))
    assert (result.verdict, result.message) == ("ok", f"port {port} is free")
    result = check_ports(CheckContext(ports=(taken, taken)))
    assert result.message.startswith(f"none of the 2 ports that the job may use is free: port {taken} is in use by pid")


def test_a_port_that_saferun_holds_is_not_asked_for_again(taken: int) -> None:
    result = check_ports(CheckContext(ports=(taken,), bound=(taken,)))
    assert (result.verdict, result.message) == ("ok", f"port {taken} is held for the store")


@pytest.mark.parametrize("context", [CheckContext(), CheckContext(ports=(0,)), CheckContext(serves=False, ports=(1,))])
def test_a_port_that_the_kernel_chooses_or_that_is_elsewhere_is_fine(context: CheckContext) -> None:
    assert check_ports(context).verdict == "ok"


def test_the_check_leaves_the_port_free() -> None:
    port = own_port()
    assert check_ports(CheckContext(ports=(port,))).verdict == "ok"
    with socket.create_server(("127.0.0.1", port)):
        assert check_ports(CheckContext(ports=(port,))).verdict == "fail"


def test_a_port_that_users_may_not_have_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    class Socket(socket.socket):
        bind = refuse

    monkeypatch.setattr(socket, "socket", Socket)
    result = check_ports(CheckContext(ports=(80,)))
    assert (result.verdict, result.message) == ("fail", "this user cannot use port 80")
    assert result.hint == "pass a --master-port above 1023"
    assert not result.transient


def sysctl(root: Path, **values: str) -> str:
    folder = root / "proc/sys/net/ipv4"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in values.items():
        (folder / name).write_text(f"{text}\n")
    return f"{root}/"


@pytest.mark.parametrize(
    ("ports", "bounds", "reserved", "verdict"),
    [
        ((45000,), "32768\t60999", "", "warn"),
        ((45000,), "32768\t60999", "8080,44000-46000", "ok"),
        ((20001,), "32768\t60999", "", "ok"),
        ((29500,), "1024\t65535", "", "ok"),  # torchrun's default: nobody chose it
        ((20001, 20002), "1024\t65535", "", "ok"),  # saferun's own choice
        ((45000,), "1024\t65535", "", "warn"),
        ((45000,), "garbage", "", "ok"),
    ],
)
def test_a_port_that_outgoing_connections_may_take_is_a_warning(
    tmp_path: Path, ports: tuple[int, ...], bounds: str, reserved: str, verdict: str
) -> None:
    root = sysctl(tmp_path, ip_local_port_range=bounds, ip_local_reserved_ports=reserved)
    context = CheckContext(spans_hosts=True, master="node0", ports=ports, bound=ports, root=root)
    result = check_ports(context)
    assert result.verdict == verdict
    if verdict == "warn":
        low, high = bounds.split()
        expected = f"port 45000 is an ephemeral port ({low} to {high}): an outgoing connection may take it"
        assert result.message == expected
        assert "ip_local_reserved_ports" in result.hint
    # Alone, or on one machine, the launch that holds it is all that counts.
    assert check_ports(context._replace(spans_hosts=False)).verdict == "ok"
    assert check_ports(context._replace(master="127.0.0.1")).verdict == "ok"


# -------------------------------------------------------------------------------------------------------------- master


def test_a_port_that_listens_a_port_that_refuses_and_none() -> None:
    port = own_port()
    with socket.create_server(("127.0.0.1", port)):
        assert try_ports([("127.0.0.1", port)], 5) == {("127.0.0.1", port): "connected"}
    assert try_ports([("127.0.0.1", port)], 5) == {("127.0.0.1", port): "refused"}
    assert try_ports([], 5) == {}


def test_the_first_answer_is_enough() -> None:
    """Of eight ports that the master may have, seven have nobody behind them."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as full:
        # A queue of none: connections to it are never answered.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent, port = full.getsockname()[1], listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", silent), timeout=5):
            found = try_ports([("127.0.0.1", silent), ("127.0.0.1", port)], 600)
            assert found == {("127.0.0.1", silent): "silent", ("127.0.0.1", port): "connected"}
            assert try_ports([("127.0.0.1", silent)], 0.05) == {("127.0.0.1", silent): "silent"}


def master_check(monkeypatch: pytest.MonkeyPatch, answer: str, route: Route | None = None, **more: Any) -> CheckResult:
    monkeypatch.setattr(master, "resolve", lambda _names: (Lookup("node0", ("10.1.0.1",)),))
    monkeypatch.setattr(master, "route_to", lambda _address: route or Route("eth0", "10.1.0.3", "10.1.0.254", 1500))
    monkeypatch.setattr(master, "try_ports", lambda tries, _timeout_s: dict.fromkeys(tries, answer))
    monkeypatch.setattr(master, "read_nics", lambda _root: (LO, ETH0, Nic("hsn0", (), is_up=False)))
    context = CheckContext(spans_hosts=True, serves=False, master="node0", ports=(29500,))
    return check_master(context._replace(**more))


WAY = "eth0 through 10.1.0.254 leads to 10.1.0.1 (MTU 1500)"


@pytest.mark.parametrize(
    ("answer", "verdict", "words"),
    [
        ("connected", "ok", f"node0:29500 (10.1.0.1) answers; {WAY}"),
        ("refused", "skipped", f"node0:29500 (10.1.0.1) refuses connections: not there yet; {WAY}"),
        ("silent", "skipped", f"node0:29500 (10.1.0.1) does not answer: not there yet; {WAY}"),
        ("prohibited", "warn", "a firewall rejects connections to node0:29500 (10.1.0.1), over eth0"),
        ("no route", "warn", "no network of this host leads to the master node0 (10.1.0.1)"),
    ],
)
def test_what_the_masters_port_says(monkeypatch: pytest.MonkeyPatch, answer: str, verdict: str, words: str) -> None:
    """While hosts come up, silence and refusal are no failures."""
    result = master_check(monkeypatch, answer)
    assert (result.verdict, result.message) == (verdict, words)
    assert result.transient is (verdict == "warn")


def test_without_a_way_what_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = master_check(monkeypatch, "silent", Route(error=errno.ENETUNREACH))
    assert result.message == "no network of this host leads to the master node0 (10.1.0.1)"
    assert result.hint == "look at `ip route get 10.1.0.1`, and at --master-addr; hsn0 is down"


@pytest.mark.parametrize("more", [{"spans_hosts": False}, {"serves": True}, {"master": ""}])
def test_the_master_itself_and_a_host_alone_have_no_way_to_go(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    result = master_check(monkeypatch, "no route", **more)
    assert (result.verdict, "no way to go" in result.message) == ("ok", False)
    if not more.get("spans_hosts", True):
        assert result.message == "only one host: no route is needed"


def test_without_a_port_the_way_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    result = master_check(monkeypatch, "refused", ports=())
    assert (result.verdict, dict(result.facts)["mtu"]) == ("ok", "1500")


def test_a_name_that_does_not_resolve_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the check of names."""
    monkeypatch.setattr(master, "resolve", lambda _names: (Lookup("node0", error="unknown"),))
    result = check_master(CheckContext(spans_hosts=True, serves=False, master="node0", ports=(29500,)))
    assert result.verdict == "skipped"


# -------------------------------------------------------------------------------------------------------------- fabric


def device(
    root: Path,
    name: str,
    state: str = "4: ACTIVE",
    physical: str = "5: LinkUp",
    rate: str = "400 Gb/sec (4X NDR)",
    layer: str = "InfiniBand",
    board: str = "MT_0000000838",
    *,
    pci: str = "",
) -> None:
    folder = root / "sys/class/infiniband" / name / "ports/1"
    folder.mkdir(parents=True)
    for file, text in {"state": state, "phys_state": physical, "rate": rate, "link_layer": layer}.items():
        (folder / file).write_text(f"{text}\n")
    (folder.parent.parent / "board_id").write_text(f"{board}\n")
    if pci:
        (folder.parent.parent / "device").symlink_to(f"../../../{pci}")


DOWN: dict[str, str] = {"state": "1: DOWN", "physical": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}


def fabric_check(
    monkeypatch: pytest.MonkeyPatch, root: Path, nics: tuple[Nic, ...] = (LO, ETH0), **more: Any
) -> CheckResult:
    monkeypatch.setattr(fabric, "read_nics", lambda _root: nics)
    return check_fabric(CheckContext(spans_hosts=True, vendor="nvidia", root=f"{root}/")._replace(**more))


def test_a_host_without_rdma_is_fine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fabric_check(monkeypatch, tmp_path).message == "no RDMA devices"


def test_healthy_ports_are_told_as_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number in range(4):
        device(tmp_path, f"mlx5_{number}")
    device(tmp_path, "mlx5_bond_0", rate="100 Gb/sec (2X HDR)", layer="Ethernet", board="other")
    result = fabric_check(monkeypatch, tmp_path)
    words = "5 of 5 RDMA ports ACTIVE: InfiniBand 400 Gbit/s, RoCE 100 Gbit/s"
    assert (result.verdict, result.message) == ("ok", words)
    assert ("mlx5_0:1", "ACTIVE 400 Gbit/s InfiniBand") in result.facts


def test_a_port_that_is_down_beside_others_of_its_make_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number in range(3):
        device(tmp_path, f"mlx5_{number}")
    device(tmp_path, "mlx5_3", **DOWN)
    result = fabric_check(monkeypatch, tmp_path)
    assert result.verdict == "warn"
    assert result.message == "mlx5_3:1 is DOWN, and mlx5_0:1, mlx5_1:1 and mlx5_2:1 are ACTIVE"
    assert "NCCL_IB_HCA=^=mlx5_3" in result.hint
    assert fabric_check(monkeypatch, tmp_path, environ={"NCCL_IB_HCA": "^=mlx5_3"}).verdict == "ok"
    assert fabric_check(monkeypatch, tmp_path, vendor="none").verdict == "ok"
    assert fabric_check(monkeypatch, tmp_path, spans_hosts=False).verdict == "ok"


def test_a_port_of_another_make_or_one_that_is_switched_off_is_nobodys_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most hosts have one that nobody ever connected."""
    device(tmp_path, "mlx5_0")
    device(tmp_path, "mlx5_1", **DOWN, board="storage")
    device(tmp_path, "mlx5_2", **{**DOWN, "physical": "3: Disabled"})
    device(tmp_path, "mlx5_3", **DOWN, layer="Ethernet")
    assert fabric_check(monkeypatch, tmp_path).verdict == "ok"
    assert fabric_check(monkeypatch, tmp_path, environ={"NCCL_IB_HCA": "mlx5_0,mlx5_1"}).verdict == "warn"


def test_the_second_port_of_a_card_is_a_fault_only_where_others_have_both_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A card with two connectors and one cable is bought more often than not."""
    for card in range(2):
        device(tmp_path, f"mlx5_{2 * card}", pci=f"0000:{card}b:00.0")
        device(tmp_path, f"mlx5_{2 * card + 1}", **DOWN, pci=f"0000:{card}b:00.1")
    assert fabric_check(monkeypatch, tmp_path).verdict == "ok"
    assert fabric_check(monkeypatch, tmp_path, environ={"NCCL_IB_HCA": "mlx5_0,mlx5_1"}).verdict == "warn"
    device(tmp_path, "mlx5_4", pci="0000:2b:00.0")
    device(tmp_path, "mlx5_5", pci="0000:2b:00.1")
    result = fabric_check(monkeypatch, tmp_path)
    assert result.verdict == "warn"
    assert result.message.startswith("mlx5_1:1 and mlx5_3:1 are DOWN, and ")


def test_a_whole_card_that_is_down_beside_others_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of the others has one cable: this one has lost its own."""
    for card, state in enumerate(({}, {}, DOWN)):
        device(tmp_path, f"mlx5_{2 * card}", **state, pci=f"0000:{card}b:00.0")
        device(tmp_path, f"mlx5_{2 * card + 1}", **DOWN, pci=f"0000:{card}b:00.1")
    result = fabric_check(monkeypatch, tmp_path)
    assert result.message == "mlx5_4:1 and mlx5_5:1 are DOWN, and mlx5_0:1 and mlx5_2:1 are ACTIVE"


def test_the_second_port_of_one_device_is_the_second_one_of_a_card(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Older cards show both as ports of one device."""
    device(tmp_path, "mlx4_0")
    folder = tmp_path / "sys/class/infiniband/mlx4_0/ports/2"
    folder.mkdir()
    for file, text in {"state": DOWN["state"], "phys_state": DOWN["physical"], "rate": DOWN["rate"]}.items():
        (folder / file).write_text(f"{text}\n")
    (folder / "link_layer").write_text("InfiniBand\n")
    assert fabric_check(monkeypatch, tmp_path).verdict == "ok"


def test_a_port_slower_than_its_siblings_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A bad cable is set up at a lower speed, and all ranks wait for it."""
    for number in range(7):
        device(tmp_path, f"mlx5_{number}")
    device(tmp_path, "mlx5_7", rate="100 Gb/sec (1X NDR)")
    result = fabric_check(monkeypatch, tmp_path)
    assert result.verdict == "warn"
    assert result.message == "mlx5_7:1 runs at 100 Gbit/s, and the 7 others of its make at 400"


def test_a_port_that_no_subnet_manager_has_set_up_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device(tmp_path, "mlx5_0", state="2: INIT")
    result = fabric_check(monkeypatch, tmp_path)
    assert result.verdict == "warn"
    assert "no subnet manager" in result.message


@pytest.mark.parametrize(
    ("value", "verdict"),
    [("mlx6", "warn"), ("=mlx5", "warn"), ("mlx5_0:2", "warn"), ("mlx5", "ok"), ("=mlx5_0:1", "ok"), ("^mlx6", "ok")],
)
def test_a_list_that_leaves_nccl_no_device_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str, verdict: str
) -> None:
    """It goes on over TCP, many times slower, and says so only with NCCL_DEBUG."""
    device(tmp_path, "mlx5_0")
    result = fabric_check(monkeypatch, tmp_path, environ={"NCCL_IB_HCA": value})
    assert result.verdict == verdict
    if verdict == "warn":
        assert result.message == f"NCCL_IB_HCA={value} fits no RDMA device of this host, so that NCCL would use TCP"
    environ = {"NCCL_IB_HCA": value, "NCCL_IB_DISABLE": "1"}
    assert fabric_check(monkeypatch, tmp_path, environ=environ).verdict == "ok"


def test_devices_that_nccls_own_file_leaves_out_are_no_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A site's list is there for all users, who set no variable."""
    for number in range(3):
        device(tmp_path, f"mlx5_{number}")
    device(tmp_path, "mlx5_3", **DOWN)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_HCA=^=mlx5_3\n")
    assert fabric_check(monkeypatch, tmp_path, environ={"HOME": str(tmp_path)}).verdict == "ok"
    named = {"HOME": str(tmp_path), "NCCL_IB_HCA": "mlx5"}
    assert fabric_check(monkeypatch, tmp_path, environ=named).verdict == "warn", "a variable wins"


def test_a_value_from_nccls_own_file_is_quoted_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The user has not set it, and finds it nowhere else."""
    device(tmp_path, "mlx5_0")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_IB_HCA=mthca\n")
    message = "NCCL_IB_HCA=mthca{} fits no RDMA device of this host, so that NCCL would use TCP"
    environ = {"HOME": str(tmp_path)}
    assert fabric_check(monkeypatch, tmp_path, environ=environ).message == message.format(" (from /etc/nccl.conf)")
    (tmp_path / ".nccl.conf").write_text("NCCL_IB_HCA=mthca\n")
    assert fabric_check(monkeypatch, tmp_path, environ=environ).message == message.format(" (from ~/.nccl.conf)")
    named = {**environ, "NCCL_CONF_FILE": str(tmp_path / ".nccl.conf")}
    assert fabric_check(monkeypatch, tmp_path, environ=named).message == message.format(" (from NCCL_CONF_FILE)")
    named = {**environ, "NCCL_IB_HCA": "mthca"}
    assert fabric_check(monkeypatch, tmp_path, environ=named).message == message.format("")


def test_a_slingshot_interface_that_is_down_beside_others_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nics = (LO, *(Nic(f"hsn{number}", is_up=number != 2) for number in range(4)))
    result = fabric_check(monkeypatch, tmp_path, nics)
    assert (result.verdict, result.message) == ("warn", "hsn2 is down, and 3 other Slingshot interfaces are up")
    assert fabric_check(monkeypatch, tmp_path, nics[:3]).message == "2 Slingshot interfaces"


def test_efa_is_known_by_its_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device(tmp_path, "rdmap16s27", rate="100 Gb/sec (4X EDR)", layer="Unspecified", board="")
    driver = tmp_path / "sys/class/infiniband/rdmap16s27/device"
    driver.mkdir()
    (driver / "driver").symlink_to("../../../bus/pci/drivers/efa")
    assert fabric_check(monkeypatch, tmp_path).message == "1 of 1 RDMA ports ACTIVE: EFA 100 Gbit/s"


def test_files_that_cannot_be_read_or_hold_anything_break_nothing(tmp_path: Path) -> None:
    device(tmp_path, "odd_0", state="", physical="x", rate="fast", layer="\xff")
    (tmp_path / "sys/class/infiniband/empty").mkdir()
    ports = read_ports(f"{tmp_path}/")
    assert [(port.name, port.state, port.rate_gbit_s) for port in ports] == [("odd_0:1", "", 0.0)]


# ---------------------------------------------------------------------------------------------------------------- cost


def test_the_checks_load_nothing_slow() -> None:
    """They run beside every start."""
    from subprocess import run

    program = (
        # Typing is small, and the supervisor does without it.
        "import saferun.cli.main, saferun.launch.entry, contextlib, typing, sys; before = set(sys.modules); "
        "from saferun.preflight.checks import fabric, interfaces, master, name_resolution, ports; "
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('saferun')))"
    )
    root = str(Path(name_resolution.__file__).parents[2])
    done = run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    sockets = {"_socket", "array", "math", "selectors", "socket"}  # the supervisor does without them
    assert set(done.stdout.split()) <= sockets | {"_weakrefset", "threading", "warnings", "io"}  # by Python 3.13, 3.14
