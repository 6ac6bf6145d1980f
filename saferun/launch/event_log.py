"""What a launch writes about itself: run.json, its events, one a line, and its story when something goes wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping

from saferun.launch.launch_context import LaunchContext
from saferun.linux.helper import PartBase
from saferun.linux.process_identity import own_identity
from saferun.linux.scratch import current_directory
from saferun.model import JsonObject
from saferun.supervisor.events import Event
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.report.report_json import Outcome
    from saferun.report.run_json import LaunchEnd

# Of ranks that were slow run.json has one more.
_MOST_SLOW = 19
# Fields of events, and of what is in them, that events.jsonl has under another name.
_NAMES_IN_FILE = {
    "FailureFacts": {"is_start_over": "started", "transient_override": "transient", "progress": "life"},
    "HangVerdict": {"lasted_s": "quiet_s"},
    **{key: {"idle_s": "quiet_s"} for key in ("SignalReceived", "StopRequested", "RestartRequested", "JobAborted")},
}


class EventLog:
    """The events of a launch, and run.json.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._is_described = False
        self._is_planned = False
        self._process = own_identity()
        self._started_at = time.time()
        self._torch_version: str | None = None
        self._environment: Mapping[str, str] | None = None
        self._slow: list[JsonObject] = []
        self._control_socket = ""
        self.ended: JsonObject = {}
        """How the launch ended: its outcome and exit code; empty: it has not."""

    def record(self, event: Event, before: State, after: State) -> None:
        """Write an event that the supervisor has handled, and the state that it led to, if that is another one."""
        fields = _as_json(event)
        entry: JsonObject = {
            "event": type(event).__name__,
            "time": time.time(),
            "monotonic_s": fields.pop("at"),
            **fields,
        }
        if before is not after:
            entry["state"] = after.value
        if self._context.supervisor.remark:
            entry["remark"] = self._context.supervisor.remark
        self._context.run_dir.write_event(entry)

    def note(self, name: str) -> None:
        """Write an event that no decision follows from."""
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": self._context.attempt}
        self._context.run_dir.write_event({"event": name, **at})

    def plan_description(self) -> None:
        """Load what writes run.json, which ``describe`` does once the ranks do not wait for it."""
        if not self._is_planned and self._context.run_dir.path is not None:
            self._is_planned = True
            self._context.imports.import_now(("saferun.report.run_json",))

    def describe(self) -> None:
        """Write run.json, if there is one and it has not been written."""
        if self._is_planned and not self._is_described and self._context.run_dir.path is not None:
            self._is_described = True
            self._write_run_json()

    def write_torch_version(self, torch_version: str | None) -> None:
        """The coordinator has imported torch: run.json says which."""
        self._torch_version = torch_version
        if self._is_described:
            self._write_run_json()

    def add_slow(self, found: JsonObject) -> None:
        """Ranks that the others wait for, for run.json, which has the newest ones."""
        self._slow = [*self._slow[-_MOST_SLOW:], found]
        if self._is_described:
            self._write_run_json()

    def set_control_socket(self, path: str) -> None:
        """Write to run.json where saferunctl finds this launch; without a run directory, to its record elsewhere."""
        self._control_socket = path
        if self._is_described or self._context.run_dir.path is None:
            self._write_run_json()

    def finish(self, exit_code: int, outcome: Outcome, *, headline: str) -> None:
        """Write to run.json how the launch has ended, and the headline of its last incident."""
        self.ended = {"outcome": outcome, "exit_code": exit_code}
        self._is_described = self._context.run_dir.path is not None  # a launch that was refused has not got so far
        if not self._is_described:
            return

        def end() -> LaunchEnd:
            from saferun.report.run_json import LaunchEnd

            return LaunchEnd(time.time(), exit_code, outcome, headline)

        self._write_run_json(end)

    def _write_run_json(self, end: Callable[[], LaunchEnd] | None = None) -> None:
        try:
            from saferun.report.run_json import run_description, run_text, shown_environment

            plan = self._context.current.plan
            if self._environment is None and plan is not None and plan.environs:
                self._environment = shown_environment(plan.environs[0])
            content = run_description(
                self._context.config,
                cwd=current_directory(),
                run_id=self._context.run_id,
                host=self._context.run_dir.host,
                hostname=os.uname().nodename,
                process=self._process,
                started_at=self._started_at,
                directory="" if self._context.config.output.run_dir is not None else self._context.run_dir.name,
                python_version=sys.version.split()[0],
                torch_version=self._torch_version,
                environment=self._environment,
                slow=self._slow,
                control_socket=self._control_socket if end is None else "",
                slurm_job=os.environ.get("SLURM_JOB_ID", ""),
                end=end() if end is not None else None,
            )
            text = run_text(content)
            if self._context.run_dir.path is None:
                self._context.run_dir.write_live_record(text)
            else:
                self._context.run_dir.write_text("run.json", text)
        except Exception as error:  # the ranks run
            self._context.warn(f"run.json cannot be written: {type(error).__name__}: {error}")


class StoryFile(PartBase):
    """A part of the loop: writes story.jsonl after a failure, a hang, or an error of saferun itself.

    Not at once: the user reads first.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._story = context.supervisor.story

    @property
    def deadline(self) -> float | None:
        """At once, where there is something to be written."""
        return 0.0 if self._story.is_wanted else None

    def tick(self, _now: float) -> None:
        """Write the file, if it is wanted."""
        if not self._story.is_wanted:
            return
        self._story.is_wanted = False
        try:
            self._write()
        except Exception as error:
            self._context.warn(f"the story of the launch cannot be written: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The launch is over."""
        self.tick(0.0)

    def _write(self) -> None:
        from saferun.text.redaction import redacted_json

        entries = self._story.entries(time.time() - time.monotonic())
        lines = [json.dumps(redacted_json(entry), default=str) + "\n" for entry in entries]
        self._context.run_dir.write_text("story.jsonl", "".join(lines), of_host=True)


def _as_json(value: Any) -> Any:  # noqa: ANN401
    """Named tuples as objects, all the way down."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is not None:
            names = _NAMES_IN_FILE.get(type(value).__name__, {})
            return {names.get(name, name): _as_json(item) for name, item in zip(fields, value, strict=True)}
        return [_as_json(item) for item in value]
    return value
