"""All objects of a store, kept and put back."""

from collections.abc import Mapping

from deltachain.store import Store


def objects_of(store: Store, prefix: str = "") -> dict[str, bytes]:
    listed = store.list(prefix)
    return {info.key: bytes(store.get(info.key, limit=info.nbytes)) for info in listed}


def put_back(store: Store, objects: Mapping[str, bytes]) -> None:
    for info in list(store.list()):
        if info.key not in objects:
            store.delete(info.key)
    for key, data in objects.items():
        store.put(key, data)
