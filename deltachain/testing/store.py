"""Contract test suite of ``Store``, for built-in and third-party stores.

Subclass ``StoreContract`` in a test module and give it two fixtures::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self) -> MyStore: ...  # empty

        @pytest.fixture
        def reopen(self, store) -> Callable[[], Store]: ...  # another handle on the same objects

Call ``pytest.register_assert_rewrite("deltachain.testing.store")`` before the import for assertions
that show their values.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import pytest

from deltachain.errors import AlreadyExistsError, ConfigError, MalformedError, ObjectNotFoundError
from deltachain.store.base import MAX_KEY_LENGTH, MAX_SEGMENT_LENGTH, Store
from deltachain.types import Buffer

Reopen: TypeAlias = Callable[[], Store]  # opens another handle of the same store


class RaceContract:
    """Races between handles. Needs the fixtures ``store`` (empty) and ``reopen``."""

    race_rounds = 20
    """Rounds of each race; fewer if a put is slow."""

    def test_one_of_racing_put_if_absent_wins(self, store: Store, reopen: Reopen) -> None:
        """Exactly one of concurrent puts succeeds, and the object is the winner's.

        Without a conditional put at least one, and the object is a winner's, whole.
        """
        handles = [reopen() for _ in range(8)]
        for turn in range(self.race_rounds):
            key = f"manifests/{turn}"
            barrier = threading.Barrier(len(handles))

            def attempt(
                number: int, *, key: str = key, barrier: threading.Barrier = barrier
            ) -> bool:
                barrier.wait()
                try:
                    handles[number].put_if_absent(key, bytes([number]) * 1000)
                except AlreadyExistsError:
                    return False
                return True

            with ThreadPoolExecutor(len(handles)) as pool:
                won = list(pool.map(attempt, range(len(handles))))
            assert won.count(True) >= 1
            if store.capabilities.conditional_put:
                assert won.count(True) == 1
            data = store.get(key)
            assert won[data[0]]
            assert data == data[:1] * 1000

    def test_readers_never_see_a_mixture(self, store: Store, reopen: Reopen) -> None:
        store.put("a", b"\0" * 100_000)
        stop = threading.Event()

        def write() -> None:
            other, turn = reopen(), 0
            while not stop.is_set():
                turn = (turn + 1) % 256
                other.put("a", bytes([turn]) * (100_000 + turn))

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            try:
                for _ in range(10 * self.race_rounds):
                    data = store.get("a")
                    assert data == bytes([data[0]]) * (100_000 + data[0])
            finally:
                stop.set()
            writing.result()

    def test_put_survives_deletes_of_its_neighbours(self, store: Store, reopen: Reopen) -> None:
        def churn(number: int) -> None:
            other = reopen()
            for turn in range(self.race_rounds):
                key = f"shared/folder/{number}-{turn}"
                other.put(key, b"data")
                assert other.get(key) == b"data"
                other.delete(key)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(churn, range(4)))
        assert list(store.list()) == []


BAD_KEYS = (
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "a/./b",
    ".hidden",
    "a/.tmp-1",
    "a b",
    "a\\b",
    "a\n",
    "a\0b",
    "ä",
    "a:b",
    "a?b",
    "a%2fb",
    "x" * (MAX_SEGMENT_LENGTH + 1),
    "/".join("x" * 100 for _ in range(6)),
)

GOOD_KEYS = (
    "a",
    "A-b_c.d",
    "-",
    "_",
    "0",
    "a..b",
    "a.",
    "manifests/00000000000000000042.json",
    "x" * MAX_SEGMENT_LENGTH,
    "/".join(["y" * 127] * 4) + "z",
)


class StoreContract(RaceContract):
    """Contract of ``Store``. Needs the fixtures ``store`` (empty) and ``reopen``."""

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 3_000_000])
    def test_object_is_read_back_as_written(
        self, store: Store, reopen: Reopen, nbytes: int
    ) -> None:
        data = pattern(nbytes)
        store.put("some/object", data)
        assert store.get("some/object") == data
        assert reopen().get("some/object") == data

    @pytest.mark.parametrize(
        "data",
        [
            bytearray(b"abcdef"),
            memoryview(b"abcdef"),
            memoryview(b"fedcba")[::-1],
            memoryview(b"abcdef").cast("H"),
            memoryview(b"abcdef").cast("B", shape=[2, 3]),
        ],
        ids=["bytearray", "view", "strided", "wide", "two-dimensional"],
    )
    def test_anything_bytes_like_is_written(self, store: Store, data: Buffer) -> None:
        """Bytes in memory order, whatever the element size and shape."""
        store.put("a", data)
        store.put_if_absent("b", data)
        assert store.get("a") == store.get("b") == b"abcdef"

    def test_data_is_not_kept(self, store: Store) -> None:
        data = bytearray(b"before")
        store.put("a", data)
        data[:] = b"after!"
        assert store.get("a") == b"before"

    @pytest.mark.parametrize("key", GOOD_KEYS, ids=range(len(GOOD_KEYS)))
    def test_good_key_is_kept_exactly(self, store: Store, key: str) -> None:
        store.put_if_absent(key, b"data")
        assert store.get(key) == b"data"
        assert [found.key for found in store.list()] == [key]

    @pytest.mark.parametrize("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
    def test_bad_key_is_refused(self, store: Store, key: str) -> None:
        calls: Sequence[Callable[[], object]] = (
            lambda: store.get(key),
            lambda: store.get_range(key, 0, 1),
            lambda: store.read(key, nbytes=1),
            lambda: store.find_all([key]),
            lambda: store.put(key, b""),
            lambda: store.put_if_absent(key, b""),
            lambda: store.find(key),
            lambda: store.delete(key),
        )
        for call in calls:
            with pytest.raises(ConfigError):
                call()
        assert list(store.list()) == []

    def test_longest_good_key_is_as_long_as_allowed(self) -> None:
        assert len(GOOD_KEYS[-1]) == MAX_KEY_LENGTH

    def test_uploads_are_revealed_together(self, store: Store, reopen: Reopen) -> None:
        pins = {f"parts/{n}": reopen().upload(f"parts/{n}", b"part %d" % n) for n in range(3)}
        for _ in range(2):
            store.reveal(pins)
        store.reveal({})
        assert {key: reopen().get(key) for key in pins} == {
            f"parts/{n}": b"part %d" % n for n in range(3)
        }
        for key, pin in pins.items():
            assert bytes(reopen().read(key, nbytes=6, pin=pin)) == store.get(key)

    @pytest.mark.parametrize("key", BAD_KEYS[:4])
    def test_bad_key_is_not_uploaded(self, store: Store, key: str) -> None:
        with pytest.raises(ConfigError):
            store.upload(key, b"data")

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"long old object")
        store.put("a", b"new")
        assert store.get("a") == b"new"
        found = store.find("a")
        assert found is not None
        assert found.nbytes == 3

    def test_put_if_absent_leaves_what_is_there(self, store: Store, reopen: Reopen) -> None:
        store.put_if_absent("a", b"first")
        with pytest.raises(AlreadyExistsError) as caught:
            reopen().put_if_absent("a", b"second")
        assert (caught.value.key, caught.value.url) == ("a", store.url)
        assert store.get("a") == b"first"

    def test_put_if_absent_after_delete(self, store: Store) -> None:
        store.put_if_absent("a", b"first")
        store.delete("a")
        store.put_if_absent("a", b"second")
        assert store.get("a") == b"second"

    @pytest.mark.parametrize("nbytes", [0, 1, 4096, 40_000_000])
    def test_object_of_known_size_is_read(self, store: Store, reopen: Reopen, nbytes: int) -> None:
        data = pattern(nbytes)
        pin = store.put("some/object", data)
        assert bytes(store.read("some/object", nbytes=nbytes)) == data
        assert bytes(reopen().read("some/object", nbytes=nbytes, pin=pin)) == data

    @pytest.mark.parametrize("nbytes", [0, 999, 1001, 1 << 62])
    def test_object_of_another_size_is_refused(self, store: Store, nbytes: int) -> None:
        put = store.put("a", pattern(1000))
        for pin in {"", put}:
            with pytest.raises(MalformedError) as caught:
                store.read("a", nbytes=nbytes, pin=pin)
            assert caught.value.key == "a"

    def test_pinned_read_is_of_what_was_put(self, store: Store, reopen: Reopen) -> None:
        first = store.put("a", b"first")
        second = store.put("a", b"2nd: longer")
        assert bytes(store.read("a", nbytes=11, pin=second)) == b"2nd: longer"
        if first:
            assert bytes(reopen().read("a", nbytes=5, pin=first)) == b"first"
        else:
            assert second == ""

    def test_object_above_the_limit_is_refused(self, store: Store) -> None:
        store.put("a", pattern(1000))
        assert store.get("a", limit=1000) == pattern(1000)
        with pytest.raises(MalformedError) as caught:
            store.get("a", limit=999)
        assert caught.value.key == "a"

    @pytest.mark.parametrize(
        ("start", "length"), [(0, 0), (0, 1), (0, 1000), (17, 500), (999, 1), (1000, 0)]
    )
    def test_range_inside_the_object(self, store: Store, start: int, length: int) -> None:
        data = pattern(1000)
        store.put("a", data)
        assert store.get_range("a", start, length) == data[start : start + length]

    @pytest.mark.parametrize(
        ("start", "length"), [(0, 1001), (999, 2), (1000, 1), (1001, 0), (5000, 5), (0, 1 << 62)]
    )
    def test_range_beyond_the_end_is_refused(self, store: Store, start: int, length: int) -> None:
        store.put("a", pattern(1000))
        with pytest.raises(MalformedError) as caught:
            store.get_range("a", start, length)
        assert caught.value.key == "a"

    @pytest.mark.parametrize(("start", "length"), [(-1, 1), (0, -1)])
    def test_negative_range_is_refused(self, store: Store, start: int, length: int) -> None:
        store.put("a", b"data")
        with pytest.raises(ConfigError):
            store.get_range("a", start, length)
        with pytest.raises(ConfigError):
            store.read("a", nbytes=-1)

    @pytest.mark.parametrize("key", ["absent", "folder", "folder/absent", "none/such"])
    def test_absent_object(self, store: Store, key: str) -> None:
        """A missing key is a FileNotFoundError of reads, None of find, and no error of delete."""
        store.put("folder/object", b"data")
        reads: Sequence[Callable[[], Buffer]] = (
            lambda: store.get(key),
            lambda: store.read(key, nbytes=4),
            lambda: store.get_range(key, 0, 0),
        )
        for read in reads:
            with pytest.raises(ObjectNotFoundError) as caught:
                read()
            assert isinstance(caught.value, FileNotFoundError)
            assert (caught.value.key, caught.value.url) == (key, store.url)
            assert key in str(caught.value)
        assert store.find(key) is None
        store.delete(key)
        assert store.get("folder/object") == b"data"

    def test_find_tells_size_and_time(self, store: Store) -> None:
        store.put("folder/object", bytes(1234))
        found = store.find("folder/object")
        assert found is not None
        assert (found.key, found.nbytes) == ("folder/object", 1234)
        assert found.modified is None or found.modified > 1e9

    def test_its_clock_is_that_of_its_writes(self, store: Store) -> None:
        """``clock`` returns the time by the clock that tells when objects were written, if any."""
        store.put("folder/object", b"data")
        found, now = store.find("folder/object"), store.clock()
        assert found is not None
        if now is not None and found.modified is not None:
            assert -2 < now - found.modified < 60

    def test_find_all_tells_those_that_exist(self, store: Store) -> None:
        """``find_all`` returns existing objects by key, within the declared number of requests."""
        keys = [f"folder/{number:02}" for number in range(40)]
        for key in keys[::2]:
            store.put(key, key.encode())
        before = store.requests
        found = store.find_all(keys)
        spent = store.requests - before
        assert {key: info.nbytes for key, info in found.items()} == dict.fromkeys(keys[::2], 9)
        assert all(info.key == key for key, info in found.items())
        assert spent <= -(-len(keys) // store.capabilities.probes)
        assert store.find_all([]) == {}

    def test_requests_are_counted(self, store: Store) -> None:
        seen = [store.requests]
        for call in (
            lambda: store.put("a", b"data"),
            lambda: store.find("a"),
            lambda: store.get("a"),
            lambda: list(store.list()),
            lambda: store.delete("a"),
        ):
            call()
            seen.append(store.requests)
        steps = [after - before for before, after in pairwise(seen)]
        assert all(step > 0 for step in steps) or not any(seen)

    def test_list_is_sorted_by_key(self, store: Store) -> None:
        keys = ["b/1", "a/b/c", "a.b", "a-b", "a0", "a_", "B", "b/10", "b/2", "a/a", "c"]
        for key in keys:
            store.put(key, key.encode())
        assert [(found.key, found.nbytes) for found in store.list()] == [
            (key, len(key)) for key in sorted(keys)
        ]

    @pytest.mark.parametrize(
        ("prefix", "expected"),
        [
            ("", ["del", "deltas/1/a", "deltas/10/a", "deltas/2", "z"]),
            ("del", ["del", "deltas/1/a", "deltas/10/a", "deltas/2"]),
            ("deltas/", ["deltas/1/a", "deltas/10/a", "deltas/2"]),
            ("deltas/1", ["deltas/1/a", "deltas/10/a"]),
            ("deltas/1/", ["deltas/1/a"]),
            ("deltas/1/a", ["deltas/1/a"]),
            ("deltas/2/", []),
            ("deltas/3", []),
            ("absent/", []),
        ],
    )
    def test_list_by_prefix(self, store: Store, prefix: str, expected: list[str]) -> None:
        for key in ("deltas/10/a", "z", "deltas/2", "del", "deltas/1/a"):
            store.put(key, b"")
        assert [found.key for found in store.list(prefix)] == expected

    @pytest.mark.parametrize("prefix", ["/", "..", "a/../", ".", "a//", "a b"])
    def test_prefix_of_no_key_is_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(ConfigError):
            store.list(prefix)

    def test_empty_store(self, store: Store, reopen: Reopen) -> None:
        assert list(store.list()) == []
        assert store.find("a") is None
        store.delete("a")
        assert list(reopen().list("a/")) == []

    def test_delete_is_idempotent(self, store: Store) -> None:
        for key in ("a/b/c", "a/b/d"):
            store.put(key, b"data")
        store.delete("a/b/c")
        store.delete("a/b/c")
        assert [found.key for found in store.list()] == ["a/b/d"]

    def test_close_twice(self, reopen: Reopen) -> None:
        other = reopen()
        other.close()
        other.close()


def pattern(nbytes: int) -> bytes:
    return np.arange(nbytes // 4 + 1, dtype="<u4").tobytes()[:nbytes]
