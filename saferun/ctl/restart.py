"""``saferunctl restart``: stop the ranks of a running job on all its hosts, and start them again, without a failure."""

from __future__ import annotations

import argparse

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.live_run import find_live
from saferun.ctl.run_directory import add_run_argument, find_run
from saferun.errors import UsageError
from saferun.model import JsonObject

# Ranks have their grace, other hosts meet again, and checks take their time.
_STARTED_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, is_required=True)
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the ranks run again")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Have the ranks started again. Returns 0 when they run."""
    # Of one that is frozen, and goes on later, another one would have asked for the same restart again.
    live = find_live(find_run(arguments.run_dir, ends=True))
    started: JsonObject | None = None
    try:
        reply = live.ask("restart")
        if not arguments.json:
            hosts, ranks = reply.get("hosts"), reply.get("ranks")
            whom = f"the ranks of {hosts} hosts" if hosts != 1 else f"{ranks} rank{'s' if ranks != 1 else ''}"
            grace = f"SIGTERM, and SIGKILL after {reply.get('grace_s')} s"
            answer(f"{live.shown}: stopping {whom} to start them again: {grace}\n")
        if not arguments.no_wait:
            try:
                started = live.next_answer(_STARTED_S)
            except UsageError:
                what = f"{live.shown} has ended, or does not answer, before its ranks ran again"
                raise UsageError(what, "see saferunctl status, and the report of the run", exit_code=1) from None
    finally:
        live.close()
    attempt = started.get("attempt") if started is not None else None
    if arguments.json:
        run_id = live.record.run_id
        answer_json({"run": str(live.directory), "run_id": run_id, "asked": "restart", "attempt": attempt})
    elif started is not None:
        answer(f"{live.shown}: its ranks run again: attempt {attempt}\n")
    return 0
