"""Whether this process runs in a container.

Sources: Docker and Podman leave a file at the root; Kubernetes, Podman, systemd-nspawn, Apptainer and Enroot set
variables; their runtimes name the control groups; pid_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_FILES = (".dockerenv", "run/.containerenv")
_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS")
_CGROUP_WORDS = ("docker", "kubepods", "containerd", "libpod", "crio-", "/lxc")
# The number of the pid namespace that the kernel starts with: include/linux/proc_ns.h, PROC_PID_INIT_INO.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def in_container(environ: Mapping[str, str], root: str = "/") -> bool:
    """Whether there are signs of a container.

    Args:
        environ: the environment.
        root: where files are looked for, with a trailing slash.
    """
    if any(environ.get(name) for name in _VARIABLES) or any(os.path.exists(f"{root}{name}") for name in _FILES):
        return True
    try:
        if os.readlink(f"{root}proc/self/ns/pid") != INITIAL_PID_NAMESPACE:
            return True
    except OSError:
        pass
    try:
        with open(f"{root}proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            content = file.read()
    except OSError:
        return False
    return any(word in content for word in _CGROUP_WORDS)
