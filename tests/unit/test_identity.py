"""The identity of a chain: made once, never where versions are, put back where it is lost."""

import pytest

from deltachain.chain.chain import Chain
from deltachain.errors import BrokenChainError, ChainMismatchError, ObjectNotFoundError
from deltachain.format.documents import Table
from deltachain.format.keys import CHAIN_KEY, HEAD_KEY, TABLE_KEY, manifest_key
from deltachain.store import MemoryStore
from tests.unit.manifest_chains import TABLE, SingleWriterStore, WideStore, create, extend

STORES = [MemoryStore, SingleWriterStore, WideStore]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> MemoryStore:
    made: MemoryStore = request.param()
    return made


def keys_of(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list()}


@pytest.mark.parametrize(
    "traces",
    [[manifest_key(0)], [manifest_key(2)], [HEAD_KEY], [HEAD_KEY, manifest_key(1)]],
    ids=["the first", "the last", "a hint", "a hint and one"],
)
def test_no_identity_is_made_where_versions_are(store: MemoryStore, traces: list[str]) -> None:
    chain = create(store)
    extend(chain, 3)
    chain.write_head(2, [])
    for info in list(store.list()):
        if info.key not in traces:
            store.delete(info.key)
    before = keys_of(store)
    with pytest.raises(BrokenChainError, match=r"identity is lost: .* has versions") as caught:
        create(store)
    assert "from a backup" in caught.value.hint
    assert keys_of(store) == before


def test_a_reader_is_told_that_the_identity_is_lost(store: MemoryStore) -> None:
    extend(create(store), 2)
    store.delete(CHAIN_KEY)
    with pytest.raises(ObjectNotFoundError, match="identity is lost") as caught:
        Chain.open(store)
    assert "from a backup" in caught.value.hint


def test_a_lost_table_is_put_back_by_whoever_has_it(store: MemoryStore) -> None:
    extend(create(store), 2)
    before = keys_of(store)
    store.delete(TABLE_KEY)
    with pytest.raises(ObjectNotFoundError, match=r"table\.json of chain one is lost"):
        Chain.open(store)
    assert create(store).table == TABLE
    assert keys_of(store) == before


def test_another_model_puts_no_table_beside_an_identity(store: MemoryStore) -> None:
    extend(create(store), 1)
    store.delete(TABLE_KEY)
    before = keys_of(store)
    other = Table(tensors=(("a", "BF16", (4, 5)),))
    with pytest.raises(ChainMismatchError, match=r"whose table\.json is lost"):
        Chain.create(store, other, chain_id="two", time=0.0, assets={})
    assert keys_of(store) == before
