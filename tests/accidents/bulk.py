"""Many objects at once, as a person copies a store: in few requests, or in several threads."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from deltachain.store import Store
from deltachain.store.hf.store import HfStore

_AT_ONCE: Final = 1000

_THREADS: Final = 8


def put_all(store: Store, objects: Mapping[str, bytes]) -> None:
    if isinstance(store, HfStore):
        for some in _cut(list(objects)):
            _put_at_once(store, {key: objects[key] for key in some})
    elif _is_far(store):
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda item: store.put(*item), objects.items()))
    else:
        for key, data in objects.items():
            store.put(key, data)


def delete_all(store: Store, keys: Iterable[str]) -> None:
    if isinstance(store, HfStore):
        for some in _cut(list(keys)):
            _batch(store, [{"type": "deleteFile", "path": store._path(key)} for key in some])
    else:
        with ThreadPoolExecutor(_THREADS if _is_far(store) else 1) as pool:
            list(pool.map(store.delete, keys))


def _is_far(store: Store) -> bool:
    return store.url.startswith("s3://")


def _cut(keys: list[str]) -> Iterator[list[str]]:
    return (keys[first : first + _AT_ONCE] for first in range(0, len(keys), _AT_ONCE))


def _put_at_once(store: HfStore, objects: Mapping[str, bytes]) -> None:
    xet = store._xet
    with xet._session().new_upload_commit(**xet._access("write").arguments()) as commit:
        skip = xet._lib.SKIP_SHA256
        handles = [commit.start_upload_bytes(data, sha256=skip) for data in objects.values()]
    now = int(time.time() * 1000)
    contents = [str(handle.result().xet_info.hash) for handle in handles]
    _batch(
        store,
        [
            {"type": "addFile", "path": store._path(key), "xetHash": content, "mtime": now}
            for key, content in zip(objects, contents, strict=True)
        ],
    )


def _batch(store: HfStore, operations: Sequence[Mapping[str, Any]]) -> None:
    body = b"".join(json.dumps(operation).encode() + b"\n" for operation in operations)
    reply = store._hub.call("POST", "batch", dict, body=body, media="application/x-ndjson")
    assert not reply.document().get("failed"), reply.words
