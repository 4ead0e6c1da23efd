"""Servers that take seconds to start: one a session (a worker of xdist is one), started by the first test with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from s3_harness import S3Server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """Whoever kills or freezes it starts or thaws it again."""
    from s3_harness import S3Server

    server = S3Server()
    yield server
    server.stop()
