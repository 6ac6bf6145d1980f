"""Whether this process runs in a container.

Sources: Docker and Podman leave a file at the root; Kubernetes, Podman, systemd-nspawn, Apptainer and Enroot set
variables; their runtimes name the control groups; pid_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from saferun.linux.small_files import read_link, read_text

_FILES = (".dockerenv", "run/.containerenv")
_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS")
_CGROUP_MARKS = ("docker", "kubepods", "containerd", "libpod", "crio-", "/lxc")
# The initial pid namespace: include/linux/proc_ns.h, PROC_PID_INIT_INO.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"


def in_container(environ: Mapping[str, str], root: str = "/") -> bool:
    """Whether this process seems to run in a container.

    Args:
        environ: the environment.
        root: the root directory, with a trailing slash.
    """
    if any(environ.get(name) for name in _VARIABLES) or any(os.path.exists(f"{root}{name}") for name in _FILES):
        return True
    if read_link(f"{root}proc/self/ns/pid") not in {"", INITIAL_PID_NAMESPACE}:
        return True
    content = read_text(f"{root}proc/self/cgroup")
    return any(word in content for word in _CGROUP_MARKS)
