"""The contract of stores, on a store that needs a job of ``torch.distributed`` around it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from deltachain.store.base import Store
from deltachain.store.dist import DistStore
from deltachain.testing.store import StoreContract

_NUMBERS = itertools.count()


class TestDistStore(StoreContract):
    @pytest.fixture
    def store(self) -> DistStore:
        return DistStore.named(f"contract-{next(_NUMBERS)}")

    @pytest.fixture
    def reopen(self, store: DistStore) -> Callable[[], Store]:
        return lambda: store


def one_rank(rank: int, folder: str) -> None:
    del rank
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0", "--rootdir", folder]
    # What ranks are forked from has imported plugins of pytest, which can no longer be rewritten.
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    assert pytest.main([__file__, *arguments, "-o", "python_files=contract.py"]) == 0
