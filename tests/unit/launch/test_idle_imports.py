"""What the supervisor imports once the ranks run is imported at a quiet moment, and nothing is forgotten."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from saferun.launch.idle_imports import BEFORE_SEVERAL_HOSTS, FOR_SEVERAL_HOSTS, MODULES
from tests.syntax import no_collector, parsed

ROOT = Path(__file__).resolve().parents[3]

# Imported within functions, and yet not needed once the ranks run, or not by this process; each with its reason.
BEFORE_THE_RANKS = {
    "saferun.supervisor.policy.step_progress": "--restart-limit, when the supervisor is made",
    "saferun.console.raw_pane": "when the console is opened",
    "difflib": "a misspelt option, profile or interface",
    "importlib.util": "which torch is installed: the checks",
    "saferun.linux.core_limits": "before the ranks are started",
    "saferun.linux.gpus": "settings of the ranks, and the checks",
    "saferun.linux.netlink": "--nic, and what the checks chose",
    "saferun.linux.ancestors": "when the loop begins",
    "saferun.cluster.job": "when the loop is made",
    "saferun.cluster.job_channel": "with the job",
    "saferun.cluster.secret": "--secret-file",
    "saferun.launch.nic_variables": "--nic, and what the checks chose",
    "saferun.launch.dry_run": "--dry-run",
    "saferun.launch.planned_wrappers": "--dry-run",
    "saferun.launch.on_event_part": "--on-event, when the loop is made",
    "saferun.report.event_json": "--on-event, likewise",
    "saferun.launch.metrics_part": "--metrics, likewise",
    "saferun.launch.wrapped_ranks": "--wrap, likewise; and a child of the examiner",
    "saferun.launch.wrapping": "--wrap, before the ranks of the first attempt are started",
    "saferun.launch.metrics_port": "--metrics-port, likewise",
    "saferun.launch.metrics_samples": "both, likewise",
    "saferun.preflight.default_nics": "--nic, and what the checks chose",
    "saferun.preflight.judge": "the checks",
    "saferun.preflight.host_messages": "the checks",
    "saferun.preflight.leader_messages": "the checks of several hosts",
    "saferun.preflight.driver": "the checks",
    "saferun.report.run_json": "when the first attempt is prepared",
    "saferun.env.profiles.builtin": "env profiles",
    "saferun.env.profiles.found": "env profiles and settings that nobody named",
    "saferun.env.profiles.validation": "env profiles",
    "saferun.env.profiles.quoting": "env profiles",
    "saferun.env.profiles.yaml_nodes": "env profiles",
    "saferun.preflight.bisect.trial_process": "saferunctl doctor --collective",
    "saferun.preflight.bisect.trial_driver": "saferunctl doctor --collective",
    "shlex": "env profiles",
    "yaml": "env profiles",
}
# Imported by a fork, in its own time: a file that hangs costs that process only. What they import in turn is not there
# for the supervisor.
IN_FORKS = {
    "saferun.captures.examiner_process": "the examiner",
    "saferun.preflight.checks.server": "the check process",
    "saferun.linux.sock_diag": "over which connections nothing moves",
    "saferun.env.lint.__main__": "a child of the examiner",
    "saferun.files.run_index": "a fork of the writer process",
    "saferun.files.run_removal": "a fork of the writer process",
    "saferun.linux.abandoned_scratch": "a fork of the writer process",
    "saferun.linux.held_code": "the examiner; and the supervisor before the ranks have become their programs",
    "saferun.supervisor.policy.backoff": "a child of the examiner",
    "saferun.captures.capture_processes": "a child of the examiner",
    "saferun.captures.recording": "a child of the examiner",
    "saferun.captures.native_stacks": "a child of the examiner",
    "saferun.report.page.serving": "the process that makes report.html",
    "saferun.api.report": "no launch: programs that call saferun.read_report",
    "saferun.api.launching": "no launch: programs that call saferun.run",
    "saferun.api.function_call": "no launch: programs that call saferun.run",
    "saferun.api.launch_process": "no launch: programs that call saferun.run",
    "saferun.api.launched_run": "no launch: programs that call saferun.run",
}
# What the interpreter has without a file.
BUILT_IN = frozenset(sys.builtin_module_names)


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Those of all sources are looked through."""
    with no_collector():
        yield


@cache
def path_of(module: str) -> Path | None:
    """The source of a module of saferun's; None: it is none."""
    path = ROOT / module.replace(".", "/")
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """What a source imports, and whether it does within a function; what only types need is left out."""
    return tuple(_imports(parsed(path)))


def _imports(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    waiting: list[tuple[ast.AST, bool]] = [(tree, False)]
    while waiting:
        node, within = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, within) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, within
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((name, within) for name in names if path_of(name))
        within = within or isinstance(node, ast.FunctionDef | ast.Lambda)
        waiting += [(child, within) for child in ast.iter_child_nodes(node)]


def with_all_that_they_import(modules: Iterable[str]) -> set[str]:
    """These modules, and what is imported when they are."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        found.add(module)
        waiting += [module.rpartition(".")[0]] if "." in module else []
        path = path_of(module)
        if path is not None:
            waiting += [name for name, within in imports_of(path) if not within]
    return found


def test_what_is_imported_within_functions_is_imported_when_the_ranks_run() -> None:
    """A loop that opens a file hangs with the file system of that file."""
    loaded = with_all_that_they_import(
        ["saferun.launch.entry", "saferun.launch.host_launch", *MODULES, *FOR_SEVERAL_HOSTS]
    )
    apart = with_all_that_they_import(BEFORE_THE_RANKS) | IN_FORKS.keys()
    forgotten = {
        f"{module} imports {name}"
        for module in loaded
        if (path := path_of(module)) is not None
        for name, within in imports_of(path)
        if within and name not in loaded | apart | BUILT_IN | START_ONLY | FOR_PROGRAMS
    }
    assert not forgotten


def test_the_module_socket_is_not_in_the_supervisor() -> None:
    """It and what it imports take a quarter of a MiB for as long as the launch lasts; ``linux/bare_socket.py`` does."""
    assert "socket" not in with_all_that_they_import(["saferun.launch.entry", "saferun.launch.host_launch", *MODULES])


# Behind functions of the package that programs call, and a launch never does.
FOR_PROGRAMS = frozenset({"saferun.api.report", "saferun.api.launching"})
# The standard library's that saferun has at its start in any case, by other ways, or needs only then.
START_ONLY = frozenset({"fcntl", "gc", "grp", "hashlib", "json", "select", "struct", "string", "termios"})


def test_what_messages_of_other_hosts_may_ask_for_is_imported_before_the_ranks() -> None:
    """They may come in the first second, before anything has been imported beside the ranks."""
    loaded = with_all_that_they_import(
        ["saferun.launch.entry", "saferun.launch.host_launch", "saferun.cluster.job", *BEFORE_SEVERAL_HOSTS]
    )
    elsewhere = ("saferun.cluster.evidence", "saferun.cluster.placement", "saferun.cluster.schedulers")
    of_jobs = [
        name
        for name in loaded
        if name.startswith(("saferun.cluster.", "saferun.watchdog.")) and not name.startswith(elsewhere)
    ]
    assert "saferun.cluster.silent_hosts" in of_jobs
    forgotten = {
        f"{module} imports {name}"
        for module in of_jobs
        if (path := path_of(module)) is not None
        for name, within in imports_of(path)
        if within and name not in loaded | BUILT_IN | START_ONLY
    }
    assert not forgotten


@pytest.mark.parametrize("name", [*MODULES, *FOR_SEVERAL_HOSTS, *BEFORE_SEVERAL_HOSTS])
def test_every_module_that_is_named_is_there(name: str) -> None:
    """One that cannot be imported is passed over in silence."""
    assert path_of(name) is not None or name in sys.stdlib_module_names
