"""``saferun.debug``: what a script checks about its own ranks, to find a mistake.

Every function says what it costs; none is meant for each step of a healthy training. All but ``locked_print``,
``memory_line``, ``set_checks`` and ``compare_devices`` are for all ranks of a group alike: they meet in the store of
the process group, not by its backend, so that a backend that hangs does not keep them from naming who is missing.
"""

from saferun.api.script.device_comparison import compare_devices
from saferun.api.script.layout_text import describe_dtensor, describe_mesh, fsdp_coverage
from saferun.api.script.rank_agreement import assert_same_rng, compare_across_ranks
from saferun.api.script.rank_meeting import RanksMissingError, all_reduce_check, barrier
from saferun.api.script.rank_prints import locked_print, memory_line, print_in_order
from saferun.api.script.torch_checks import ValueChecks, set_checks

__all__ = [
    "RanksMissingError",
    "ValueChecks",
    "all_reduce_check",
    "assert_same_rng",
    "barrier",
    "compare_across_ranks",
    "compare_devices",
    "describe_dtensor",
    "describe_mesh",
    "fsdp_coverage",
    "locked_print",
    "memory_line",
    "print_in_order",
    "set_checks",
]
