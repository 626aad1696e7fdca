"""Objects in a bucket of the Hugging Face Hub: ``hf://buckets/namespace/name/prefix``.

The Hub's API maps paths to hashes; the content lies in Xet storage, from where it is read by hash.
So a ``read`` that is pinned to a hash costs no request to the API, and sees that content whatever
the path has become. What requests each call costs, beside a token for reading and one for writing
the storage about once an hour:

=================  ===========================================================
``read`` (pinned)  0
``read``, ``get``  1
``find_all``       1 for each 1,000 keys
``put``            1
``put_if_absent``  2; 1 through the S3 gateway
``list``           1 for each 1,000 objects below the folder of the prefix
``delete``         1; 2 where there was nothing
=================  ===========================================================
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from typing_extensions import override

from deltachain.errors import StoreUnavailableError
from deltachain.store.base import (
    MAX_DOCUMENT,
    Capabilities,
    ObjectInfo,
    Store,
    already_exists,
    bytes_view,
    check_key,
    check_limit,
    check_nbytes,
    check_prefix,
    check_range,
    not_found,
    too_short,
)
from deltachain.store.guard import guarded
from deltachain.store.hf.api import IN_BETWEEN, Hub, parse_reply
from deltachain.store.hf.gateway import Gateway, GatewayKey, Maybe
from deltachain.store.hf.xet import Xet
from deltachain.types import Buffer

_PROBES: Final = 1000
"""Paths in one look-up, as ``huggingface_hub`` sends them."""

_POLL_S: Final = 5.0


@guarded
class HfStore(Store):
    """Objects below a prefix of one bucket.

    *Single writer.* The Hub's API has no conditional write, so ``put_if_absent`` looks first: of
    two racing callers both may return, and the object is the later one's. With a ``gateway`` it is
    decided by the Hub's S3 gateway, and one returns.

    *Consistency.* The Hub documents none. Nothing is remembered between calls: every ``find`` and
    every unpinned read asks anew.

    *Integrity.* The length of what was read is checked, its bytes are not: a bit that flipped in
    the storage or on the way arrives. Callers compare digests.

    A failed request is tried again, and a limit that the Hub names is waited for, for as long as
    ``deadline_s`` of the ``Hub`` allows; transfers, for as long as they stood still no longer.
    Redirects are followed to the same server only. A write is believed if the answer tells of no
    failure in the Hub's words; else the path is looked up.
    """

    def __init__(self, hub: Hub, prefix: str = "", *, gateway: GatewayKey | None = None) -> None:
        self._hub = hub
        self._xet = Xet(hub)
        self._folder = f"{check_key(prefix)}/" if prefix else ""
        self._gateway = Gateway(hub, gateway) if gateway is not None else None
        self._capabilities = Capabilities(
            conditional_put=gateway is not None,
            list_consistent=False,
            probes=_PROBES,
            poll_s=_POLL_S,
        )

    @property
    @override
    def url(self) -> str:
        """``hf://buckets/``, the bucket and the prefix."""
        return self._hub.place.url

    @property
    @override
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    @override
    def requests(self) -> int:
        """Requests to the Hub, which has a rate limit for them; none of those to its storage."""
        return self._hub.requests

    @override
    def get(self, key: str, *, limit: int = MAX_DOCUMENT) -> bytes:
        found = self._find(key)
        check_limit(key, self.url, nbytes=found.nbytes, limit=limit)
        return bytes(self._xet.read(found.pin, nbytes=found.nbytes, key=key))

    @override
    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        """Read a whole object of known size, by its hash if that is known too; see ``Store``."""
        check_range(0, nbytes)
        check_key(key)
        if not pin:
            found = self._find(key)
            check_nbytes(key, self.url, expected=nbytes, actual=found.nbytes)
            pin = found.pin
        return self._xet.read(pin, nbytes=nbytes, key=key)

    @override
    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        found = self._find(key)
        if start + length > found.nbytes:
            raise too_short(key, self.url, nbytes=found.nbytes, end=start + length)
        return bytes(self._xet.read_range(found.pin, start, length, key=key))

    @override
    def put(self, key: str, data: Buffer) -> str:
        """Write an object, in place of any other, and name its content; see ``Store``.

        The content is in the storage before the path is given to it, so nobody sees a part.
        """
        check_key(key)
        content = self._xet.write(data, key=key)
        add = {
            "type": "addFile",
            "path": self._path(key),
            "xetHash": content,
            "mtime": int(time.time() * 1000),
        }
        failed = self._batch(add, key)
        if failed is None and not self._names(key, content):
            failed = f"a success that wrote nothing; {IN_BETWEEN}"
        if failed:
            raise StoreUnavailableError(
                f"object {key!r} in {self.url}: {failed}", key=key, url=self.url
            )
        return content

    @override
    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Write an object under a key that has none; see ``Store`` and the class."""
        check_key(key)
        if self._gateway is None:
            if self.find(key) is not None:
                raise already_exists(key, self.url)
            self.put(key, data)
            return
        ours = bytes(bytes_view(data))
        try:
            self._gateway.put_if_absent(self._path(key), ours, key=key)
        except Maybe:
            # An earlier try may have written it and lost the reply: then these are our bytes.
            if not self._holds(key, ours):
                raise already_exists(key, self.url) from None

    @override
    def find(self, key: str) -> ObjectInfo | None:
        return self.find_all([key]).get(key)

    @override
    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        """Look several objects up, 1,000 in a request; see ``Store``."""
        asked = [check_key(key) for key in keys]
        found: dict[str, ObjectInfo] = {}
        for first in range(0, len(asked), _PROBES):
            some = asked[first : first + _PROBES]
            body = json.dumps({"paths": [self._path(key) for key in some]}).encode()
            reply = self._hub.call("POST", "paths-info", list, body=body, key=some[0])
            found |= {info.key: info for info in self._parse(parse_reply(reply, self.url))}
        return found

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object whose key begins with ``prefix``, in order; see ``Store``.

        The Hub promises no order, so all are known before the first is given.
        """
        return self._list(check_prefix(prefix))

    @override
    def delete(self, key: str) -> None:
        """Remove an object if there is one; see ``Store``. Its content stays in the storage."""
        check_key(key)
        failed = self._batch({"type": "deleteFile", "path": self._path(key)}, key)
        # The Hub calls it a failure that there was nothing, in words that it does not document.
        if failed != "" and self.find(key) is not None:
            raise StoreUnavailableError(
                f"object {key!r} in {self.url}: {failed or 'it was not deleted'}",
                key=key,
                url=self.url,
            )

    @override
    def close(self) -> None:
        """Give the gateway's connections back; ``huggingface_hub`` shares its own."""
        if self._gateway is not None:
            self._gateway.close()

    def _path(self, key: str) -> str:
        return f"{self._folder}{key}"

    def _find(self, key: str) -> ObjectInfo:
        found = self.find(key)
        if found is None:
            raise not_found(key, self.url)
        return found

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = self._path(prefix).rpartition("/")[0]
        route = f"tree/{quote(folder, safe='')}" if folder else "tree"
        following = f"{route}?recursive=true"
        found: dict[str, ObjectInfo] = {}
        while following:
            reply = self._hub.call("GET", following, list)
            if reply.status == 404:  # no such folder
                break
            page = parse_reply(reply, self.url)
            found |= {info.key: info for info in self._parse(page) if info.key.startswith(prefix)}
            following = reply.following
        for key in sorted(found):
            yield found[key]

    def _batch(self, operation: Mapping[str, Any], key: str) -> str | None:
        """Do one thing to the bucket; why it was refused, if it was; None if nothing tells."""
        body = json.dumps(operation).encode() + b"\n"
        reply = self._hub.call(
            "POST", "batch", dict, body=body, media="application/x-ndjson", key=key
        )
        document = parse_reply(reply, self.url)
        failed = document.get("failed")
        if isinstance(failed, list):
            return "; ".join(str(each.get("error", "refused")) for each in failed)
        return "" if document.get("success") is True else None

    def _names(self, key: str, content: str) -> bool:
        """Whether a path has this content."""
        found = self.find(key)
        return found is not None and found.pin == content

    def _parse(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[ObjectInfo]:
        """The objects below the prefix among the rows of a reply."""
        for row in rows:
            path = row["path"]  # what is no text fails here, which the boundary of the store types
            if row["type"] == "file" and path.startswith(self._folder):
                yield ObjectInfo(
                    key=path.removeprefix(self._folder),
                    nbytes=int(row["size"]),
                    modified=_seconds(row.get("uploadedAt") or row.get("mtime")),
                    pin=str(row["xetHash"]),
                )

    def _holds(self, key: str, data: bytes) -> bool:
        """Whether an object that the gateway knows of has these bytes."""
        found = self.find(key)
        if found is None:
            raise StoreUnavailableError(
                f"object {key!r} in {self.url}: the gateway has it and the Hub does not yet",
                key=key,
                url=self.url,
            )
        if found.nbytes != len(data):
            return False
        return self._xet.read(found.pin, nbytes=len(data), key=key) == data


def _seconds(date: str | None) -> float | None:
    return datetime.fromisoformat(date).timestamp() if date else None
