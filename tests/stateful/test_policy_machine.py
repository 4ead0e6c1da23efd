"""Each policy in any order of calls, beside its reference."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtier.policy import ARCCachePolicy, LRU2CachePolicy, LRUCachePolicy, S3FIFOCachePolicy
from kvtier.testing import ReferenceARC, ReferenceLRU, ReferenceLRU2, ReferenceS3FIFO, make_keys
from kvtier.testing.observe import policy_state

POLICIES = {
    "lru": (LRUCachePolicy, ReferenceLRU),
    "arc": (ARCCachePolicy, ReferenceARC),
    "lru2": (LRU2CachePolicy, ReferenceLRU2),
    "s3fifo": (S3FIFOCachePolicy, ReferenceS3FIFO),
}
CAPACITY = 7
KEYS = make_keys(18)

key_lists = st.lists(st.sampled_from(KEYS), max_size=CAPACITY, unique=True)
key_sets = st.sets(st.sampled_from(KEYS), max_size=CAPACITY)


class PolicyMachine(RuleBasedStateMachine):
    """As the manager does, it evicts before it inserts, and a key is inserted only when it is not resident."""

    policy_class = LRUCachePolicy
    reference_class = ReferenceLRU

    def __init__(self):
        super().__init__()
        self.policy = self.policy_class(CAPACITY)
        self.reference = self.reference_class(CAPACITY)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=CAPACITY, unique=True), protected=key_sets)
    def make_room_and_insert(self, keys, protected):
        new = [key for key in keys if key not in self.reference]
        needed = max(0, len(new) - (CAPACITY - len(self.reference)))
        victims = self.policy.evict(needed, [set(keys), protected])
        assert victims == self.reference.evict(needed, [set(keys), protected])
        if victims is not None:
            for policy in (self.policy, self.reference):
                policy.insert(new)

    @rule(count=st.integers(0, CAPACITY + 1), protected=st.lists(key_sets, max_size=3))
    def evict(self, count, protected):
        assert self.policy.evict(count, protected) == self.reference.evict(count, protected)

    @rule(keys=key_lists, first_use=key_sets)
    def touch(self, keys, first_use):
        for policy in (self.policy, self.reference):
            policy.touch(iter(keys), first_use)

    @rule(keys=key_lists, first_use=key_sets)
    def settle(self, keys, first_use):
        for policy in (self.policy, self.reference):
            policy.settle(iter(keys), first_use)

    @rule(keys=key_sets)
    def remove(self, keys):
        resident = [key for key in sorted(keys) if key in self.reference]
        for policy in (self.policy, self.reference):
            policy.remove(resident)

    @rule(really=st.integers(0, 4))
    def clear(self, really):
        if not really:
            for policy in (self.policy, self.reference):
                policy.clear()

    @invariant()
    def same_as_the_reference(self):
        assert policy_state(self.policy) == policy_state(self.reference)
        assert len(self.policy) == len(self.reference)
        assert [key in self.policy for key in KEYS] == [key in self.reference for key in KEYS]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", POLICIES)
def test_policy_agrees_with_its_reference(policy):
    policy_class, reference_class = POLICIES[policy]
    machine = type("Machine", (PolicyMachine,), {"policy_class": policy_class, "reference_class": reference_class})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=50))
