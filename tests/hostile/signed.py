"""A signed chain, an attacker who controls its store, and a follower that trusts its key."""

import json
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from deltachain.chain.trust import SigningKey, Trust, TrustedKeys
from deltachain.format import keys
from deltachain.format.keys import digest_key
from deltachain.store import MemoryStore
from deltachain.subscribe import SubscribeConfig, Subscriber
from deltachain.types import Bits, StateDigest, TensorSpec
from tests.contract import reference
from tests.format.forge import dumps, enveloped
from tests.format.freeze import Builder, dense, step

SPEC: Final = TensorSpec("w", "BF16", (8, 8))


def trust_of(*seeds: int, key: int | None = None) -> Trust:
    trusted = TrustedKeys(tuple(key_of(seed).public for seed in seeds)) if seeds else None
    return Trust(key=None if key is None else key_of(key), trusted=trusted)


def key_of(seed: int) -> SigningKey:
    return SigningKey.of(bytes([seed]) * 32)


OWNER: Final = trust_of(1, key=1)
MALLORY: Final = trust_of(9, key=9)
NOBODY: Final = Trust()


def bits_of(version: int, evil: int = 0) -> Bits:
    return np.full(SPEC.numel, 0x3F80 + version + 0x100 * evil, np.uint16)


def state_of(bits: Bits) -> StateDigest:
    return reference.digest(digest_key(SPEC), bits)


class Author(Builder):
    def __init__(self, trust: Trust = OWNER, *, chain_id: str = f"{7:032x}", evil: int = 0) -> None:
        super().__init__([SPEC], {}, trust=trust, chain_id=chain_id)
        self.evil = evil

    def grow(self, count: int, *, epoch: int = 0) -> "Author":
        for _ in range(count):
            version = 0 if self.parent is None else self.parent.version + 1
            new = bits_of(version, self.evil)
            if version == 0:
                edge = self.put("anchor", None, 0, [dense(SPEC, new)])
            else:
                change = step(SPEC, bits_of(version - 1, self.evil), new)
                edge = self.put("delta", version - 1, version, [change])
            self.commit(version, edge, state_of(new), nnz=SPEC.numel, epoch=epoch)
        return self

    def anchor(self) -> "Author":
        assert self.parent is not None
        version = self.parent.version
        edge = self.put("anchor", None, version, [dense(SPEC, bits_of(version, self.evil))])
        self.added.append(self.chain.add_edge(self.parent, edge, ""))
        return self

    def with_trust(self, trust: Trust) -> "Author":
        self.chain = type(self.chain).open(self.store, trust)
        return self


class Follower:
    def __init__(self, store: MemoryStore, *trusted: int) -> None:
        self.tensor: Tensor = torch.zeros(SPEC.shape, dtype=torch.bfloat16)
        given = ",".join(str(key_of(seed).public) for seed in trusted)
        config = SubscribeConfig(url=store.url, trusted_keys=given)
        self.subscriber = Subscriber(config, {SPEC.name: self.tensor}, store=store)

    def bits(self) -> Bits:
        return self.tensor.view(torch.uint16).numpy().reshape(-1).copy()

    def holds(self, bits: Bits) -> bool:
        return bool(np.array_equal(self.bits(), bits))


def edit(store: MemoryStore, key: str, change: Callable[[Any], object], *, keeps: bool) -> None:
    """Change the payload of an envelope and hash it again; keep its signatures, or none."""
    envelope = json.loads(store.get(key))
    change(envelope["payload"])
    signatures = dumps(envelope["signatures"]) if keeps else b"[]"
    store.put(key, enveloped(dumps(envelope["payload"]), signatures))


def resign(store: MemoryStore, key: str, signatures: Any) -> None:
    """Keep the payload of an envelope, under other signatures."""
    payload = json.loads(store.get(key))["payload"]
    store.put(key, enveloped(dumps(payload), dumps(signatures)))


def signatures_of(store: MemoryStore, key: str) -> Any:
    return json.loads(store.get(key))["signatures"]


def signature_place(seed: int, chain: str = f"{7:032x}") -> str:
    return keys.signature_key(chain, key_of(seed).public.key_id)
