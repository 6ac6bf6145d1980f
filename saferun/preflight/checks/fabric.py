"""RDMA devices and high-speed fabrics: InfiniBand, RoCE, EFA, Slingshot; as sysfs shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from saferun.linux.netlink import read_nics
from saferun.linux.small_files import list_directory, read_line, read_link
from saferun.model import Value
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.common import listed, listed_are, with_nccl_conf
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.default_nics import fits, names_in
from saferun.preflight.results import CheckResult

_HCA = "NCCL_IB_HCA"
_MOST_PORTS = 64
_MOST_SHOWN = 4
_SLINGSHOT = "hsn"
_EFA_DRIVER = "efa"
# A PCI address without the function.
_PCI_SLOT = re.compile(r"[0-9a-f]+:[0-9a-f]{2}:[0-9a-f]{2}(?=\.[0-7]$)")
_FEW = 2  # of a kind there must be more than these before one among them is the odd one out


class Port(Value):
    """One port of an RDMA device.

    Attributes:
        name: the device and the port: ``mlx5_0:1``.
        device: ``mlx5_0``.
        state: ``ACTIVE``, ``INIT``, ``DOWN`` …
        physical: ``LinkUp``, ``Polling`` (it looks for a partner), ``Disabled`` …
        rate_gbit_s: in Gbit/s; 0: unknown.
        layer: ``InfiniBand``, ``Ethernet`` (RoCE), ``Unspecified``.
        board: which board it is on; equal for boards of one make.
        driver: the kernel's driver.
        nics: the network interfaces beside it.
        adapter: which adapter it is on: a PCI address without the function, or the device.
    """

    name: str
    device: str
    state: str
    physical: str
    rate_gbit_s: float
    layer: str
    board: str
    driver: str
    nics: tuple[str, ...] = ()
    adapter: str = ""


def read_ports(root: str = "/") -> tuple[Port, ...]:
    """The ports of all RDMA devices of this host; none where there are none.

    Args:
        root: where sysfs is looked for.

    Source: Documentation/ABI/stable/sysfs-class-infiniband of Linux.
    """
    base = os.path.join(root, "sys/class/infiniband")
    ports = []
    for device in list_directory(base):
        folder = f"{base}/{device}"
        board = read_line(f"{folder}/board_id") or read_line(f"{folder}/hca_type")
        driver = os.path.basename(read_link(f"{folder}/device/driver"))
        nics = tuple(list_directory(f"{folder}/device/net"))
        slot = _PCI_SLOT.match(os.path.basename(read_link(f"{folder}/device")))
        for number in list_directory(f"{folder}/ports")[:_MOST_PORTS]:
            port = f"{folder}/ports/{number}"
            rate = read_line(f"{port}/rate").partition(" ")[0]  # "200 Gb/sec (4X HDR)"
            ports.append(
                Port(
                    f"{device}:{number}",
                    device,
                    _word(read_line(f"{port}/state")),
                    _word(read_line(f"{port}/phys_state")),
                    float(rate) if rate.replace(".", "", 1).isdecimal() else 0.0,
                    read_line(f"{port}/link_layer"),
                    board,
                    driver,
                    nics,
                    slot[0] if slot is not None else device,
                )
            )
    return tuple(ports)


def is_dead(port: Port) -> bool:
    """Whether a port is down that was not switched off."""
    return port.state == "DOWN" and port.physical not in {"Disabled", "Sleep"}


def check_fabric(context: CheckContext) -> CheckResult:
    """Whether the ports of this host's RDMA devices are as good as each other.

    One host needs none, and without GPUs they only serve TCP. A port that is down by itself is no fault: most
    hosts have some that were never connected. It is reported where others of the same make are up (the second one of an
    adapter: where another adapter of that make has both up), or where NCCL_IB_HCA names it.
    """
    ports = read_ports(context.root)
    hsn = [nic for nic in read_nics(context.root) if nic.name.startswith(_SLINGSHOT)]
    facts = tuple((port.name, f"{port.state} {port.rate_gbit_s:g} Gbit/s {_layer(port)}") for port in ports)
    facts += tuple((nic.name, "up" if nic.is_up else "down") for nic in hsn)
    if not ports and not hsn:
        return ok("no RDMA devices")
    if context.spans_hosts:
        down = [nic.name for nic in hsn if not nic.is_up]
        if down and len(down) < len(hsn):
            message = (
                f"{listed_are(down, _MOST_SHOWN)} down, and {len(hsn) - len(down)} other Slingshot interfaces are up"
            )
            hint = f"look at the cable and the switch port of {listed(down, _MOST_SHOWN)}: `ip link show {down[0]}`"
            return _warning(message, hint, facts)
        result = _judge(context, ports) if context.vendor != "none" else None
        if result is not None:
            return result._replace(facts=facts)
    return ok(_summary(ports, len(hsn)), facts)


def _judge(context: CheckContext, ports: Sequence[Port]) -> CheckResult | None:
    settings = with_nccl_conf(context)
    value = settings.known(_HCA)
    if value and settings.environ.get("NCCL_IB_DISABLE", "0") != "1":
        used = [port for port in ports if fits(port.device, value) and _is_port(port, value)]
        if ports and not used:
            named = f"{_HCA}={value[:80]}{settings.where(_HCA)}"
            message = f"{named} fits no RDMA device of this host, so that NCCL would use TCP"
            return _warning(message, f"it has {listed([*dict.fromkeys(port.device for port in ports)], _MOST_SHOWN)}")
        ports = used
        is_named = not value.startswith("^")
    else:
        is_named = False
    for port in ports:
        if port.state in {"INIT", "ARMED"} and port.layer == "InfiniBand":
            message = (
                f"{port.name} is in state {port.state}: its cable is in order, and no subnet manager has set it up"
            )
            return _warning(message, "look at the subnet manager of the fabric: `sminfo`, `ibstat`")
    return _judge_down(ports, is_named=is_named) or _judge_slow(ports)


def _judge_down(ports: Sequence[Port], *, is_named: bool) -> CheckResult | None:
    """Ports that are down where their siblings are up; not those that were switched off, or are not in use."""
    up = [port for port in ports if port.state == "ACTIVE"]
    makes = {(port.board, port.layer) for port in up}
    down = [
        port
        for port in ports
        if is_dead(port) and (is_named or ((port.board, port.layer) in makes and not _is_unused(port, ports)))
    ]
    if not down or not up:
        return None
    names = [port.name for port in down]
    others = listed_are([port.name for port in up], _MOST_SHOWN)
    message = f"{listed_are(names, _MOST_SHOWN)} DOWN, and {others} ACTIVE"
    hint = (
        f"look at the cable and the switch port of {names[0]}; "
        f"if it is not to be used, set {_HCA}=^={','.join(port.device for port in down)}"
    )
    return _warning(message, hint)


def _is_unused(port: Port, ports: Sequence[Port]) -> bool:
    """Whether a port is the second one of an adapter, and on no adapter of that make both are in use."""
    adapters: dict[str, list[bool]] = {}
    for one in ports:
        if (one.board, one.layer) == (port.board, port.layer):
            adapters.setdefault(one.adapter, []).append(one.state == "ACTIVE")
    return sorted(adapters[port.adapter]) == [False, True] and [True, True] not in adapters.values()


def _judge_slow(ports: Sequence[Port]) -> CheckResult | None:
    """A port that is slower than the others of its make: a bad cable is set up at a lower speed."""
    up = [port for port in ports if port.state == "ACTIVE" and port.rate_gbit_s]
    for port in up:
        kin = [one for one in up if (one.board, one.layer) == (port.board, port.layer) and one != port]
        faster = [one for one in kin if one.rate_gbit_s > port.rate_gbit_s]
        if len(kin) >= _FEW and len(faster) == len(kin):
            rates = f"{port.rate_gbit_s:g} Gbit/s, and the {len(kin)} others of its make at {faster[0].rate_gbit_s:g}"
            return _warning(f"{port.name} runs at {rates}", f"look at the cable and the switch port of {port.name}")
    return None


def _is_port(port: Port, value: str) -> bool:
    """Whether ``mlx5_0:1`` in a list means this port; a name without a number means all of the device's."""
    number = port.name.rpartition(":")[2]
    if value.startswith("^"):
        return True  # with a number, the other ports stay: too fine a point for a warning
    wanted = [item.split(":") for item in value.removeprefix("=").split(",") if item]
    return any(
        port.device.startswith(item[0]) and (len(item) == 1 or not item[1] or item[1] == number) for item in wanted
    ) or not names_in(value)


# ---------------------------------------------------------------------------------------------------------------- words


def _warning(message: str, hint: str, facts: tuple[tuple[str, str], ...] = ()) -> CheckResult:
    return warning(message, hint, facts, class_name="fabric_degraded")


def _summary(ports: Sequence[Port], slingshots: int) -> str:
    """``8 of 10 ports ACTIVE: InfiniBand 400 Gbit/s, EFA 100 Gbit/s; 4 Slingshot interfaces``."""
    parts = []
    if ports:
        active = [port for port in ports if port.state == "ACTIVE"]
        kinds = dict.fromkeys(f"{_layer(port)} {port.rate_gbit_s:g} Gbit/s" for port in active)
        parts.append(f"{len(active)} of {len(ports)} RDMA ports ACTIVE" + (f": {', '.join(kinds)}" if kinds else ""))
    if slingshots:
        parts.append(f"{slingshots} Slingshot interfaces")
    return "; ".join(parts)


def _layer(port: Port) -> str:
    if port.driver == _EFA_DRIVER or port.device.startswith(_EFA_DRIVER):
        return "EFA"
    return {"Ethernet": "RoCE"}.get(port.layer, port.layer)


# ---------------------------------------------------------------------------------------------------------------- sysfs


def _word(text: str) -> str:
    """``4: ACTIVE`` -> ``ACTIVE``."""
    return text.partition(":")[2].strip() or text
