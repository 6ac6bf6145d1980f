"""Taking the stacks of a running job for ``saferunctl stacks``, without a signal to its processes."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from saferun.captures.capture_query import CaptureQuery
from saferun.captures.examiner import Examiner
from saferun.captures.native_stacks import with_native_stacks
from saferun.captures.ptrace import ptrace_denial
from saferun.captures.wire import CaptureReader, CaptureRequest, CaptureTarget
from saferun.ctl.answer import answer, answer_json, plain
from saferun.ctl.job_stacks import JobStacks, read_job_stacks
from saferun.ctl.run_directory import LATEST, NoRunError, find_run, state_of
from saferun.ctl.stuck_ranks import ranks_by_pid
from saferun.diagnosis.collectives import compare
from saferun.diagnosis.merged_stacks import merge
from saferun.diagnosis.rank_waits import wait_groups
from saferun.errors import SaferunError, UsageError
from saferun.evidence.diagnosis_values import WaitGroup
from saferun.evidence.job_evidence import Capture, Evidence, ProcessSnapshot, StackDump
from saferun.files.run_dir import BASE, shorter_path
from saferun.files.run_files import RUN_JSON, living_records, open_run, read_json
from saferun.linux.poller import Poller
from saferun.linux.procfs import read_cmdline, waits_uninterruptibly
from saferun.model import JsonObject, Value
from saferun.report.text_diagram import group_lines, tree_lines
from saferun.text.bounded_json import shown
from saferun.text.decoding import MALFORMED
from saferun.text.evidence_redaction import capture_without_secrets
from saferun.text.wording import NOT_PYTHON, ranks_text

_BUDGET_S = 20.0
# Native frames take about a second a process.
_NATIVE_BUDGET_S = 120.0
_GRACE_S = 2.0
_TREE_LINES = 60
_GROUP_LINES = 24
_NAMED_FAILURES = 8
_NAMED_PIDS = 8
_SHORTEST_ID = 4
_AS_RANK = "rank 0"
_KTHREADD = 2  # the parent of all threads of the kernel
_PID = "[1-9][0-9]{0,6}"
_PERMISSION_HINT = "run it as the owner of the processes, or as root"
_ROOT_HINT = "in a container this needs the capability SYS_PTRACE; or run it on the host of the container"


def run(arguments: argparse.Namespace) -> int:
    """Take the stacks and print them."""
    directory = run_of(arguments.target)
    job = read_job_stacks(directory, native=arguments.native) if directory is not None else JobStacks()
    if job.evidence is not None:
        asked, capture = asked_processes_of_job(arguments.target, job.evidence, job.silent), job.evidence.capture
    else:
        asked = _with_script(find_asked_processes(arguments.target, read_processes()))
        seen, failure = _capture_asked(asked, native=arguments.native)
        if arguments.native:
            seen = seen._replace(stacks=with_native_stacks(seen.stacks, os.environ))
        capture = capture_without_secrets(seen)
        if failure:
            capture = capture._replace(timed_out=(*capture.timed_out, failure))
    _require_stacks(capture)
    remarks = (*job.remarks, *asked.remarks)
    if arguments.json:
        answer_json(_as_json(asked, capture, remarks))
    else:
        lines = [*picture(asked, capture), *(["", *remarks] if remarks else [])]
        answer("".join(f"{line}\n" for line in lines))
    return 0


# ------------------------------------------------------------------------------------------------------------- whom


class LiveProcess(Value):
    """A living process, and what its environment has about its rank in a job. ``rank`` is -1 where it has none.

    ``is_stuck``: a thread is in uninterruptible sleep, so that its environment may not be read.
    """

    pid: int
    ppid: int
    started_at: float
    rank: int = -1
    run_id: str = ""
    hook_prefix: str = ""
    is_readable: bool = True
    is_stuck: bool = False


class AskedProcesses(Value):
    """The processes to capture.

    Attributes:
        title: what they are, in short.
        targets: the ranks.
        orphans: processes of the run that outlived their rank.
        has_ranks: whether the targets are ranks at all.
        script: the path of their script, or its module; empty where unknown.
        cwd: the directory that they run in; empty where unknown.
        hosts: of a job of several hosts, each with its ranks.
        silent: the hosts without stacks.
        remarks: what may be missing, in lines.
    """

    title: str
    targets: tuple[CaptureTarget, ...]
    orphans: tuple[int, ...] = ()
    has_ranks: bool = True
    script: str = ""
    cwd: str = ""
    hosts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    silent: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def run_of(target: str) -> Path | None:
    """The directory of the run that an argument means; None: it means a process, or a run that has none."""
    if re.fullmatch(_PID, target) and os.path.exists(f"/proc/{target}"):
        return None
    directory = _run_directory(target)
    return Path(directory) if directory is not None else None


def asked_processes_of_job(name: str, evidence: Evidence, silent: tuple[str, ...]) -> AskedProcesses:
    """The ranks of all hosts, as these have shown them.

    Args:
        name: of the run.
        evidence: of all hosts.
        silent: the hosts without stacks.
    """
    pids = {process.rank: process.pid for process in evidence.capture.processes if process.is_rank}
    pids.update((dump.rank, dump.pid) for dump in evidence.capture.stacks if dump.is_rank)
    shown_pids = tuple(CaptureTarget(rank, pid) for rank, pid in sorted(pids.items()))
    hosts = tuple((host.label, host.ranks) for host in evidence.hosts)
    title = f"run {name}, {len(hosts)} host{'s' if len(hosts) != 1 else ''}"
    return AskedProcesses(title, shown_pids, script=evidence.script, cwd=evidence.cwd, hosts=hosts, silent=silent)


def read_processes() -> dict[int, LiveProcess]:
    """All living processes of this host but this one."""
    try:
        import psutil
    except Exception as error:  # of a Python that it was not built for, say
        hint = "install psutil again for this Python"
        raise SaferunError(f"psutil cannot be imported: {error}", hint) from None
    found: dict[int, LiveProcess] = {}
    for one in psutil.process_iter():
        with suppress(psutil.Error), one.oneshot():  # it has ended meanwhile, or is another user's
            if one.pid != os.getpid() and one.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
                is_stuck = waits_uninterruptibly(one.pid)  # its environment may be read forever
                found[one.pid] = LiveProcess(
                    one.pid, one.ppid(), one.create_time(), is_readable=False, is_stuck=is_stuck
                )
                if not is_stuck:
                    found[one.pid] = _with_environ(found[one.pid], one.environ())
    return found


def _with_environ(process: LiveProcess, environ: Mapping[str, str]) -> LiveProcess:
    rank = environ.get("RANK", "")
    return process._replace(
        rank=int(rank) if rank.isdecimal() and len(rank) < 8 else -1,  # noqa: PLR2004 - no job has more ranks
        run_id=environ.get("SAFERUN_RUN_ID", ""),
        hook_prefix=environ.get("SAFERUN_HOOK", ""),
        is_readable=True,
    )


def find_asked_processes(target: str, processes: Mapping[int, LiveProcess]) -> AskedProcesses:
    """The processes that an argument of the command line means.

    Args:
        target: a pid, or a run's directory, name, id or beginning of an id, or ``latest``.
        processes: those that live.

    Raises:
        UsageError: there are none, or they may not be inspected.
    """
    # Anything else that looks like a number may be the beginning of an id.
    pid = int(target) if re.fullmatch(_PID, target) else -1
    if pid in processes:
        return _asked_of_process(processes[pid], processes)
    directory = _run_directory(target)
    if directory is not None:
        return _asked_of_run(_run_ids_of(directory), shorter_path(directory), processes, directory)
    ids = {process.run_id for process in processes.values() if process.run_id.startswith(target) and target}
    if len(target) < _SHORTEST_ID or not ids:
        if pid >= 0:
            raise UsageError(f"there is no process {pid}", "see ps, or name a run by its directory or id")
        raise UsageError(
            f"{target!r} is no process, no run directory and no run with living processes on this host",
            f"name a pid, a directory like {BASE}/latest, or the id of a running one",
        )
    if len(ids) > 1:
        raise UsageError(f"several runs have an id that begins with {target!r}", "give more of the name or id")
    run_id = ids.pop()
    return _asked_of_run({run_id}, run_id, processes)


def _asked_of_process(process: LiveProcess, processes: Mapping[int, LiveProcess]) -> AskedProcesses:
    if not process.is_readable and not process.is_stuck:
        who = f"process {process.pid} of user {_owner(process.pid)}"
        hint = _PERMISSION_HINT if os.geteuid() else _ROOT_HINT
        raise UsageError(f"{who} cannot be inspected: {ptrace_denial(process.pid)}", hint)
    title = f"process {process.pid} ({shown(' '.join(read_cmdline(process.pid)), 60) or '?'})"
    below = [one for one in processes.values() if process.pid in _ancestors(one, processes)]
    roots = _roots(below, processes, outside=process)
    if roots:
        targets, orphans = _distinct(roots)
        return AskedProcesses(title, targets, orphans)
    own = CaptureTarget(max(process.rank, 0), process.pid, process.hook_prefix)
    return AskedProcesses(title, (own,), has_ranks=process.rank >= 0)


def _asked_of_run(
    run_ids: Collection[str], name: str, processes: Mapping[int, LiveProcess], directory: str = ""
) -> AskedProcesses:
    may_run = not directory or state_of(directory).is_living
    stuck = [one for one in processes.values() if may_run and one.is_stuck and _KTHREADD not in {one.pid, one.ppid}]
    known = ranks_by_pid(directory) if directory and stuck else {}
    found = {one.pid: one._replace(rank=known[one.pid], run_id=min(run_ids)) for one in stuck if one.pid in known}
    processes = {**processes, **found}
    members = [process for process in processes.values() if process.run_id and process.run_id in run_ids]
    targets, orphans = _distinct(_roots(members, processes))
    if not targets:
        if stuck:
            many = f"{len(stuck)} processes of this host have" if len(stuck) > 1 else "a process of this host has"
            what = f"no rank of run {name} can be seen on this host, but {many} threads in uninterruptible sleep"
            raise UsageError(f"{what}, and may be one", f"saferunctl stacks {stuck[0].pid} shows one by its pid")
        report = os.path.join(directory, "report.txt") if directory else ""
        hint = f"see {shorter_path(report)}" if os.path.exists(report) else "it has ended, or it runs on other hosts"
        if any(not process.is_readable for process in processes.values()):
            hint += "; processes of other users can be seen by root alone"
        raise UsageError(f"no rank of run {name} lives on this host", hint)
    parents = {processes[target.pid].ppid for target in targets}
    nameless = [one.pid for one in stuck if one.pid not in known and one.ppid in parents]
    return AskedProcesses(f"run {name}", targets, orphans, remarks=tuple(map(_nameless_text, nameless[:_NAMED_PIDS])))


def _nameless_text(pid: int) -> str:
    what = f"process {pid} may be a rank, too: it has the same parent, and is in uninterruptible sleep"
    return f"{what} (saferunctl stacks {pid})"


def _roots(
    members: Iterable[LiveProcess], processes: Mapping[int, LiveProcess], outside: LiveProcess | None = None
) -> list[LiveProcess]:
    """Of processes those that are ranks themselves: what they start inherits their variables.

    Args:
        members: the processes.
        processes: all of them.
        outside: whose variables are no sign of a rank, as they were there before.
    """
    inherited = (outside.rank, outside.run_id) if outside is not None else None
    ranks = {one.pid: one for one in members if one.rank >= 0 and (one.rank, one.run_id) != inherited}
    return [one for one in ranks.values() if not any(pid in ranks for pid in _ancestors(one, processes))]


def _distinct(roots: list[LiveProcess]) -> tuple[tuple[CaptureTarget, ...], tuple[int, ...]]:
    """One process per rank, and those that are left over: orphans of ranks that are gone have their variables too."""
    parents = Counter(root.ppid for root in roots)
    by_rank: dict[int, list[LiveProcess]] = {}
    for root in roots:
        by_rank.setdefault(root.rank, []).append(root)
    # Ranks have their supervisor for a parent; an orphan has the process that adopted it.
    chosen = {
        rank: min(candidates, key=lambda one: (one.ppid == 1, -parents[one.ppid], one.started_at))
        for rank, candidates in sorted(by_rank.items())
    }
    orphans = tuple(sorted(root.pid for root in roots if chosen[root.rank] is not root))
    return tuple(CaptureTarget(rank, one.pid, one.hook_prefix) for rank, one in chosen.items()), orphans


def _ancestors(process: LiveProcess, processes: Mapping[int, LiveProcess]) -> Iterator[int]:
    seen = {process.pid}
    while process.ppid in processes and process.ppid not in seen:
        seen.add(process.ppid)
        process = processes[process.ppid]
        yield process.pid


def _run_directory(target: str) -> str | None:
    try:
        path = str(find_run(target, living_first=True))
    except NoRunError:
        return None  # it may be the id of a run that has no directory
    except UsageError as error:
        hint = "name a pid, or a run by its directory or id" if target == LATEST else error.hint
        raise UsageError(error.what, hint) from None
    return path if os.path.isfile(os.path.join(path, RUN_JSON)) else None


def _run_ids_of(directory: str) -> set[str]:
    """Of the saferun that leads the run, and of others that live."""
    ids = {_run_id_of(directory)}
    with suppress(OSError):
        fd = open_run(directory)
        try:
            ids.update(record.run_id for record in living_records(fd))
        finally:
            os.close(fd)
    return ids


def _run_id_of(directory: str) -> str:
    try:
        fd = open_run(directory)
        try:
            return str(read_json(fd, RUN_JSON)["run_id"])
        finally:
            os.close(fd)
    except (OSError, *MALFORMED) as error:
        path = os.path.join(directory, RUN_JSON)
        raise UsageError(f"{path} cannot be read: {error}", "name the run's id, or a pid") from None


def _with_script(asked: AskedProcesses) -> AskedProcesses:
    # It distinguishes the user's own code.
    pid = asked.targets[0].pid
    script = next((word for word in read_cmdline(pid)[1:] if not word.startswith("-")), "")
    try:
        return asked._replace(script=script, cwd=os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return asked._replace(script=script)


def _owner(pid: int) -> str:
    import psutil

    try:
        return str(psutil.Process(pid).username())
    except psutil.Error:
        return "unknown"


# ---------------------------------------------------------------------------------------------------------- looking


def _capture_asked(asked: AskedProcesses, *, native: bool) -> tuple[Capture, str]:
    """What the capture process sees, and why that is not all."""
    seen: list[tuple[Capture, str]] = []

    def take(reader: CaptureReader, failure: str) -> None:
        seen.append((reader.capture, failure))

    budget_s = _NATIVE_BUDGET_S if native else _BUDGET_S
    poller = Poller()
    request = CaptureRequest(
        asked.targets,
        budget_s=budget_s,
        native="always" if native else "never",
        gpu=False,
        since=time.time(),
        is_asked=True,
    )
    deadline = time.monotonic() + budget_s + _GRACE_S
    examiner = Examiner(os.environ, poller, warn=lambda _text: None)
    run = CaptureQuery(request, examiner, poller, deadline=deadline, on_done=take)
    try:
        run.begin()
        while not seen:
            poller.wait(max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline:
                run.expire()
    finally:
        run.close()
        examiner.close()
        for pid in examiner.pids:
            _reap(pid)
        poller.close()
    return seen[0]


def _reap(pid: int) -> None:
    # A process that was killed while the driver of a GPU held it may take its time: it is left to init.
    until = time.monotonic() + _GRACE_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < until:
        time.sleep(0.005)


def _require_stacks(capture: Capture) -> None:
    if any(dump.threads for dump in capture.stacks):
        return
    failures = [dump.failure for dump in capture.stacks if dump.failure]
    failures += [note.failure for note in capture.notes if note.failure]
    failures += capture.timed_out
    why = failures[0] if failures else "the processes have ended meanwhile"
    hint = _PERMISSION_HINT if os.geteuid() else _ROOT_HINT
    if "ptrace_scope" in why:
        hint = "run it as root, or have root set kernel.yama.ptrace_scope to 0 with sysctl"
    elif "gdb" in why:
        hint = "install gdb" if "installed" in why else "the process may have ended meanwhile; see its /proc/PID/stack"
    elif why.endswith(NOT_PYTHON):
        hint = "--native shows its native stacks: gdb stops it for as long as it reads symbols"
    elif why == "the processes have ended meanwhile":
        hint = "see saferunctl list, and the report of the run"
    raise UsageError(f"no stacks: {why}", hint)


# ---------------------------------------------------------------------------------------------------------- showing


def picture(asked: AskedProcesses, capture: Capture) -> list[str]:
    """What was seen, for a person."""
    taken = [dump for dump in capture.stacks if dump.threads]
    processes: tuple[StackDump | ProcessSnapshot, ...] = (*capture.stacks, *capture.processes)
    count = len({(one.rank, one.pid) for one in processes})
    ranks = ranks_text(target.rank for target in asked.targets) if asked.has_ranks else "not a rank"
    lines = [f"{asked.title}: {ranks}; {count} process{'es' if count != 1 else ''}"]
    own = len(lines)
    groups = _groups(asked, capture)
    if groups:
        lines += ["", "who waits in what:", *group_lines(groups, budget=_GROUP_LINES, rest=" (all: --json)")]
    findings = compare(capture.collectives, [target.rank for target in asked.targets]).lines
    if findings:
        # A capture of a healthy job may find a rank that is a moment late.
        lines += ["", "collectives, at this moment:", *(f"    {shown(line)}" for line in findings[:_NAMED_FAILURES])]
    tree = merge(capture.stacks, asked.script, asked.cwd)
    if tree:
        lines += ["", "merged stacks:", *tree_lines(tree, budget=_TREE_LINES, rest=" (all: --json)")]
    if not asked.has_ranks:
        lines[own:] = _with_pid(lines[own:], asked.targets[0].pid)
    missing = [dump for dump in capture.stacks if not dump.threads]
    lines += ["", *_failures(missing, has_ranks=asked.has_ranks)] if missing and taken else []
    if asked.orphans:
        lines += ["", f"left over from ranks that are gone: pid {', '.join(map(str, asked.orphans))}"]
    if capture.timed_out:
        lines += ["", f"captures timed out: {', '.join(map(shown, capture.timed_out[:_NAMED_FAILURES]))}"]
    return lines


def _with_pid(lines: list[str], pid: int) -> list[str]:
    """The lines about a process that is no rank, which stands among the ranks as rank 0."""
    name = f"pid {pid}"
    wider = " " * (len(name) - len(_AS_RANK))
    return [
        line.replace(_AS_RANK, name, 1)
        if line.lstrip().startswith(_AS_RANK)
        else wider + line
        if line[:1] == " "
        else line
        for line in lines
    ]


def _groups(asked: AskedProcesses, capture: Capture) -> tuple[WaitGroup, ...]:
    ranks = [target.rank for target in asked.targets]
    return wait_groups(capture, ranks=ranks, dead={}, script=asked.script, cwd=asked.cwd)


def _failures(dumps: list[StackDump], *, has_ranks: bool) -> list[str]:
    by_reason: dict[str, list[StackDump]] = {}
    for dump in dumps:
        by_reason.setdefault(shown(dump.failure) or "no stacks", []).append(dump)
    lines = ["without stacks:"]
    for reason, alike in list(by_reason.items())[:_NAMED_FAILURES]:
        ranks = [f", rank {dump.rank}" if has_ranks else "" for dump in alike]
        named = list(zip(alike, ranks, strict=True))[:3]
        who = ", ".join(f"pid {dump.pid} ({shown(dump.name, 32)}{rank})" for dump, rank in named)
        more = f" and {len(alike) - 3} more" if len(alike) > 3 else ""  # noqa: PLR2004
        lines.append(f"  {who}{more}: {reason}")
    return lines


def _as_json(asked: AskedProcesses, capture: Capture, remarks: Sequence[str] = ()) -> JsonObject:
    return {
        "target": asked.title,
        "ranks": [{"rank": one.rank if asked.has_ranks else None, "pid": one.pid} for one in asked.targets],
        "has_ranks": asked.has_ranks,
        "hosts": [
            {"host": host, "ranks": list(ranks), "answered": host not in asked.silent} for host, ranks in asked.hosts
        ],
        "remarks": list(remarks),
        "orphans": list(asked.orphans),
        "wait_groups": [plain(group) for group in _groups(asked, capture)],
        "processes": [plain(process) for process in capture.processes],
        "stacks": [plain(dump) for dump in capture.stacks],
        "collectives": [plain(one) for one in capture.collectives],
        "timed_out": list(capture.timed_out),
        "elapsed_s": capture.elapsed_s,
    }
