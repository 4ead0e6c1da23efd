"""Looks for a bug in the kvtier that is first on the path: `mutant_finders.py FINDER`. Status 3 and one line: found.

Examples are made from fixed seeds and not shrunk, so that a search is short and comes out the same every time.
"""

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import kvtier

FOUND = 3
_BRIEF = settings(
    max_examples=80,
    stateful_step_count=100,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
sys.path[:0] = [str(Path(__file__).parents[1] / "stateful"), str(Path(__file__).parents[1])]


def run(machine, number, **attributes):
    """The machine with these attributes, from a seed of its own."""
    configured = type(machine.__name__, (machine,), attributes)
    seed(number)(configured)
    run_state_machine_as_test(configured, settings=_BRIEF)


def driver_machine():
    from kvtier.testing.driver_machine import DriverMachine

    run(DriverMachine, 1, policy_name="lru")
    run(DriverMachine, 2, policy_name="arc", store_threshold=2)
    run(DriverMachine, 3, policy_name="lru", deadline_s=0.0)
    run(DriverMachine, 4, policy_name="lru", pin_share=0.5)


def manager_machine():
    from test_manager_machine import ManagerMachine

    run(ManagerMachine, 1, policy_name="lru")
    run(ManagerMachine, 2, policy_name="arc", store_threshold=2)
    run(ManagerMachine, 3, policy_name="arc")


def policy_machine():
    from test_policy_machine import POLICIES, PolicyMachine

    for number, (policy_class, reference_class) in enumerate(POLICIES.values()):
        run(PolicyMachine, number, policy_class=policy_class, reference_class=reference_class)


def tiered_machine():
    from test_tiered_machine import Machine

    run(Machine, 1, policy_name="lru", cascade_when="stored")
    run(Machine, 2, policy_name="arc", cascade_when="reused")


def persisted_machine():
    from test_persisted_machine import PersistedMachine

    run(PersistedMachine, 1)


FINDERS = {
    "driver machine": driver_machine,
    "manager machine": manager_machine,
    "policy machine": policy_machine,
    "tiered machine": tiered_machine,
    "persisted machine": persisted_machine,
}


def main(name):
    assert str(Path(kvtier.__file__).parents[1]) == os.environ["KVTIER_UNDER_TEST"], kvtier.__file__
    look = FINDERS[name]
    try:
        look()
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(FOUND)


if __name__ == "__main__":
    main(sys.argv[1])
