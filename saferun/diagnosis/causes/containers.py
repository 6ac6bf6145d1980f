"""Containers that do not start. Pure.

Sources: messages of Apptainer and SingularityCE, runc, Docker, enroot and pyxis.
"""

from __future__ import annotations

from saferun.diagnosis.causes.failure import Failure
from saferun.diagnosis.causes.texts import TextRule, by_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_RULES = (
    TextRule(
        "container_error",
        LazyPattern(
            r"^FATAL: {2,8}(.{1,200})"
            r"|\b(exec: .{1,120}: executable file not found in \$PATH)"
            r"|\b(OCI runtime \w{1,10} failed.{0,200})|\b(nvidia-container-(?:cli|runtime)\S{0,8}: .{1,200})"
            r"|\b((?:[Ff]ailed|[Uu]nable) to (?:create|start) (?:the )?(?:\w{1,20} )?"
            r"(?:container|shim task|pod|sandbox)\b.{0,160})"
            r"|\b(container creation failed: .{1,160}|[Ff]ailed to mount squashfs image\b.{0,120})"
            r"|^slurmstepd\S{0,80}: error: ((?:pyxis|\w{0,20}container\w{0,20}|spank: required)\b.{1,160})"
            r"|^(?:enroot-\w{1,20}|\[ERROR\]) (.{0,60}\.sqsh\b.{0,120})|^enroot-\w{1,20}: (.{1,160})"
            r"|\b(Error response from daemon: .{1,160})"
            r"|^(?:\w{1,12}: )?(?:Error: )?((?:crun|runc|OCI permission denied): .{1,160})"
            r"|^ch-run\[\d{1,10}\]: error: (.{1,160})"
            # States and events of Kubernetes' kubelet.
            r"|\b((?:Create|Run)Container(?:Config)?Error\b.{0,120}|(?:ErrImagePull|ImagePullBackOff|InvalidImageName"
            r"|ErrImageNeverPull|ContainerCannotRun|FailedCreatePodSandBox|FailedMount|FailedAttachVolume)\b.{0,160}"
            r"|MountVolume\.\w{1,20} failed for volume .{1,160}|[Ff]ailed to pull image .{1,160}"
            r"|Back-off (?:pulling image|restarting failed container).{0,120}"
            r"|device plugin \w{1,40} rpc failed.{0,160})"
        ),
        lambda _, match: f"the container did not start: {next(filter(None, match.groups()), '')}",
        "look at the image's path and at what is mounted, on every host; run its command there by hand",
        in_last_lines=True,
    ),
)
# What a script may get over that only asks for an image or a mount.
_BY_TOOLS = _RULES[0]._replace(
    pattern=LazyPattern(
        r"\b(exec user process caused: .{1,120}|CDI device injection failed: .{1,160})"
        r"|\b(pull access denied for .{1,120}|toomanyrequests: .{1,120}"
        r"|manifest for [\w./-]{1,120}:\S{1,120} not found.{0,60})"
        r"|^\[ERROR\] (URL https?://.{1,160} returned error code: .{1,60}|Could not process JSON input)"
        r"|^(?:fuse|squashfuse\w{0,8}|fuse-overlayfs|fuse2fs|fusermount3?): (?![Ww]arning)(.{1,160})"
        r"|^ch-\w{2,12}\[\d{1,10}\]: (?:error|fatal): (.{1,160})|^[Pp]odman: (?:Error: )?(.{1,160})"
    ),
    in_last_lines=False,
    must_be_last=True,
)
# What training scripts write too: theirs only where the status is Apptainer's.
_OF_APPTAINER = _BY_TOOLS._replace(
    pattern=LazyPattern(
        r"^(?:ERROR|ABORT) {2}: ([A-Z].{1,200})"
        r"|^FATAL: ([Ww]hile [a-z]{3,12}ing .{1,200}|[Uu]nable to (?:build|pull|open|run|mount)\b.{1,160}"
        r"|(?:[Cc]ontainer|[Ii]mage|[Rr]oot filesystem)\b.{1,160})"
    )
)
_STATUS_OF_APPTAINER = 255


def container_error(failure: Failure) -> Cause | None:
    """The container that the rank was to run in did not start, or ended badly by itself."""
    is_apptainers = failure.end.status.code == _STATUS_OF_APPTAINER
    return by_text(failure, (*_RULES, _BY_TOOLS, *((_OF_APPTAINER,) if is_apptainers else ())))
