import time

import pytest

from deltachain import errors
from deltachain.store import MemoryStore
from tests.support.faults import Fault, FaultyStore, clock_jump

pytestmark = pytest.mark.full


@pytest.fixture
def inner() -> MemoryStore:
    store = MemoryStore()
    store.put("a/old", b"0123456789")
    return store


@pytest.fixture
def faulty(inner: MemoryStore) -> FaultyStore:
    return FaultyStore(inner)


def keys(store: FaultyStore, prefix: str = "") -> list[str]:
    return [found.key for found in store.list(prefix)]


def test_own_412_writes_and_says_that_somebody_was_first(
    faulty: FaultyStore, inner: MemoryStore
) -> None:
    faulty.add(Fault("own-412", "a/"))
    faulty.put("a/old", b"put has no precondition")
    with pytest.raises(errors.AlreadyExistsError) as caught:
        faulty.put_if_absent("a/new", b"data")
    assert caught.value.key == "a/new"
    assert inner.get("a/new") == b"data"
    assert faulty.struck == [("own-412", "a/new")]
    faulty.add(Fault("own-412"))  # hides nobody else who was first
    with pytest.raises(errors.AlreadyExistsError):
        faulty.put_if_absent("a/old", b"other data")
    assert inner.get("a/old") == b"put has no precondition"


def test_stale_listing_shows_what_was_there_when_it_began(
    faulty: FaultyStore, inner: MemoryStore
) -> None:
    claims = [faulty.capabilities]
    faulty.add(Fault("stale-list", "a/", times=None))
    claims.append(faulty.capabilities)
    assert [claim.list_consistent for claim in claims] == [True, False]
    assert all(claim.conditional_put for claim in claims)
    for key in ("a/new", "b/new"):
        faulty.put(key, b"")
    assert keys(faulty) == ["a/old", "b/new"]
    assert keys(faulty, "a/") == ["a/old"]
    assert keys(faulty, "b/") == ["b/new"]
    assert faulty.find("a/new") is not None
    assert inner.find("a/new") is not None
    faulty.mend()
    assert keys(faulty) == ["a/new", "a/old", "b/new"]
    assert faulty.capabilities == claims[0]


def test_clock_jumps_add_up_and_end_and_steady_clocks_do_not_jump(inner: MemoryStore) -> None:
    def shown() -> float:
        inner.put("a/new", b"")
        found = inner.find("a/new")
        assert found is not None
        assert found.modified is not None
        return found.modified

    before = shown()
    with clock_jump(7200):
        assert 7190 < shown() - before < 7290
        with clock_jump(-10_800):
            assert -3690 < shown() - before < -3510
    assert 0 <= shown() - before < 90
    steady, measured = time.monotonic(), time.perf_counter()
    with clock_jump(1e6):
        assert time.monotonic() - steady < 1e5
        assert time.perf_counter() - measured < 1e5
