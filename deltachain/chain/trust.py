"""Trust in the documents of a chain: how a writer signs them, and which a reader accepts.

Without trusted keys a reader accepts every document. With trusted keys it accepts ``chain.json``
and each envelope only if a trusted key signed it, or an accepted document names its digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from deltachain.chain.signatures import SigningKey, TrustedKeys
from deltachain.environment import read_one
from deltachain.errors import ConfigError, FormatError, ObjectNotFoundError, SignatureError
from deltachain.format.documents import Document, Identity, Signature, dump, parse, seal
from deltachain.format.keys import CHAIN_KEY, signature_key
from deltachain.format.signed import CHAIN_ID, IdentitySignature, opened
from deltachain.store import Store

MAX_SIGNATURE: Final = 1 << 16
"""Size limit of the signature of ``chain.json``, in bytes; it is read before it is trusted."""

BEGIN: Final = (
    "if this chain was published without a signing key, `deltachain verify` it and then begin to "
    "sign with `deltachain sign`; if it is signed, its writer's public key is missing from "
    "DELTACHAIN_TRUSTED_KEYS, or the store has another chain than the one expected"
)
"""Hint for a chain whose identity no trusted key signed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """What one reader or writer of a chain accepts: its keys, and what it was told of the store.

    Attributes:
        key: The key that signs what is written; ``None`` for no signatures.
        trusted: The keys whose signatures count; ``None`` to accept every document.
        max_age_s: Largest age of the publisher's last sign, in seconds; ``None`` for no limit.
        mirror: Whether the store is a mirror, so that it may be behind the version that is held.
            Nothing in a store decides that.
    """

    key: SigningKey | None = None
    trusted: TrustedKeys | None = None
    max_age_s: float | None = None
    mirror: bool = False

    @classmethod
    def of_reader(
        cls,
        trusted_keys: str | None = None,
        max_age_s: float | None = None,
        environment: Mapping[str, str] = os.environ,
        *,
        mirror: bool | None = None,
    ) -> Trust:
        """Return the keys of a reader.

        Args:
            trusted_keys: As in ``DELTACHAIN_TRUSTED_KEYS``, which is read if it is ``None``.
            max_age_s: As in ``DELTACHAIN_MAX_HEARTBEAT_AGE_S``, which is read if it is ``None``.
            environment: The environment variables.
            mirror: As in ``DELTACHAIN_MIRROR``, which is read if it is ``None``.

        Raises:
            ConfigError: A key is invalid, or a limit of age is given without trusted keys.
        """
        trusted = _trusted(trusted_keys, environment)
        most_s = max_age_s or read_one(environment, "MAX_HEARTBEAT_AGE_S")
        if most_s is not None and trusted is None:
            raise ConfigError(
                "DELTACHAIN_MAX_HEARTBEAT_AGE_S is set without DELTACHAIN_TRUSTED_KEYS",
                hint="a heartbeat counts only if a trusted key signed it",
            )
        told = read_one(environment, "MIRROR") if mirror is None else mirror
        return cls(trusted=trusted, max_age_s=most_s, mirror=bool(told))

    @classmethod
    def of_writer(
        cls, signing_key: Path | None = None, environment: Mapping[str, str] = os.environ
    ) -> Trust:
        """Return the keys of a writer, which trusts its own key and those of a reader.

        Args:
            signing_key: File of the private key; ``DELTACHAIN_SIGNING_KEY`` if it is ``None``.
            environment: The environment variables.

        Raises:
            ConfigError: A key is invalid.
        """
        trusted = _trusted(None, environment)
        file = signing_key or read_one(environment, "SIGNING_KEY")
        if file is None:
            return cls(trusted=trusted)
        key = SigningKey.load(file)
        own = TrustedKeys((key.public,))
        return cls(key=key, trusted=own | trusted if trusted else own)

    def unchecked(self) -> Trust:
        """Return the same signing key without trusted keys, to begin to sign a chain."""
        return replace(self, trusted=None)

    def seal(self, document: Document, chain: str) -> bytes:
        """Encode a document in an envelope, signed if there is a signing key.

        Args:
            document: The document, of a type in ``RECORD_TYPES``.
            chain: Id of the chain.
        """
        if self.key is None:
            return seal(document)
        return seal(document, (self.key.sign(type(document), chain, dump(document)),))

    def signers(self, data: bytes, kind: type[Document], chain: str) -> tuple[str, ...]:
        """Return the ids of the trusted keys that signed an envelope.

        Args:
            data: The envelope, as :func:`documents.unseal` accepted it.
            kind: Class of its document.
            chain: Id of the chain.
        """
        if self.trusted is None:
            return ()
        payload, signatures = opened(data)
        return self.trusted.signers(signatures, kind, chain, payload)

    def check(self, data: bytes, kind: type[Document], *, chain: str, key: str) -> None:
        """Raise unless a trusted key signed an envelope, or no trusted keys are given.

        Args:
            data: The envelope, as :func:`documents.unseal` accepted it.
            kind: Class of its document.
            chain: Id of the chain.
            key: Key of the object, for the message.

        Raises:
            SignatureError: No trusted key signed it.
        """
        if self.trusted is not None and not self.signers(data, kind, chain):
            raise self.refusal(opened(data)[1], key)

    def refusal(self, signatures: tuple[Signature, ...], key: str) -> SignatureError:
        """Build the error for a document that no trusted key signed."""
        why = self.trusted.why_not(signatures) if self.trusted else "no key is trusted"
        return SignatureError(f"{key}: no trusted key signed it: {why}", key=key)

    def sign_identity(self, chain: str, data: bytes) -> dict[str, bytes]:
        """Return key and content of the object that signs ``chain.json``; empty without a key.

        Args:
            chain: Id of the chain.
            data: Exact bytes of ``chain.json``.
        """
        if self.key is None:
            return {}
        signature = self.key.sign(Identity, chain, data)
        document = IdentitySignature(chain=chain, signature=signature)
        return {signature_key(chain, self.key.public.key_id): dump(document)}

    def check_identity(self, store: Store, chain: str, data: bytes) -> None:
        """Raise unless a trusted key signed ``chain.json``, or no trusted keys are given.

        Args:
            store: Store of the chain.
            chain: Id of the chain that ``chain.json`` names.
            data: Exact bytes of ``chain.json``.

        Raises:
            SignatureError: No trusted key signed it.
        """
        if self.trusted is None:
            return
        found = []
        for key in self.trusted.keys:
            signature = _read_signature(store, chain, key.key_id)
            if signature is None:
                continue
            if self.trusted.signers([signature], Identity, chain, data):
                return
            found.append(signature)
        why = (
            self.trusted.why_not(found) if found else "none of them has a signature in signatures/"
        )
        message = f"{CHAIN_KEY}: no trusted key signed it: {why}"
        raise SignatureError(message, key=CHAIN_KEY, hint=BEGIN)


def _trusted(given: str | None, environment: Mapping[str, str]) -> TrustedKeys | None:
    """Parse the trusted keys that are given or, if ``None``, in the environment."""
    text = read_one(environment, "TRUSTED_KEYS") if given is None else given
    return TrustedKeys.parse(text) if text else None


def _read_signature(store: Store, chain: str, key_id: str) -> Signature | None:
    """Read the signature of ``chain.json`` by one key; ``None`` if it is missing or damaged."""
    if CHAIN_ID.fullmatch(chain) is None:
        return None
    key = signature_key(chain, key_id)
    try:
        return parse(store.get(key, limit=MAX_SIGNATURE), IdentitySignature, key=key).signature
    except (ObjectNotFoundError, FormatError):
        return None
