"""What torch's gloo listens on is what the rules say, on a host with interfaces of each sort."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NEWNS, NEWUTS, NEWNET = 0x20000, 0x4000000, 0x40000000
LOCAL = "127.0.0.1 localhost\n::1 localhost\n"

# Of a host called `me`: what /etc/hosts says of it besides, and what GLOO_SOCKET_IFNAME is.
CASES = [
    ("127.0.0.1 me", None),
    ("127.0.1.1 me", None),
    ("127.0.1.1 me\n10.1.0.1 me", None),
    ("", None),
    ("10.9.9.9 me", None),
    ("10.9.9.9 me\n10.1.0.1 me", None),
    ("10.1.0.1 me\nfd01::1 me", None),
    ("10.3.0.1 me", None),
    *(
        ("127.0.1.1 me", value)
        for value in (
            "eth0",
            "down",
            "six",
            "bare",
            "nope",
            "eth0,off",
            "eth0,",
            ",eth0",
            " eth0",
            "",
            "e",
            "=eth0",
            "eth",
        )
    ),
]
INTERFACES = """
link set lo up
link add eth0 type veth peer name peer0
addr add 10.1.0.1/24 dev eth0
addr add fd01::1/64 dev eth0 nodad
link set eth0 up
link set peer0 up
link add off type veth peer name peer1
addr add 10.3.0.1/24 dev off
link add six type veth peer name peer2
link set six addrgenmode none
link set six up
addr add fd06::1/64 dev six nodad
link add bare type veth peer name peer3
link set bare addrgenmode none
link set bare up
"""


def main(hosts: str) -> None:
    """The child: tells of each case what gloo listens on, and what the rules say."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEWNS | NEWUTS | NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname("me")
    subprocess.run(["ip", "-batch", "-"], input=INTERFACES, text=True, check=True)
    Path(hosts).write_text("")
    nobody = f"{hosts}.resolv"
    Path(nobody).write_text("nameserver 127.0.0.1\n")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "--bind", hosts, "/etc/hosts"], check=True)
    subprocess.run(["mount", "--bind", nobody, "/etc/resolv.conf"], check=True)

    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from saferun.linux.netlink import read_nics
    from saferun.preflight.checks.name_resolution import resolve
    from saferun.preflight.default_nics import gloo_choice

    for lines, value in CASES:
        Path(hosts).write_text(f"{LOCAL}{lines}\n")
        environ = {} if value is None else {"GLOO_SOCKET_IFNAME": value}
        choice = gloo_choice(read_nics(), environ, resolve(("me",))[0].addresses)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            try:
                os.environ.pop("GLOO_SOCKET_IFNAME", None)
                os.environ.update(environ)
                try:
                    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
                    real = sorted(listening())
                except RuntimeError:
                    real = []
                expected = [] if choice.missing else sorted(choice.addresses)
                print(json.dumps({"hosts": lines, "value": value, "real": real, "expected": expected}), flush=True)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)


def listening() -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                swapped = bytes.fromhex(fields[1].partition(":")[0])
                packed = b"".join(swapped[start : start + 4][::-1] for start in range(0, len(swapped), 4))
                found.append(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))
    return found


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="making network namespaces takes root, and iproute2"
)
def test_gloo_listens_where_the_rules_say(tmp_path: Path) -> None:
    """The rules are torch's, and may change with it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(tmp_path / "hosts")],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(CASES), done.stderr
    assert [row for row in rows if row["real"] != row["expected"]] == []
    assert any(row["real"] == ["fd06::1"] for row in rows)


if __name__ == "__main__":
    main(sys.argv[1])
