"""Variables that contradict each other, and settings that are known to hang or slow a job, by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from saferun.env.lint import knowledge
from saferun.env.lint.findings import Finding, Verdict, shown
from saferun.env.lint.known_names import HostFacts, KnownNames, Version, version_text
from saferun.env.lint.settings import is_true
from saferun.model import Value

_NCCL_ISSUE_750 = "https://github.com/NVIDIA/nccl/issues/750"
_PYTORCH_ISSUE_153960 = "https://github.com/pytorch/pytorch/issues/153960"
_TORCH_NCCL_CPP = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"
_TORCH_CUDA_INIT = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/cuda/__init__.py"
_MAX_VALUE_CHARS = 4096
# The hang is reported from 2.13 on, by name for 2.14.3; the first repair (pull request 774) came after 2.15.
_HANGS_FROM, _HANGS_TO = (2, 13), (2, 15)
# https://github.com/pytorch/pytorch/blob/v2.13.0/c10/cuda/CUDAAllocatorConfig.h
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_NCCL_SOCKETS = 64  # the most that NCCL opens for one connection


class LintedJob(Value):
    """The input of the rules in this file."""

    environ: Mapping[str, str]
    known: KnownNames
    host: HostFacts
    versions: Mapping[str, Version]

    def value(self, name: str) -> str | None:
        """A variable's value; None if it is not set or empty."""
        return self.environ.get(name, "")[:_MAX_VALUE_CHARS].strip() or None

    def found(
        self,
        name: str,
        sentence: str,
        hint: str,
        source: str,
        verdict: Verdict = "contradiction",
        *,
        at_launch: bool = True,
    ) -> Finding:
        """A finding on one of the job's variables."""
        return Finding(name, shown(name, self.environ[name]), verdict, sentence, hint, source, at_launch)


def find_conflicts(job: LintedJob) -> Iterator[Finding]:
    """All findings that need more than one variable, or a version."""
    for rule in _RULES:
        yield from rule(job)


def _different_gpu_lists(job: LintedJob) -> Iterator[Finding]:
    cuda, hip = job.value("CUDA_VISIBLE_DEVICES"), job.value("HIP_VISIBLE_DEVICES")
    if cuda and hip and _list(cuda) != _list(hip):
        yield job.found(
            "HIP_VISIBLE_DEVICES",
            "CUDA_VISIBLE_DEVICES names other devices",
            "set only one of the two, or both to the same list",
            knowledge.HIP_ENV,
        )
    rocr = job.value("ROCR_VISIBLE_DEVICES")
    if rocr and hip:
        left = len(_list(rocr))
        too_high = [item for item in _list(hip) if item.isdecimal() and int(item[:9]) >= left]
        if too_high or len(_list(hip)) > left:
            yield job.found(
                "HIP_VISIBLE_DEVICES",
                f"it indexes ROCR_VISIBLE_DEVICES, which leaves {left}",
                f"use indices below {left}, or unset one of the two",
                _TORCH_CUDA_INIT,
            )


def _blocking_wait_stops_the_watchdog(job: LintedJob) -> Iterator[Finding]:
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"):
        if not is_true(job.value(name)):
            continue
        for other in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
            if job.value(other) not in {None, "0"}:
                yield job.found(
                    name,
                    f"with it torch starts no watchdog, so {other} has no effect",
                    f"unset {name}, unless the script itself handles the timeouts of wait()",
                    _TORCH_NCCL_CPP,
                )
                return


def _dump_without_recorder(job: LintedJob) -> Iterator[Finding]:
    dump = "TORCH_NCCL_DUMP_ON_TIMEOUT"
    if not is_true(job.value(dump)):
        return
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        if job.value(name) == "0":
            yield job.found(
                dump,
                f"{name}=0 switches the Flight Recorder off, so there is nothing to dump",
                f"set {name}=2000",
                knowledge.TORCH_NCCL,
            )
    if job.value("TORCH_NCCL_ENABLE_MONITORING") is not None and not is_true(job.value("TORCH_NCCL_ENABLE_MONITORING")):
        yield job.found(
            dump,
            "it needs TORCH_NCCL_ENABLE_MONITORING, which is off",
            "unset TORCH_NCCL_ENABLE_MONITORING",
            knowledge.TORCH_NCCL_CODE,
        )


def _old_and_new_name_differ(job: LintedJob) -> Iterator[Finding]:
    for name, advice in knowledge.ADVICE.items():
        if not advice.still_read or not advice.instead:
            continue
        old, new = job.value(name), job.value(advice.instead)
        if old is None or new is None or old == new or advice.instead.startswith("NCCL_"):
            continue
        # torch asks for the allocator's old names first, and for the new name first everywhere else.
        winner = _allocator_winner(job) if name in _ALLOCATOR else advice.instead
        yield job.found(
            name,
            f"{advice.instead} is set too, to something else; {winner} wins",
            f"unset {name}" if winner != name else f"keep the value you mean, in {advice.instead} alone",
            advice.source,
        )


def _allocator_winner(job: LintedJob) -> str:
    """The variable that torch's allocator takes: a torch for CUDA does not ask for the name of HIP."""
    has_hip = job.host.vendor == "amd" or (job.host.vendor != "nvidia" and bool(job.known.owners.get("HIP")))
    asked = [name for name in _ALLOCATOR if has_hip or name != "PYTORCH_HIP_ALLOC_CONF"]
    return next((name for name in asked if job.value(name) is not None), "PYTORCH_ALLOC_CONF")


def _too_many_sockets(job: LintedJob) -> Iterator[Finding]:
    threads, each = job.value("NCCL_SOCKET_NTHREADS"), job.value("NCCL_NSOCKS_PERTHREAD")
    numbers = [int(value[:6]) for value in (threads, each) if value and value.isdecimal()]
    if len(numbers) == 2 and numbers[0] * numbers[1] > _NCCL_SOCKETS:  # noqa: PLR2004
        yield job.found(
            "NCCL_NSOCKS_PERTHREAD",
            f"times NCCL_SOCKET_NTHREADS that is {numbers[0] * numbers[1]}; NCCL opens {_NCCL_SOCKETS} sockets at most",
            "lower one of the two",
            knowledge.NCCL_ENV,
        )


def _log_settings_without_log(job: LintedJob) -> Iterator[Finding]:
    level = (job.value("NCCL_DEBUG") or "").upper()
    for name, needs in (
        ("NCCL_DEBUG_SUBSYS", {"INFO", "TRACE"}),
        ("NCCL_DEBUG_FILE", {"WARN", "ATTN", "INFO", "TRACE"}),
    ):
        if job.value(name) and level not in needs and not job.value("NCCL_DEBUG_LEVELS"):
            yield job.found(
                name,
                f"NCCL_DEBUG={shown('NCCL_DEBUG', level)} gives it nothing to do"
                if level
                else "without NCCL_DEBUG it does nothing",
                "set NCCL_DEBUG=INFO",
                knowledge.NCCL_ENV,
                at_launch=False,  # NCCL_DEBUG may be in /etc/nccl.conf
            )


def _blocking_launches_hang(job: LintedJob) -> Iterator[Finding]:
    name, nccl = "CUDA_LAUNCH_BLOCKING", job.versions.get("nccl")
    if is_true(job.value(name)) and nccl is not None and _HANGS_FROM <= nccl[:2] <= _HANGS_TO:
        yield job.found(
            name,
            f"jobs are known to hang with it and NCCL {version_text(nccl)}",
            "unset it, or install another NCCL",
            _NCCL_ISSUE_750,
            "known problem",
        )


def _nonblocking_communicators_hang(job: LintedJob) -> Iterator[Finding]:
    name, nccl = "TORCH_NCCL_USE_COMM_NONBLOCKING", job.versions.get("nccl")
    if is_true(job.value(name)) and nccl is not None and nccl[:2] == (2, 26):
        yield job.found(
            name,
            f"jobs are known to hang with it and NCCL {version_text(nccl)}",
            "unset it, or install another NCCL",
            _PYTORCH_ISSUE_153960,
            "known problem",
        )


def _log_level_too_new(job: LintedJob) -> Iterator[Finding]:
    nccl = job.versions.get("nccl")
    if (job.value("NCCL_DEBUG") or "").upper() == "ATTN" and nccl is not None and nccl < (2, 32):
        yield job.found(
            "NCCL_DEBUG",
            f"NCCL {version_text(nccl)} does not know ATTN and logs nothing",
            "set NCCL_DEBUG=WARN",
            knowledge.NCCL_ENV,
            "bad value",
        )


def _blocking_launches_on_amd(job: LintedJob) -> Iterator[Finding]:
    # torch itself reads the name there, but only for an error message; the HIP runtime makes launches block.
    name = "CUDA_LAUNCH_BLOCKING"
    hip = job.known.owners.get("HIP", ())
    if not is_true(job.value(name)) or job.host.vendor != "amd" or not hip or is_true(job.value("HIP_LAUNCH_BLOCKING")):
        return
    if not set(hip) & set(job.known.readers_of(name)):
        yield job.found(
            name,
            "the HIP runtime reads HIP_LAUNCH_BLOCKING",
            "set HIP_LAUNCH_BLOCKING=1",
            knowledge.HIP_ENV,
            "misconception",
        )


_SLOW: tuple[tuple[str, frozenset[str], str, str], ...] = (
    (
        "TORCH_DISTRIBUTED_DEBUG",
        frozenset({"DETAIL"}),
        "checks every collective, which slows",
        knowledge.TORCH_DISTRIBUTED,
    ),
    ("TORCH_NCCL_BLOCKING_WAIT", frozenset(), "makes every wait() block the host", knowledge.TORCH_NCCL),
    ("TORCH_NCCL_ENABLE_TIMING", frozenset(), "makes a hang of torch's watchdog likelier", knowledge.TORCH_NCCL_CODE),
    ("CUDA_LAUNCH_BLOCKING", frozenset(), "runs one kernel at a time, which slows", knowledge.CUDA_ENV),
    ("HIP_LAUNCH_BLOCKING", frozenset(), "runs one kernel at a time, which slows", knowledge.HIP_ENV),
    ("AMD_SERIALIZE_KERNEL", frozenset({"1", "2", "3"}), "runs one kernel at a time, which slows", knowledge.HIP_ENV),
    (
        "NCCL_P2P_DISABLE",
        frozenset(),
        "is for debugging: GPUs of one host then use host memory",
        knowledge.NCCL_ENV,
    ),
    (
        "NCCL_SHM_DISABLE",
        frozenset(),
        "is for debugging: ranks of one host may then talk over the network",
        knowledge.NCCL_ENV,
    ),
    ("NCCL_IB_DISABLE", frozenset(), "is for debugging: hosts then talk over sockets", knowledge.NCCL_ENV),
    ("NCCL_LEGACY_CUDA_REGISTER", frozenset(), "may hang, says NCCL's manual", knowledge.NCCL_ENV),
)


def _slow_settings(job: LintedJob) -> Iterator[Finding]:
    for name, values, what, source in _SLOW:
        value = job.value(name)
        if value is not None and (value.upper() in values if values else is_true(value)):
            yield job.found(name, what, "unset it in production", source, "known problem", at_launch=False)


def _list(value: str) -> list[str]:
    return [item for item in (part.strip() for part in value.split(",")) if item][:256]


_RULES = (
    _different_gpu_lists,
    _blocking_wait_stops_the_watchdog,
    _dump_without_recorder,
    _old_and_new_name_differ,
    _too_many_sockets,
    _log_settings_without_log,
    _blocking_launches_hang,
    _nonblocking_communicators_hang,
    _log_level_too_new,
    _blocking_launches_on_amd,
    _slow_settings,
)
