"""Who may import whom, read from the syntax tree, and what a start may load."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax import no_collector, parsed

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "saferun"

# From the ground up. A room may import the rooms of the rows above its own, and itself.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("model",),
    ("config", "evidence"),
    ("text",),
    ("supervisor", "diagnosis", "linux"),
    ("files", "env"),
    ("console", "captures"),
    ("watchdog",),
    ("cluster",),
    ("preflight",),
    ("report",),
    ("launch",),
    ("cli",),
    ("api", "ctl", "__main__"),
)
ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
# These need no place in the order: the package itself holds the version, the coordinator is a process of its own, the
# hook runs in the ranks and imports nothing of ours.
APART = {"__init__", "coordinator", "inject"}

# Reading these sources would be enough to know that no test of them ever needs a machine, a clock or a child.
PURE = (
    "errors",
    "model",
    "config",
    "evidence",
    "text",
    "supervisor",
    "diagnosis",
    "captures/call_rings",
    "captures/gpu_lines",
    "captures/inspection_values",
    "captures/kernel_lines",
    "captures/missing_files",
    "captures/py_spy_json",
    "captures/ras_content",
    "captures/recorder_content",
    "captures/recorder_waits",
    "cluster/asked_progress",
    "cluster/evidence",
    "cluster/join_messages",
    "cluster/messages",
    "cluster/report_listeners",
    "cluster/schedulers",
    "cluster/silence",
    "console/cpp_frames",
    "console/folding",
    "console/harmless",
    "console/lines",
    "console/log_rows",
    "console/message_style",
    "console/open_colors",
    "console/prefix",
    "console/rows",
    "console/screen_row",
    "console/status_line",
    "coordinator/members",
    "coordinator/resumption",
    "coordinator/search_text",
    "coordinator/waiting_notice",
    "env/lint/explanation",
    "env/lint/rules",
    "env/profiles/profile_text",
    "env/profiles/profile_values",
    "env/profiles/quoting",
    "env/profiles/templates",
    "env/profiles/version_ranges",
    "files/time_index",
    "files/time_index_reader",
    "launch/dry_run",
    "launch/hosts_at_fault",
    "launch/wrap_tools",
    "launch/wrapped_hosts",
    "linux/nic",
    "preflight/best_nic",
    "preflight/bisect/__init__",
    "preflight/bisect/finding_text",
    "preflight/bisect/halving",
    "preflight/bisect/trial_values",
    "preflight/default_nics",
    "preflight/fault_text",
    "preflight/faults",
    "preflight/findings_text",
    "preflight/host_messages",
    "preflight/json_report",
    "preflight/judge",
    "preflight/leader_messages",
    "preflight/nic_links",
    "preflight/outcome",
    "preflight/results",
    "preflight/skew",
    "preflight/slowness",
    "report/calls_text",
    "report/console_text",
    "report/event_json",
    "report/failure_lines",
    "report/flame_graph",
    "report/metrics_text",
    "report/page/building",
    "report/page/contents",
    "report/page/exports",
    "report/page/gpu_rows",
    "report/page/hang_text",
    "report/page/host_clocks",
    "report/page/host_rows",
    "report/page/outputs",
    "report/page/page_model",
    "report/page/rank_records",
    "report/page/run_contents",
    "report/page/stack_tree",
    "report/page/step_marks",
    "report/page/timeline",
    "report/page/wait_graph",
    "report/recorder_order",
    "report/report_json",
    "report/report_text",
    "report/report_values",
    "report/run_json",
    "report/shown_traceback",
    "report/slow_text",
    "report/speedscope",
    "report/text_diagram",
    "report/verdict_text",
    "watchdog/detector",
    "watchdog/hang_rules",
    "watchdog/job_detector",
    "watchdog/job_verdicts",
    "watchdog/quiet_work",
    "watchdog/rank_histories",
    "watchdog/rank_history",
    "watchdog/recorded_stragglers",
    "watchdog/sample_budget",
    "watchdog/samples",
    "watchdog/sequence_numbers",
    "watchdog/signs",
    "watchdog/stack_dumps",
    "watchdog/stragglers",
    "watchdog/verdicts",
)
# ``signal`` and ``sys`` are not among them: the numbers of signals and the order of bytes are plain values. What does
# something is below.
IMPURE_MODULES = frozenset(
    [
        "asyncio",
        "atexit",
        "concurrent",
        "ctypes",
        "datetime",
        "fcntl",
        "glob",
        "io",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "platform",
        "posix",
        "psutil",
        "pty",
        "random",
        "resource",
        "secrets",
        "select",
        "selectors",
        "shutil",
        "socket",
        "socketserver",
        "sqlite3",
        "ssl",
        "subprocess",
        "syslog",
        "tempfile",
        "termios",
        "threading",
        "time",
        "torch",
        "tty",
        "uuid",
        "_thread",
    ]
)
LACKING_SOMEWHERE = frozenset(
    {"pidfd_open", "pidfd_send_signal", "memfd_create", "eventfd", "closerange", "getrandom", "copy_file_range"}
    | {"timerfd_create", "setns", "unshare", "O_TMPFILE", "F_ADD_SEALS"}
)
IMPURE_BUILTINS = frozenset({"breakpoint", "compile", "eval", "exec", "input", "open", "print", "__import__"})

NOT_AT_START = (
    "argparse",
    "array",
    "asyncio",
    "contextlib",
    "dataclasses",
    "importlib.metadata",
    "inspect",
    "logging",
    "pathlib",
    "jinja2",
    "psutil",
    "pynvml",
    "saferun.captures.capture_processes",
    "saferun.captures.examiner_process",
    "saferun.captures.stacks",
    "saferun.captures.all_captures",
    "saferun.cluster.asked_progress",
    "saferun.cluster.silent_hosts",
    "saferun.cluster.endpoint_name",
    "saferun.cluster.evidence",
    "saferun.cluster.evidence_exchange",
    "saferun.cluster.head_notice",
    "saferun.cluster.host_ports",
    "saferun.cluster.job",
    "saferun.cluster.job_channel",
    "saferun.cluster.job_context",
    "saferun.cluster.job_view",
    "saferun.cluster.leader_routes",
    "saferun.cluster.lost_hosts",
    "saferun.cluster.meeting",
    "saferun.cluster.meeting_reports",
    "saferun.cluster.messages",
    "saferun.cluster.reported_states",
    "saferun.cluster.schedulers",
    "saferun.cluster.store_loss",
    "saferun.diagnosis",
    "saferun.evidence",
    "saferun.files.operations",
    "saferun.files.writer_process",
    "saferun.files.file_server",
    "saferun.files.sinks",
    "saferun.launch.event_commands",
    "saferun.launch.metrics_part",
    "saferun.launch.metrics_port",
    "saferun.launch.metrics_samples",
    "saferun.launch.on_event_part",
    "saferun.linux.error_files",
    "saferun.linux.task_sockets",
    "saferun.preflight.bisect",
    "saferun.preflight.bisect.trial_process",
    "saferun.preflight.checks",
    "saferun.preflight.json_report",
    "saferun.preflight.judge",
    "saferun.preflight.results",
    "saferun.preflight.findings_text",
    "saferun.preflight.host_messages",
    "saferun.preflight.leader_messages",
    "saferun.report.event_json",
    "saferun.report.page",
    "saferun.report.report_json",
    "saferun.report.console_text",
    "saferun.text.bounded_json",
    "saferun.watchdog",
    "selectors",
    "shutil",
    "socket",
    "subprocess",
    "tempfile",
    "tenacity",
    "torch",
    "typing",
    "yaml",
)


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _name(path: Path) -> str:
    """``saferun/linux/listen_port.py`` -> ``saferun.linux.listen_port``; a package is named like its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


def _room(module: str) -> str:
    """``saferun.linux.listen_port`` -> ``linux``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """A million nodes are kept for the tests of this file, and for no other's."""
    with no_collector():
        yield
    _nodes.cache_clear()


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """A source's syntax, which most of the rules below look at."""
    return tuple(ast.walk(parsed(path)))


@functools.cache
def _imports(path: Path) -> tuple[tuple[str, int], ...]:
    """All modules that a source imports, anywhere in it, with the lines."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the full name"
            module = node.module or ""
            yield module, node.lineno
            if module == "saferun":
                # ``from saferun import config`` is an import of the room.
                for alias in node.names:
                    if alias.name != "__version__":
                        yield f"saferun.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and _called(node) in {"import_module", "importlib.import_module", "__import__"}:
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, node.lineno


def _called(node: ast.Call) -> str:
    """What is called, as in the source: without ``ast.unparse``, which is slow, unless it is no name."""
    parts: list[str] = []
    place = node.func
    while isinstance(place, ast.Attribute):
        parts.append(place.attr)
        place = place.value
    return ".".join([place.id, *reversed(parts)]) if isinstance(place, ast.Name) else ast.unparse(node.func)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _upward(importer: str, imported: str) -> bool:
    """Whether one room may not import another."""
    if imported in {importer, "__init__"}:
        return False
    return ROW_OF[imported] >= ROW_OF[importer]


def _pure_sources() -> list[Path]:
    paths: list[Path] = []
    for name in PURE:
        path = PACKAGE / f"{name}.py"
        paths.extend(_sources(PACKAGE / name) if (PACKAGE / name).is_dir() else [path] if path.exists() else [])
    return paths


# --------------------------------------------------------------------------------------------------------------------


def test_every_room_has_its_place_in_the_order() -> None:
    """A room that is not in the list would escape every rule below."""
    rooms = {_room(_name(path)) for path in _sources(PACKAGE)}
    assert not rooms - set(ROW_OF) - APART


def test_imports_go_down_only() -> None:
    """What lies below can be understood without what lies above; rooms of one row do not know each other."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {_room(_name(path))} imports {module}"
        for path in _sources(PACKAGE)
        for module, line in _imports(path)
        if _is_of(module, "saferun")
        and _room(_name(path)) in ROW_OF
        and _room(module) in ROW_OF
        and _upward(_room(_name(path)), _room(module))
    ]
    assert not wrong


@pytest.mark.parametrize("name", sorted(LACKING_SOMEWHERE))
def test_what_some_pythons_lack_is_used_in_one_place(name: str) -> None:
    """Pythons of conda and uv lack these functions; ``linux/`` has what stands in for each of them."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: uses {name}"
        for path in _sources(PACKAGE)
        if path.parent != PACKAGE / "linux"
        for node in _nodes(path)
        if isinstance(node, ast.Attribute) and node.attr == name
    ]
    assert not wrong


def test_torch_is_imported_by_the_coordinator_alone() -> None:
    """What watches must not depend on what it watches; what runs in the user's script is asked for it there."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in _sources(PACKAGE)
        if _room(_name(path)) != "coordinator" and not path.is_relative_to(PACKAGE / "api" / "script")
        for module, line in _imports(path)
        if _is_of(module, "torch")
    ]
    assert not wrong


def test_what_runs_in_the_script_imports_torch_inside_functions_only() -> None:
    """An import of saferun takes no torch, and nothing of saferun itself imports that room."""
    script = _sources(PACKAGE / "api" / "script")
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: imports {name}"
        for path in script
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        for name in _names_of(node)
        if _is_of(name, "torch")
    ]
    assert not wrong
    assert not [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in _sources(PACKAGE)
        if path not in script and path != PACKAGE / "__init__.py"
        for module, line in _imports(path)
        if _is_of(module, "saferun.api.script")
    ]


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def test_nothing_imports_the_coordinator() -> None:
    """It is started as a process; an import would bring torch into whoever does it."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in _sources(PACKAGE)
        if _room(_name(path)) != "coordinator"
        for module, line in _imports(path)
        if _is_of(module, "saferun.coordinator")
    ]
    assert not wrong


def test_the_coordinator_knows_only_the_ground_floor() -> None:
    """It shares values, errors and decoders with the supervisor.

    Of what does something: the closing of descriptors, memory that is given back, the order of its module search path,
    and what /proc has of a process that is stuck.

    What ``secret_process`` imports it imports in a process of its own, forked before the coordinator imports torch.
    """
    forked = {"saferun.linux.prctl", "saferun.cluster.secret_sharing"}
    texts = {f"saferun.text.{name}" for name in ("decoding", "framing", "master_port", "typed_json", "wording")}
    system = {f"saferun.linux.{name}" for name in ("descriptors", "heap", "procfs", "search_path", "stuck")}
    shared = {f"saferun.cluster.{name}" for name in ("join_messages", "messages", "secret", "signed", "silence")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in _sources(PACKAGE / "coordinator")
        for module, line in _imports(path)
        if _is_of(module, "saferun")
        and _room(module) not in {"coordinator", "errors", "model", "__init__"}
        and module not in {*system, *texts, *shared}
        and (path.stem != "secret_process" or module not in forked)
    ]
    assert not wrong


@pytest.mark.parametrize("path", _pure_sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_pure_layers_touch_neither_clock_nor_system(path: Path) -> None:
    """Events in, actions out: this is what makes them testable without sleeping."""
    wrong = [f"{line}: imports {module}" for module, line in _imports(path) if module.split(".")[0] in IMPURE_MODULES]
    for node in _nodes(path):
        if isinstance(node, ast.Call) and _called(node) in IMPURE_BUILTINS:
            wrong.append(f"{node.lineno}: calls {_called(node)}")
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            # The numbers are values; ``signal.signal`` and its like do something.
            allowed = node.attr == "Signals" or (node.attr.startswith("SIG") and not node.attr.startswith("SIG_"))
            if node.value.id == "signal" and not allowed:
                wrong.append(f"{node.lineno}: uses signal.{node.attr}")
            if node.value.id == "sys" and node.attr != "byteorder":
                wrong.append(f"{node.lineno}: uses sys.{node.attr}")
        if isinstance(node, ast.ImportFrom) and node.module in {"signal", "sys"}:
            wrong.append(f"{node.lineno}: imports from {node.module} by name")
    assert not wrong


def test_every_pure_layer_is_looked_at() -> None:
    """The test above would pass on files that it does not find."""
    found = {str(path.relative_to(PACKAGE)) for path in _pure_sources()}
    assert {"supervisor/machine.py", "diagnosis/__init__.py", "console/lines.py", "report/console_text.py"} <= found
    assert not [name for name in PURE if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()]
    assert not {str(path.relative_to(PACKAGE)) for path in _sources(PACKAGE) if _says_pure(path)} - found


def _says_pure(path: Path) -> bool:
    """Whether a source promises it, in the first paragraph of its docstring."""
    words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.search(r"\bPure\.", words.partition("\n\n")[0]) is not None


# The table of options, and what is compiled: the profiles, and the template of report.html.
_LONG_FILES = frozenset(
    {"cli/options.py", "diagnosis/known_literals.py", "env/profiles/builtin.py", "report/page/compiled_template.py"}
)
_MOST_LINES, _MOST_METHODS = 500, 30


def test_no_class_and_no_file_is_too_large_to_be_read() -> None:
    """Properties count as methods."""
    wrong = []
    for path in _sources(PACKAGE):
        name = str(path.relative_to(PACKAGE))
        if path.read_text(encoding="utf-8").count("\n") > _MOST_LINES and name not in _LONG_FILES:
            wrong.append(f"{name}: more than {_MOST_LINES} lines")
        for node in _nodes(path):
            if isinstance(node, ast.ClassDef):
                count = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                if count > _MOST_METHODS:
                    wrong.append(f"{name}: {node.name} has {count} methods")
    assert not wrong


# What several rooms have files of, each of its own side of it.
_SHARED_NAMES = {
    "fabric": "what can be wrong with it: checked, and found in a message",
    "gpus": "read, and checked",
    "limits": "read, and checked",
    "report": "report.json, read by programs and by saferunctl",
    "stacks": "of processes: captured, and shown by saferunctl",
    "story": "the last events of a supervisor: noted, and shown by saferunctl",
}


def test_no_two_files_with_different_meanings_have_the_same_name() -> None:
    """Who looks for a file by its name finds one."""
    names = [path.stem for path in _sources(PACKAGE) if not path.stem.startswith("__")]
    assert {name for name in names if names.count(name) > 1} == set(_SHARED_NAMES)


# Classes of one meaning in two rooms: what one room writes and another reads, or passes on in its own terms.
_SHARED_CLASSES = {
    "AbortReason": "why an attempt ends on all hosts: as the job's log has it, and as evidence",
    "Cause": "of a failure: found by the diagnosis, read from report.json",
    "Decision": "what follows a failed attempt: made, and read from report.json",
    "Incident": "a hang or a failure: written to report.json, read from it",
    "ProbeTarget": "a host to be probed: as it is sent, and as it is used",
}


def test_no_two_public_classes_with_different_meanings_have_the_same_name() -> None:
    """Who reads the name of a class knows which one it is."""
    names = [
        node.name
        for path in _sources(PACKAGE)
        for node in _nodes(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert {name for name in names if names.count(name) > 1} == set(_SHARED_CLASSES)


def test_the_rules_see_what_they_forbid(tmp_path: Path) -> None:
    """A rule that never fails is none: each way to write an import is read."""
    source = tmp_path / "sample.py"
    source.write_text(
        "import os.path\n"
        "from saferun import launch\n"
        "def f():\n"
        "    from torch.distributed import x\n"
        "    import importlib\n"
        "    importlib.import_module('saferun.coordinator.torch_store')\n",
        encoding="utf-8",
    )
    modules = {module for module, _ in _imports(source)}
    assert {"os.path", "saferun.launch", "torch.distributed", "saferun.coordinator.torch_store"} <= modules
    assert _upward("linux", "launch")
    assert _upward("console", "report")
    assert not _upward("launch", "linux")
    assert not _upward("linux", "linux")


def test_a_start_loads_only_what_it_needs() -> None:
    """Every launch pays for what is imported before the ranks run."""
    modules = "saferun.cli.main, saferun.launch.entry, saferun.launch.host_launch, sys"
    program = f"import {modules}; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run(
        # Without site, so that what an environment's .pth files load is not blamed on saferun.
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "saferun.launch.host_launch" in loaded
    assert not loaded & set(NOT_AT_START)


def test_the_unit_tests_need_no_torch() -> None:
    """They run anywhere, in seconds."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: imports {module}"
        for path in _sources(ROOT / "tests" / "unit")
        for module, line in _imports(path)
        if _is_of(module, "torch")
    ]
    assert not wrong


def test_the_unit_tests_have_the_rooms_of_the_package() -> None:
    """Whoever changes a room finds its tests in the folder of the same name, and nothing else there."""
    rooms = {path.parent.relative_to(PACKAGE).parts[0] for path in _sources(PACKAGE) if path.parent != PACKAGE}
    unit = ROOT / "tests" / "unit"
    room_of = {path: path.relative_to(unit).parts[0] for path in _sources(unit) if path.parent != unit}
    assert set(room_of.values()) == rooms
    strangers = [
        f"{path.relative_to(ROOT)}: nothing of saferun/{room}"
        for path, room in room_of.items()
        if path.name.startswith("test_") and not any(_is_of(module, f"saferun.{room}") for module, _ in _imports(path))
    ]
    assert not strangers


def test_the_house_is_small_enough_to_be_seen_at_once() -> None:
    """Folders and modules at the top: a newcomer reads this list first."""
    top = {_room(_name(path)) for path in _sources(PACKAGE)}
    assert len(top - {"__init__", "__main__"}) <= 22


def test_the_document_names_every_room() -> None:
    """Whoever looks for something begins there."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = text.partition("## Rooms")[2].split("```")[1]
    named = [line.split()[0] for line in block.splitlines() if line.startswith("  ")]
    rooms = [f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    files = [path.name for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert sorted(named) == sorted(rooms + files)


def test_the_document_draws_the_rows() -> None:
    """Between two lines stand the rooms that may not import each other."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    picture = text.partition("## Rooms")[2].split("```")[1].partition("\n═")[0]
    drawn = [
        {line.split()[0].rstrip("/").removesuffix(".py") for line in section.splitlines() if line.startswith("  ")}
        for section in re.split(r"\n─+", picture)
    ]
    assert drawn == [set(rooms) - {"__main__"} for rooms in reversed(ROWS)]


def test_every_room_says_what_it_promises() -> None:
    """In a few lines, where its name is read."""
    silent = [
        room for room in sorted(PACKAGE.iterdir()) if (init := room / "__init__.py").is_file() and not _says(init)
    ]
    assert not silent


def _says(init: Path) -> bool:
    words = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    return len(words.splitlines()) > 2


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/internals.md"])
def test_files_that_the_document_names_are_there(page: str) -> None:
    """A name that has moved leads nowhere."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_]+/[a-z_/]*[a-z_]+\.py)`", text)
    assert len(named) > 20
    assert not [name for name in named if not (PACKAGE / name).is_file() and not (ROOT / name).is_file()]
