"""Settings for generated tests: the same examples in every run, no deadlines on a busy machine.

`--hypothesis-profile=hunt` looks for new examples, and for longer.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile("steady", deadline=None, database=None, derandomize=True, suppress_health_check=_SLOW_IS_FINE)
settings.register_profile("hunt", deadline=None, database=None, max_examples=3000, suppress_health_check=_SLOW_IS_FINE)
if settings.get_current_profile_name() != "hunt":
    settings.load_profile("steady")
