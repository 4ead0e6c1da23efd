"""`parse_mooncake_url`: what it takes, and the one line that says what it does not."""

from __future__ import annotations

import pytest

from kvtier.errors import ConfigurationError
from kvtier.tiers.shared import MooncakeConfig, parse_mooncake_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("mooncake://master", MooncakeConfig("master")),
        ("mooncake://master:7000/", MooncakeConfig("master", 7000)),
        ("mooncake://[::1]:7000", MooncakeConfig("::1", 7000)),
        ("mooncake://m?segment=4GiB&buffer=64MiB", MooncakeConfig("m", segment_bytes=4 << 30, buffer_bytes=64 << 20)),
        ("mooncake://m?segment=0&buffer=0", MooncakeConfig("m", buffer_bytes=0)),
        ("mooncake://m?segment=1.5GB", MooncakeConfig("m", segment_bytes=1_500_000_000)),
        (
            "mooncake://m?protocol=rdma&device=mlx5_0,mlx5_1&local_host=10.0.0.7",
            MooncakeConfig("m", protocol="rdma", device="mlx5_0,mlx5_1", local_host="10.0.0.7"),
        ),
        (
            "mooncake://m?metadata=http://meta:8080/metadata",
            MooncakeConfig("m", metadata="http://meta:8080/metadata"),
        ),
        ("mooncake://m?protocol=tcp&metadata=P2PHANDSHAKE", MooncakeConfig("m")),
    ],
)
def test_what_it_takes(url: str, expected: MooncakeConfig) -> None:
    assert parse_mooncake_url(url) == expected


@pytest.mark.parametrize(
    ("url", "named", "allowed"),
    [
        ("mooncaek://master", "'mooncaek'", "mooncake"),
        ("mooncake://", "no host", "MASTER_HOST:PORT"),
        ("mooncake://master:70000", "port", "65535"),
        ("mooncake://master/store", "'/store'", "none"),
        ("mooncake://someone@master", "user", "no login"),
        ("mooncake://someone:hunter2@master", "password", "no login"),
        ("mooncake://master?segmen=4GiB", "'segmen'", "'segment'"),
        ("mooncake://master?segment=4G", "'4G'", "512MiB"),
        ("mooncake://master?segment=-1", "'-1'", "512MiB"),
        ("mooncake://master?segment=1MiB", "'1MiB'", "16MiB or more"),
        ("mooncake://master?segment=9999999TiB", "9999999TiB", "512MiB"),
        ("mooncake://master?buffer=", "''", "512MiB"),
        ("mooncake://master?protocol=udp", "'udp'", "tcp, rdma"),
        ("mooncake://master?local_host=a%20b", "'a b'", "host name"),
        ("mooncake://master?device=", "device", "a name"),
        ("mooncake://master?segment=4GiB&segment=5GiB", "'segment'", "once"),
    ],
)
def test_what_it_does_not(url: str, named: str, allowed: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_mooncake_url(url)
    message = str(caught.value)
    assert named in message
    assert allowed in message
    assert "\n" not in message
    assert "hunter2" not in message


def test_its_place_is_a_url_of_it() -> None:
    for url in ("mooncake://master:7000", "mooncake://[::1]:7000"):
        assert parse_mooncake_url(url).place == url
