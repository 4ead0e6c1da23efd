"""The driver's state machine over vLLM's own manager, held to what vLLM offers: see docs/peers/vllm-manager.md."""

import importlib.util
from typing import ClassVar

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvtier.testing import make_keys
from kvtier.testing.driver_machine import DriverMachine
from kvtier.testing.promises import Promises

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

_KEYS = make_keys(20)
_VLLM_OFFERS = {
    "deadline_s": None,
    "store_timeout_s": None,
    "stores_prefixes": False,
    "load_limits": False,
    "fences_resets": False,
}
_jobs = st.integers(0, 5)


class VLLMMachine(DriverMachine):
    """Only what vLLM's connector does, in its order; what it has no way to do is left out."""

    # keys are chained hashes: a key stands behind the same keys in every prompt
    prompts = (_KEYS[:6], _KEYS[:3] + _KEYS[6:9], _KEYS[:2] + _KEYS[9:14], _KEYS[:1] + _KEYS[12:20])
    asked_for: ClassVar = {}
    """Promises to hold it to beyond what it offers."""
    stores_fail = False
    """The manager's own contract has failed stores; the connector never reports one."""

    def make_manager(self):
        from vllm_manager_shim import VLLMManagerShim

        return VLLMManagerShim(self.capacity_blocks, self.policy_name, self.store_threshold)

    def promises(self):
        return Promises(store_threshold=self.store_threshold, **_VLLM_OFFERS | self.asked_for)

    def _is_loading(self, request):
        return any(not job.is_store for job in self._jobs_of(request))

    @precondition(lambda self: self.world.requests)
    @rule(request=st.integers(0, 3), engine_blocks=st.integers(0, 2), wanted=st.integers(0, 6))
    def match_and_load(self, request, engine_blocks, wanted):
        """Waiting requests are looked up, and only those without transfers: new ones, and preempted ones."""
        chosen = self._request(request)
        if chosen.num_computed or self._jobs_of(chosen):
            return
        found = self.world.match(chosen, engine_blocks)
        if found and wanted:
            self.world.load(chosen, engine_blocks, min(found, wanted))

    @precondition(lambda self: self.world.requests)
    @rule(request=st.integers(0, 3), blocks=st.integers(1, 6))
    def compute(self, request, blocks):
        """A request that loads does not run."""
        chosen = self._request(request)
        if not self._is_loading(chosen):
            first = max(chosen.num_computed, chosen.num_offered)
            self.world.store(chosen, min(first + blocks, len(chosen.keys)))

    @precondition(lambda self: self.world.requests)
    @rule(request=st.integers(0, 3), resumes=st.booleans())
    def preempt(self, request, resumes):
        """Only running requests are, and their transfers are waited for."""
        chosen = self._request(request)
        if not self._is_loading(chosen):
            for job in self._jobs_of(chosen):
                self.world.run(job)
            self.world.preempt(chosen)

    @rule(request=st.integers(0, 3), prompt=st.integers(0, 3), completes=st.booleans())
    def whole_request(self, request, prompt, completes):
        self.new_request(request, prompt, False)
        chosen = self.world.requests[f"request-{request}"]
        found = self.world.match(chosen)
        if found:
            self.world.run(self.world.load(chosen, 0, found))
        job = self.world.store(chosen, len(chosen.keys))
        if job is not None and completes:
            self.world.run(job)

    @rule(request=st.integers(0, 3), prompt=st.integers(0, 3), cancels=st.just(False))
    def new_request(self, request, prompt, cancels):
        super().new_request(request, prompt, False)

    @precondition(lambda self: self.world.requests)
    @rule(request=st.integers(0, 3), cancels=st.just(False))
    def finish(self, request, cancels):
        super().finish(request, False)

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, succeeds=st.booleans())
    def run_job(self, job, succeeds):
        may_fail = self.stores_fail and self._job(job).is_store
        super().run_job(job, succeeds or not may_fail)

    @precondition(lambda self: self.world.jobs)
    @rule(job=_jobs, rank=st.integers(0, 1), succeeds=st.just(True))
    def run_rank(self, job, rank, succeeds):
        super().run_rank(job, rank, True)

    @rule(really=st.integers(0, 5).map(lambda number: number == 3), succeeds=st.just(True))
    def everything_ends(self, really, succeeds):
        super().everything_ends(really, True)

    @precondition(lambda self: self.world.requests)
    @rule(request=st.integers(0, 3), seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, request, seconds):
        """A waiting request is looked up in every step."""
        chosen = self._request(request)
        if not chosen.num_computed and not self._jobs_of(chosen) and self.world.match(chosen) is None:
            self.world.advance(seconds)
            self.world.match(chosen)

    # vLLM's connector has no words for these
    report_twice = report_rank_twice = workers_die = reports_after_revival = None
    outlive_the_timeout = wait_until_deadline = None


def run(policy_name, store_threshold=0, stores_fail=False, shrinks=True, **asked_for):
    """The machine over one configuration; deterministic. `shrinks` makes what it finds short."""
    attributes = {
        "policy_name": policy_name,
        "store_threshold": store_threshold,
        "asked_for": asked_for,
        "stores_fail": stores_fail,
    }
    machine = type("VLLM", (VLLMMachine,), attributes)
    seed(f"{policy_name} {store_threshold}")(machine)
    phases = [Phase.generate, Phase.shrink] if shrinks else [Phase.generate]
    run_state_machine_as_test(machine, settings=settings(max_examples=200, report_multiple_bugs=False, phases=phases))


@pytest.mark.parametrize("stores_fail", [False, True], ids=["connector", "failed stores"])
@pytest.mark.parametrize("store_threshold", [0, 2])
@pytest.mark.parametrize("policy_name", ["lru", "arc"])
def test_vllm_keeps_what_it_offers(policy_name, store_threshold, stores_fail):
    run(policy_name, store_threshold, stores_fail)


@pytest.mark.parametrize(
    ("asked_for", "message"),
    [
        ({"deadline_s": 5.0}, "waits: deadline"),
        ({"store_timeout_s": 32.0}, "was not reaped"),
        ({"stores_prefixes": True}, "fit"),
        ({"fences_resets": True}, "condemned"),
    ],
    ids=["deadline", "store timeout", "prefix stores", "fenced resets"],
)
def test_vllm_does_not_offer(asked_for, message):
    with pytest.raises(AssertionError, match=message):
        run("lru", shrinks=False, **asked_for)


@pytest.mark.parametrize("policy_name", ["lru", "arc"])
def test_a_bug_in_it_would_be_found(policy_name, monkeypatch):
    from vllm.v1.kv_offload.cpu.manager import CPULoadStoreSpec, CPUOffloadingManager

    def prepare_load_without_pins(self, keys, req_context):
        return CPULoadStoreSpec([self._policy.get(key).chunk_id for key in keys])

    monkeypatch.setattr(CPUOffloadingManager, "prepare_load", prepare_load_without_pins)
    monkeypatch.setattr(CPUOffloadingManager, "complete_load", lambda self, keys, req_context: None)
    with pytest.raises(AssertionError, match="pinned: the manager counts 0 blocks"):
        run(policy_name, shrinks=False)
