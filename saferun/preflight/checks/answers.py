"""What a check answers. Its name and the time that it took are added by ``run_checks``."""

from __future__ import annotations

from collections.abc import Iterable

from saferun.preflight.results import CheckResult

Facts = Iterable[tuple[str, str]]


def ok(message: str, facts: Facts = (), *, hint: str = "") -> CheckResult:
    """All is as it should be."""
    return CheckResult("", "ok", message, hint, tuple(facts))


def skipped(message: str, facts: Facts = ()) -> CheckResult:
    """It could not be checked, or not yet."""
    return CheckResult("", "skipped", message, facts=tuple(facts))


def warning(
    message: str, hint: str, facts: Facts = (), *, class_name: str = "", transient: bool = False
) -> CheckResult:
    """Something is wrong that may do harm. The arguments are the fields of ``CheckResult``."""
    return CheckResult("", "warn", message, hint, tuple(facts), class_name=class_name, transient=transient)


def failure(
    message: str, hint: str, facts: Facts = (), *, class_name: str = "", transient: bool = False
) -> CheckResult:
    """Something is wrong with which the launch cannot work."""
    return warning(message, hint, facts, class_name=class_name, transient=transient)._replace(verdict="fail")
