"""How long a failed start waits before each further try, as tenacity has it. Pure.

Loaded by a process beside the supervisor: tenacity brings asyncio with it.
"""

from __future__ import annotations

from tenacity import Retrying, retry_if_result, stop_after_attempt, wait_exponential_jitter

from saferun.supervisor.policy.attempts import LONGEST_WAIT_S


def retry_waits_s(first_s: float, count: int) -> list[float]:
    """The waits before so many retries, in seconds.

    Each is twice as long as the previous one, up to a minute; up to as much as the first one is added as jitter.

    Args:
        first_s: the first one, in seconds.
        count: how many.
    """
    if first_s <= 0:
        return [0.0] * count
    # In units of the first wait: what sets that has had more than one name.
    wait = wait_exponential_jitter(max=max(1.0, LONGEST_WAIT_S / first_s), jitter=1)
    waits: list[float] = []
    # A call that always fails is tried as often as there are retries, and nothing sleeps.
    retrying = Retrying(
        wait=wait,
        stop=stop_after_attempt(count + 1),
        sleep=lambda wait_s: waits.append(first_s * wait_s),
        retry=retry_if_result(lambda _: True),
        retry_error_callback=lambda _: None,
    )
    retrying(lambda: None)
    return waits
