"""The request-level driver over every policy, with and without a reuse filter and a deadline."""

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from kvtier.policy import POLICIES
from kvtier.testing.driver_machine import DriverMachine

THOROUGHLY = ["adaptive", "lru"]
"""With every filter and deadline; what is the manager's is the same under the others."""


def run(num_examples_divisor=1, **attributes):
    machine = type("Machine", (DriverMachine,), attributes)
    # without a seed of its own every configuration would take the same steps
    seed(repr(sorted(attributes.items())))(machine)
    profile = settings(report_multiple_bugs=False)
    number = profile.max_examples // num_examples_divisor
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=number))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("deadline_s", [5.0, 0.0])
@pytest.mark.parametrize("reuse_filter", ["no filter", "own filter", "filter around"])
@pytest.mark.parametrize("policy_name", THOROUGHLY)
def test_driver_keeps_its_promises(policy_name, reuse_filter, deadline_s):
    run(
        num_examples_divisor=3 if reuse_filter == "filter around" else 2 if deadline_s == 0 else 1,
        policy_name=policy_name,
        store_threshold=0 if reuse_filter == "no filter" else 2,
        filter_around=reuse_filter == "filter around",
        deadline_s=deadline_s,
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", sorted(POLICIES.keys() - set(THOROUGHLY)))
def test_driver_keeps_its_promises_whatever_evicts(policy_name):
    run(policy_name=policy_name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", THOROUGHLY)
def test_driver_keeps_its_promises_with_a_circuit_breaker(policy_name):
    run(num_examples_divisor=2, policy_name=policy_name, has_breaker=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", THOROUGHLY)
def test_driver_keeps_its_promises_where_waiting_may_not_be_worth_it(policy_name):
    run(num_examples_divisor=2, policy_name=policy_name, knows_rate=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", sorted(POLICIES))
def test_driver_keeps_its_promises_with_hints(policy_name):
    """Pins hold and return, nothing else that is read or written leaves, and the books of the hints add up."""
    run(num_examples_divisor=2, policy_name=policy_name, pin_share=0.5)
