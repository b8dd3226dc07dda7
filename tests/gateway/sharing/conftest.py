"""A real Valkey for the boards, and a real cluster of them."""

from collections.abc import Iterator

import pytest

from tests.stores import ValkeyServer, valkey_cluster


@pytest.fixture(scope="session")
def valkey_url(valkey: ValkeyServer) -> str:
    return valkey.url


@pytest.fixture(scope="session")
def cluster_url() -> Iterator[str]:
    with valkey_cluster() as cluster:
        yield cluster.url
