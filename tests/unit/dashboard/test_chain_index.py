from __future__ import annotations

import pytest

from deltachain.chain import tags
from deltachain.chain.chain import Chain
from deltachain.dashboard.chain_index import ChainIndex
from deltachain.errors import StoreUnavailableError
from deltachain.format.keys import manifest_key
from deltachain.store import MemoryStore
from tests.support.faults import FaultyStore
from tests.support.values import present
from tests.unit.dashboard.reports import chain_of
from tests.unit.manifest_chains import WideStore, create, extend, manifest_after


def versions(index: ChainIndex) -> list[int | None]:
    return [row.version if row else None for row in index.view.rows]


@pytest.mark.parametrize("kind", [MemoryStore, WideStore])
def test_a_chain_is_read_once_and_then_what_is_new(kind: type[MemoryStore]) -> None:
    store = kind()
    chain = chain_of(700, store)
    seen = FaultyStore(store)
    index = ChainIndex(seen)
    view = index.refresh(1.0)
    assert versions(index) == list(range(700))
    assert (view.chain, view.newest, view.trouble, view.is_indexed) == ("one", 699, "", True)
    assert {edge.version for edge in view.edges} == set(range(700))
    seen.keys_read.clear()
    revision = view.revision
    assert index.refresh(2.0).revision == revision
    extend(chain, 2, chain.read(699))
    assert versions(index) == list(range(700))
    assert index.refresh(3.0).revision > revision
    assert versions(index) == list(range(702))
    old = {manifest_key(version) for version in range(690)}
    assert not old & set(seen.keys_read)


def test_a_store_without_a_chain_is_waited_for() -> None:
    store = MemoryStore()
    index = ChainIndex(store)
    assert index.refresh(1.0).trouble
    chain = create(store)
    view = index.refresh(2.0)
    assert (view.trouble, view.head, view.rows) == ("", None, ())
    extend(chain, 1)
    head = present(index.refresh(3.0).head)
    assert head.version == 0


def test_versions_stay_while_the_store_is_away() -> None:
    seen = FaultyStore(chain_of(3).store)
    index = ChainIndex(seen)
    before = index.refresh(1.0)
    seen.down = True
    view = index.refresh(2.0)
    assert view.trouble
    assert (view.rows, view.looked_at) == (before.rows, 1.0)
    seen.down = False
    assert index.refresh(3.0).trouble == ""


def test_lost_and_damaged_manifests_are_named_and_the_others_shown() -> None:
    chain = chain_of(8)
    chain.store.delete(manifest_key(2))
    chain.store.delete(manifest_key(3))
    chain.store.put(manifest_key(5), b"{}")
    index = ChainIndex(chain.store)
    view = index.refresh(1.0)
    assert versions(index) == [0, 1, None, None, 4, None, 6, 7]
    assert view.lost == (2, 3, 5)


def test_a_store_that_went_back_is_read_again() -> None:
    chain = chain_of(6)
    index = ChainIndex(chain.store)
    index.refresh(100.0)
    for version in (3, 4, 5):
        chain.store.delete(manifest_key(version))
    fresh = Chain.open(chain.store)
    fresh.commit(manifest_after(fresh.read(2), commit_id="other"))
    index.refresh(200.0)
    view = index.refresh(300.0)
    assert versions(index) == [0, 1, 2, 3]
    row = present(view.at(3))
    assert row.manifest == fresh.read(3).digest
    assert "5" in view.doubt


def test_tags_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(2)
    monkeypatch.setattr(tags, "is_reachable", lambda *_: True)  # manifests without payloads
    tags.set_(chain, "best", chain.read(1), time=0.0)
    assert [(tag.name, tag.version) for tag in ChainIndex(chain.store).refresh(1.0).tags] == [
        ("best", 1)
    ]


def test_an_error_in_the_middle_keeps_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = chain_of(600)
    index = ChainIndex(chain.store)
    real = MemoryStore.get

    def get(self: MemoryStore, key: str, **limits: int) -> bytes:
        if key == manifest_key(580):
            raise StoreUnavailableError("away")
        return real(self, key, **limits)

    monkeypatch.setattr(MemoryStore, "get", get)
    view = index.refresh(1.0)
    assert view.trouble == "away"
    assert 512 <= len(view.rows) <= 580
    monkeypatch.undo()
    assert len(index.refresh(2.0).rows) == 600
