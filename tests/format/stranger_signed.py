"""A reader of signed chains made from FORMAT.md alone: it shares no code with deltachain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from tests.format.stranger_base import read_json, require
from tests.format.stranger_chain import (
    DOCUMENT,
    REQUIRED,
    SIGNATURE,
    Chain,
    Fields,
    Get,
    check_document,
    manifest_key,
    one,
    text,
)

NAME: Final = re.compile("[A-Za-z0-9_-][A-Za-z0-9._-]*")
OF_CHAIN: Final[Fields] = {
    **DOCUMENT,
    "chain": (text, REQUIRED),
    "signature": (one(SIGNATURE), REQUIRED),
}


def key_id(public: bytes) -> str:
    return blake3(public).hexdigest()[:32]


def signed_bytes(record: str, chain: str, payload: bytes) -> bytes:
    require(NAME.fullmatch(chain), "the chain's id is no name")
    return b"\0".join([b"deltachain signature", record.encode(), chain.encode(), payload])


def verifies(public: bytes, signature: Mapping[str, str], signed: bytes) -> bool:
    value = signature["value"]
    if (signature["key_id"], signature["algorithm"]) != (key_id(public), "ed25519"):
        return False
    if re.fullmatch("[0-9a-f]{128}", value) is None:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(bytes.fromhex(value), signed)
    except InvalidSignature:
        return False
    return True


def payload_of(envelope: bytes) -> bytes:
    return envelope[envelope.index(b'"payload":') + 10 : envelope.rindex(b',"signatures":')]


class SignedChain(Chain):
    """The chain that ``get`` reads, of which only what a trusted key signed is believed."""

    def __init__(self, get: Get, trusted: list[bytes]) -> None:
        super().__init__(get)
        self._trusted = trusted
        self._id: str = self.identity["chain"]
        signatures = [s for public in trusted if (s := self._of_chain(key_id(public))) is not None]
        self.require_signed("chain", self.get("chain.json"), signatures)

    def _of_chain(self, name: str) -> Any:
        data = self._get(f"signatures/{self._id}/{name}.json")
        return None if data is None else check_document(read_json(data), OF_CHAIN)["signature"]

    def require_signed(self, record: str, payload: bytes, signatures: list[Any]) -> None:
        first: dict[str, Any] = {}
        for signature in signatures:
            first.setdefault(signature["key_id"], signature)
        signed = signed_bytes(record, self._id, payload)
        found = [(public, first.get(key_id(public))) for public in self._trusted]
        require(any(s and verifies(public, s, signed) for public, s in found), "not signed")

    def require_envelope(self, record: str, key: str) -> None:
        data = self.get(key)
        self.require_signed(record, payload_of(data), read_json(data)["signatures"])

    def head(self) -> int:
        """The newest version; it is signed, and all others are named through their parents."""
        newest = super().head()
        self.require_envelope("manifest", manifest_key(newest))
        return newest
