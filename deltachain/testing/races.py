"""Contract tests of ``Store`` for concurrent callers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from deltachain.errors import AlreadyExistsError
from deltachain.store.base import Store

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
        """While one thread replaces an object, every read is one whole object."""
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
        """Removing the last object of a folder never takes a new one along, or fails its put."""

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
