"""Trust in the documents of a chain: how a writer signs them, and which a reader accepts.

Without trusted keys a reader accepts every document. With trusted keys it accepts ``chain.json``
and each envelope only if a trusted key signed it, or an accepted document names its digest.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Final

from deltachain.environment import read_one
from deltachain.errors import ConfigError, FormatError, ObjectNotFoundError, SignatureError
from deltachain.format import documents
from deltachain.format.keys import CHAIN_KEY, object_digest, signature_key
from deltachain.redact import redacted_path
from deltachain.store import Store

ALGORITHM: Final = "ed25519"  # the only algorithm of version 1 of the format (RFC 8032)
KEY_ID_DIGITS: Final = 32  # length of a key id: the first digits of the public key's blake3
_PUBLIC: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{64}})")
_VALUE: Final = re.compile(r"[0-9a-f]{128}")
_FORM: Final = f"{ALGORITHM}: and 64 hexadecimal digits, as `deltachain keygen` prints them"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, as text ``ed25519:`` and 64 hexadecimal digits."""

    raw: bytes  # its 32 bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        found = _PUBLIC.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"a trusted key is not a public key of {ALGORITHM}", hint=f"expected {_FORM}"
            )
        return cls(bytes.fromhex(found[1]))

    @property
    def key_id(self) -> str:
        """Name of the key in signatures: 32 hexadecimal digits."""
        return object_digest(self.raw)[:KEY_ID_DIGITS]

    def __str__(self) -> str:
        return f"{ALGORITHM}:{self.raw.hex()}"

    def verifies(self, signature: documents.Signature, signed: bytes) -> bool:
        if signature.algorithm != ALGORITHM or signature.key_id != self.key_id:
            return False
        if _VALUE.fullmatch(signature.value) is None:
            return False
        ed25519 = _ed25519()
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra

        try:
            key = ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
            key.verify(bytes.fromhex(signature.value), signed)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key."""

    seed: bytes = field(repr=False)  # its 32 secret bytes
    public: PublicKey

    @classmethod
    def generate(cls) -> SigningKey:
        return cls.of(os.urandom(32))

    @classmethod
    def of(cls, seed: bytes) -> SigningKey:
        key = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        return cls(seed, PublicKey(key.public_key().public_bytes_raw()))

    @classmethod
    def load(cls, file: Path) -> SigningKey:
        """Read a key from a PEM file (PKCS #8, not encrypted), as ``deltachain keygen`` writes."""
        hint = "`deltachain keygen` writes such a file"
        ed25519 = _ed25519()
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

        try:
            key = serialization.load_pem_private_key(file.read_bytes(), password=None)
        except OSError as exc:
            why = exc.strerror or "it cannot be read"
            raise ConfigError(f"signing key {redacted_path(file)}: {why}", hint=hint) from exc
        except (ValueError, TypeError) as exc:  # TypeError: it is encrypted
            message = (
                f"signing key {redacted_path(file)}: expected an unencrypted private key in PEM"
            )
            raise ConfigError(message, hint=hint) from exc
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise ConfigError(
                f"signing key {redacted_path(file)}: expected a key of {ALGORITHM}", hint=hint
            )
        return cls.of(key.private_bytes_raw())

    def pem(self) -> bytes:
        from cryptography.hazmat.primitives import serialization as to  # noqa: PLC0415

        key = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed)
        form = to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption()
        found: bytes = key.private_bytes(*form)
        return found

    def sign(
        self, kind: type[documents.Document], chain: str, payload: bytes
    ) -> documents.Signature:
        """Sign a document of a chain; equal documents get equal signatures."""
        try:
            signed = documents.signed_bytes(kind, chain, payload)
        except ValueError as exc:
            raise ConfigError(f"chain {chain!r} cannot be signed: {exc}") from exc
        value = _ed25519().Ed25519PrivateKey.from_private_bytes(self.seed).sign(signed)
        return documents.Signature(
            key_id=self.public.key_id, algorithm=ALGORITHM, value=value.hex()
        )


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys that a reader trusts; several while a new key replaces an old one."""

    keys: tuple[PublicKey, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigError("no trusted key is given", hint=f"expected {_FORM}")

    @classmethod
    def parse(cls, text: str) -> TrustedKeys:
        """Parse a list of keys with commas between them, or read a file with one key a line.

        In a file, empty lines, lines that begin with ``#``, and text after a key are ignored.
        """
        if text.lstrip().startswith(f"{ALGORITHM}:"):
            given = [part.strip() for part in text.split(",")]
        else:
            given = _lines(Path(text))
        return cls(tuple(dict.fromkeys(PublicKey.parse(key) for key in given)))

    def __str__(self) -> str:
        return ",".join(map(str, self.keys))

    def __or__(self, other: TrustedKeys) -> TrustedKeys:
        return TrustedKeys(tuple(dict.fromkeys((*self.keys, *other.keys))))

    def signers(
        self,
        signatures: Sequence[documents.Signature],
        kind: type[documents.Document],
        chain: str,
        payload: bytes,
    ) -> tuple[str, ...]:
        """Return the ids of the trusted keys that signed a document.

        Of several signatures with one key id only the first counts, so that a document cannot cost
        more than one verification a key.
        """
        try:
            signed = documents.signed_bytes(kind, chain, payload)
        except ValueError:
            return ()
        first = {one.key_id: one for one in reversed(signatures)}
        return tuple(
            key.key_id
            for key in self.keys
            if key.key_id in first and key.verifies(first[key.key_id], signed)
        )

    def why_not(self, signatures: Sequence[documents.Signature]) -> str:
        """Return why a document without :meth:`signers` is refused, for an error message."""
        if not signatures:
            return "it has no signature"
        known = {key.key_id for key in self.keys}
        ids = list(dict.fromkeys(one.key_id for one in signatures))
        false = [key_id for key_id in ids if key_id in known]
        if false:
            return f"its signature by the trusted key {false[0]} is false"
        more = f" and {len(ids) - 1} more" if ids[1:] else ""
        return f"it is signed by the key {ids[0][:80]!r}{more}, which is not trusted"


def _lines(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise ConfigError(
            f"trusted keys in {redacted_path(file)}: {why}",
            hint=f"name a file with one key a line, or list the keys: {_FORM}",
        ) from exc
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def _ed25519() -> ModuleType:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415 - an extra
    except ImportError as exc:
        raise ConfigError(
            "signatures need the package cryptography", hint="pip install 'deltachain[signing]'"
        ) from exc
    return ed25519


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
        """Return the keys of a writer, which trusts its own key and those of a reader."""
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

    def seal(self, document: documents.Document, chain: str) -> bytes:
        """Encode a document in an envelope, signed if there is a signing key."""
        if self.key is None:
            return documents.seal(document)
        return documents.seal(
            document, (self.key.sign(type(document), chain, documents.dump(document)),)
        )

    def signers(self, data: bytes, kind: type[documents.Document], chain: str) -> tuple[str, ...]:
        if self.trusted is None:
            return ()
        payload, signatures = documents.opened(data)
        return self.trusted.signers(signatures, kind, chain, payload)

    def check(self, data: bytes, kind: type[documents.Document], *, chain: str, key: str) -> None:
        """Raise unless a trusted key signed an envelope, or no trusted keys are given."""
        if self.trusted is not None and not self.signers(data, kind, chain):
            raise self.refusal(documents.opened(data)[1], key)

    def refusal(self, signatures: tuple[documents.Signature, ...], key: str) -> SignatureError:
        why = self.trusted.why_not(signatures) if self.trusted else "no key is trusted"
        return SignatureError(f"{key}: no trusted key signed it: {why}", key=key)

    def sign_identity(self, chain: str, data: bytes) -> dict[str, bytes]:
        """Return key and content of the object that signs ``chain.json``; empty without a key."""
        if self.key is None:
            return {}
        signature = self.key.sign(documents.Identity, chain, data)
        document = documents.IdentitySignature(chain=chain, signature=signature)
        return {signature_key(chain, self.key.public.key_id): documents.dump(document)}

    def check_identity(self, store: Store, chain: str, data: bytes) -> None:
        """Raise unless a trusted key signed ``chain.json``, or no trusted keys are given."""
        if self.trusted is None:
            return
        found = []
        for key in self.trusted.keys:
            signature = _read_signature(store, chain, key.key_id)
            if signature is None:
                continue
            if self.trusted.signers([signature], documents.Identity, chain, data):
                return
            found.append(signature)
        why = (
            self.trusted.why_not(found) if found else "none of them has a signature in signatures/"
        )
        message = f"{CHAIN_KEY}: no trusted key signed it: {why}"
        raise SignatureError(message, key=CHAIN_KEY, hint=BEGIN)


def _trusted(given: str | None, environment: Mapping[str, str]) -> TrustedKeys | None:
    text = read_one(environment, "TRUSTED_KEYS") if given is None else given
    return TrustedKeys.parse(text) if text else None


def _read_signature(store: Store, chain: str, key_id: str) -> documents.Signature | None:
    """Read the signature of ``chain.json`` by one key; ``None`` if it is missing or damaged."""
    if documents.CHAIN_ID.fullmatch(chain) is None:
        return None
    key = signature_key(chain, key_id)
    try:
        return documents.parse(
            store.get(key, limit=MAX_SIGNATURE), documents.IdentitySignature, key=key
        ).signature
    except (ObjectNotFoundError, FormatError):
        return None
