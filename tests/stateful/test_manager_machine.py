"""Every public operation of the single-tier manager in any order, beside the reference model."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvtier import (
    CPUOffloadingManager,
    FilterReusedOffloadingManager,
    OffloadKey,
    ReqContext,
    Residency,
)
from kvtier.errors import BlockNotPinnedError, BlockNotReadyError, DuplicateKeyError
from kvtier.testing import ReferenceManager, make_keys
from kvtier.testing.observe import policy_state

CAPACITY = 5
KEYS = make_keys(12)
# two prompts that share their first four blocks
PROMPTS = [KEYS[:8], KEYS[:4] + KEYS[8:]]
NEVER_STORED = make_keys(1, prefix="other")[0]
NUM_REQUESTS = 4
TRACKER_SIZE = 7
STORE_TIMEOUT_S = 64.0
COMPARED_COUNTERS = ("stored_blocks", "evicted_blocks", "late_completions")


@st.composite
def runs(draw):
    """Consecutive blocks of one prompt: what an engine asks for."""
    prompt = draw(st.sampled_from(PROMPTS))
    start = draw(st.integers(0, len(prompt) - 1))
    return prompt[start : start + draw(st.integers(1, len(prompt)))]


key_lists = st.one_of(runs(), st.lists(st.sampled_from(KEYS), min_size=1, max_size=CAPACITY, unique=True))
requests = st.integers(0, NUM_REQUESTS - 1)
# what empties the cache is rare (Hypothesis likes the ends of a range), or nothing would ever be in it
rarely = st.integers(0, 5).map(lambda number: number == 3)
mostly = st.integers(0, 3).map(lambda number: number != 2)


@dataclass(eq=False)
class Job:
    """A transfer under way, as each side was told of it."""

    context: ReqContext
    keys: list[OffloadKey]
    spec: object
    model_spec: object
    pending: set[OffloadKey] = field(default_factory=set)


class ManagerMachine(RuleBasedStateMachine):
    """`manager` is what is tested; `model` gets the same calls and must say the same."""

    policy_name = "lru"
    store_threshold = 0
    wrapped = False
    deadline_s = 5.0

    def __init__(self):
        super().__init__()
        own_threshold = 0 if self.wrapped else self.store_threshold
        options = {"deadline_s": self.deadline_s, "store_timeout_s": STORE_TIMEOUT_S}
        self.core = CPUOffloadingManager(CAPACITY, self.policy_name, True, own_threshold, TRACKER_SIZE, **options)
        self.manager = (
            FilterReusedOffloadingManager(self.core, self.store_threshold, TRACKER_SIZE) if self.wrapped else self.core
        )
        self.model = ReferenceManager(CAPACITY, self.policy_name, True, self.store_threshold, TRACKER_SIZE, **options)
        self.contexts = [ReqContext(f"request-{i}") for i in range(NUM_REQUESTS)]
        self.now_s = 100.0
        self.stores: list[Job] = []
        self.loads: list[Job] = []
        self.ended: list[Job] = []
        for side in (self.manager, self.model):
            side.advance(self.now_s)

    @initialize(filled=st.booleans(), prompt=st.sampled_from(PROMPTS))
    def begin_with_a_prompt(self, filled, prompt):
        if filled:
            self.offer_prompt_and_store_it(0, prompt, False)

    # -- asking

    @rule(key=st.sampled_from(KEYS), request=requests)
    def lookup(self, key, request):
        context = self.contexts[request]
        assert self.manager.lookup(key, context) is self.model.lookup(key, context)

    @rule(keys=key_lists, request=requests)
    def lookup_prefix(self, keys, request):
        context = self.contexts[request]
        assert self.manager.lookup_prefix(keys, context) == self.model.lookup_prefix(keys, context)

    @rule(request=requests)
    def defer(self, request):
        context = self.contexts[request]
        assert self.manager.defer(context) is self.model.defer(context)

    @rule(keys=key_lists, request=requests)
    def count_offers(self, keys, request):
        for side in (self.manager, self.model):
            side.count_offers(keys, self.contexts[request])

    @rule(keys=key_lists, request=requests)
    def touch(self, keys, request):
        for side in (self.manager, self.model):
            side.touch(keys, self.contexts[request])

    # -- storing

    @rule(keys=key_lists, request=requests)
    def prepare_store(self, keys, request):
        granted = self.manager.prepare_store(keys, self.contexts[request])
        self._compare_grant(granted, "prepare_store", keys, request)

    @rule(keys=key_lists, request=requests)
    def prepare_store_prefix(self, keys, request):
        granted = self.manager.prepare_store_prefix(keys, self.contexts[request])
        assert granted is not None
        self._compare_grant(granted, "prepare_store_prefix", keys, request)

    @rule(request=requests, prompt=st.sampled_from(PROMPTS), resumed=st.booleans())
    def offer_prompt_and_store_it(self, request, prompt, resumed):
        """The common case, so that the machine often has ready blocks to work with."""
        if not resumed:
            self.new_request(request, True)  # one whose store was cut short stores nothing more
        keys = prompt[: CAPACITY - request] if resumed else prompt
        for key in keys[: CAPACITY + 1] * self.store_threshold:
            self.lookup(key, request)
        self.prepare_store_prefix(keys, request)
        while self.stores:
            self._end_store(self.stores[-1], sorted(self.stores[-1].pending), True, by_spec=True)

    def _compare_grant(self, granted, operation, keys, request):
        context = self.contexts[request]
        self.model.expect_slots([] if granted is None else granted.store_spec.block_ids.tolist())
        expected = getattr(self.model, operation)(keys, context)
        if granted is None or expected is None:
            assert granted is expected
            return
        assert granted.keys_to_store == expected.keys_to_store
        assert granted.evicted_keys == expected.evicted_keys
        assert granted.store_spec.block_ids.tolist() == expected.store_spec.block_ids.tolist()
        assert len(granted.store_spec.generations) == len(granted.keys_to_store)
        if granted.keys_to_store:
            job = Job(context, granted.keys_to_store, granted.store_spec, expected.store_spec)
            job.pending = set(job.keys)
            self.stores.append(job)

    def _pick(self, jobs: Sequence[Job], data) -> tuple[Job, list[OffloadKey]]:
        job = data.draw(st.sampled_from(jobs), label="job")
        pending = [key for key in job.keys if key in job.pending]
        if data.draw(st.booleans(), label="part"):
            pending = pending[: data.draw(st.integers(1, len(pending)))]
        return job, pending

    def _end_store(self, job, keys, success, by_spec):
        self.manager.complete_store(keys, job.context, success, job.spec if by_spec else None)
        self.model.complete_store(keys, job.context, success, job.model_spec if by_spec else None)
        self._forget(self.stores, job, keys)

    def _forget(self, jobs, job, keys):
        job.pending -= set(keys)
        if not job.pending:
            jobs.remove(job)
            self.ended = [*self.ended[-7:], job]

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), success=mostly, by_spec=st.booleans())
    def complete_store(self, data, success, by_spec):
        job, keys = self._pick(self.stores, data)
        self._end_store(job, keys, success, by_spec)

    @rule(keys=key_lists, request=requests, success=mostly)
    def complete_store_that_nobody_asked_for(self, keys, request, success):
        """By keys alone, also of blocks that are ready, unknown, or in flight for another request."""
        for side in (self.manager, self.model):
            side.complete_store([*keys, NEVER_STORED], self.contexts[request], success)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), success=mostly)
    def complete_store_twice(self, data, success):
        job = data.draw(st.sampled_from(self.ended), label="job")
        if job.model_spec.begin_by_s is None:
            self.manager.complete_store(job.keys, job.context, success, job.spec)
            self.model.complete_store(job.keys, job.context, success, job.model_spec)

    # -- loading

    def _ready(self):
        return [key for key in KEYS if self.model.residency(key) is Residency.READY]

    @precondition(_ready)
    @rule(data=st.data(), request=requests)
    def prepare_load(self, data, request):
        keys = data.draw(st.lists(st.sampled_from(self._ready()), min_size=1, unique=True), label="keys")
        context = self.contexts[request]
        spec = self.manager.prepare_load(keys, context)
        expected = self.model.prepare_load(keys, context)
        assert spec.block_ids.tolist() == expected.block_ids.tolist()
        assert spec.begin_by_s == expected.begin_by_s
        self.loads.append(Job(context, keys, spec, expected, set(keys)))

    @precondition(_ready)
    @rule(request=requests, count=st.integers(1, CAPACITY))
    def load_what_is_ready(self, request, count):
        """Often by several requests at once."""
        keys = self._ready()[:count]
        for number in {request, 0}:
            context = self.contexts[number]
            specs = [side.prepare_load(keys, context) for side in (self.manager, self.model)]
            self.loads.append(Job(context, keys, *specs, set(keys)))

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), success=mostly, by_spec=st.booleans())
    def complete_load(self, data, success, by_spec):
        job, keys = self._pick(self.loads, data)
        # by key alone a request cannot say which of its own two reads of a key has ended
        by_spec = by_spec or any(
            other is not job and other.context is job.context and other.pending & set(keys) for other in self.loads
        )
        self.manager.complete_load(keys, job.context, success, job.spec if by_spec else None)
        self.model.complete_load(keys, job.context, success, job.model_spec if by_spec else None)
        self._forget(self.loads, job, keys)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), success=mostly)
    def complete_load_twice(self, data, success):
        job = data.draw(st.sampled_from(self.ended), label="job")
        if job.model_spec.begin_by_s is not None:
            self.manager.complete_load(job.keys, job.context, success, job.spec)
            self.model.complete_load(job.keys, job.context, success, job.model_spec)

    # -- misuse: a typed error that names the key, and (by the comparison after every step) nothing has changed

    @rule(keys=key_lists, request=requests)
    def prepare_load_of_what_is_not_ready(self, keys, request):
        keys = [*self._ready(), *keys, NEVER_STORED]
        keys = list(dict.fromkeys(keys))
        first = next(key for key in keys if self.model.residency(key) is not Residency.READY)
        with pytest.raises(BlockNotReadyError, match=first.hex()):
            self.manager.prepare_load(keys, self.contexts[request])

    @rule(keys=key_lists, request=requests)
    def complete_load_of_what_is_not_pinned(self, keys, request):
        pinned = set().union(*(job.pending for job in self.loads))
        # pinned ones before it must stay pinned
        own = [key for job in self.loads if job.context is self.contexts[request] for key in sorted(job.pending)]
        loose = next((key for key in keys if key not in pinned), NEVER_STORED)
        with pytest.raises(BlockNotPinnedError, match=loose.hex()):
            self.manager.complete_load([*dict.fromkeys(own), loose], self.contexts[request])

    @rule(keys=key_lists, request=requests)
    def name_a_key_twice(self, keys, request):
        context = self.contexts[request]
        twice = [*keys, keys[0]]
        for operation in (self.manager.prepare_store, self.manager.prepare_store_prefix):
            with pytest.raises(DuplicateKeyError, match=keys[0].hex()):
                operation(twice, context)
        ready = self._ready()
        if ready:
            with pytest.raises(DuplicateKeyError, match=ready[0].hex()):
                self.manager.prepare_load([*ready, ready[0]], context)

    # -- time, requests, reset

    @rule(seconds=st.sampled_from([-1.0, 0.25, 1.0, 3.0, 5.0, 30.0, 80.0]))
    def advance(self, seconds):
        now_s = self.now_s + seconds
        self.now_s = max(now_s, self.now_s)
        self.manager.advance(now_s)
        self.model.advance(now_s)
        for block in self.model.overdue():
            if self.manager.residency(block.key) is not Residency.ARRIVING:
                self.model.reap(block.key)

    @rule(request=requests)
    def finish_request(self, request):
        """Its transfers may end later. The context is used again, as by a request that was resumed."""
        for side in (self.manager, self.model):
            side.on_request_finished(self.contexts[request])

    @rule(request=requests, introduced=st.booleans())
    def new_request(self, request, introduced):
        """Its predecessor was dropped without a word: its transfers may still end."""
        self.contexts[request] = ReqContext(f"request-{request}", {"introduced": introduced})
        if introduced:
            for side in (self.manager, self.model):
                side.on_new_request(self.contexts[request])

    @rule(request=requests)
    def introduce_again(self, request):
        for side in (self.manager, self.model):
            side.on_new_request(self.contexts[request])

    @rule()
    def end_of_step(self):
        for side in (self.manager, self.model):
            side.on_schedule_end()
            assert side.has_pending_work() is False

    @rule(really=rarely)
    def reset_cache(self, really):
        if not really:
            return
        for side in (self.manager, self.model):
            side.reset_cache()

    @rule(really=rarely)
    def writers_died(self, really):
        if not really:
            return
        self.manager.writers_died()
        self.model.writers_died()

    @rule(really=rarely)
    def everything_ends(self, really):
        """Nothing is left in flight, pinned or condemned, and after a reset the manager allocates as if new."""
        if not really:
            return
        for job in list(self.stores):
            self._end_store(job, sorted(job.pending), True, by_spec=True)
        for job in list(self.loads):
            keys = sorted(job.pending)
            self.manager.complete_load(keys, job.context, True, job.spec)
            self.model.complete_load(keys, job.context, True, job.model_spec)
            self._forget(self.loads, job, keys)
        stats = self.manager.get_stats()
        assert (stats.in_flight_blocks, stats.pinned_blocks, stats.condemned_blocks) == (0, 0, 0)
        for side in (self.manager, self.model):
            side.reset_cache()

    # -- comparing

    @rule()
    def take_events(self):
        told = [(sorted(e.keys), e.medium, e.removed) for e in self.manager.take_events() if e.keys]
        expected = [(sorted(e.keys), e.medium, e.removed) for e in self.model.take_events()]
        assert told == expected
        assert list(self.manager.take_events()) == []

    @invariant()
    def same_as_the_model(self):
        self.manager.check_invariants()
        self.model.check_invariants()
        for key in KEYS:
            assert self.manager.residency(key) is self.model.residency(key), key
        stats, expected = self.manager.get_stats(), self.model.get_stats()
        for name in ("capacity", "ready", "in_flight", "pinned", "condemned"):
            assert getattr(stats, f"{name}_blocks") == getattr(expected, f"{name}_blocks"), name
        for name in COMPARED_COUNTERS:
            assert stats.counters.get(name, 0) == expected.counters[name], name
        assert policy_state(self.core.policy) == policy_state(self.model.policy)
        for context in self.contexts:
            assert self.manager.still_waiting(context) is self.model.still_waiting(context)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", ["lru", "arc"])
@pytest.mark.parametrize("reuse_filter", ["no filter", "own filter", "filter around"])
def test_manager_agrees_with_the_model(policy_name, reuse_filter):
    machine = type(
        "Machine",
        (ManagerMachine,),
        {
            "policy_name": policy_name,
            "store_threshold": 0 if reuse_filter == "no filter" else 2,
            "wrapped": reuse_filter == "filter around",
        },
    )
    # without a seed of its own every configuration would take the same steps
    seed(f"{policy_name} {reuse_filter}")(machine)
    run_state_machine_as_test(machine, settings=settings(max_examples=90) if machine.wrapped else settings())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy_name", ["lru", "arc"])
def test_manager_that_never_waits_agrees_with_the_model(policy_name):
    machine = type("Machine", (ManagerMachine,), {"policy_name": policy_name, "deadline_s": 0.0})
    seed(policy_name)(machine)
    run_state_machine_as_test(machine, settings=settings(max_examples=90))
