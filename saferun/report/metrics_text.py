"""The metrics of a launch on one host, as node_exporter's textfile collector reads them. Pure.

The format is Prometheus' text format, version 0.0.4, or OpenMetrics 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun import __version__
from saferun.model import Value

METRICS: Mapping[str, tuple[str, str]] = {
    "saferun_info": ("gauge", "The launch: always 1"),
    "saferun_up": ("gauge", "1 while the launch runs, 0 at its end"),
    "saferun_exit_code": ("gauge", "The exit code of saferun, once the launch has ended"),
    "saferun_ranks": ("gauge", "Ranks that run on this host"),
    "saferun_attempt": ("gauge", "The current attempt, 0 for the first"),
    "saferun_progress_age_seconds": ("gauge", "Seconds since a rank of this host has last made progress"),
    "saferun_hang_seconds": ("gauge", "The same while the job is reported as hung, else 0"),
    "saferun_slow_ranks": ("gauge", "Ranks that were reported in this attempt because the others wait for them"),
    "saferun_step": ("gauge", "The last step that a rank of this host has reported by saferun.step, by rank"),
    "saferun_step_metric": ("gauge", "The values that it has reported, by rank and name"),
    "saferun_incidents_total": ("counter", "Hangs and failures that were captured and reported, by kind"),
    "saferun_captures_total": ("counter", "Times that the ranks of this host were captured: stacks and state"),
    "saferun_restarts_total": ("counter", "Restarts after failures"),
    "saferun_retries_total": ("counter", "Retries of a start, by the class of the cause"),
    "saferun_output_bytes_total": ("counter", "Bytes that the ranks of this host have written"),
}
"""Type and help of every metric."""


class Sample(Value):
    """One value of a metric. ``labels``: those that it has besides run_id and host."""

    name: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def metrics_text(samples: Sequence[Sample], *, run_id: str, host: str, is_openmetrics: bool = False) -> str:
    """The content of the file.

    Args:
        samples: all values.
        run_id: marks the launch; several may write to one directory.
        host: this host's name.
        is_openmetrics: in OpenMetrics 1.0, which calls a counter by its name without ``_total`` and marks the end.
    """
    lines: list[str] = []
    for name, (kind, text) in METRICS.items():
        own = [sample for sample in samples if sample.name == name]
        if own:
            family = name.removesuffix("_total") if is_openmetrics else name
            lines += [f"# HELP {family} {text}", f"# TYPE {family} {kind}"]
        for sample in own:
            version = (("version", __version__),) if name == "saferun_info" else ()
            labels = (("run_id", run_id), ("host", host), *version, *sample.labels)
            shown = ",".join(f'{label}="{_escaped(value)}"' for label, value in labels)
            lines.append(f"{name}{{{shown}}} {_number(sample.value)}")
    return "\n".join([*lines, *(["# EOF"] if is_openmetrics else [])]) + "\n"


def _number(value: float) -> str:
    if value != value:  # noqa: PLR0124 - NaN alone
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if isinstance(value, int) else repr(value)


def _escaped(value: str) -> str:
    # A name that is no UTF-8 (the interpreter has surrogates for it) would keep all metrics away.
    name = value[:200].encode(errors="replace").decode()
    return name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
