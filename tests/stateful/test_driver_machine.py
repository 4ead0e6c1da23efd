"""The request-level driver over every policy, with and without a reuse filter and a deadline."""

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.policy import POLICIES
from kvtier.testing.driver_machine import DriverMachine


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deadline_s", [5.0, 0.0])
@pytest.mark.parametrize("reuse_filter", ["no filter", "own filter", "filter around"])
@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_driver_keeps_its_promises(policy_name, reuse_filter, deadline_s):
    machine = type(
        "Machine",
        (DriverMachine,),
        {
            "policy_name": policy_name,
            "store_threshold": 0 if reuse_filter == "no filter" else 2,
            "filter_around": reuse_filter == "filter around",
            "deadline_s": deadline_s,
        },
    )
    # without a seed of its own every configuration would take the same steps
    seed(f"{policy_name} {reuse_filter} {deadline_s}")(machine)
    profile = settings(report_multiple_bugs=False)
    fewer = settings(profile, max_examples=profile.max_examples // 3)
    run_state_machine_as_test(machine, settings=fewer if machine.filter_around else profile)
