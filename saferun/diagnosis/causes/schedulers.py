"""Schedulers that do not start what they were asked to start. Pure.

Sources: messages of Slurm's srun and slurmstepd, and of OpenSSH; execve(2).
"""

from __future__ import annotations

from saferun.diagnosis.causes.failure import Failure
from saferun.diagnosis.causes.texts import TextRule, by_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause

_SSH_ADVICE = (
    "check that this user reaches that host by ssh without a password (ssh HOST true), and the owner and mode of ~/.ssh"
)
CRASHED = r"(?:Bus error|Segmentation fault|Aborted|Floating point exception|Illegal instruction)"
"""How srun reports a task that crashed; that one exited is no reason, for it wrote its own."""
_RULES = (
    TextRule(
        "permission_denied",
        LazyPattern(
            r"^(?:\S{1,120}: )?(Permission denied \((?:publickey|password|gssapi|keyboard|hostbased).{0,80}\)"
            r"|Host key verification failed|Permissions \d{3,5} for '.{1,160}' are too open)"
        ),
        "ssh to another host is refused: {0}",
        _SSH_ADVICE,
        in_last_lines=True,
    ),
    TextRule(
        "ssh_unreachable",
        LazyPattern(r"^(ssh: connect to host \S{1,200} port \d{1,5}: .{1,80})"),
        "another host cannot be reached by ssh: {0}",
        _SSH_ADVICE,
        in_last_lines=True,
    ),
    TextRule(
        "ssh_unreachable",
        LazyPattern(
            r"^(kex_exchange_identification: .{1,80}|Connection closed by \S{1,80} port \d{1,5}"
            r"|Connection to \S{1,80} closed by remote host\.?"
            r"|pdsh@\S{1,80}: \S{1,80}: \w{2,8}: connect failed: .{1,60})"
            # What ssh ends with where it has not come to run a command.
            r"|\b(Command '\[?['\"]?(?:/usr/bin/)?ssh .{1,300} returned non-zero exit status 255)\b"
        ),
        lambda _, match: f"another host cannot be reached by ssh: {next(filter(None, match.groups()))}",
        _SSH_ADVICE,
        must_be_last=True,
    ),
    TextRule(
        "file_missing",
        LazyPattern(
            r"^(?:slurmstepd\S{0,80}|srun|mpi(?:run|exec)): .{0,40}\bexecv\w{0,2}\(?\)?:? (.{1,200}): No such file"
            r"|\btask \d{1,8}(?: \(host \S{1,80}\))?: start failed: (.{1,200}): No such file"
        ),
        lambda _, match: f"the program to be started is not there: {match[1] or match[2]}",
        "look at the path, and whether every host has it",
        in_last_lines=True,
    ),
    TextRule(
        "scheduler_error",
        # Not how tasks ended, which is no reason but what follows from one.
        LazyPattern(
            r"^(?:\d{1,6}: )?(?:srun|salloc|sbatch): (?:error|fatal): (?!.{0,80}\btasks? [\d,-]{1,80}: )"
            r"(.{0,160}\b(?:[Uu]nable to|[Cc](?:annot|ould not|ouldn't)|[Ff]ail(?:ed|ure)|[Ii]nvalid|revoked"
            r"|not (?:available|ready|found|responding|permitted)|denied|refused|exceed\w{0,3}|violat\w{1,4}|timed out"
            r"|wrong|unreachable|expired|authenti\w{1,8}|credentials?|[Nn]o such|[Mm]issing|unsupported|rejected"
            r"|draining|[Uu]nknown|satisfied|aborted before)\b.{0,160})"
            # What ends the command itself, whatever the words, and what ended a step before its first process.
            r"|^(?:(?:srun|scontrol): fatal|(?:salloc|sbatch): (?:error|fatal)): (.{1,200})"
            r"|^slurmstepd\S{0,80}: error: ((?:Task)?[Pp]rolog .{0,40}\b(?:failed|exit)\b.{0,80})"
        ),
        lambda _, match: f"the scheduler did not start it: {next(filter(None, match.groups()))}",
        "look at what the job asks for (nodes, GPUs, memory, CPUs a task) against what it has (scontrol show job), and "
        "at the state of its nodes (sinfo -R)",
        in_last_lines=True,
    ),
    TextRule(
        "scheduler_error",
        LazyPattern(
            r"^(?:\d{1,6}: )?srun: error: ((?:slurm_\w{1,40}|resolve_ctls_\w{1,20}|fetch_config): .{1,200}"
            r"|Node failure on .{1,80})"
            # Clients that only ask or order, of Slurm, PBS, LSF, Flux and Grid Engine.
            r"|^(?:sinfo|squeue|sacct|sacctmgr|scontrol|scancel|sstat|sprio|sshare|sattach|sbcast): (?:error|fatal): "
            r"(.{1,200})"
            r"|^slurm_\w{1,40}(?: error)?: ((?:[Uu]nable|[Cc]annot|[Ff]ailed|Invalid|Unexpected|Zero Bytes|Socket"
            r"|Protocol)\b.{1,160})"
            r"|^(?:qsub|qstat|qdel|qalter|pbsdsh|bsub|bjobs|blaunch|brun): ([A-Z].{1,160})"
            r"|^(Error from server \(\w{1,40}\): .{1,160}|Unable to connect to the server: .{1,160}"
            r"|The connection to the server \S{1,120} was refused\b.{0,80})"
            r"|^slurmstepd\S{0,80}: error: "
            r"(.{0,60}\b(?:[Uu]nable to create|[Ff]ailed to (?:create|launch|set ?up|load))\b.{1,120}"
            r"|task_\w{1,30}: .{0,80}\bfailed\b.{0,60})"
            r"|\b(CapacityError: .{1,120}|ResourcesUnavailableError: .{1,120}|ZONE_RESOURCE_POOL_EXHAUSTED\w{0,20}"
            r"|InsufficientInstanceCapacity\b.{0,120})"
            r"|^(?:flux-\w{1,12}|flux): ERROR: (.{1,160})|^Unable to run job: (.{1,160})"
        ),
        lambda _, match: f"the scheduler did not start it: {next(filter(None, match.groups()))}",
        "look at what the job asks for (nodes, GPUs, memory, CPUs a task) against what it has (scontrol show job), and "
        "at the state of its nodes (sinfo -R)",
        must_be_last=True,
    ),
    TextRule(
        "scheduler_error",
        # Events and states of Kubernetes' scheduler and kubelet.
        LazyPattern(
            r"\b(FailedScheduling\b.{0,160}|UnexpectedAdmissionError\b.{0,120}|OutOf(?:cpu|memory|pods|nvidia\S{1,20})\b"
            r"|\d{1,6}/\d{1,6} nodes are available: .{1,160}|(?:Pod )?Allocate failed due to .{1,160}"
            r"|exceeded quota: .{1,120}|Insufficient (?:cpu|memory|pods|ephemeral-storage|(?:nvidia|amd|gpu)\.\S{1,30})"
            r")"
        ),
        "the cluster has no place for it: {0}",
        "look at what the pod asks for (GPUs, memory, CPUs, quota) against what its nodes have (kubectl describe node) "
        "and at the device plugin",
        in_last_lines=True,
    ),
    TextRule(
        "worker_failed",
        LazyPattern(rf"^(?:\d{{1,6}}: )?srun: error: (.{{1,80}}: {CRASHED}.{{0,40}})"),
        "a task of its step crashed: {0}",
        "look at what that task has written before",
        in_last_lines=True,
    ),
)


def scheduler_error(failure: Failure) -> Cause | None:
    """The scheduler did not start a step of the job, or lost a node of it."""
    return by_text(failure, _RULES)
