"""The calls of a store, each on the key ``a``."""

from collections.abc import Callable, Mapping

from deltachain.store import Store

LARGE = 17 << 20
"""Bytes that an S3 store puts in parts."""


EVERY = (
    *("get", "read", "get_range", "find", "find_all", "list"),
    *("put", "put_if_absent", "delete"),
)


def calls_of(store: Store, *names: str, nbytes: int = 4) -> list[Callable[[], object]]:
    """Calls by name; those of ``EVERY`` if no name is given."""
    every: Mapping[str, Callable[[], object]] = {
        "get": lambda: store.get("a"),
        "read": lambda: store.read("a", nbytes=nbytes),
        "get_range": lambda: store.get_range("a", 0, 10),
        "get_later_range": lambda: store.get_range("a", 3, 10),
        "find": lambda: store.find("a"),
        "find_all": lambda: store.find_all(["a", "b"]),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("a", b"data"),
        "put_if_absent": lambda: store.put_if_absent("a", b"data"),
        "delete": lambda: store.delete("a"),
        "large": lambda: store.put("a", bytes(LARGE)),
    }
    return [every[name] for name in names or EVERY]
