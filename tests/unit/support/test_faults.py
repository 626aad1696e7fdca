import time
from collections.abc import Callable

import pytest

from deltachain import errors
from deltachain.store import MemoryStore
from tests.support.faults import Action, Fault, FaultyStore, clock_jump

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


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("fail", errors.StoreUnavailableError),
        ("full", errors.StoreUnavailableError),
        ("refuse", errors.StorePermissionError),
        ("lose-reply", errors.StoreUnavailableError),
    ],
)
@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_write_that_fails(
    faulty: FaultyStore, inner: MemoryStore, action: Action, error: type[Exception], method: str
) -> None:
    faulty.add(Fault(action, "a/new"))
    with pytest.raises(error):
        getattr(faulty, method)("a/new", b"data")
    assert (inner.find("a/new") is not None) == (action == "lose-reply")
    assert faulty.struck == [(action, "a/new")]
    faulty.put("a/new", b"again")
    assert inner.get("a/new") == b"again"


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


def test_function_is_called_before_a_write_alone(faulty: FaultyStore) -> None:
    called: list[int] = []
    faulty.add(Fault(lambda: called.append(1), times=None))
    faulty.get("a/old")
    keys(faulty)
    faulty.delete("a/none")
    assert called == []
    faulty.put("b", b"")
    faulty.put_if_absent("c", b"")
    assert called == [1, 1]


Call = Callable[[FaultyStore], object]

READS: dict[str, Call] = {
    "get": lambda store: store.get("a/old"),
    "read": lambda store: store.read("a/old", nbytes=10),
    "range": lambda store: store.get_range("a/old", 2, 3),
}

CALLS: dict[str, Call] = READS | {
    "find": lambda store: store.find("a/old"),
    "find_all": lambda store: store.find_all(["a/old"]),
    "list": lambda store: store.list("a/"),
    "put": lambda store: store.put("a/new", b""),
    "put_if_absent": lambda store: store.put_if_absent("a/new", b""),
    "delete": lambda store: store.delete("a/old"),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("cut", errors.StoreUnavailableError),
        ("fail-read", errors.StoreUnavailableError),
        ("hide", errors.ObjectNotFoundError),
    ],
)
def test_read_that_fails(
    faulty: FaultyStore, action: Action, error: type[Exception], read: Call
) -> None:
    faulty.add(Fault(action, "a/", nth=2))
    first = read(faulty)
    with pytest.raises(error, match="a/old"):
        read(faulty)
    assert read(faulty) == first
    assert faulty.struck == [(action, "a/old")]


def test_bytes_that_are_spoiled(faulty: FaultyStore) -> None:
    faulty.add(Fault("corrupt", nth=1), Fault("truncate", nth=2, times=2))
    assert faulty.get("a/old") == b"01234%6789"
    assert faulty.get("a/old") == b"012345678"
    with pytest.raises(errors.MalformedError):
        faulty.read("a/old", nbytes=10)


def test_looks_and_listings_fail_and_miss_but_are_not_cut_and_writes_go_on(
    faulty: FaultyStore, inner: MemoryStore
) -> None:
    faulty.add(Fault("cut", times=None))
    assert faulty.find("a/old") is not None
    faulty.add(Fault("hide"))
    assert faulty.find_all(["a/old"]) == {}
    faulty.add(Fault("fail-read"))
    with pytest.raises(errors.StoreUnavailableError):
        faulty.find("a/old")
    assert faulty.find("a/old") is not None
    faulty.add(Fault("fail-read", "a/"))
    with pytest.raises(errors.StoreUnavailableError):
        faulty.list("a/")
    assert keys(faulty) == ["a/old"]
    faulty.add(Fault("fail-read", times=None))  # of reads alone
    faulty.put("b", b"data")
    assert inner.get("b") == b"data"


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


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_call_can_be_slow(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    faulty.add(Fault("slow", "a/", times=None, seconds=3.5))
    call(faulty)
    assert slept == [3.5]


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
