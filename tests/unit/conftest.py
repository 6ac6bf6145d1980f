"""Settings common to the unit tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow, which is no fault of the code. Counterexamples are printed, not stored.
settings.register_profile(
    "unit",
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("unit")
