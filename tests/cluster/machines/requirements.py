"""What a cluster needs of the machine, in one line where it is not there; and how it comes there."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping

# Program -> Debian package.
_PROGRAMS = {
    "ip": "iproute2",
    "nsenter": "util-linux",
    "nft": "nftables",
    "ethtool": "ethtool",
    "ping": "iputils-ping",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "pdsh": "pdsh",
    "munged": "munge",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "srun": "slurm-wlm",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
    "etcd": "etcd-server",
    "tcc": "tcc",
    "tcpdump": "tcpdump",
    "strace": "strace",  # tests/process/test_opens_no_file.py
}
# What other tests want: without it they are left out, and a cluster is none the worse for it.
_OTHERS = {
    "chromium": "chromium",  # tests/process/test_report_page_browser.py
    "tmux": "tmux",  # tests/process/test_tmux.py
    "zsh": "zsh",  # tests/unit/ctl/test_completion.py
    "fish": "fish",
    "groff": "groff-base",
    "gdb": "gdb",  # tests/process/test_core_tools.py
}
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/sbin:/bin"
_POLICY = "/usr/sbin/policy-rc.d"


def missing_packages(programs: Mapping[str, str] = _PROGRAMS) -> list[str]:
    """Debian packages that have to be installed first, for a cluster or for these programs."""
    return sorted({package for program, package in programs.items() if shutil.which(program, path=_PATH) is None})


@functools.cache
def why_not() -> str:
    """Why there can be no cluster on this machine, in one line; empty where there can."""
    if os.geteuid() != 0:
        return f"it needs root, for namespaces and network faults (this is uid {os.geteuid()})"
    if packages := missing_packages():
        remedy = "`make test` installs them" if shutil.which("apt-get") else "there is no apt-get to install them"
        return f"Debian packages are missing: {' '.join(packages)} ({remedy})"
    kinds = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc")
    done = subprocess.run(["unshare", *kinds, "true"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"root may not make namespaces here ({done.stderr.strip()})"
    return ""


def install() -> str:
    """Install what is missing, where that is possible. Returns what is left to be said, in one line; else nothing."""
    return "; ".join(filter(None, (_install("tests/cluster", _PROGRAMS), _install("tests/process", _OTHERS))))


def _install(tests: str, programs: Mapping[str, str]) -> str:
    packages = missing_packages(programs)
    if not packages:
        return ""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        who = "only root can install them" if os.geteuid() else "there is no apt-get"
        return f"not installed for {tests}: {' '.join(packages)} ({who})"
    print(f"installing for {tests}: {' '.join(packages)}", flush=True)
    with _no_daemon_starts():
        said = _apt_get("install", *packages)
        if said:  # no package lists, or old ones
            said = _apt_get("update") or _apt_get("install", *packages)
    missing_now = missing_packages(programs)
    return f"not installed for {tests}: {' '.join(missing_now)} ({said})" if missing_now else ""


@contextlib.contextmanager
def _no_daemon_starts() -> Iterator[None]:
    """The machine itself needs no sshd and no Slurm: invoke-rc.d asks this file first (Debian's policy-rc.d)."""
    try:
        with open(os.open(_POLICY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o755), "w", encoding="ascii") as file:
            file.write("#!/bin/sh\nexit 101\n")
    except FileExistsError:
        yield
        return
    try:
        yield
    finally:
        os.unlink(_POLICY)


def _apt_get(*words: str) -> str:
    """The last line of what went wrong; empty where nothing did."""
    options = ("--quiet", "--yes", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=120")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(["apt-get", *options, *words], env=environ, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]
