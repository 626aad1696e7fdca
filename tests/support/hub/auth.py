"""Authorization: user access tokens, CAS tokens, signed xorb URLs."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from pathlib import Path
from typing import Final, Literal, TypeAlias

Right: TypeAlias = Literal["read", "write"]

_BEARER: Final = "Bearer "


class AccessDenied(Exception):  # noqa: N818
    """The request is not authorized; ``status`` is 401 or 403."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def bearer(header: str | None) -> str:
    """Return the token of an Authorization header; empty without one."""
    return header.removeprefix(_BEARER) if header and header.startswith(_BEARER) else ""


def check_right(tokens: dict[str, str], header: str | None, right: Right) -> None:
    """Check that a user access token has a right.

    Raises:
        AccessDenied: The token is unknown, or lacks the right.
    """
    granted = tokens.get(bearer(header))
    if granted is None:
        raise AccessDenied(401, "Invalid credentials in Authorization header")
    if right == "write" and granted != "write":
        raise AccessDenied(403, "Forbidden: this token has no write access to this bucket")


class Signer:
    """Creates signed, stateless tokens that survive a restart until they expire."""

    def __init__(self, folder: Path) -> None:
        path = folder / "secret"
        if not path.exists():
            temporary = folder / "secret.tmp"
            temporary.write_bytes(secrets.token_bytes(32))
            temporary.replace(path)
        self._secret = path.read_bytes()

    def sign(self, subject: str, expires: int) -> str:
        """Sign a token for a subject without dots."""
        return f"{subject}.{expires}.{self._mac(subject, expires)}"

    def check(self, token: str) -> str:
        """Verify a token and return its subject.

        Raises:
            AccessDenied: The token has expired, or its signature is invalid.
        """
        subject, _, rest = token.partition(".")
        expires, _, mac = rest.partition(".")
        if not expires.isdigit() or not hmac.compare_digest(mac, self._mac(subject, int(expires))):
            raise AccessDenied(401, "the token was not made here")
        if int(expires) <= time.time():
            raise AccessDenied(401, "the token has expired")
        return subject

    def check_cas(self, header: str | None, right: Right) -> None:
        """Check that a CAS token has a right.

        Raises:
            AccessDenied: The token is invalid, has expired, or lacks the right.
        """
        granted = self.check(bearer(header))
        if granted not in ("xet-read", "xet-write"):
            raise AccessDenied(401, "the token is not for the CAS")
        if right == "write" and granted != "xet-write":
            raise AccessDenied(403, "the token may only read")

    def _mac(self, subject: str, expires: int) -> str:
        text = f"{subject}.{expires}".encode()
        return hmac.new(self._secret, text, hashlib.sha256).hexdigest()
