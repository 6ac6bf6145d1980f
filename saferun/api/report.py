"""report.json as values. What this version does not know is passed over; ``raw`` has everything."""

from __future__ import annotations

import os

from saferun.errors import SaferunError
from saferun.linux.ownership import CAREFULLY, check_regular
from saferun.model import JsonObject, Value
from saferun.report.report_values import BadHostRow, Cause, CauseOrNone, Decision, Launch, RankFailure, class_named
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit

__all__ = ["BadHostRow", "Cause", "Decision", "Incident", "Launch", "RankFailure", "Report", "SlowRanks", "read_report"]
NAME = "report.json"
_LONGEST_BYTES = 8 << 20
_FAMILY = "saferun.report/"
_SCHEMA = f"{_FAMILY}1"


class Incident(Value):
    """A hang, or the failure of an attempt.

    Attributes:
        kind: ``hang`` or ``failure``.
        attempt: 0 for the first.
        time: seconds since the epoch.
        host: where it was seen.
        headline: what happened, in one line.
        hint: what to do about it.
        outcome: ``continued``, ``recovered``, ``stopped``, ``restarted`` or ``ended``.
        cause: None where it is unknown.
        first_failure: the rank that failed first; None: none did.
        victims: ranks that failed because of it.
        stopped: ranks that saferun stopped because of it.
        findings: what else was found.
    """

    kind: str
    attempt: int = 0
    time: float | None = None
    host: str = ""
    headline: str = ""
    hint: str = ""
    outcome: str = ""
    cause: CauseOrNone = None
    first_failure: RankFailure | None = None
    victims: tuple[int, ...] = ()
    stopped: tuple[int, ...] = ()
    findings: tuple[str, ...] = ()


class SlowRanks(Value):
    """Ranks that the others waited for."""

    time: float | None = None
    attempt: int = 0
    host: str = ""
    ranks: tuple[int, ...] = ()
    waited: float | None = None
    others_waited: float | None = None
    window_s: float | None = None


class Report(Value):
    """What report.json says. ``raw``: all of it; ``path``: where it was read."""

    schema: str
    saferun_version: str
    run: Launch
    incidents: tuple[Incident, ...]
    decisions: tuple[Decision, ...]
    slow_ranks: tuple[SlowRanks, ...]
    path: str
    raw: JsonObject
    bad_hosts: tuple[BadHostRow, ...] = ()

    @property
    def failure(self) -> Incident | None:
        """The failure that the launch ended with; None: it did not fail, or runs."""
        failures = [incident for incident in self.incidents if incident.kind == "failure"]
        return failures[-1] if failures and failures[-1].outcome == "ended" else None


def read_report(path: str | os.PathLike[str]) -> Report:
    """Read report.json.

    Args:
        path: the file, or the run directory.

    Raises:
        SaferunError: there is none, or it cannot be read; its text has a hint.
    """
    name = os.path.realpath(os.fspath(path))
    name = os.path.join(name, NAME) if os.path.isdir(name) else name
    try:
        content = loads(_read(name), longest=_LONGEST_BYTES)
        schema = content["schema"]
        if schema != _SCHEMA:
            raise ValueError(f"its schema is {str(schema)[:40]!r}")
        return _report(name, content)
    except FileNotFoundError:
        hint = "a launch without a hang or failure writes none; --report-html always has it written at every end"
        if os.path.basename(name) != NAME or not os.path.isdir(os.path.dirname(name)):
            hint = f"check the path: it is that of a run directory, or of its {NAME}"
        raise SaferunError(f"there is no {name}", hint) from None
    except OSError as error:
        raise SaferunError(f"{name}: {error.strerror}", "check the path and its permissions") from None
    except MALFORMED as error:
        hint = f"this version reads {_SCHEMA}; saferunctl report --json prints the report of a run"
        raise SaferunError(f"{name} is no report: {error}", hint) from None


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | CAREFULLY)
    with open(fd, "rb") as stream:
        check_regular(os.fstat(fd), path)
        return stream.read(_LONGEST_BYTES + 1)


def _report(path: str, content: JsonObject) -> Report:
    rows = {name: list(map(class_named, content.get(name) or ())) for name in ("incidents", "decisions", "slow_ranks")}
    return Report(
        schema=content["schema"],
        saferun_version=str(content.get("saferun_version", "")),
        run=fit(Launch, content.get("run") or {}),
        incidents=fit(tuple[Incident, ...], rows["incidents"]),
        decisions=fit(tuple[Decision, ...], rows["decisions"]),
        slow_ranks=fit(tuple[SlowRanks, ...], rows["slow_ranks"]),
        path=path,
        raw=content,
        bad_hosts=fit(tuple[BadHostRow, ...], content.get("bad_hosts") or []),
    )
