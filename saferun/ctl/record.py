"""``saferunctl record``: where ranks spend their time, as a flame graph and for speedscope."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from saferun.ctl.answer import answer, answer_json
from saferun.ctl.durations import seconds_of
from saferun.ctl.output_files import write_output
from saferun.ctl.rank_lists import ranks_of
from saferun.ctl.run_directory import TARGET_HELP
from saferun.errors import UsageError, printable

if TYPE_CHECKING:
    from saferun.captures.recording import Recording

_NAMED_CALLS = 3
_LONGEST_NAME = 60
_IDLE_HINT = "with --idle threads count that wait, too"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the subcommand."""
    parser.add_argument(
        "target",
        nargs="?",
        default="latest",
        metavar="PID|RUN",
        help=TARGET_HELP,
    )
    parser.add_argument("--rank", metavar="3,5-7", help="only these ranks; without it all, 64 at most")
    parser.add_argument("--seconds", default="30", metavar="N", help="how long (30 by default, 600 at most)")
    parser.add_argument("--rate", type=int, default=100, metavar="N", help="samples a second (100 by default)")
    parser.add_argument("--idle", action="store_true", help="also threads that wait: in sleep, in I/O, for a lock")
    parser.add_argument(
        "--output", metavar="NAME", help="write NAME.svg and NAME.speedscope.json; the default has the run's name"
    )
    parser.add_argument("--json", action="store_true", help="what was recorded, as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Record, write the files, and say where the time went."""
    from saferun.captures.wire import FASTEST_RECORDING  # slow to import, as all that reads processes

    seconds, ranks = _seconds(arguments.seconds), _ranks(arguments.rank)
    if not 1 <= arguments.rate <= FASTEST_RECORDING:
        raise UsageError(f"--rate {arguments.rate} is out of bounds", f"use a number from 1 to {FASTEST_RECORDING}")
    _require_folder(arguments.output or "record")
    from saferun.captures.recording import RecordOptions
    from saferun.ctl.recorded_ranks import record_ranks

    options = RecordOptions(seconds, arguments.rate, arguments.idle)
    notice = "" if arguments.json else f"recording for {seconds:g} s …\n"
    recorded = record_ranks(arguments.target, ranks, options, on_begin=lambda: answer(notice))
    found = recorded.recordings
    if not any(one.samples for _, one in found):
        failure = next((one.failure for _, one in found if one.failure), "")
        hint = "as the user whose processes they are, or as root; see saferunctl doctor" if failure else _IDLE_HINT
        raise UsageError(f"nothing was recorded: {failure or 'the threads only waited'}", hint, exit_code=1)
    name = arguments.output or f"record-{_plain(recorded.name)}-{time.strftime('%H%M%S')}"
    paths = _write(name, found, options.rate, recorded.name)
    if arguments.json:
        answer_json(_as_json(found, recorded.remarks, paths))
    else:
        answer("".join(f"{line}\n" for line in _lines(found, recorded.remarks, paths)))
    return 0


def _seconds(text: str) -> float:
    from saferun.captures.wire import LONGEST_RECORDING_S

    seconds = float(text) if re.fullmatch(r"[0-9]{1,6}", text) else seconds_of("--seconds", text)
    if not 1 <= seconds <= LONGEST_RECORDING_S:
        raise UsageError(f"--seconds {text} is out of bounds", f"use a time from 1 s to {LONGEST_RECORDING_S:g} s")
    return seconds


def _ranks(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    from saferun.captures.wire import MOST_RECORDED

    spans = ranks_of("--rank", text)
    if sum(map(len, spans)) > MOST_RECORDED:
        raise UsageError(f"--rank {text} are too many ranks", f"name {MOST_RECORDED} at most")
    return tuple(sorted({rank for span in spans for rank in span}))


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:_LONGEST_NAME].lstrip(".-") or "run"


def _require_folder(name: str) -> None:
    """A recording that cannot be written is not worth waiting for."""
    folder = os.path.dirname(os.path.abspath(name))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} is not a directory that can be written to", "write elsewhere with --output NAME")


def _write(name: str, found: Sequence[tuple[str, Recording]], rate: int, run: str) -> list[str]:
    from saferun.report.flame_graph import flame_svg, speedscope_profiles

    title = printable(f"{run}: {len(found)} rank{'s' if len(found) != 1 else ''}")
    stacks = [((f"rank {one.rank}", *stack.frames), stack.samples) for _, one in found for stack in one.stacks]
    profiles = {
        f"rank {one.rank} ({host})" if host else f"rank {one.rank}": [
            (stack.frames, stack.samples) for stack in one.stacks
        ]
        for host, one in found
    }
    contents = {
        f"{name}.svg": flame_svg(stacks, title),
        f"{name}.speedscope.json": json.dumps(speedscope_profiles(profiles, rate, title)),
    }
    for path, content in contents.items():
        write_output(path, content.encode(errors="backslashreplace"))
    return list(contents)


def _lines(found: Sequence[tuple[str, Recording]], remarks: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    for host, one in found:
        where = f"rank {one.rank}" + (f" ({printable(host)})" if host else "")
        if one.failure:
            yield f"{where}: {printable(one.failure)}"
            continue
        # The innermost call of each stack.
        calls = Counter[str]()
        for stack in one.stacks:
            calls[stack.frames[-1]] += stack.samples
        shares = [
            f"{count / one.samples * 100:.0f} % {printable(_short(frame))}"
            for frame, count in calls.most_common(_NAMED_CALLS)
        ]
        yield f"{where}: {one.samples} samples; {', '.join(shares) or 'its threads only waited: see --idle'}"
        if one.left_out:
            yield f"{where}: {one.left_out} samples of rare stacks found no room"
    yield from remarks
    yield f"flame graph: {printable(paths[0])}, for a browser"
    yield f"speedscope: {printable(paths[1])}, for https://www.speedscope.app"


def _short(frame: str) -> str:
    """A call with the file's own name only."""
    function, bracket, location = frame.rpartition(" (")
    return f"{function} ({os.path.basename(location)}" if bracket else frame


def _as_json(found: Sequence[tuple[str, Recording]], remarks: Sequence[str], paths: Sequence[str]) -> dict[str, object]:
    ranks = [
        {"rank": one.rank, "pid": one.pid, "host": host, "samples": one.samples, "failure": one.failure}
        for host, one in found
    ]
    return {"ranks": ranks, "files": [os.path.abspath(path) for path in paths], "remarks": list(remarks)}
