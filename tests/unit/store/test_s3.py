from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from deltachain.store import Store, open_store
from deltachain.store.s3.store import S3Store
from deltachain.testing.store import StoreContract
from tests.support.seaweed import Seaweed


class TestS3Store(StoreContract):
    race_rounds = 3  # SeaweedFS lets losers wait for seconds

    @pytest.fixture
    def reopen(self, seaweed: Seaweed, s3_url: Callable[[], str]) -> Iterator[Callable[[], Store]]:
        url, opened = s3_url(), list[Store]()

        def reopen() -> Store:
            opened.append(open_store(url, seaweed.options))
            return opened[-1]

        yield reopen
        for store in opened:
            store.close()

    @pytest.fixture
    def store(self, reopen: Callable[[], Store]) -> Store:
        return reopen()

    def test_races_were_run(self, store: Store) -> None:
        assert isinstance(store, S3Store)
        assert store.capabilities.conditional_put
        assert store.capabilities.list_consistent
