"""Chains of manifests without payloads, and the stores they are tried on."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deltachain.chain.chain import Chain, Committed
from deltachain.chain.plan import KnownEdges, window_from
from deltachain.errors import AlreadyExistsError
from deltachain.format.documents import Edge, Manifest, Table
from deltachain.format.keys import object_digest
from deltachain.store import MemoryStore, ObjectInfo
from deltachain.store.base import Capabilities
from deltachain.types import Buffer, StateDigest

TABLE = Table(tensors=(("a", "BF16", (4, 4)), ("b", "F32", (3,))), aliases={"c": "a"})
ANCHOR = Edge(kind="anchor", encodings=("dense",))


class SingleWriterStore(MemoryStore):
    """A store that cannot decide a race: it looks first and then writes."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=False, list_consistent=False)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self.find(key) is not None:
            raise AlreadyExistsError(key, key=key)
        self.put(key, data)


class WideStore(SingleWriterStore):
    """One that also looks up many keys in one request, and names the content it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.looks: list[list[str]] = []
        self.pinned: list[str] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=False, list_consistent=False, probes=1000)

    def find(self, key: str) -> ObjectInfo | None:
        return self.find_all([key]).get(key)

    def find_all(self, keys: Iterable[str]) -> Mapping[str, ObjectInfo]:
        wanted = list(keys)
        self.looks.append(wanted)
        found = {key: super(WideStore, self).find(key) for key in wanted}
        return {
            key: replace(info, pin=object_digest(self.get(key)))
            for key, info in found.items()
            if info is not None
        }

    def read(self, key: str, *, nbytes: int, pin: str = "") -> Buffer:
        self.pinned.append(pin)
        return super().read(key, nbytes=nbytes)


STORES = [MemoryStore, SingleWriterStore, WideStore]


def create(store: Any) -> Chain:
    return Chain.create(store, TABLE, chain_id="one", time=0.0, assets={})


def state(version: int) -> str:
    return str(StateDigest(version + 1, 7))


def manifest_after(parent: Committed | None, **changes: Any) -> Manifest:
    version = parent.version + 1 if parent else 0
    own = Edge(kind="delta", base=version - 1, encodings=("step",)) if parent else ANCHOR
    fields: dict[str, Any] = {
        "chain": "one",
        "version": version,
        "epoch": 0,
        "commit_id": f"commit-{version}",
        "parent": parent.digest if parent else "",
        "step": version,
        "time": 0.0,
        "base_state": parent.manifest.state if parent else "",
        "state": state(version),
        "nnz": 1,
        "numel": 19,
        "edge": own,
        "recent": KnownEdges().after(parent.manifest).edges if parent else (),
        "window_from": window_from(version),
    }
    return Manifest(**fields | changes)


def extend(chain: Chain, count: int, parent: Committed | None = None) -> list[Committed]:
    made = []
    for _ in range(count):
        parent = chain.commit(manifest_after(parent))
        made.append(parent)
    return made
