"""The ranks' directories in private temporary directories: for error files and logs that are in no run directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.files.file_stream import Files, WriterAnswer
from saferun.linux.children import fork
from saferun.linux.scratch import Scratch, logs_id


class RankScratch:
    """The temporary directories of one launch, with directories of its ranks in them.

    Args:
        run_id: the run's id.
        warn: takes one line: where the logs are, or that there are no error files.
        files: makes and removes what is not in memory.
    """

    def __init__(self, run_id: str, warn: Callable[..., None], files: Files) -> None:
        self._run_id = run_id
        self._warn = warn
        self._files = files
        self._has_asked = False
        self.scratch = Scratch(run_id)
        """The run's own directories, which go away when it ends."""
        self.logs_path = ""
        """Where the ranks' log files are that stay in a temporary directory, once it is known."""

    def make(
        self,
        attempt: int,
        ranks: Sequence[int],
        on_made: Callable[[list[str] | OSError], None],
        *,
        is_large: bool = False,
    ) -> None:
        """Have the ranks' directories of an attempt made in a private temporary directory; logs have their own.

        Args:
            attempt: the attempt's number.
            ranks: the ranks.
            on_made: takes the directories, or why there is none for logs. Where a file system does not answer, or has
                no room for error files, the ranks are not kept from their start: the directories are where they will
                be, or empty.
            is_large: logs that the user wants: they may be too large for memory, and stay, as torchrun's do.
        """
        names = [os.path.join(f"attempt_{attempt}", f"rank_{rank}") for rank in ranks]
        made = [] if is_large else self._made_in_memory(names)
        if made:
            on_made(made)
            return

        def on_answer(answer: WriterAnswer | None) -> None:
            if answer is not None and answer.error is not None:
                if not is_large:
                    self._warn(f"no error files of the ranks: {answer.error.filename}: {answer.error.strerror}")
                on_made(answer.error if is_large else [""] * len(names))
                return
            base = Scratch(logs_id(self._run_id)).expected_path() if is_large else ""
            if answer is not None:
                base, device, inode = answer.value
                if not is_large:
                    self.scratch.note(base, (device, inode))
            if is_large and not self.logs_path:
                self.logs_path = base
                self._warn(f"the log files of the ranks are in {base}; they stay there")
            on_made([os.path.join(base, name) if base else "" for name in names])

        self._has_asked = True
        self._files.ask("make_scratch_directories", [self._run_id, int(is_large), list(names)], on_answer)

    def _made_in_memory(self, names: Sequence[str]) -> list[str]:
        """Directories in memory, made at once; none where there is no memory for them."""
        with suppress(OSError):
            base = self.scratch.in_memory_path()
            for name in names:
                os.makedirs(os.path.join(base, name), exist_ok=True)
            return [os.path.join(base, name) for name in names]
        return []

    def close(self) -> None:
        """Have the run's own directories removed. Logs stay."""
        made = self.scratch.made
        if made and self._files.is_stalled:
            # The place may be as dead as what the writer hangs in, or it may not.
            with suppress(OSError):
                fork(self.scratch.close)
            made = []
        if made or self._has_asked:
            self._files.ask("remove_directories", [made])
            self.scratch.forget()
