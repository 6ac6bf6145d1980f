"""The lint of a job on this host, from the interpreter and the environment of its ranks to the findings."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from saferun.env.lint import name_cache
from saferun.env.lint.findings import Finding
from saferun.env.lint.host_facts import read_host_facts
from saferun.env.lint.installation import Installation, find_installation
from saferun.env.lint.known_names import KnownNames
from saferun.env.lint.rules import knobs, lint, names_to_search
from saferun.env.lint.scanner import scan
from saferun.model import Value


class Result(Value):
    """The lint's findings, and what they are based on."""

    findings: tuple[Finding, ...]
    known: KnownNames

    @property
    def at_launch(self) -> tuple[Finding, ...]:
        """The findings that are printed at every launch."""
        return tuple(finding for finding in self.findings if finding.at_launch)

    @property
    def when_asked(self) -> tuple[Finding, ...]:
        """Those, and names that are nearly known ones, also where no library is here that would read them."""
        return tuple(found for found in self.findings if found.at_launch or found.hint.startswith("did you mean "))


def check(
    environ: Mapping[str, str],
    *,
    python: str = sys.executable,
    script: str | None = None,
    cache_directory: str | None = None,
    budget_s: float = 10.0,
) -> Result:
    """Lint the environment of ranks that this interpreter will run on this host.

    Takes up to a second for a new installation, some milliseconds afterwards.

    Args:
        environ: the environment of the ranks.
        python: their interpreter.
        script: the training script, which is searched too.
        cache_directory: where to cache the scan; None: ``$XDG_CACHE_HOME/saferun``.
        budget_s: how long the search may take; an incomplete search makes findings less certain, not wrong.
    """
    host = read_host_facts(environ)
    installation = find_installation(environ, python=python, script=script) if knobs(environ) else None
    if installation is None:
        unsearched = (python,) if knobs(environ) else ()
        known = scan(Installation(()), budget_s=0.0)._replace(unsearched=unsearched)
        return Result(lint(environ, known, host), known)
    cache = cache_directory or name_cache.default_directory(environ)
    known = scan(
        installation, cache_directory=cache, wanted=lambda known: names_to_search(environ, known), budget_s=budget_s
    )
    return Result(lint(environ, known, host), known)
