"""The launcher's own error file, for the program that started it: the root cause, as under torchrun."""

from __future__ import annotations

import os

from saferun.launch.launch_context import LaunchContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.evidence import Diagnosis
    from saferun.files.file_stream import Answer


def write_error_file(context: LaunchContext, diagnosis: Diagnosis, stop_signum: int | None) -> None:
    """Have TORCHELASTIC_ERROR_FILE written, if it is set.

    Args:
        context: the launch.
        diagnosis: of the attempt that is over.
        stop_signum: the signal that ended it; None: it ended otherwise.
    """
    path = context.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    first, plan = diagnosis.first_failure, context.current.plan
    message, source, returncode = diagnosis.headline, "", 0
    if stop_signum is not None:
        # The text of torchrun's exception, which programs that read this file may know.
        message = f"SignalException: Process {os.getpid()} got signal: {stop_signum}"
    elif first is not None and plan is not None:
        own = next((place for place in plan.placement.ranks if place.rank == first.rank), None)
        if own is not None:
            source = plan.destinations.error_files[plan.position(own)]
            returncode = first.status.returncode

    def on_answer(answer: Answer | None) -> None:
        if answer is None:
            context.warn(f"TORCHELASTIC_ERROR_FILE {path}: the file system does not answer")
        elif answer.error is not None:
            context.warn(f"TORCHELASTIC_ERROR_FILE {path}: {answer.error.strerror}")

    context.run_dir.files.ask("write_error", [path, message, source, returncode], on_answer)
