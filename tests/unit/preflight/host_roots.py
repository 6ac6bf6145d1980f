"""Roots of hosts that do not exist: files of /proc, /sys and /dev below a temporary directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saferun.preflight.checks.context import CheckContext


class Root:
    """A host as its files tell it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, name: str, content: str | bytes = "") -> Path:
        """A file, with the directories above it."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def limits(self, **soft_and_hard: str) -> None:
        """/proc/self/limits: ``open_files="1024 4096"``."""
        rows = {"open_files": "Max open files", "processes": "Max processes", "locked_memory": "Max locked memory"}
        lines = [f"{rows[name]:<25} {value}    units" for name, value in soft_and_hard.items()]
        self.write("proc/self/limits", "Limit   Soft Limit   Hard Limit   Units\n" + "\n".join(lines) + "\n")

    def status(self, *, capabilities: int = 0, cpus: str = "0-63") -> None:
        """/proc/self/status."""
        self.write("proc/self/status", f"Name:\tpython\nCapEff:\t{capabilities:016x}\nCpus_allowed_list:\t{cpus}\n")

    def online(self, cpus: str) -> None:
        """The processors that the host has."""
        self.write("sys/devices/system/cpu/online", f"{cpus}\n")

    def cgroup(self, path: str = "/job", **files: str) -> None:
        """A control group of version 2 that this process is in; ``cpu_max="200000 100000"`` is cpu.max."""
        self.write("proc/self/cgroup", f"0::{path}\n")
        self.write("proc/self/mountinfo", "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        for name, content in files.items():
            self.write(f"sys/fs/cgroup{path}/{name.replace('_', '.', 1)}", content + "\n")

    def context(self, environ: Mapping[str, str] | None = None, **changed: Any) -> CheckContext:
        """A launch on this host."""
        return CheckContext(environ=environ or {}, root=f"{self.path}/")._replace(**changed)
