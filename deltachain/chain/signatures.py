"""Ed25519 keys: a publisher signs with one, readers trust several.

Pure functions over bytes; :mod:`deltachain.chain.trust` decides which documents must be signed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from deltachain.errors import ConfigError
from deltachain.format.digest import object_digest
from deltachain.format.documents import Document, Signature
from deltachain.format.signed import signed_bytes
from deltachain.redact import redacted_path

ALGORITHM: Final = "ed25519"
"""The only algorithm of version 1 of the format (RFC 8032)."""

KEY_ID_DIGITS: Final = 32
"""Length of a key id: the first digits of the public key's blake3."""

_PUBLIC: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{64}})")
_VALUE: Final = re.compile(r"[0-9a-f]{128}")
_FORM: Final = f"{ALGORITHM}: and 64 hexadecimal digits, as `deltachain keygen` prints them"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key, as text ``ed25519:`` and 64 hexadecimal digits.

    Attributes:
        raw: Its 32 bytes.
    """

    raw: bytes

    @classmethod
    def parse(cls, text: str) -> PublicKey:
        """Parse the text of a key.

        Raises:
            ConfigError: It is not the text of an ed25519 key.
        """
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

    def verifies(self, signature: Signature, signed: bytes) -> bool:
        """Return whether a signature of some bytes is this key's.

        Raises:
            ConfigError: The package ``cryptography`` is not installed.
        """
        if signature.algorithm != ALGORITHM or signature.key_id != self.key_id:
            return False
        if _VALUE.fullmatch(signature.value) is None:
            return False
        try:
            from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an extra
            from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        except ImportError as exc:
            raise _missing() from exc
        try:
            key = ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
            key.verify(bytes.fromhex(signature.value), signed)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key.

    Attributes:
        seed: Its 32 secret bytes.
        public: The public key.
    """

    seed: bytes = field(repr=False)
    public: PublicKey

    @classmethod
    def generate(cls) -> SigningKey:
        """Make a new key.

        Raises:
            ConfigError: The package ``cryptography`` is not installed.
        """
        return cls.of(os.urandom(32))

    @classmethod
    def of(cls, seed: bytes) -> SigningKey:
        """Return the key of a seed of 32 secret bytes.

        Raises:
            ConfigError: The package ``cryptography`` is not installed.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        except ImportError as exc:
            raise _missing() from exc
        key = ed25519.Ed25519PrivateKey.from_private_bytes(seed)
        return cls(seed, PublicKey(key.public_key().public_bytes_raw()))

    @classmethod
    def load(cls, file: Path) -> SigningKey:
        """Read a key from a PEM file (PKCS #8, not encrypted), as ``deltachain keygen`` writes it.

        Raises:
            ConfigError: The file cannot be read, or is not the file of an ed25519 key; or the
                package ``cryptography`` is not installed.
        """
        hint = "`deltachain keygen` writes such a file"
        try:
            from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
            from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
        except ImportError as exc:
            raise _missing() from exc
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
        """Return the content of a file that :meth:`load` reads."""
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

        return ed25519.Ed25519PrivateKey.from_private_bytes(self.seed).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def sign(self, kind: type[Document], chain: str, payload: bytes) -> Signature:
        """Sign a document of a chain; equal documents get equal signatures.

        Args:
            kind: Class of the document.
            chain: Id of the chain.
            payload: Exact bytes of the document, without its envelope.

        Raises:
            ConfigError: The id of the chain cannot be signed.
        """
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415

        try:
            signed = signed_bytes(kind, chain, payload)
        except ValueError as exc:
            raise ConfigError(f"chain {chain!r} cannot be signed: {exc}") from exc
        value = ed25519.Ed25519PrivateKey.from_private_bytes(self.seed).sign(signed)
        return Signature(key_id=self.public.key_id, algorithm=ALGORITHM, value=value.hex())


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """The public keys that a reader trusts; several while a new key replaces an old one.

    Attributes:
        keys: The keys, at least one.
    """

    keys: tuple[PublicKey, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise ConfigError("no trusted key is given", hint=f"expected {_FORM}")

    @classmethod
    def parse(cls, text: str) -> TrustedKeys:
        """Parse a list of keys with commas between them, or read a file with one key a line.

        In a file, empty lines, lines that begin with ``#``, and text after a key are ignored.

        Raises:
            ConfigError: The file cannot be read, or a key is not the text of an ed25519 key.
        """
        if text.lstrip().startswith(f"{ALGORITHM}:"):
            given = [part.strip() for part in text.split(",")]
        else:
            given = _lines(Path(text))
        return cls(tuple(dict.fromkeys(PublicKey.parse(key) for key in given)))

    def __str__(self) -> str:
        return ",".join(map(str, self.keys))

    def __or__(self, other: TrustedKeys) -> TrustedKeys:
        """Return the keys of both."""
        return TrustedKeys(tuple(dict.fromkeys((*self.keys, *other.keys))))

    def signers(
        self, signatures: Sequence[Signature], kind: type[Document], chain: str, payload: bytes
    ) -> tuple[str, ...]:
        """Return the ids of the trusted keys that signed a document.

        Of several signatures with one key id only the first counts, so that a document cannot cost
        more than one verification a key.

        Args:
            signatures: Signatures beside the document.
            kind: Class of the document.
            chain: Id of the chain.
            payload: Exact bytes of the document, without its envelope.
        """
        try:
            signed = signed_bytes(kind, chain, payload)
        except ValueError:
            return ()
        first = {one.key_id: one for one in reversed(signatures)}
        return tuple(
            key.key_id
            for key in self.keys
            if key.key_id in first and key.verifies(first[key.key_id], signed)
        )

    def why_not(self, signatures: Sequence[Signature]) -> str:
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
    """Return the keys in a file, one a line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or "it is no text"
        raise ConfigError(
            f"trusted keys in {redacted_path(file)}: {why}",
            hint=f"name a file with one key a line, or list the keys: {_FORM}",
        ) from exc
    return [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]


def _missing() -> ConfigError:
    """Build the error for a missing extra."""
    return ConfigError(
        "signatures need the package cryptography", hint="pip install 'deltachain[signing]'"
    )
