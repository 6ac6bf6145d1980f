"""Where in the run directory of a job the files of one launch are: what its directories and files are called."""

from __future__ import annotations

import os
from collections.abc import Iterable

from saferun.model import Value

_LONGEST_NAME = 128


class PlaceInJob(Value):
    """The names of a launch's directories and files: of a job of one host, until it has ``joined`` one of several.

    Attributes:
        name: what the run directory is called where the user chose no other.
        host: the name of this host's directory in it.
        suffix: of this process's own files there, before their extension; empty: it is the first one of this host.
        is_part: files about the whole job are written elsewhere.
        has_neighbours: further processes of this launch on this host have the same directory.
        hosts: the names of the directories of all hosts, this one first; empty: they are not known.
        is_late: the job may have been under way before; None: no hosts have met yet.
    """

    name: str
    host: str
    suffix: str = ""
    is_part: bool = False
    has_neighbours: bool = False
    hosts: tuple[str, ...] = ()
    is_late: bool | None = None

    def joined(
        self,
        name: str,
        *,
        host: str,
        is_part: bool,
        task: int,
        tasks: int,
        hosts: Iterable[str] | None,
        is_late: bool,
    ) -> PlaceInJob:
        """The place in a job of several hosts, with the arguments of ``RunDirectory.join``.

        A name that came from another host and is none of a file does not count.
        """
        here = _file_name(host) or self.host
        names = [_file_name(one) for one in hosts or ()]
        # A host whose name is no file's has a directory that only it knows.
        are_known = hosts is not None and not is_part and all(names)
        return PlaceInJob(
            name=_file_name(name) or self.name,
            host=here,
            suffix=f".task_{task}" if task else "",
            is_part=is_part,
            has_neighbours=tasks > 1,
            hosts=(here, *names) if are_known else (),
            is_late=is_late if self.is_late is None else self.is_late,
        )

    def own_name(self, name: str) -> str:
        """What this process calls a file in its host's directory: ``events.jsonl``, ``events.task_1.jsonl``."""
        stem, extension = os.path.splitext(name)
        return f"{stem}{self.suffix}{extension}"


def _file_name(text: str) -> str:
    """What came from another host, as a name of one file; empty where it is none."""
    fine = 0 < len(text) < _LONGEST_NAME and all(char.isalnum() or char in "._-" for char in text)
    return text if fine and not text.startswith(".") else ""
