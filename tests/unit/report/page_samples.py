"""Run directories as launches leave them, for tests of the page: of a few ranks, of a thousand, and of hostile ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from saferun.evidence.job_evidence import CollectiveCall, GroupProgress, RankCollectives
from saferun.model import JsonObject
from saferun.preflight.json_report import preflight_json
from saferun.report.report_json import Incident, Run, SlowRow, build_report
from tests.unit.found_samples import FINISH, RETRY, found, hosts_of, info
from tests.unit.report.report_checking import RUN
from tests.unit.report.report_samples import FILES, TRACEBACK, evidence_of, sleeping
from tests.unit.report.report_steps import CRASH, HANG

START = 1.7e9
PER_HOST = 8
HOSTILE = (
    "</script><script>window.hostile = 1</script>",
    "<img src=x onerror='window.hostile = 1'>",
    '" onmouseover="window.hostile = 1" x="',
    "{{ 7 * 7 }} {% raw %} ${7*7}",
    "<!-- <script> -->",
    "\u202ereversed\u202c \u2066isolated\u2069 \u2028line\u2029 \x00\x07\x1b[31mred\x1b[0m \x9b31m",
    "]]> <svg onload=window.hostile=1> javascript:window.hostile=1",
)
"""Texts that harm a page that takes them as they are."""


def event(name: str, at: float, attempt: int = 0, **fields: Any) -> JsonObject:
    """A line of events.jsonl; ``at``: seconds after the start."""
    return {"event": name, "time": START + at, "monotonic_s": 100.0 + at, "attempt": attempt, **fields}


def joined(at: float, ranks: Sequence[int], world_size: int, attempt: int = 0) -> JsonObject:
    """A host knows its ranks."""
    assignments = [{"local_rank": local, "rank": rank, "role_rank": rank} for local, rank in enumerate(ranks)]
    return event(
        "HostsJoined", at, attempt, placement={"world_size": world_size, "ranks": assignments}, state="starting"
    )


def exited(at: float, local_rank: int, attempt: int = 0, **status: Any) -> JsonObject:
    """A rank has ended."""
    known = {"code": None, "signum": None, "core_dumped": False, **status}
    return event("RankExited", at, attempt, local_rank=local_rank, status=known)


def hang_events(ranks: Sequence[int], world_size: int, *, until_s: float = 310.0) -> list[JsonObject]:
    """A host whose ranks hang, and are stopped."""
    verdict = {"kind": "quiescent", "ranks": list(range(world_size)), "quiet_s": 300.0, "certain": True, "busy": []}
    return [
        event("LaunchRequested", 0.0, state="checking"),
        joined(1.0, ranks, world_size),
        event("RanksStarted", 1.5, pids=[4000 + rank for rank in ranks], state="running"),
        event("RanksInitialized", 9.0, ranks=list(ranks), times=[START + 8.0 + rank * 1e-3 for rank in ranks]),
        event("HangSuspected", until_s, verdict=verdict, state="capturing"),
        event("EvidenceCaptured", until_s + 1, culprits=[], moved=False, state="stopping"),
        *(exited(until_s + 1.5, local, signum=15) for local in range(len(ranks))),
    ]


def crash_events(ranks: Sequence[int], bad: int, *, attempt: int = 0, offset_s: float = 0.0) -> list[JsonObject]:
    """A host one of whose ranks is killed by SIGSEGV; saferun stops the others."""
    others = [local for local in range(len(ranks)) if local != bad]
    return [
        joined(offset_s + 1.0, ranks, len(ranks), attempt),
        event("RanksStarted", offset_s + 1.5, attempt, state="running"),
        exited(offset_s + 31.0, bad, attempt, signum=11, core_dumped=True) | {"state": "capturing"},
        event("EvidenceCaptured", offset_s + 31.4, attempt, state="stopping"),
        *(exited(offset_s + 32.0 + local / 100, local, attempt, signum=15) for local in others),
    ]


def write_run(
    folder: Path,
    incidents: Sequence[Incident] = (),
    events: Mapping[str, Sequence[JsonObject]] | None = None,
    outputs: Mapping[tuple[str, int], bytes] | None = None,
    *,
    run: Run = RUN,
    hosts: int = 0,
    slow: Sequence[SlowRow] = (),
    attempt: int = 0,
) -> Path:
    """Write a run directory.

    Args:
        folder: the directory.
        incidents: of the report.
        events: the lines of each host's events.jsonl.
        outputs: what ranks wrote to stderr, by host and rank.
        run: the launch.
        hosts: how many hosts the checks have seen; 0: there were none.
        slow: of the report.
        attempt: whose the outputs are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    preflight = found(hosts) if hosts else None
    report = build_report(run, incidents, decisions=[RETRY, FINISH], preflight=preflight, slow=slow)
    (folder / "report.json").write_text(json.dumps(report))
    if preflight is not None:
        infos = {number: info(name) for number, name in enumerate(hosts_of(hosts))}
        odd = infos[hosts - 1]
        infos[hosts - 1] = odd._replace(versions=(("torch", "2.12.0"), ("python", "3.11.9")))
        (folder / "preflight.json").write_text(json.dumps(preflight_json(preflight, infos)))
    settings = {
        "nproc_per_node": {"value": "8", "origin": "flag"},
        "hang_timeout": {"value": 300.0, "origin": "default"},
    }
    description = {"command": ["--nproc-per-node", "8", "train.py"], "run_id": run.run_id, "settings": settings}
    versions = {"saferun": "0.1.0", "python": "3.11.9", "torch": "2.13.0"}
    (folder / "run.json").write_text(json.dumps({**description, "versions": versions}))
    for host, lines in (events or {}).items():
        (folder / host).mkdir(exist_ok=True)
        (folder / host / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for (host, rank), content in (outputs or {}).items():
        directory = folder / host / f"attempt_{attempt}" / f"rank_{rank}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "stderr.log").write_bytes(content)
    return folder


def hang_run(folder: Path) -> Path:
    """Eight ranks on one host: rank 3 sleeps, the others wait for it."""
    outputs = {("node1", rank): f"[rank{rank}]: step 99  loss 2.31\n".encode() for rank in range(8)}
    outputs["node1", 3] = b"step 99  loss 2.31\nrank 3 loads a batch\n"
    incident = HANG._replace(outcome="ended", recovered_after_s=None)
    return write_records(write_run(folder, [incident], {"node1": hang_events(range(8), 8)}, outputs, hosts=4))


TENSOR: JsonObject = {"shape": [8, 512], "dtype": "float32", "device": "cuda:0", "finite": False}
RECORD: JsonObject = {
    "version": 1,
    "pid": 4003,
    "rank": "3",
    "time": START + 300,
    "thread": "loader",
    "step": 99,
    "metrics": {"loss": "2.31"},
    "memory": {"rss_bytes": 3 << 30, "peak_rss_bytes": 4 << 30},
    "gpus": [{"device": 0, "allocated_bytes": 5 << 30, "reserved_bytes": 6 << 30, "peak_allocated_bytes": 7 << 30}],
    "last_calls": [
        {"kind": "call", "function": "load_batch", "file": "/x/train.py", "line": 47, "before_s": 0.25},
        {"kind": "raise", "function": "load_batch", "file": "/x/train.py", "line": 47, "before_s": 0.125},
    ],
    "exceptions": [
        {
            "type": "RuntimeError",
            "message": "the batch is wrong",
            "frames": [
                {
                    "function": "step",
                    "file": "/home/me/train.py",
                    "line": 52,
                    "locals": [
                        {"name": "x", "type": "torch.Tensor", **TENSOR},
                        {"name": "batch", "type": "dict", "length": 1, "items": [{"name": "ids", **TENSOR}]},
                        {"name": "n", "type": "int", "value": "3"},
                        {"name": "path", "type": "str", "length": 12},
                    ],
                },
                {"function": "linear", "file": "/v/lib/python3.11/site-packages/torch/nn.py", "line": 9, "locals": []},
            ],
        },
        {"type": "KeyError", "message": "'ids'", "link": "cause", "of": 0, "frames": []},
    ],
}
"""A failure record as a rank writes it."""


def write_records(folder: Path, **more: Any) -> Path:
    """Add the failure record of rank 3, the last calls of rank 1, and the last steps of the ranks."""
    directory = folder / "node1" / "attempt_0" / "rank_3"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "failure.json").write_text(json.dumps({**RECORD, **more}, indent=1))
    report = json.loads((folder / "report.json").read_text())
    thread = {"tid": 71, "is_main": True, "total": 2, "events": RECORD["last_calls"]}
    calls = {"rank": 1, "pid": 4001, "has_ended": False, "note": "", "failure": "", "threads": [thread]}
    report["incidents"][-1]["last_calls"] = [calls]
    report["incidents"][-1]["last_steps"] = [{"ranks": [0, 1, 2], "text": "step 99 (loss 2.31), 4 s before"}]
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def hang_files() -> tuple[bytes, bytes]:
    """report.json and events.jsonl of that."""
    report = build_report(RUN, [HANG._replace(outcome="ended", recovered_after_s=None)], preflight=found(4))
    lines = "".join(json.dumps(line) + "\n" for line in hang_events(range(8), 8))
    return json.dumps(report).encode(), lines.encode()


def crash_run(folder: Path) -> Path:
    """Four ranks: the first attempt recovers from a hang, in the second rank 2 crashes."""
    events = [*crash_events(range(4), 2), *crash_events(range(4), 2, attempt=1, offset_s=40.0)]
    text = "\n".join(("step 99", *TRACEBACK, "")).encode()
    outputs = {("node1", rank): text for rank in range(4)}
    slow = SlowRow(START + 20, 0, "node1", ("saferun: warning: the others wait for rank 2",), "", (2,), 0.1, 0.7, 60.0)
    return write_run(folder, [HANG, CRASH], {"node1": events}, outputs, slow=[slow], attempt=1)


def grouped_recorders(count: int, stuck: int, tensor: int = 8) -> tuple[RankCollectives, ...]:
    """Flight Recorders of ranks in groups for tensor, pipeline and data parallelism; one rank has come less far.

    Its tensor group waits for it, and the data groups of that one wait for them.
    """
    recorders = []
    for rank in range(count):
        group, index = divmod(rank, tensor)
        in_group = group == stuck // tensor
        tensor_done = rank != stuck
        data_called = not in_group
        groups = (
            _progress(
                f"tp_{group}", "tensor_parallel", tuple(range(group * tensor, (group + 1) * tensor)), tensor_done
            ),
            _progress(f"dp_{index}", "data_parallel", tuple(range(index, count, tensor)), data_called),
        )
        waits = (tensor_done and in_group, data_called)
        recorders.append(
            RankCollectives(
                rank, tuple(one if waiting else _done(one) for one, waiting in zip(groups, waits, strict=True))
            )
        )
    return tuple(recorders)


def _progress(group: str, description: str, ranks: tuple[int, ...], is_called: bool) -> GroupProgress:
    seq = 12 if is_called else 11
    call = CollectiveCall(seq, "all_reduce", "[[4096, 4096]]", not is_called, False, created_ns=0)
    return GroupProgress(group, description, ranks, seq, -1, 11, (call,))


def _done(progress: GroupProgress) -> GroupProgress:
    calls = tuple(call._replace(retired=True) for call in progress.calls)
    return progress._replace(calls=calls, completed=progress.enqueued)


def large_run(folder: Path, ranks: int = 1024) -> Path:
    """Many ranks on hosts of eight: rank 3 sleeps; each rank has written something else."""
    evidence = evidence_of(ranks)
    capture = evidence.capture._replace(collectives=grouped_recorders(ranks, 3))
    evidence = evidence._replace(capture=capture)
    diagnosis = sleeping(ranks)
    incident = Incident("hang", 0, START + 311, evidence, diagnosis, "ended", directory=f"{FILES}/node1/hang_1")
    hosts = [f"node{number + 1}" for number in range(ranks // PER_HOST)]
    events, outputs = {}, {}
    for number, host in enumerate(hosts):
        own = range(number * PER_HOST, (number + 1) * PER_HOST)
        lines = hang_events(own, ranks)
        for line in lines[-PER_HOST:]:
            line["time"] += (number % 17) / 10  # they end one after the other
        events[host] = lines
        for rank in own:
            text = "".join(f"step {step}: loss {rank + step / 1000:.3f}\n" for step in range(200))
            outputs[host, rank] = text.encode()
    return write_run(folder, [incident], events, outputs, hosts=len(hosts))


def hostile_run(folder: Path) -> Path:
    """Texts from outside that harm a page that does not escape them, wherever a rank or a host can put one."""
    path = hang_run(folder)
    text = "\n".join(HOSTILE)

    def spoilt(value: Any, number: int = 0) -> Any:
        if isinstance(value, str):
            return value + HOSTILE[number % len(HOSTILE)]
        if isinstance(value, list):
            return [spoilt(item, number + index) for index, item in enumerate(value)]
        if isinstance(value, dict):
            kept = {"kind", "schema", "check", "verdict", "outcome", "next_step"}
            return {
                name: item if name in kept and isinstance(item, str) else spoilt(item, number + index)
                for index, (name, item) in enumerate(value.items())
            }
        return value

    for name in ("report.json", "preflight.json", "run.json"):
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(spoilt(content)))
    (path / "node1" / "events.jsonl").write_text(
        "".join(
            json.dumps(line) + "\n" for line in [*hang_events(range(8), 8), event("JobAborted", 310.5, message=text)]
        )
        + 'not JSON\n{"event": 1}\n\xff\n'
    )
    record = path / "node1" / "attempt_0" / "rank_3" / "failure.json"
    record.write_text(json.dumps(spoilt(json.loads(record.read_text()))))
    stderr = path / "node1" / "attempt_0" / "rank_3" / "stderr.log"
    binary = bytes(range(256)) * 8
    huge = b"A" * 300_000 + b"<script>window.hostile=1</script>"
    token = b"HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz0123456789 https://me:S3CR3TVALUE@host/x\n"
    stderr.write_bytes(binary + b"\n" + huge + b"\n" + text.encode() + b"\n" + token + "\n".join(TRACEBACK).encode())
    return path
