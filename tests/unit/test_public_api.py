"""The names that users may rely on."""

import inspect
import pickle
import pkgutil
import types

import numpy as np
import pytest

import kvtier

PROMISED = {
    "ARCCachePolicy",
    "CPULoadStoreSpec",
    "CPUOffloadingManager",
    "FilterReusedOffloadingManager",
    "LRUCachePolicy",
    "LoadStoreSpec",
    "OffloadingEvent",
    "OffloadingManager",
    "PrepareStoreOutput",
    "ReqContext",
    "Residency",
    "make_offload_key",
    "get_offload_block_hash",
    "get_offload_group_idx",
}


def test_names_are_exactly_all():
    submodules = {module.name for module in pkgutil.iter_modules(kvtier.__path__)}
    names = {
        name
        for name, value in vars(kvtier).items()
        if not name.startswith("_") and not (isinstance(value, types.ModuleType) and name in submodules)
    }
    assert names == set(kvtier.__all__)


def test_all_is_sorted_and_without_duplicates():
    assert len(set(kvtier.__all__)) == len(kvtier.__all__)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_promised_name_is_there(name):
    assert name in kvtier.__all__


@pytest.mark.parametrize("name", sorted(PROMISED | {"CachePolicy"}))
def test_every_promised_class_says_what_it_is(name):
    assert inspect.getdoc(getattr(kvtier, name))


def test_errors_share_one_base():
    errors = [getattr(kvtier, name) for name in kvtier.__all__ if name.endswith("Error")]
    assert errors
    assert all(issubclass(error, kvtier.KVTierError) for error in errors)


def test_manager_signature():
    parameters = inspect.signature(kvtier.CPUOffloadingManager).parameters
    assert list(parameters)[:5] == [
        "num_blocks",
        "cache_policy",
        "enable_events",
        "store_threshold",
        "max_tracker_size",
    ]
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    assert defaults["cache_policy"] == "lru"
    assert defaults["enable_events"] is False
    assert defaults["store_threshold"] == 0
    assert defaults["max_tracker_size"] == 64_000
    assert defaults["deadline_s"] == 5.0
    assert parameters["deadline_s"].kind is inspect.Parameter.KEYWORD_ONLY


def test_filter_signature():
    parameters = inspect.signature(kvtier.FilterReusedOffloadingManager).parameters
    assert list(parameters) == ["backing", "store_threshold", "max_tracker_size"]
    assert parameters["store_threshold"].default == 2
    assert parameters["max_tracker_size"].default == 64_000


def test_managers_keep_the_whole_contract():
    for manager in (kvtier.CPUOffloadingManager, kvtier.FilterReusedOffloadingManager):
        assert issubclass(manager, kvtier.OffloadingManager)
        assert not inspect.isabstract(manager)


def test_policies_are_policies():
    for policy in (kvtier.LRUCachePolicy, kvtier.ARCCachePolicy):
        assert isinstance(policy(3), kvtier.CachePolicy)
        assert policy(3).cache_capacity == 3


def test_context_has_its_two_fields():
    params = {"do_remote_decode": True}
    context = kvtier.ReqContext("request-1", params)
    assert context.req_id == "request-1"
    assert context.kv_transfer_params is params
    assert kvtier.ReqContext(req_id="request-2").kv_transfer_params is None


def test_spec_crosses_a_process_without_its_keys():
    spec = kvtier.CPULoadStoreSpec([3, 1], [7, 9], (b"a", b"b"), 12.5)
    there = pickle.loads(pickle.dumps(spec))
    assert isinstance(there.block_ids, np.ndarray)
    assert there.block_ids.dtype.kind == "i"
    assert there.block_ids.tolist() == [3, 1]
    assert there.generations.tolist() == [7, 9]
    assert there.begin_by_s == 12.5
    assert list(there.keys) == []
    assert there.medium() == spec.medium() == "CPU"
