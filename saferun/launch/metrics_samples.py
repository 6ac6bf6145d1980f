"""The numbers of a launch that ``--metrics`` and ``--metrics-port`` show."""

from __future__ import annotations

from saferun.launch.launch_context import LaunchContext
from saferun.report.metrics_text import Sample, metrics_text


class MetricsSamples:
    """The numbers of this host's launch, as they are now.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._ranks: list[int] = []

    def text(self, exit_code: int | None = None, *, is_openmetrics: bool = False) -> str:
        """All of them in Prometheus' format. ``exit_code``: saferun's, if the launch is over; -1: not known."""
        context = self._context
        host = context.investigation.log.host
        samples = self._samples(exit_code)
        return metrics_text(samples, run_id=context.run_id, host=host, is_openmetrics=is_openmetrics)

    def _samples(self, exit_code: int | None) -> list[Sample]:
        context, log = self._context, self._context.investigation.log
        # Of the attempts before, and of the current one: the streams of one that is over are closed.
        output_bytes = context.ranks.ended_output_bytes + sum(rank.output_bytes() for rank in context.current.ranks)
        idle_s = context.investigation.hangs.idle_s() if context.current.living() else 0.0
        counted = log.counted(context.attempt)
        samples = [
            Sample("saferun_info", 1),
            Sample("saferun_up", exit_code is None),
            Sample("saferun_ranks", len(context.current.living())),
            Sample("saferun_attempt", context.attempt),
            Sample("saferun_progress_age_seconds", idle_s),
            Sample("saferun_hang_seconds", idle_s if counted.is_hung else 0.0),
            Sample("saferun_slow_ranks", counted.slow),
            *self._steps(),
            Sample("saferun_incidents_total", counted.hangs, (("kind", "hang"),)),
            Sample("saferun_incidents_total", counted.failures, (("kind", "failure"),)),
            Sample("saferun_captures_total", log.captures),
            Sample("saferun_restarts_total", counted.restarts),
            *(Sample("saferun_retries_total", count, (("class", name),)) for name, count in counted.retries.items()),
            Sample("saferun_output_bytes_total", output_bytes),
        ]
        return samples if exit_code is None else [*samples, Sample("saferun_exit_code", exit_code)]

    def _steps(self) -> list[Sample]:
        """What the scripts of the ranks have reported by saferun.step."""
        context, samples = self._context, []
        # At the end of the launch there are none any more, and what they reported last is shown.
        self._ranks = [rank.assignment.rank for rank in context.current.ranks] or self._ranks
        for rank in self._ranks:
            state = context.investigation.hook.script_state(context.attempt, rank)
            if state is not None and state.step >= 0:
                of_rank = ("rank", str(rank))
                samples.append(Sample("saferun_step", state.step, (of_rank,)))
                samples += [
                    Sample("saferun_step_metric", value, (of_rank, ("name", name))) for name, value in state.metrics
                ]
        return samples
