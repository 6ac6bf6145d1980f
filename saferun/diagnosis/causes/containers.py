"""Containers that do not start. Pure.

Sources: messages of Apptainer and SingularityCE, runc, Docker, enroot and pyxis.
"""

from __future__ import annotations

import re

from saferun.diagnosis.causes.failure import Failure
from saferun.diagnosis.causes.texts import TextRule, by_text
from saferun.evidence import Cause

_RULES = (
    TextRule(
        "container_error",
        re.compile(
            r"^FATAL: {2,8}(.{1,200})|\b(exec: .{1,120}: executable file not found in \$PATH)"
            r"|\b(OCI runtime \w{1,10} failed.{0,200})|\b(nvidia-container-(?:cli|runtime)\S{0,8}: .{1,200})"
            r"|\b((?:failed|[Uu]nable) to (?:create|start) (?:the )?(?:\w{1,20} )?(?:container|shim task|pod|sandbox)\b"
            r".{0,160})"
            r"|^slurmstepd\S{0,80}: error: ((?:pyxis|\w{0,20}container\w{0,20}|spank: required)\b.{1,160})"
            r"|^(?:enroot-\w{1,20}|\[ERROR\]) (.{0,60}\.sqsh\b.{0,120})|^docker: (Error response from daemon: .{1,160})"
        ),
        lambda _, match: f"the container did not start: {next(filter(None, match.groups()), '')}",
        "look at the image's path and at what is mounted, on every host; run its command there by hand",
        in_last_lines=True,
    ),
)


def container_error(failure: Failure) -> Cause | None:
    """The container that the rank was to run in did not start, or ended badly by itself."""
    return by_text(failure, _RULES)
