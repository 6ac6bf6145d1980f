"""Every decoder of what somebody else has written, on samples that were changed at random: no exception but its own.

Other hosts, ranks, tools, schedulers and files may hold anything. ``make test`` tries a little, always the same;
``make test-all`` tries a lot, in a process whose memory is limited.
"""

from __future__ import annotations

import json
import math
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from saferun.captures.faulthandler_dump import threads_from_text
from saferun.captures.gdb import threads_from_gdb
from saferun.captures.gpu_amd import parse_amd_smi_metric, parse_amd_smi_processes, parse_rocm_smi
from saferun.captures.kernel_log import parse_record, parse_syslog
from saferun.captures.py_spy_json import threads_from, threads_from_json
from saferun.captures.pystack_core import threads_from_pystack
from saferun.captures.recorder_content import read_groups
from saferun.captures.wire import CaptureReader, CaptureRequest, CaptureTarget, encode
from saferun.cluster.evidence import decode_part, encode_part
from saferun.cluster.messages import abort_from, chunk_from, decision_from, task_of
from saferun.cluster.placement.rendezvous_options import read_conf
from saferun.cluster.schedulers import BY_NAME, Surroundings, detect, unused_hosts
from saferun.cluster.schedulers.allocation import expand_process_mapping
from saferun.cluster.schedulers.host_list import expand_hosts, parse_host_file
from saferun.cluster.schedulers.mpi import expand_node_regex
from saferun.cluster.secret import JobSecret
from saferun.cluster.secret_sharing import NoSecretError, pack, read_offer, unpack
from saferun.cluster.signed import Signer, unverified
from saferun.coordinator.assignments import (
    HostRecord,
    TaskRecord,
    assign,
    decode_assignment,
    decode_host_record,
    encode_assignment,
)
from saferun.coordinator.assignments import encode_host_record as record_text
from saferun.coordinator.failure_messages import read_failure
from saferun.coordinator.heartbeats import read_state
from saferun.coordinator.job_log import JobLog
from saferun.coordinator.leader_address import read_address
from saferun.coordinator.secrecy import decode_note, encode_note
from saferun.coordinator.tasks import TaskConnection
from saferun.env.profiles.validation import profile_from_node
from saferun.env.profiles.yaml_nodes import parse_yaml
from saferun.errors import SaferunError
from saferun.linux.core_notes import CoreError, read_core_notes
from saferun.linux.error_files import read_error_file
from saferun.linux.json_lines import JsonLines
from saferun.preflight.bisect.trial_driver import decode_outcomes, decode_trial
from saferun.preflight.host_messages import (
    decode_endpoint,
    decode_host_info,
    decode_probes,
    encode_endpoint,
    encode_host_info,
    encode_probes,
)
from saferun.preflight.results import HostInfo, Probe, ProbeEndpoint
from saferun.report.page.contents import decode_preflight, decode_report
from saferun.report.page.rendering import render_page
from saferun.report.page.run_contents import HostEvents, RunFiles, decode_events, decode_run_json
from saferun.text.decoding import MALFORMED, loads
from saferun.watchdog.job_verdicts import verdict_from
from tests.process.one_capture import decode_request, encode_request
from tests.torch.coordinating import TROUBLE
from tests.unit import recorded_launchers, recorded_schedulers
from tests.unit.captures.test_flight_recorder import entry, trace
from tests.unit.cluster.listening_job import DECISION, piece
from tests.unit.host_samples import captured, host_evidence
from tests.unit.linux.test_core_files import make_core
from tests.unit.report.page_samples import hang_files

EXAMPLES = int(os.environ.get("SAFERUN_FUZZ_EXAMPLES", "20"))
_MANY = 2000
# So many decoders in one process: each test of them is far from the limit of time, on a busy machine as well.
_AT_ONCE = 6
_MEMORY_BYTES = 4 << 30


class Decoder(NamedTuple):
    """A decoder, what it reads, and what it may raise."""

    read: Callable[[bytes], object]
    samples: tuple[bytes, ...]
    errors: tuple[type[Exception], ...] = ()


def text_of(content: bytes) -> str:
    return content.decode("utf-8", "replace")


def json_lines(content: bytes) -> object:
    ours, theirs = socket.socketpair()
    lines = JsonLines(ours)
    with theirs:
        theirs.sendall(content[: 64 << 10] + b"\n")
        found = lines.receive()
    lines.close()
    return len(found or ())  # from processes of saferun's own; the values are checked where they are used


def task_lines(content: bytes) -> object:
    ours, theirs = socket.socketpair()
    connection = TaskConnection(ours, is_head=True, wake=lambda: None)
    with theirs:
        theirs.sendall(content[: 64 << 10] + b"\n")
        found = connection.receive()
    connection.close()
    return len(found or ())


def log_entry(content: bytes) -> object:
    told: list[object] = []
    log = JobLog(None, "a0/", 1, lambda _, message: told.append(message))  # type: ignore[arg-type]
    log._take(0, content)
    return told


def in_a_file(read: Callable[[str], object]) -> Callable[[bytes], object]:
    def call(content: bytes) -> object:
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            return read(file.name)

    return call


def error_file(path: str) -> object:
    found = read_error_file(path)
    return found[:2] if found is not None else None  # the rest is handed on as it is


def scheduler(content: bytes) -> object:
    try:
        environ = json.loads(content)
    except (ValueError, RecursionError):
        environ = {"SLURM_JOB_NODELIST": text_of(content), "PMI_RANK": "0", "LSB_MCPU_HOSTS": text_of(content)}
    texts = {str(key): str(value) for key, value in environ.items()} if isinstance(environ, dict) else {}
    anything = text_of(content)
    around = Surroundings(
        texts, "node3", lambda _: anything, ask_pmi=lambda _: anything, ask_command=lambda _: anything
    )
    return [detect(around), *(detector(around) for detector in BY_NAME.values()), unused_hosts(around)]


def profile(content: bytes) -> object:
    node = parse_yaml(text_of(content), "x.yaml")
    return None if node is None else profile_from_node("x", node)


def captures(content: bytes) -> object:
    reader = CaptureReader()
    reader.feed(content)
    return reader.capture


def dumped(*values: object) -> tuple[bytes, ...]:
    return tuple(json.dumps(value).encode() for value in values)


def environments() -> Iterator[object]:
    for name, value in (vars(recorded_launchers) | vars(recorded_schedulers)).items():
        if name.isupper() and isinstance(value, dict):
            yield value


SPY = [
    {
        "pid": 1,
        "thread_id": 140,
        "thread_name": "MainThread",
        "os_thread_id": 1,
        "active": True,
        "owns_gil": True,
        "frames": [{"name": "f", "filename": "t.py", "module": None, "short_filename": "t.py", "line": 3}],
    }
]
ERROR = {"message": {"message": "x", "extraInfo": {"timestamp": "1700000000", "py_callstack": "x"}, "errorCode": 1}}
STATE = {
    "tasks": {"0": {"s": "run"}},
    "chunks": [[0, "end"]],
    "stuck": {"0": "D"},
    "acked": False,
    "locations": {"0": "/mnt"},
}
LEADER = {"job": "x", "control_port": 1, "ranks_port": 2, "master_addr": "a", "addresses": ["10.0.0.1"]}
LEADER |= {"run_id": "r", "hosts": 2, "one_port": False, "moves": 0}
SIGNER = Signer(JobSecret(bytes(32)), "job")
RECORD = HostRecord(
    "node1", (TaskRecord(2, "default", 7),), ("10.0.0.1",), 29500, "run", host_info="{}", probe_endpoint="{}"
)
BOUND = "0" * 64
TRIAL = {"number": 1, "name": "pairs", "groups": [[[0, 0, 2], [1, 0, 2]]], "interface": "eth0", "deadline_s": 30.0}
GDB = b"Thread 1 (LWP 71):\n#0  0x00007f in raise (sig=6) at x.c:3\n#1  main () at t.c:1\n"
STACKS = (
    b'Current thread 0x00007f (most recent call first):\n  File "t.py", line 3 in step\n  File "t.py", line 9 in <m>\n'
)
AMD = [{"gpu": 0, "usage": {"gfx_activity": {"value": 3, "unit": "%"}}, "mem_usage": {"total_vram": {"value": 9}}}]
YAML = (Path(__file__).resolve().parents[2] / "configs" / "debug.yaml").read_bytes()
REPORT, EVENTS = hang_files()
PART = encode_part(host_evidence(1, 2, capture=captured(1, 2)), 1 << 16).encode()


def page_of(report: bytes, events: bytes) -> object:
    """The page of a run with this report and these events of a host."""
    hosts = (HostEvents("node1", tuple(decode_events(events))),)
    return render_page(RunFiles("run", decode_report(report), decode_preflight(report), None, hosts))


DECODERS: dict[str, Decoder] = {
    "page of a report": Decoder(lambda content: page_of(content, EVENTS), (REPORT,)),
    "page of events": Decoder(lambda content: page_of(REPORT, content), (EVENTS,)),
    "page of run.json": Decoder(
        lambda content: render_page(RunFiles("run", run=decode_run_json(content))),
        dumped({"command": ["x"], "settings": {"a": {"value": 1, "origin": "flag"}}, "versions": {"torch": "2"}}),
    ),
    "json": Decoder(loads, dumped(STATE, [1, 2.5, None, "x"]), (ValueError,)),
    "JSON lines": Decoder(json_lines, dumped({"op": "entry", "message": TROUBLE})),
    "JSON lines of tasks": Decoder(task_lines, dumped({"op": "append", "attempt": 0, "message": TROUBLE})),
    "log entries": Decoder(log_entry, dumped({"h": 1, "n": 1, "m": TROUBLE}, {"h": 0, "n": 1, "m": DECISION})),
    "troubles": Decoder(lambda content: abort_from(loads(content)), dumped(TROUBLE), MALFORMED),
    "decisions": Decoder(lambda content: decision_from(loads(content)), dumped(DECISION), MALFORMED),
    "verdicts": Decoder(
        lambda content: verdict_from(loads(content)),
        dumped({"kind": "quiescent", "ranks": [1], "quiet_s": 3.5, "certain": True, "busy": []}),
        (ValueError,),
    ),
    "tasks": Decoder(lambda content: task_of(text_of(content)), (b"3/0",), (ValueError,)),
    "pieces": Decoder(lambda content: chunk_from(text_of(content)), (piece().encode(),), MALFORMED),
    "chunk": Decoder(lambda content: decode_part(text_of(content)), (PART,)),
    "states": Decoder(read_state, dumped(STATE)),
    "records": Decoder(decode_host_record, (record_text(RECORD).encode(),)),
    "assignments": Decoder(decode_assignment, (encode_assignment(assign([RECORD, RECORD])[1]).encode(),)),
    "notes": Decoder(
        lambda content: decode_note(content, "node1", "job"), (encode_note("other", 1, "n", "job").encode(),)
    ),
    "signed values": Decoder(lambda content: SIGNER.open("a0/log/0", content), (SIGNER.protect("a0/log/0", "7"),)),
    "legible values": Decoder(unverified, (SIGNER.protect("saferun/control", "7"),)),
    "leaders": Decoder(read_address, dumped(LEADER)),
    "failures": Decoder(
        read_failure,
        dumped(
            ["what", "hint"],
            ["what", "hint", "incomplete"],
            ["what", "hint", False, {"by": "saferunctl stop", "at_once": True}],
        ),
    ),
    "offers of secrets": Decoder(
        lambda content: read_offer(text_of(content)),
        dumped({"munge": "MUNGE:A:"}, {"file": ".private-" + "0" * 32}),
        (NoSecretError,),
    ),
    "secrets": Decoder(lambda content: unpack(content, BOUND), (pack(bytes(32), BOUND),), (NoSecretError,)),
    "cards": Decoder(decode_host_info, (encode_host_info(HostInfo("node1", 1.0)).encode(),)),
    "doors": Decoder(decode_endpoint, (encode_endpoint(ProbeEndpoint(4711, "0" * 32, ())).encode(),)),
    "probes": Decoder(
        lambda content: decode_probes(content, 0), (encode_probes([Probe(0, 1, "eth0", "10.0.0.1")]).encode(),)
    ),
    "trials": Decoder(lambda content: decode_trial(loads(content)), dumped(TRIAL), (ValueError,)),
    "outcomes": Decoder(lambda content: decode_outcomes(text_of(content), 1), dumped([[0, "ok", "text", "where"]])),
    "error files": Decoder(in_a_file(error_file), dumped(ERROR, {"message": "x", "timestamp": 3})),
    "Flight Recorder": Decoder(
        lambda content: read_groups(loads(content), "fr_trace_json"), (trace(entry(1), entry(2)),), (ValueError,)
    ),
    "py-spy": Decoder(lambda content: threads_from_json(content, 1), dumped(SPY), (ValueError,)),
    "py-spy of the watchdog": Decoder(lambda content: threads_from(content, 1), dumped(SPY)),
    "pystack": Decoder(
        threads_from_pystack, dumped([["MainThread", 7, True, True, [["f", "t.py", 3, False]]]]), (ValueError,)
    ),
    "gdb": Decoder(lambda content: threads_from_gdb(text_of(content), 71), (GDB,)),
    "faulthandler": Decoder(lambda content: threads_from_text(content, 71), (STACKS,)),
    "core notes": Decoder(in_a_file(read_core_notes), (make_core(71, threads=2),), (CoreError,)),
    "captures": Decoder(captures, (encode("host_line", "x") + encode("kernel_line", "y"),)),
    "requests of captures": Decoder(
        decode_request, (encode_request(CaptureRequest((CaptureTarget(0, 71, "/hook"),))),), (ValueError, TypeError)
    ),
    "scheduler environments": Decoder(scheduler, dumped(*environments())),
    "host lists": Decoder(lambda content: expand_hosts(text_of(content)), (b"node[1-3,007-9],x",), (ValueError,)),
    "host files": Decoder(
        lambda content: parse_host_file(text_of(content), "f"), (b"node1 slots=8\nnode2:3 # x\n",), (SaferunError,)
    ),
    "node expressions": Decoder(
        lambda content: expand_node_regex(text_of(content)), (b"prterun-1@1,node[3:1-3],x@0(2)",), (ValueError,)
    ),
    "process mappings": Decoder(
        lambda content: expand_process_mapping(text_of(content), 8), (b"(vector,(0,2,2))",), (ValueError,)
    ),
    "rendezvous configurations": Decoder(lambda content: read_conf(text_of(content)), (b"a=1,b=x",), (SaferunError,)),
    "profiles": Decoder(profile, (YAML,), (SaferunError,)),
    "kernel records": Decoder(lambda content: parse_record(content, 0.0), (b"6,12,345,-;text\\x0a\n X=1\n",)),
    "kernel log": Decoder(lambda content: parse_syslog(content, 0.0), (b"<6>[   12.345678] text\n",)),
    "amd-smi": Decoder(lambda content: parse_amd_smi_metric(text_of(content)), dumped(AMD)),
    "amd-smi's processes": Decoder(
        lambda content: parse_amd_smi_processes(text_of(content)),
        dumped([{"gpu": 0, "process_list": [{"process_info": {"pid": 1, "name": "x", "mem": {"value": 3}}}]}]),
    ),
    "rocm-smi": Decoder(
        lambda content: parse_rocm_smi(text_of(content)),
        dumped({"card0": {"GPU use (%)": "3"}, "system": {"PID71": "python, 1, 4096, 0, 0"}}),
    ),
}

HUGE = [float("inf"), float("-inf"), float("nan"), 10**400, -(10**400), 1e308, 1 << 63, -1, 0, True, None, "", "7", "²"]
ODD: st.SearchStrategy[Any] = st.sampled_from(
    [*HUGE, [], {}, [[]], [{}], ["x" * 3000], "\x1b[2J\u202e\n", "\ud800", "9" * 5000, "a/b", "../x"]
)
PIECES = st.sampled_from(
    [
        *(b"Infinity", b"NaN", b"1e999", b"1" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\xff", b"\x00", b"\n", b"null"),
        *(b"-1", b"\x1b[2J", b'"', b"\\ud800", b"\xc2\xb2", b"[0-99999999]", b"[1-9" * 50, b"(", b",", b"x999999999"),
        *(b"(x1000000)", b"=", b":", b"&a [*a,*a]", b"!!python/object:os.system", b"{}", b"]", b"99999999999999999999"),
    ]
)


def places_in(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places_in(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: object) -> Any:
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = changed(value[path[0]], path[1:], odd)
    return copy


@st.composite
def hostile(draw: st.DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """A sample with some of its values, or of its bytes, exchanged."""
    sample = draw(st.sampled_from(samples))
    try:
        value = json.loads(sample)
    except ValueError:
        pass
    else:
        for _ in range(draw(st.integers(0, 3))):
            value = changed(value, draw(st.sampled_from(list(places_in(value)))), draw(ODD))
        sample = json.dumps(value).encode()
    content = bytearray(sample)
    for _ in range(draw(st.integers(0, 2))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 20))] = draw(PIECES | st.binary(max_size=6))
    return bytes(content)


def check(found: object, depth: int = 0) -> None:
    """What has been read is finite, and no deeper than it was allowed to be."""
    assert depth < 200
    if isinstance(found, float):
        assert math.isfinite(found)
    elif isinstance(found, dict):
        for key, value in found.items():
            check(key, depth + 1)
            check(value, depth + 1)
    elif isinstance(found, list | tuple):
        for value in found:
            check(value, depth + 1)


@pytest.mark.parametrize("name", DECODERS)
def test_what_others_have_written_is_read_or_refused(name: str) -> None:
    """The errors are those that the decoder promises, and whoever calls it expects."""
    decoder = DECODERS[name]

    @settings(
        max_examples=EXAMPLES,
        derandomize=EXAMPLES < _MANY,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(hostile(decoder.samples))
    def read(content: bytes) -> None:
        try:
            found = decoder.read(content)
        except decoder.errors:
            return
        check(found)

    read()
    for sample in decoder.samples:
        check(decoder.read(sample))  # what is right is read


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("kernel log", b"<" + b"1" * 5000 + b"6>[   12.345678] text\n"),
        ("gdb", GDB.replace(b"71", b"1" * 5000)),
        ("gdb", GDB.replace(b"t.c:1", b"t.c:" + b"1" * 5000)),
        ("amd-smi", b'[{"gpu": 0, "usage": {"gfx_activity": Infinity}}]'),
        ("rocm-smi", b'{"card0": {"GPU use (%)": 1e999}}'),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_was_once_an_exception_is_none(name: str, content: bytes) -> None:
    check(DECODERS[name].read(content))


@pytest.mark.slow
@pytest.mark.limit_s(850)  # minutes of work, and more where other tests run beside it
@pytest.mark.parametrize("first", range(0, len(DECODERS), _AT_ONCE))
def test_a_lot_of_it_is_read_or_refused_within_a_limit_of_memory(first: int) -> None:
    """Thousands of inputs for each decoder, never twice the same."""
    names = list(DECODERS)[first : first + _AT_ONCE]
    tests = [f"{__file__}::{test_what_others_have_written_is_read_or_refused.__name__}[{name}]" for name in names]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "SAFERUN_FUZZ_EXAMPLES": str(_MANY)},
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    assert f"{len(names)} passed" in done.stdout
