"""``saferunctl stop``: end a running job in good order, on all its hosts, as SIGTERM to saferun does."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Mapping

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.durations import seconds_of
from saferun.ctl.live_run import LiveRun, ask_living
from saferun.ctl.run_directory import add_run_argument, find_run, state_of
from saferun.errors import UsageError
from saferun.files.run_files import RunEnd, RunState
from saferun.model import JsonObject
from saferun.text.wording import count_text

# run.json is written when saferun has closed its control socket.
_END_WRITTEN_S = 10.0
_INTERVAL_S = 0.02
_LONGEST_S = 30 * 86400.0
_SIGNAL, _TIMEOUT = "USR1", "10min"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    add_run_argument(parser, is_required=True)
    add_common_arguments(parser)
    parser.add_argument(
        "--after-checkpoint",
        action="store_true",
        help="send the ranks the signal on which they save a checkpoint, and wait until they end by themselves",
    )
    parser.add_argument(
        "--signal",
        metavar="NAME",
        help="with --after-checkpoint: USR1 (the default, as with Slurm's --signal), USR2, …",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="with --after-checkpoint: how long to wait before ranks are stopped: 90s, 10min (the default), 2h",
    )


def _signum(text: str) -> int:
    name = text.upper()
    try:
        return int(signal.Signals[name if name.startswith("SIG") else f"SIG{name}"])
    except KeyError:
        raise UsageError(f"--signal {text} is no signal", "use the name of one: USR1, USR2") from None


def _timeout_s(text: str) -> float:
    seconds = float(text) if text.isdecimal() and len(text) < 8 else seconds_of("--timeout", text)  # noqa: PLR2004
    if not 0 < seconds <= _LONGEST_S:
        raise UsageError(f"--timeout {text} is out of bounds", "use a time from 1s to 30d")
    return seconds


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Those that ``kill`` has as well."""
    parser.add_argument("--no-wait", action="store_true", help="do not wait until the job has ended")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Have the job end. Returns 0 when it has; 1: that is not known."""
    if arguments.after_checkpoint:
        signum = _signum(_SIGNAL if arguments.signal is None else arguments.signal)
        timeout_s = _timeout_s(_TIMEOUT if arguments.timeout is None else arguments.timeout)
        return end_job(arguments, "checkpoint", signum=signum, timeout_s=timeout_s)
    for name, value in (("--signal", arguments.signal), ("--timeout", arguments.timeout)):
        if value is not None:
            raise UsageError(f"{name} needs --after-checkpoint", "add that, or leave it out to stop the ranks at once")
    return end_job(arguments, "stop")


def end_job(arguments: argparse.Namespace, subcommand: str, **fields: float) -> int:
    """Have the job end. ``fields``: of the request."""
    live, reply = ask_living(find_run(arguments.run_dir, ends=True), subcommand, **fields)
    try:
        if not arguments.json:
            answer(f"{live.shown}: {_what_follows(reply, subcommand, fields)}\n")
        end = None if arguments.no_wait else _await_end(live)
    finally:
        live.close()
    if arguments.json:
        answer_json(_as_json(live, subcommand, end))
    elif end is not None:
        answer(f"{live.shown}: {_end_text(end)}\n")
    return 0 if end is None or _end_of(end) is not None else 1


def _what_follows(reply: JsonObject, subcommand: str, fields: Mapping[str, float]) -> str:
    ranks, grace_s = reply.get("ranks"), reply.get("grace_s")
    hosts = reply.get("hosts")
    whom = count_text(ranks, "rank") if isinstance(ranks, int) else "the ranks"
    if isinstance(hosts, int) and hosts > 1:
        whom = f"the ranks of {hosts} hosts"
    if ranks == 0:
        return "no rank runs now; there is no other attempt"
    if subcommand == "kill":
        return f"killing {whom}"
    if subcommand == "checkpoint":
        name = signal.Signals(int(fields["signum"])).name
        where = " of its host" if isinstance(hosts, int) and hosts > 1 else ""
        return (
            f"{name} to the {reply.get('handling')} of {reply.get('ranks')} ranks{where} that handle it; "
            f"what has not ended after {fields['timeout_s']:g} s is stopped"
        )
    grace = f", and SIGKILL after {grace_s:g} s" if isinstance(grace_s, float | int) else ""
    return f"stopping {whom}: SIGTERM{grace}"


def _await_end(live: LiveRun) -> RunState:
    ended = live.wait_for_end()
    give_up_at = time.monotonic() + _END_WRITTEN_S
    while (state := state_of(live.directory)).is_living and time.monotonic() < give_up_at:
        time.sleep(_INTERVAL_S)
    # What run.json says may be the end of a host that left the job before. A saferun that was killed has not said any.
    return ended if _end_of(ended) is not None or _end_of(state) is None else state


def _end_of(state: RunState | None) -> RunEnd | None:
    return state.record.end if state is not None and state.record is not None else None


def _end_text(state: RunState) -> str:
    end = _end_of(state)
    if end is None:
        return "its saferun process has closed the connection without saying how it ended; see saferunctl status"
    return f"it has ended: {state.name}, exit code {end.exit_code}"


def _as_json(live: LiveRun, subcommand: str, state: RunState | None) -> JsonObject:
    end = _end_of(state)
    return {
        "run": str(live.directory),
        "run_id": live.record.run_id,
        "asked": subcommand,
        "state": state.name if state is not None and end is not None else None,
        "exit_code": end.exit_code if end is not None else None,
    }
