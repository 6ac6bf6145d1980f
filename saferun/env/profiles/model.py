"""Values of the env profiles: what a profile says, and what is left of it on one host. Pure."""

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


class Place(Value):
    """Where something stands: a file and a line, counted from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        """As compilers and editors write it; names of files may hold anything, and terminals obey some of it."""
        return f"{self.path if self.path.isprintable() else repr(self.path)}:{self.line}"


class RankValue(Value):
    """The value for the ranks from ``first`` to ``last``, both included."""

    first: int
    last: int
    value: str


class Variable(Value):
    """One environment variable as a profile states it.

    Args:
        name: the variable.
        value: a template (see ``saferun.env.profiles.templates``), or None: only the ranks named below get a value.
        place: where it is stated.
        ranks: values for some global ranks, before ``value``.
        local_ranks: values for some local ranks, after ``ranks`` and before ``value``.
        why: what it is good for.
        cost: what it costs a healthy job.
        vendor: whose GPUs it is for; ``any`` holds on every host.
        versions: (component, range) pairs that must all hold, see ``saferun.env.profiles.versions``.
        breaks_with: (component, range) pairs it is known to hang or break with.
        source: URL of the documentation.
        reader: the libraries that read it, or ``python: MODULE``.
        same_as: other names of the same setting: where one is set, this variable steps back.
        needs_file: a file without which it means nothing.
        together_with: another variable of the same profile: where that is not set by it, this one is left out too.
        force: whether it also replaces what the user's environment sets.
    """

    name: str
    value: str | None
    place: Place
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


class Removal(Value):
    """A variable that a profile takes out: of earlier profiles, and with ``force`` of the user's environment too."""

    name: str
    place: Place
    force: bool = False


class Profile(Value):
    """A named set of environment variables. Several variables of one name are alternatives: the first that fits."""

    name: str
    place: Place
    description: str = ""
    extends: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    unset: tuple[Removal, ...] = ()


class Setting(Value):
    """A variable that the ranks get.

    ``origin`` says in words who set it; ``replaces`` is the value of the user's environment that it displaced.
    """

    variable: Variable
    profile: str | None  # None: --env
    origin: str
    replaces: str | None = None


class Kept(Value):
    """A variable of a profile that stepped back because the user's environment already sets it.

    ``found`` is the name found there: the variable's own, or another name of the same setting.
    """

    variable: Variable
    profile: str
    found: str
    differs: bool


class Skipped(Value):
    """A variable of a profile that does not hold here, and why."""

    variable: Variable
    profile: str
    reason: str


class Removed(Value):
    """A variable taken out of what the ranks inherit, and by whom."""

    name: str
    origin: str


class Resolution(Value):
    """What env profiles, ``--env`` and ``--unset`` come to on one host. All parts are in the order of their names."""

    profiles: tuple[str, ...]
    settings: tuple[Setting, ...] = ()
    kept: tuple[Kept, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    removed: tuple[Removed, ...] = ()
