"""Values of the env profiles: a profile, and its resolution on one host. Pure."""

from __future__ import annotations

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    Cost = Literal["none", "light", "moderate", "heavy"]
    Vendor = Literal["nvidia", "amd", "any"]
else:
    Cost = Vendor = str


COSTS: tuple[Cost, ...] = ("none", "light", "moderate", "heavy")
VENDORS: tuple[Vendor, ...] = ("nvidia", "amd", "any")
COMPONENTS = ("torch", "nccl", "rocm")  # whose versions a variable may depend on


class Location(Value):
    """A position in a file: its path and a line, counted from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        """As compilers and editors write it; file names may hold control characters."""
        return f"{self.path if self.path.isprintable() else repr(self.path)}:{self.line}"


class RankValue(Value):
    """The value for the ranks from ``first`` to ``last``, both included."""

    first: int
    last: int
    value: str


class Variable(Value):
    """One environment variable of a profile.

    Args:
        name: the variable.
        value: a template (see ``saferun.env.profiles.templates``); None: only the ranks below get a value.
        location: where it is defined.
        ranks: values for some global ranks, before ``value``.
        local_ranks: values for some local ranks, after ``ranks`` and before ``value``.
        why: its purpose.
        cost: its cost for a healthy job.
        vendor: the vendor of the GPUs it is for; ``any``: every host.
        versions: (component, range) pairs that must all hold, see ``saferun.env.profiles.version_ranges``.
        breaks_with: (component, range) pairs it is known to hang or break with.
        source: URL of the documentation.
        reader: the libraries that read it, or ``python: MODULE``.
        same_as: other names of the same setting: if the user sets one, this variable is not set.
        needs_file: a file without which it has no effect.
        together_with: another variable of the same profile: if that is not set by it, this one is left out too.
        force: whether it also replaces what the user's environment sets.
        yields_to_nccl_conf: whether it is left out where a file of NCCL or RCCL (``/etc/nccl.conf``) sets it.
    """

    name: str
    value: str | None
    location: Location
    ranks: tuple[RankValue, ...] = ()
    local_ranks: tuple[RankValue, ...] = ()
    why: str = ""
    cost: Cost = "none"
    vendor: Vendor = "any"
    versions: tuple[tuple[str, str], ...] = ()
    breaks_with: tuple[tuple[str, str], ...] = ()
    source: str = ""
    reader: tuple[str, ...] = ()
    same_as: tuple[str, ...] = ()
    needs_file: str = ""
    force: bool = False
    together_with: str = ""
    yields_to_nccl_conf: bool = False


class Removal(Value):
    """A variable that a profile removes: from earlier profiles, and with ``force`` from the user's environment too."""

    name: str
    location: Location
    force: bool = False


class Profile(Value):
    """A named set of environment variables. Several variables of one name are alternatives: the first that fits."""

    name: str
    location: Location
    description: str = ""
    extends: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    unset: tuple[Removal, ...] = ()


class EnvVariable(Value):
    """A variable that the ranks get.

    ``origin`` is what set it, for messages; ``replaces`` is the value of the user's environment that it replaces.
    """

    variable: Variable
    profile: str | None  # None: --env
    origin: str
    replaces: str | None = None


class Kept(Value):
    """A variable of a profile that is not set because the user's environment sets it.

    ``found`` is the name found there: the variable's own, or another name of the same setting.
    """

    variable: Variable
    profile: str
    found: str
    differs: bool


class Skipped(Value):
    """A variable of a profile that does not apply here, and why."""

    variable: Variable
    profile: str
    reason: str


class Removed(Value):
    """A variable that is removed from what the ranks inherit, and what removed it."""

    name: str
    origin: str


class Resolution(Value):
    """The result of env profiles, ``--env`` and ``--unset`` on one host. All parts are sorted by name."""

    profiles: tuple[str, ...]
    settings: tuple[EnvVariable, ...] = ()
    kept: tuple[Kept, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    removed: tuple[Removed, ...] = ()
