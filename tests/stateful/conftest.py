"""Hypothesis settings of the state machines: `HYPOTHESIS_PROFILE=explore` looks further, with new examples."""

import os

from hypothesis import HealthCheck, settings

# some four in ten examples are cut short by the engine of Hypothesis: so many make 200 of full length
_CI_EXAMPLES = 360
_SLOW_IS_FINE = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)
settings.register_profile(
    "ci",
    max_examples=_CI_EXAMPLES,
    stateful_step_count=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=_SLOW_IS_FINE,
)
settings.register_profile(
    "explore", max_examples=1000, stateful_step_count=100, deadline=None, suppress_health_check=_SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
