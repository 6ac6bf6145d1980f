"""``saferunctl health``: whether this host is fit for a job, for schedulers and people.

It waits for nothing for long: the checks run in a process of their own, which may be lost. A check that breaks or is
late counts as passed, since a host is not taken out of use for a fault of saferun's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from saferun.console.stderr import print_error
from saferun.ctl.answer import answer, answer_json, discard_output
from saferun.errors import UsageError, printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.host_fault import HostFault
    from saferun.model import JsonObject
    from saferun.preflight.results import CheckResult

SCHEMA = "saferun.health/1"
_LONGEST_S = 3600.0
_MOST_GPUS = 1024
_HOST_RECORD = "/run/saferun/health.json"
EPILOG = (
    "Exit code: 0 the host is healthy, or could not be checked; 1 its own hardware or system is at fault (stdout says "
    "what); 2 a usage error. Counters of network interfaces are compared with those of the run before, which root "
    f"keeps in {_HOST_RECORD}. docs/health.md shows how Slurm and Kubernetes call it."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--full", action="store_true", help="also multiply matrices for a second and run an all_reduce, with torch"
    )
    parser.add_argument(
        "--path",
        action="append",
        default=[],
        metavar="PATH",
        help="storage that has to answer; can be given several times",
    )
    parser.add_argument("--gpus", type=int, default=-1, metavar="N", help="how many GPUs the host has to have")
    parser.add_argument(
        "--strict", action="store_true", help="exit with 1 for all warnings, also if the host itself is not at fault"
    )
    parser.add_argument("--brief", action="store_true", help="print one line, or nothing if the host is healthy")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.add_argument(
        "--record",
        default="",
        metavar="FILE",
        help=f"where the counters are kept for the next run; none: nowhere (default: root's {_HOST_RECORD})",
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="for all checks but --full (default: 30)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Check, and answer on stdout. 1 where the host is not fit for a job."""
    if not 1.0 <= arguments.timeout <= _LONGEST_S:
        raise UsageError(f"--timeout {arguments.timeout:g} is out of range", "use 1 to 3600 seconds")
    if arguments.gpus > _MOST_GPUS:
        raise UsageError(f"--gpus {arguments.gpus} is out of range", f"use 0 to {_MOST_GPUS}")
    code = 0
    try:
        results, faults = _checked(arguments)
        warnings = [result for result in results if result.verdict in {"warn", "fail"}]
        code = 1 if faults or (arguments.strict and warnings) else 0
        _answer(arguments, results, faults, is_bad=code != 0)
    except BrokenPipeError:
        discard_output()  # the reader has seen enough
    except Exception as error:
        # What breaks here must not take a host out of use, and what cannot be printed must not bring one back.
        print_error(printable(f"saferunctl health: {type(error).__name__}: {error}"))
        if isinstance(error, OSError):
            discard_output()
    return code


def _checked(arguments: argparse.Namespace) -> tuple[Sequence[CheckResult], Sequence[HostFault]]:
    from saferun.diagnosis.host_fault import found_faults
    from saferun.preflight.host_health import check_host
    from saferun.preflight.outcome import findings_of

    results = check_host(
        storage=arguments.path,
        gpus=arguments.gpus,
        full=arguments.full,
        record=arguments.record,
        timeout_s=arguments.timeout,
    )
    return results, found_faults(findings_of(results), 1, is_launch=False)


def _answer(
    arguments: argparse.Namespace, results: Sequence[CheckResult], faults: Sequence[HostFault], *, is_bad: bool
) -> None:
    if arguments.json:
        answer_json(_as_json(results, faults, is_bad=is_bad))
    elif arguments.brief:
        texts = [fault.reason for fault in faults]
        if not texts and is_bad:
            texts = [result.message for result in results if result.verdict in {"warn", "fail"}]
        answer("; ".join(texts) + "\n" * bool(texts))
    else:
        answer(_as_table(results, is_bad=is_bad))


def _as_table(results: Sequence[CheckResult], *, is_bad: bool) -> str:
    from saferun.preflight.findings_text import show
    from saferun.preflight.results import Preflight

    duration_s = max((result.duration_s for result in results), default=0.0)
    table = show(Preflight(tuple(results), duration_s=duration_s), {}, as_json=False)
    return f"{table}{os.uname().nodename.partition('.')[0]} is {'not fit for a job' if is_bad else 'healthy'}\n"


def _as_json(results: Sequence[CheckResult], faults: Sequence[HostFault], *, is_bad: bool) -> JsonObject:
    from saferun.preflight.json_report import preflight_json
    from saferun.preflight.results import Preflight

    content = preflight_json(Preflight(tuple(results)), {})
    return {
        "schema": SCHEMA,
        "saferun_version": content["saferun_version"],
        "host": os.uname().nodename,
        "healthy": not is_bad,
        "faults": [{"kind": fault.kind, "reason": fault.reason} for fault in faults],
        "results": content["results"],
    }
