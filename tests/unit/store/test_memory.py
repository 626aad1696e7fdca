from __future__ import annotations

from collections.abc import Callable

import pytest

from deltachain.errors import ConfigError
from deltachain.store import MemoryStore, Store
from deltachain.testing.store import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def reopen(self, store: MemoryStore) -> Callable[[], Store]:
        return lambda: store


def test_stores_are_shared_by_name_alone() -> None:
    first = MemoryStore.named("test-memory-shared")
    first.put("a", b"data")
    first.close()
    assert MemoryStore.named("test-memory-shared").get("a") == b"data"
    assert first.url == "memory://test-memory-shared"
    first, second = MemoryStore(), MemoryStore()
    first.put("a", b"data")
    assert second.find("a") is None
    assert first.url != second.url


@pytest.mark.parametrize("name", ["", "a b", "../a"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        MemoryStore.named(name)
