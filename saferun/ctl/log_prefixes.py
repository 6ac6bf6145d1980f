"""The prefixes of ``saferunctl logs``: those that the run's own console has (``--prefix``).

run.json says what the prefix is made of, and events.jsonl which local ranks there are; neither is trusted. What they do
not say leaves the default prefix.
"""

from __future__ import annotations

import os
import re
from string import Formatter

from saferun.config import DEFAULT_PREFIX
from saferun.console.prefix import FIELDS, check_template, render_legacy, render_template
from saferun.ctl.log_reading import LogName
from saferun.errors import UsageError, printable, suppress
from saferun.files.run_files import RUN_JSON, names_in, open_run, read_json
from saferun.linux.ownership import CAREFULLY, check_regular
from saferun.model import Value
from saferun.text.decoding import MALFORMED, display_text, loads, number, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LONGEST = 1000
_MOST_NAMES = 100_000
_MOST_EVENTS_BYTES = 16 << 20
_LONGEST_EVENT = 4 << 20
_JOINED = b'{"event": "HostsJoined"'
# Width and kind: a template of another user makes no line of a gigabyte.
_SPEC = re.compile(r"(?:.?[<>^=])?[ +-]?[0-9]{0,2}[dsx]?")


class _Template(Value):
    """What the prefixes of a host are made of. ``text`` None: no prefix; ``is_legacy``: it has torchrun's macros."""

    text: str | None
    is_legacy: bool = False
    role: str = "default"
    hostname: str = ""


_DEFAULT = _Template(DEFAULT_PREFIX)


class Prefixes:
    """The prefix of each rank.

    Args:
        path: the run directory.
        template: what the user wants instead, as of ``--prefix``; None: the run's own.

    Raises:
        UsageError: the template has fields that there are not.
    """

    def __init__(self, path: str, template: str | None) -> None:
        if template not in {None, "none"}:
            check_template(str(template))
        self._path = path
        self._wanted = template
        self._templates: dict[str, _Template] = {}
        self._local_ranks: dict[tuple[str, int], dict[int, int]] = {}
        self.is_final = True
        """Whether all that was asked for has been in the run's files; what was not may come yet."""

    def of(self, name: LogName) -> bytes:
        """The prefix of a file's lines."""
        template = self._templates.get(name.host)
        if template is None:
            found = self._read_template(name.host)
            if found is None:
                self.is_final = False
            else:
                self._templates[name.host] = found
            template = found or _DEFAULT
        if self._wanted is not None:
            template = template._replace(text=None if self._wanted == "none" else self._wanted, is_legacy=False)
        return self._text(template, name).encode(errors="backslashreplace")

    def _text(self, template: _Template, name: LogName) -> str:
        if template.text is None:
            return ""
        local_rank = 0
        if "local_rank" in template.text:
            found = self._local_rank(name)
            if found is None:
                return self._text(_DEFAULT, name)
            local_rank = found
        if template.is_legacy:
            hostname = template.hostname or name.host
            shown = render_legacy(
                template.text, hostname=hostname, rank=name.rank, local_rank=local_rank, role=template.role
            )
        else:
            shown = render_template(
                template.text, host=name.host, rank=name.rank, local_rank=local_rank, role=template.role
            )
        return "\t".join(map(printable, shown.split("\t")))

    def _read_template(self, host: str) -> _Template | None:
        """From the host's own run.json, else from that of the leader; None: there is none."""
        try:
            fd = open_run(self._path)
        except OSError:
            return None
        try:
            with suppress(OSError):
                folder = os.open(host, _DIRECTORY, dir_fd=fd)
                try:
                    for name in sorted(names_in(folder, _MOST_NAMES)):
                        if name.startswith("run") and name.endswith(".json"):
                            return _template(folder, name)
                finally:
                    os.close(folder)
            return _template(fd, RUN_JSON)
        finally:
            os.close(fd)

    def _local_rank(self, name: LogName) -> int | None:
        key = (name.host, name.attempt)
        if key not in self._local_ranks:
            for attempt, ranks in self._read_ranks(name.host).items():
                self._local_ranks.setdefault((name.host, attempt), ranks)
            self._local_ranks.setdefault(key, {})
        return self._local_ranks[key].get(name.rank)

    def _read_ranks(self, host: str) -> dict[int, dict[int, int]]:
        """By attempt and rank the local ranks of a host."""
        ranks_by_attempt: dict[int, dict[int, int]] = {}
        with suppress(OSError):
            fd = open_run(self._path)
            try:
                folder = os.open(host, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            try:
                for name in names_in(folder, _MOST_NAMES):
                    if name.startswith("events") and name.endswith(".jsonl"):
                        for line in _joined(folder, name):
                            with suppress(*MALFORMED):
                                event = loads(line, longest=_LONGEST_EVENT)
                                ranks = ranks_by_attempt.setdefault(number(event["attempt"]), {})
                                for assignment in event["placement"]["ranks"]:
                                    ranks[number(assignment["rank"])] = number(assignment["local_rank"])
            finally:
                os.close(folder)
        return ranks_by_attempt


def _template(fd: int, name: str) -> _Template | None:
    """What a run.json says; None: there is none."""
    try:
        content = read_json(fd, name)
    except (OSError, *MALFORMED):
        return None
    try:
        prefix = content["prefix"]
        role, hostname = display_text(prefix["role"], _LONGEST), display_text(prefix["hostname"], _LONGEST)
        template, is_legacy = prefix["template"], prefix["is_legacy"] is True
        if template is not None:
            template = text(template, _LONGEST)
            if not is_legacy:
                if not _is_harmless(template):
                    return _DEFAULT
                check_template(template)
        return _Template(template, is_legacy, role, hostname)
    except (UsageError, *MALFORMED):  # or of an earlier version
        return _DEFAULT


def _is_harmless(template: str) -> bool:
    """Whether a template has fields alone, and no attributes of them or large widths."""
    return all(
        field is None or (field in FIELDS and not conversion and _SPEC.fullmatch(spec or "") is not None)
        for _, field, spec, conversion in Formatter().parse(template)
    )


def _joined(folder: int, name: str) -> Iterator[bytes]:
    """The events of a file that say which ranks a host has."""
    with suppress(OSError):
        file = os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=folder)
        with open(file, "rb") as stream:
            check_regular(os.fstat(file), name)
            left = _MOST_EVENTS_BYTES
            while left > 0 and (line := stream.readline(_LONGEST_EVENT)):
                left -= len(line)
                if line.startswith(_JOINED):
                    yield line
