"""The story of a launch, in the run directory, when something has gone wrong."""

from __future__ import annotations

import json
import time

from saferun.launch.launch_context import LaunchContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.model import ExitStatus


class StoryFile:
    """A part of the loop: writes story.jsonl after a failure, a hang, or an error of saferun itself.

    Not at once: the user reads first.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._story = context.supervisor.story
        self.pids: set[int] = set()

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

    def on_exit(self, _pid: int, _status: ExitStatus) -> bool:
        """No process is this part's."""
        return False

    def close(self) -> None:
        """The launch is over."""
        self.tick(0.0)

    def _write(self) -> None:
        from saferun.text.redaction import redacted_json

        entries = self._story.entries(time.time() - time.monotonic())
        lines = [json.dumps(redacted_json(entry), default=str) + "\n" for entry in entries]
        self._context.run_dir.write_text("story.jsonl", "".join(lines), of_host=True)
