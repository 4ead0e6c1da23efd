"""`tiers`: the list of URLs, what it becomes, and the one line for what cannot work."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvtier import ConfigurationError
from kvtier.runtime import Config, check_tiers, parse_config
from kvtier.runtime import tiers as registry
from kvtier.runtime.disk import DiskSettings
from kvtier.runtime.tiers import SHARED_OPTIONS, STORES, SharedSettings
from kvtier.tiers.shared import FolderConfig, MooncakeConfig, S3Config, SharedConfig, ValkeyConfig

SECRET = "hunter2-very-secret"
NAMESPACE = bytes(range(32))


def config_of(*urls: str, **settings: Any) -> Config:
    return parse_config({"ram": "1MiB", "tiers": list(urls), **settings})


def shared_of(url: str) -> SharedSettings:
    (tier,) = config_of(url).tiers
    assert isinstance(tier, SharedSettings)
    return tier


def test_without_any() -> None:
    config = parse_config({"ram": 1})
    assert (config.tiers, config.disk, config.shared) == ((), None, ())
    assert config_of().tiers == ()


def test_the_order_is_that_of_the_list() -> None:
    valkey, disk, redis = config_of("valkey://near", "disk:///kv?capacity=1GiB", "redis://far:7000/2").tiers
    assert isinstance(valkey, SharedSettings)
    assert isinstance(redis, SharedSettings)
    assert valkey.store == ValkeyConfig("near")
    assert redis.store == ValkeyConfig("far", 7000, database=2)
    assert disk == DiskSettings(("/kv",), 1 << 30)


def test_a_disk_url_says_what_the_short_form_does() -> None:
    url = "disk:///a%20b/c+d?path=/e&capacity=1GB&min_free=0&admission=reuse&direct=false&threads=4&stop_flush_s=0.5"
    long = parse_config({"ram": 1, "tiers": [url]})
    settings = {"path": ["/a b/c+d", "/e"], "capacity": "1GB", "min_free": 0, "admission": "reuse", "direct": False}
    assert long == parse_config({"ram": 1, "disk": {**settings, "threads": 4, "stop_flush_s": 0.5}})
    assert config_of("disk://?path=/a&path=/b&capacity=1").disk == DiskSettings(("/a", "/b"), 1)


def test_the_stores_that_there_are() -> None:
    s3 = "s3://bucket/some/prefix?region=eu-central-1&connections=8"
    file = "file:///mnt/kv?capacity=1GiB&min_free=0"
    tiers = config_of("valkey://host", s3, "mooncake://master?segment=1GiB", file).shared
    assert [tier.make_store().medium for tier in tiers] == ["VALKEY", "S3", "MOONCAKE", "FILE"]
    assert tiers[3].store == FolderConfig("/mnt/kv", 1 << 30, 0)
    assert tiers[2].config(NAMESPACE).num_connections == 2
    assert tiers[2].store == MooncakeConfig("master", segment_bytes=1 << 30)
    assert tiers[1].store == S3Config("bucket", "some/prefix", region="eu-central-1")
    assert tiers[1].config(NAMESPACE).num_connections == 8
    assert tiers[1].config(NAMESPACE).lookup_timeout_s == 1.0


def test_the_short_form_of_the_disk_stands_before_the_list() -> None:
    config = config_of("valkey://host", disk={"path": "/a", "capacity": 1})
    assert [type(tier) for tier in config.tiers] == [DiskSettings, SharedSettings]
    assert config.tiers[0] is config.disk


def test_what_every_shared_tier_can_be_told() -> None:
    tier = shared_of(
        "valkey://host?ttl=1d&connections=8&connect_timeout_s=2&lookup_timeout_s=.25&transfer_timeout_s=3"
        "&queue_timeout_s=6&present_s=20&absent_s=0.5&max_keys=100&max_storing=1MiB&compression=auto"
        "&admission=reuse&epoch=7&stop_flush_s=0"
    )
    assert tier.store == ValkeyConfig("host", ttl_s=86400)
    assert tier.config(NAMESPACE) == SharedConfig(NAMESPACE, 8, 2.0, 0.25, 3.0, 6.0, 20.0, 0.5, 100, 1 << 20, "auto")
    assert tier.config(NAMESPACE, element_bytes=4).element_bytes == 4
    assert (tier.admission, tier.epoch, tier.stop_flush_s) == ("reuse", 7, 0.0)
    fields = {field.name for field in dataclasses.fields(SharedConfig)}
    assert {field for field, _ in registry._LIMITS.values()} == fields - {"namespace", "element_bytes"}
    assert shared_of("valkey://host").config(NAMESPACE) == SharedConfig(NAMESPACE)


def test_names_tell_tiers_apart() -> None:
    tiers = config_of("redis://a", "disk:///kv?capacity=1GiB", "valkey://b", "valkey://c").tiers
    assert registry.tier_names(tiers) == ["valkey", "disk", "valkey-2", "valkey-3"]


def test_an_own_option_is_not_taken_for_a_common_one() -> None:
    for scheme, kind in STORES.items():
        assert not set(kind.options) & SHARED_OPTIONS.keys(), scheme


def test_a_new_store_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawer:
        medium = "DRAWER"

        def __init__(self, url: str) -> None:
            self.place = url

    kind = registry.StoreKind("drawer", str, Drawer, ("depth",), {"num_connections": 16, "present_s": 60.0})  # type: ignore[arg-type]
    monkeypatch.setitem(STORES, "drawer", kind)
    tier = shared_of("drawer://desk/left?depth=2&connections=3")
    assert tier.make_store().place == "drawer://desk/left?depth=2"
    assert tier.config(NAMESPACE) == SharedConfig(NAMESPACE, num_connections=3, present_s=60.0)
    with pytest.raises(ConfigurationError, match=r"unknown option in tiers\[0\]: 'dept'; did you mean 'depth'\?"):
        config_of("drawer://desk?dept=1")


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        ("valkey://host", ["tiers is no list of URLs"]),
        ([7], ["tiers is no list of URLs"]),
        (["host:6379"], ["tiers[0] is no URL", "disk://", "valkey://"]),
        (["valkey://host", "vlkey://host"], ["tiers[1]", "'vlkey://'", "'valkey://'"]),
        (["ftp://host"], ["'ftp://'", "allowed: disk://, valkey://"]),
        (["valkey://host?conections=3"], ["tiers[0]", "'conections'", "'connections'"]),
        (["valkey://host?tttl=1d"], ["'tttl'", "'ttl'"]),
        (["valkey://host?zzz=1"], ["'zzz'", "absent_s", "password_env"]),
        (["valkey://host?capacity=1GiB"], ["'capacity'"]),
        (["valkey://host?ttl=soon"], ["tiers[0]", "ttl is 'soon'", "1d"]),
        (["valkey://host?ttl=1d&ttl=2d"], ["tiers[0]", "'ttl'", "once"]),
        (["valkey://host?epoch=1&epoch=2"], ["tiers[0]", "'epoch'", "once"]),
        (["valkey://host?connections=0"], ["tiers[0].connections is '0'", "1 or more"]),
        (["valkey://host?connections="], ["tiers[0].connections is ''"]),
        (["valkey://host?lookup_timeout_s=0"], ["tiers[0].lookup_timeout_s is '0'", "more than 0"]),
        (["valkey://host?present_s=inf"], ["tiers[0].present_s is 'inf'"]),
        (["valkey://host?absent_s=0.01"], ["tiers[0].absent_s is '0.01'", "0.05 or more"]),
        (["valkey://host?max_storing=lots"], ["tiers[0].max_storing is 'lots'", "GiB"]),
        (["valkey://host?epoch=-1"], ["tiers[0].epoch is '-1'", "0 to"]),
        (["valkey://host?epoch=99999999999"], ["tiers[0].epoch", "0 to"]),
        (["valkey://host?admission=sometimes"], ["tiers[0].admission is 'sometimes'", "always", "reuse"]),
        (["valkey://host?stop_flush_s=-1"], ["tiers[0].stop_flush_s is '-1'"]),
        (["valkey://host", "redis://host:6379/0?connections=9"], ["tiers[0] and tiers[1]", "same store"]),
        (["disk:///a?capacity=1", "disk:///b?capacity=1"], ["tiers[1] is a second disk", "path=FOLDER"]),
        (["disk://a/b?capacity=1"], ["tiers[0]", "two slashes", "disk:///FOLDER"]),
        (["disk:///a"], ["'tiers[0].capacity' is missing"]),
        (["disk://?capacity=1"], ["'tiers[0].path' is missing"]),
        (["disk:///a?capcity=1"], ["'capcity'", "'capacity'"]),
        (["disk:///a?capacity=1&capacity=2"], ["'capacity'", "once"]),
        (["disk:///a?capacity=1&path=/b/../a"], ["tiers[0].path", "different folders"]),
        (["disk:///a?capacity=1&direct=yes"], ["tiers[0].direct is 'yes'", "true, false"]),
        (
            ["disk:///a?capacity=1&admission=ram_eviction", "valkey://host?admission=ram_eviction"],
            ["tiers[0].admission and tiers[1].admission", "of one tier"],
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(urls: object, words: list[str]) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        parse_config({"ram": "1MiB", "tiers": urls})
    message = str(refusal.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://:{SECRET}@host",
        f"valkey://someone:{SECRET}@host?conections=3",
        f"valkyrie://someone:{SECRET}@host",
        f"valkey:/someone:{SECRET}@host",
        f"disk://someone:{SECRET}@host/folder?capacity=1",
        f"s3://key:{SECRET}@bucket",
        f"s3://{SECRET}:key@bucket",
        f"s3://bucket?secret_key={SECRET}",
        f"s3://bucket?access_key_env=KEY&secret_key_env={SECRET}",
        f"valkey://host?{SECRET}",
        f"valkey://host?ttl=1d&{SECRET.replace('-', '_')}",
        f"valkey://host?pasword={SECRET}",
        f"valkey://host?password={SECRET}",
    ],
)
def test_what_could_be_a_secret_is_not_repeated(url: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        config_of("valkey://other", url)
    assert "tiers[1]" in str(refusal.value)
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None


def test_a_secret_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_TEST_PASSWORD", SECRET)
    config = config_of("valkeys://someone@host?password_env=KVTIER_TEST_PASSWORD")
    assert SECRET not in repr(config) + config.shared[0].make_store().place


def test_the_disk_stands_once() -> None:
    with pytest.raises(ConfigurationError, match="'disk' and a disk:// URL in 'tiers' say the same thing"):
        config_of("disk:///a?capacity=1", disk={"path": "/b", "capacity": 1})
    with pytest.raises(ConfigurationError, match=r"disk\.admission and that of a tier in 'tiers'"):
        config_of(
            "valkey://host?admission=ram_eviction", disk={"path": "/b", "capacity": 1, "admission": "ram_eviction"}
        )


def test_the_name_of_the_weights() -> None:
    assert config_of("valkey://host", weights_id="mine").weights_id == "mine"
    assert config_of(disk={"path": "/b", "capacity": 1, "weights_id": "mine"}).weights_id == "mine"
    assert config_of("disk:///a?capacity=1&weights_id=mine").weights_id == "mine"
    with pytest.raises(ConfigurationError, match="'weights_id' and that of the disk say the same thing"):
        config_of("disk:///a?capacity=1&weights_id=mine", weights_id="mine")


def test_a_check_looks_at_folders_and_packages_and_contacts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tiers(config_of("valkey://no-such-host.invalid").tiers)
    with pytest.raises(ConfigurationError, match="is not a folder"):
        check_tiers(config_of(f"disk://{Path(__file__)}?capacity=1").tiers)
    monkeypatch.setitem(__import__("sys").modules, "redis", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvtier\[valkey\]'"):
        check_tiers(config_of("valkey://host").tiers)
